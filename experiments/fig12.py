"""HyMCache fig. 12: how much host DRAM the transfers themselves need.

Set-up (§6.1.3): the cluster and the conversations of fig. 10; Mooncake with 1 TB and HyMCache, with
a transfer (staging) buffer of 10 GB of host DRAM on each server and more; Mooncake at 10 GB also
with a timeout ten times as long. Recomputation is the reference.

The paper finds Mooncake near recomputation at 10 GB, even with the longer timeout, because
insertions fail and chains break; it recovers with more. HyMCache is flat from 10 GB on. How long a
put waits for the buffer before it fails is Mooncake's setting (profile ``mooncake-store``).

Left out: other users of the hosts' memory.
"""

from __future__ import annotations

from functools import partial

from cxlbench.experiments import fig10, testbed
from cxlbench.experiments.serving import (
    Runs,
    System,
    all_checks,
    failed_store_share,
    lost_stores,
    run_systems,
    speedup,
    total_row,
)
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Knob, Plot, Row, about_of

BUFFERS_GIB = (10, 20, 40, 80)
RECOMPUTE = "recompute"
PATIENT = "Mooncake, 10 GiB, 10 x timeout"
CLAIMS = (
    PaperClaim(
        name="mooncake-near-recomputation",
        statement="With 10 GB Mooncake serves about as much as recomputation",
        source="HyMCache §6.1.3, fig. 12",
        expected=1.0,
        unit="x",
    ),
    PaperClaim(
        name="longer-timeout",
        statement="even with a longer timeout",
        source="HyMCache §6.1.3",
        expected=1.0,
        unit="x",
    ),
    PaperClaim(
        name="mooncake-recovers",
        statement="With more Mooncake recovers (80 GiB against 10 GiB, at least 1.2 times)",
        source="HyMCache fig. 12",
        expected=1.2,
        sense=Sense.AT_LEAST,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="hymcache-flat",
        statement="HyMCache is flat from 10 GB on (slowest against fastest)",
        source="HyMCache fig. 12",
        expected=1.0,
        band=0.05,
        unit="x",
    ),
)


def systems(context: Context) -> tuple[System, ...]:
    """Return every system with every buffer; buffers do not shrink: concurrency does not."""
    capacity = context.count("mooncake.gib") * GIB // context.count("shrink")
    found = [System(label=RECOMPUTE, tier="recompute")]
    for gib in BUFFERS_GIB:
        buffer = {"capacity_bytes": capacity, "buffer_bytes": gib * GIB}
        found.append(System(label=f"Mooncake, {gib} GiB", tier="mooncake", options=buffer))
    patient = {
        "capacity_bytes": capacity,
        "buffer_bytes": BUFFERS_GIB[0] * GIB,
        "put_timeout_s": context.number("mooncake.put_timeout_s") * 10,
        "get_timeout_s": context.number("mooncake.get_timeout_s") * 10,
    }
    found.append(System(label=PATIENT, tier="mooncake", options=patient))
    for gib in BUFFERS_GIB:
        options = {"staging_bytes": gib * GIB}
        found.append(System(label=f"HyMCache, {gib} GiB", tier="hymcache", options=options))
    return tuple(found)


def run(context: Context) -> Findings:
    """Run all systems under the chosen routing."""
    runs = run_systems(
        context,
        systems(context),
        partial(testbed.pd_cluster, context, context.choice("routing")),
        fig10.workload_of(context),
        testbed.closed_loop(context),
    )
    if not runs.partial:
        faster = _with_faster_prefill(context)
        runs.by_label |= faster.by_label
        runs.partial |= faster.partial
    rows: list[Row] = []
    for label, one in runs.by_label.items():
        row = total_row(one, system=label)
        row["failed_stores"] = lost_stores(one)
        row["failed_store_share"] = failed_store_share(one)
        rows.append(row)
    return Findings(
        rows=rows,
        claims=[] if runs.partial else _claims(context, runs),
        plots=(_plot(runs),),
        checks=all_checks(runs),
        partial=runs.partial,
    )


def _with_faster_prefill(context: Context) -> Runs:
    """Run Mooncake with a buffer of 1 and of 10 GiB where prefill does not hide it, quick form."""
    what = testbed.ablation(context, ablation__compute=testbed.FASTER)
    capacity = what.count("mooncake.gib") * GIB // what.count("shrink")
    return run_systems(
        what,
        [
            System(
                label=f"Mooncake, {gib} GiB, {testbed.FASTER} x compute",
                tier="mooncake",
                options={"capacity_bytes": capacity, "buffer_bytes": gib * GIB},
            )
            for gib in (1, 10)
        ],
        partial(testbed.pd_cluster, what, what.choice("routing")),
        fig10.workload_of(what),
        testbed.closed_loop(what),
    )


def _claims(context: Context, runs: Runs) -> list[JudgedClaim]:
    small, large = (f"Mooncake, {gib} GiB" for gib in (BUFFERS_GIB[0], BUFFERS_GIB[-1]))
    flat = [runs.by_label[f"HyMCache, {gib} GiB"].requests_per_s for gib in BUFFERS_GIB]
    measured = {
        "mooncake-near-recomputation": speedup(runs, small, RECOMPUTE),
        "longer-timeout": speedup(runs, PATIENT, RECOMPUTE),
        "mooncake-recovers": speedup(runs, large, small),
        "hymcache-flat": min(flat) / max(flat),
    }
    one = runs.by_label[small]
    reason = (
        f"with 10 GiB {lost_stores(one)} ({failed_store_share(one):.0%}) of insertions failed; "
        "hit rate "
        f"{runs.by_label[small].hit_rate:.0%}, with {BUFFERS_GIB[-1]} GiB "
        f"{runs.by_label[large].hit_rate:.0%}; {_ablation(runs)}"
    )
    at = f"concurrency {context.count('workload.concurrency')}, {context.choice('routing')}"
    return [
        claim.judge(
            measured[claim.name], reason="" if claim.name == "hymcache-flat" else reason, at=at
        )
        for claim in CLAIMS
    ]


def _ablation(runs: Runs) -> str:
    parts = []
    for gib in (1, 10):
        run = runs.by_label[f"Mooncake, {gib} GiB, {testbed.FASTER} x compute"]
        failed = lost_stores(run)
        parts.append(f"{gib} GiB: {failed} insertions failed, hit rate {run.hit_rate:.0%}")
    return f"with {testbed.FASTER} x compute and {'; '.join(parts)}"


def _plot(runs: Runs) -> Plot:
    series: dict[str, tuple[list[float | str], list[float]]] = {}
    for label, run in runs.by_label.items():
        name, _, size = label.partition(", ")
        if size.removesuffix(" GiB").isdigit():
            x, y = series.setdefault(name, ([], []))
            x.append(float(size.removesuffix(" GiB")))
            y.append(run.requests_per_s)
    base = runs.by_label.get(RECOMPUTE)
    if base is not None:
        series[RECOMPUTE] = (list(BUFFERS_GIB), [base.requests_per_s] * len(BUFFERS_GIB))
    return Plot(
        name="throughput",
        title="Throughput by the transfer buffer of a server",
        x_label="transfer buffer, GiB",
        y_label="requests/s",
        kind="line",
        series=series,
    )


EXPERIMENT = Experiment(
    name="fig12",
    title="Transfer buffers",
    source="HyMCache fig. 12",
    about=about_of(__doc__),
    knobs=(
        *(knob for knob in fig10.EXPERIMENT.knobs if knob.name != "lmcache.gib"),
        Knob(
            name="mooncake.put_timeout_s",
            value=1.0,
            unit="s",
            assumption=True,
            source="of profile mooncake-store; here it is made longer",
        ),
        Knob(
            name="mooncake.get_timeout_s",
            value=10.0,
            unit="s",
            source="HyMCache §4.1: 10 s, Mooncake's default",
        ),
    ),
    profiles=(
        *testbed.SERVING_PROFILES,
        *testbed.HYMCACHE_PROFILES,
        *testbed.MOONCAKE_PROFILES,
    ),
    claims=CLAIMS,
    run=run,
)
