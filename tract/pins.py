"""Pins: how many readers of a node use an entry's block, so that nobody evicts it under them.

The paper's reference count, split by node: an array of counts per node, indexed by entry, on lines
of the node's own, since two nodes cannot count in one word without atomics. Only the node's own
tasks write there, one at a time under its own lock.

The node invalidates its own counts too: recovery wrote to them while the node was away, and a line
may come into a cache unasked.

A pin is set under CACHE_LOCK, where evictors look; it is taken away at any time, which an evictor
sees late at worst. Recovery clears a dead node's pins.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import (
    WORD,
    PodMemory,
    local_lock,
    local_unlock,
    node_id,
    program,
)
from cxlbench.tract.layout import Layout
from cxlbench.tract.words import load_fresh, publish


@program
def pin_at(lay: Layout, node: int, slot: int) -> int:
    """Return the offset of the count that ``node`` keeps of entry ``slot``."""
    return lay.pins_at + node * lay.pins_bytes + slot * WORD


@program
def add_pin(mem: PodMemory, lay: Layout, slot: int, delta: int) -> None:
    """Add ``delta`` to this node's count of entry ``slot``, visibly."""
    at = pin_at(lay, node_id(mem), slot)
    local_lock(mem, lay.own_lock)
    publish(mem, at, load_fresh(mem, at) + delta)
    local_unlock(mem, lay.own_lock)


@program
def is_pinned(mem: PodMemory, lay: Layout, slot: int) -> bool:
    """Return whether any node pins entry ``slot``; exact under CACHE_LOCK but for late unpins."""
    pins = 0
    for node in range(lay.nodes):
        pins += load_fresh(mem, pin_at(lay, node, slot))
    return pins != 0
