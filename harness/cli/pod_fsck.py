"""``cxlbench pod fsck``: check a region that TraCT left on a file or device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from cxlbench.harness.cli.group import BAD_INPUT, WRONG_DATA
from cxlbench.harness.cli.options import FILE, examples, json_option
from cxlbench.harness.cli.output import Output


@click.command(
    short_help="Check a TraCT region on a file.",
    epilog=examples("cxlbench pod fsck /dev/shm/pod.region"),
)
@click.argument("file", type=FILE)
@json_option
def fsck(file: Path, as_json: bool) -> None:
    """Check the region in FILE: header, index, LRU list, blocks, bitmap, roots, pins, locks.

    No node may be using it. Nothing is changed: a pod repairs its region when it restarts.

    Exit codes: 0 sound; 1 something is wrong; 2 FILE holds no region of this version.
    """
    from cxlbench.emu.pod_layout import PodLayoutError, PodShape
    from cxlbench.emu.pod_mappings import PodInUseError
    from cxlbench.emu.pod_processes import LivePod
    from cxlbench.harness.tables import listing, size
    from cxlbench.tract.errors import TractError
    from cxlbench.tract.fsck import open_and_check

    output = Output(as_json=as_json)
    nbytes = file.stat().st_size
    try:
        shape = PodShape(region_bytes=nbytes, nodes=1, mode="native")
        with LivePod(shape, region=file) as pod:
            layout, report = open_and_check(pod.memory(0), nbytes)
    except (TractError, PodLayoutError, PodInUseError) as error:
        output.note(f"error: {file}: {error}")
        raise click.exceptions.Exit(BAD_INPUT) from error
    counts = [
        (name.replace("_", " "), f"{value:,}")
        for name, value in dataclasses.asdict(report).items()
        if name != "problems"
    ]
    output.say(f"{file}: {size(nbytes)}, made for {layout.nodes} nodes")
    output.say(listing(counts))
    for problem in report.problems:
        output.say(f"WRONG: {problem}")
    output.say("sound" if report.sound else f"{len(report.problems)} problems")
    output.document({"file": str(file), "sound": report.sound, **dataclasses.asdict(report)})
    if not report.sound:
        raise click.exceptions.Exit(WRONG_DATA)
