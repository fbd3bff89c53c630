"""What ``clflush`` costs on a shared memory without coherence, and what ``clflushopt`` breaks.

Set-up, in three parts, all on the pod in virtual time with the costs of a profile
(``harness/pod_profile.py``), two nodes:

1. *Publication.* A writer stores a record of 1 to 64 lines, writes it back, then sets a flag
   (always by ``clflush``); a reader that sees the flag invalidates and reads the record. The record
   goes by ``clflush``, line after line; by ``clflushopt`` and a fence that waits for arrival, as
   one would wish; or by ``clflushopt`` and a fence that does not, which is what TraCT found.
   Counted: the time to publish, and the words that were old.
2. *TraCT itself*: lookups, insertions and evictions by its own programs (``tract/stress.py``),
   every ``clflush`` replaced by ``clflushopt`` and a fence of either kind. Counted: time a block,
   wrong words, and what the checker finds in the region (or how the run ended).
3. *Serving.* A small workload on TraCT's rig (``harness/tract_rig.py``) at 1/10, 1 and 3 times the
   profile's flush latency, which no source gives: what metadata flushes cost a request.

When a posted write-back arrives is the profile's assumption (up to 100 us); how much is old, and
what a waiting fence costs, follows from it. That something is old follows from the fence alone.

Left out: flushes that proceed in parallel in the cache hierarchy; bandwidth of single lines. A
``clflushopt`` of a clean copy is free here.
"""

from __future__ import annotations

import numpy as np

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CopyEngineProfile,
    SharedType3Profile,
)
from cxlbench.experiments.device_runs import together, variant
from cxlbench.experiments.flush_ways import (
    CLFLUSH,
    NODES,
    POSTED,
    WAYS,
    Publication,
    Stressed,
    publication,
    tract_with,
)
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
)
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.tract_replay import TractReplay, replay_on_tract
from cxlbench.harness.tract_rig import TractRigSpec
from cxlbench.kv.geometry import model_shape

NIAGARA = "niagara-2.0"
RECORD_LINES = (1, 2, 4, 8, 16, 32, 64)
FLUSH_FACTORS = (0.1, 1.0, 3.0)

NOT_ENOUGH = PaperClaim(
    name="clflushopt and a fence are not enough",
    statement="After clflushopt and a fence another node can read the old value",
    source="TraCT, visibility",
    sense=Sense.TRUE,
)
CHEAPER = PaperClaim(
    name="clflushopt is cheaper",
    statement="Publishing by clflushopt and a fence takes less time than by clflush",
    source="TraCT, visibility",
    sense=Sense.TRUE,
)
SAFE = PaperClaim(
    name="clflush is safe",
    statement="With clflush no node reads an old value, and TraCT's region stays sound",
    source="TraCT, visibility",
    sense=Sense.TRUE,
)


def run(ctx: Context) -> Findings:
    """Run the three parts."""
    memory = ctx.profile(SharedType3Profile, NIAGARA)
    published = [
        publication(memory, way, lines, ctx.count("workload.records"), seed=ctx.seed)
        for way in WAYS
        for lines in RECORD_LINES
        if not ctx.stopping()
    ]
    ctx.progress("publishing records", 1, 3)
    stressed = [
        tract_with(memory, way, ctx.count("workload.rounds"), seed=ctx.seed)
        for way in WAYS
        if not ctx.stopping()
    ]
    ctx.progress("TraCT by way of flushing", 2, 3)
    served = {
        factor: _served(ctx, variant(memory, flush_latency=memory.flush_latency * factor))
        for factor in FLUSH_FACTORS
        if not ctx.stopping()
    }
    ctx.progress("serving by flush latency", 3, 3)
    if len(published) < len(WAYS) * len(RECORD_LINES) or len(served) < len(FLUSH_FACTORS):
        return Findings(rows=[one.row() for one in published], partial=True)
    by_way = {way: [one for one in published if one.way == way] for way in WAYS}
    tract = {one.way: one for one in stressed}
    stale = sum(one.stale_words for one in by_way[POSTED])
    clean = not sum(one.stale_words for one in by_way[CLFLUSH]) and tract[CLFLUSH].sound
    faster = all(
        post.publish_s <= flush.publish_s
        for post, flush in zip(by_way[POSTED], by_way[CLFLUSH], strict=True)
        if flush.lines > 1
    )
    return Findings(
        rows=[
            *(one.row() for one in published),
            *(one.row() for one in stressed),
            *(_served_row(factor, one) for factor, one in served.items()),
        ],
        claims=[
            NOT_ENOUGH.judge(
                float(stale > 0),
                at=f"{memory.name}: fences do not wait",
                reason=f"{stale} old words; TraCT: {tract[POSTED].outcome}",
            ),
            CHEAPER.judge(
                float(faster),
                at="records of more than one line",
                reason=_cost(by_way),
            ),
            SAFE.judge(float(clean), reason=f"TraCT: {tract[CLFLUSH].outcome}"),
        ],
        plots=[_publication_plot(by_way), _stale_plot(by_way), _serving_plot(served)],
        checks=together(
            [
                *(_published_check(one) for one in published),
                *(_tract_check(one) for one in stressed if one.way != POSTED),
                *(_served_check(factor, one) for factor, one in served.items()),
            ]
        ),
    )


# -- serving ------------------------------------------------------------------------------------

MODEL = "DeepSeek-R1-Distill-Llama-8B"
BLOCK_TOKENS = 128


def _served(ctx: Context, memory: SharedType3Profile) -> TractReplay:
    shape = model_shape(MODEL)
    block_bytes = shape.block_bytes(BLOCK_TOKENS)
    workload = generate(
        GeneratorKnobs(
            sessions=ctx.count("workload.sessions"),
            turns=4,
            shared_system_tokens=1024,
            first_input_tokens=2048,
            turn_input_tokens=512,
            output_tokens=1,
            think_s=0.1,
            block_tokens=BLOCK_TOKENS,
            seed=ctx.seed,
        ),
        name="conversations",
    )
    distinct = len({block for request in workload.requests for block in request.block_ids})
    return replay_on_tract(
        workload,
        TractRigSpec(
            block_bytes=block_bytes,
            memory=memory,
            capacity_bytes=min(memory.capacity, 2 * (distinct + 64) * block_bytes),
            nodes=NODES,
            copy_engine=ctx.profile(CopyEngineProfile, "gpu-copy-gen4x16"),
        ),
        EngineModel(shape, ctx.profile(AcceleratorProfile, "a6000")),
        gpu_blocks=1,
        seed=ctx.seed,
    )


def _ttft_s(one: TractReplay) -> float:
    return float(np.mean([record.ttft_s for record in one.records]))


def _served_row(factor: float, one: TractReplay) -> Row:
    reads = one.blocks.latencies_s()
    return {
        "table": "serving",
        "flush_latency_factor": factor,
        "requests": len(one.records),
        "tier_blocks": one.tier_blocks,
        "hit_rate": one.hit_rate,
        "ttft_mean_s": _ttft_s(one),
        "block_read_mean_s": float(np.mean(reads)) if len(reads) else 0.0,
        "duration_s": one.duration_s,
    }


# -- checks and plots ---------------------------------------------------------------------------


def _published_check(one: Publication) -> Check:
    return Check(
        name=f"publication, {one.way}, {one.lines} lines: every word of every record is read",
        ok=one.words == one.lines * one.records and (one.way == POSTED or not one.stale_words),
        detail=f"{one.words} words, {one.stale_words} old",
    )


def _tract_check(one: Stressed) -> Check:
    return Check(
        name=f"TraCT, {one.way}: sound, and every block is a hit, inserted or refused",
        ok=one.sound and one.hits + one.inserted <= one.blocks,
        detail=one.outcome,
    )


def _served_check(factor: float, one: TractReplay) -> Check:
    return Check(
        name=f"serving, flush latency x {factor:g}: right bytes, nothing held",
        ok=one.correct and one.tier_blocks <= len(one.blocks.nbytes),
        detail=f"{one.wrong_blocks} wrong, held {one.held_at_rest}",
    )


def _cost(by_way: dict[str, list[Publication]]) -> str:
    largest = {way: found[-1] for way, found in by_way.items()}
    return f"{RECORD_LINES[-1]} lines: " + ", ".join(
        f"{way} {one.publish_s * 1e6:.1f} us" for way, one in largest.items()
    )


def _publication_plot(by_way: dict[str, list[Publication]]) -> Plot:
    return Plot(
        name="publication",
        title="Time to publish a record",
        x_label="lines of the record",
        y_label="us",
        kind="line",
        series={
            way: ([float(one.lines) for one in found], [one.publish_s * 1e6 for one in found])
            for way, found in by_way.items()
        },
    )


def _stale_plot(by_way: dict[str, list[Publication]]) -> Plot:
    return Plot(
        name="stale",
        title="Old words read after the flag was seen",
        x_label="lines of the record",
        y_label="share of words",
        kind="line",
        series={
            way: (
                [float(one.lines) for one in found],
                [one.stale_words / one.words for one in found],
            )
            for way, found in by_way.items()
        },
    )


def _serving_plot(served: dict[float, TractReplay]) -> Plot:
    return Plot(
        name="serving",
        title="TraCT's mean TTFT by flush latency",
        x_label="flush latency, times the profile's",
        y_label="s",
        kind="line",
        series={"TraCT": (list(served), [_ttft_s(one) for one in served.values()])},
    )


EXPERIMENT = Experiment(
    name="flush_cost",
    title="clflush against clflushopt on a shared memory without coherence",
    source="ablation; TraCT, visibility",
    about=(
        "Records published between two nodes, TraCT's own programs, and a small serving run, with "
        "metadata written back by clflush, by clflushopt and a fence that waits for arrival, and "
        "by clflushopt and a fence that does not."
    ),
    knobs=(
        Knob(
            name="workload.records",
            value=500,
            quick=60,
            source="records of each size; enough to meet late arrivals",
        ),
        Knob(
            name="workload.rounds",
            value=300,
            quick=60,
            source="chains that each node looks up in TraCT's stress program",
        ),
        Knob(
            name="workload.sessions",
            value=16,
            quick=4,
            source="conversations of the serving part; their lengths are of TraCT's order "
            "(1500-6000 tokens)",
            assumption=True,
        ),
    ),
    profiles=(NIAGARA, "a6000", "gpu-copy-gen4x16"),
    claims=(NOT_ENOUGH, CHEAPER, SAFE),
    run=run,
)
