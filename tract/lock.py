"""The two-tier lock: mutual exclusion over memory without atomics between nodes (TraCT, § locks).

First tier: an ordinary lock in node-local DRAM, so that at most one process of a node contends.
Second tier: a *slot* per (lock, node) in shared memory, each on its own line::

    IDLE -> WAITING   by the node that wants the lock
    WAITING -> LOCKED by the arbiter, and nobody else (see ``arbiter``)
    LOCKED -> IDLE    by the holder

Every transition has one legal writer, so a stale read of a slot delays and never misleads, if each
poll invalidates before it loads. What must be kept:

* WAITING is stored once and never withdrawn: storing it again could overwrite a grant.
* What the lock protects is invalidated *after* acquire returned, and written back before release.
* IDLE is flushed, since nothing else pushes it out, and only then does the local lock open.

The memory behind a slot is the only word between nodes; there is no timeout, since a wait cannot be
withdrawn. A dead holder's slots are reset by recovery.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import (
    LINE,
    WORD,
    PodMemory,
    clflush,
    critical_enter,
    critical_leave,
    critical_want,
    load,
    local_lock,
    local_unlock,
    node_id,
    pause,
    program,
    store,
)
from cxlbench.tract.layout import Layout

IDLE = 0
WAITING = 1
LOCKED = 2


@program
def slot_of(lay: Layout, lock: int, node: int) -> int:
    """Return the offset of the slot of ``node`` for ``lock``."""
    return lay.slots_at + (lock * lay.nodes + node) * LINE


@program
def acquire(mem: PodMemory, lay: Layout, lock: int) -> None:
    """Wait for ``lock`` and take it; its data may be in this node's cache in any old version.

    Not re-entrant. Waiting is bounded by ``nodes - 1`` grants to other nodes once the node's own
    processes had their turns.
    """
    slot = slot_of(lay, lock, node_id(mem))
    local_lock(mem, lock)
    store(mem, slot, WAITING)
    clflush(mem, slot)
    critical_want(mem, lock)
    while load(mem, slot) != LOCKED:
        pause(mem, slot, WORD)
        clflush(mem, slot)
    critical_enter(mem, lock)


@program
def release(mem: PodMemory, lay: Layout, lock: int) -> None:
    """Give ``lock`` back; all that was stored under it must have been flushed before."""
    slot = slot_of(lay, lock, node_id(mem))
    critical_leave(mem, lock)
    store(mem, slot, IDLE)
    clflush(mem, slot)
    local_unlock(mem, lock)
