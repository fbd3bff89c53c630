"""``cxlbench bench model`` and ``bench serving``: the serving model's truth, and what it costs.

Both print a verdict on every bar, as the other benches do.
"""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.bench import Bar, report, strict_option, verdicts
from cxlbench.harness.cli.group import WRONG_DATA
from cxlbench.harness.cli.options import COUNT, examples, json_option, seed_option
from cxlbench.harness.cli.output import Output


@click.command(
    name="model",
    short_help="Real time against the model of it.",
    epilog=examples("cxlbench bench model", "cxlbench bench model --sessions 4 --strict"),
)
@click.option(
    "--sessions", type=COUNT, default=8, show_default=True, help="Conversations of each case."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="For the backing files of the SSDs. [default: RAM]",
)
@seed_option
@strict_option
@json_option
def bench_model(sessions: int, folder: Path | None, seed: int, strict: bool, as_json: bool) -> None:
    """Compare the serving engine on real bytes in real time with the same in virtual time.

    Three small workloads on one GPU of the engine's model and the real HyMCache: conversations, a
    long prefix that all share, and conversations without prefetch. Means in real time over those
    in virtual time: a block read, the time to the first token, the hit rate.

    Exit codes: 0 whatever was measured; 1 wrong data, or with --strict a bar that was missed.
    """
    from cxlbench.harness import bench_model as bars_of

    output = Output(as_json=as_json)
    with output.progress() as progress:
        found = bars_of.bench_model(folder=folder, seed=seed, sessions=sessions, progress=progress)
    bars = []
    for case in found:
        asked = f"{1 - bars_of.BAR:.2f} to {1 + bars_of.BAR:.2f}"
        bars += [
            Bar(f"{case.name}: {name}", f"{ratio:.3f}", asked, abs(ratio - 1) <= bars_of.BAR)
            for name, ratio in case.ratios().items()
        ]
        output.say(
            f"{case.name}: {case.wall.requests} requests, {case.wall.loaded_blocks} blocks loaded; "
            f"timers late by {case.fidelity.late_p50_s * 1e3:.2f} ms (p50), "
            f"{case.fidelity.late_p99_s * 1e3:.2f} ms (p99)"
        )
    measured = [{"case": case, "ratios": case.ratios()} for case in found]
    wrong = [case for case in found if not case.correct]
    if wrong:
        output.document({"measured": measured, "passed": verdicts(bars)})
        for case in wrong:
            broken = (*case.wall.laws_broken, *case.virtual.laws_broken)
            output.note(f"WRONG: {case.name}: this does not hold: {'; '.join(broken)}")
        raise click.exceptions.Exit(WRONG_DATA)
    report(output, measured, bars, strict=strict)


@click.command(
    name="serving",
    short_help="What the serving model costs this host.",
    epilog=examples("cxlbench bench serving", "cxlbench bench serving --sessions 4"),
)
@click.option(
    "--sessions",
    type=COUNT,
    default=32,
    show_default=True,
    help="Conversations of the smallest size; 32 makes the largest that of the paper.",
)
@seed_option
@strict_option
@json_option
def bench_serving(sessions: int, seed: int, strict: bool, as_json: bool) -> None:
    """Measure CPU time, events and memory of the serving model at 1, 4 and 16 times the size.

    HyMCache fig. 10: four prefill servers and one decode server, on four tiers. What a block and
    an event cost must not grow with the size.

    Exit codes: 0 whatever was measured; 1 a law was broken, or with --strict a bar was missed.
    """
    from cxlbench.harness import bench_serving as bars_of
    from cxlbench.harness.tables import table

    output = Output(as_json=as_json)
    with output.progress() as progress:
        found = bars_of.bench_serving(sessions=sessions, seed=seed, progress=progress)
    rows = [
        (
            cost.tier,
            f"{cost.factor} x",
            f"{cost.requests:,}",
            f"{cost.blocks:,}",
            f"{cost.cpu_s:.2f}",
            f"{cost.cpu_per_block_s * 1e6:.1f}",
            f"{cost.timers:,}",
            f"{cost.timers_per_block:.2f}",
            f"{cost.peak_resident_bytes / 1e9:.2f}",
        )
        for cost in found
    ]
    heads = ("", "", "requests", "blocks", "CPU s", "us/block", "timers", "/block", "peak GB")
    output.say(table(heads, rows))
    bars = []
    for name in dict.fromkeys(cost.tier for cost in found):
        for what, grown in zip(("block", "event"), bars_of.growth(found, name), strict=True):
            bars.append(
                Bar(
                    f"{name}: CPU time for each {what}, largest over smallest",
                    f"{grown:.2f}",
                    f"at most {bars_of.MAX_GROWTH}",
                    grown <= bars_of.MAX_GROWTH,
                )
            )
    peak = max(cost.peak_resident_bytes for cost in found)
    bars.append(
        Bar(
            "peak resident memory, GB",
            f"{peak / 1e9:.2f}",
            f"{bars_of.MAX_RESIDENT_BYTES / 1e9:.0f}",
            peak <= bars_of.MAX_RESIDENT_BYTES,
        )
    )
    broken = [f"{cost.tier}, {cost.factor} x: {law}" for cost in found for law in cost.laws_broken]
    if broken:
        output.document({"measured": found, "passed": verdicts(bars)})
        output.note(f"WRONG: this does not hold: {'; '.join(broken)}")
        raise click.exceptions.Exit(WRONG_DATA)
    report(output, found, bars, strict=strict)
