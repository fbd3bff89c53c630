"""TraCT's testbed, its systems and its loads, shared by its figures.

§5: two servers with an A6000 of 48 GB each, one for prefill and one for all the rest; a Niagara 2.0
(640 ns, 10.1 GB/s) with 64 GB shared; a 100 Gb/s NIC; DeepSeek-R1-Distill-Llama-8B. Baselines:
NIXL/UCX without a cache, and LMCache with 48 GB of host DRAM and NIXL between prefill and decode.
TraCT's prefix cache has the same size as LMCache's, and hands KV over through the shared memory.

Workloads A, B, C have inputs of 4449 and outputs of 215 tokens in the mean and differ in the unique
length; neither those lengths nor the number of shared prefixes are in the text we have, nor the
block size, nor how NIXL's bytes go through the hosts: all are assumptions and are swept. There are
so many shared prefixes that the GPU's own cache (26 GiB) does not hold them beside the unique
blocks of workloads A to C, since otherwise no system would ever ask its tier.

The first requests of a run find empty caches. Figures are those of the requests behind a warm-up
share, over the time from the first arrival to the last answer among them; shares of GPUs and pipes
are of the whole run.

Units: tokens, requests/s, bytes at full size, s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cxlbench.devices.profile import CopyEngineProfile, LinkProfile
from cxlbench.experiments.serving import Runs, System, all_checks, run_systems, total_row
from cxlbench.experiments.testbed import COMPUTE, GIB, ablation, roofline
from cxlbench.harness.claims import JudgedClaim
from cxlbench.harness.experiment import Check, Context, Findings, Knob, Plot, Row
from cxlbench.harness.metrics import Spread
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec, Path
from cxlbench.harness.serve.roofline import StepWork
from cxlbench.harness.serve.run import Simulated
from cxlbench.harness.shared_prefixes import SharedPrefixKnobs, generate_shared_prefixes

NIXL, LMCACHE, TRACT = "NIXL", "LMCache", "TraCT"
PROFILES = (
    "a6000",
    "vllm-default",
    "gpu-copy-gen4x16",
    "nic-100g",
    "niagara-2.0",
    "lmcache-local",
)
MODEL = Knob(name="model", value="DeepSeek-R1-Distill-Llama-8B", source="TraCT §5")
BLOCK_TOKENS = Knob(
    name="engine.block_tokens",
    value=128,
    unit="tokens",
    assumption=True,
    choices=("64", "128", "256"),
    source="not in the text we have; as HyMCache's",
)
PATH = Knob(
    name="handover.path",
    value="host-overlapped",
    choices=tuple(path.value for path in Path),
    assumption=True,
    source="TraCT says that every transfer passes both hosts' memories and NICs, not whether the "
    "copies overlap",
)
LAYERWISE = Knob(
    name="handover.layerwise",
    value=False,
    assumption=True,
    source="not stated; after prefill, as Dynamo 0.5 with vLLM does by default",
)
CACHE = Knob(
    name="cache.gib",
    value=48,
    unit="GiB",
    source="TraCT §5: LMCache with 48 GB of DRAM, TraCT's cache of the same size",
)
QPS = (0.5, 1.0, 2.0, 3.0)
QUICK_QPS = (1.0, 3.0)
TOP = 3.0
"""The highest load, at which the paper has its peak throughput."""
PEAK_GAIN = 1.6
"""TraCT's throughput over LMCache's there, by the paper."""
LOAD_KNOBS = (
    MODEL,
    BLOCK_TOKENS,
    PATH,
    LAYERWISE,
    CACHE,
    COMPUTE,
    Knob(
        name="workload.requests",
        value=640,
        quick=80,
        source="at each load; not stated",
        assumption=True,
    ),
    Knob(name="workload.input_tokens", value=4449, unit="tokens", source="TraCT §5"),
    Knob(name="workload.output_tokens", value=215, unit="tokens", source="TraCT §5"),
    Knob(
        name="workload.spread",
        value=0.2,
        assumption=True,
        source="not stated; standard deviation over the mean",
    ),
    Knob(
        name="workload.unique_a",
        value=600,
        unit="tokens",
        assumption=True,
        source="not in the text we have; workload A has the shortest unique part here",
    ),
    Knob(
        name="workload.unique_b",
        value=1500,
        unit="tokens",
        assumption=True,
        source="not in the text we have",
    ),
    Knob(
        name="workload.unique_c",
        value=2700,
        unit="tokens",
        assumption=True,
        source="not in the text we have; workload C has the longest unique part here",
    ),
    Knob(
        name="workload.groups",
        value=64,
        quick=8,
        assumption=True,
        source="shared prefixes; not stated; those of workload A are 30 GiB of 16 MiB blocks: more "
        "than a GPU keeps, less than the caches of 48 GB",
    ),
    Knob(
        name="workload.warm_up_share",
        value=0.25,
        assumption=True,
        low=0.0,
        high=0.5,
        source="not stated; the first requests, which find empty caches, are left out of figures",
    ),
)
WORKLOADS = {"A": "workload.unique_a", "B": "workload.unique_b", "C": "workload.unique_c"}


def systems(context: Context) -> tuple[System, ...]:
    """Return the three systems."""
    cache = context.count(CACHE.name) * GIB
    return (
        System(label=NIXL, tier="nixl"),
        System(label=LMCACHE, tier="lmcache-local", options={"capacity_bytes": cache}),
        System(label=TRACT, tier="tract", options={"capacity_bytes": cache}),
    )


def cluster_of(context: Context, system: System, prefix_caching: bool) -> ClusterSpec:
    """Return the two servers; TraCT hands over through its shared memory."""
    model = roofline(context, gpu="a6000")
    link = context.profile(LinkProfile, "nic-100g")
    network = LinkHandoverSpec(
        prefill_link=link,
        decode_link=link,
        copy_engine=context.profile(CopyEngineProfile, "gpu-copy-gen4x16"),
        path=Path(context.choice(PATH.name)),
        layerwise=bool(context.knob(LAYERWISE.name)),
        layers=model.shape.layers,
    )
    return ClusterSpec(
        roofline=model,
        block_tokens=context.count(BLOCK_TOKENS.name),
        prefill_servers=1,
        decode_servers=1,
        handover=None if system.tier == "tract" else network,
        prefix_caching=prefix_caching,
    )


def workload_of(context: Context, which: str, qps: float) -> Workload:
    """Return workload A, B or C at a load."""
    unique = context.number(WORKLOADS[which])
    outputs = context.number("workload.output_tokens")
    spread = context.number("workload.spread")
    return generate_shared_prefixes(
        SharedPrefixKnobs(
            requests=context.count("workload.requests"),
            rate_per_s=qps,
            input_tokens=context.number("workload.input_tokens"),
            input_stddev=unique * spread,
            unique_tokens=unique,
            output_tokens=outputs,
            output_stddev=outputs * spread,
            groups=context.count("workload.groups"),
            block_tokens=context.count(BLOCK_TOKENS.name),
            seed=context.seed,
        ),
        name=f"workload-{which}",
    )


def run_each(context: Context, which: Sequence[System], workload: Workload, *, labels: str) -> Runs:
    """Run systems on one workload at its arrival times, each on its own cluster."""
    runs = Runs()
    for system in which:
        one = run_systems(
            context,
            (system,),
            partial(cluster_of, context, system),
            workload,
            Drive(order=Order.OPEN),
            labels=labels,
        )
        runs.by_label |= one.by_label
        runs.partial |= one.partial
        if context.stopping():
            runs.partial = True
            break
    return runs


def loads_of(context: Context) -> tuple[float, ...]:
    """Return the loads of a sweep, requests/s."""
    return QUICK_QPS if context.quick else QPS


def all_loads(context: Context) -> Mapping[tuple[str, float], Runs]:
    """Return the runs of all workloads, loads and systems; shared by figs. 7 to 11."""
    key = ("tract loads", *context.point(), tuple(sorted(context.setup().items())))
    known = context.memo.get(key)
    if isinstance(known, dict):
        return known
    found: dict[tuple[str, float], Runs] = {}
    for which in WORKLOADS:
        for qps in loads_of(context):
            if context.stopping():
                return found
            found[which, qps] = _loaded(context, systems(context), which, qps)
    context.memo[key] = found
    return found


def _loaded(context: Context, chosen: Sequence[System], which: str, qps: float) -> Runs:
    """Run systems at one load; figures are those behind the warm-up."""
    runs = run_each(
        context,
        chosen,
        workload_of(context, which, qps),
        labels=f", workload {which}, {qps:g} requests/s",
    )
    share = context.number("workload.warm_up_share")
    for label, run in runs.by_label.items():
        runs.by_label[label] = after_warm_up(run, share)
    return runs


def after_warm_up(run: Simulated, share: float) -> Simulated:
    """Return a run with the figures of its later arrivals; at least one is kept."""
    by_arrival = sorted(run.served, key=lambda record: (record.arrival_s, record.request_id))
    kept = by_arrival[min(int(len(by_arrival) * share), len(by_arrival) - 1) :]
    if not kept:
        return run
    return replace(
        run,
        served=tuple(kept),
        duration_s=max(record.end_s for record in kept) - kept[0].arrival_s,
        ttft=Spread.of([record.ttft_s for record in kept]),
        e2e=Spread.of([record.e2e_s for record in kept]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNetwork:
    """What becomes of LMCache when its hand-over is made the bottleneck (quick form)."""

    bytes_per_s: float
    """Of the network: what TraCT's throughput over ``PEAK_GAIN`` would need."""
    throughput_ratio: float
    mean_ttft_ratio: float
    p99_ttft_ratio: float

    @property
    def says(self) -> str:
        """Say it, in a claim's reason."""
        return (
            f"were LMCache's network {self.bytes_per_s / 1e9:.2f} GB/s (workload A, {TOP:g} "
            f"requests/s, quick form), TraCT would serve {self.throughput_ratio:.2f} x as much, "
            f"mean TTFT {self.mean_ttft_ratio:.1f} x and P99 {self.p99_ttft_ratio:.1f} x lower"
        )


def slow_network(context: Context) -> SlowNetwork | None:
    """Ask which network would make the paper's gain; None if it was cut short."""
    key = ("tract slow network", *context.point(), tuple(sorted(context.setup().items())))
    known = context.memo.get(key)
    if isinstance(known, SlowNetwork):
        return known
    what = ablation(context)
    of_it = {system.label: system for system in systems(what)}
    runs = _loaded(what, (of_it[TRACT],), "A", TOP)
    if runs.partial:
        return None
    tract = runs.by_label[TRACT]
    prompt = what.number("workload.input_tokens") * kv_bytes_per_token(what)
    bandwidth = tract.requests_per_s / PEAK_GAIN * prompt
    slow = ablation(what, **{"nic-100g__bandwidth": f"{bandwidth / 1e9:.4g} GB/s"})
    runs = _loaded(slow, (of_it[LMCACHE],), "A", TOP)
    if runs.partial:
        return None
    lmcache = runs.by_label[LMCACHE]
    found = SlowNetwork(
        bytes_per_s=bandwidth,
        throughput_ratio=tract.requests_per_s / lmcache.requests_per_s,
        mean_ttft_ratio=lmcache.ttft.mean_s / tract.ttft.mean_s,
        p99_ttft_ratio=lmcache.ttft.p99_s / tract.ttft.p99_s,
    )
    context.memo[key] = found
    return found


def kv_bytes_per_token(context: Context) -> int:
    """Return the KV bytes of a token."""
    return roofline(context, gpu="a6000").shape.kv_bytes_per_token()


def load_rows(found: Mapping[tuple[str, float], Runs]) -> list[Row]:
    """Return a row for every run."""
    rows: list[Row] = []
    for (which, qps), runs in found.items():
        for label, run in runs.by_label.items():
            row = total_row(run, workload=which, qps=qps, system=label)
            del row["turn"]
            row["decode_read_mean_s"] = decode_read_s(run)
            rows.append(row)
    return rows


def is_partial(context: Context, found: Mapping[tuple[str, float], Runs]) -> bool:
    """Return whether runs are missing, or were cut short."""
    complete = len(found) == len(WORKLOADS) * len(loads_of(context))
    return not complete or any(runs.partial for runs in found.values())


def series_over_load(
    found: Mapping[tuple[str, float], Runs], which: str, value: Callable[[Simulated], float]
) -> dict[str, tuple[list[float | str], list[float]]]:
    """Return one workload's values over the load, by system."""
    series: dict[str, tuple[list[float | str], list[float]]] = {}
    for (workload, qps), runs in found.items():
        if workload != which:
            continue
        for label, run in runs.by_label.items():
            x, y = series.setdefault(label, ([], []))
            x.append(qps)
            y.append(value(run))
    return series


def decode_read_s(run: Simulated) -> float:
    """Return the mean time in which the decode server got a prompt's KV, s."""
    return sum(record.decode_read_s for record in run.served) / max(len(run.served), 1)


def load_checks(found: Mapping[tuple[str, float], Runs]) -> list[Check]:
    """Return the laws of all runs."""
    return [
        check
        for (which, qps), runs in found.items()
        for check in all_checks(runs, f", workload {which}, {qps:g} requests/s")
    ]


def load_findings(
    context: Context,
    found: Mapping[tuple[str, float], Runs],
    claims: Sequence[JudgedClaim],
    plots: Sequence[Plot],
) -> Findings:
    """Return what one figure makes of the runs that all five share."""
    return Findings(
        rows=load_rows(found),
        claims=claims,
        plots=plots,
        checks=load_checks(found),
        partial=is_partial(context, found),
    )


def by_workload(values: Mapping[str, float], unit: str = "x") -> str:
    """Write one number for each workload."""
    return ", ".join(f"{which} {value:.3g} {unit}" for which, value in values.items())


def decode_limit(context: Context) -> str:
    """Say what the decode server can serve at most, when its GPU is full of prompts."""
    model = roofline(context, gpu="a6000")
    tokens = context.count(BLOCK_TOKENS.name)
    prompt, answer = (context.number(f"workload.{part}_tokens") for part in ("input", "output"))
    pool = model.kv_space_bytes() // model.shape.block_bytes(tokens)
    at_once = int(pool // math.ceil((prompt + answer) / tokens))
    work = StepWork()
    for _ in range(at_once):
        work.add_chunk(1, round(prompt + answer / 2))
    step_s = model.step_s(work)
    return (
        f"a decode GPU has room for {at_once} prompts and then gives each a token every "
        f"{step_s * 1e3:.0f} ms, so none serves over {at_once / (answer * step_s):.2f} requests/s"
    )


def limits(found: Mapping[tuple[str, float], Runs], which: str, qps: float) -> str:
    """Return what kept TraCT and LMCache busy at a load: GPUs first, then the busiest pipe."""
    parts = []
    for label, run in found[which, qps].by_label.items():
        if label == NIXL:
            continue
        pipe = max(run.pipe_busy, key=lambda name: run.pipe_busy[name], default=None)
        moving = f", {pipe} {run.pipe_busy[pipe]:.0%}" if pipe is not None else ""
        parts.append(
            f"{label}: prefill GPU {run.gpu_busy['prefill0']:.0%}, decode GPU "
            f"{run.gpu_busy['decode0']:.0%}{moving}"
        )
    return f"busy, workload {which}: " + "; ".join(parts)
