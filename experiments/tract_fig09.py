"""TraCT fig. 9: time to the first token with prefix caches.

Set-up: that of fig. 7. The paper finds the mean TTFT down by up to 9.83 times and P99 by up to 6.2
times against LMCache. *Up to* is the best workload and load; a ratio far beyond the load that the
slower system can serve only says for how long the run went on, so each ratio names its load. The
ablation is that of fig. 7: a network that makes the paper's gain in throughput.

Left out: percentiles beyond P99, which so few requests do not have.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot, about_of

CLAIMS = (
    PaperClaim(
        name="mean-ttft",
        statement="The mean TTFT falls by up to 9.83 times against LMCache",
        source="TraCT fig. 9",
        expected=9.83,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="p99-ttft",
        statement="P99 TTFT falls by up to 6.2 times against LMCache",
        source="TraCT fig. 9",
        expected=6.2,
        neutral=1.0,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    mean: dict[tuple[str, float], float] = {}
    tail: dict[tuple[str, float], float] = {}
    for key, runs in found.items():
        if {bed.TRACT, bed.LMCACHE} <= runs.by_label.keys():
            tract, lmcache = runs.by_label[bed.TRACT], runs.by_label[bed.LMCACHE]
            mean[key] = lmcache.ttft.mean_s / tract.ttft.mean_s
            tail[key] = lmcache.ttft.p99_s / tract.ttft.p99_s
    claims = []
    slow = None if partial else bed.slow_network(context)
    for claim, ratios in zip(CLAIMS, (mean, tail), strict=True):
        if partial or not ratios:
            continue
        best = max(ratios, key=lambda key: ratios[key])
        at_top = {which: ratios[which, bed.TOP] for which in bed.WORKLOADS}
        parts = (
            f"at {bed.TOP:g} requests/s {bed.by_workload(at_top)}",
            bed.limits(found, *best),
            "" if slow is None else slow.says,
        )
        claims.append(
            claim.judge(
                ratios[best],
                reason="; ".join(part for part in parts if part),
                at=f"workload {best[0]}, {best[1]:g} requests/s",
            )
        )
    top = max(bed.loads_of(context))
    plots = [
        Plot(
            name=f"ttft-{which}",
            title=f"TTFT at {top:g} requests/s, workload {which}",
            x_label="TTFT, s",
            y_label="share of requests",
            kind="cdf",
            series={
                label: (sorted(record.ttft_s for record in run.served), [])
                for label, run in found[which, top].by_label.items()
            },
        )
        for which in bed.WORKLOADS
        if (which, top) in found
    ]
    return bed.load_findings(
        context,
        found,
        claims=claims,
        plots=plots,
    )


EXPERIMENT = Experiment(
    name="tract_fig09",
    title="Time to the first token with prefix caches",
    source="TraCT fig. 9",
    about=about_of(__doc__),
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
