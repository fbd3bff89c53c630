"""Half of the campaign: wrong code, which must be found, for what it is, within some schedules.

Each mutant of TraCT's must fail with the right kind of failure, the right cause, and both lines of
source where two stores are at fault. How soon a scheduler finds it, and in which share of the
schedules, is told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_report import Report
from cxlbench.harness.pod_quiet import Scheduler
from cxlbench.harness.run_folders import run_folder
from cxlbench.tract import mutants
from cxlbench.tract.mutant_loader import Mutant, load

TWO_STORES = (Kind.CAUSALITY, Kind.REGRESS, Kind.WRITE_RACE, Kind.LINE_RACE)
"""Kinds of failure that name two lines of source."""
CAUSED = (Kind.CAUSALITY, Kind.REGRESS)
"""Kinds of failure that name a cause."""


@dataclass(frozen=True, slots=True)
class Search:
    """What one scheduler found of one mutant."""

    mutant: str
    scheduler: Scheduler
    first: int | None
    """Number of the first schedule, from 1, that failed as it should; None if none did."""
    schedules: int
    failed: int
    """Schedules that failed as they should."""
    seen: tuple[str, ...]
    """Kinds and causes that are right for it, the most frequent first."""
    misnamed: int
    """Schedules that failed otherwise."""
    wrong: tuple[str, ...]
    """Kinds and causes of those."""

    @property
    def share(self) -> float:
        """Share of the schedules that failed as they should."""
        return self.failed / self.schedules


@dataclass(frozen=True, slots=True)
class MutantRow:
    """One mutant under all schedulers."""

    mutant: str
    searches: tuple[Search, ...]

    @property
    def found(self) -> bool:
        """Whether some scheduler found it, and it was called what it is more often than not."""
        right = sum(one.failed for one in self.searches)
        return right > 0 and right >= sum(one.misnamed for one in self.searches)

    @property
    def wrong(self) -> tuple[str, ...]:
        """What else it was called."""
        return tuple(dict.fromkeys(name for one in self.searches for name in one.wrong))

    @property
    def causes(self) -> tuple[str, ...]:
        """What it was rightly called."""
        return tuple(dict.fromkeys(name for one in self.searches for name in one.seen))


@dataclass(frozen=True, slots=True)
class Hunt:
    """What one process is asked to do: find mutant number ``mutant`` with one scheduler.

    It ends after ``bound`` schedules, or once it was found and ``sample`` schedules were run.
    """

    mutant: int
    scheduler: Scheduler
    bound: int
    sample: int
    seed: int


def hunt_mutant(hunt: Hunt) -> Search:
    """Look for one mutant."""
    mutant = mutants.ALL[hunt.mutant]
    first: int | None = None
    tried = failed = 0
    seen: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    with run_folder() as folder:
        scenario = load(mutant, folder)
        while tried < hunt.bound and (first is None or tried < hunt.sample):
            enough = hunt.bound if first is None else min(hunt.sample, hunt.bound)
            found = explore(
                scenario,
                schedules=enough - tried,
                first=tried,
                seed=hunt.seed,
                scheduler=hunt.scheduler,
                ignore=mutant.passed_over,
                shrinking=False,
            )
            tried += found.schedules
            if found.report is None:
                break
            if is_right(mutant, found.report):
                failed += 1
                seen[_name(found.report)] += 1
                first = first or tried
            else:
                wrong[_name(found.report)] += 1
    return Search(
        mutant.name,
        hunt.scheduler,
        first,
        tried,
        failed,
        _by_count(seen),
        wrong.total(),
        _by_count(wrong),
    )


def is_right(mutant: Mutant, report: Report) -> bool:
    """Return whether a report says of a mutant what is wrong with it."""
    if report.kind not in mutant.kinds:
        return False
    if report.kind in TWO_STORES and not (report.site and report.later_site):
        return False
    return report.kind not in CAUSED or not mutant.causes or report.cause in mutant.causes


def _name(report: Report) -> str:
    return str(report.cause or report.kind)


def _by_count(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in counts.most_common())
