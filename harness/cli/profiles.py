"""``cxlbench profiles``: the hardware that can be emulated, every number with its source."""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.options import FOLDER, SCALE, examples, json_option, set_option
from cxlbench.harness.cli.output import Output

SHOWN_SOURCE = 70


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
    epilog=examples(
        "cxlbench profiles show pm1743-class",
        "cxlbench profiles show cxl-hm-prototype --scale 128",
        "cxlbench profiles show my-device.toml --json",
    ),
)
@click.argument("name")
@set_option
@click.option("--scale", type=SCALE, default=1, help="Show the numbers at this scale too.")
@json_option
def show_command(name: str, overrides: dict[str, str], scale: float, as_json: bool) -> None:
    """Show a profile, by NAME or by the path of its file: every number, statistic and source.

    Numbers without a source are marked as assumptions.
    """
    from cxlbench.devices.profile import describe_profile, load_profile, scale_profile
    from cxlbench.harness.tables import left_table

    out = Output(as_json=as_json)
    profile = scale_profile(load_profile(name, overrides=overrides), scale)
    rows = describe_profile(profile)
    out.say(f"{profile.name} ({profile.kind}): {profile.description}")
    out.say()
    out.say(
        left_table(
            ("number", "value", "statistic", "", "source"),
            [(row.name, row.value, row.statistic, row.mark, _cut(row.source)) for row in rows],
        )
    )
    if any(len(row.source) > SHOWN_SOURCE for row in rows):
        out.say("\nSources are cut; --json has them whole.")
    out.document(
        {
            "name": profile.name,
            "kind": profile.kind,
            "description": profile.description,
            "scale": profile.scale,
            "numbers": [row._asdict() for row in rows],
        }
    )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_SOURCE else text[: SHOWN_SOURCE - 1] + "…"
