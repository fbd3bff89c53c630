"""The report: one HTML page that needs nothing but itself.

The claims of all experiments come first, with what the paper says, what was measured, the verdict
in words, and in how much of the assumption grid it holds; then a section for each experiment:
plots, rows, set-up, assumptions, checks, and the command that repeats the run. Plots are drawn from
the saved data into the page. No script is needed to read it, and nothing is loaded from anywhere.

Units: as in the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.experiment_record import Record
from cxlbench.harness.experiment_tables import Shares, took
from cxlbench.harness.report_html import CLAIM_HEADS, LOOKS, anchor, claim_row, html_table
from cxlbench.harness.report_section import section
from cxlbench.harness.results import Verdict
from cxlbench.harness.tables import plural

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def report_page(
    records: Sequence[Record],
    grids: Mapping[str, Shares],
    *,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> str:
    """Return the page of ``records``; ``grids`` has the shares of their claims by experiment."""
    sections = []
    for number, record in enumerate(records, 1):
        sections.append(section(record, grids.get(record.name, {})))
        progress("sections of the report", number, len(records))
    assets = files("cxlbench.harness") / "report_assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>cxlbench: claims of the papers, and what was measured</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the claims</a>
<div class="frame">
{_navigation(records)}
<main id="main">
{_head(records)}
{_claims(records, grids)}
{_runs(records)}
{"".join(sections)}
</main>
</div>
<script>
{script}</script>
</body>
</html>
"""


def write_page(page: str, path: Path) -> None:
    """Write the page, complete or not at all.

    Raises:
        HostLimitError: the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(page, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise HostLimitError(
            f"cannot write the report {path}: {error.strerror or error}; choose another file (-o)"
        ) from error


# -- the top of the page ---------------------------------------------------------------------------


def _navigation(records: Sequence[Record]) -> str:
    items = []
    for record in records:
        dots = "".join(f'<i class="{LOOKS[claim.verdict][0]}"></i>' for claim in record.claims)
        items.append(
            f'<li><a href="#{anchor(record)}">{escape(record.name)}'
            f'<span class="dots" aria-hidden="true">{dots}</span></a></li>'
        )
    return f"""<nav aria-label="Contents">
<h2>Contents</h2>
<ol><li><a href="#claims">All claims</a></li><li><a href="#runs">All runs</a></li></ol>
<h2>Experiments</h2>
<ol>{"".join(items)}</ol>
<button id="theme" type="button" hidden>Light or dark</button>
</nav>"""


def _head(records: Sequence[Record]) -> str:
    warnings = []
    for words, bad, some in (
        ("with checks that FAILED", True, [r for r in records if not r.ok]),
        ("partial, stopped before the end", True, [r for r in records if r.partial]),
        ("in the quick form, not at full size", False, [r for r in records if r.quick]),
        ("with a changed set-up", False, [r for r in records if r.overrides]),
    ):
        if some:
            names = ", ".join(
                f'<a href="#{anchor(record)}">{escape(record.name)}</a>' for record in some
            )
            kind = ' class="bad"' if bad else ""
            warnings.append(f"<li{kind}>{plural(len(some), 'run')} {words}: {names}</li>")
    versions = {tuple(sorted(record.versions.items())) for record in records}
    of = "; or of ".join(", ".join(f"{k} {v}" for k, v in sorted(one)) for one in sorted(versions))
    counts = {verdict: sum(r.verdicts()[verdict] for r in records) for verdict in Verdict}
    total = sum(counts.values())
    bar = "".join(
        f'<button type="button" class="{LOOKS[verdict][0]}" style="flex-grow:{max(count, 0.01)}" '
        f'data-verdict="{LOOKS[verdict][0]}" aria-pressed="false"><b>{count}</b>'
        f"{LOOKS[verdict][1]} {verdict.value}</button>"
        for verdict, count in counts.items()
    )
    return f"""<header>
<h1>What the papers claim, and what was measured</h1>
<p class="soft">{plural(total, "claim")} of {plural(len(records), "experiment")}, run in virtual
time by the real HyMCache and TraCT code under a serving-engine model. Nothing is fitted to a claim,
and numbers that no source gives are listed as assumptions.</p>
<div class="bar" role="group" aria-label="Show only claims with one verdict">{bar}</div>
<ul class="plain small">{"".join(warnings)}<li class="soft">Made by {escape(of)}</li></ul>
</header>"""


def _claims(records: Sequence[Record], grids: Mapping[str, Shares]) -> str:
    rows = [
        claim_row(record, claim, grids.get(record.name, {}).get(claim.name), named=True)
        for record in records
        for claim in record.claims
    ]
    return f"""<section aria-labelledby="claims-title" id="claims">
<h2 id="claims-title">All claims</h2>
<p class="small soft"><b>Holds</b>: within the claim's band around the paper's number.
<b>Direction only</b>: a gain or loss as the paper says, of another size. <b>Does not hold</b>:
neither. <b>Not decided</b>: the run gave no answer. <i>In the grid</i>: at how many points of the
saved sweep over the assumptions the claim holds.</p>
{html_table(CLAIM_HEADS, rows, label="All claims", sortable=True)}
</section>"""


def _runs(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        counts = record.verdicts()
        passed = sum(check.ok for check in record.checks)
        rows.append(
            "<tr>"
            f'<td class="nowrap"><a href="#{anchor(record)}">{escape(record.name)}</a></td>'
            f"<td>{escape(record.title)}</td><td>{escape(record.form)}</td>"
            + "".join(f'<td class="number">{counts[verdict]}</td>' for verdict in Verdict)
            + f'<td class="number">{passed} of {len(record.checks)}</td>'
            f'<td class="number" data-sort="{record.duration_s or 0:.3f}">'
            f"{took(record.duration_s)}</td></tr>"
        )
    heads = [("experiment", ""), ("title", ""), ("form", "")]
    heads += [(verdict.value, "number") for verdict in Verdict]
    heads += [("checks passed", "number"), ("took", "number")]
    return f"""<section aria-labelledby="runs-title" id="runs">
<h2 id="runs-title">All runs</h2>
{html_table(heads, rows, label="All runs", sortable=True)}
</section>"""
