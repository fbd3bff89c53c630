"""TraCT fig. 10: where a request's time goes, over the load.

Set-up: that of fig. 7. TTFT is broken down into schedule, lookup, KV read, compute and KV write;
beside it stands the time in which the decode server gets the prompt's KV, over the network or out
of the shared memory. The paper finds that this grows with the load for LMCache and NIXL and stays
level for TraCT. Growth is the highest load against the lowest.

Left out: the parts of decoding.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import all_checks
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot

GROWTH = 1.5
CLAIMS = (
    PaperClaim(
        name="lmcache-grows",
        statement="The decode side's KV read of LMCache grows with the load (over 1.5 times)",
        source="TraCT fig. 10",
        expected=GROWTH,
        sense=Sense.AT_LEAST,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="nixl-grows",
        statement="and that of NIXL",
        source="TraCT fig. 10",
        expected=GROWTH,
        sense=Sense.AT_LEAST,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="tract-level",
        statement="and that of TraCT stays level",
        source="TraCT fig. 10",
        expected=1.0,
        unit="x",
    ),
)
PARTS = ("schedule", "lookup", "KV read", "compute", "KV write")


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    loads = bed.loads_of(context)
    claims = []
    if not partial:
        for claim, label in zip(CLAIMS, (bed.LMCACHE, bed.NIXL, bed.TRACT), strict=True):
            low = bed.decode_read_s(found["A", loads[0]].by_label[label])
            high = bed.decode_read_s(found["A", loads[-1]].by_label[label])
            claims.append(
                claim.judge(
                    high / low if low else None,
                    reason=f"{low * 1e3:.0f} ms at {loads[0]:g}, {high * 1e3:.0f} ms at "
                    f"{loads[-1]:g} requests/s",
                    at="workload A",
                )
            )
    plots = [
        Plot(
            name="decode-read-A",
            title="KV into the decode server, workload A",
            x_label="offered load, requests/s",
            y_label="mean, s",
            kind="line",
            series=bed.series_over_load(found, "A", bed.decode_read_s),
        )
    ]
    plots += [
        Plot(
            name=f"parts-A-{load:g}",
            title=f"TTFT broken down, workload A, {load:g} requests/s",
            x_label="",
            y_label="mean, s",
            kind="bar",
            series={
                label: (list(PARTS), [run.parts_s[part] for part in PARTS])
                for label, run in found["A", load].by_label.items()
            },
        )
        for load in (loads[0], loads[-1])
        if ("A", load) in found
    ]
    return Findings(
        rows=bed.load_rows(found),
        claims=claims,
        plots=plots,
        checks=[c for key, runs in found.items() for c in all_checks(runs, f", {key}")],
        partial=partial,
    )


EXPERIMENT = Experiment(
    name="tract_fig10",
    title="Where a request's time goes",
    source="TraCT fig. 10",
    about=(__doc__ or "").partition("\n\n")[2].partition("\n\nLeft out")[0],
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
