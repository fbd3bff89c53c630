"""Replacement policies of a transparent cache against explicit staging, at equal DRAM.

Set-up. HyMCache §3.1 and §3.3 say that recency is the wrong guide for KV blocks: a turn reads its
prefix once, in order, and knows it before. So the same conversations run on a CMM-H whose cache is
managed by LRU, FIFO, CLOCK, SIEVE or S3-FIFO, and on a CXL-HM of the same DRAM and SSDs without
and with HyMCache's prefetch: the real code in virtual time (see ``device_runs.py``). The footprint
passes the DRAM in the middle of the run.

Beside it, a kernel without time: the block references of the same workload (or of a trace:
``workload.trace``), in the order in which a device sees them read, under each policy and under
OPT, counted prefix-aware. What hits comes from DRAM, other blocks seen before from the SSDs. For
staging the kernel asks only whether the windows of all requests at once fit into the staging part
of the DRAM and the prefetch depth: all that fits is in DRAM when it is read.

The device orders granules of 2 MiB, not blocks, and several requests read at once; the kernel
knows neither, so its shares say what order the policies come in, not what a device reaches. On the
CXL-HM a block counts as from DRAM if it was being staged when its reader came.

Left out: a cache that bypasses blocks, compression, several devices.
"""

from __future__ import annotations

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile
from cxlbench.experiments.device_runs import (
    CMM_H,
    COMMON,
    CXL_HM,
    GIB,
    MIB,
    DeviceRun,
    balances,
    conversation_knobs,
    conversations,
    footprint_bytes,
    serve,
    together,
    variant,
)
from cxlbench.experiments.policy_references import (
    STAGED,
    given_trace,
    plot_shares,
    shares_from_dram,
)
from cxlbench.harness.cache_policies import (
    OPT,
    SIEVE,
    short_name,
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

POLICIES = ("lru", "fifo", "clock", SIEVE, "s3fifo")
DEMAND = "staging, no prefetch"

STAGING_WINS = PaperClaim(
    name="staging beats every replacement policy",
    statement="Once the footprint is beyond the DRAM, explicit staging reads faster than a "
    "transparent cache of the same DRAM under any replacement policy",
    source="HyMCache §3.1 (takeaways), §3.3",
    sense=Sense.TRUE,
)
LRU_LOSES = PaperClaim(
    name="LRU is the wrong guide",
    statement="LRU serves less of the re-read prefixes from DRAM than a policy that knows the "
    "order could at the same size",
    source="HyMCache §3.1 (takeaways)",
    sense=Sense.TRUE,
)


def run(ctx: Context) -> Findings:
    """Run all tiers, and the kernel beside them."""
    dram = ctx.count("device.dram_gib") * GIB
    workload = conversations(ctx)
    tiers: list[tuple[str, CmmHProfile | CxlHmProfile, bool]] = [
        (
            f"CMM-H {short_name(policy)}",
            variant(ctx.profile(CmmHProfile, CMM_H), dram_capacity=dram, policy=policy),
            False,
        )
        for policy in POLICIES
    ]
    hm = variant(ctx.profile(CxlHmProfile, CXL_HM), dram_capacity=dram)
    tiers += [(DEMAND, hm, False), (STAGED, hm, True)]
    runs: dict[str, DeviceRun] = {}
    checks: list[Check] = []
    for name, device, prefetch in tiers:
        if ctx.stopping():
            break
        ctx.progress(f"serving on {name}", len(runs), len(tiers))
        runs[name] = serve(
            ctx,
            workload,
            device,
            prefetch=prefetch,
            window_bytes=ctx.count("tier.window_mib") * MIB,
        )
        checks += balances(name, workload, runs[name])
    rows: list[Row] = [_row(name, one) for name, one in runs.items()]
    turn_rows: list[Row] = [row for name, one in runs.items() for row in _turn_rows(name, one)]
    partial = len(runs) < len(tiers)
    if partial:
        return Findings(rows=[*rows, *turn_rows], checks=together(checks), partial=True)
    kernel, kernel_checks = shares_from_dram(ctx, given_trace(ctx) or workload, dram, hm)
    reached = {name: one.last_turn_bytes_per_s for name, one in runs.items()}
    transparent = [rate for name, rate in reached.items() if name.startswith("CMM-H")]
    share = {str(row["policy"]): float(row["dram_share"] or 0) for row in kernel}
    return Findings(
        rows=[*rows, *turn_rows, *kernel],
        claims=[
            STAGING_WINS.judge(
                float(reached[STAGED] > max(transparent)),
                at=f"{footprint_bytes(workload) / dram:.2f} x the DRAM",
                reason=_why(reached),
            ),
            LRU_LOSES.judge(
                float(share["lru"] < share[OPT]),
                at=f"references without time, {size_of(dram)}",
                reason=f"LRU {share['lru']:.0%}, OPT {share[OPT]:.0%} of the bytes read again",
            ),
        ],
        plots=[_bandwidth(runs), _latency(runs), plot_shares(kernel)],
        checks=together([*checks, *kernel_checks]),
        notes=[
            f"The footprint is {size_of(footprint_bytes(workload))}, the DRAM {size_of(dram)}.",
        ],
    )


def size_of(nbytes: int) -> str:
    """Return bytes in GiB."""
    return f"{nbytes / GIB:.4g} GiB"


def _row(name: str, one: DeviceRun) -> Row:
    f = one.figures
    return {
        "table": "tier",
        "policy": name,
        "hit_rate": f.hit_rate,
        "dram_bytes": one.dram_bytes,
        "ssd_bytes": one.ssd_bytes,
        "dram_share": one.dram_bytes / max(1, one.dram_bytes + one.ssd_bytes),
        "ttft_mean_s": f.ttft.mean_s,
        "last_turn_ttft_mean_s": f.turns[-1].ttft.mean_s,
        "last_turn_read_bytes_per_s": one.last_turn_bytes_per_s,
        "block_read_p50_s": f.block_read.p50_s,
        "block_read_p99_s": f.block_read.p99_s,
        "skipped_blocks": f.skipped_blocks,
        "timed_out_blocks": f.timed_out_blocks,
        "duration_s": f.duration_s,
    }


def _turn_rows(name: str, one: DeviceRun) -> list[Row]:
    return [
        {
            "table": "turn",
            "policy": name,
            "turn": turn.turn,
            "hit_rate": turn.hit_rate,
            "read_bytes": turn.read_bytes,
            "read_bytes_per_s": turn.read_bytes_per_s,
            "ttft_mean_s": turn.ttft.mean_s,
            "block_read_mean_s": turn.block_read.mean_s,
        }
        for turn in one.figures.turns
    ]


def _why(reached: dict[str, float]) -> str:
    best = max((n for n in reached if n.startswith("CMM-H")), key=reached.__getitem__)
    return (
        f"last turn: {best} reads {reached[best] / 1e9:.1f} GB/s, without prefetch "
        f"{reached[DEMAND] / 1e9:.1f}, with it {reached[STAGED] / 1e9:.1f}"
    )


# -- plots --------------------------------------------------------------------------------------


def _bandwidth(runs: dict[str, DeviceRun]) -> Plot:
    return Plot(
        name="read_bandwidth",
        title="Read bandwidth by turn, at equal DRAM",
        x_label="turn",
        y_label="GB/s",
        kind="line",
        series={
            name: (
                [float(turn.turn) for turn in one.figures.turns[1:]],
                [turn.read_bytes_per_s / 1e9 for turn in one.figures.turns[1:]],
            )
            for name, one in runs.items()
        },
    )


def _latency(runs: dict[str, DeviceRun]) -> Plot:
    return Plot(
        name="ttft",
        title="Time to first token by turn, at equal DRAM",
        x_label="turn",
        y_label="mean TTFT, s",
        kind="line",
        series={
            name: (
                [float(turn.turn) for turn in one.figures.turns],
                [turn.ttft.mean_s for turn in one.figures.turns],
            )
            for name, one in runs.items()
        },
    )


EXPERIMENT = Experiment(
    name="policy_ablation",
    title="LRU, FIFO, CLOCK, SIEVE, S3-FIFO and staging at equal DRAM",
    source="ablation; HyMCache §3.1, §3.3",
    about=(
        "The same conversations on a CMM-H under five replacement policies, and on a CXL-HM with "
        "and without prefetch; the DRAM is the same, the footprint passes it half-way. Beside it "
        "the hit rates of the references alone, up to Belady's optimum."
    ),
    knobs=(
        Knob(
            name="device.dram_gib",
            value=64,
            quick=4,
            unit="GiB",
            source="HyMCache §5: 64 GB of device DRAM; the quick form shrinks it with the workload",
        ),
        Knob(
            name="tier.window_mib",
            value=128,
            unit="MiB",
            source="HyMCache §4.2: about 128 MB of prefetched KV a request",
        ),
        *conversation_knobs(sessions=32, turns=6, turn_blocks=40, quick=(8, 6, 11)),
        Knob(
            name="workload.trace",
            value="",
            source="path of a trace for the references without time; none: the conversations",
        ),
        Knob(
            name="workload.trace_requests",
            value=20_000,
            quick=1_000,
            source="requests of that trace, from its start",
        ),
    ),
    profiles=(CXL_HM, CMM_H, *COMMON),
    claims=(STAGING_WINS, LRU_LOSES),
    run=run,
)
