"""Who takes part in the pod: incarnations, obituaries, verdicts, and who is the arbiter.

The paper has one lock manager and says nothing of its death. Here every node can be the manager,
and the facts about nodes stand in shared memory, each line with one writer:

* the **epoch** word (written by the arbiter): epoch and the arbiter's number;
* a node's **control** line (written by that node): a count of its news, its incarnation, and
  *obituaries*: per node, which incarnation it declares dead;
* a node's **verdict** line (written by the arbiter): the incarnation that takes part, or that is
  gone and repaired.

An obituary is written only after the node was fenced: from then on nothing of it lands, its stores
carry no token that would keep a zombie out. A node that starts again is its predecessor's obituary.

Who succeeds: the recorded arbiter is dead, and all nodes with a better claim are dead too. LIVE
nodes have a better claim than returning ones, lower numbers than higher ones. Whoever acts on a
death acts after the fence, so two nodes that know different things cannot both go on.

Left out: detecting that a node is dead, and the fence itself. Both belong to the host (see the
pod's executors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import (
    LINE,
    WORD,
    PodMemory,
    clflush,
    load,
    local_lock,
    local_unlock,
    node_id,
    pause,
    program,
)
from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.layout import Layout
from cxlbench.tract.words import load_fresh, publish

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

# The standing of a node, beside LIVE.
DEAD = 1
"""Declared dead; what it left behind is not repaired yet."""
BACK_UNREPAIRED = 2
"""A new incarnation waits; what the old one left behind is not repaired yet."""
GONE = 3
"""Dead and repaired."""
BACK = 4
"""A new incarnation waits to be admitted."""

ADMITTED = 0
REPAIRED = 1
_STATE_BITS = 8
MOST_INCARNATIONS = (1 << 54) - 1
"""As many incarnations, and epochs, as a word can tell beside a state."""

# Words of a control line (lines, if there are many nodes).
NEWS = 0
INCARNATION = WORD
OBITUARIES = 2 * WORD


@program
def epoch_of(word: int) -> int:
    """Return the epoch in an epoch word."""
    return word >> _STATE_BITS


@program
def arbiter_in(word: int) -> int:
    """Return the arbiter's number in an epoch word."""
    return word & ((1 << _STATE_BITS) - 1)


@program
def state_in(word: int) -> int:
    """Return the state in a verdict."""
    return word & ((1 << _STATE_BITS) - 1)


@program
def read_epoch(mem: PodMemory, lay: Layout) -> int:
    """Return the region's epoch; it cannot change while one of TraCT's own locks is held."""
    return epoch_of(load_fresh(mem, lay.epoch_at))


@program
def next_epoch(mem: PodMemory, lay: Layout) -> None:
    """Begin a new epoch with this node as arbiter."""
    epoch = (read_epoch(mem, lay) + 1) & MOST_INCARNATIONS
    publish(mem, lay.epoch_at, epoch << _STATE_BITS | node_id(mem))


@program
def control_of(lay: Layout, node: int) -> int:
    """Return the offset of the control line of ``node``."""
    return lay.control_at + node * lay.control_bytes


@program
def obituary_of(lay: Layout, node: int, other: int) -> int:
    """Return the offset of what ``node`` says of ``other``: the dead incarnation plus one."""
    return control_of(lay, node) + OBITUARIES + other * WORD


@program
def read_news(mem: PodMemory, lay: Layout) -> int:
    """Return how many announcements and obituaries there have been: it only grows."""
    news = 0
    for node in range(lay.nodes):
        news += load_fresh(mem, control_of(lay, node) + NEWS)
    return news


@program
def tell(mem: PodMemory, lay: Layout) -> None:
    """Count one more piece of news of this node, which is written already. Needs ``own_lock``."""
    at = control_of(lay, node_id(mem)) + NEWS
    publish(mem, at, load_fresh(mem, at) + 1)


@program
def verdict_of(lay: Layout, node: int) -> int:
    """Return the offset of the verdict on ``node``."""
    return lay.verdicts_at + node * LINE


@program
def set_verdict(mem: PodMemory, lay: Layout, node: int, incarnation: int, state: int) -> None:
    """Say that this incarnation of ``node`` is ADMITTED or REPAIRED. Arbiter only."""
    publish(mem, verdict_of(lay, node), incarnation << _STATE_BITS | state)


@program
def newest_incarnation(mem: PodMemory, lay: Layout, node: int) -> int:
    """Return the highest incarnation of ``node`` that reached shared memory."""
    admitted = load_fresh(mem, verdict_of(lay, node)) >> _STATE_BITS
    announced = load_fresh(mem, control_of(lay, node) + INCARNATION)
    return max(admitted, announced)


@program
def report_dead(mem: PodMemory, lay: Layout, node: int) -> int:
    """Write this node's obituary of ``node``, which has been fenced; return the incarnation."""
    local_lock(mem, lay.own_lock)
    incarnation = newest_incarnation(mem, lay, node)
    at = obituary_of(lay, node_id(mem), node)
    if load(mem, at) != incarnation + 1:
        publish(mem, at, incarnation + 1)
        tell(mem, lay)
    local_unlock(mem, lay.own_lock)
    return incarnation


@program
def survey(mem: PodMemory, lay: Layout, standing: Words) -> None:
    """Fill ``standing`` (a word per node) from verdicts, incarnations and obituaries."""
    for node in range(lay.nodes):
        verdict = load_fresh(mem, verdict_of(lay, node))
        judged = verdict >> _STATE_BITS
        repaired = state_in(verdict) == REPAIRED
        announced = max(judged, load_fresh(mem, control_of(lay, node) + INCARNATION))
        dead = False
        for other in range(lay.nodes):
            at = obituary_of(lay, other, node)
            clflush(mem, at)
            if load(mem, at) == announced + 1:
                dead = True
        if announced > judged and not dead:
            standing[node] = BACK if repaired else BACK_UNREPAIRED
        elif repaired:
            standing[node] = GONE
        elif dead or announced > judged:
            standing[node] = DEAD
        else:
            standing[node] = LIVE


@program
def has_best_claim(lay: Layout, me: int, standing: Words) -> bool:
    """Return whether no living node has a better claim to be arbiter than ``me``."""
    for node in range(lay.nodes):
        if node == me:
            continue
        if standing[node] == LIVE and (standing[me] != LIVE or node < me):
            return False
        returns = standing[node] == BACK or standing[node] == BACK_UNREPAIRED
        if returns and standing[me] != LIVE and node < me:
            return False
    return True


@program
def announce(mem: PodMemory, lay: Layout) -> int:
    """Write that a new incarnation of this node has started; return its number.

    The first thing that a restarted node does. It must not touch anything else before it is
    admitted.
    """
    node = node_id(mem)
    local_lock(mem, lay.own_lock)
    incarnation = newest_incarnation(mem, lay, node) + 1
    publish(mem, control_of(lay, node) + INCARNATION, incarnation)
    tell(mem, lay)
    local_unlock(mem, lay.own_lock)
    return incarnation


@program
def await_admission(mem: PodMemory, lay: Layout, incarnation: int) -> None:
    """Wait until the arbiter admits this incarnation, after it repaired the one before."""
    at = verdict_of(lay, node_id(mem))
    while load_fresh(mem, at) != incarnation << _STATE_BITS | ADMITTED:
        pause(mem, at, WORD)
