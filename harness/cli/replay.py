"""``cxlbench replay``: a trace on a tier, in virtual time or on real bytes.

The command and its options; what it does is in ``replay_run.py``.
"""

from __future__ import annotations

from typing import Any

import click

from cxlbench.harness.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    SEED_HELP,
    SIZE,
    ZERO_OR_MORE,
    FiniteRange,
    examples,
    folder_option,
    given,
    json_option,
    refuse_idle,
    scale_option,
    seed_option_for,
    set_option,
)
from cxlbench.harness.cli.output import Output
from cxlbench.harness.cli.replay_run import WALL_SCALE, Options, count_reuse, replay_trace

OF_A_REPLAY = (
    "device",
    "overrides",
    "accelerator",
    "workers",
    "nodes",
    "devices",
    "capacity",
    "prefetch",
    "gpu_blocks",
    "gpu_kv",
    "open_loop",
    "think_cap_s",
    "speed",
    "wall",
    "processes",
    "folder",
    "scale",
    "verify",
    "faults",
    "unchecked",
    "seed",
)
"""What ``--statistics``, which replays nothing, has no use for."""

OF_STATISTICS = ("policy", "order", "at")
SPEED = FiniteRange(min=1e-3, max=1e6)


@click.command(
    short_help="Replay a trace on an emulated tier.",
    epilog=examples(
        "cxlbench replay chat.jsonl.gz --gpu-blocks 8",
        "cxlbench replay chat.jsonl.gz --gpu-blocks 8 --device cmm-h-256g --set dram_capacity=1GiB",
        "cxlbench replay chat.jsonl.gz --wall --folder /mnt/nvme --closed-loop --sessions 4",
        "cxlbench replay chat.jsonl.gz --wall --processes --workers 2 --gpu-blocks 8",
        "cxlbench replay chat.jsonl.gz --faults plan.toml --json",
        "cxlbench replay chat.jsonl.gz --statistics --at 16GiB --at 64GiB",
    ),
)
@click.argument("trace", type=FILE)
@click.option(
    "--device",
    default="cxl-hm-prototype",
    show_default=True,
    help="The tier's devices: a profile of a CXL-HM, a CMM-H or an expander, by name or file; "
    "or a device of your own, as module:function.",
)
@set_option
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="Decides the KV's size.")
@click.option("--accelerator", default="a100-80g", show_default=True, help="Profile of the GPUs.")
@click.option("--workers", type=COUNT, default=8, show_default=True, help="GPUs, one engine each.")
@click.option("--nodes", type=COUNT, default=1, show_default=True, help="Memory nodes.")
@click.option("--devices", type=COUNT, default=1, show_default=True, help="Devices on each node.")
@click.option("--capacity", type=SIZE, help="Of each device, full size. [default: its profile's]")
@click.option("--prefetch/--no-prefetch", default=True, help="HyMCache's prefetch. [default: on]")
@click.option("--gpu-blocks", type=click.IntRange(min=0), help="Each GPU's KV space, in blocks.")
@click.option(
    "--gpu-kv",
    type=SIZE,
    help="Or in bytes, full size. [default: what the weights leave of 90 % of the GPU's memory]",
)
@click.option("--block-tokens", type=COUNT, help="Tokens in a block. [default: the trace's own]")
@click.option("--limit", type=COUNT, help="Take the first so many requests only.")
@click.option("--sessions", type=COUNT, help="Take the first so many sessions only.")
@click.option(
    "--open-loop/--closed-loop",
    "open_loop",
    default=True,
    help="Requests come at the trace's times, or a think time after their predecessor in the "
    "session has ended (for traces with sessions). [default: open]",
)
@click.option(
    "--think-cap",
    "think_cap_s",
    type=ZERO_OR_MORE,
    default=60,
    show_default=True,
    help="Longest think time in a closed loop, s.",
)
@click.option(
    "--speed", type=SPEED, default=1, show_default=True, help="Plays arrivals so much faster."
)
@click.option("--wall/--virtual", default=False, help="Real bytes in real time. [default: virtual]")
@click.option(
    "--processes",
    is_flag=True,
    help="With --wall: Master, nodes and workers each in a process of its own.",
)
@folder_option
@scale_option(f"[default: 1, with --wall {WALL_SCALE}]")
@click.option(
    "--verify",
    type=click.Choice(["full", "footer"]),
    default="full",
    show_default=True,
    help="What readers check: every byte, or key and generation only.",
)
@click.option("--faults", type=FILE, help="A fault plan (TOML): what goes wrong, by seed.")
@click.option(
    "--unchecked",
    is_flag=True,
    help="With --folder: run though the calibration says the host cannot feed it.",
)
@click.option("--statistics", is_flag=True, help="Do not replay; count the trace's reuse.")
@click.option(
    "--mode",
    type=click.Choice(["whole-blocks", "as-recorded"]),
    help="Which blocks count in --statistics: as recorded, partial last ones too, or as an engine "
    "replays. [default: as-recorded; a replay is always whole-blocks]",
)
@click.option(
    "--at",
    type=SIZE,
    multiple=True,
    help="A cache size for --statistics, repeatable. [default: 16, 64, 256, 1024, 4096 GiB]",
)
@click.option(
    "--policy",
    default="lru",
    show_default=True,
    help="Policy of that cache: lru, fifo, clock, s3fifo, or your own module:object.",
)
@click.option(
    "--order",
    type=click.Choice(["tail-first", "head-first"]),
    default="tail-first",
    show_default=True,
    help="In which order that cache sees a request's blocks.",
)
@click.option(
    "--out",
    type=FOLDER,
    help="For result.json and run.json, and a plot, replay.png. [default: results/replay, no plot]",
)
@seed_option_for(
    f"{SEED_HELP} Contents and keys are drawn from it; if it is given, a fault plan's draws too, "
    "in place of the seed in its file."
)
@json_option
def replay(open_loop: bool, **values: Any) -> None:
    """Replay TRACE on an emulated tier, verify all it reads, and print figures by turn.

    In virtual time (default) a run at full size takes seconds, and the same seed gives the same
    result.json. With --wall real bytes move through real files in real time at a scale: the run
    first says how long it will take, and ends with a fidelity line that says whether this host kept
    the timing. Sizes and bandwidths are reported at full size. Formats of traces are told by their
    content.

    Exit codes: 0 fine; 1 wrong data was delivered, or something is held at the end (it is named);
    2 a bad option or file, or this host cannot do it; 3 a run with --wall did not keep its timing
    (the run is marked).
    """
    options = Options(closed_loop=not open_loop, seed_given=bool(given(("seed",))), **values)
    output = Output(as_json=options.as_json)
    _refuse_contradictions(options)
    if options.statistics:
        count_reuse(options, output)
    else:
        replay_trace(options, output)


def _refuse_contradictions(options: Options) -> None:
    if options.statistics:
        refuse_idle(OF_A_REPLAY, "--statistics counts a trace's reuse and replays nothing")
    else:
        refuse_idle(OF_STATISTICS, "it is for --statistics")
    if not options.closed_loop:
        refuse_idle(("think_cap_s",), "think times are for --closed-loop")
    if options.folder is None:
        refuse_idle(("unchecked",), "only a run in a --folder is checked against a calibration")
    if options.gpu_blocks is not None and options.gpu_kv is not None:
        raise click.UsageError("--gpu-blocks and --gpu-kv say the same: give one of them")
    if options.mode == "as-recorded" and not options.statistics:
        raise click.UsageError(
            "--mode as-recorded counts partial blocks, which no engine replays: it is for "
            "--statistics"
        )
    if options.processes and not options.wall:
        raise click.UsageError("--processes is for --wall: virtual time is in one process")
    if options.processes and options.faults is not None:
        raise click.UsageError(
            "--faults are injected where all is in one process; to kill processes at random, see "
            "docs/processes.md"
        )
    if options.folder is not None and not options.wall:
        raise click.UsageError("--folder is for --wall: in virtual time no bytes are moved")
