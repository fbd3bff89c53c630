"""Bounded depth-first search: every schedule that departs at most ``bound`` times from a plain one.

After Emmi, Qadeer and Rakamarić, "Delay-Bounded Scheduling", POPL 2011: in the plain schedule the
running task goes on as long as it can, then the lowest one, and nothing lands before somebody must
wait for it. Every departure (another task, a landing, and if asked for an eviction, a fill, a
crash) costs one of the bound. The search visits all such schedules once, so for small scenarios
its silence is a proof within the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice
    from cxlbench.emu.pod_task import TaskMemory


class DepthFirstSearch:
    """Goes from one schedule to the next; each run gets a ``DfsSchedule`` of it."""

    def __init__(self, *, bound: int, disturb: bool) -> None:
        self.bound = bound
        self.disturb = disturb
        """Whether evictions, fills and crashes are departures too."""
        self.path: list[int] = []
        """Which option is taken at each choice; after its end it is always the first."""
        self.options: list[int] = []
        """How many options there were at each choice of the last run."""

    def advance(self) -> bool:
        """Go to the next schedule; return False if all were visited."""
        taken = self.path + [0] * (len(self.options) - len(self.path))
        spent = sum(option > 0 for option in taken)
        for at in range(len(self.options) - 1, -1, -1):
            spent -= taken[at] > 0
            if taken[at] + 1 < self.options[at] and spent < self.bound:
                self.path = [*taken[:at], taken[at] + 1]
                return True
        return False


class DfsSchedule:
    """One schedule of the search; see ``pod_schedule.Schedule``."""

    eager = True

    def __init__(self, search: DepthFirstSearch) -> None:
        self._search = search
        self._spent = 0
        search.options = []

    def start(self, run: Run) -> None:
        """See ``Schedule.start``."""

    def turn(self, run: Run, step: int) -> TaskMemory | None:
        """See ``Schedule.turn``."""
        while True:
            last = run.current
            tasks = sorted(run.runnable, key=lambda task: (task is not last, task.index))
            departures: list[Choice] = []
            if not tasks or self._spent < self._search.bound:
                departures = list(run.landings())
            if self._search.disturb and tasks and self._spent < self._search.bound:
                departures += self._disturbances(run)
            if not tasks and not departures:
                if not run.last_resort():
                    return None
                continue
            option = self._take(len(tasks) + len(departures))
            if option < len(tasks):
                run.grant(1)
                return tasks[option]
            run.apply(departures[option - len(tasks)])
            if run.failure is not None:
                return None

    def in_flight(self, run: Run, choice: Choice) -> None:
        """See ``Schedule.in_flight``."""

    def yielded(self, run: Run, task: TaskMemory) -> None:
        """See ``Schedule.yielded``."""

    def draw(self, run: Run) -> int:
        """See ``Schedule.draw``."""
        return -self._take(2)

    def _take(self, n_options: int) -> int:
        search = self._search
        at = len(search.options)
        option = search.path[at] if at < len(search.path) else 0
        search.options.append(n_options if self._spent < search.bound else 1)
        self._spent += option > 0
        return option

    def _disturbances(self, run: Run) -> list[Choice]:
        alive = [node for node in run.nodes.values() if node.alive]
        everywhere = {line for node in alive for line in node.cache.lines}
        found: list[Choice] = []
        for node in alive:
            held = node.cache.lines
            found += [("evict", node.number, line) for line in sorted(held)]
            found += [("fill", node.number, line) for line in sorted(everywhere - held.keys())]
        rule = run.membership.rule
        if rule is not None and run.membership.deaths < rule.at_most and len(alive) > 1:
            found += [
                ("crash", node.number, bits)
                for node in alive
                for bits in (0, 0xFFFFFFFF)
                if node.number in rule.nodes
            ]
        return found
