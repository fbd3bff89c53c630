"""A node's manager: arbiter if it is this node's turn, repairer, doorkeeper (TraCT's lock_manager).

Every node runs one. Those that are not the arbiter watch the nodes' counts of news, and take over
when the recorded arbiter and everybody with a better claim is dead. The arbiter grants locks;
between grants it looks for news. As soon as a node is dead, it grants none of TraCT's own locks,
waits until live holders have left, and repairs. Then it admits nodes that came back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_ops import PodMemory, local_load, node_id, pause, program
from cxlbench.tract.arbiter import LIVE, grant_round
from cxlbench.tract.layout import INTERNAL_LOCKS, Layout
from cxlbench.tract.membership import (
    ADMITTED,
    BACK,
    arbiter_in,
    has_best_claim,
    newest_incarnation,
    next_epoch,
    read_news,
    set_verdict,
    survey,
)
from cxlbench.tract.repair import is_quiet, is_unrepaired, repair
from cxlbench.tract.words import load_fresh

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

ROUNDS_BETWEEN_SURVEYS = 16
"""Rounds with grants after which the arbiter looks for news all the same."""


@program
def becomes_arbiter(mem: PodMemory, lay: Layout, standing: Words) -> bool:
    """Return whether this node is the arbiter now, taking over if it should."""
    me = node_id(mem)
    survey(mem, lay, standing)
    recorded = arbiter_in(load_fresh(mem, lay.epoch_at))
    if recorded == me and standing[me] == LIVE:
        return True
    if recorded < lay.nodes and standing[recorded] == LIVE:
        return False
    if not has_best_claim(lay, me, standing):
        return False
    next_epoch(mem, lay)
    return True


@program
def tend(mem: PodMemory, lay: Layout, standing: Words) -> int:
    """Look for dead and returning nodes; repair if all is quiet; admit.

    Returns how many nodes changed their standing, or -1 if dead nodes wait for repair.
    """
    survey(mem, lay, standing)
    dead = 0
    for node in range(lay.nodes):
        if is_unrepaired(int(standing[node])):
            dead += 1
    if dead > 0:
        if not is_quiet(mem, lay, standing):
            return -1
        repair(mem, lay, standing)
        survey(mem, lay, standing)
    changed = dead
    for node in range(lay.nodes):
        if standing[node] == BACK:
            set_verdict(mem, lay, node, newest_incarnation(mem, lay, node), ADMITTED)
            standing[node] = LIVE
            changed += 1
    return changed


@program
def manage(mem: PodMemory, lay: Layout) -> None:
    """Run this node's manager until the node's ``stop_word`` is set."""
    last = np.zeros(lay.locks, np.int64)
    standing = np.zeros(lay.nodes, np.int64)
    arbiter = False
    first = 0
    seen = -1
    rounds = 0
    while local_load(mem, lay.stop_word) == 0:
        if not arbiter:
            news = read_news(mem, lay)
            if news != seen:
                seen = news
                arbiter = becomes_arbiter(mem, lay, standing)
                first = INTERNAL_LOCKS
            else:
                pause(mem, lay.control_at, lay.slots_at - lay.control_at)
        else:
            granted = grant_round(mem, lay, last, standing, first)
            rounds += 1
            changed = 0
            scanned_from = first
            if granted == 0 or first > 0 or rounds % ROUNDS_BETWEEN_SURVEYS == 0:
                news = read_news(mem, lay)
                if news != seen or first > 0:
                    seen = news
                    changed = tend(mem, lay, standing)
                    first = INTERNAL_LOCKS if changed < 0 else 0
            if granted == 0 and changed <= 0 and first == scanned_from:
                pause(mem, lay.control_at, lay.roots_at - lay.control_at)
