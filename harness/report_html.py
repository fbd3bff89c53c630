"""Pieces of the report: tables, verdicts, shares, and text that must not become markup.

No units here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from cxlbench.harness.experiment import Scalar
from cxlbench.harness.experiment_record import ClaimRecord, Record
from cxlbench.harness.experiment_tables import cell, shared
from cxlbench.harness.results import Verdict

LOOKS = {
    Verdict.HOLDS: ("holds", "✓"),
    Verdict.DIRECTION: ("direction", "≈"),
    Verdict.FAILS: ("fails", "✗"),
    Verdict.OPEN: ("open", "?"),
}
"""Class and sign of a verdict: never told by its colour alone."""

CLAIM_HEADS = (
    ("experiment", ""),
    ("claim", ""),
    ("paper", ""),
    ("measured", ""),
    ("verdict", ""),
    ("in the grid", ""),
)


def claim_row(
    record: Record, claim: ClaimRecord, share: tuple[int, int] | None, *, named: bool
) -> str:
    """Return the row of a claim; ``named`` adds the column with its experiment."""
    kind, sign = LOOKS[claim.verdict]
    cells = []
    if named:
        link = f'<a href="#{anchor(record)}">{escape(record.name)}</a>'
        mark = '<br><span class="small soft">quick</span>' if record.quick else ""
        cells.append(f'<td class="nowrap">{link}{mark}</td>')
    why = f'<span class="why small">{prose(claim.reason)}</span>' if claim.reason else ""
    at = f'<br><span class="small soft">at {escape(claim.at)}</span>' if claim.at else ""
    value = "" if claim.value is None else f' data-sort="{claim.value!r}"'
    place = list(Verdict).index(claim.verdict)
    cells += [
        f'<td class="statement">{escape(claim.statement)} '
        f'<span class="small soft">({escape(claim.source)})</span>{why}</td>',
        f'<td class="nowrap">{escape(claim.expected)}</td>',
        f'<td class="measured"{value}><span class="nowrap">{escape(claim.measured)}</span>{at}'
        "</td>",
        f'<td data-sort="{place}"><span class="verdict {kind}"><span aria-hidden="true">{sign}'
        f"</span>{claim.verdict.value}</span></td>",
        _share_cell(share),
    ]
    return f'<tr data-verdict="{kind}">{"".join(cells)}</tr>'


def _share_cell(share: tuple[int, int] | None) -> str:
    if share is None or not share[1]:
        return '<td class="soft nowrap" data-sort="-1">no sweep</td>'
    part = share[0] / share[1]
    return (
        f'<td class="nowrap" data-sort="{part:.4f}"><span class="share" aria-hidden="true">'
        f'<i style="width:{part:.0%}"></i></span>{shared(share)}</td>'
    )


class Html(str):
    """Text that is HTML already."""


def code(text: str) -> Html:
    """Return a text as code, for ``row``."""
    return Html(f"<code>{escape(text)}</code>")


def prose(text: str) -> str:
    """Return a text with its ``names`` as code and its *stressed* words as such."""
    coded = re.sub(r"(`{1,2})([^`]+)\1", r"<code>\2</code>", escape(text))
    return re.sub(r"(?<![\w*>])\*(\w[^*<>]*\w|\w)\*(?![\w*<])", r"<em>\1</em>", coded)


def row(cells: Iterable[Scalar | None]) -> str:
    """Return a row of a table."""
    return "<tr>" + "".join(cell_of("", value) for value in cells) + "</tr>"


def cell_of(column: str, value: Scalar | None) -> str:
    """Return a value of a column of the rows as a cell that sorts by its number."""
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    text = escape(cell(column, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number" data-sort="{value!r}">{text}</td>'
    return f'<td class="number">{text}</td>' if value is None else f"<td>{text}</td>"


def html_table(
    heads: Sequence[tuple[str, str]], rows: Sequence[str], *, label: str, sortable: bool = False
) -> str:
    """Return a table that can be scrolled sideways, also by keyboard."""
    cells = "".join(
        f'<th scope="col"{f" class={kind!r}" if kind else ""}>{escape(text)}</th>'
        for text, kind in heads
    )
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table{kind}><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def folded(title: str, body: str, *, unfolded: bool = False) -> str:
    """Return a part that is folded away until somebody wants it."""
    state = " open" if unfolded else ""
    return f"<details{state}><summary>{escape(title)}</summary>{body}</details>"


def anchor(record: Record) -> str:
    """Return the id of an experiment's section."""
    return f"experiment-{record.name}".replace(".", "-")
