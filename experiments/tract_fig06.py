"""TraCT fig. 6: throughput without a cache, over the load.

Set-up (§5, experiment 1): prompts of 6000 tokens that share nothing, 3 output tokens, at rising
loads. One A6000 prefills 6000 tokens in about 1.4 s, so it is full from about 0.7 requests/s on;
loads go beyond that. The paper finds TraCT on par with NIXL.

Left out: the variance of a real network.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import Runs, all_checks, total_row
from cxlbench.experiments.tract_fig05 import KNOBS, run_length
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Check, Context, Experiment, Findings, Plot, Row, about_of

TOKENS = 6000
QPS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
QUICK_QPS = (0.4, 1.2)
CLAIMS = (
    PaperClaim(
        name="on-par",
        statement="TraCT's throughput is that of NIXL, at the load where it differs most",
        source="TraCT fig. 6",
        expected=1.0,
        band=0.1,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Run both systems at every load."""
    loads = QUICK_QPS if context.quick else QPS
    found: dict[float, Runs] = {}
    for qps in loads:
        if context.stopping():
            break
        found[qps] = run_length(context, TOKENS, qps)
    rows: list[Row] = []
    checks: list[Check] = []
    series: dict[str, tuple[list[float | str], list[float]]] = {}
    ratios = {}
    for qps, runs in found.items():
        for label, one in runs.by_label.items():
            row = total_row(one, qps=qps, system=label)
            del row["turn"]
            rows.append(row)
            x, y = series.setdefault(label, ([], []))
            x.append(qps)
            y.append(one.requests_per_s)
        checks += all_checks(runs, f", {qps} requests/s")
        if not runs.partial:
            tract, nixl = runs.by_label[bed.TRACT], runs.by_label[bed.NIXL]
            ratios[qps] = tract.requests_per_s / nixl.requests_per_s
    partial = len(ratios) < len(loads)
    worst = max(ratios, key=lambda qps: abs(ratios[qps] - 1)) if ratios else None
    return Findings(
        rows=rows,
        claims=()
        if partial or worst is None
        else [
            CLAIMS[0].judge(
                ratios[worst],
                reason=", ".join(f"{ratio:.3f} x at {qps:g}/s" for qps, ratio in ratios.items()),
                at=f"{worst:g} requests/s",
            )
        ],
        plots=(
            Plot(
                name="throughput",
                title="Throughput at 6000 tokens, no cache",
                x_label="offered load, requests/s",
                y_label="served, requests/s",
                kind="line",
                series=series,
            ),
        ),
        checks=checks,
        partial=partial,
    )


EXPERIMENT = Experiment(
    name="tract_fig06",
    title="Throughput without a cache",
    source="TraCT fig. 6",
    about=about_of(__doc__),
    knobs=tuple(knob for knob in KNOBS if knob.name != "workload.qps"),
    profiles=tuple(name for name in bed.PROFILES if name != "lmcache-local"),
    claims=CLAIMS,
    run=run,
)
