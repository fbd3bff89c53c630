"""The arbiter: one lock manager for the pod, which grants and never holds (TraCT, § locks).

It scans a lock's slots in two passes. The first asks whether any slot reads LOCKED; if so, nobody
is granted anything. The second, in which nobody can be inside since only the arbiter grants, takes
the first WAITING slot after the node granted last. Thus:

* Two holders cannot be: LOCKED leaves a slot by its holder's hand only.
* It need not *see* IDLE: a node may go LOCKED, IDLE, WAITING between two scans and still be served.
* A waiting node is overtaken at most ``nodes - 1`` times: every other node at most once before the
  turn comes round, and one pass could let a node pass twice that entered while it was scanned.

What it remembers (``last``) is in its own memory: a successor begins anywhere. Nodes that are not
LIVE are granted nothing (see ``membership``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import PodMemory, clflush, load, program, store
from cxlbench.tract.codes import BUSY, NOBODY
from cxlbench.tract.layout import Layout
from cxlbench.tract.lock import LOCKED, WAITING, slot_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

LIVE = 0
"""The standing of a node that takes part; ``membership`` has the others."""


@program
def find_waiter(mem: PodMemory, lay: Layout, lock: int, last: int, standing: Words) -> int:
    """Return who is next for ``lock`` after node ``last``, ``BUSY`` if it is held, or ``NOBODY``.

    ``standing`` has a word per node; only LIVE nodes are served.
    """
    waiting = 0
    for node in range(lay.nodes):
        slot = slot_of(lay, lock, node)
        clflush(mem, slot)
        state = load(mem, slot)
        if state == LOCKED:
            return BUSY
        if state == WAITING:
            waiting += 1
    if waiting == 0:
        return NOBODY
    for step in range(1, lay.nodes + 1):
        node = (last + step) % lay.nodes
        slot = slot_of(lay, lock, node)
        clflush(mem, slot)
        if load(mem, slot) == WAITING and standing[node] == LIVE:
            return node
    return NOBODY


@program
def grant(mem: PodMemory, lay: Layout, lock: int, node: int) -> None:
    """Let ``node``, which waits, hold ``lock``."""
    slot = slot_of(lay, lock, node)
    store(mem, slot, LOCKED)
    clflush(mem, slot)


@program
def grant_round(mem: PodMemory, lay: Layout, last: Words, standing: Words, first: int) -> int:
    """Scan locks from number ``first`` on once; grant where possible; return how many grants.

    ``last`` has a word per lock: the node granted last.
    """
    granted = 0
    for lock in range(first, lay.locks):
        node = find_waiter(mem, lay, lock, int(last[lock]), standing)
        if node >= 0:
            grant(mem, lay, lock, node)
            last[lock] = node
            granted += 1
    return granted
