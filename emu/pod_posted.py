"""Write-backs in flight: posted by a node, landing in device memory at some later time.

What ``clflushopt``, ``clwb``, ``ntstore`` and evictions cause is queued in the node's mapping with
the time at which it lands, drawn log-uniformly by the arrival law, in operations of the node or in
ns. Write-backs of one line land in posting order; others in any order. Nothing runs in the
background: a process of the node lands what is due when it looks (pod_cache_kernels).

The queue is a ring in posting order; entries land out of order and leave holes until the oldest has
landed. When it is full the oldest lands. The queue's lock is taken under a set's, never before it.
"""

from __future__ import annotations

import numpy as np

from cxlbench.emu.flush_instructions import (
    fetch_add,
    keep_apart,
    monotonic_ns,
    peek,
    poke,
    store_release,
)
from cxlbench.emu.pod_device_lines import write_line
from cxlbench.emu.pod_kernel import COUNT_POSTED, EmulatedFields, copy_masked, count, draw, kernel
from cxlbench.emu.pod_layout import (
    ARRIVAL_UNIT_AT,
    CLOCK_AT,
    LONGEST_AT,
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
    QUEUE_HEAD_AT,
    QUEUE_LOCK_AT,
    QUEUE_TAIL_AT,
    REPORTED_AT,
    SET_IN_FLIGHT_AT,
    SETTINGS_AT,
    SHORTEST_AT,
)
from cxlbench.emu.pod_local import take_lock

UNIT_OPERATIONS = 0
UNIT_NS = 1


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
