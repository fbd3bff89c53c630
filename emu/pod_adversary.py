"""The adversary: what memory does to a program whenever it likes.

It may, at any step: evict a line (a cache may drop any line at any time, and writes a dirty one
back whole), fill a line that nobody asked for (prefetchers and speculation do), let a posted
write-back or a line of a DMA land sooner or later, kill a node, and suspect one that lives. A
program must survive all of it because the memory model promises no more.

How strong it is is drawn for each run, zero included: evictions repair missing flushes, so a
missing one shows best in runs without evictions; and a posted write-back hurts only if it stays
out long enough for others to act, so delays are log-uniform, up to 16, 256 or 2,048 steps. A death
matters most in the middle of something: it may wait for a store that is not flushed, and some of
what is dirty then may have been evicted just before.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice

EVICT_EVERY: Final = (0, 0, 25, 100, 400)
"""Mean steps between two evictions; 0 is never."""
FILL_EVERY: Final = (0, 0, 6, 25, 100, 400)
"""Mean steps between two fills; often, since a fill hurts only just before its line changes."""
DELAYS: Final = (16, 256, 2_048)
"""Longest delays of landings, in steps."""
SUSPICION_DELAY: Final = 256
NEVER: Final = sys.maxsize
CRASHING_RUNS: Final = 0.5
"""Share of the runs in which nodes die, where the scenario lets them."""
LIVE_SUSPECTS: Final = 0.3
"""Share of deaths that begin with the suspicion of a live node."""
PATIENCE: Final = (0, 256)
"""Steps for which a death waits for its node to have something in its cache that can be lost."""


class Adversary:
    """Decides for one run what happens to the memory and to nodes, and when."""

    def __init__(self, rng: Random, *, length: int, lines: Sequence[int] = ()) -> None:
        self.due = NEVER
        """The step before which something is to happen next."""
        self._rng = rng
        self._length = length
        self._lines = lines
        """Lines that some run has touched: they may be filled before this one touches them."""
        self._evict_every = rng.choice(EVICT_EVERY)
        self._fill_every = rng.choice(FILL_EVERY)
        self._log_delay = log(rng.choice(DELAYS))
        self._next_evict = self._gap(self._evict_every)
        self._next_fill = self._gap(self._fill_every)
        self._patience = rng.choice(PATIENCE)
        self._timers: list[tuple[int, int, Choice]] = []
        self._count = 0

    def start(self, run: Run) -> None:
        """Plan the deaths of nodes; the scenario has been built."""
        rule = run.membership.rule
        rng = self._rng
        if rule is not None and rng.random() < CRASHING_RUNS:
            for _ in range(rng.randint(1, rule.at_most)):
                node = rng.choice(rule.nodes)
                when = int(rng.random() * self._length)
                if rule.suspect_live and rng.random() < LIVE_SUSPECTS:
                    self._at(when, ("suspect", node, 0))
                else:
                    self._at(when, ("crash", node, rng.getrandbits(32)))
                    self._at(when + self._delay(log(SUSPICION_DELAY)), ("suspect", node, 0))
        self._look()

    def in_flight(self, run: Run, choice: Choice) -> None:
        """Draw when a landing happens, and be there in time."""
        delay = self._delay(self._log_delay)
        self._at(run.step + delay, choice)
        if self._timers[0][0] < self.due:
            self.due = self._timers[0][0]
        run.ask_within(delay)

    def act(self, run: Run, step: int) -> None:
        """Let everything happen that is due before ``step``."""
        timers = self._timers
        while timers and timers[0][0] <= step:
            self._fire(run)
        while self._next_evict <= step:
            self._next_evict += self._gap(self._evict_every)
            line = self._some_line(run, evict=True)
            if line is not None:
                run.apply(("evict", *line))
        while self._next_fill <= step:
            self._next_fill += self._gap(self._fill_every)
            line = self._some_line(run, evict=False)
            if line is not None:
                run.apply(("fill", *line))
        self._look()

    def next_timer(self, run: Run) -> bool:
        """Let the next landing or death happen now; return whether there was one planned."""
        if not self._timers:
            return False
        self._fire(run)
        self._look()
        return True

    def draw(self) -> int:
        """Return 32 bits of chance."""
        return self._rng.getrandbits(32)

    def _fire(self, run: Run) -> None:
        choice = heapq.heappop(self._timers)[2]
        if choice[0] == "crash":
            alive = [n.number for n in run.nodes.values() if n.alive and not n.suspected]
            rule = run.membership.rule
            if alive == [choice[1]] or rule is None or run.membership.deaths >= rule.at_most:
                return
            dirty = list(run.nodes[choice[1]].cache.dirty)
            if not dirty and self._patience:
                self._patience -= 1
                self._at(run.step + 1, choice)
                return
            for line in dirty:
                if self._rng.random() < 0.5:
                    run.apply(("evict", choice[1], line))
        if choice[0] == "suspect" and run.nodes[choice[1]].alive:
            rule = run.membership.rule
            if rule is None or not rule.suspect_live or run.membership.deaths >= rule.at_most:
                return
        run.apply(choice)

    def _at(self, step: int, choice: Choice) -> None:
        self._count += 1
        heapq.heappush(self._timers, (step, self._count, choice))

    def _look(self) -> None:
        first = self._timers[0][0] if self._timers else NEVER
        self.due = min(first, self._next_evict, self._next_fill)

    def _gap(self, every: int) -> int:
        """Return the steps to the next event of a Poisson process."""
        return 1 + int(self._rng.expovariate(1 / every)) if every else NEVER

    def _delay(self, log_longest: float) -> int:
        return int(exp(self._rng.random() * log_longest))

    def _some_line(self, run: Run, *, evict: bool) -> tuple[int, int] | None:
        """Choose a node, and a line that it caches, or one that somebody uses or will use."""
        rng = self._rng
        nodes = list(run.nodes.values())
        node = nodes[int(rng.random() * len(nodes))]
        if not node.alive:
            return None
        lines: Sequence[int]
        if evict:
            lines = list(node.cache.lines)
        elif (source := rng.random()) < 0.4:
            lines = list(run.device.lines)
        elif source < 0.7:
            lines = list(nodes[int(rng.random() * len(nodes))].cache.lines)
        else:
            lines = self._lines
        if not lines:
            return None
        return node.number, lines[int(rng.random() * len(lines))]
