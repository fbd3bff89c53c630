"""HyMCache fig. 10: PD-disaggregated serving of a workload that outgrows every DRAM.

Set-up (§5, §6.1.1): Qwen2.5-32B on four prefill servers and one decode server, synthetic multi-turn
conversations whose reusable KV comes to about 1.5 TB by turn 7, one output token. Systems:
recomputation, the GPU's prefix cache, LMCache with 64 GB of local DRAM on each of the four workers,
Mooncake with 1 TB of distributed DRAM, HyMCache with 64 GB of device DRAM over 2 TB of SSD.

The paper states neither the conversations' number and length, nor routing, nor concurrency, nor
what *performance* is. Here 512 conversations of equal turns come to 1.5 TiB at 32 MiB a block of
128 tokens; both routings are run; performance is requests/s at a fixed concurrency, which by
Little's law is the same statement as mean end-to-end time, and mean TTFT is reported beside it.
Conversations take turns (all first turns, then all second ones), so the footprint grows with the
turns as the paper's figure does; ``workload.order`` offers whole conversations one after the other
instead.

Left out: failures, the bytes of control messages, memory that Mooncake's clients use themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cxlbench.devices.profile import CxlHmProfile
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
from cxlbench.harness.experiment import Check, Context, Experiment, Findings, Knob, Plot, Row
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.routing import Routing
from cxlbench.harness.serve.run import Simulated, TurnServed

RECOMPUTE, GPU, LMCACHE, MOONCAKE, HYMCACHE = (
    "recompute",
    "GPU prefix cache",
    "LMCache local",
    "Mooncake",
    "HyMCache",
)
TURNS = 7
KNOBS = (
    testbed.model_knob("Qwen2.5-32B"),
    testbed.BLOCK_TOKENS,
    Knob(
        name="workload.sessions",
        value=512,
        quick=64,
        assumption=True,
        source="not stated; with turn_tokens it gives the 1.5 TB that are",
    ),
    Knob(
        name="workload.turn_tokens",
        value=1756,
        unit="tokens",
        assumption=True,
        source="not stated; 512 conversations x 7 turns x 1756 tokens are 1.5 TiB of blocks",
    ),
    Knob(
        name="workload.length_spread",
        value=0.1,
        assumption=True,
        source="not stated; standard deviation of a turn's tokens over their mean",
    ),
    Knob(
        name="workload.concurrency",
        value=32,
        assumption=True,
        low=16,
        high=64,
        source="not stated; eight requests for each prefill server",
    ),
    Knob(
        name="shrink",
        value=1,
        quick=8,
        source="the quick form has an eighth of the conversations and of every tier's memory",
    ),
    Knob(name="lmcache.gib", value=64, unit="GiB", source="HyMCache §5: 64 GB a worker"),
    Knob(name="mooncake.gib", value=1024, unit="GiB", source="HyMCache §5: 1 TB of DRAM"),
)
CLAIMS = (
    PaperClaim(
        name="over-lmcache",
        statement="HyMCache serves 1.45 times as much as LMCache with local DRAM",
        source="HyMCache §6.1.1, fig. 10",
        expected=1.45,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="under-mooncake",
        statement="Mooncake with 1 TB of DRAM serves 1.3 times as much as HyMCache",
        source="HyMCache §6.1.1, fig. 10",
        expected=1.3,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="hit-rate-over-mooncake",
        statement="At turn 7 HyMCache's hit rate is 10 points over Mooncake's",
        source="HyMCache fig. 10c",
        expected=10.0,
        neutral=0.0,
        unit="points",
        band=0.5,
    ),
    PaperClaim(
        name="mooncake-covers",
        statement="Mooncake's 1 TB covers two thirds of the footprint",
        source="HyMCache §6.1.1",
        expected=67.0,
        unit="%",
    ),
    PaperClaim(
        name="skipped",
        statement="More than 15 % of insertions are skipped",
        source="HyMCache §6.1.1",
        expected=15.0,
        sense=Sense.AT_LEAST,
        neutral=0.0,
        unit="%",
    ),
    PaperClaim(
        name="gap-narrows",
        statement="Mooncake's advantage narrows with the turns (turn 7 against turn 3)",
        source="HyMCache §6.1.1",
        sense=Sense.TRUE,
    ),
)


def systems(context: Context) -> tuple[System, ...]:
    """Return the five systems; memory is divided as the conversations are."""
    shrink = context.count("shrink")
    return (
        System(label=RECOMPUTE, tier="recompute"),
        System(label=GPU, tier="gpu-prefix-cache"),
        System(
            label=LMCACHE,
            tier="lmcache-local",
            options={"capacity_bytes": context.count("lmcache.gib") * GIB // shrink},
        ),
        System(
            label=MOONCAKE,
            tier="mooncake",
            options={"capacity_bytes": context.count("mooncake.gib") * GIB // shrink},
        ),
        System(label=HYMCACHE, tier="hymcache"),
    )


def workload_of(context: Context) -> Workload:
    """Return the conversations."""
    tokens = context.number("workload.turn_tokens")
    spread = tokens * context.number("workload.length_spread")
    return generate(
        GeneratorKnobs(
            sessions=context.count("workload.sessions"),
            turns=TURNS,
            shared_system_tokens=0,
            first_input_tokens=tokens,
            first_input_stddev=spread,
            turn_input_tokens=tokens,
            turn_input_stddev=spread,
            output_tokens=1,
            think_s=0,
            block_tokens=context.count("engine.block_tokens"),
            seed=context.seed,
        ),
        name="aiperf-like",
    )


def run(context: Context) -> Findings:
    """Run all systems under both routings."""
    workload = workload_of(context)
    how = testbed.closed_loop(context)
    rows: list[Row] = []
    checks: list[Check] = []
    plots: list[Plot] = []
    found: dict[str, Runs] = {}
    for routing in Routing:
        runs = run_systems(
            context,
            with_own(context, systems(context)),
            partial(testbed.pd_cluster, context, routing),
            workload,
            how,
            labels=f", {routing}",
        )
        found[routing] = runs
        for label, one in runs.by_label.items():
            rows.append(total_row(one, system=label, routing=routing))
            rows += turn_rows(one, system=label, routing=routing)
        checks += all_checks(runs, f", {routing}")
        plots += _plots(runs, routing)
        if runs.partial:
            break
    chosen = found.get(context.choice("routing"))
    cut_short = len(found) < len(Routing) or any(runs.partial for runs in found.values())
    claims: list[JudgedClaim] = []
    if chosen and not cut_short and not context.stopping():
        faster = _with_faster_prefill(context)
        rows += [total_row(one, system=label) for label, one in faster.by_label.items()]
        checks += all_checks(faster, ", faster prefill")
        claims = _claims(context, chosen, workload, faster)
    return Findings(
        rows=rows,
        claims=claims,
        plots=plots,
        checks=checks,
        notes=(f"Claims are judged under {context.choice('routing')} routing.",),
        partial=cut_short,
    )


def _with_faster_prefill(context: Context) -> Runs:
    """Run what compute hides: Mooncake and HyMCache on GPUs that prefill faster, quick form."""
    what = testbed.ablation(context, ablation__compute=testbed.FASTER)
    runs = run_systems(
        what,
        [system for system in systems(what) if system.label in (MOONCAKE, HYMCACHE)],
        partial(testbed.pd_cluster, what, context.choice("routing")),
        workload_of(what),
        testbed.closed_loop(what),
        labels=f", {testbed.FASTER} x compute",
    )
    named = {f"{label}, {testbed.FASTER} x compute": run for label, run in runs.by_label.items()}
    return Runs(named, runs.partial)


def _claims(context: Context, runs: Runs, workload: Workload, faster: Runs) -> list[JudgedClaim]:
    hym, moon = runs.by_label[HYMCACHE], runs.by_label[MOONCAKE]
    blocks = len({block for r in workload.requests for block in r.block_ids})
    footprint = blocks * testbed.roofline(context).shape.block_bytes(workload.block_tokens)
    capacity = context.count("mooncake.gib") * GIB // context.count("shrink")
    held = moon.counters.get("resident_bytes", float(min(capacity, footprint)))
    measured = {
        "over-lmcache": speedup(runs, HYMCACHE, LMCACHE),
        "under-mooncake": speedup(runs, MOONCAKE, HYMCACHE),
        "hit-rate-over-mooncake": (_turn(hym, TURNS).hit_rate - _turn(moon, TURNS).hit_rate) * 100,
        "mooncake-covers": held / footprint * 100,
        "skipped": hym.skipped_share * 100,
        "gap-narrows": float(_gap(moon, hym, TURNS) < _gap(moon, hym, 3)),
    }
    moon_fast, hym_fast = faster.by_label.values()
    ablation = (
        f"with {testbed.FASTER} x compute HyMCache serves {hym_fast.requests_per_s:.2f} and "
        f"Mooncake {moon_fast.requests_per_s:.2f} requests/s, hit rates "
        f"{hym_fast.hit_rate:.0%} and {moon_fast.hit_rate:.0%}, "
        f"{hym_fast.skipped_share:.0%} of insertions skipped"
    )
    hits = ", ".join(f"{label} {one.hit_rate:.0%}" for label, one in runs.by_label.items())
    reasons = {
        "over-lmcache": f"hit rates: {hits}",
        "under-mooncake": f"GPUs of HyMCache compute {max(hym.gpu_busy.values()):.0%} of the "
        f"time, its storage port moves data {_port(hym):.0%}; {ablation}",
        "hit-rate-over-mooncake": ablation,
        "skipped": f"the write buffer refused {hym.stores.skipped} of "
        f"{hym.stores.stored + hym.stores.skipped} blocks: four GPUs of this roofline make "
        f"{_made(context, hym) / 1e9:.1f} GB/s of new KV, and the SSDs take "
        f"{_drain(context) / 1e9:.1f} GB/s; {ablation}",
    }
    at = f"concurrency {context.count('workload.concurrency')}, {context.choice('routing')}"
    return [
        claim.judge(measured[claim.name], reason=reasons.get(claim.name, ""), at=at)
        for claim in CLAIMS
    ]


def _turn(run: Simulated, turn: int) -> TurnServed:
    return next(found for found in run.turns if found.turn == turn)


def _gap(faster: Simulated, slower: Simulated, turn: int) -> float:
    return _turn(slower, turn).e2e.mean_s / _turn(faster, turn).e2e.mean_s


def _made(context: Context, run: Simulated) -> float:
    """Return the new KV that the prefill servers made, bytes/s."""
    shape = testbed.roofline(context).shape
    tokens = sum(record.computed_tokens for record in run.served)
    return tokens * shape.kv_bytes_per_token() / run.duration_s


def _drain(context: Context) -> float:
    """Return what the SSDs of the prototype write, bytes/s, while nothing is read."""
    device = context.profile(CxlHmProfile, "cxl-hm-prototype")
    return device.ssd_count * device.ssd.write_bandwidth


def _port(run: Simulated) -> float:
    return max(share for name, share in run.pipe_busy.items() if "node0" in name)


def _plots(runs: Runs, routing: str) -> Sequence[Plot]:
    return (
        by_turn_plot(
            runs,
            name=f"ttft-{routing}",
            title=f"Mean time to first token, {routing}",
            value="ttft_mean_s",
            y_label="TTFT, s",
        ),
        by_turn_plot(
            runs,
            name=f"hit-rate-{routing}",
            title=f"Blocks not computed again, {routing}",
            value="hit_rate",
            y_label="hit rate",
        ),
    )


EXPERIMENT = Experiment(
    name="fig10",
    title="PD-disaggregated serving beyond DRAM",
    source="HyMCache fig. 10",
    about=(__doc__ or "").partition("\n\n")[2].partition("\n\nLeft out")[0],
    knobs=(*KNOBS, testbed.ORDER, testbed.ROUTING, testbed.COMPUTE),
    profiles=(
        *testbed.SERVING_PROFILES,
        *testbed.HYMCACHE_PROFILES,
        *testbed.LMCACHE_PROFILES,
        *testbed.MOONCAKE_PROFILES,
    ),
    claims=CLAIMS,
    run=run,
    compares_tiers=True,
)
