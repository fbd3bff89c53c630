"""``cxlbench profiles``: the hardware that can be emulated, every number with its source."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from cxlbench.harness.cli.options import FOLDER, SCALE, examples, json_option, set_option
from cxlbench.harness.cli.output import Output

LEAST_WIDTH = 80
FOLDED = {"statistic": 24, "source": 48}
"""Characters of a line of these columns, where nobody cuts lines."""


@click.group(
    short_help="List and show the emulated hardware.",
    epilog=examples(
        "cxlbench profiles show cxl-hm-prototype --set dram_capacity=32GiB",
    ),
)
def profiles() -> None:
    """List and show the profiles of devices, links and accelerators."""


@profiles.command(
    "list",
    short_help="List them.",
    epilog=examples(
        "cxlbench profiles list",
    ),
)
@click.option("--in", "folder", type=FOLDER, help="A folder with profiles of your own.")
@json_option
def list_command(folder: Path | None, as_json: bool) -> None:
    """List the profiles that there are."""
    from cxlbench.devices.profile import list_profiles
    from cxlbench.harness.tables import left_table

    out = Output(as_json=as_json)
    found = list_profiles(folder)
    rows = [(one.name, one.kind, one.error or one.description) for one in found]
    out.say(left_table(("name", "kind", "description"), rows))
    out.document(found)


@profiles.command(
    "show",
    short_help="Show one with its sources.",
    epilog=examples(
        "cxlbench profiles show pm1743-class",
        "cxlbench profiles show cxl-hm-prototype --scale 128",
        "cxlbench profiles show my-device.toml --json",
    ),
)
@click.argument("name")
@click.option("--in", "folder", type=FOLDER, help="A folder with profiles of your own.")
@set_option
@click.option("--scale", type=SCALE, default=1, help="Show the numbers at this scale too.")
@json_option
def show_command(
    name: str, folder: Path | None, overrides: dict[str, str], scale: float, as_json: bool
) -> None:
    """Show a profile, by NAME or by the path of its file: every number, statistic and source.

    Numbers without a source are marked as assumptions, those of --set as overrides. On a terminal
    lines are cut to its width; elsewhere long texts go over several lines.
    """
    from cxlbench.devices.profile import describe_profile, load_profile, scale_profile
    from cxlbench.harness.tables import left_table

    out = Output(as_json=as_json)
    profile = scale_profile(load_profile(name, overrides=overrides, folder=folder), scale)
    rows = describe_profile(profile)
    out.say(f"{profile.name} ({profile.kind}): {profile.description}")
    out.say()
    headers = ("number", "value", "statistic", "mark", "source")
    cells = [(row.name, row.value, row.statistic, row.mark, row.source) for row in rows]
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns, LEAST_WIDTH)
        text = left_table(headers, cells)
        lines = [_cut(line, width) for line in text.splitlines()]
        if lines != text.splitlines():
            lines.append("\nLines are cut to the terminal; --json, or a file, has them whole.")
        text = "\n".join(lines)
    else:
        text = left_table(headers, [_folded(headers, cell) for cell in cells])
    out.say(text)
    out.document(
        {
            "name": profile.name,
            "kind": profile.kind,
            "description": profile.description,
            "scale": profile.scale,
            "numbers": [row._asdict() for row in rows],
        }
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _folded(headers: Sequence[str], cells: Sequence[str]) -> list[str]:
    return [
        textwrap.fill(cell, FOLDED[header]) if header in FOLDED else cell
        for header, cell in zip(headers, cells, strict=True)
    ]
