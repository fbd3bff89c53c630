"""Compares two runs of an experiment: set-ups, rows side by side, verdicts that changed.

Rows belong together by the columns that name them (texts and whole numbers, as many of the leading
ones as tell all rows apart); where no such columns do, by their place.

Units: those of the columns; a ratio is B over A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cxlbench.harness.experiment import ExperimentError, Row, Scalar
from cxlbench.harness.experiment_catalog import nearest
from cxlbench.harness.experiment_folder import is_record, read_record, records_in
from cxlbench.harness.experiment_record import Record
from cxlbench.harness.results import Verdict

NOT_THERE = "(not there)"


@dataclass(frozen=True, slots=True)
class Change:
    """Something in the set-up that is not the same."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of one row in both runs."""

    key: tuple[Scalar | None, ...]
    a: Scalar | None
    b: Scalar | None

    @property
    def ratio(self) -> float | None:
        """B over A; None where that is no number."""
        if isinstance(self.a, (int, float)) and isinstance(self.b, (int, float)) and self.a:
            return self.b / self.a
        return None


@dataclass(frozen=True, slots=True)
class FigurePairs:
    """One column in both runs."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def same(self) -> bool:
        """Whether it is equal in all rows."""
        return all(pair.a == pair.b for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class ClaimPair:
    """One claim in both runs; a claim that one of them does not have reads ``(not there)``."""

    name: str
    a_measured: str
    a_verdict: str
    b_measured: str
    b_verdict: str

    @property
    def changed(self) -> bool:
        """Whether its verdict is another one."""
        return self.a_verdict != self.b_verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one experiment side by side."""

    name: str
    a: Path
    b: Path
    setup: tuple[Change, ...]
    keys: tuple[str, ...]
    figures: tuple[FigurePairs, ...]
    only_a: int
    only_b: int
    claims: tuple[ClaimPair, ...]


def pairs_of_runs(a: Path, b: Path, names: Sequence[str] = ()) -> list[tuple[Path, Path]]:
    """Return the folders to compare: ``a`` and ``b``, or the runs by name inside both.

    Raises:
        ExperimentError: one of them holds no run, or they have none of ``names`` in common.
    """
    if is_record(a) and is_record(b):
        return [(a, b)]
    for one, other in ((a, b), (b, a)):
        if is_record(one):
            raise ExperimentError(
                f"{one} is one run and {other} is not; name two runs, or two folders of runs"
            )
    in_a, in_b = records_in(a), records_in(b)
    both = [name for name in in_a if name in in_b]
    for name in names:
        if name not in both:
            otherwise = f"both have {', '.join(both) or 'no run in common'}"
            hint = nearest(name, both, otherwise=otherwise)
            raise ExperimentError(f"{a} and {b} do not both have a run {name!r}; {hint}")
    if not both:
        raise ExperimentError(
            f"no run is in both: {a} has {', '.join(in_a) or 'none'}, "
            f"{b} has {', '.join(in_b) or 'none'}"
        )
    return [(in_a[name], in_b[name]) for name in names or both]


def compare(a: Path, b: Path) -> Comparison:
    """Compare the runs in two folders.

    Raises:
        ExperimentError: they are not of the same experiment, or one of them is damaged.
    """
    first, second = read_record(a), read_record(b)
    if first.name != second.name:
        raise ExperimentError(
            f"{a} is of {first.name} and {b} of {second.name}; compare two runs of one experiment"
        )
    columns = [name for name in first.columns if name in second.columns]
    keys = key_columns(columns, first.rows, second.rows)
    rows_a, rows_b = _by_key(first.rows, keys), _by_key(second.rows, keys)
    both = [key for key in rows_a if key in rows_b]
    figures = [
        FigurePairs(name, tuple(Pair(k, rows_a[k].get(name), rows_b[k].get(name)) for k in both))
        for name in columns
        if name not in keys
    ]
    return Comparison(
        name=first.name,
        a=a,
        b=b,
        setup=tuple(_changes(first, second)),
        keys=tuple(keys) or ("row",),
        figures=tuple(figures),
        only_a=len(rows_a) - len(both),
        only_b=len(rows_b) - len(both),
        claims=tuple(_claims(first, second)),
    )


def key_columns(columns: Sequence[str], *tables: Sequence[Row]) -> list[str]:
    """Return the columns that name the rows of all ``tables``; none if no columns do."""
    naming = [
        name
        for name in columns
        if all(isinstance(row.get(name), (str, int)) for rows in tables for row in rows)
    ]
    for count in range(1, len(naming) + 1):
        keys = naming[:count]
        if _tells_apart(keys, tables):
            for name in keys:  # those that say nothing
                fewer = [key for key in keys if key != name]
                keys = fewer if fewer and _tells_apart(fewer, tables) else keys
            return keys
    return []


def _tells_apart(keys: Sequence[str], tables: Sequence[Sequence[Row]]) -> bool:
    return all(len(_by_key(rows, keys)) == len(rows) for rows in tables)


def _by_key(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Scalar | None, ...], Row]:
    if not keys:
        return {(place,): row for place, row in enumerate(rows, 1)}
    return {tuple(row.get(name) for name in keys): row for row in rows}


def _changes(a: Record, b: Record) -> list[Change]:
    said_a, said_b = _said(a), _said(b)
    names = list(dict.fromkeys([*said_a, *said_b]))
    pairs = [(name, said_a.get(name, NOT_THERE), said_b.get(name, NOT_THERE)) for name in names]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _said(record: Record) -> Mapping[str, str]:
    """Return every number and choice of a set-up as text, by name."""
    said = {
        "form": "quick" if record.quick else "full",
        "seed": str(record.seed),
        "complete": "no" if record.partial else "yes",
    }
    if record.tiers:
        said["more tiers"] = ", ".join(record.tiers)
    for line in record.setup:
        said[line.name] = f"{line.value} {line.unit}".strip()
    for name, lines in record.profiles.items():
        said.update({f"{name}.{line.name}": line.value for line in lines})
    said.update({f"version of {name}": text for name, text in record.versions.items()})
    return said


def _claims(a: Record, b: Record) -> list[ClaimPair]:
    in_a = {claim.name: claim for claim in a.claims}
    in_b = {claim.name: claim for claim in b.claims}
    found = []
    for name in dict.fromkeys([*in_a, *in_b]):
        sides = []
        for claims in (in_a, in_b):
            claim = claims.get(name)
            verdict: Verdict | str = NOT_THERE if claim is None else claim.verdict
            sides += ["-" if claim is None else claim.measured, str(verdict)]
        found.append(ClaimPair(name, *sides))
    return found
