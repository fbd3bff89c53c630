"""``cxlbench demo``: why staging beats a transparent cache, in about a minute."""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.group import WRONG_DATA
from cxlbench.harness.cli.options import (
    FILE,
    FOLDER,
    POSITIVE,
    examples,
    json_option,
    refuse_idle,
    scale_option,
    seed_option,
)
from cxlbench.harness.cli.output import Output


@click.command(
    short_help="Compare four tiers with the same DRAM, on real bytes.",
    epilog=examples(
        "cxlbench demo",
        "cxlbench demo --trace lmcache_agent.jsonl.gz --budget 30 --folder /mnt/nvme",
    ),
)
@click.option("--trace", type=FILE, help="A trace file, in place of the generated workload.")
@click.option(
    "--budget",
    "budget_s",
    type=POSITIVE,
    default=60,
    show_default=True,
    help="With --trace: seconds of the trace that each tier replays on real bytes; the whole trace "
    "runs in virtual time.",
)
@click.option("--folder", type=FOLDER, help="Where backing files go. [default: in --out]")
@scale_option("[default: 128]")
@click.option(
    "--out", type=FOLDER, default=Path("results/demo"), show_default=True, help="For the results."
)
@seed_option
@click.option("--quick", is_flag=True, help="A smaller workload, for a first look.")
@click.option(
    "--processes", is_flag=True, help="Real runs with Master, node and workers as processes."
)
@json_option
def demo(
    trace: Path | None,
    budget_s: float,
    folder: Path | None,
    scale: float | None,
    out: Path,
    seed: int,
    quick: bool,
    processes: bool,
    as_json: bool,
) -> None:
    """Run one multi-turn workload on four tiers with the same DRAM, on real bytes and as a model.

    CMM-H (a transparent LRU cache), CXL-HM without prefetch, CXL-HM with HyMCache's prefetch, and
    that DRAM alone. Every byte read is verified. The report shows hit rates, read bandwidth, block
    reads, time to first token, how far the real run is from the model, and whether this host kept
    the timing.

    Exit codes: 0 fine, also if this host did not keep the timing or a tier is not within 10 % of
    the model (the report marks both); 1 wrong data was delivered, or something is held at the end;
    2 a bad option or file, or this host cannot do it.
    """
    from cxlbench.harness.demo import DemoOptions, run_demo
    from cxlbench.harness.results import write_run

    output = Output(as_json=as_json)
    if trace is None:
        refuse_idle(("budget_s",), "it is the part of a --trace that runs on real bytes")
    options = DemoOptions(
        trace=trace,
        budget_s=budget_s,
        folder=folder,
        scale=scale,
        out=out,
        seed=seed,
        quick=quick,
        processes=processes,
    )
    with output.progress() as progress:
        result = run_demo(options, progress, output.note)
    document = result.to_json()
    figures = {name: value for name, value in document.items() if name != "plot"}
    inputs = {
        "trace": trace.name if trace else None,
        "seed": seed,
        "budget_s": budget_s,
        "scale": scale,
        "quick": quick,
        "processes": processes,
    }
    write_run(
        out,
        name="demo",
        inputs=inputs,
        figures=figures,
        claims=result.claims,
        notes=output.run_notes({"out": out}),
    )
    output.say(result.text())
    output.document(document)
    if not result.ok:
        raise click.exceptions.Exit(WRONG_DATA)
