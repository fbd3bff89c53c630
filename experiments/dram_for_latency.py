"""How much DRAM a target for the latency of a hit needs: as a cache, and as a staging window.

Set-up. The same conversations (``device_runs.py``, the real HyMCache) on a CMM-H under LRU and on a
CXL-HM with prefetch, both with the same SSDs, over a range of DRAM sizes, given as shares of the
footprint. The conversations begin spread out and append little a turn, so that the prefix is what
grows. The latency is that of a block from asking to the bytes in the worker, over the last turn,
where the prefix is longest. With little DRAM a CXL-HM has a small write buffer and refuses blocks;
fewer hits are read faster, so a run counts only if its hit rate is good enough.

A target is a multiple of the least latency that any run that counts reached. Needed is the smallest
DRAM of the range that meets it, as all larger ones do; nothing is interpolated. The same again with
twice the turns, hence twice the footprint, says whether the need grows with it: that it does not is
what HyMCache §3.3 says of a staging window.

Left out: cost (``table1`` has it); targets for TTFT, which also hold compute.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile
from cxlbench.experiments.device_runs import (
    CMM_H,
    COMMON,
    CXL_HM,
    GIB,
    DeviceRun,
    balances,
    conversation_knobs,
    conversations,
    footprint_bytes,
    serve,
    together,
    variant,
)
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
)
from cxlbench.harness.requests import Workload

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0, 1.5)
QUICK_SHARES = (1 / 4, 1 / 2, 1.5)
TARGETS = (1.25, 2.0, 4.0)
CACHE = "CMM-H, LRU"
WINDOW = "CXL-HM, staging"
TIERS = (CACHE, WINDOW)

LESS = PaperClaim(
    name="a staging window needs less DRAM than a cache",
    statement="For hits within twice the least latency, staging needs less DRAM than an LRU cache",
    source="HyMCache §3.3",
    sense=Sense.TRUE,
)
BOUNDED = PaperClaim(
    name="the window does not grow with the footprint",
    statement="With twice the footprint, staging meets the same target with the same DRAM",
    source="HyMCache §3.3",
    sense=Sense.TRUE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of the range."""

    tier: str
    times: int
    """By how much the footprint is multiplied."""
    dram_bytes: int
    run: DeviceRun

    @property
    def latency_s(self) -> float:
        """Mean time to read a block in the last turn."""
        return self.run.figures.turns[-1].block_read.mean_s


def run(ctx: Context) -> Findings:
    """Run both tiers over the range of DRAM, for one footprint and for two."""
    shares = QUICK_SHARES if ctx.quick else SHARES
    once = conversations(ctx)
    base = footprint_bytes(once)
    frame = ctx.profile(CxlHmProfile, CXL_HM).staging_frame
    sizes = [int(base * share) // frame * frame for share in shares]
    workloads = {1: once, 2: _doubled(ctx)}
    asked = [(tier, times, dram) for times in workloads for tier in TIERS for dram in sizes]
    points: list[Point] = []
    checks: list[Check] = []
    for tier, times, dram in asked:
        if ctx.stopping():
            break
        ctx.progress("serving by DRAM", len(points), len(asked))
        done = _serve(ctx, workloads[times], tier, dram)
        points.append(Point(tier=tier, times=times, dram_bytes=dram, run=done))
        name = f"{tier}, {dram / GIB:.3g} GiB, footprint x {times}"
        checks += balances(name, workloads[times], done)
    partial = len(points) < len(asked)
    rows: list[Row] = [_row(point, base) for point in points]
    if partial:
        return Findings(rows=rows, checks=together(checks), partial=True)
    enough = ctx.number("target.hit_rate")
    counted = [point for point in points if point.run.figures.hit_rate >= enough]
    if not counted:
        note = f"No run reached a hit rate of {enough:.0%}: nothing can be compared."
        claims = [claim.judge(None, reason=note) for claim in (LESS, BOUNDED)]
        return Findings(rows=rows, claims=claims, checks=together(checks), notes=[note])
    least_s = min(point.latency_s for point in counted)
    needs = {
        (tier, times, target): needed_bytes(
            points, tier, times, target_s=target * least_s, hit_rate=enough
        )
        for tier in TIERS
        for times in workloads
        for target in TARGETS
    }
    alone = [
        needed_bytes(points, WINDOW, times, target_s=2 * least_s, hit_rate=0) for times in workloads
    ]
    cache, window, twice = (
        needs[tier, times, 2.0] for tier, times in ((CACHE, 1), (WINDOW, 1), (WINDOW, 2))
    )
    return Findings(
        rows=[*rows, *_need_rows(needs, least_s)],
        claims=[
            LESS.judge(
                None if window is None else float(cache is None or window < cache),
                at=f"footprint {base / GIB:.3g} GiB",
                reason=f"staging {_written(window)}, cache {_written(cache)}",
            ),
            BOUNDED.judge(
                None if window is None else float(twice is not None and twice <= window),
                at=f"footprint {base / GIB:.3g} GiB and twice that",
                reason=f"staging {_written(window)}, then {_written(twice)}; were lower hit rates "
                f"good enough, {_written(alone[0])}, then {_written(alone[1])}: the rest is the "
                "write buffer, since reads hold up flushes",
            ),
        ],
        plots=[_plot(points, times) for times in workloads],
        checks=together(checks),
        notes=[f"The least mean latency of a block in a last turn is {least_s * 1e3:.2f} ms."],
    )


def needed_bytes(
    points: list[Point], tier: str, times: int, *, target_s: float, hit_rate: float
) -> int | None:
    """Return the smallest DRAM from which on all meet a target; None if the largest misses it."""
    mine = [point for point in points if (point.tier, point.times) == (tier, times)]
    need = None
    for point in sorted(mine, key=lambda point: -point.dram_bytes):
        if point.latency_s > target_s or point.run.figures.hit_rate < hit_rate:
            break
        need = point.dram_bytes
    return need


def _doubled(ctx: Context) -> Workload:
    sessions = 2 * ctx.count("workload.sessions")
    more = dataclasses.replace(ctx, overrides={**ctx.overrides, "workload.sessions": str(sessions)})
    return conversations(more)


def _serve(ctx: Context, workload: Workload, tier: str, dram: int) -> DeviceRun:
    if tier == CACHE:
        cache = variant(ctx.profile(CmmHProfile, CMM_H), dram_capacity=dram, policy="lru")
        return serve(ctx, workload, cache, prefetch=False)
    hm = ctx.profile(CxlHmProfile, CXL_HM)
    buffer = int(dram * hm.write_buffer_share)
    window = variant(hm, dram_capacity=dram, flush_batch=min(hm.flush_batch, buffer))
    return serve(ctx, workload, window, prefetch=True)


def _row(point: Point, base: int) -> Row:
    f = point.run.figures
    last = f.turns[-1]
    return {
        "table": "range",
        "tier": point.tier,
        "footprint_bytes": base * point.times,
        "dram_bytes": point.dram_bytes,
        "dram_share": point.dram_bytes / (base * point.times),
        "last_turn_block_read_mean_s": last.block_read.mean_s,
        "last_turn_block_read_p99_s": last.block_read.p99_s,
        "last_turn_read_bytes_per_s": last.read_bytes_per_s,
        "last_turn_ttft_mean_s": last.ttft.mean_s,
        "hit_rate": f.hit_rate,
        "skipped_blocks": f.skipped_blocks,
    }


def _need_rows(needs: dict[tuple[str, int, float], int | None], least_s: float) -> list[Row]:
    return [
        {
            "table": "needed",
            "tier": tier,
            "footprint_times": times,
            "target": target,
            "target_s": target * least_s,
            "dram_bytes": need,
        }
        for (tier, times, target), need in needs.items()
    ]


def _written(nbytes: int | None) -> str:
    return "more than was tried" if nbytes is None else f"{nbytes / GIB:.3g} GiB"


def _plot(points: list[Point], times: int) -> Plot:
    return Plot(
        name=f"latency_{times}",
        title=f"Block read in the last turn by DRAM, footprint x {times}",
        x_label="DRAM, GiB",
        y_label="mean, ms",
        kind="line",
        series={
            tier: (
                [p.dram_bytes / GIB for p in points if (p.tier, p.times) == (tier, times)],
                [p.latency_s * 1e3 for p in points if (p.tier, p.times) == (tier, times)],
            )
            for tier in TIERS
        },
    )


EXPERIMENT = Experiment(
    name="dram_for_latency",
    title="DRAM needed for a target hit latency",
    source="ablation; HyMCache §3.3",
    about=(
        "The same conversations on a CMM-H under LRU and on a CXL-HM with prefetch, over DRAM from "
        "1/8 to 1.5 times the footprint, and again with twice the turns."
    ),
    knobs=(
        *conversation_knobs(sessions=8, turns=6, turn_blocks=16, quick=(8, 4, 8), spread_s=2.0),
        Knob(
            name="target.hit_rate",
            value=0.95,
            source="the least hit rate of a run that counts; HyMCache fig. 15 has over 90 %",
            assumption=True,
            low=0.9,
            high=0.99,
        ),
    ),
    profiles=(CXL_HM, CMM_H, *COMMON),
    claims=(LESS, BOUNDED),
    run=run,
)
