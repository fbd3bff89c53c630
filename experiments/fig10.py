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
turns as the paper's figure does. Claims are judged under one routing (``routing``), and each says
what the other one gives. Two ablations: prefill four times as fast (quick form), and conversations
offered one after the other (``workload.order``; not in the quick form, where all are under way).

Left out: failures, the bytes of control messages, memory that Mooncake's clients use themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    turn_of,
    turn_rows,
    with_own,
)
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
    about_of,
)
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.drive import Order
from cxlbench.harness.serve.routing import Routing
from cxlbench.harness.serve.run import Simulated

RECOMPUTE, GPU, LMCACHE, MOONCAKE, HYMCACHE = (
    "recompute",
    "GPU prefix cache",
    "LMCache local",
    "Mooncake",
    "HyMCache",
)
TURNS = 7
AHEAD = 1.01
"""From how many times the other's speed on a system is ahead; less is the order of arrivals."""
KNOBS = (
    testbed.model_knob("Qwen2.5-32B"),
    testbed.BLOCK_TOKENS,
    Knob(
        name="workload.sessions",
        value=512,
        quick=32,
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
        quick=16,
        source="the quick form has a sixteenth of the conversations and of every tier's memory; "
        "all are under way at once there, so a turn may begin before the last one is stored",
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
        statement="Mooncake is ahead at turn 3 (by over 1 %), and by less at turn 7",
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
    plots.append(_last_turn(found))
    cut_short = len(found) < len(Routing) or any(runs.partial for runs in found.values())
    claims: list[JudgedClaim] = []
    if not cut_short and not context.stopping():
        faster = _with_faster_prefill(context)
        in_order = _one_after_another(context)
        for ablation, what in ((faster, "faster prefill"), (in_order, "one after the other")):
            for label, one in ablation.by_label.items():
                name = f"{label}, {what}"
                rows.append(total_row(one, system=name, routing=context.choice("routing")))
            checks += all_checks(ablation, f", {what}")
            cut_short |= ablation.partial
        if not cut_short:
            claims = _claims(context, found, workload, faster, in_order)
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
    return _some(what, (MOONCAKE, HYMCACHE), f", {testbed.FASTER} x compute")


def _one_after_another(context: Context) -> Runs:
    """Run conversations one after the other, where not all of them are under way at once."""
    at_once = context.count("workload.concurrency") >= context.count("workload.sessions")
    if at_once or context.choice(testbed.ORDER.name) == Order.SESSIONS:
        return Runs()
    overrides = {**context.overrides, testbed.ORDER.name: str(Order.SESSIONS)}
    what = replace(context, overrides=overrides)
    return _some(what, (LMCACHE, MOONCAKE, HYMCACHE), ", one conversation after the other")


def _some(context: Context, chosen: Sequence[str], labels: str) -> Runs:
    return run_systems(
        context,
        [system for system in systems(context) if system.label in chosen],
        partial(testbed.pd_cluster, context, context.choice("routing")),
        workload_of(context),
        testbed.closed_loop(context),
        labels=labels,
    )


def _claims(
    context: Context, found: Mapping[str, Runs], workload: Workload, faster: Runs, in_order: Runs
) -> list[JudgedClaim]:
    routing = context.choice("routing")
    runs = found[routing]
    judged = {name: _measured(context, of_it, workload) for name, of_it in found.items()}
    why = _reasons(context, runs, faster, in_order)
    at = f"concurrency {context.count('workload.concurrency')}, {routing}"
    claims = []
    for claim in CLAIMS:
        others = ", ".join(
            f"{claim.judge(values[claim.name]).measured} under {name}"
            for name, values in judged.items()
            if name != routing
        )
        parts = [part for part in (why.get(claim.name), others) if part]
        claims.append(claim.judge(judged[routing][claim.name], reason="; ".join(parts), at=at))
    return claims


def _measured(context: Context, runs: Runs, workload: Workload) -> dict[str, float | None]:
    """Return what one routing gives for each claim."""
    hym, moon = runs.by_label[HYMCACHE], runs.by_label[MOONCAKE]
    blocks = len({block for r in workload.requests for block in r.block_ids})
    footprint = blocks * testbed.roofline(context).shape.block_bytes(workload.block_tokens)
    capacity = context.count("mooncake.gib") * GIB // context.count("shrink")
    held = moon.counters.get("resident_bytes", float(min(capacity, footprint)))
    early, late = _gap(moon, hym, 3), _gap(moon, hym, TURNS)
    return {
        "over-lmcache": speedup(runs, HYMCACHE, LMCACHE),
        "under-mooncake": speedup(runs, MOONCAKE, HYMCACHE),
        "hit-rate-over-mooncake": (turn_of(hym, TURNS).hit_rate - turn_of(moon, TURNS).hit_rate)
        * 100,
        "mooncake-covers": held / footprint * 100,
        "skipped": hym.skipped_share * 100,
        "gap-narrows": float(early > AHEAD and late < early),
    }


def _reasons(context: Context, runs: Runs, faster: Runs, in_order: Runs) -> dict[str, str]:
    """Return what stands behind each claim, in numbers of these runs."""
    hym, moon, lmcache = (runs.by_label[label] for label in (HYMCACHE, MOONCAKE, LMCACHE))
    moon_fast, hym_fast = faster.by_label[MOONCAKE], faster.by_label[HYMCACHE]
    fast = (
        f"with {testbed.FASTER} x compute (quick form) HyMCache serves "
        f"{hym_fast.requests_per_s:.2f} and Mooncake {moon_fast.requests_per_s:.2f} requests/s, "
        f"hit rates {hym_fast.hit_rate:.0%} and {moon_fast.hit_rate:.0%}, "
        f"{hym_fast.skipped_share:.0%} of insertions skipped"
    )
    hits = ", ".join(f"{label} {one.hit_rate:.0%}" for label, one in runs.by_label.items())
    ends = ", ".join(
        f"{label} {turn_of(one, TURNS).hit_rate:.0%}" for label, one in runs.by_label.items()
    )
    over, under = "", ""
    if in_order.by_label:
        serve = {label: one.requests_per_s for label, one in in_order.by_label.items()}
        known = {label: one.hit_rate for label, one in in_order.by_label.items()}
        over = (
            f"; offered one conversation after the other {serve[HYMCACHE] / serve[LMCACHE]:.2f} x, "
            f"hit rates {known[HYMCACHE]:.0%} and {known[LMCACHE]:.0%}"
        )
        under = (
            "; offered one conversation after the other "
            f"{serve[MOONCAKE] / serve[HYMCACHE]:.2f} x, hit rates {known[MOONCAKE]:.0%} and "
            f"{known[HYMCACHE]:.0%}"
        )
    early, late = _gap(moon, hym, 3), _gap(moon, hym, TURNS)
    return {
        "over-lmcache": f"hit rates over all turns: {hits}; mean TTFT {hym.ttft.mean_s:.1f} s "
        f"against {lmcache.ttft.mean_s:.1f} s, mean end-to-end {hym.e2e.mean_s:.1f} s against "
        f"{lmcache.e2e.mean_s:.1f} s{over}",
        "under-mooncake": f"mean TTFT of Mooncake {moon.ttft.mean_s:.1f} s, of HyMCache "
        f"{hym.ttft.mean_s:.1f} s, mean end-to-end {moon.e2e.mean_s:.1f} s and "
        f"{hym.e2e.mean_s:.1f} s; HyMCache's GPUs compute {max(hym.gpu_busy.values()):.0%} of the "
        f"time, its storage port moves data {_port(hym):.0%}; {fast}{under}",
        "hit-rate-over-mooncake": f"at turn {TURNS}: {ends}; {fast}",
        "mooncake-covers": "what it holds at the end, with room for "
        f"{context.count('mooncake.gib') / context.count('shrink'):.0f} GiB",
        "skipped": f"the write buffer refused {hym.stores.skipped} of "
        f"{hym.stores.stored + hym.stores.skipped} blocks: four GPUs of this roofline make "
        f"{_made(context, hym) / 1e9:.1f} GB/s of new KV, and the SSDs take "
        f"{_drain(context) / 1e9:.1f} GB/s while nothing is read; {fast}",
        "gap-narrows": f"Mooncake is {early:.2f} x as fast at turn 3, {late:.2f} x at turn {TURNS}"
        + ("" if early > AHEAD else ": there is no advantage that could narrow"),
    }


def _gap(faster: Simulated, slower: Simulated, turn: int) -> float:
    return turn_of(slower, turn).e2e.mean_s / turn_of(faster, turn).e2e.mean_s


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
            y_label="mean TTFT, s",
        ),
        by_turn_plot(
            runs,
            name=f"e2e-{routing}",
            title=f"Mean end-to-end time, {routing}",
            value="e2e_mean_s",
            y_label="mean end-to-end time, s",
        ),
        by_turn_plot(
            runs,
            name=f"hit-rate-{routing}",
            title=f"Blocks not computed again, {routing}",
            value="hit_rate",
            y_label="hit rate",
        ),
    )


def _last_turn(found: Mapping[str, Runs]) -> Plot:
    """Plot the hit rates of the last turn (fig. 10c), by routing."""
    series: dict[str, tuple[list[float | str], list[float]]] = {}
    for routing, runs in found.items():
        for label, one in runs.by_label.items():
            if one.turns and one.turns[-1].turn == TURNS:
                names, rates = series.setdefault(label, ([], []))
                names.append(str(routing))
                rates.append(one.turns[-1].hit_rate)
    return Plot(
        name=f"hit-rate-turn-{TURNS}",
        title=f"Blocks not computed again, turn {TURNS}",
        x_label="",
        y_label="hit rate",
        kind="bar",
        series=series,
    )


EXPERIMENT = Experiment(
    name="fig10",
    title="PD-disaggregated serving beyond DRAM",
    source="HyMCache fig. 10",
    about=about_of(__doc__),
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
