"""HyMCache fig. 14: a remote tier on Redis.

Set-up (§6.2.2): Qwen2.5-32B on one node; Redis with 64 GB alone, reached over TCP; LMCache with 64
GB of local DRAM and Redis with 64 GB behind it; HyMCache. The footprint fits the 128 GB of the pair
and grows over six turns; the distribution of TTFT is that of turn 6.

The paper sees Redis alone break prefix chains by failed stores, and the pair about level with
HyMCache. What makes a store fail is the client's buffer: values come faster than one server thread
takes them over TCP (profile ``redis-64g``). Whether that is what breaks chains is asked by an
ablation in which no store fails; others have half the footprint, and GPUs that prefill four times
as fast (all in the quick form).

Left out: Redis's persistence and clusters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cxlbench.experiments import testbed
from cxlbench.experiments.serving import (
    Runs,
    System,
    all_checks,
    by_turn_plot,
    failed_store_share,
    run_systems,
    speedup,
    total_row,
    turn_rows,
    with_options,
    with_own,
)
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Knob, Plot, Row, about_of
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload

RECOMPUTE, REDIS, PAIR, HYMCACHE = ("recompute", "Redis", "LMCache + Redis", "HyMCache")
TURNS = 6
KNOBS = (
    testbed.model_knob("Qwen2.5-32B"),
    testbed.BLOCK_TOKENS,
    Knob(
        name="workload.sessions",
        value=64,
        quick=16,
        assumption=True,
        source="not stated; with turn_tokens the footprint comes to 112 GiB of the 128",
    ),
    Knob(
        name="workload.turn_tokens",
        value=1200,
        unit="tokens",
        assumption=True,
        source="not stated; 64 conversations x 6 turns x 1200 tokens are 112 GiB",
    ),
    Knob(
        name="workload.concurrency",
        value=8,
        assumption=True,
        source="not stated",
    ),
    testbed.ORDER,
    testbed.COMPUTE,
    Knob(
        name="shrink",
        value=1,
        quick=4,
        source="the quick form has a quarter of the conversations and of the memory",
    ),
    Knob(name="lmcache.gib", value=64, unit="GiB", source="HyMCache §6.2.2"),
    Knob(name="redis.gib", value=64, unit="GiB", source="HyMCache §6.2.2"),
    Knob(
        name="redis.policy",
        value="allkeys-lru",
        choices=("allkeys-lru", "noeviction"),
        assumption=True,
        source="not stated; noeviction, Redis's own default, refuses every store once it is full",
    ),
)
CLAIMS = (
    PaperClaim(
        name="redis-breaks-chains",
        statement="Redis alone loses chains (read as: at turn 6 under half of what was computed "
        "before is reused)",
        source="HyMCache fig. 14a",
        expected=50.0,
        sense=Sense.AT_MOST,
        neutral=100.0,
        unit="%",
    ),
    PaperClaim(
        name="redis-stores-fail",
        statement="Stores to Redis alone fail frequently (read as: over a tenth)",
        source="HyMCache §6.2.2",
        expected=10.0,
        sense=Sense.AT_LEAST,
        neutral=0.0,
        unit="%",
    ),
    PaperClaim(
        name="pair-level",
        statement="The pair serves about as much as HyMCache",
        source="HyMCache fig. 14a",
        expected=1.0,
        unit="x",
    ),
    PaperClaim(
        name="pair-level-turn-6",
        statement="The pair's TTFT at turn 6 is distributed as HyMCache's (medians)",
        source="HyMCache fig. 14b",
        expected=1.0,
        unit="x",
    ),
)


def workload_of(context: Context) -> Workload:
    """Return the conversations."""
    tokens = context.number("workload.turn_tokens")
    return generate(
        GeneratorKnobs(
            sessions=context.count("workload.sessions"),
            turns=TURNS,
            shared_system_tokens=0,
            first_input_tokens=tokens,
            turn_input_tokens=tokens,
            output_tokens=1,
            think_s=0,
            block_tokens=context.count("engine.block_tokens"),
            seed=context.seed,
        ),
        name="redis-footprint",
    )


def systems(context: Context) -> tuple[System, ...]:
    """Return the systems."""
    shrink = context.count("shrink")
    local = context.count("lmcache.gib") * GIB // shrink
    remote = {
        "capacity_bytes": context.count("redis.gib") * GIB // shrink,
        "policy": context.choice("redis.policy"),
    }
    return (
        System(label=RECOMPUTE, tier="recompute"),
        System(label=REDIS, tier="redis", options=remote),
        System(
            label=PAIR,
            tier="lmcache-redis",
            options={**remote, "local_bytes": local},
        ),
        System(label=HYMCACHE, tier="hymcache", options={"worker_link": "nic-200g"}),
    )


def run(context: Context) -> Findings:
    """Run all systems."""
    runs = run_systems(
        context,
        with_own(context, systems(context)),
        partial(testbed.single_node, context),
        workload_of(context),
        testbed.closed_loop(context),
    )
    compared = Runs(dict(runs.by_label), runs.partial)
    if not runs.partial:
        _ablations(context, runs)
    rows: list[Row] = []
    for label, one in runs.by_label.items():
        row = total_row(one, system=label)
        row["failed_store_share"] = _failed(runs, label)
        rows.append(row)
        rows += turn_rows(one, system=label)
    cdf = Plot(
        name="ttft-turn-6",
        title="TTFT at turn 6",
        x_label="TTFT, s",
        y_label="share of requests",
        kind="cdf",
        series={
            label: (sorted(r.ttft_s for r in one.served if r.turn == TURNS), [])
            for label, one in compared.by_label.items()
        },
    )
    return Findings(
        rows=rows,
        claims=[] if runs.partial else _claims(context, runs),
        plots=(
            by_turn_plot(
                compared,
                name="e2e",
                title="Mean end-to-end time, single node",
                value="e2e_mean_s",
                y_label="mean end-to-end time, s",
            ),
            cdf,
        ),
        checks=all_checks(runs),
        partial=runs.partial,
    )


FAST_REDIS = f"Redis, {testbed.FASTER} x compute"
ENDLESS, ENDLESS_BYTES = "Redis, endless buffer", 1 << 50
SMALL_PAIR, SMALL_HYMCACHE = "LMCache + Redis, half footprint", "HyMCache, half footprint"


def _ablations(context: Context, runs: Runs) -> None:
    """Run Redis where prefill is faster and where no store fails, the pair with half the footprint.

    All in the quick form, the pair beside HyMCache.
    """
    faster = testbed.ablation(context, ablation__compute=testbed.FASTER)
    half = testbed.ablation(context)
    half = testbed.ablation(half, workload__sessions=half.count("workload.sessions") // 2)
    for what, names in (
        (faster, {REDIS: FAST_REDIS}),
        (half, {PAIR: SMALL_PAIR, HYMCACHE: SMALL_HYMCACHE}),
    ):
        found = run_systems(
            what,
            [system for system in systems(what) if system.label in names],
            partial(testbed.single_node, what),
            workload_of(what),
            testbed.closed_loop(what),
        )
        runs.by_label |= {names[label]: run for label, run in found.by_label.items()}
        runs.partial |= found.partial
    what = testbed.ablation(context)
    (redis,) = (system for system in systems(what) if system.label == REDIS)
    found = run_systems(
        what,
        [replace(with_options(redis, buffer_bytes=ENDLESS_BYTES), label=ENDLESS)],
        partial(testbed.single_node, what),
        workload_of(what),
        testbed.closed_loop(what),
    )
    runs.by_label |= found.by_label
    runs.partial |= found.partial


def _failed(runs: Runs, label: str) -> float:
    return failed_store_share(runs.by_label[label])


def _claims(context: Context, runs: Runs) -> list[JudgedClaim]:
    last = {label: one.turns[-1].hit_rate for label, one in runs.by_label.items()}
    pair_s, hymcache_s = (runs.by_label[label].turns[-1].ttft.p50_s for label in (PAIR, HYMCACHE))
    measured = {
        "redis-breaks-chains": last[REDIS] * 100,
        "redis-stores-fail": _failed(runs, REDIS) * 100,
        "pair-level": speedup(runs, PAIR, HYMCACHE),
        "pair-level-turn-6": pair_s / hymcache_s if hymcache_s else None,
    }
    hits = f"hit rates at turn {TURNS}: " + ", ".join(
        f"{label} {last[label]:.0%}" for label in (REDIS, PAIR, HYMCACHE)
    )
    fast = (
        f"with {testbed.FASTER} x compute (quick form) {_failed(runs, FAST_REDIS):.0%} of stores "
        f"fail, hit rate at turn {TURNS} {last[FAST_REDIS]:.0%}"
    )
    gib = context.count("lmcache.gib"), context.count("redis.gib")
    half = (
        f"LMCache writes every chunk to both of its caches, so {gib[0]} + {gib[1]} GiB hold no "
        "more than the larger: with half the footprint (quick form)"
    )
    halved = [runs.by_label[label].turns[-1].ttft.p50_s for label in (SMALL_PAIR, SMALL_HYMCACHE)]
    reasons = {
        "redis-breaks-chains": f"{hits}; {_failed(runs, REDIS):.0%} of stores failed; where none "
        f"fails (endless buffer, quick form) {last[ENDLESS]:.0%} are reused from {gib[1]} GiB "
        f"under sampled LRU; {fast}",
        "redis-stores-fail": fast,
        "pair-level": f"{hits}; {half} {speedup(runs, SMALL_PAIR, SMALL_HYMCACHE) or 0:.2f} x",
        "pair-level-turn-6": f"{pair_s:.2f} against {hymcache_s:.2f} s; {half} {halved[0]:.2f} "
        f"against {halved[1]:.2f} s",
    }
    at = f"concurrency {context.count('workload.concurrency')}"
    return [
        claim.judge(measured[claim.name], reason=reasons[claim.name], at=at) for claim in CLAIMS
    ]


EXPERIMENT = Experiment(
    name="fig14",
    title="A remote tier on Redis",
    source="HyMCache fig. 14",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=(*testbed.SERVING_PROFILES, *testbed.HYMCACHE_PROFILES, *testbed.REDIS_PROFILES),
    claims=CLAIMS,
    run=run,
    compares_tiers=True,
)
