"""What the tests of the serving engine share: an 8B model on an A100, small clusters, and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CopyEngineProfile,
    LinkProfile,
    ServingEngineProfile,
    load_as,
)
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.tiers.catalog import tier
from cxlbench.kv.geometry import model_shape

BLOCK = 128
SHAPE = model_shape("Llama-3.1-8B")
GPU = load_as(AcceleratorProfile, "a100-80g")
VLLM = load_as(ServingEngineProfile, "vllm-default")
NIC_100 = load_as(LinkProfile, "nic-100g")
NIC_200 = load_as(LinkProfile, "nic-200g")
COPY = load_as(CopyEngineProfile, "gpu-copy-gen4x16")
BLOCK_BYTES = SHAPE.block_bytes(BLOCK)
OPEN = Drive(order=Order.OPEN)


def roofline(*, budget: int | None = None, overhead_s: float | None = None) -> Roofline:
    """Return the 8B model on an A100; with another token budget or fixed share of a step."""
    engine = VLLM
    if budget is not None:
        engine = replace(engine, max_batched_tokens=budget)
    if overhead_s is not None:
        engine = replace(engine, step_overhead=overhead_s)
    return Roofline(SHAPE, GPU, engine)


def link(**changes: Any) -> LinkHandoverSpec:
    """Return a P→D network of 100 and 200 Gb/s."""
    spec = LinkHandoverSpec(prefill_link=NIC_100, decode_link=NIC_200, copy_engine=COPY)
    return replace(spec, **changes)


def cluster(**changes: Any) -> ClusterSpec:
    """Return one aggregated server."""
    return replace(ClusterSpec(roofline=roofline(), block_tokens=BLOCK), **changes)


def run(
    work: Workload,
    name: str = "recompute",
    how: Drive = OPEN,
    *,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    **spec: Any,
) -> Simulated:
    """Serve a workload on a tier of the catalog; every law must hold."""
    entry = tier(name)
    spec = {"prefix_caching": entry.prefix_caching, **spec}
    result = simulate(work, cluster(**spec), entry.maker, how, options=options, seed=seed)
    assert [law for law in result.laws if not law.ok] == []
    return result


def prefill_s(tokens: int, context: int = 0) -> float:
    """Return what a chunk of a prompt takes where compute is the bound, by hand."""
    pairs = sum(range(context + 1, context + tokens + 1))
    flop = 2 * SHAPE.parameters * tokens + 4 * 32 * 32 * 128 * pairs
    return flop / (312e12 * 0.5) + 0.002


def decode_s(contexts: list[int]) -> float:
    """Return what a step of answers takes where memory is the bound, by hand."""
    nbytes = 2 * SHAPE.parameters + sum(contexts) * 2 * 32 * 8 * 128 * 2
    return nbytes / (2039e9 * 0.8) + 0.002
