"""The LRU list: READY entries from the one used longest ago to the newest (TraCT, § eviction).

A doubly linked list in shared memory, under CACHE_LOCK. A node is two words, the links to the
previous and the next one; a link is the offset of the other node, 0 for none (offset 0 is the
header's and never a node's). Node ``i`` belongs to entry ``i``; head and tail are in the cache
line.

Every line is flushed before another one is stored to, so that a crash leaves the stores up to some
point and none after it. It can leave a torn list, which recovery rebuilds from the index: the list
adds order, no truth. The walk from the head is whole at any point.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import WORD, PodMemory, clflush, load, program, store
from cxlbench.tract.layout import HEAD, LRU_NODE, TAIL, Layout
from cxlbench.tract.words import load_fresh, publish

PREVIOUS = 0
NEXT = WORD
NONE = 0
"""The link that leads nowhere."""


@program
def link_of(lay: Layout, slot: int) -> int:
    """Return the offset of the list node of entry ``slot``."""
    return lay.lru_at + slot * LRU_NODE


@program
def slot_of_link(lay: Layout, link: int) -> int:
    """Return the entry whose list node lies at ``link``."""
    return (link - lay.lru_at) // LRU_NODE


@program
def oldest(mem: PodMemory, lay: Layout) -> int:
    """Return the link to the oldest entry, or ``NONE``."""
    return load_fresh(mem, lay.cache_at + HEAD)


@program
def next_of(mem: PodMemory, link: int) -> int:
    """Return the link to the entry after that at ``link``, or ``NONE``."""
    return load_fresh(mem, link + NEXT)


@program
def append(mem: PodMemory, lay: Layout, slot: int) -> None:
    """Put entry ``slot``, which is in no list, at the tail: it is the newest."""
    link = link_of(lay, slot)
    tail = load_fresh(mem, lay.cache_at + TAIL)
    clflush(mem, link)
    store(mem, link + PREVIOUS, tail)
    store(mem, link + NEXT, NONE)
    clflush(mem, link)
    if tail == NONE:
        store(mem, lay.cache_at + HEAD, link)
    else:
        clflush(mem, tail)
        publish(mem, tail + NEXT, link)
    publish(mem, lay.cache_at + TAIL, link)


@program
def unlink(mem: PodMemory, lay: Layout, slot: int) -> None:
    """Take entry ``slot`` out of the list."""
    link = link_of(lay, slot)
    clflush(mem, link)
    before = load(mem, link + PREVIOUS)
    after = load(mem, link + NEXT)
    forward = lay.cache_at + HEAD if before == NONE else before + NEXT
    backward = lay.cache_at + TAIL if after == NONE else after + PREVIOUS
    clflush(mem, forward)
    publish(mem, forward, after)
    clflush(mem, backward)
    publish(mem, backward, before)


@program
def touch(mem: PodMemory, lay: Layout, slot: int) -> None:
    """Make entry ``slot``, which is in the list, the newest."""
    if load_fresh(mem, lay.cache_at + TAIL) != link_of(lay, slot):
        unlink(mem, lay, slot)
        append(mem, lay, slot)
