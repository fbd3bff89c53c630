"""What a run of an experiment came to, as plain values that can be saved and shown.

A ``Record`` holds all that must come out again: the set-up with the source of every number, the
profiles' numbers, assumptions, rows, plots as data, claims with their verdicts, checks and notes;
and what belongs to one run on one host. ``experiment_folder.py`` writes and reads it.

Units: in the names of columns and in the lines of the set-up; s for durations.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cxlbench.devices.profile import describe_profile, load_profile
from cxlbench.harness.claims import JudgedClaim, PaperClaim
from cxlbench.harness.experiment import (
    Assumption,
    Check,
    Context,
    ExperimentError,
    Findings,
    Plot,
    Scalar,
)
from cxlbench.harness.results import Claim, Host, Verdict, versions
from cxlbench.harness.sweep_rows import setup_hash

GREATEST = int(sys.float_info.max)
"""Beyond it a whole number is as good as infinite: no table and no plot can show it."""

MAX_SAMPLES = 256
"""Of a distribution, as many quantiles are kept; no eye sees more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord(Claim):
    """A judged claim as it is saved."""

    name: str
    value: float | None = None
    reason: str = ""
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupLine:
    """One number or choice of a set-up. ``changed``: the user gave it with ``--set``."""

    name: str
    value: Scalar
    unit: str
    source: str
    assumption: bool
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLine:
    """One number of a profile that the run read, as ``cxlbench profiles show`` writes it."""

    name: str
    value: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, set of bars or distribution of a plot; None is a gap."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotRecord:
    """A plot as it is saved; ``name`` is that of its files."""

    name: str
    title: str
    x_label: str
    y_label: str
    kind: str
    series: tuple[Series, ...]
    note: str = ""

    @classmethod
    def of(cls, plot: Plot) -> PlotRecord:
        """Return a plot with plain numbers; of a long distribution, its quantiles."""
        if plot.kind not in ("line", "bar", "cdf"):
            raise ExperimentError(
                f"plot {plot.name!r} is of kind {plot.kind!r}: possible are line, bar and cdf"
            )
        series = []
        for name, (xs, ys) in plot.series.items():
            if plot.kind == "cdf":
                points = _quantiles([float(x) for x in xs])
                series.append(Series(name=name, x=points, y=()))
                continue
            if len(xs) != len(ys):
                raise ExperimentError(
                    f"plot {plot.name!r}: {name!r} has {len(xs)} x and {len(ys)} y"
                )
            x = tuple(value if isinstance(value, str) else float(value) for value in xs)
            series.append(Series(name=name, x=x, y=tuple(_finite(value) for value in ys)))
        return cls(
            name=re.sub(r"[^A-Za-z0-9_.-]+", "-", plot.name).strip("-.") or "plot",
            title=plot.title,
            x_label=plot.x_label,
            y_label=plot.y_label,
            kind=plot.kind,
            series=tuple(series),
            note=plot.note,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run of an experiment, just made or read back."""

    name: str
    title: str
    source: str
    about: str
    seed: int
    quick: bool
    overrides: Mapping[str, str]
    setup: tuple[SetupLine, ...]
    profiles: Mapping[str, tuple[ProfileLine, ...]]
    assumptions: tuple[Assumption, ...]
    columns: tuple[str, ...]
    """Of the rows, in the experiment's order."""
    rows: tuple[dict[str, Scalar | None], ...]
    claims: tuple[ClaimRecord, ...]
    plots: tuple[PlotRecord, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    partial: bool
    spec: str = ""
    """How the experiment is named on the command line, where that is not its name."""
    grid: str = ""
    """The set-up's hash: a saved sweep of another set-up says nothing about these claims."""
    tiers: tuple[str, ...] = ()
    """Tiers that the user had compared beside the experiment's own."""
    versions: Mapping[str, str] = field(default_factory=dict)
    duration_s: float | None = None
    written: str = ""
    host: Host | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def form(self) -> str:
        """What kind of run it was, in words."""
        words = ["quick" if self.quick else "full"]
        words += ["partial"] * self.partial + ["changed set-up"] * bool(self.overrides)
        words += ["more tiers"] * bool(self.tiers)
        return ", ".join(words)

    @property
    def folder_name(self) -> str:
        """The name of its folder inside a folder of results."""
        return f"{self.name}-quick" if self.quick else self.name

    def verdicts(self) -> dict[Verdict, int]:
        """Return how many claims came to each verdict."""
        found = [claim.verdict for claim in self.claims]
        return {verdict: found.count(verdict) for verdict in Verdict}

    def command(self) -> str:
        """Return the command that repeats this run."""
        words = ["cxlbench", "run", self.spec or self.name]
        words += ["--quick"] * self.quick + ["--seed", str(self.seed)]
        for key, text in self.overrides.items():
            words += ["--set", f"{key}={text}"]
        for tier in self.tiers:
            words += ["--tier", tier]
        return shlex.join(words)


def make_record(
    context: Context, findings: Findings, *, spec: str = "", duration_s: float | None = None
) -> Record:
    """Return what is to be said of a run that is over.

    Raises:
        ExperimentError: the run returned what is no ``Findings``, or has something in it that is no
            row, claim or check; a plot is of an unknown kind, has more x than y, or has the name of
            another one.
    """
    experiment = context.experiment
    _refuse_what_is_none(findings)
    rows = tuple({key: _plain(value) for key, value in row.items()} for row in findings.rows)
    return Record(
        name=experiment.name,
        title=experiment.title,
        source=experiment.source,
        about=paragraphs(experiment.about),
        seed=context.seed,
        quick=context.quick,
        overrides=dict(sorted(context.overrides.items())),
        setup=_setup(context),
        profiles=_profiles(context),
        assumptions=tuple(experiment.assumptions(quick=context.quick)),
        columns=tuple(dict.fromkeys(key for row in rows for key in row)),
        rows=rows,
        claims=tuple(_claims(experiment.claims, findings)),
        plots=tuple(PlotRecord.of(plot) for plot in findings.plots),
        checks=tuple(findings.checks),
        notes=tuple(findings.notes),
        partial=findings.partial,
        spec=spec,
        tiers=context.tiers,
        grid=setup_hash(experiment, quick=True),
        versions=versions(),
        duration_s=duration_s,
    )


def _refuse_what_is_none(findings: Any) -> None:
    if not isinstance(findings, Findings):
        raise ExperimentError(
            f"its run returned {type(findings).__name__}; it must return Findings"
        )
    for row in findings.rows:
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise ExperimentError(f"{row!r} is no row: that has a value by column's name")
    for what, items, kind in (
        ("claims", findings.claims, JudgedClaim),
        ("plots", findings.plots, Plot),
        ("checks", findings.checks, Check),
    ):
        for item in items:
            if not isinstance(item, kind):
                raise ExperimentError(
                    f"{item!r} is among its {what}, which must be of {kind.__name__}"
                )
    names = [plot.name for plot in findings.plots]
    for plot in dict.fromkeys(names):
        if names.count(plot) > 1:
            raise ExperimentError(f"{names.count(plot)} plots are called {plot!r}")


def paragraphs(text: str) -> str:
    """Return a text without its line breaks, but with its paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


# -- from what experiments return to plain values --------------------------------------------------


def _setup(context: Context) -> tuple[SetupLine, ...]:
    return tuple(
        SetupLine(
            name=knob.name,
            value=context.knob(knob.name),
            unit=knob.unit,
            source=knob.source,
            assumption=knob.assumption,
            changed=knob.name in context.overrides,
        )
        for knob in context.experiment.knobs
    )


def _profiles(context: Context) -> dict[str, tuple[ProfileLine, ...]]:
    found = {}
    for name in sorted(context.experiment.profiles):
        prefix = f"{name}."
        overrides = {
            key.removeprefix(prefix): text
            for key, text in context.overrides.items()
            if key.startswith(prefix)
        }
        rows = describe_profile(load_profile(name, overrides=overrides))
        # A profile that it refers to stands by itself where the experiment declares it, too.
        apart = tuple(f"{row.name}." for row in rows if row.value in context.experiment.profiles)
        found[name] = tuple(
            ProfileLine(name=row.name, value=row.value, mark=row.mark)
            for row in rows
            if not row.name.startswith(apart)
        )
    return found


def _claims(claims: Sequence[PaperClaim], findings: Findings) -> Iterator[ClaimRecord]:
    """Yield all claims in the experiment's order; one without an answer is not decided."""
    judged = {claim.name: claim for claim in findings.claims}
    why = "the run was stopped before" if findings.partial else ""
    for claim in claims:
        if claim.name in judged:
            yield _claim(judged.pop(claim.name))
        else:
            yield _claim(claim.judge(None, reason=why))
    for other in judged.values():
        yield _claim(other)


def _claim(claim: JudgedClaim) -> ClaimRecord:
    return ClaimRecord(
        name=claim.name,
        statement=claim.statement,
        source=claim.source,
        expected=claim.expected,
        measured=claim.measured,
        verdict=claim.verdict,
        value=None if claim.value is None else _finite(claim.value),
        reason=claim.reason,
        at=claim.at,
    )


def _plain(value: Any) -> Scalar | None:
    """Return a value that JSON knows, also of numpy's scalars; what is not finite is None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, int) and abs(value) > GREATEST:
        return None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _quantiles(samples: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(value for value in samples if math.isfinite(value))
    if len(ordered) <= MAX_SAMPLES:
        return tuple(ordered)
    last = len(ordered) - 1
    return tuple(ordered[round(i * last / (MAX_SAMPLES - 1))] for i in range(MAX_SAMPLES))
