"""TraCT fig. 8: hit rates of the prefix caches.

Set-up: that of fig. 7. The paper finds TraCT's hit rate equal to LMCache's or slightly under it,
with caches of the same size. A hit is a block that was not computed again, of those that had been
computed before; the GPU's own prefix cache counts in both systems. NIXL has no cache and is not
drawn.

Left out: hits by time.
"""

from __future__ import annotations

from cxlbench.devices.profile import LocalCacheProfile
from cxlbench.experiments import tract_testbed as bed
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot, about_of
from cxlbench.harness.serve.run import Simulated

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
    ratios: list[float] = []
    rates: dict[str, list[str]] = {}
    for (which, qps), runs in found.items():
        if {bed.TRACT, bed.LMCACHE} <= runs.by_label.keys():
            tract, base = (runs.by_label[label].hit_rate for label in (bed.TRACT, bed.LMCACHE))
            if base:
                ratios.append(tract / base)
            rates.setdefault(which, []).append(f"{tract:.1%} against {base:.1%} at {qps:g}/s")
    measured = sum(ratios) / len(ratios) if ratios and not partial else None
    chunk = context.profile(LocalCacheProfile, "lmcache-local").chunk_tokens
    reason = "; ".join(f"{which}: {', '.join(texts)}" for which, texts in rates.items())
    reason += f"; LMCache keeps whole chunks of {chunk} tokens"
    loads = bed.loads_of(context)
    at = f"mean of workloads {', '.join(bed.WORKLOADS)} at {loads[0]:g}-{loads[-1]:g} requests/s"
    plots = [
        Plot(
            name=f"hit-rate-{which}",
            title=f"Blocks not computed again, workload {which}",
            x_label="offered load, requests/s",
            y_label="hit rate",
            kind="line",
            series={
                label: line
                for label, line in bed.series_over_load(found, which, _hit_rate).items()
                if label != bed.NIXL
            },
        )
        for which in bed.WORKLOADS
    ]
    return bed.load_findings(
        context,
        found,
        claims=() if partial else [CLAIMS[0].judge(measured, reason=reason, at=at)],
        plots=plots,
    )


def _hit_rate(run: Simulated) -> float:
    return run.hit_rate


EXPERIMENT = Experiment(
    name="tract_fig08",
    title="Hit rates of the prefix caches",
    source="TraCT fig. 8",
    about=about_of(__doc__),
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
