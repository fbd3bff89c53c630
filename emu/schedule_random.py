"""The random scheduler: any runnable task, for a random number of steps, beside an adversary.

How long a task is left alone is drawn for each run (every step a new choice, or stretches of 2, 8
or 32 steps in the mean): short stretches find races of a few steps, long ones let one task finish
something while another is in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from cxlbench.emu.pod_adversary import Adversary

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice
    from cxlbench.emu.pod_task import TaskMemory

STRETCHES: Final = (1, 2, 8, 32)
"""Mean steps for which a task is left alone."""


class RandomSchedule:
    """One random schedule; see ``pod_schedule.Schedule``."""

    eager = False

    def __init__(self, seed: int, *, length: int, lines: Sequence[int] = ()) -> None:
        rng = Random(seed)
        self._random = rng.random
        self._mean = rng.choice(STRETCHES)
        self._stretch = self._mean
        self._exponential = rng.expovariate
        self._adversary = Adversary(rng, length=length, lines=lines)

    def start(self, run: Run) -> None:
        """See ``Schedule.start``."""
        self._adversary.start(run)

    def turn(self, run: Run, step: int) -> TaskMemory | None:
        """See ``Schedule.turn``."""
        adversary = self._adversary
        if adversary.due <= step:
            adversary.act(run, step)
        runnable = run.runnable
        while not runnable:
            if not adversary.next_timer(run) and not run.last_resort():
                return None
        chosen = runnable[int(self._random() * len(runnable))]
        steps = 1
        if self._mean > 1:
            steps += int(self._exponential(1 / (self._mean - 0.5)))
        if len(runnable) == 1 or step + steps > adversary.due:
            steps = min(max(steps, 1), max(adversary.due - step, 1))
        run.grant(steps)
        return chosen

    def in_flight(self, run: Run, choice: Choice) -> None:
        """See ``Schedule.in_flight``."""
        self._adversary.in_flight(run, choice)

    def yielded(self, run: Run, task: TaskMemory) -> None:
        """See ``Schedule.yielded``."""

    def draw(self, run: Run) -> int:
        """See ``Schedule.draw``."""
        return self._adversary.draw()
