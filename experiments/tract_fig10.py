"""TraCT fig. 10: where a request's time goes, over the load.

Set-up: that of fig. 7. TTFT is broken down into schedule, lookup, KV read, compute and KV write;
beside it stands the time in which the decode server gets the prompt's KV, over the network or out
of the shared memory. The paper finds that this grows with the load for LMCache and NIXL and stays
level for TraCT. Growth is the highest load against the lowest, in the mean of the workloads.

Left out: the parts of decoding.
"""

from __future__ import annotations

from cxlbench.devices.profile import LinkProfile, SharedType3Profile
from cxlbench.experiments import tract_testbed as bed
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot, about_of
from cxlbench.harness.serve.run import Simulated

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
PARTS = ("schedule", "lookup, KV read", "compute", "KV write")
"""What a bar stands for: parts of TTFT; the look-up is too short for a bar of its own."""


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    loads = bed.loads_of(context)
    claims = []
    if not partial:
        for claim, label in zip(CLAIMS, (bed.LMCACHE, bed.NIXL, bed.TRACT), strict=True):
            growth, texts = [], []
            for which in bed.WORKLOADS:
                low = bed.decode_read_s(found[which, loads[0]].by_label[label])
                high = bed.decode_read_s(found[which, loads[-1]].by_label[label])
                texts.append(f"{which} {low * 1e3:.0f} to {high * 1e3:.0f} ms")
                if low:
                    growth.append(high / low)
            claims.append(
                claim.judge(
                    sum(growth) / len(growth) if growth else None,
                    reason=f"{', '.join(texts)}; a mean prompt alone takes "
                    f"{_alone_s(context, label) * 1e3:.0f} ms, so the rest is waiting for others",
                    at=f"{loads[-1]:g} against {loads[0]:g} requests/s, workloads "
                    f"{', '.join(bed.WORKLOADS)}",
                )
            )
    plots = [
        Plot(
            name=f"decode-read-{which}",
            title=f"KV into the decode server, workload {which}",
            x_label="offered load, requests/s",
            y_label="mean, s",
            kind="line",
            series=bed.series_over_load(found, which, bed.decode_read_s),
        )
        for which in bed.WORKLOADS
    ]
    plots += [
        Plot(
            name=f"parts-{which}-{load:g}",
            title=f"TTFT broken down, workload {which}, {load:g} requests/s",
            x_label="",
            y_label="mean, ms",
            kind="bar",
            series={
                label: (list(PARTS), [_part_ms(run, part) for part in PARTS])
                for label, run in found[which, load].by_label.items()
            },
        )
        for which in bed.WORKLOADS
        for load in (loads[0], loads[-1])
        if (which, load) in found
    ]
    return bed.load_findings(
        context,
        found,
        claims=claims,
        plots=plots,
    )


def _part_ms(run: Simulated, part: str) -> float:
    return sum(run.parts_s[name] for name in part.split(", ")) * 1e3


def _alone_s(context: Context, label: str) -> float:
    """Return how long a mean prompt's KV takes into the decode server with nothing in its way."""
    nbytes = context.number("workload.input_tokens") * bed.kv_bytes_per_token(context)
    if label == bed.TRACT:
        return nbytes / context.profile(SharedType3Profile, "niagara-2.0").bandwidth
    return nbytes / context.profile(LinkProfile, "nic-100g").bandwidth


EXPERIMENT = Experiment(
    name="tract_fig10",
    title="Where a request's time goes",
    source="TraCT fig. 10",
    about=about_of(__doc__),
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
