"""One experiment's section of the report: claims, plots, rows, set-up, assumptions, checks.

Units: as in the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cxlbench.harness.experiment_plot import svg_inline
from cxlbench.harness.experiment_record import PlotRecord, Record
from cxlbench.harness.experiment_tables import Shares, heading, took, written
from cxlbench.harness.report_html import (
    CLAIM_HEADS,
    anchor,
    cell_of,
    claim_row,
    code,
    folded,
    html_table,
    prose,
    row,
)
from cxlbench.harness.tables import plural, size

MANY_ROWS = 24
"""Longer tables are folded."""


def section(record: Record, grid: Shares) -> str:
    """Return the section of a run; ``grid`` has the shares of its claims."""
    place = anchor(record)
    badges = [f"{escape(record.source)}", f"{record.form} form", f"seed {record.seed}"]
    badges += [f"took {took(record.duration_s)}"] * (record.duration_s is not None)
    marks = "".join(
        f'<span class="badge{" warn" if "partial" in b else ""}">{b}</span>' for b in badges
    )
    claims = [
        claim_row(record, claim, grid.get(claim.name), named=False) for claim in record.claims
    ]
    label = f"Claims of {record.name}"
    parts = [
        f'<h2 id="{place}-title">{escape(record.name)}: {escape(record.title)}</h2>',
        f"<p>{marks}</p>",
        *(f"<p>{prose(part)}</p>" for part in record.about.split("\n\n")),
        _failed(record),
        f'<code class="command" title="One click selects it">{escape(record.command())}</code>',
        html_table(CLAIM_HEADS[1:], claims, label=label, sortable=len(claims) > 1)
        if claims
        else "",
        _plots(record, place),
        _rows(record),
        _notes(record),
        _checks(record),
        _setup(record),
        _assumptions(record),
        _profiles(record),
        _host(record),
    ]
    body = "\n".join(part for part in parts if part)
    return f"""<section class="experiment" id="{place}" aria-labelledby="{place}-title">
{body}
</section>
"""


def _failed(record: Record) -> str:
    return "".join(
        f'<p class="failed">Check failed: {escape(check.name)}: {escape(check.detail)}</p>'
        for check in record.checks
        if not check.ok
    )


def _plots(record: Record, place: str) -> str:
    figures = []
    for number, plot in enumerate(record.plots):
        note = f'<p class="small soft">{escape(plot.note)}</p>' if plot.note else ""
        svg = svg_inline(plot, prefix=f"{place}-{number}")
        figures.append(
            f"<figure><figcaption>{escape(plot.title)}</figcaption>{svg}{note}"
            f"{_numbers(plot)}</figure>"
        )
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _numbers(plot: PlotRecord) -> str:
    """Return a plot's numbers as a folded table, for those who cannot see it, or want them."""
    if plot.kind == "cdf":
        heads = [("", ""), *((f"p{p}", "number") for p in (50, 90, 99)), ("max", "number")]
        rows = [
            row([one.name, *(_at(one.x, share) for share in (0.5, 0.9, 0.99, 1.0))])
            for one in plot.series
            if one.x
        ]
        return folded(f"Numbers ({plot.x_label})", html_table(heads, rows, label=plot.title))
    xs = list(dict.fromkeys(x for one in plot.series for x in one.x))
    if len(xs) > 60:
        return ""
    known = [dict(zip(one.x, one.y, strict=True)) for one in plot.series]
    heads = [(plot.x_label, ""), *((one.name, "number") for one in plot.series)]
    rows = [
        row([x if isinstance(x, str) else f"{x:g}", *(one.get(x) for one in known)]) for x in xs
    ]
    return folded(f"Numbers ({plot.y_label})", html_table(heads, rows, label=plot.title))


def _at(ordered: Sequence[float | str], share: float) -> float:
    return float(ordered[round(share * (len(ordered) - 1))])


def _rows(record: Record) -> str:
    if not record.rows:
        return ""
    heads = []
    for name in record.columns:
        numbers = all(isinstance(row.get(name), (int, float, type(None))) for row in record.rows)
        heads.append((heading(name).replace("_", " "), "number" if numbers else ""))
    rows = [
        "<tr>" + "".join(cell_of(name, row.get(name)) for name in record.columns) + "</tr>"
        for row in record.rows
    ]
    label = f"Rows of {record.name}"
    table = html_table(heads, rows, label=label, sortable=True)
    return folded(f"Rows ({len(rows)})", table, unfolded=len(rows) <= MANY_ROWS)


def _notes(record: Record) -> str:
    if not record.notes:
        return ""
    return f"<h3>Notes</h3>{''.join(f'<p>{prose(note)}</p>' for note in record.notes)}"


def _checks(record: Record) -> str:
    if not record.checks:
        return ""
    rows = [row([c.name, "passed" if c.ok else "FAILED", c.detail]) for c in record.checks]
    passed = sum(check.ok for check in record.checks)
    table = html_table(
        [("check", ""), ("", ""), ("found", "")], rows, label=f"Checks of {record.name}"
    )
    title = f"Checks ({passed} of {len(rows)} passed)"
    return folded(title, table, unfolded=passed < len(rows))


def _setup(record: Record) -> str:
    if not record.setup:
        return ""
    rows = []
    for line in record.setup:
        mark = "given by --set" if line.changed else "assumption" if line.assumption else ""
        value = f"{written(line.value)} {line.unit}".strip()
        rows.append(row([code(line.name), value, mark, line.source]))
    heads = [("key", ""), ("value", ""), ("", ""), ("source", "")]
    table = html_table(heads, rows, label=f"Set-up of {record.name}")
    return folded(f"Set-up ({len(rows)})", table)


def _assumptions(record: Record) -> str:
    if not record.assumptions:
        return "<p class='small soft'>No assumptions: a source gives every number.</p>"
    rows = []
    for one in record.assumptions:
        span = " | ".join(one.choices) or f"{one.low} to {one.high}"
        rows.append(row([code(one.key), one.value, span, one.why]))
    heads = [("key", ""), ("value", ""), ("a sweep tries", ""), ("why", "")]
    table = html_table(heads, rows, label=f"Assumptions of {record.name}")
    return folded(f"Assumptions ({len(rows)})", table)


def _profiles(record: Record) -> str:
    if not record.profiles:
        return ""
    rows = [
        row([code(f"{name}.{line.name}"), line.value, line.mark])
        for name, lines in record.profiles.items()
        for line in lines
    ]
    table = html_table(
        [("number", ""), ("value", ""), ("", "")], rows, label=f"Profiles of {record.name}"
    )
    names = ", ".join(record.profiles)
    return folded(f"Profiles: {names}", table)


def _host(record: Record) -> str:
    said = [f"written {record.written}"] * bool(record.written)
    if record.host is not None:
        host = record.host
        said.append(
            f"on {host.processor or host.machine}, {plural(host.cores, 'core')}, "
            f"{size(host.memory_bytes)}, {host.system}"
        )
    said += [", ".join(f"{name} {text}" for name, text in sorted(record.versions.items()))]
    return f'<p class="small soft">{escape("; ".join(filter(None, said)))}</p>'
