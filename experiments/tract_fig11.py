"""TraCT fig. 11: how busy the GPUs are.

Set-up: that of fig. 7, workload A at 3.0 requests/s. The paper finds lower use of the SMs, higher
bandwidth into the GPU (from PCIe), and lower power. Modelled are the share of the run in which a
GPU computes, which stands for SM use, and the bytes that tier and hand-over copy into GPUs over the
run. Power is not modelled: a roofline has no watts, and the claim is reported as not decided.

Left out: occupancy within a kernel, memory held, power.
"""

from __future__ import annotations

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import all_checks
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot
from cxlbench.harness.serve.run import Simulated
from cxlbench.kv.geometry import model_shape

CLAIMS = (
    PaperClaim(
        name="lower-sm-use",
        statement="TraCT's prefill GPU computes less than LMCache's",
        source="TraCT fig. 11",
        expected=1.0,
        sense=Sense.AT_MOST,
        unit="x",
    ),
    PaperClaim(
        name="higher-receive-bandwidth",
        statement="TraCT's GPUs receive more bytes/s than LMCache's",
        source="TraCT fig. 11",
        expected=1.0,
        sense=Sense.AT_LEAST,
        unit="x",
    ),
    PaperClaim(
        name="lower-power",
        statement="TraCT's GPUs draw less power than LMCache's",
        source="TraCT fig. 11",
        sense=Sense.TRUE,
    ),
)


def run(context: Context) -> Findings:
    """Run, or take what another figure of this session ran."""
    found = bed.all_loads(context)
    partial = bed.is_partial(context, found)
    top = max(bed.loads_of(context))
    claims = []
    plots = []
    if not partial:
        runs = found["A", top].by_label
        busy = {label: run.gpu_busy["prefill0"] for label, run in runs.items()}
        received = {label: _received(context, run) for label, run in runs.items()}
        ratios = (
            busy[bed.TRACT] / busy[bed.LMCACHE],
            received[bed.TRACT] / received[bed.LMCACHE] if received[bed.LMCACHE] else None,
            None,
        )
        reasons = (
            f"busy {busy[bed.TRACT]:.0%} against {busy[bed.LMCACHE]:.0%} of runs of "
            f"{runs[bed.TRACT].duration_s:.0f} s and {runs[bed.LMCACHE].duration_s:.0f} s",
            f"{received[bed.TRACT] / 1e9:.2f} against {received[bed.LMCACHE] / 1e9:.2f} GB/s",
            "power is not modelled",
        )
        at = f"workload A, {top:g} requests/s"
        claims = [
            claim.judge(ratio, reason=reason, at=at)
            for claim, ratio, reason in zip(CLAIMS, ratios, reasons, strict=True)
        ]
        servers = ("prefill0", "decode0")
        plots.append(
            Plot(
                name="gpu-busy",
                title=f"Share of the run in which a GPU computes, {at}",
                x_label="",
                y_label="share",
                kind="bar",
                series={
                    label: (list(servers), [run.gpu_busy[server] for server in servers])
                    for label, run in runs.items()
                },
            )
        )
    return Findings(
        rows=bed.load_rows(found),
        claims=claims,
        plots=plots,
        checks=[c for key, runs in found.items() for c in all_checks(runs, f", {key}")],
        partial=partial,
    )


def _received(context: Context, run: Simulated) -> float:
    """Return the bytes/s that came into both GPUs: tier hits, and every prompt handed over."""
    shape = model_shape(context.choice("model"))
    block = shape.block_bytes(context.count("engine.block_tokens"))
    hits = sum(record.loaded for record in run.served) * block
    handed = sum(
        record.decode_loaded * block
        if record.decode_loaded
        else record.input_tokens * shape.kv_bytes_per_token()
        for record in run.served
    )
    return (hits + handed) / run.duration_s if run.duration_s else 0.0


EXPERIMENT = Experiment(
    name="tract_fig11",
    title="How busy the GPUs are",
    source="TraCT fig. 11",
    about=(__doc__ or "").partition("\n\n")[2].partition("\n\nLeft out")[0],
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
