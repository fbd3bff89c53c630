"""A node's cache that nothing keeps coherent, as compiled code over memory that processes share.

The memory model of the pod (the table of the design document) for live processes: loads and stores
work on the node's own copies of lines; copies reach device memory ``D`` as whole lines, by
``clflush`` at once or by a posted write-back that lands later. The setting is TraCT's: several
hosts on one CXL device without coherence in hardware.

Locks are taken in this order and never the other way: a set of the cache, the node's queue of
write-backs (pod_posted), a line of ``D`` (pod_device_lines). A tag word is 0 for an empty way, else
``(line + 1) * 2 + dirty``. Replacement is round-robin. Left out: what a program sees
(pod_emulated), DMA (pod_dma).
"""

from __future__ import annotations

from cxlbench.emu.flush_instructions import (
    compare_and_swap,
    keep_apart,
    load_acquire,
    peek,
    poke,
    store_release,
)
from cxlbench.emu.pod_device_lines import book, charge, read_line, write_line
from cxlbench.emu.pod_kernel import (
    COUNT_DISTURBED,
    COUNT_EVICTIONS,
    COUNT_FILLS,
    WHOLE,
    EmulatedFields,
    copy_masked,
    count,
    draw,
    kernel,
)
from cxlbench.emu.pod_layout import (
    ARRIVAL_UNIT_AT,
    CHARGED_UNTIL_AT,
    EVICTIONS_AT,
    FILL_NS_AT,
    FILLS_AT,
    LAST_LINE_AT,
    LOOKED_AT,
    NEXT_DUE_AT,
    NEXT_LOOK_AT,
    OPERATIONS_AT,
    POSTED_DATA_AT,
    POSTED_LINE_AT,
    POSTED_MASK_AT,
    POSTED_STATE_AT,
    QUEUE_HEAD_AT,
    QUEUE_TAIL_AT,
    SET_HAND_AT,
    SET_IN_FLIGHT_AT,
    SET_LOCK_AT,
    SET_TAGS_AT,
    SETTINGS_AT,
)
from cxlbench.emu.pod_local import take_lock
from cxlbench.emu.pod_posted import (
    UNIT_OPERATIONS,
    drain,
    land_due,
    lock_queue,
    node_time,
    post,
    posted_at,
    unlock_queue,
)

LOOK_EVERY = 16
"""A process looks at due write-backs and at the adversary at least once in so many operations."""
MILLION = 1_000_000


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
    charge(mem, book(mem, 1), peek(mem.control + SETTINGS_AT + FILL_NS_AT))
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
