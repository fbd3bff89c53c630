"""HyMCache fig. 11: the same SSDs behind NVMe-oF and a file system.

Set-up (§6.1.2): the cluster and the conversations of fig. 10; Mooncake keeps its objects on the two
SSDs of the CXL-HM prototype, striped, cut by LVM into one volume for each prefill server, reached
by NVMe-oF over RDMA and formatted with XFS. The raw path carries 23 GB/s, a volume under XFS 6.5
GB/s; each server reaches its volume by 200 Gb/s, without which 23 GB/s could not be read. Compared
with recomputation and with HyMCache; ablations take the file system away, let fetches time out
after 1 s, and prefill four times as fast (quick form).

The paper finds it near recomputation, since many fetches time out. Its arithmetic does not say so:
four servers, to each of which XFS leaves 6.5 GB/s, share two SSDs of 13 GB/s each, and a prefix of
7 turns (3 GB) is read in half a second. What would have to be true is looked for by the ablations.

Left out: the file system's page cache (reads are direct), readahead, journal traffic.
"""

from __future__ import annotations

from functools import partial

from cxlbench.experiments import fig10, testbed
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
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Row, about_of
from cxlbench.harness.serve.run import Simulated

RECOMPUTE, XFS, RAW, HURRIED, HYMCACHE = (
    "recompute",
    "NVMe-oF, XFS",
    "NVMe-oF, raw",
    "NVMe-oF, XFS, 1 s timeout",
    "HyMCache",
)
SYSTEMS = (
    System(label=RECOMPUTE, tier="recompute"),
    System(label=XFS, tier="mooncake-nvmeof"),
    System(label=RAW, tier="mooncake-nvmeof", options={"file_system": False}),
    System(label=HURRIED, tier="mooncake-nvmeof", options={"get_timeout_s": 1.0}),
    System(label=HYMCACHE, tier="hymcache"),
)
CLAIMS = (
    PaperClaim(
        name="near-recomputation",
        statement="Mooncake on NVMe-oF serves about as much as recomputation",
        source="HyMCache §6.1.2, fig. 11",
        expected=1.0,
        unit="x",
    ),
    PaperClaim(
        name="fetches-time-out",
        statement="Many fetches time out (read as: over a tenth of the announced blocks)",
        source="HyMCache §6.1.2",
        expected=10.0,
        sense=Sense.AT_LEAST,
        neutral=0.0,
        unit="%",
    ),
    PaperClaim(
        name="hymcache-faster",
        statement="HyMCache serves substantially more than Mooncake on NVMe-oF (read as: a tenth)",
        source="HyMCache fig. 11",
        expected=1.1,
        neutral=1.0,
        sense=Sense.AT_LEAST,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run all systems under the chosen routing."""
    routing = context.choice("routing")
    runs = run_systems(
        context,
        with_own(context, SYSTEMS),
        partial(testbed.pd_cluster, context, routing),
        fig10.workload_of(context),
        testbed.closed_loop(context),
    )
    faster = Runs()
    if not runs.partial:
        what = testbed.ablation(context, ablation__compute=testbed.FASTER)
        faster = run_systems(
            what,
            [system for system in SYSTEMS if system.label in (RECOMPUTE, XFS, HYMCACHE)],
            partial(testbed.pd_cluster, what, routing),
            fig10.workload_of(what),
            testbed.closed_loop(what),
            labels=f", {testbed.FASTER} x compute",
        )
        runs.partial |= faster.partial
    rows: list[Row] = [
        total_row(one, system=f"{label}, {testbed.FASTER} x compute")
        for label, one in faster.by_label.items()
    ]
    for label, one in runs.by_label.items():
        row = total_row(one, system=label)
        row["undelivered_share"] = undelivered(one)
        rows.append(row)
        rows += turn_rows(one, system=label)
    return Findings(
        rows=rows,
        claims=[] if runs.partial else _claims(context, runs, faster),
        plots=(
            by_turn_plot(
                runs,
                name="e2e",
                title=f"Mean end-to-end time, {routing}",
                value="e2e_mean_s",
                y_label="mean end-to-end time, s",
            ),
        ),
        checks=all_checks(runs),
        partial=runs.partial,
    )


def undelivered(run: Simulated) -> float:
    """Return the share of announced blocks that were not delivered in time."""
    found = sum(record.found for record in run.served)
    return 1 - sum(record.loaded for record in run.served) / found if found else 0.0


def _claims(context: Context, runs: Runs, faster: Runs) -> list[JudgedClaim]:
    xfs, raw, hurried = runs.by_label[XFS], runs.by_label[RAW], runs.by_label[HURRIED]
    measured = {
        "near-recomputation": speedup(runs, XFS, RECOMPUTE),
        "fetches-time-out": undelivered(xfs) * 100,
        "hymcache-faster": speedup(runs, HYMCACHE, XFS),
    }
    late = _slowest_read_s(xfs)
    busy = f"prefill GPUs of XFS compute {max(xfs.gpu_busy.values()):.0%} of the time"
    fast = f"with {testbed.FASTER} x compute (quick form)"
    reasons = {
        "near-recomputation": f"hit rates: XFS {xfs.hit_rate:.0%}, without it "
        f"{raw.hit_rate:.0%}; {busy}; {fast} {speedup(faster, XFS, RECOMPUTE) or 0:.2f} x",
        "fetches-time-out": f"the slowest request read its KV in {late:.2f} s; with a timeout of "
        f"1 s {undelivered(hurried):.0%} of the announced blocks come too late, and the hit rate "
        f"is {hurried.hit_rate:.0%}",
        "hymcache-faster": f"{busy}; {fast} {speedup(faster, HYMCACHE, XFS) or 0:.2f} x",
    }
    at = f"concurrency {context.count('workload.concurrency')}, {context.choice('routing')}"
    return [
        claim.judge(measured[claim.name], reason=reasons[claim.name], at=at) for claim in CLAIMS
    ]


def _slowest_read_s(run: Simulated) -> float:
    return max((record.read_s for record in run.served), default=0.0)


EXPERIMENT = Experiment(
    name="fig11",
    title="The same SSDs behind NVMe-oF and a file system",
    source="HyMCache fig. 11",
    about=about_of(__doc__),
    knobs=tuple(
        k for k in fig10.EXPERIMENT.knobs if k.name != "shrink" and not k.name.endswith(".gib")
    ),
    profiles=(
        *testbed.SERVING_PROFILES,
        *testbed.HYMCACHE_PROFILES,
        "mooncake-store",
        "nvmeof-xfs",
    ),
    claims=CLAIMS,
    run=run,
    compares_tiers=True,
)
