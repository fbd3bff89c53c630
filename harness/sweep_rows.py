"""The file of a sweep: JSON lines, a header and a row for each point, safe at every moment.

The header says whose file it is: experiment, seed, quick or full, number of points, keys, a hash
of the points, a hash of the experiment's *set-up* (knobs, profile numbers, claims), and
versions. A row holds the point, its key values, ``result`` (what must come out again: the
experiment's rows summarized, claims with verdict and value, checks, or the error), and apart
from it ``run`` (seconds of the host). Each row is on the disk (fsync) before the next one is
written.

A sweep that was killed is gone on with: a torn last line is dropped, and points that have a row
are not run again, except those whose worker was *lost* (killed, out of memory): that says
something of the host, not of the point. A file of another sweep is refused with what differs.
When all points are there, the rows are put in the order of the points, so that two complete
files differ in their seconds only.

Rows of experiments are summarized as the means of their numbers, one line for each combination
of their texts and true-or-false values (``system``, ``turn`` as text); of more than
``MOST_GROUPS`` such lines, by the first of these columns alone.

Units: as the columns say; ``seconds`` are of the host's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import msgspec

from cxlbench.devices.profile import load_profile
from cxlbench.harness.claims import JudgedClaim
from cxlbench.harness.experiment import Check, Experiment, Findings, Row
from cxlbench.harness.results import Verdict, to_json, versions, without
from cxlbench.harness.sweep_axes import Design, SweepError

FORMAT_NAME = "cxlbench-sweep"
VERSION = 1
SWEEPS_FOLDER = Path("results/sweeps")
"""Where a user's sweeps go unless told otherwise."""
MOST_GROUPS = 16


class SweepHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: str
    version: int
    experiment: str
    seed: int
    quick: bool
    points: int
    keys: list[str]
    design: str
    setup: str
    versions: dict[str, str]
    kept: dict[str, str]


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """A claim at one point. ``value`` is None where it was not measured."""

    name: str
    verdict: Verdict
    value: float | None = None


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """A law at one point."""

    name: str
    ok: bool
    detail: str = ""


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a point came to: the same again for the same point."""

    rows: int = 0
    summary: list[dict[str, bool | int | float | str | None]] = []
    claims: list[ClaimRow] = []
    checks: list[CheckRow] = []
    error: str | None = None
    lost: bool = False


class PointRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a point's result does not depend on."""

    seconds: float = 0.0


class PointRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a point, its key values, its result."""

    point: int
    keys: dict[str, str]
    result: PointResult
    run: PointRun = PointRun()


class SweepFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a file: at most one row a point, in the order of the points."""

    header: SweepHeader
    rows: tuple[PointRow, ...]

    @property
    def partial(self) -> bool:
        """Whether points are missing."""
        return len(self.rows) < self.header.points


def setup_hash(experiment: Experiment, *, quick: bool) -> str:
    """Return a hash of all that an experiment's set-up is: knobs, profile numbers, claims."""
    profiles = [
        without(without(to_json(load_profile(name)), "provenance"), "description")
        for name in experiment.profiles
    ]
    knobs = [
        (knob.name, knob.at(quick=quick), knob.assumption, knob.low, knob.high, knob.choices)
        for knob in experiment.knobs
    ]
    return _hash([experiment.name, quick, knobs, profiles, experiment.claims])


def make_header(experiment: Experiment, design: Design, *, quick: bool, seed: int) -> SweepHeader:
    """Return the header of a sweep."""
    return SweepHeader(
        format=FORMAT_NAME,
        version=VERSION,
        experiment=experiment.name,
        seed=seed,
        quick=quick,
        points=len(design.points),
        keys=list(design.keys),
        design=_hash(design.points),
        setup=setup_hash(experiment, quick=quick),
        versions=versions(),
        kept={one.key: one.why for one in design.kept},
    )


def point_result(findings: Findings) -> PointResult:
    """Return what a row keeps of an experiment's findings."""
    return PointResult(
        rows=len(findings.rows),
        summary=summarize_rows(findings.rows),
        claims=[_claim(claim) for claim in findings.claims],
        checks=[_check(check) for check in findings.checks],
    )


def _claim(claim: JudgedClaim) -> ClaimRow:
    value = None if claim.value is None else float(claim.value)
    return ClaimRow(name=claim.name, verdict=claim.verdict, value=value)


def _check(check: Check) -> CheckRow:
    return CheckRow(name=check.name, ok=bool(check.ok), detail=check.detail)


def summarize_rows(rows: Sequence[Row]) -> list[dict[str, bool | int | float | str | None]]:
    """Return means by the columns that are no numbers; None where a column has no value."""
    plain = [{name: cast("Any", to_json(value)) for name, value in row.items()} for row in rows]
    columns = list(dict.fromkeys(name for row in plain for name in row))
    words = [c for c in columns if any(isinstance(row.get(c), (str, bool)) for row in plain)]
    if len({tuple(row.get(c) for c in words) for row in plain}) > MOST_GROUPS:
        words = words[:1]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in plain:
        groups.setdefault(tuple(row.get(c) for c in words), []).append(row)
    numbers = [c for c in columns if c not in words]
    found = []
    for key, members in groups.items():
        line: dict[str, Any] = dict(zip(words, key, strict=True))
        for name in numbers:
            values = [row[name] for row in members if isinstance(row.get(name), (int, float))]
            line[name] = sum(values) / len(values) if values else None
        found.append(line)
    return found


# -- reading ---------------------------------------------------------------------------------------


def read_sweep(path: Path | Traversable) -> SweepFile:
    """Return a sweep's file, a torn last line left out.

    Raises:
        SweepError: it cannot be read, is no sweep's file, or is damaged before its last line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_sweep(path, content)[0]


def parse_sweep(path: Path | Traversable, content: bytes) -> tuple[SweepFile, int]:
    """Return the file, and how many of its bytes are whole lines."""
    lines = content.splitlines(keepends=True)
    try:
        header = msgspec.json.decode(lines[0], type=SweepHeader)
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} is not the file of a sweep; choose another one") from error
    if header.format != FORMAT_NAME or header.version != VERSION:
        raise SweepError(
            f"{path} is of format {header.format} {header.version}; this is {FORMAT_NAME} {VERSION}"
        )
    rows: dict[int, PointRow] = {}
    whole = len(lines[0])
    for number, line in enumerate(lines[1:], 2):
        try:
            row = msgspec.json.decode(line, type=PointRow)
            if not line.endswith(b"\n"):
                break
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise SweepError(f"{path}, line {number} is damaged ({error}); remove it") from error
        if not 0 <= row.point < header.points:
            raise SweepError(
                f"{path}, line {number} is of point {row.point}; there are {header.points}"
            )
        rows[row.point] = row
        whole += len(line)
    return SweepFile(header=header, rows=tuple(rows[n] for n in sorted(rows))), whole


def shares(
    experiment_name: str, folder: Path | None = None, *, setup: str | None = None
) -> dict[str, tuple[int, int]]:
    """Return in how many points of a saved sweep each claim holds, and of how many.

    Looks for ``folder/NAME.jsonl`` first, then for the rows that come with the package. Points that
    raised are not counted; points in which a claim was not decided are, as not holding. Empty if
    there is no such file, or ``setup`` is given and is not that of the file (it is out of date).

    Raises:
        SweepError: the file is damaged.
    """
    file = saved_sweep(experiment_name, folder)
    if file is None or (setup is not None and file.header.setup != setup):
        return {}
    found: dict[str, tuple[int, int]] = {}
    for row in file.rows:
        for claim in row.result.claims:
            holds, points = found.get(claim.name, (0, 0))
            found[claim.name] = (holds + (claim.verdict is Verdict.HOLDS), points + 1)
    return found


def saved_sweep(experiment_name: str, folder: Path | None = None) -> SweepFile | None:
    """Return the saved sweep of an experiment, the user's before the built-in one, or None."""
    name = f"{experiment_name}.jsonl"
    places: list[Path | Traversable] = [] if folder is None else [folder / name]
    with contextlib.suppress(ModuleNotFoundError):
        places.append(importlib.resources.files("cxlbench.experiments") / "grid" / name)
    for place in places:
        if place.is_file():
            return read_sweep(place)
    return None


def _hash(value: Any) -> str:
    text = json.dumps(to_json(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
