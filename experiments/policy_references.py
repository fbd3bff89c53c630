"""What replacement policies and staging would serve from DRAM, from the references alone.

The part of ``policy_ablation.py`` that knows no time: a workload's block references in the order in
which a device sees them read, under each policy and OPT, and the question whether the prefetch
windows of all requests at once fit into a CXL-HM's staging. What that compares and leaves out is
said there.

Units: bytes, blocks; shares are 0 to 1, of blocks that were seen before.
"""

from __future__ import annotations

from pathlib import Path

from cxlbench.devices.profile import CxlHmProfile
from cxlbench.experiments.device_runs import MIB, MODEL
from cxlbench.harness.cache_policies import (
    OPT,
    STUDIED,
    References,
    compare_policies,
    short_name,
)
from cxlbench.harness.experiment import Check, Context, Plot, Row
from cxlbench.harness.requests import Mode, Workload
from cxlbench.harness.trace_statistics import Order
from cxlbench.harness.traces import read_trace
from cxlbench.hymcache.prefetch_window import prefetch_window
from cxlbench.kv.footer import object_extent_bytes
from cxlbench.kv.geometry import model_shape

STAGED = "staging"


def given_trace(ctx: Context) -> Workload | None:
    """Return the trace that ``workload.trace`` names, whole blocks only; None if it names none."""
    path = ctx.choice("workload.trace")
    if not path:
        return None
    return read_trace(
        Path(path), mode=Mode.WHOLE_BLOCKS, limit=ctx.count("workload.trace_requests")
    )


def shares_from_dram(
    ctx: Context, workload: Workload, dram: int, hm: CxlHmProfile
) -> tuple[list[Row], list[Check]]:
    """Return a row for each policy, for OPT and for staging, and what must be true of them."""
    block = model_shape(MODEL).block_bytes(workload.block_tokens)
    references = References.of(workload, Order.HEAD_FIRST)
    again = len(references) - references.distinct
    found = compare_policies(
        references, [dram], block_bytes=block, policies=STUDIED, progress=ctx.progress
    )
    rows: list[Row] = [
        {
            "table": "references",
            "policy": short_name(one.policy),
            "references": one.references,
            "seen_again": again,
            "dram_bytes": one.prefix_hits * block,
            "ssd_bytes": (again - one.prefix_hits) * block,
            "dram_share": one.prefix_hits / max(1, again),
            "plain_dram_share": one.hits / max(1, again),
        }
        for one in found
    ]
    staged = staged_share(
        hm,
        block,
        window_bytes=ctx.count("tier.window_mib") * MIB,
        requests=_at_once(workload),
    )
    rows.append(
        {
            "table": "references",
            "policy": STAGED,
            "references": len(references),
            "seen_again": again,
            "dram_bytes": round(again * staged) * block,
            "ssd_bytes": (again - round(again * staged)) * block,
            "dram_share": staged,
            "plain_dram_share": staged,
        }
    )
    best = max(one.hits for one in found if one.policy == OPT)
    checks = [
        Check(
            name="references: no policy has more hits than OPT",
            ok=all(one.hits <= best for one in found),
            detail=", ".join(f"{short_name(one.policy)} {one.hits:,}" for one in found),
        ),
        Check(
            name="references: prefix-aware hits are plain hits, and those are seen again",
            ok=all(0 <= one.prefix_hits <= one.hits <= again for one in found),
        ),
    ]
    return rows, checks


def staged_share(hm: CxlHmProfile, block_bytes: int, *, window_bytes: int, requests: int) -> float:
    """Return the share of windows that fit, if so many requests have a full one at once."""
    window = prefetch_window(hm.staging_frames, block_bytes, window_bytes)
    frame = hm.staging_frame
    frames = -(-object_extent_bytes(block_bytes) // frame)
    room = (hm.staging_frames - hm.demand_frames) // frames
    return min(1.0, min(room, hm.prefetch_depth) / (requests * window))


def _at_once(workload: Workload) -> int:
    """Return how many requests can be in the system at once: conversations, else all."""
    return len(workload.sessions()) if workload.has_sessions else len(workload.requests)


def plot_shares(rows: list[Row]) -> Plot:
    """Return the shares from DRAM as bars."""
    names = [str(row["policy"]) for row in rows]
    return Plot(
        name="dram_share",
        title="Blocks read again that come from DRAM (references without time)",
        x_label="policy",
        y_label="share of bytes",
        kind="bar",
        series={
            "prefix-aware": (names, [float(row["dram_share"] or 0) for row in rows]),
            "plain": (names, [float(row["plain_dram_share"] or 0) for row in rows]),
        },
        note="A transparent cache serves a block behind a missing one as well: plain. An engine "
        "that must not wait for the SSDs can use only what prefix-aware counts.",
    )
