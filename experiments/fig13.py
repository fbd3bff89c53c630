"""HyMCache fig. 13: single-node serving of conversations, tier by tier.

Set-up (§6.2.1): Llama-3.1-8B on one A100 joined to the tier by 200 Gb/s; LMSYS conversations, 512
of them, concurrency 32, up to 10 turns, one output token. Systems: recomputation, the GPU's prefix
cache, LMCache with 64 GB of local DRAM, HyMCache. Conversations have LMSYS's mean lengths
(``testbed.lmsys_like``) and take turns: all first turns, then all second ones.

The GPU has room for about 3,500 blocks of 16 MiB beside the model and LMCache for 4,096. A cache
*loses its reuse* in the first turn whose hit rate is under half: under LRU that is the first one
whose prefixes, of all conversations together, no longer fit when the turn before has ended. The
published mean lengths (284 tokens a turn) put that a turn or two later than the paper's figure; its
conversations, chosen for their many turns, may be longer than the mean.

Left out: requests that end a conversation early.
"""

from __future__ import annotations

from functools import partial

from cxlbench.experiments import testbed
from cxlbench.experiments.serving import (
    Runs,
    System,
    all_checks,
    by_turn_plot,
    run_systems,
    speedup,
    total_row,
    turn_rows,
    with_own,
)
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Knob, Row, about_of
from cxlbench.harness.serve.run import Simulated

RECOMPUTE, GPU, LMCACHE, HYMCACHE = ("recompute", "GPU prefix cache", "LMCache local", "HyMCache")
KNOBS = (
    testbed.model_knob("Llama-3.1-8B"),
    testbed.BLOCK_TOKENS,
    Knob(
        name="workload.sessions", value=512, quick=128, source="HyMCache §6.2.1: 512 conversations"
    ),
    Knob(name="workload.concurrency", value=32, source="HyMCache §6.2.1"),
    Knob(name="workload.turns", value=10, source="HyMCache §6.2.1: up to 10"),
    testbed.LMSYS_PROMPT,
    testbed.LMSYS_ANSWER,
    testbed.LMSYS_SPREAD,
    testbed.ORDER,
    testbed.COMPUTE,
    Knob(
        name="shrink",
        value=1,
        quick=4,
        source="the quick form has a quarter of conversations, GPU blocks and LMCache's memory",
    ),
    Knob(name="lmcache.gib", value=64, unit="GiB", source="HyMCache §5: 64 GB a worker"),
)
CLAIMS = (
    PaperClaim(
        name="gpu-loses",
        statement="The GPU's prefix cache loses its reuse around turn 3",
        source="HyMCache fig. 13",
        expected=3.0,
        band=0.34,
        unit="turn",
    ),
    PaperClaim(
        name="lmcache-loses",
        statement="LMCache's local DRAM loses its reuse around turn 4",
        source="HyMCache fig. 13",
        expected=4.0,
        band=0.26,
        unit="turn",
    ),
    PaperClaim(
        name="loses-later",
        statement="LMCache loses its reuse later than the GPU alone",
        source="HyMCache fig. 13",
        sense=Sense.TRUE,
    ),
    PaperClaim(
        name="hit-rate",
        statement="HyMCache's hit rate stays near 90 %",
        source="HyMCache fig. 13",
        expected=90.0,
        unit="%",
    ),
    PaperClaim(
        name="over-lmcache",
        statement="HyMCache serves 3.0 times as much as LMCache at the same DRAM",
        source="HyMCache abstract, fig. 13",
        expected=3.0,
        neutral=1.0,
        unit="x",
    ),
)
LOST = 0.5


def systems(context: Context) -> tuple[System, ...]:
    """Return the four systems."""
    capacity = context.count("lmcache.gib") * GIB // context.count("shrink")
    return (
        System(label=RECOMPUTE, tier="recompute"),
        System(label=GPU, tier="gpu-prefix-cache"),
        System(label=LMCACHE, tier="lmcache-local", options={"capacity_bytes": capacity}),
        System(label=HYMCACHE, tier="hymcache", options={"worker_link": "nic-200g"}),
    )


def run(context: Context) -> Findings:
    """Run all systems."""
    workload = testbed.lmsys_like(
        context,
        sessions=context.count("workload.sessions"),
        turns=context.count("workload.turns"),
        decoded=1,
    )
    blocks = testbed.single_node(context).pool_blocks // context.count("shrink")
    runs = run_systems(
        context,
        with_own(context, systems(context)),
        partial(testbed.single_node, context, gpu_blocks=blocks),
        workload,
        testbed.closed_loop(context),
    )
    rows: list[Row] = []
    for label, one in runs.by_label.items():
        rows.append(total_row(one, system=label))
        rows += turn_rows(one, system=label)
    return Findings(
        rows=rows,
        claims=[] if runs.partial else _claims(context, runs),
        plots=(
            by_turn_plot(
                runs,
                name="e2e",
                title="Mean end-to-end time, single node",
                value="e2e_mean_s",
                y_label="mean end-to-end time, s",
            ),
            by_turn_plot(
                runs,
                name="hit-rate",
                title="Blocks not computed again, single node",
                value="hit_rate",
                y_label="hit rate",
            ),
        ),
        checks=all_checks(runs),
        partial=runs.partial,
    )


def lost_at(run: Simulated) -> float:
    """Return the first turn from 2 on whose hit rate is under half; infinity if none is."""
    turns = [turn.turn for turn in run.turns if turn.turn > 1 and turn.seen_blocks]
    rates = {turn.turn: turn.hit_rate for turn in run.turns}
    return float(min((turn for turn in turns if rates[turn] < LOST), default=float("inf")))


def _claims(context: Context, runs: Runs) -> list[JudgedClaim]:
    hymcache = runs.by_label[HYMCACHE]
    gpu, lmcache = lost_at(runs.by_label[GPU]), lost_at(runs.by_label[LMCACHE])
    measured = {
        "gpu-loses": gpu,
        "lmcache-loses": lmcache,
        "loses-later": float(lmcache > gpu),
        "hit-rate": hymcache.hit_rate * 100,
        "over-lmcache": speedup(runs, HYMCACHE, LMCACHE),
    }
    busy = ", ".join(
        f"{label} {max(one.gpu_busy.values()):.0%}" for label, one in runs.by_label.items()
    )
    tokens = {
        label: sum(record.computed_tokens for record in one.served)
        for label, one in runs.by_label.items()
    }
    shrink = context.count("shrink")
    room = testbed.single_node(context).pool_blocks // shrink
    block_bytes = testbed.roofline(context).shape.block_bytes(context.count("engine.block_tokens"))
    local = context.count("lmcache.gib") * GIB // shrink // block_bytes
    sizes = ", ".join(
        f"turn {turn.turn} {sum(r.reusable for r in hymcache.served if r.turn == turn.turn)}"
        for turn in hymcache.turns
    )
    prefixes = f"blocks of all conversations' prefixes: {sizes}"
    over = speedup(runs, LMCACHE, GPU)
    reasons = {
        "gpu-loses": f"room for {room} blocks; {prefixes}; hit rates {_rates(runs, GPU)}",
        "lmcache-loses": f"room for {local} blocks; {prefixes}; hit rates {_rates(runs, LMCACHE)}",
        "loses-later": f"LMCache serves {over or 0:.2f} x the GPU alone",
        "hit-rate": f"by turn {_rates(runs, HYMCACHE)}",
        "over-lmcache": f"tokens computed: LMCache {tokens[LMCACHE]:,}, HyMCache "
        f"{tokens[HYMCACHE]:,}; GPU busy: {busy}",
    }
    return [
        claim.judge(
            measured[claim.name],
            reason=reasons.get(claim.name, ""),
            at=f"{context.count('workload.sessions')} conversations, concurrency "
            f"{context.count('workload.concurrency')}",
        )
        for claim in CLAIMS
    ]


def _rates(runs: Runs, label: str) -> str:
    turns = runs.by_label[label].turns
    return ", ".join(f"{turn.hit_rate:.0%}" for turn in turns if turn.seen_blocks)


EXPERIMENT = Experiment(
    name="fig13",
    title="Single-node serving of conversations",
    source="HyMCache fig. 13",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=(*testbed.NODE_PROFILES, *testbed.HYMCACHE_PROFILES, *testbed.LMCACHE_PROFILES),
    claims=CLAIMS,
    run=run,
    compares_tiers=True,
)
