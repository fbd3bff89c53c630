"""TraCT fig. 7: throughput with prefix caches, over the load.

Set-up (§5, experiment 2; ``tract_testbed.py``): workloads A, B and C at 0.5 to 3.0 requests/s on
NIXL without a cache, LMCache with 48 GB of host DRAM, and TraCT with 48 GB of shared memory. The
paper finds 1.6 times LMCache's peak throughput at 3.0 requests/s.

Throughput is that of the requests behind the warm-up, to the last answer: beyond what a system can
serve it levels off. The ablation asks what network would give TraCT the paper's gain over LMCache.

Left out: the steady state of a run without an end.
"""

from __future__ import annotations

from collections.abc import Mapping

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import Runs
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot, about_of

CLAIMS = (
    PaperClaim(
        name="peak-throughput",
        statement="TraCT serves 1.6 times as much as LMCache at 3.0 requests/s (best workload)",
        source="TraCT fig. 7",
        expected=bed.PEAK_GAIN,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="highest-at-every-load",
        statement="TraCT serves the most at every load and workload (least ratio to the others)",
        source="TraCT fig. 7",
        expected=1.0,
        sense=Sense.AT_LEAST,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
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
    return bed.load_findings(
        context,
        found,
        claims=() if partial else _claims(context, found),
        plots=plots,
    )


def _claims(context: Context, found: Mapping[tuple[str, float], Runs]) -> list[JudgedClaim]:
    ratios: dict[str, float] = {}
    least: dict[tuple[str, float], float] = {}
    for key, runs in found.items():
        served = {label: run.requests_per_s for label, run in runs.by_label.items()}
        tract = served.pop(bed.TRACT)
        least[key] = tract / max(served.values())
        if key[1] == bed.TOP:
            ratios[key[0]] = tract / served[bed.LMCACHE]
    best = max(ratios, key=lambda which: ratios[which])
    worst = min(least, key=lambda key: least[key])
    slow = bed.slow_network(context)
    parts = (
        f"at {bed.TOP:g} requests/s {bed.by_workload(ratios)}",
        bed.limits(found, best, bed.TOP),
        bed.decode_limit(context),
        "" if slow is None else slow.says,
    )
    peak, highest = CLAIMS
    return [
        peak.judge(
            ratios[best],
            reason="; ".join(part for part in parts if part),
            at=f"workload {best}, {bed.TOP:g} requests/s",
        ),
        highest.judge(
            least[worst],
            reason=f"between {min(least.values()):.3f} and {max(least.values()):.3f} x the better "
            "of the others",
            at=f"workload {worst[0]}, {worst[1]:g} requests/s",
        ),
    ]


EXPERIMENT = Experiment(
    name="tract_fig07",
    title="Throughput with prefix caches",
    source="TraCT fig. 7",
    about=about_of(__doc__),
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
