"""``cxlbench up``, ``worker`` and ``status``: HyMCache as processes (docs/processes.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cxlbench.harness.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    ZERO_OR_MORE,
    FiniteRange,
    examples,
    json_option,
    refuse_idle,
    set_option,
)
from cxlbench.harness.cli.output import Output

RUN_DIR = Path("run/cxlbench")
SPEED = FiniteRange(min=1e-3, max=1e6)


def run_dir_option(function: Any) -> Any:
    """Add ``--run-dir`` to a command that looks for a running deployment."""
    return click.option(
        "--run-dir",
        type=FOLDER,
        default=RUN_DIR,
        show_default=True,
        envvar="CXLBENCH_RUN_DIR",
        help="Run directory of the deployment; or CXLBENCH_RUN_DIR.",
    )(function)


@click.command(
    short_help="Run HyMCache as processes, until Ctrl-C.",
    epilog=examples(
        "cxlbench up",
        "cxlbench up --nodes 2 --capacity 32GiB --folder /mnt/nvme --restart",
        "cxlbench up --config tier.toml --scale 256",
    ),
)
@click.option("--config", type=FILE, help="The configuration (TOML). [default: none]")
@click.option("--run-dir", metavar="DIR", help="For sockets and logs. [default: run/cxlbench]")
@click.option("--nodes", metavar="N", help="Memory nodes, a process each. [default: 1]")
@click.option("--devices-per-node", metavar="N", help="Devices on each node. [default: 1]")
@click.option(
    "--device",
    metavar="PROFILE",
    help="The nodes' devices: a profile by name or file, or module:function of your own. "
    "[default: cxl-hm-prototype]",
)
@set_option
@click.option("--capacity", metavar="SIZE", help="Of each device, full size. [default: 64 GiB]")
@click.option("--block-bytes", metavar="SIZE", help="The usual block, full size. [default: 16 MiB]")
@click.option("--scale", metavar="N", help="Divide bytes and bytes/s by this. [default: 128]")
@click.option(
    "--folder",
    metavar="DIR",
    help="For the SSDs' files; they stay, and what is in them is found again at the next start. "
    "[default: main memory]",
)
@click.option("--prefetch/--no-prefetch", default=None, help="HyMCache's prefetch. [default: on]")
@click.option(
    "--deadline",
    "deadline_s",
    metavar="TIME",
    help="After which a read is a miss: 10s, 500ms; a number is seconds. [default: 10s]",
)
@click.option(
    "--call-timeout",
    "call_timeout_s",
    metavar="TIME",
    help="After which a call to Master or a node has failed. [default: 1s]",
)
@click.option(
    "--listen",
    metavar="WHERE",
    help="unix, or tcp://HOST:PORT and the ports after it. [default: unix]",
)
@click.option("--allow-remote", is_flag=True, default=None, help="Allow --listen beyond loopback.")
@click.option(
    "--numa-node", metavar="N", help="Bind the nodes' memory and threads to this NUMA node."
)
@click.option("--hugetlb", is_flag=True, default=None, help="The nodes' memory in huge pages.")
@click.option(
    "--dax",
    multiple=True,
    metavar="PATH",
    help="A /dev/dax* that holds the DRAM of a device; given once for each device, in order.",
)
@click.option(
    "--unthrottled", is_flag=True, default=None, help="Emulate no timing: as fast as this host is."
)
@click.option("--restart", is_flag=True, help="Start a process again that has died.")
@json_option
def up(config: Path | None, restart: bool, as_json: bool, **flags: Any) -> None:
    """Run Master and the nodes of a HyMCache tier, each a process, until Ctrl-C or SIGTERM.

    What runs is said by --config, by environment variables CXLBENCH_NODES, CXLBENCH_SCALE and so
    on, and by options, each overriding those before; all that is wrong is said at once. When
    everything is ready, the processes and where they serve are printed (with --json as one
    document). At the end nothing is left but the files in --folder, and the logs of a process that
    failed.

    Exit codes: 0 ended by Ctrl-C or SIGTERM, and all was running; 2 a bad configuration, this host
    cannot do it, or a process has died and was not started again.
    """
    from cxlbench.harness.cli.processes_run import run_up
    from cxlbench.harness.deployment_config import environment, read_config

    unthrottled = flags.pop("unthrottled")
    flags["throttled"] = None if unthrottled is None else False
    flags["device_set"] = flags.pop("overrides") or None
    flags["dax"] = list(flags["dax"]) or None
    spec = read_config(config, environment(), flags)
    run_up(spec, Output(as_json=as_json), restart=restart)


@click.command(
    short_help="Put a load on a running deployment, and verify all of it.",
    epilog=examples(
        "cxlbench worker",
        "cxlbench worker chat.jsonl.gz --gpu-blocks 8 --limit 200 --run-dir run/cxlbench",
    ),
)
@click.argument("trace", type=FILE, required=False)
@run_dir_option
@click.option(
    "--number",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="This worker's number, for its name in the output.",
)
@click.option(
    "--sessions",
    type=COUNT,
    help="Take the first so many sessions of TRACE only, or generate so many. "
    "[default: all of TRACE; generated: 4]",
)
@click.option(
    "--turns", type=COUNT, default=4, show_default=True, help="Turns of each generated session."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Of the generated workload: same seed, same requests.",
)
@click.option("--limit", type=COUNT, help="Take the first so many requests of TRACE only.")
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="Decides the KV's size.")
@click.option("--accelerator", default="a100-80g", show_default=True, help="Profile of the GPU.")
@click.option(
    "--gpu-blocks",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="The GPU's KV space, in blocks.",
)
@click.option(
    "--closed-loop/--open-loop",
    "closed_loop",
    default=None,
    help="Requests come a think time after their predecessor in the session has ended, or at the "
    "trace's times. [default: closed where the workload has sessions]",
)
@click.option(
    "--think-cap",
    "think_cap_s",
    type=ZERO_OR_MORE,
    default=1,
    show_default=True,
    help="Longest think time in a closed loop, s.",
)
@click.option(
    "--speed", type=SPEED, default=1, show_default=True, help="Plays arrivals so much faster."
)
@click.option(
    "--verify",
    type=click.Choice(["full", "footer"]),
    default="full",
    show_default=True,
    help="What the tier's reader checks; the worker checks every byte in any case.",
)
@json_option
def worker(trace: Path | None, run_dir: Path, number: int, as_json: bool, **options: Any) -> None:
    """Replay TRACE, or a small generated multi-turn workload, on a running deployment.

    One worker (one GPU with its connector) in this process; start several for more load. Every
    byte that is read is checked. Blocks that an earlier worker stored of the same workload are
    found: they count as seen before.

    Exit codes: 0 fine; 1 wrong data was delivered, or something is held at the end; 2 a bad option
    or file, or no deployment runs there; 3 the timing was not kept (the run is marked).
    """
    from cxlbench.harness.cli.processes_run import WorkerOptions, run_worker

    if trace is None:
        refuse_idle(("limit",), "it is for a TRACE")
    else:
        refuse_idle(("turns", "seed"), "they are for a generated workload")
    run_worker(WorkerOptions(trace, run_dir, number, **options), Output(as_json=as_json))


@click.command(
    short_help="Say what the processes of a deployment are doing.",
    epilog=examples("cxlbench status", "cxlbench status --run-dir run/cxlbench --json"),
)
@run_dir_option
@json_option
def status(run_dir: Path, as_json: bool) -> None:
    """Ask Master and each node of a running deployment what they hold; takes at most a second.

    Exit codes: 0 all answered; 2 one or more do not answer (the others are shown), or no deployment
    runs there.
    """
    from cxlbench.harness.cli.processes_run import run_status

    run_status(run_dir, Output(as_json=as_json))
