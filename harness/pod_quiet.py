"""Half of the campaign: right code under many schedules, of which not one may be reported.

Every scenario of TraCT's, under the random scheduler and under PCT, with the whole adversary. The
schedules that are asked for are of scenarios in which nodes may die, and in about half of them one
does; half as many again are of scenarios in which nobody may.

Work is cut into pieces of numbered schedules, which may be run anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_scenario import Pod
from cxlbench.tract import scenarios

Scheduler = Literal["random", "pct"]
SCHEDULERS: tuple[Scheduler, ...] = ("random", "pct")
PIECE = 250
"""Schedules that a process runs at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A report on right code: a bug of TraCT, or of the checker."""

    scenario: str
    scheduler: Scheduler
    seed: int
    index: int
    text: str

    @property
    def command(self) -> str:
        """The command that finds it again, shrunk and saved."""
        return (
            f"cxlbench pod explore {scenarios.__name__}:{self.scenario} --scheduler"
            f" {self.scheduler} --seed {self.seed} --first {self.index} --schedules 1"
        )


@dataclass(frozen=True, slots=True)
class QuietRow:
    """What one scheduler did with one scenario."""

    scenario: str
    scheduler: Scheduler
    schedules: int
    operations: int
    with_deaths: int
    """Schedules in which a node died, or was taken for dead."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process is asked to do: schedules ``first`` and so on of one scenario."""

    scenario: str
    scheduler: Scheduler
    first: int
    schedules: int
    seed: int


def may_lose_nodes(name: str) -> bool:
    """Return whether nodes may die in a scenario of TraCT's."""
    seen: list[bool] = []

    def watched(pod: Pod) -> None:
        _noting_deaths(pod, lambda: None, lambda: seen.append(True))
        scenarios.ALL[name](pod)

    explore(watched, schedules=1, shrinking=False)
    return bool(seen)


def _noting_deaths(
    pod: Pod, died: Callable[[], object], may_die: Callable[[], object] = lambda: None
) -> None:
    """Call ``died`` whenever a recovery begins, and ``may_die`` if the scenario allows deaths."""
    allow = pod.on_crash

    def on_crash(nodes: Any, recover: Callable[..., object], *args: Any, **options: Any) -> None:
        may_die()

        @functools.wraps(recover)
        def noted(*inner: Any) -> object:
            died()
            return recover(*inner)

        allow(nodes, noted, *args, **options)

    pod.on_crash = on_crash  # type: ignore[method-assign]


def pieces(chosen: Sequence[str], schedules: int, seed: int) -> Iterator[Piece]:
    """Cut the schedules up, so that each scenario gets at least one under each scheduler."""
    deadly = [name for name in chosen if may_lose_nodes(name)]
    others = [name for name in chosen if name not in deadly]
    for group, total in ((deadly, schedules), (others, -(-schedules // 2))):
        for name in group:
            share = -(-total // (len(group) * len(SCHEDULERS)))
            for scheduler in SCHEDULERS:
                for first in range(0, share, PIECE):
                    yield Piece(name, scheduler, first, min(PIECE, share - first), seed)


def run_piece(piece: Piece) -> QuietRow:
    """Run schedules of right code; after a report the next schedule goes on."""
    deadly: list[bool] = []
    """Of each run since the exploration began, the pilot first: did a node die in it."""

    def scenario(pod: Pod) -> None:
        run = len(deadly)
        deadly.append(False)
        _noting_deaths(pod, lambda: deadly.__setitem__(run, True))
        scenarios.ALL[piece.scenario](pod)

    operations = deaths = 0
    findings: list[Finding] = []
    at, end = piece.first, piece.first + piece.schedules
    while at < end:
        found = explore(
            scenario,
            schedules=end - at,
            first=at,
            seed=piece.seed,
            scheduler=piece.scheduler,
            shrinking=False,
        )
        at += found.schedules
        operations += found.steps
        deaths += sum(deadly[1 : 1 + found.schedules])
        deadly.clear()
        if found.report is not None:
            text = found.report.text()
            findings.append(Finding(piece.scenario, piece.scheduler, piece.seed, at - 1, text))
    return QuietRow(
        piece.scenario, piece.scheduler, piece.schedules, operations, deaths, tuple(findings)
    )


def joined(chosen: Sequence[str], parts: Sequence[QuietRow]) -> Iterator[QuietRow]:
    """Put the pieces of each scenario and scheduler together."""
    for name in chosen:
        for scheduler in SCHEDULERS:
            mine = [one for one in parts if (one.scenario, one.scheduler) == (name, scheduler)]
            yield QuietRow(
                name,
                scheduler,
                sum(one.schedules for one in mine),
                sum(one.operations for one in mine),
                sum(one.with_deaths for one in mine),
                tuple(finding for one in mine for finding in one.findings),
            )
