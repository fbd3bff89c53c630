"""Eviction: the oldest entry that no node pins makes room (TraCT, § eviction).

All under CACHE_LOCK. The tombstone comes first: it is what others see and what recovery believes;
list, count and chunk follow. The chunk goes to whom it was evicted for, or into this node's heap,
so that no second lock is needed.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import PodMemory, load, local_lock, local_unlock, program
from cxlbench.tract.codes import NOBODY
from cxlbench.tract.heap import heap_count, heap_pop, heap_push
from cxlbench.tract.index import BLOCK, entry_at, mark_removed, tidy
from cxlbench.tract.layout import LIVE, Layout
from cxlbench.tract.lru import NONE, next_of, oldest, slot_of_link, unlink
from cxlbench.tract.pins import is_pinned
from cxlbench.tract.words import load_fresh, publish


@program
def count_live(mem: PodMemory, lay: Layout, delta: int) -> int:
    """Add ``delta`` to the number of live entries; return the sum. Needs CACHE_LOCK."""
    live = load_fresh(mem, lay.cache_at + LIVE) + delta
    if delta != 0:
        publish(mem, lay.cache_at + LIVE, live)
    return live


@program
def chunk_of(lay: Layout, block: int) -> int:
    """Return the number of the chunk at offset ``block``."""
    return (block - lay.pool_at) // lay.chunk_bytes


@program
def block_of(lay: Layout, chunk: int) -> int:
    """Return the offset of chunk number ``chunk``."""
    return lay.pool_at + chunk * lay.chunk_bytes


@program
def find_victim(mem: PodMemory, lay: Layout) -> int:
    """Return the list link of the oldest READY entry without pins, or ``NONE``."""
    link = oldest(mem, lay)
    while link != NONE:
        if not is_pinned(mem, lay, slot_of_link(lay, link)):
            return link
        link = next_of(mem, link)
    return NONE


@program
def remove_entry(mem: PodMemory, lay: Layout, slot: int, listed: bool) -> int:
    """Take a live, unpinned entry out of the index (and the list); return its chunk."""
    mark_removed(mem, lay, slot)
    block = load(mem, entry_at(lay, slot) + BLOCK)
    if listed:
        unlink(mem, lay, slot)
    count_live(mem, lay, -1)
    tidy(mem, lay, slot)
    return chunk_of(lay, block)


@program
def evict_chunk(mem: PodMemory, lay: Layout) -> int:
    """Evict the oldest unpinned entry; return its chunk, now the caller's, or ``NOBODY``."""
    link = find_victim(mem, lay)
    if link == NONE:
        return NOBODY
    return remove_entry(mem, lay, slot_of_link(lay, link), True)


@program
def evict_one(mem: PodMemory, lay: Layout, epoch: int) -> bool:
    """Evict the oldest unpinned entry into this node's heap; False if none, or no room there."""
    local_lock(mem, lay.heap_lock)
    evicted = False
    if heap_count(mem, epoch) < lay.heap_capacity:
        chunk = evict_chunk(mem, lay)
        if chunk != NOBODY:
            evicted = heap_push(mem, lay, epoch, chunk)
    local_unlock(mem, lay.heap_lock)
    return evicted


@program
def take_chunk(mem: PodMemory, lay: Layout, epoch: int) -> int:
    """Return a chunk from this node's heap, or ``NOBODY``; the caller holds CACHE_LOCK."""
    local_lock(mem, lay.heap_lock)
    chunk = heap_pop(mem, epoch)
    local_unlock(mem, lay.heap_lock)
    return chunk


@program
def put_chunk(mem: PodMemory, lay: Layout, epoch: int, chunk: int) -> bool:
    """Put a chunk into this node's heap; the caller holds CACHE_LOCK. False if it is full."""
    local_lock(mem, lay.heap_lock)
    fits = heap_push(mem, lay, epoch, chunk)
    local_unlock(mem, lay.heap_lock)
    return fits
