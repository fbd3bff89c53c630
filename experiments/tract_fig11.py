"""TraCT fig. 11: how busy the GPUs are.

Set-up: that of fig. 7, at 3.0 requests/s. The paper finds lower use of the SMs, higher bandwidth
into the GPU (from PCIe), and lower power. Modelled are the share of the run in which a
GPU computes, which stands for SM use, and the bytes that tier and hand-over copy into GPUs over the
run. Power is not modelled: a roofline has no watts, and the claim is reported as not decided.

Left out: occupancy within a kernel, memory held, power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import Runs
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Plot, about_of
from cxlbench.harness.serve.run import Simulated
from cxlbench.kv.geometry import model_shape

CLAIMS = (
    PaperClaim(
        name="lower-sm-use-prefill",
        statement="TraCT's prefill GPU computes clearly less than LMCache's (read as: a tenth)",
        source="TraCT fig. 11",
        expected=0.9,
        sense=Sense.AT_MOST,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="lower-sm-use-decode",
        statement="and so does its decode GPU",
        source="TraCT fig. 11",
        expected=0.9,
        sense=Sense.AT_MOST,
        neutral=1.0,
        unit="x",
    ),
    PaperClaim(
        name="higher-receive-bandwidth",
        statement="TraCT's GPUs receive clearly more bytes/s than LMCache's (read as: a tenth)",
        source="TraCT fig. 11",
        expected=1.1,
        sense=Sense.AT_LEAST,
        neutral=1.0,
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
    return bed.load_findings(
        context,
        found,
        claims=() if partial else _claims(context, found, top),
        plots=() if partial else _plots(context, found, top),
    )


def _claims(
    context: Context, found: Mapping[tuple[str, float], Runs], top: float
) -> list[JudgedClaim]:
    measures: tuple[tuple[str, Callable[[Simulated], float], Callable[[float], str]], ...] = (
        ("lower-sm-use-prefill", lambda run: run.gpu_busy["prefill0"], lambda x: f"{x:.1%}"),
        ("lower-sm-use-decode", lambda run: run.gpu_busy["decode0"], lambda x: f"{x:.1%}"),
        (
            "higher-receive-bandwidth",
            lambda run: _received(context, run),
            lambda x: f"{x / 1e9:.2f} GB/s",
        ),
    )
    measured: dict[str, float | None] = {"lower-power": None}
    reasons = {"lower-power": "power is not modelled"}
    for name, value, written in measures:
        ratios, texts = [], []
        for which in bed.WORKLOADS:
            runs = found[which, top].by_label
            tract, lmcache = value(runs[bed.TRACT]), value(runs[bed.LMCACHE])
            texts.append(f"{which} {written(tract)} against {written(lmcache)}")
            if lmcache:
                ratios.append(tract / lmcache)
        measured[name] = sum(ratios) / len(ratios) if ratios else None
        reasons[name] = ", ".join(texts)
    at = f"{top:g} requests/s, mean of workloads {', '.join(bed.WORKLOADS)}"
    return [
        claim.judge(measured[claim.name], reason=reasons[claim.name], at=at) for claim in CLAIMS
    ]


def _plots(
    context: Context, found: Mapping[tuple[str, float], Runs], top: float
) -> tuple[Plot, ...]:
    labels = list(found[next(iter(bed.WORKLOADS)), top].by_label)
    workloads: list[float | str] = [f"workload {which}" for which in bed.WORKLOADS]
    received = {
        label: [_received(context, found[w, top].by_label[label]) / 1e9 for w in bed.WORKLOADS]
        for label in labels
    }
    return (
        *(
            Plot(
                name=f"gpu-busy-{role}",
                title=f"Share of the run in which the {role} GPU computes, {top:g} requests/s",
                x_label="",
                y_label="share",
                kind="bar",
                series={
                    label: (
                        workloads,
                        [
                            found[which, top].by_label[label].gpu_busy[f"{role}0"]
                            for which in bed.WORKLOADS
                        ],
                    )
                    for label in labels
                },
            )
            for role in ("prefill", "decode")
        ),
        Plot(
            name="received",
            title=f"Into both GPUs over PCIe, {top:g} requests/s",
            x_label="",
            y_label="GB/s",
            kind="bar",
            series={label: (workloads, values) for label, values in received.items()},
        ),
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
    about=about_of(__doc__),
    knobs=bed.LOAD_KNOBS,
    profiles=bed.PROFILES,
    claims=CLAIMS,
    run=run,
)
