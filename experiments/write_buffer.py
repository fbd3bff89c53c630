"""How much of a CXL-HM's DRAM to give to the write buffer.

Set-up. HyMCache §3.3-3.4 splits the device's DRAM at deployment: a fixed share buffers new blocks,
the rest stages reads. When the buffer is full, a store is refused and tried again in a later turn;
flushes yield to reads. The paper calls the share a small fraction and gives no number. Here it goes
from 1/64 to 1/2 at a fixed DRAM, under the conversations of ``device_runs.py`` on the real code:
many at once, so that a turn appends as much as the DRAM holds (as in fig. 5), with hardly a pause
in which to flush.

A larger buffer refuses less, and leaves fewer staging frames; whether those matter is the question.
What is refused is missing in the next turn, so the price is recomputation, not time on the device.
A block that is refused in two turns counts twice: shares are of all attempts to store.

Left out: a share that changes during the run, and a flush that does not yield to reads.
"""

from __future__ import annotations

from cxlbench.devices.profile import CxlHmProfile
from cxlbench.experiments.device_runs import (
    COMMON,
    CXL_HM,
    GIB,
    DeviceRun,
    balances,
    conversation_knobs,
    conversations,
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

SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
SMALL = 1 / 8
"""What is called a small fraction here; the prototype's profile assumes it."""

RECOVERS = PaperClaim(
    name="refused blocks are stored in later turns",
    statement="Blocks that the full write buffer refuses are stored in a later turn",
    source="HyMCache §3.4, fig. 8",
    sense=Sense.TRUE,
)
SMALL_SUFFICES = PaperClaim(
    name="a small buffer suffices",
    statement="A small fraction of the DRAM (at most 1/8) costs no hits against half of it",
    source="HyMCache §3.4",
    expected=1.0,
    unit="x",
    band=0.05,
)


def run(ctx: Context) -> Findings:
    """Serve the same conversations with each share."""
    workload = conversations(ctx)
    dram = ctx.count("device.dram_gib") * GIB
    profile = ctx.profile(CxlHmProfile, CXL_HM)
    runs: dict[float, DeviceRun] = {}
    checks: list[Check] = []
    for share in SHARES:
        if ctx.stopping():
            break
        ctx.progress("serving by write-buffer share", len(runs), len(SHARES))
        device = variant(
            profile,
            dram_capacity=dram,
            write_buffer_share=share,
            flush_batch=min(profile.flush_batch, int(dram * share)),
        )
        runs[share] = serve(ctx, workload, device, prefetch=True)
        checks += balances(f"share {share:g}", workload, runs[share])
        checks.append(_stores(share, runs[share]))
    rows: list[Row] = [_row(share, one) for share, one in runs.items()]
    partial = len(runs) < len(SHARES)
    small = runs.get(SMALL)
    return Findings(
        rows=rows,
        claims=[
            RECOVERS.judge(
                float(small.figures.recovered_blocks > 0)
                if small is not None and small.figures.skipped_blocks
                else None,
                at=f"share {SMALL:g}",
                reason=""
                if small is None
                else f"{small.figures.skipped_blocks} refused, {small.figures.recovered_blocks} "
                "of them stored in a later turn",
            ),
            SMALL_SUFFICES.judge(
                None if partial else runs[SMALL].figures.hit_rate / runs[1 / 2].figures.hit_rate,
                at=f"{dram // GIB} GiB of DRAM",
            ),
        ],
        plots=[_refusals(runs), _effect(runs)],
        checks=together(checks),
        partial=partial,
    )


def refused_share(one: DeviceRun) -> float:
    """Return the share of all attempts to store a block that were refused."""
    f = one.figures
    return f.skipped_blocks / max(1, f.stored_blocks + f.skipped_blocks)


def _row(share: float, one: DeviceRun) -> Row:
    f = one.figures
    return {
        "write_buffer_share": share,
        "write_buffer_bytes": round(one.device.dram_capacity * share)
        if isinstance(one.device, CxlHmProfile)
        else 0,
        "refused_share": refused_share(one),
        "stored_blocks": f.stored_blocks,
        "skipped_blocks": f.skipped_blocks,
        "recovered_blocks": f.recovered_blocks,
        "write_refused": one.counters["write_refused"],
        "prefetch_refused": one.counters["prefetch_refused"],
        "hit_rate": f.hit_rate,
        "ttft_mean_s": f.ttft.mean_s,
        "last_turn_ttft_mean_s": f.turns[-1].ttft.mean_s,
        "last_turn_read_bytes_per_s": one.last_turn_bytes_per_s,
        "block_read_p99_s": f.block_read.p99_s,
        "duration_s": f.duration_s,
    }


def _stores(share: float, one: DeviceRun) -> Check:
    f = one.figures
    return Check(
        name=f"share {share:g}: recovered blocks were skipped before and are stored",
        ok=f.recovered_blocks <= min(f.skipped_blocks, f.stored_blocks),
        detail=f"{f.recovered_blocks} recovered of {f.skipped_blocks} skipped",
    )


def _refusals(runs: dict[float, DeviceRun]) -> Plot:
    shares = list(runs)
    return Plot(
        name="refused",
        title="Stores refused by write-buffer share",
        x_label="write buffer, share of DRAM",
        y_label="share of attempts",
        kind="line",
        series={
            "refused": (shares, [refused_share(one) for one in runs.values()]),
            "stored in a later turn": (
                shares,
                [
                    one.figures.recovered_blocks
                    / max(1, one.figures.stored_blocks + one.figures.skipped_blocks)
                    for one in runs.values()
                ],
            ),
        },
    )


def _effect(runs: dict[float, DeviceRun]) -> Plot:
    shares = list(runs)
    return Plot(
        name="hit_rate",
        title="Hit rate and read bandwidth by write-buffer share",
        x_label="write buffer, share of DRAM",
        y_label="hit rate; last turn's reads, share of the best",
        kind="line",
        series={
            "hit rate": (shares, [one.figures.hit_rate for one in runs.values()]),
            "last turn's read bandwidth": (
                shares,
                [
                    one.last_turn_bytes_per_s
                    / max(1.0, *(other.last_turn_bytes_per_s for other in runs.values()))
                    for one in runs.values()
                ],
            ),
        },
    )


EXPERIMENT = Experiment(
    name="write_buffer",
    title="Write-buffer share of a CXL-HM's DRAM",
    source="ablation; HyMCache §3.4",
    about=(
        "Conversations that append as much in a turn as the DRAM holds, on a CXL-HM whose write "
        "buffer takes from 1/64 to 1/2 of its DRAM; stores that are refused are tried again."
    ),
    knobs=(
        Knob(
            name="device.dram_gib",
            value=16,
            quick=2,
            unit="GiB",
            source="a quarter of HyMCache §5's 64 GB, so that a run takes seconds",
        ),
        *conversation_knobs(sessions=64, turns=6, turn_blocks=16, quick=(8, 4, 16)),
    ),
    profiles=(CXL_HM, *COMMON),
    claims=(RECOVERS, SMALL_SUFFICES),
    run=run,
)
