"""``cxlbench calibrate``: what the folder of the backing files can feed."""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.options import FOLDER, POSITIVE, SIZE, examples, json_option
from cxlbench.harness.cli.output import Output

LEAST_BYTES = 1 << 20


@click.command(
    short_help="Measure what the disk under a folder can feed.",
    epilog=examples(
        "cxlbench calibrate --folder /mnt/nvme --seconds 10",
    ),
)
@click.option("--folder", type=FOLDER, default=Path(), help="What is measured. [default: here]")
@click.option(
    "--seconds",
    type=POSITIVE,
    default=20,
    show_default=True,
    help="For all patterns together; fio takes at least 1 s for each of 16 (4 with --quick).",
)
@click.option("--fio/--no-fio", "use_fio", default=True, help="Use fio if it is installed.")
@click.option("--quick", is_flag=True, help="1 MiB sequential only: what decides the scale.")
@click.option(
    "--size",
    type=SIZE,
    default="256MiB",
    show_default=True,
    help="Of the file that is used, at least 1MiB.",
)
@json_option
def calibrate(
    folder: Path, seconds: float, use_fio: bool, quick: bool, size: int, as_json: bool
) -> None:
    """Measure what the disk under a folder can do, and which scale each device needs there.

    Reads and writes, also mixed, of 1 MiB and 4 KiB, sequential and random, past the page cache
    where possible. The figures are remembered: `replay --wall` refuses a run that the host was
    measured not to feed.

    Exit codes: 0 measured and remembered; 2 a bad option, the folder cannot be measured, or the
    figures (printed all the same) cannot be remembered.
    """
    import math

    from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, list_profiles, load_profile
    from cxlbench.harness import calibrate as calibration
    from cxlbench.harness.disk_probe import HOW_TO_GET_FIO, find_fio
    from cxlbench.harness.tables import gbps, left_table, table
    from cxlbench.harness.tables import size as size_text

    output = Output(as_json=as_json)
    if size < LEAST_BYTES:
        raise click.BadParameter(
            f"{size_text(size)} holds no block of {size_text(LEAST_BYTES)}: use 1MiB or more",
            param_hint="--size",
        )
    if use_fio and find_fio() is None:
        output.note(HOW_TO_GET_FIO)
    with output.progress() as progress:
        found = calibration.calibrate(
            folder,
            seconds=seconds,
            use_fio=use_fio,
            quick=quick,
            size_bytes=size,
            progress=progress,
        )
    rows = [
        (
            f"{'random' if rate.pattern.random else 'sequential'} "
            f"{size_text(rate.pattern.block_bytes)}",
            f"{rate.pattern.read_share:.0%}",
            gbps(rate.read_bytes_per_s),
            gbps(rate.write_bytes_per_s),
        )
        for rate in found.rates
    ]
    output.say(
        f"{folder.resolve()} by {found.method}"
        + ("" if found.direct else ", through the page cache: figures of memory, not disk")
    )
    output.say()
    output.say(table(("pattern", "reads of\nall bytes", "read\nGB/s", "write\nGB/s"), rows))
    devices = []
    for one in list_profiles():
        if one.kind in (CxlHmProfile.kind, CmmHProfile.kind):
            profile = load_profile(one.name)
            assert isinstance(profile, (CxlHmProfile, CmmHProfile))
            devices.append((one.name, calibration.required_scale(profile, found)))
    output.say()
    output.say(
        left_table(
            ("device", "scale from which on this folder feeds it"),
            [
                (
                    name,
                    f"{scale:.1f}, so --scale {calibration.fitting_scale(scale):g}"
                    if math.isfinite(scale)
                    else "none",
                )
                for name, scale in devices
            ],
        )
    )
    output.document({"calibration": found, "required_scale": dict(devices)})
    output.say(f"remembered in {calibration.remember(found)}")
