"""Exploring: run a scenario under many schedules, and explain the first one that fails.

Schedules are numbered; number ``i`` depends on the seed and ``i`` alone. A schedule that fails is
run again under the same choices with a trace, for causes and lines of source; it is then shrunk,
and can be saved and replayed: a replay gives the same failure at the same lines.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from cxlbench.emu.pod_failure import Kind, NotReproducedError, PodUsageError
from cxlbench.emu.pod_report import Report, make_report
from cxlbench.emu.pod_run import Run
from cxlbench.emu.pod_scenario import Pod
from cxlbench.emu.pod_schedule import Choice, Schedule
from cxlbench.emu.pod_shrink import shrink
from cxlbench.emu.pod_task import TaskMemory
from cxlbench.emu.pod_trace import LintedMemory, RecordedMemory, Trace
from cxlbench.emu.race_checks import FlushLint
from cxlbench.emu.schedule_dfs import DepthFirstSearch, DfsSchedule
from cxlbench.emu.schedule_pct import PctSchedule
from cxlbench.emu.schedule_random import RandomSchedule
from cxlbench.emu.schedule_replay import ReplaySchedule
from cxlbench.emu.user_objects import load_callable

Scenario = Callable[[Pod], object]
Scheduler = Literal["random", "pct", "mixed", "dfs"]
SCHEDULERS: tuple[str, ...] = ("random", "pct", "mixed", "dfs")

FORMAT = "cxlbench pod schedule 1"
PILOT_STEPS = 1_000
"""How long a run is taken to be before the first one has shown it."""
MAX_STEPS = 50_000
SHRINK_ATTEMPTS = 500
SHRINK_STEPS = 400_000
"""Operations that shrinking may take in all."""
RUNS_BETWEEN_COLLECTIONS = 64


class ScheduleFileError(ValueError):
    """A file is not a schedule that can be replayed here."""


class SavedSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that failed: all that its replay needs, and what it is expected to show."""

    format: str = FORMAT
    target: str
    seed: int
    index: int
    """Which schedule of the exploration it was."""
    scheduler: str
    choices: list[Choice]
    draws: list[int]
    max_steps: int
    ignore: list[str]
    kind: str
    cause: str
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """Write the schedule as a JSON file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=0) + b"\n")

    @classmethod
    def load(cls, path: Path) -> SavedSchedule:
        """Read a JSON file that ``save`` wrote."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ScheduleFileError(f"{path} is not a saved schedule: {error}") from error
        if found.format != FORMAT:
            raise ScheduleFileError(
                f"{path} has format {found.format!r}, this version reads {FORMAT!r}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Exploration:
    """What came of an exploration."""

    schedules: int
    """How many were run, the failing one included."""
    steps: int
    """Operations in all of them."""
    report: Report | None
    schedule: SavedSchedule | None
    """The failing schedule, shrunk."""
    exhausted: bool
    """Whether a depth-first search visited all schedules within its bound."""

    @property
    def failed(self) -> bool:
        """Whether a schedule failed."""
        return self.report is not None


@dataclass(frozen=True, slots=True)
class Pilot:
    """What the run before the first one showed of a scenario, for those who draw schedules."""

    steps: int = PILOT_STEPS
    lines: tuple[int, ...] = ()
    """Lines that were touched."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A scenario, and how its runs are made."""

    scenario: Scenario
    name: str
    max_steps: int
    ignore: frozenset[Kind]

    def run(
        self,
        schedule: Schedule,
        *,
        memory_type: type[TaskMemory] = TaskMemory,
        trace: Trace | None = None,
        lint: FlushLint | None = None,
    ) -> Run:
        run = Run(
            schedule,
            max_steps=self.max_steps,
            ignore=self.ignore,
            memory_type=memory_type,
            trace=trace,
            lint=lint,
        )
        pod = Pod(run)
        self.scenario(pod)
        pod.built()
        run.execute()
        if run.failure is None:
            pod.ended()
        return run

    def pilot(self, schedule: Schedule) -> Pilot:
        run = self.run(schedule)
        lines = set(run.device.lines).union(*[node.cache.lines for node in run.nodes.values()])
        return Pilot(max(1, run.step), tuple(sorted(lines)))

    def recorded(self, schedule: Schedule) -> tuple[Trace, Report | None]:
        trace = Trace()
        run = self.run(schedule, memory_type=RecordedMemory, trace=trace)
        failure = run.failure
        return trace, None if failure is None else make_report(run, trace, failure)


def explore(
    target: str | Scenario,
    *,
    schedules: int = 1_000,
    first: int = 0,
    seed: int = 0,
    scheduler: Scheduler = "random",
    max_steps: int = MAX_STEPS,
    ignore: Sequence[Kind] = (),
    shrinking: bool = True,
    bound: int = 2,
    disturb: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Exploration:
    """Run ``target`` under up to ``schedules`` schedules, until one fails.

    ``target`` is a scenario or names one as ``module:function``. ``scheduler`` is ``random``,
    ``pct``, ``mixed`` (the two in turn) or ``dfs``; ``bound`` and ``disturb`` are for the last.
    Schedules are numbered from ``first``, so that an exploration can be divided. Failures of the
    kinds in ``ignore`` are passed over. A run of ``max_steps`` operations counts as a hang.
    ``progress`` is called with the number of schedules run.
    """
    if scheduler not in SCHEDULERS:
        raise PodUsageError(f"scheduler {scheduler!r}: choose one of {', '.join(SCHEDULERS)}")
    if schedules < 1 or first < 0 or max_steps < 1:
        raise PodUsageError(
            f"{schedules} schedules from number {first}, {max_steps} steps each: the first and"
            " the last must be at least 1, and numbers begin at 0"
        )
    aim = _target(target, max_steps, ignore)
    search = DepthFirstSearch(bound=bound, disturb=disturb)
    steps = 0
    with _collecting_seldom() as ran:
        pilot = Pilot()
        if scheduler != "dfs":
            pilot = aim.pilot(_made("random", seed, -1, pilot))
        for index in range(first, first + schedules):
            schedule: Schedule
            if scheduler == "dfs":
                schedule = DfsSchedule(search)
            else:
                schedule = _made(scheduler, seed, index, pilot)
            run = aim.run(schedule)
            steps += run.step
            if run.failure is not None:
                again = DfsSchedule(search) if scheduler == "dfs" else None
                trace, report = aim.recorded(again or _made(scheduler, seed, index, pilot))
                if report is None or report.kind is not run.failure.kind:
                    raise _not_reproduced(f"schedule {index} of seed {seed}", run.failure.kind)
                if shrinking:
                    trace, report = _shrunk(aim, trace, report)
                saved = _saved(aim, trace, report, scheduler=scheduler, seed=seed, index=index)
                return Exploration(index - first + 1, steps, report, saved, False)
            if progress is not None:
                progress(index - first + 1)
            ran()
            if scheduler == "dfs" and not search.advance():
                return Exploration(index - first + 1, steps, None, None, True)
    return Exploration(schedules, steps, None, None, False)


def replay(schedule: SavedSchedule | Path | str, *, target: Scenario | None = None) -> Report:
    """Run a saved schedule again and return its report.

    ``target`` replaces the scenario that the schedule names. Raises ``NotReproducedError`` if
    nothing fails, as after a repair.
    """
    saved = schedule if isinstance(schedule, SavedSchedule) else SavedSchedule.load(Path(schedule))
    kinds = [Kind(kind) for kind in saved.ignore]
    aim = _target(target or saved.target, saved.max_steps, kinds)
    _, report = aim.recorded(ReplaySchedule(saved.choices, saved.draws))
    if report is None:
        raise _not_reproduced(f"the saved schedule of {saved.target}", Kind(saved.kind))
    return report


def lint_flushes(
    target: str | Scenario, *, schedules: int = 200, seed: int = 0, max_steps: int = MAX_STEPS
) -> FlushLint:
    """Find the flushes of ``target`` that have no effect in any of ``schedules`` schedules."""
    aim = _target(target, max_steps, ())
    lint = FlushLint()
    pilot = aim.pilot(_made("random", seed, -1, Pilot()))
    for index in range(schedules):
        lint.new_run()
        schedule = _made("mixed", seed, index, pilot)
        run = aim.run(schedule, memory_type=LintedMemory, lint=lint)
        if run.failure is not None:
            lint.run_failed(f"{run.failure.kind}, {run.failure.message}")
    return lint


def _target(target: str | Scenario, max_steps: int, ignore: Sequence[Kind]) -> _Target:
    if isinstance(target, str):
        scenario, name = load_callable(target, what="scenario"), target
    else:
        scenario = target
        name = f"{target.__module__}:{getattr(target, '__qualname__', repr(target))}"
    return _Target(scenario, name, max_steps, frozenset(ignore))


def _made(scheduler: str, seed: int, index: int, pilot: Pilot) -> Schedule:
    mixed = (seed << 32) + index + 1
    if scheduler == "pct" or (scheduler == "mixed" and index % 2):
        return PctSchedule(mixed, length=pilot.steps, lines=pilot.lines)
    return RandomSchedule(mixed, length=pilot.steps, lines=pilot.lines)


def _shrunk(aim: _Target, trace: Trace, report: Report) -> tuple[Trace, Report]:
    """Shrink; the first replay must fail as the run itself did."""
    final, found = aim.recorded(ReplaySchedule(trace.choices, trace.draws))
    if found is None or found.signature != report.signature:
        raise _not_reproduced("the replay of a failing schedule", report.kind)
    # what is left out can prolong a run, and only a hang is worth waiting for
    quick = replace(aim, max_steps=min(aim.max_steps, 2 * report.step + 200))
    budget = SHRINK_STEPS

    def still_fails(choices: list[Choice]) -> bool:
        nonlocal budget
        if budget <= 0:
            return False
        run = quick.run(ReplaySchedule(choices, trace.draws))
        budget -= run.step
        if run.failure is None or (run.failure.kind, run.failure.word * 8) != place:
            return False
        budget -= 4 * run.step
        return same(quick.recorded(ReplaySchedule(choices, trace.draws))[1])

    def same(other: Report | None) -> bool:
        return other is not None and other.signature == report.signature

    place = report.kind, report.offset if report.offset >= 0 else -8
    shorter = shrink(trace.choices, still_fails, attempts=SHRINK_ATTEMPTS)
    shrunk, found_again = aim.recorded(ReplaySchedule(shorter, trace.draws))
    if found_again is not None and same(found_again):
        return shrunk, found_again
    return final, found


def _saved(
    aim: _Target, trace: Trace, report: Report, *, scheduler: str, seed: int, index: int
) -> SavedSchedule:
    try:
        own = version("cxlbench")
    except PackageNotFoundError:
        own = "not installed"
    return SavedSchedule(
        target=aim.name,
        seed=seed,
        index=index,
        scheduler=scheduler,
        choices=trace.choices,
        draws=trace.draws,
        max_steps=aim.max_steps,
        ignore=sorted(aim.ignore),
        kind=report.kind,
        cause=report.cause or "",
        versions={"cxlbench": own, "python": platform.python_version()},
    )


def _not_reproduced(what: str, kind: Kind) -> NotReproducedError:
    return NotReproducedError(
        f"{what} failed with {kind}, and not when repeated: the scenario depends on something that"
        " the schedule does not decide (state kept between runs, chance, time, or a set's order)"
    )


@contextmanager
def _collecting_seldom() -> Iterator[Callable[[], None]]:
    """Collect garbage only between runs, each of which leaves some cycles behind."""
    enabled = gc.isenabled()
    gc.disable()
    count = 0

    def ran() -> None:
        nonlocal count
        count += 1
        if count % RUNS_BETWEEN_COLLECTIONS == 0:
            gc.collect(1)

    try:
        yield ran
    finally:
        if enabled:
            gc.enable()
