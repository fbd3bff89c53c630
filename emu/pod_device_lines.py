"""Transfers of lines to and from device memory ``D``, each one event for every node.

On a CXL link 64 bytes move as one; between processes of a host they are eight stores. A lock makes
them one: 1,024 locks, chosen by the line's number. Its holder keeps a journal of what it writes, so
that whoever needs the line after the holder was killed finishes the transfer in its place (a fence
does so for all of a node's processes). Between fences, a process is dead when the host's kernel
knows no process of its id.

Each transfer is booked on the one pipe of the device, if the pod charges for that (DeviceCosts).
These locks are the innermost: nothing else is taken under them.
"""

from __future__ import annotations

from cxlbench.emu.flush_instructions import (
    compare_and_swap,
    cpu_pause,
    keep_apart,
    monotonic_ns,
    peek,
    poke,
    process_exists,
    sched_yield,
    store_release,
)
from cxlbench.emu.pod_kernel import (
    COUNT_RESCUED,
    COUNT_WRITE_BACKS,
    EmulatedFields,
    copy_line,
    copy_masked,
    count,
    kernel,
)
from cxlbench.emu.pod_layout import (
    BANDWIDTH_AT,
    BOOKED_UNTIL_AT,
    CHARGED_UNTIL_AT,
    JOURNAL_AT,
    JOURNAL_DATA_AT,
    JOURNAL_MASK_AT,
    LINE_LOCKS,
    LINE_PS_AT,
    LOCKS_AT,
    PROCESS_BYTES,
    PROCESS_ID_AT,
    PROCESSES_AT,
    RESCUE_AT,
    RESCUING,
    SETTINGS_AT,
)

YIELDS_BEFORE_DOUBT = 64
"""How long a waiter for a line of ``D`` trusts that the holder is alive."""
YIELD_ABOVE_NS = 20_000
"""What is longer than this is worth letting others run: a yield takes some microseconds."""


@kernel
def _entry(mem: EmulatedFields, token: int) -> int:
    return mem.control + PROCESSES_AT + (token - 1) * PROCESS_BYTES


@kernel
def is_dead(mem: EmulatedFields, holder: int) -> bool:
    """Whether the process whose token is in a lock exists no more."""
    keep_apart()
    number = peek(_entry(mem, holder & (RESCUING - 1)) + PROCESS_ID_AT)
    return bool(number == 0 or process_exists(number) == 0)


@kernel
def complete_for_the_dead(mem: EmulatedFields, lock: int, holder: int) -> bool:
    """Finish what the dead holder of ``lock`` was writing, and keep the lock; or someone else did.

    The dead process's journal is copied first, so that this may itself be killed at any point.
    """
    keep_apart()
    token = holder & (RESCUING - 1)
    theirs = _entry(mem, token) + (RESCUE_AT if holder & RESCUING else JOURNAL_AT)
    mine = _entry(mem, mem.token) + RESCUE_AT
    line = peek(theirs)
    mask = peek(theirs + JOURNAL_MASK_AT)
    poke(mine, line)
    copy_line(theirs + JOURNAL_DATA_AT, mine + JOURNAL_DATA_AT)
    store_release(mine + JOURNAL_MASK_AT, mask)
    if compare_and_swap(lock, holder, mem.token | RESCUING) != holder:
        return False
    copy_masked(mine + JOURNAL_DATA_AT, mem.region + 64 * line, mask)
    store_release(lock, mem.token)
    count(mem, COUNT_RESCUED)
    return True


@kernel
def lock_line(mem: EmulatedFields, line: int) -> int:
    """Take the lock of a line of ``D``, from the dead if need be; return its address."""
    lock = mem.control + LOCKS_AT + (line & (LINE_LOCKS - 1)) * 64
    waited = 0
    while True:
        holder = compare_and_swap(lock, 0, mem.token)
        if holder == 0:
            return lock
        waited += 1
        if waited & 15:
            cpu_pause()
            continue
        sched_yield()
        doubt = waited >= 16 * YIELDS_BEFORE_DOUBT and waited % (16 * YIELDS_BEFORE_DOUBT) == 0
        if doubt and is_dead(mem, holder) and complete_for_the_dead(mem, lock, holder):
            return lock


@kernel
def read_line(mem: EmulatedFields, line: int, target: int) -> None:
    """Copy a line of ``D`` to ``target``."""
    keep_apart()
    poke(_entry(mem, mem.token) + JOURNAL_AT + JOURNAL_MASK_AT, 0)
    lock = lock_line(mem, line)
    copy_line(mem.region + 64 * line, target)
    store_release(lock, 0)


@kernel
def put_line(mem: EmulatedFields, line: int, mask: int, source: int) -> None:
    """Write the words that ``mask`` names, from ``source`` (a line's image), to a line of ``D``."""
    keep_apart()
    journal = _entry(mem, mem.token) + JOURNAL_AT
    poke(journal, line)
    copy_masked(source, journal + JOURNAL_DATA_AT, mask)
    poke(journal + JOURNAL_MASK_AT, mask)
    lock = lock_line(mem, line)
    copy_masked(journal + JOURNAL_DATA_AT, mem.region + 64 * line, mask)
    store_release(lock, 0)
    count(mem, COUNT_WRITE_BACKS)


@kernel
def write_line(mem: EmulatedFields, line: int, mask: int, source: int) -> None:
    """Do as ``put_line``, and book the line on the device's pipe."""
    put_line(mem, line, mask, source)
    poke(mem.slot + BOOKED_UNTIL_AT, book(mem, 1))


@kernel
def book(mem: EmulatedFields, lines: int) -> int:
    """Book lines on the pipe of the device; return when they have passed, ns, or 0 if at once."""
    keep_apart()
    line_ps = peek(mem.control + SETTINGS_AT + LINE_PS_AT)
    if line_ps == 0 or lines == 0:
        return 0
    now_ps = monotonic_ns() * 1000
    pipe = mem.control + BANDWIDTH_AT
    free = peek(pipe)
    while True:
        end = max(now_ps, free) + lines * line_ps
        seen = compare_and_swap(pipe, free, end)
        if seen == free:
            return int(end // 1000)
        free = seen


@kernel
def charge(mem: EmulatedFields, since_ns: int, latency_ns: int) -> None:
    """Let the operation under way take until ``latency_ns`` after ``since_ns``, or after now."""
    if since_ns == 0 and latency_ns == 0:
        return
    until = max(since_ns, monotonic_ns()) + latency_ns
    if until > peek(mem.slot + CHARGED_UNTIL_AT):
        poke(mem.slot + CHARGED_UNTIL_AT, until)


@kernel
def wait_charged(mem: EmulatedFields) -> None:
    """Wait, without any lock, until what this operation was charged has passed."""
    until = peek(mem.slot + CHARGED_UNTIL_AT)
    if until:
        poke(mem.slot + CHARGED_UNTIL_AT, 0)
        wait_until(until)


@kernel
def wait_until(until_ns: int) -> None:
    """Return at a time of the host's clock; long before it, others may run."""
    keep_apart()
    while True:
        left = until_ns - monotonic_ns()
        if left <= 0:
            return
        if left > YIELD_ABOVE_NS:
            sched_yield()
        else:
            cpu_pause()
