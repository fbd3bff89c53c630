"""All claims and their verdicts as one table of Markdown, for a repository or an issue.

What the HTML page says first, and nothing else of it: the claim, the paper's number, the measured
one and at which load, the verdict, the share of the assumption grid, and the reason. The same runs
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlbench.harness.experiment_record import Record
from cxlbench.harness.experiment_tables import Shares
from cxlbench.harness.results import Verdict


def claims_markdown(records: Sequence[Record], grids: Mapping[str, Shares]) -> str:
    """Return the page; a run that is partial or in the quick form says so."""
    verdicts = [claim.verdict for record in records for claim in record.claims]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in verdicts
    )
    lines = [
        "# What the papers claim, and what was measured",
        "",
        f"{len(verdicts)} claims: {counts}.",
        "*In the grid*: at how many points of the saved sweep over all assumptions the claim holds",
        "(quick form). `cxlbench run all` runs everything, `cxlbench report` makes a page of it",
        "with plots, set-ups and assumptions.",
    ]
    for record in records:
        form = "" if record.form == "full" else f" ({record.form})"
        lines += ["", f"## {record.name}: {record.title}{form}", "", f"{record.source}.", ""]
        if not record.claims:
            lines.append("No claim of a paper; rows and plots only.")
            continue
        lines += [
            "| claim | paper | measured | verdict | in the grid |",
            "|---|---|---|---|---|",
        ]
        shares = grids.get(record.name, {})
        for claim in record.claims:
            share = shares.get(claim.name)
            grid = "-" if share is None else f"{share[0]} of {share[1]}"
            at = f", {claim.at}" if claim.at else ""
            cells = (
                claim.statement,
                claim.expected,
                f"{claim.measured}{at}",
                f"**{claim.verdict.value}**",
                grid,
            )
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        reasons = {claim.reason: None for claim in record.claims if claim.reason}
        for reason in reasons:
            names = [claim.name for claim in record.claims if claim.reason == reason]
            lines += ["", f"- *{', '.join(names)}*: {_cell(reason)}"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text that ends no cell and begins no tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
