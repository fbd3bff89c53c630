"""TraCT's testbed, its systems and its loads, shared by its figures.

§5: two servers with an A6000 of 48 GB each, one for prefill and one for all the rest; a Niagara 2.0
(640 ns, 10.1 GB/s) with 64 GB shared; a 100 Gb/s NIC; DeepSeek-R1-Distill-Llama-8B. Baselines:
NIXL/UCX without a cache, and LMCache with 48 GB of host DRAM and NIXL between prefill and decode.
TraCT's prefix cache has the same size as LMCache's, and hands KV over through the shared memory.

Workloads A, B, C have inputs of 4449 and outputs of 215 tokens in the mean and differ in the unique
length; neither those lengths nor the number of shared prefixes are in the text we have, nor the
block size, nor how NIXL's bytes go through the hosts: all are assumptions and are swept.

Units: tokens, requests/s, bytes at full size, s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cxlbench.devices.profile import CopyEngineProfile, LinkProfile
from cxlbench.experiments.serving import Runs, System, run_systems, total_row
from cxlbench.experiments.testbed import COMPUTE, GIB, roofline
from cxlbench.harness.experiment import Context, Knob, Row
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec, Path
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
    "software-default",
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
LOAD_KNOBS = (
    MODEL,
    BLOCK_TOKENS,
    PATH,
    LAYERWISE,
    CACHE,
    COMPUTE,
    Knob(
        name="workload.requests",
        value=360,
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
        value=32,
        quick=8,
        assumption=True,
        source="shared prefixes; not stated; those of workload A fill a third of the cache",
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
            found[which, qps] = run_each(
                context,
                systems(context),
                workload_of(context, which, qps),
                labels=f", workload {which}, {qps} requests/s",
            )
    context.memo[key] = found
    return found


def load_rows(found: Mapping[tuple[str, float], Runs]) -> list[Row]:
    """Return a row for every run."""
    rows: list[Row] = []
    for (which, qps), runs in found.items():
        for label, run in runs.by_label.items():
            row = total_row(run, workload=which, qps=qps, system=label)
            del row["turn"]
            row["decode_read_mean_s"] = sum(r.decode_read_s for r in run.served) / max(
                len(run.served), 1
            )
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


def limits(found: Mapping[tuple[str, float], Runs], which: str, qps: float) -> str:
    """Return what kept the systems busy at a load: GPUs first, then the busiest pipe."""
    parts = []
    for label, run in found[which, qps].by_label.items():
        pipe = max(run.pipe_busy, key=lambda name: run.pipe_busy[name], default=None)
        moving = f", {pipe} {run.pipe_busy[pipe]:.0%}" if pipe is not None else ""
        parts.append(
            f"{label}: prefill GPU {run.gpu_busy['prefill0']:.0%}, decode GPU "
            f"{run.gpu_busy['decode0']:.0%}{moving}"
        )
    return "busy: " + "; ".join(parts)
