"""``cxlbench doctor``: what this host is, and what of the bench it can run."""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.group import BAD_INPUT
from cxlbench.harness.cli.options import FOLDER, examples, json_option
from cxlbench.harness.cli.output import Output


@click.command(
    short_help="Say which features this host can run.",
    epilog=examples(
        "cxlbench doctor --folder /mnt/nvme",
    ),
)
@click.option(
    "--folder", type=FOLDER, default=Path(), help="Where backing files would go. [default: here]"
)
@json_option
def doctor(folder: Path, as_json: bool) -> None:
    """Look at this host and say which features it can run.

    Exit codes: 0 the bench runs here; 2 something that it needs is missing, or the folder cannot be
    used.
    """
    from cxlbench.harness.doctor import examine
    from cxlbench.harness.tables import left_table

    output = Output(as_json=as_json)
    found = examine(folder)
    rows = [(one.name, one.value, one.state.value, one.means) for one in found.findings]
    output.say(left_table(("this host", "", "", ""), rows))
    output.say()
    features = [(one.name, "yes" if one.available else "no", one.why) for one in found.features]
    output.say(left_table(("feature", "", ""), features))
    output.document(found)
    if not found.ok:
        raise click.exceptions.Exit(BAD_INPUT)
