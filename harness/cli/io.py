"""``cxlbench io``: a device under plain reads and writes, in fio's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cxlbench.harness.cli.group import TIMING_NOT_KEPT, WRONG_DATA
from cxlbench.harness.cli.options import (
    COUNT,
    POSITIVE,
    SIZE,
    examples,
    folder_option,
    json_option,
    refuse_idle,
    scale_option,
    seed_option,
    set_option,
)
from cxlbench.harness.cli.output import Output
from cxlbench.harness.cli.replay_run import WALL_SCALE, load_device

PATTERNS = ("read", "write", "randread", "randwrite", "rw", "randrw")


@click.command(
    short_help="Drive a device directly, in fio's words.",
    epilog=examples(
        "cxlbench io --rw randread --bs 16m --iodepth 4 --prefetch 8 --size 8GiB",
        "cxlbench io --device cmm-h-256g --set dram_capacity=4GiB --rw randread --size 8GiB",
        "cxlbench io --device cmm-h-256g --rw randrw --rwmixread 70 --bs 1m --size 2GiB",
        "cxlbench io --rw read --bs 16m --size 2GiB --wall --folder /mnt/nvme",
    ),
)
@click.option(
    "--device",
    default="cxl-hm-prototype",
    show_default=True,
    help="Profile of a CXL-HM, a CMM-H or an expander, or a device of your own (module:function).",
)
@set_option
@click.option(
    "--rw",
    type=click.Choice(PATTERNS),
    default="read",
    show_default=True,
    help="Sequential or random reads, writes, or both.",
)
@click.option(
    "--rwmixread",
    type=click.IntRange(0, 100),
    default=50,
    show_default=True,
    help="Percent of reads, for rw and randrw.",
)
@click.option("--bs", type=SIZE, default="16m", show_default=True, help="Bytes an operation.")
@click.option("--iodepth", type=COUNT, default=1, show_default=True, help="In flight, a job.")
@click.option("--numjobs", type=COUNT, default=1, show_default=True, help="Jobs side by side.")
@click.option(
    "--size", type=SIZE, default="1GiB", show_default=True, help="Range of each job, full size."
)
@click.option("--runtime", "runtime_s", type=POSITIVE, help="End after so many seconds.")
@click.option(
    "--prefetch",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Objects staged ahead of the reads of each job.",
)
@click.option("--wall/--virtual", default=False, help="Real bytes in real time. [default: virtual]")
@scale_option(f"[default: 1, with --wall {WALL_SCALE}]")
@folder_option
@seed_option
@json_option
def io(
    device: str, overrides: dict[str, str], wall: bool, scale: float | None, **given: Any
) -> None:
    """Read and write objects on one device, without a tier above it.

    All objects are written first; what is measured begins on a device that has just been filled.

    Exit codes: 0 fine; 1 wrong data was read, or something is held at the end; 2 a bad option, or
    this host cannot do it; 3 a run with --wall did not keep its timing.
    """
    output = Output(as_json=given.pop("as_json"))
    if given["rw"] not in ("rw", "randrw"):
        refuse_idle(("rwmixread",), "it is the share of reads in rw and randrw")
    folder: Path | None = given["folder"]
    if folder is not None and not wall:
        raise click.UsageError("--folder is for --wall: in virtual time no bytes are moved")
    from cxlbench.harness.io_bench import describe_io, run_io

    profile = load_device(device, overrides)
    with output.progress() as progress:
        found = run_io(
            profile,
            wall=wall,
            scale=scale or (WALL_SCALE if wall else 1),
            progress=progress,
            **given,
        )
    output.say(describe_io(found))
    if found.fidelity is not None and not found.fidelity.trusted:
        from cxlbench.harness.fidelity import WHAT_THEN

        output.note(WHAT_THEN)
    output.document(found)
    if not found.correct:
        raise click.exceptions.Exit(WRONG_DATA)
    if found.fidelity is not None and not found.fidelity.trusted:
        raise click.exceptions.Exit(TIMING_NOT_KEPT)
