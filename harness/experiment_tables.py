"""What ``cxlbench list``, ``run`` and ``compare`` print: tables for a terminal.

A column that is the same in all rows is said once, above the table; a table that is wider than the
terminal is continued below, with the columns that name its rows again.

Units: in the names of columns; s for durations.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cxlbench.harness.experiment import (
    Check,
    Experiment,
    ExperimentError,
    InputMissingError,
    Scalar,
)
from cxlbench.harness.experiment_catalog import Catalog
from cxlbench.harness.experiment_compare import Comparison, key_columns
from cxlbench.harness.experiment_folder import is_record, read_record
from cxlbench.harness.experiment_record import ClaimRecord, Record, paragraphs
from cxlbench.harness.experiment_run import Runs
from cxlbench.harness.results import Verdict
from cxlbench.harness.sweep_axes import SweepError
from cxlbench.harness.sweep_rows import SWEEPS_FOLDER, shares
from cxlbench.harness.tables import gbps, left_table, plural, size, table

Shares = Mapping[str, tuple[int, int]]
"""By claim: at how many points of the assumption grid it holds, and how many points there are."""

LEAST_WIDTH = 100
NONE_FOUND = (
    "There is no experiment: install cxlbench again (`pip install -e .`), which names them."
)


def width() -> int:
    """Return how wide a table may be: that of the terminal, if it is wide."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns)


def written(value: Scalar | None) -> str:
    """Return a value as a cell shows it: numbers at four digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return value


def heading(column: str) -> str:
    """Return a column's name for people: bandwidth is in GB/s, sizes carry their unit."""
    for ending, unit in (("_bytes_per_s", "_GB/s"), ("_bytes", "")):
        if column.endswith(ending):
            return column.removesuffix(ending) + unit
    return column.replace("_per_", "/")


def cell(column: str, value: Scalar | None) -> str:
    """Return a value of a column as a cell shows it, in the unit of its heading."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if column.endswith("_bytes_per_s"):
            return gbps(value)
        if column.endswith("_bytes"):
            return size(value)
    return written(value)


def took(duration_s: float | None) -> str:
    """Return a duration of the host's clock."""
    if duration_s is None:
        return "-"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{duration_s:.1f} s"


def load_shares(record: Record, results: Path, note: Callable[[str], None]) -> Shares:
    """Return the saved share of the assumption grid in which each claim of an experiment holds.

    A damaged file of a sweep is told by ``note``, and hides nothing else.
    """
    try:
        return shares(record.name, results / SWEEPS_FOLDER.name, setup=record.grid)
    except SweepError as error:
        note(str(error))
        return {}


def shared(share: tuple[int, int] | None) -> str:
    """Return a share of the grid in words."""
    return "-" if share is None or not share[1] else f"{share[0]} of {share[1]}"


# -- list ------------------------------------------------------------------------------------------


def catalog_text(catalog: Catalog, results: Path) -> str:
    """Return the table of all experiments, and what is broken."""
    rows = []
    for experiment in catalog.experiments.values():
        durations = saved_durations(experiment.name, results)
        rows.append(
            [
                experiment.name,
                experiment.source,
                textwrap.fill(experiment.title, 48),
                str(len(experiment.claims)),
                *(took(duration) for duration in durations),
            ]
        )
    headers = ("name", "source", "title", "claims", "quick\ntook", "full\ntook")
    lines = [left_table(headers, rows)] if rows else [NONE_FOUND]
    return "\n".join([*lines, *(["", *map(str, catalog.broken)] if catalog.broken else [])])


def saved_durations(name: str, results: Path) -> tuple[float | None, float | None]:
    """Return how long the saved runs of the quick and of the full form took, s."""
    found: list[float | None] = []
    for folder in (results / f"{name}-quick", results / name):
        try:
            record = read_record(folder) if is_record(folder) else None
        except ExperimentError:
            record = None
        found.append(None if record is None or record.partial else record.duration_s)
    return found[0], found[1]


def experiment_text(experiment: Experiment) -> str:
    """Return all that is known of an experiment before it runs."""
    knobs = [
        [
            knob.name,
            _with_unit(written(knob.value), knob.unit),
            _with_unit(written(knob.at(quick=True)), knob.unit),
            "assumption" if knob.assumption else "",
            textwrap.fill(" | ".join(knob.choices) or knob.source, 48),
        ]
        for knob in experiment.knobs
    ]
    claims = [
        [claim.name, textwrap.fill(claim.statement, 56), claim.judge(None).expected, claim.source]
        for claim in experiment.claims
    ]
    lines = [
        f"{experiment.name}: {experiment.title} ({experiment.source})",
        "",
        *(f"{textwrap.fill(part, 100)}\n" for part in paragraphs(experiment.about).split("\n\n")),
        "Claims",
        left_table(("claim", "statement", "paper", "where"), claims),
        "",
        "Keys for --set: the set-up",
        left_table(("key", "full", "quick", "", "source or choices"), knobs),
        "",
        "and every number of these profiles, as PROFILE.FIELD=VALUE with a unit "
        "(`cxlbench profiles show PROFILE` lists them):",
        f"  {', '.join(experiment.profiles) or 'none'}",
    ]
    return "\n".join(lines)


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit else text


# -- run -------------------------------------------------------------------------------------------


def record_text(record: Record, folder: Path, grid: Shares) -> str:
    """Return the report of one run: rows, claims, checks."""
    lines = [
        f"{record.name}: {record.title} ({record.source}); {record.form} form, seed {record.seed}",
        "",
        *rows_text(record),
        "",
        claims_text(record.claims, grid),
    ]
    if record.checks:
        lines += ["", *checks_text(record.checks)]
    lines += ["", *(f"note: {textwrap.fill(note, width() - 6)}" for note in record.notes)]
    if record.partial:
        lines.append("PARTIAL: it was stopped before its end; figures and verdicts are of a part.")
    lines += [f"results: {folder}, {took(record.duration_s)}", ""]
    return "\n".join(lines)


def rows_text(record: Record) -> list[str]:
    """Return the rows as tables; what is the same in all of them first."""
    if not record.rows:
        return ["no rows"]
    values = {name: {row.get(name) for row in record.rows} for name in record.columns}
    same = [name for name in record.columns if len(values[name]) == 1 and len(record.rows) > 1]
    lines = []
    if same:
        first = record.rows[0]
        said = ", ".join(f"{heading(name)} {cell(name, first.get(name))}" for name in same)
        lines += [textwrap.fill(f"In all rows: {said}.", width()), ""]
    columns = [name for name in record.columns if name not in same]
    keys = [name for name in key_columns(columns, record.rows) if name in columns]
    keys = keys or columns[:1]
    for part in _parts(keys, [name for name in columns if name not in keys], record.rows):
        headers = [heading(name).replace("_", "\n") for name in part]
        rows = [[cell(name, row.get(name)) for name in part] for row in record.rows]
        lines += [table(headers, rows), ""]
    return lines[:-1]


def _parts(
    keys: Sequence[str], others: Sequence[str], rows: Sequence[Mapping[str, Scalar | None]]
) -> list[list[str]]:
    """Return the columns of each table, so that none is too wide."""

    def wide(name: str) -> int:
        words = heading(name).split("_")
        return 2 + max(*map(len, words), *(len(cell(name, row.get(name))) for row in rows))

    parts = [list(keys)]
    for name in others:
        if sum(map(wide, [*parts[-1], name])) > width() and len(parts[-1]) > len(keys):
            parts.append(list(keys))
        parts[-1].append(name)
    return parts


def claims_text(claims: Sequence[ClaimRecord], grid: Shares) -> str:
    """Return the claims with their verdicts; reasons below."""
    if not claims:
        return "no claims"
    rows = [
        [
            claim.name,
            textwrap.fill(claim.statement, 44),
            claim.expected,
            claim.measured,
            textwrap.fill(claim.at, 16),
            claim.verdict.value,
            shared(grid.get(claim.name)),
        ]
        for claim in claims
    ]
    headers = ["claim", "statement", "paper", "measured", "at", "verdict", "holds in\nthe grid"]
    if not any(claim.at for claim in claims):
        headers, rows = _without(headers, rows, "at")
    if not grid:
        headers, rows = _without(headers, rows, "holds in\nthe grid")
    reasons = [f"{claim.name}: {claim.reason}" for claim in claims if claim.reason]
    return "\n".join([left_table(headers, rows), *(textwrap.fill(r, width()) for r in reasons)])


def _without(
    headers: list[str], rows: list[list[str]], name: str
) -> tuple[list[str], list[list[str]]]:
    place = headers.index(name)
    return headers[:place] + headers[place + 1 :], [r[:place] + r[place + 1 :] for r in rows]


def checks_text(checks: Sequence[Check]) -> list[str]:
    """Return what failed in full, or that nothing did."""
    failed = [check for check in checks if not check.ok]
    if not failed:
        return [f"{plural(len(checks), 'check')} passed: {', '.join(c.name for c in checks)}"]
    return [f"CHECK FAILED: {check.name}: {check.detail}" for check in failed]


def summary_text(runs: Runs, results: Path, grids: Mapping[str, Shares]) -> str:
    """Return the table at the end of several runs: experiment by verdict."""
    rows: list[list[str]] = []
    totals = dict.fromkeys(Verdict, 0)
    for outcome in runs.outcomes:
        record = outcome.record
        if record is None:
            why = "given up" if isinstance(outcome.error, KeyboardInterrupt) else "FAILED"
            why = "skipped" if isinstance(outcome.error, InputMissingError) else why
            rows.append([outcome.name, why, *["-"] * (len(Verdict) + 3)])
            continue
        counts = record.verdicts()
        for verdict, count in counts.items():
            totals[verdict] += count
        passed = sum(check.ok for check in record.checks)
        rows.append(
            [
                record.name,
                record.form,
                *(str(counts[verdict] or ".") for verdict in Verdict),
                _mean_share(grids.get(record.name, {})),
                f"{passed} of {len(record.checks)}" + ("" if record.ok else " !"),
                took(record.duration_s),
            ]
        )
    rows += [[name, "not begun", *["-"] * (len(Verdict) + 3)] for name in runs.left]
    total_s = sum(record.duration_s or 0.0 for record in runs.records)
    rows.append(["all", "", *(str(totals[v]) for v in Verdict), "", "", took(total_s)])
    headers = [
        "experiment",
        "form",
        *(verdict.value.replace(" ", "\n") for verdict in Verdict),
        "claims hold\nin the grid",
        "checks\npassed",
        "took",
    ]
    if not any(grids.values()):
        headers, rows = _without(headers, rows, "claims hold\nin the grid")
    return f"{table(headers, rows)}\n\nresults: {results}; `cxlbench report` makes a page of them"


def _mean_share(grid: Shares) -> str:
    """Return the shares of an experiment's claims together."""
    points = sum(of for _, of in grid.values())
    return f"{sum(holds for holds, _ in grid.values()) / points:.0%}" if points else "-"


# -- compare ---------------------------------------------------------------------------------------


def comparison_text(found: Comparison) -> str:
    """Return what differs between two runs of an experiment."""
    lines = [f"{found.name}: A is {found.a}, B is {found.b}", ""]
    if found.setup:
        lines.append("Set-up")
        rows = [[change.what, change.a, change.b] for change in found.setup]
        lines += [left_table(("", "A", "B"), rows), ""]
    else:
        lines += ["The set-ups are the same.", ""]
    equal = [figure.name for figure in found.figures if figure.same]
    for figure in found.figures:
        if figure.same:
            continue
        rows = [
            [
                *map(written, pair.key),
                cell(figure.name, pair.a),
                cell(figure.name, pair.b),
                _ratio(pair.ratio),
            ]
            for pair in figure.pairs
        ]
        lines += [heading(figure.name), table([*found.keys, "A", "B", "B/A"], rows), ""]
    if equal:
        lines += [
            textwrap.fill(f"Equal in all rows: {', '.join(map(heading, equal))}.", width()),
            "",
        ]
    if found.only_a or found.only_b:
        lines += [f"Rows in A only: {found.only_a}; in B only: {found.only_b}.", ""]
    changed = [claim for claim in found.claims if claim.changed]
    if changed:
        lines.append("Claims whose verdict changed")
        rows = [[c.name, c.a_measured, c.a_verdict, c.b_measured, c.b_verdict] for c in changed]
        lines.append(left_table(("claim", "A", "verdict A", "B", "verdict B"), rows))
    elif found.claims:
        lines.append(f"{plural(len(found.claims), 'claim')}, each with the same verdict in both.")
    return "\n".join([*lines, ""])


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
