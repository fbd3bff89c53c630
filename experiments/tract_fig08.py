"""TraCT fig. 8: hit rates of the prefix caches.

Set-up: that of fig. 7. The paper finds TraCT's hit rate equal to LMCache's or slightly under it,
with caches of the same size. A hit is a block that was not computed again, of those that had been
computed before; the GPU's own prefix cache counts in both systems.

Left out: hits by time.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import all_checks
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot

CLAIMS = (
    PaperClaim(
        name="equal-or-slightly-under",
        statement="TraCT's hit rate over LMCache's, mean of all loads",
        source="TraCT fig. 8",
        expected=1.0,
        band=0.1,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    ratios = []
    for runs in found.values():
        if {bed.TRACT, bed.LMCACHE} <= runs.by_label.keys():
            base = runs.by_label[bed.LMCACHE].hit_rate
            if base:
                ratios.append(runs.by_label[bed.TRACT].hit_rate / base)
    measured = sum(ratios) / len(ratios) if ratios and not partial else None
    plots = [
        Plot(
            name=f"hit-rate-{which}",
            title=f"Blocks not computed again, workload {which}",
            x_label="offered load, requests/s",
            y_label="hit rate",
            kind="line",
            series=bed.series_over_load(found, which, lambda run: run.hit_rate),
        )
        for which in bed.WORKLOADS
    ]
    return Findings(
        rows=bed.load_rows(found),
        claims=() if partial else [CLAIMS[0].judge(measured, at="0.5-3.0 requests/s")],
        plots=plots,
        checks=[c for key, runs in found.items() for c in all_checks(runs, f", {key}")],
        partial=partial,
    )


EXPERIMENT = Experiment(
    name="tract_fig08",
    title="Hit rates of the prefix caches",
    source="TraCT fig. 8",
    about=(__doc__ or "").partition("\n\n")[2].partition("\n\nLeft out")[0],
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
