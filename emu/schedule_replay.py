"""Replay of a list of choices, exact where they fit and lenient where they do not.

Shrinking drops choices, so that later ones may ask for what cannot be: a task that waits, a line
that is not cached. Those are passed over. When the list is used up, the lowest task that can run
goes on as long as it can, and things in flight land only when nobody can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice
    from cxlbench.emu.pod_task import TaskMemory

LONGEST: Final = 1_000


class ReplaySchedule:
    """A schedule that was written down; see ``pod_schedule.Schedule``."""

    eager = False

    def __init__(self, choices: Sequence[Choice], draws: Sequence[int] = ()) -> None:
        self._choices = choices
        self._draws = list(draws)
        self._next = 0

    def start(self, run: Run) -> None:
        """See ``Schedule.start``."""

    def turn(self, run: Run, step: int) -> TaskMemory | None:
        """See ``Schedule.turn``."""
        while self._next < len(self._choices):
            what, a, b = choice = self._choices[self._next]
            self._next += 1
            if what != "run":
                run.apply(choice)
                if run.failure is not None:
                    return None
            elif a < len(run.tasks) and run.tasks[a] in run.runnable:
                run.grant(b)
                return run.tasks[a]
        while not run.runnable:
            landing = next(run.landings(), None)
            if landing is not None:
                run.apply(landing)
            elif not run.last_resort():
                return None
        run.grant(LONGEST)
        return min(run.runnable, key=lambda task: task.index)

    def in_flight(self, run: Run, choice: Choice) -> None:
        """See ``Schedule.in_flight``."""

    def yielded(self, run: Run, task: TaskMemory) -> None:
        """See ``Schedule.yielded``."""

    def draw(self, run: Run) -> int:
        """See ``Schedule.draw``."""
        return self._draws.pop(0) if self._draws else 0
