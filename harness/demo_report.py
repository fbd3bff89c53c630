"""What the demo prints and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from cxlbench.harness.fidelity import WHAT_THEN
from cxlbench.harness.metrics import Figures, Spread, TurnFigures
from cxlbench.harness.model_check import MAX_MODEL_ERROR
from cxlbench.harness.replay import ReplayResult

if TYPE_CHECKING:
    from cxlbench.harness.demo import DemoPlan, DemoResult, TierRun

MIB, GIB = 1 << 20, 1 << 30


def report_text(result: DemoResult) -> str:
    """Return the whole terminal report."""
    plan = result.plan
    some = result.tiers[0]
    requests = len(plan.workload.requests)
    part = "" if some.whole is None else f", of which {some.wall.figures.requests} on real bytes"
    lines = [
        f"Workload: {plan.workload.name}: {requests} requests{part}, "
        f"{plan.footprint_bytes / GIB:.1f} GiB of KV in blocks of {plan.block_bytes / MIB:g} MiB, "
        f"on 4 workers.",
        *(
            [f"Arrivals and think times are {plan.speed:.1f} x as fast as recorded."]
            * (plan.speed > 1)
        ),
        f"Every tier has {plan.dram_bytes / GIB:g} GiB of DRAM. Sizes and bandwidths are "
        f"full-size; real bytes are 1/{plan.scale:g} of them.",
        "",
        "Real bytes, real time",
        _table([(tier.name, tier.wall) for tier in result.tiers]),
    ]
    if some.whole is not None:
        lines += ["", "The whole trace, in virtual time"]
        lines.append(_table([(t.name, t.whole) for t in result.tiers if t.whole is not None]))
    lines += ["", "Emulator against model: block reads, real time beside virtual time"]
    lines += [_against(result.tiers), "", *_verdicts(result.tiers), ""]
    lines += [
        f"{tier.name}: {tier.wall.fidelity.line()}"
        for tier in result.tiers
        if tier.wall.fidelity is not None
    ]
    if any(tier.wall.fidelity and not tier.wall.fidelity.trusted for tier in result.tiers):
        lines.append(WHAT_THEN)
    if not any(tier.wall.figures.block_read.count for tier in result.tiers):
        lines.append("No tier was ever read from: take a longer trace, or a larger --budget.")
    runs = [run.figures for tier in result.tiers for run in tier.runs]
    wrong = sum(figures.wrong_blocks for figures in runs)
    checked = sum(tier.wall.figures.block_read.count for tier in result.tiers)
    held = {name: count for figures in runs for name, count in figures.held_at_rest.items()}
    lines += [
        f"data: {checked:,} blocks read back and compared byte by byte, {wrong} wrong; "
        + (f"still held: {held}" if held else "nothing held at rest"),
        f"plots: {result.plot}",
    ]
    return "\n".join(lines)


def _turns(figures: Figures) -> list[int]:
    return [turn.turn for turn in figures.turns if turn.turn]


def _table(runs: Sequence[tuple[str, ReplayResult]]) -> str:
    turns = _turns(runs[0][1].figures)
    shown = turns if len(turns) <= 5 else [turns[0], *turns[1:8:2]]
    reading = [turn for turn in shown if turn > 1] or shown
    shown = sorted({shown[0], shown[-1]}) if shown else shown
    skipped = any(run.figures.skipped_blocks for _, run in runs)
    headers = [
        "",
        "hit\n%",
        *_over("read GB/s, turn", [str(turn) for turn in reading]),
        *_over("block read, ms", ["p50", "p99"]),
        *_over("TTFT s, turn", [str(turn) for turn in shown]),
        *["skipped\nstores"] * skipped,
    ]
    rows = []
    for name, run in runs:
        figures = run.figures
        by_turn = {turn.turn: turn for turn in figures.turns}
        rows.append(
            [
                name,
                f"{figures.hit_rate * 100:.1f}",
                *[_read_gbps(by_turn.get(turn)) for turn in reading],
                *_read_ms(figures.block_read),
                *[f"{by_turn[t].ttft.mean_s:.2f}" if t in by_turn else "-" for t in shown],
                *[f"{figures.skipped_blocks}"] * skipped,
            ]
        )
    return tabulate(
        rows, headers=headers, stralign="right", colalign=("left",), disable_numparse=True
    )


def _over(what: str, parts: Sequence[str]) -> list[str]:
    """Return headers of columns that belong together: what they are stands over the first."""
    lines = what.split(" ")
    blank = "\n" * len(lines)
    return ["\n".join([*lines, parts[0]]), *[blank + part for part in parts[1:]]]


def _read_gbps(turn: TurnFigures | None) -> str:
    if turn is None or not turn.block_read.count:
        return "-"
    return f"{turn.read_bytes_per_s / 1e9:.1f}"


def _read_ms(read: Spread) -> list[str]:
    if not read.count:
        return ["-", "-"]
    return [_three_digits(read.p50_s * 1e3), _three_digits(read.p99_s * 1e3)]


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _against(tiers: Sequence[TierRun]) -> str:
    rows = []
    for tier in tiers:
        real, model = tier.wall.figures.block_read, tier.virtual.figures.block_read
        check = tier.against_model
        rows.append(
            [
                tier.name,
                _three_digits(real.p50_s * 1e3),
                _three_digits(model.p50_s * 1e3),
                f"{check.p50 * 100:+.1f}",
                _three_digits(real.p90_s * 1e3),
                _three_digits(model.p90_s * 1e3),
                f"{check.p90 * 100:+.1f}",
                check.mark,
                f"{tier.wall.figures.hit_rate * 100:.1f}",
                f"{tier.virtual.figures.hit_rate * 100:.1f}",
            ]
        )
    headers = [
        "",
        *_over("p50 ms", ["real", "model", "diff %"]),
        *_over("p90 ms", ["real", "model", "diff %"]),
        f"within\n{MAX_MODEL_ERROR:.0%}",
        *_over("hit %", ["real", "model"]),
    ]
    return tabulate(
        rows,
        headers=headers,
        stralign="right",
        colalign=("left",),
        disable_numparse=True,
    )


def _verdicts(tiers: Sequence[TierRun]) -> list[str]:
    """Return a line for all tiers within the bar, or one for each that is not, with the reasons."""
    missed = [tier for tier in tiers if not tier.against_model.within]
    if not missed:
        return [f"Every tier is within {MAX_MODEL_ERROR:.0%} of the model at p50 and p90."]
    return [
        f"NOT WITHIN {MAX_MODEL_ERROR:.0%} OF THE MODEL: {tier.name}: "
        f"{tier.against_model.explanation()}"
        for tier in missed
    ]


def plot_demo(tiers: Sequence[TierRun], plan: DemoPlan, path: Path) -> None:
    """Draw read bandwidth and TTFT by turn, and the CDF of block reads; model as dashes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    colors = ("#b2182b", "#ef8a62", "#2166ac", "#4d4d4d")
    for tier, color in zip(tiers, colors, strict=True):
        for run, style in ((tier.wall, "-o"), (tier.virtual, "--")):
            turns = [turn for turn in run.figures.turns if turn.turn]
            reads = [turn for turn in turns if turn.block_read.count]
            left.plot(
                [turn.turn for turn in reads],
                [turn.read_bytes_per_s / 1e9 for turn in reads],
                style,
                color=color,
                markersize=4,
            )
            middle.plot(
                [turn.turn for turn in turns],
                [turn.ttft.mean_s for turn in turns],
                style,
                color=color,
                markersize=4,
            )
            spread = run.figures.block_read
            if spread.count:
                right.plot(
                    [value * 1e3 for value in (spread.p50_s, spread.p90_s, spread.p99_s)],
                    (50, 90, 99),
                    style,
                    color=color,
                    markersize=4,
                )
    left.set(title="Read bandwidth by turn", xlabel="turn", ylabel="GB/s")
    middle.set(title="Time to first token by turn (mean)", xlabel="turn", ylabel="s")
    right.set(title="Block read latency", xlabel="ms (log)", ylabel="percentile", xscale="log")
    right.set_yticks((50, 90, 99))
    for axes in (left, middle):
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lines = [*left.get_lines()[::2], Line2D([], [], marker="o", color="black", markersize=4)]
    lines.append(Line2D([], [], linestyle="--", color="black"))
    names = [tier.name for tier in tiers] + ["real bytes", "model"]
    figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(
        f"{plan.workload.name}: {plan.footprint_bytes / GIB:.1f} GiB of KV on "
        f"{plan.dram_bytes / GIB:g} GiB of DRAM",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
