"""A node's cache that nothing keeps coherent, as compiled code over memory that processes share.

The memory model of the pod (the table of the design document) for live processes: loads and stores
work on the node's own copies of lines; copies reach device memory ``D`` as whole lines, by
``clflush`` at once or by a posted write-back that lands later. The setting is TraCT's: several
hosts on one CXL device without coherence in hardware.

``mem`` is a handle of the emulated executor (see pod_emulated): addresses as integers. Locks are
taken in this order and never the other way: a set of the cache, the node's queue of write-backs, a
line of ``D``. The last makes the transfer of 64 bytes one event for every node, as it is on a CXL
link; its holder has a journal of what it writes, so that a process killed in the middle leaves
nothing half done that another cannot finish.

A tag word is 0 for an empty way, else ``(line + 1) * 2 + dirty``. Masks have a bit for each word of
a line. Left out: what a program sees (pod_emulated), DMA (pod_dma).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np

from cxlbench.emu.flush_instructions import (
    compare_and_swap,
    cpu_pause,
    fetch_add,
    keep_apart,
    load_acquire,
    monotonic_ns,
    peek,
    poke,
    process_exists,
    sched_yield,
    store_release,
)
from cxlbench.emu.pod_layout import (
    ARRIVAL_UNIT_AT,
    BANDWIDTH_AT,
    CHARGED_UNTIL_AT,
    CLOCK_AT,
    COUNTERS_AT,
    EVICTIONS_AT,
    FILL_NS_AT,
    FILLS_AT,
    JOURNAL_AT,
    JOURNAL_DATA_AT,
    JOURNAL_MASK_AT,
    LAST_LINE_AT,
    LINE_LOCKS,
    LINE_PS_AT,
    LOCKS_AT,
    LONGEST_AT,
    LOOKED_AT,
    NEVER,
    NEXT_DUE_AT,
    NEXT_LOOK_AT,
    OPERATIONS_AT,
    POSTED_BYTES,
    POSTED_DATA_AT,
    POSTED_DUE_AT,
    POSTED_LINE_AT,
    POSTED_MASK_AT,
    POSTED_STATE_AT,
    PROCESS_BYTES,
    PROCESS_ID_AT,
    PROCESSES_AT,
    QUEUE_HEAD_AT,
    QUEUE_LOCK_AT,
    QUEUE_TAIL_AT,
    RANDOM_AT,
    REPORTED_AT,
    RESCUE_AT,
    RESCUING,
    SET_HAND_AT,
    SET_IN_FLIGHT_AT,
    SET_LOCK_AT,
    SET_TAGS_AT,
    SETTINGS_AT,
    SHORTEST_AT,
)
from cxlbench.emu.pod_local import take_lock

WHOLE = 255
"""The mask of a whole line."""
LOOK_EVERY = 16
"""A process looks at due write-backs and at the adversary at least once in so many operations."""
YIELDS_BEFORE_DOUBT = 64
"""How long a waiter for a line of ``D`` trusts that the holder is alive."""
MILLION = 1_000_000

UNIT_OPERATIONS = 0
UNIT_NS = 1

COUNT_FILLS = COUNTERS_AT
COUNT_WRITE_BACKS = COUNTERS_AT + 8
COUNT_POSTED = COUNTERS_AT + 16
COUNT_EVICTIONS = COUNTERS_AT + 24
COUNT_DISTURBED = COUNTERS_AT + 32
COUNT_RESCUED = COUNTERS_AT + 40
COUNTER_NAMES = ("fills", "write_backs", "posted", "evictions", "disturbed", "rescued")

F = TypeVar("F", bound="Callable[..., Any]")


class EmulatedFields(NamedTuple):
    """A node as one of its processes reaches it: addresses of that process, sizes, numbers."""

    region: int
    region_bytes: int
    control: int
    node_at: int
    """The node's mapping."""
    slot: int
    """This process's slot in it."""
    queue: int
    posted_mask: int
    cache: int
    set_mask: int
    set_bytes: int
    set_header_bytes: int
    ways: int
    locks: int
    locks_n: int
    words: int
    words_n: int
    dma: int
    """This process's table of DMA in flight, in its own memory."""
    node: int
    token: int


def kernel(function: F) -> F:
    """Compile for use by other compiled code only: without the wrappers that Python needs."""
    njit: Any = numba.njit
    compile_it: Callable[[F], F] = njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
    return compile_it(function)


@kernel
def count(mem: EmulatedFields, counter: int) -> None:
    """Add one to a counter of this process."""
    poke(mem.slot + counter, peek(mem.slot + counter) + 1)


@kernel
def draw(mem: EmulatedFields, below: int) -> int:
    """Return a number in ``[0, below)`` from this process's generator (xorshift, 64 bits)."""
    word = np.uint64(peek(mem.slot + RANDOM_AT))
    word ^= word << np.uint64(13)
    word ^= word >> np.uint64(7)
    word ^= word << np.uint64(17)
    poke(mem.slot + RANDOM_AT, np.int64(word))
    return int(np.int64(word >> np.uint64(2))) % below


@kernel
def copy_line(source: int, target: int) -> None:
    """Copy eight words."""
    for at in range(0, 64, 8):
        poke(target + at, peek(source + at))


@kernel
def copy_masked(source: int, target: int, mask: int) -> None:
    """Copy the words that ``mask`` names."""
    for word in range(8):
        if mask >> word & 1:
            poke(target + 8 * word, peek(source + 8 * word))


# Lines of device memory: one transfer is one event


@kernel
def _entry(mem: EmulatedFields, token: int) -> int:
    return mem.control + PROCESSES_AT + (token - 1) * PROCESS_BYTES


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
def is_dead(mem: EmulatedFields, holder: int) -> bool:
    """Whether the process whose token is in a lock exists no more."""
    keep_apart()
    number = peek(_entry(mem, holder & (RESCUING - 1)) + PROCESS_ID_AT)
    return bool(number == 0 or process_exists(number) == 0)


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
def write_line(mem: EmulatedFields, line: int, mask: int, source: int) -> None:
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
    book(mem, 0)


# What the device charges


@kernel
def book(mem: EmulatedFields, latency_ns: int) -> None:
    """Book one line on the pipe of the device; note until when this operation has to wait."""
    keep_apart()
    settings = mem.control + SETTINGS_AT
    line_ps = peek(settings + LINE_PS_AT)
    if line_ps == 0 and latency_ns == 0:
        return
    now_ps = monotonic_ns() * 1000
    end = now_ps
    if line_ps:
        pipe = mem.control + BANDWIDTH_AT
        free = peek(pipe)
        while True:
            end = max(now_ps, free) + line_ps
            seen = compare_and_swap(pipe, free, end)
            if seen == free:
                break
            free = seen
    until = end // 1000 + latency_ns
    if latency_ns and until > peek(mem.slot + CHARGED_UNTIL_AT):
        poke(mem.slot + CHARGED_UNTIL_AT, until)


@kernel
def wait_charged(mem: EmulatedFields) -> None:
    """Wait, without any lock, until what this operation was charged has passed."""
    keep_apart()
    until = peek(mem.slot + CHARGED_UNTIL_AT)
    if until:
        poke(mem.slot + CHARGED_UNTIL_AT, 0)
        while monotonic_ns() < until:
            cpu_pause()


# Sets of the cache


@kernel
def lock_set(mem: EmulatedFields, line: int) -> int:
    """Take the lock of the set that ``line`` belongs to; return the set's address."""
    at = mem.cache + (line & mem.set_mask) * mem.set_bytes
    if compare_and_swap(at + SET_LOCK_AT, 0, mem.token) != 0:
        take_lock(at + SET_LOCK_AT, mem.token)
    return at


@kernel
def unlock_set(at: int) -> None:
    """Give the set back."""
    store_release(at + SET_LOCK_AT, 0)


@kernel
def find(mem: EmulatedFields, at: int, line: int) -> int:
    """Return the way of the set that holds ``line``, or -1."""
    for way in range(mem.ways):
        if peek(at + SET_TAGS_AT + 8 * way) >> 1 == line + 1:
            return way
    return -1


@kernel
def tag_at(at: int, way: int) -> int:
    """Return the address of a way's tag."""
    return at + SET_TAGS_AT + 8 * way


@kernel
def data_at(mem: EmulatedFields, at: int, way: int) -> int:
    """Return the address of a way's line."""
    return at + mem.set_header_bytes + 64 * way


@kernel
def give_up(mem: EmulatedFields, at: int, way: int) -> None:
    """Drop the line of a way; if it is dirty, post its write-back. Needs the set's lock."""
    tag = peek(tag_at(at, way))
    if tag & 1:
        post(mem, at, (tag >> 1) - 1, WHOLE, data_at(mem, at, way))
    poke(tag_at(at, way), 0)


@kernel
def fill(mem: EmulatedFields, at: int, line: int) -> int:
    """Bring ``line`` into its set, clean; return its way. Needs the set's lock; it is not there."""
    keep_apart()
    way = find(mem, at, -1)
    if way < 0:
        way = peek(at + SET_HAND_AT)
        poke(at + SET_HAND_AT, way + 1 if way + 1 < mem.ways else 0)
        give_up(mem, at, way)
        count(mem, COUNT_EVICTIONS)
    view_line(mem, at, line, data_at(mem, at, way))
    poke(tag_at(at, way), (line + 1) << 1)
    count(mem, COUNT_FILLS)
    return way


@kernel
def view_line(mem: EmulatedFields, at: int, line: int, target: int) -> None:
    """Copy ``D``'s line to ``target``, overlaid with what this node has in flight of it."""
    keep_apart()
    if load_acquire(at + SET_IN_FLIGHT_AT) == 0:
        read_line(mem, line, target)
    else:
        lock_queue(mem)
        read_line(mem, line, target)
        for number in range(peek(mem.node_at + QUEUE_HEAD_AT), peek(mem.node_at + QUEUE_TAIL_AT)):
            entry = posted_at(mem, number)
            if peek(entry + POSTED_STATE_AT) and peek(entry + POSTED_LINE_AT) == line:
                copy_masked(entry + POSTED_DATA_AT, target, peek(entry + POSTED_MASK_AT))
        unlock_queue(mem)
    book(mem, peek(mem.control + SETTINGS_AT + FILL_NS_AT))


@kernel
def flush_line(mem: EmulatedFields, at: int, line: int) -> None:
    """Land what is in flight of ``line``, then its dirty copy; drop the copy. Needs the lock."""
    keep_apart()
    if load_acquire(at + SET_IN_FLIGHT_AT):
        drain(mem, line)
    way = find(mem, at, line)
    if way >= 0:
        if peek(tag_at(at, way)) & 1:
            write_line(mem, line, WHOLE, data_at(mem, at, way))
        poke(tag_at(at, way), 0)


# Posted write-backs


@kernel
def lock_queue(mem: EmulatedFields) -> None:
    """Take the lock of this node's queue of write-backs."""
    take_lock(mem.node_at + QUEUE_LOCK_AT, mem.token)


@kernel
def unlock_queue(mem: EmulatedFields) -> None:
    """Give the queue back."""
    store_release(mem.node_at + QUEUE_LOCK_AT, 0)


@kernel
def posted_at(mem: EmulatedFields, number: int) -> int:
    """Return the address of the write-back that was posted as the ``number``-th of this node."""
    return mem.queue + (number & mem.posted_mask) * POSTED_BYTES


@kernel
def node_time(mem: EmulatedFields) -> int:
    """Return the time in the unit of the arrival law, bringing the node's clock up to date."""
    operations = peek(mem.slot + OPERATIONS_AT)
    gone = operations - peek(mem.slot + REPORTED_AT)
    poke(mem.slot + REPORTED_AT, operations)
    clock = fetch_add(mem.node_at + CLOCK_AT, gone) + gone
    unit = peek(mem.control + SETTINGS_AT + ARRIVAL_UNIT_AT)
    return int(monotonic_ns() if unit == UNIT_NS else clock)


@kernel
def draw_due(mem: EmulatedFields, time: int) -> int:
    """Return when a write-back posted at ``time`` lands."""
    settings = mem.control + SETTINGS_AT
    if peek(settings + ARRIVAL_UNIT_AT) > UNIT_NS:
        return NEVER
    least = np.log(peek(settings + SHORTEST_AT) + 1.0)
    most = np.log(peek(settings + LONGEST_AT) + 1.0)
    part = draw(mem, 1 << 40) / (1 << 40)
    return time + int(np.floor(np.exp(least + (most - least) * part) - 1.0 + 1e-6))


@kernel
def post(mem: EmulatedFields, at: int, line: int, mask: int, source: int) -> None:
    """Queue the write-back of a line, or of the words in ``mask``. Needs the set's lock."""
    keep_apart()
    lock_queue(mem)
    head = peek(mem.node_at + QUEUE_HEAD_AT)
    tail = peek(mem.node_at + QUEUE_TAIL_AT)
    if tail - head > mem.posted_mask:
        land(mem, posted_at(mem, head))
        move_head(mem)
        head = peek(mem.node_at + QUEUE_HEAD_AT)
    time = node_time(mem)
    due = draw_due(mem, time)
    if peek(at + SET_IN_FLIGHT_AT):
        for number in range(head, tail):
            entry = posted_at(mem, number)
            if peek(entry + POSTED_STATE_AT) and peek(entry + POSTED_LINE_AT) == line:
                due = max(due, peek(entry + POSTED_DUE_AT))
    entry = posted_at(mem, tail)
    poke(entry + POSTED_LINE_AT, line)
    poke(entry + POSTED_MASK_AT, mask)
    poke(entry + POSTED_DUE_AT, due)
    copy_masked(source, entry + POSTED_DATA_AT, mask)
    fetch_add(at + SET_IN_FLIGHT_AT, 1)
    poke(mem.node_at + QUEUE_TAIL_AT, tail + 1)
    store_release(entry + POSTED_STATE_AT, tail + 1)
    if due < peek(mem.node_at + NEXT_DUE_AT):
        poke(mem.node_at + NEXT_DUE_AT, due)
    unlock_queue(mem)
    count(mem, COUNT_POSTED)
    look_by = peek(mem.slot + OPERATIONS_AT) + max(due - time, 0) + 1
    if look_by < peek(mem.slot + NEXT_LOOK_AT):
        poke(mem.slot + NEXT_LOOK_AT, look_by)


@kernel
def land(mem: EmulatedFields, entry: int) -> None:
    """Bring a posted write-back to ``D``. Needs the queue's lock.

    It is marked as landed first: one that a killed process had begun never lands a second time.
    """
    line = peek(entry + POSTED_LINE_AT)
    store_release(entry + POSTED_STATE_AT, 0)
    write_line(mem, line, peek(entry + POSTED_MASK_AT), entry + POSTED_DATA_AT)
    fetch_add(mem.cache + (line & mem.set_mask) * mem.set_bytes + SET_IN_FLIGHT_AT, -1)


@kernel
def move_head(mem: EmulatedFields) -> None:
    """Let the queue begin at the oldest write-back that has not landed. Needs its lock."""
    head = peek(mem.node_at + QUEUE_HEAD_AT)
    tail = peek(mem.node_at + QUEUE_TAIL_AT)
    while head < tail and peek(posted_at(mem, head) + POSTED_STATE_AT) == 0:
        head += 1
    poke(mem.node_at + QUEUE_HEAD_AT, head)


@kernel
def drain(mem: EmulatedFields, line: int) -> None:
    """Land what is in flight of ``line``, in posting order."""
    keep_apart()
    lock_queue(mem)
    for number in range(peek(mem.node_at + QUEUE_HEAD_AT), peek(mem.node_at + QUEUE_TAIL_AT)):
        entry = posted_at(mem, number)
        if peek(entry + POSTED_STATE_AT) and peek(entry + POSTED_LINE_AT) == line:
            land(mem, entry)
    move_head(mem)
    unlock_queue(mem)


@kernel
def land_due(mem: EmulatedFields, time: int) -> None:
    """Land every write-back of this node that is due at ``time``, in posting order."""
    keep_apart()
    lock_queue(mem)
    least = NEVER
    for number in range(peek(mem.node_at + QUEUE_HEAD_AT), peek(mem.node_at + QUEUE_TAIL_AT)):
        entry = posted_at(mem, number)
        if peek(entry + POSTED_STATE_AT):
            due = peek(entry + POSTED_DUE_AT)
            if due <= time:
                land(mem, entry)
            else:
                least = min(least, due)
    move_head(mem)
    poke(mem.node_at + NEXT_DUE_AT, least)
    unlock_queue(mem)


# What happens beside the operations


@kernel
def look(mem: EmulatedFields) -> None:
    """Land what is due, let the adversary strike, and say when to look again."""
    keep_apart()
    elapsed = peek(mem.slot + OPERATIONS_AT) - peek(mem.slot + LOOKED_AT)
    poke(mem.slot + LOOKED_AT, peek(mem.slot + OPERATIONS_AT))
    time = node_time(mem)
    due = peek(mem.node_at + NEXT_DUE_AT)
    if due <= time:
        land_due(mem, time)
        due = peek(mem.node_at + NEXT_DUE_AT)
    settings = mem.control + SETTINGS_AT
    evictions = peek(settings + EVICTIONS_AT)
    fills = peek(settings + FILLS_AT)
    if evictions:
        for _ in range((elapsed * evictions + draw(mem, MILLION)) // MILLION):
            disturb_by_eviction(mem)
    if fills:
        for _ in range((elapsed * fills + draw(mem, MILLION)) // MILLION):
            disturb_by_fill(mem)
    interval = LOOK_EVERY
    if peek(settings + ARRIVAL_UNIT_AT) == UNIT_OPERATIONS:
        interval = min(interval, max(due - time, 1))
    most = max(evictions, fills)
    if most:
        interval = min(interval, max(MILLION // most, 1))
    poke(mem.slot + NEXT_LOOK_AT, peek(mem.slot + OPERATIONS_AT) + interval)


@kernel
def _disturbed_line(mem: EmulatedFields) -> int:
    lines = mem.region_bytes >> 6
    if draw(mem, 2):
        return draw(mem, lines)
    near = peek(mem.slot + LAST_LINE_AT) + draw(mem, 5) - 2
    return int(min(max(near, 0), lines - 1))


@kernel
def disturb_by_eviction(mem: EmulatedFields) -> None:
    """Evict a line of this node, if the set that was drawn holds any."""
    keep_apart()
    line = _disturbed_line(mem)
    at = lock_set(mem, line)
    way = find(mem, at, line)
    if way < 0:
        way = draw(mem, mem.ways)
    if peek(tag_at(at, way)):
        give_up(mem, at, way)
        count(mem, COUNT_DISTURBED)
    unlock_set(at)


@kernel
def disturb_by_fill(mem: EmulatedFields) -> None:
    """Bring a line in that nobody asked for."""
    keep_apart()
    line = _disturbed_line(mem)
    at = lock_set(mem, line)
    if find(mem, at, line) < 0:
        fill(mem, at, line)
        poke(mem.slot + CHARGED_UNTIL_AT, 0)
        count(mem, COUNT_DISTURBED)
    unlock_set(at)


@kernel
def tick(mem: EmulatedFields) -> None:
    """Count one operation of this process, and look about if it is time."""
    operations = peek(mem.slot + OPERATIONS_AT) + 1
    poke(mem.slot + OPERATIONS_AT, operations)
    if operations >= peek(mem.slot + NEXT_LOOK_AT):
        look(mem)
