"""PCT: strict priorities, lowered at a few random steps, beside an adversary.

After Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic
Guarantees of Finding Bugs", ASPLOS 2010: tasks get random priorities, the highest runnable one
runs, and at ``d - 1`` random steps the running task falls below all others. A bug that needs ``d``
ordering constraints among ``k`` steps of ``n`` tasks is found with probability ``1 / (n k^(d-1))``
at least. ``d`` is drawn for each run; ``k`` is the length of a first run.

A task that polls on and on (its ``pause`` returns at once each time, say because the adversary
evicts what it watches) would starve those that it waits for: after ``PATIENCE`` such pauses it
falls below all others, as a task that yields does in the paper. Lowered at every one of them, tasks
would run in turns, and bugs that need a task to stay ahead are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from cxlbench.emu.pod_adversary import NEVER, Adversary

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice
    from cxlbench.emu.pod_task import TaskMemory

DEPTHS: Final = (1, 2, 3, 4, 6, 8)
PATIENCE: Final = 32
"""Pauses of a task that return at once before it falls below all others."""
LONGEST: Final = 1_000
"""Steps granted at once; only a bound to look at the run's own bounds again."""


class PctSchedule:
    """One schedule of random priorities; see ``pod_schedule.Schedule``."""

    eager = True

    def __init__(self, seed: int, *, length: int, lines: Sequence[int] = ()) -> None:
        rng = Random(seed)
        self._rng = rng
        depth = rng.choice(DEPTHS)
        self._changes = sorted(int(rng.random() * length) for _ in range(depth - 1))
        self._changes.append(NEVER)
        self._priorities: list[float] = []
        self._lowest = 0.0
        self._polls: dict[int, int] = {}
        """Pauses that returned at once, by task."""
        self._last: TaskMemory | None = None
        self._adversary = Adversary(rng, length=length, lines=lines)

    def start(self, run: Run) -> None:
        """See ``Schedule.start``."""
        self._adversary.start(run)

    def turn(self, run: Run, step: int) -> TaskMemory | None:
        """See ``Schedule.turn``."""
        adversary = self._adversary
        if adversary.due <= step:
            adversary.act(run, step)
        while not run.runnable:
            if not adversary.next_timer(run) and not run.last_resort():
                return None
        priorities = self._priorities
        while len(priorities) < len(run.tasks):
            priorities.append(1 + self._rng.random())
        while self._changes[0] <= step:
            del self._changes[0]
            if self._last is not None:
                self._demote(self._last)
        chosen = run.runnable[0]
        for task in run.runnable:
            if priorities[task.index] > priorities[chosen.index]:
                chosen = task
        self._last = chosen
        run.grant(max(1, min(LONGEST, self._changes[0] - step, adversary.due - step)))
        return chosen

    def in_flight(self, run: Run, choice: Choice) -> None:
        """See ``Schedule.in_flight``."""
        self._adversary.in_flight(run, choice)

    def yielded(self, run: Run, task: TaskMemory) -> None:
        """Put a task that polls on and on below all others."""
        self._polls[task.index] = polls = self._polls.get(task.index, 0) + 1
        if polls % PATIENCE == 0:
            self._demote(task)
            run.ask_within(1)

    def draw(self, run: Run) -> int:
        """See ``Schedule.draw``."""
        return self._adversary.draw()

    def _demote(self, task: TaskMemory) -> None:
        self._lowest -= 1
        self._priorities[task.index] = self._lowest
