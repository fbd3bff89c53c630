"""What a surviving node does about a dead one: the fence and the obituary.

suspect -> fence -> new epoch -> repair. Suspicion and the fence are the host's: an explored pod
offers them as choices, real pods by their process table. ``recover`` is what runs on a survivor
once a node is suspected; the repair itself is the arbiter's (``manager``), which may be another
node, and which a successor does again if the arbiter dies over it.

A region that nobody uses any more (all nodes stopped or died) is repaired by ``restart_region``:
every node counts as dead, and who restarts it is the next arbiter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cxlbench.emu.pod_ops import WORD, PodMemory, pause, program
from cxlbench.tract.fsck import FsckReport, fsck
from cxlbench.tract.layout import Layout
from cxlbench.tract.membership import (
    ADMITTED,
    DEAD,
    announce,
    await_admission,
    next_epoch,
    report_dead,
    verdict_of,
)
from cxlbench.tract.region import call, erase
from cxlbench.tract.repair import repair
from cxlbench.tract.words import load_fresh

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


class Fences(Protocol):
    """Who can see to it that nothing of a node lands any more: an explored pod, a host."""

    def fence(self, node: int) -> object:
        """Kill ``node`` if it lives; when this returns, nothing of it lands any more."""


@program
def await_repair(mem: PodMemory, lay: Layout, node: int, incarnation: int) -> None:
    """Wait until what that dead incarnation of ``node`` left behind is repaired."""
    at = verdict_of(lay, node)
    word = load_fresh(mem, at)
    while word & 255 == ADMITTED and word >> 8 <= incarnation:
        pause(mem, at, WORD)
        word = load_fresh(mem, at)


def recover(mem: PodMemory, dead: int, pod: Fences, lay: Layout) -> int:
    """Fence ``dead`` and tell everybody; return the incarnation that died.

    It does not wait: the arbiter may be dead too, and its own recovery come after this one. Whoever
    needs the repair to be over calls :func:`await_repair`.
    """
    pod.fence(dead)
    incarnation: int = call(report_dead, mem, lay, dead)
    return incarnation


@program
def rejoin(mem: PodMemory, lay: Layout) -> int:
    """Take part again after a restart of this node; return its incarnation.

    Announces itself and waits to be admitted; this node's manager may be started before, and must
    be if no other node is alive. Everything else of the node starts afterwards.
    """
    incarnation = announce(mem, lay)
    await_admission(mem, lay, incarnation)
    return incarnation


@program
def repair_all(mem: PodMemory, lay: Layout) -> None:
    """Repair a region whose nodes are all gone; then all take part anew, this one as the arbiter.

    Verdicts, incarnations and obituaries are as in a new region, whatever they were.
    """
    standing = np.full(lay.nodes, DEAD, np.int64)
    repair(mem, lay, standing)
    erase(mem, lay.verdicts_at, lay.slots_at)
    next_epoch(mem, lay)


def restart_region(mem: Any, lay: Layout) -> FsckReport:
    """Make a region usable that was left by all its nodes; return the check afterwards.

    Nobody else may use the region meanwhile.
    """
    call(repair_all, mem, lay)
    return fsck(mem, lay, in_heaps=0)
