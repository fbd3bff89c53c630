"""TraCT fig. 7: throughput with prefix caches, over the load.

Set-up (§5, experiment 2; ``tract_testbed.py``): workloads A, B and C at 0.5 to 3.0 requests/s on
NIXL without a cache, LMCache with 48 GB of host DRAM, and TraCT with 48 GB of shared memory. The
paper finds 1.6 times LMCache's peak throughput at 3.0 requests/s.

Throughput is that of the whole run, which ends with the last answer: beyond what a system can
serve it levels off.

Left out: the steady state of a run without an end.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import all_checks
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot

TOP = 3.0
CLAIMS = (
    PaperClaim(
        name="peak-throughput",
        statement="TraCT serves 1.6 times as much as LMCache at 3.0 requests/s (best workload)",
        source="TraCT fig. 7",
        expected=1.6,
        neutral=1.0,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    ratios = {}
    if not partial:
        for which in bed.WORKLOADS:
            runs = found[which, TOP].by_label
            ratios[which] = runs[bed.TRACT].requests_per_s / runs[bed.LMCACHE].requests_per_s
    best = max(ratios, key=lambda which: ratios[which]) if ratios else None
    plots = [
        Plot(
            name=f"throughput-{which}",
            title=f"Throughput, workload {which}",
            x_label="offered load, requests/s",
            y_label="served, requests/s",
            kind="line",
            series=bed.series_over_load(found, which, lambda run: run.requests_per_s),
        )
        for which in bed.WORKLOADS
    ]
    return Findings(
        rows=bed.load_rows(found),
        claims=()
        if best is None
        else [
            CLAIMS[0].judge(
                ratios[best], reason=bed.limits(found, best, TOP), at=f"workload {best}, 3.0/s"
            )
        ],
        plots=plots,
        checks=[c for key, runs in found.items() for c in all_checks(runs, f", {key}")],
        partial=partial,
    )


EXPERIMENT = Experiment(
    name="tract_fig07",
    title="Throughput with prefix caches",
    source="TraCT fig. 7",
    about=(__doc__ or "").partition("\n\n")[2].partition("\n\nLeft out")[0],
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
