"""What the serving model costs this host, and whether it is linear: ``cxlbench bench serving``.

The set-up is that of HyMCache fig. 10: Qwen2.5-32B on four prefill servers and one decode server,
conversations of seven turns, concurrency 32, tiers' memory in proportion to the conversations. Each
tier serves 1, 4 and 16 times as many conversations; 16 times 32 is the paper's size. The bar: CPU
time for each block that prompts refer to, and for each event (callback of the loop), grows by no
more than ``MAX_GROWTH`` from the smallest size to the largest. Events for each block are shown, and
grow by themselves while more and more of the blocks come from the tier and not from the GPU.

Memory is the most that the process had resident so far; sizes come in ascending order. Units: s of
CPU time, blocks, bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CopyEngineProfile,
    LinkProfile,
    ServingEngineProfile,
    load_as,
)
from cxlbench.harness.bench_replay import peak_resident_bytes
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import simulate
from cxlbench.harness.tiers.catalog import tier
from cxlbench.kv.geometry import model_shape

MAX_GROWTH = 1.5
"""Of CPU time for each block and for each event, from the smallest to the largest size."""
MAX_RESIDENT_BYTES = 2 * 10**9
FACTORS = (1, 4, 16)
TIERS = ("recompute", "lmcache-local", "mooncake", "hymcache")
PAPER_SESSIONS = 512
BLOCK_TOKENS, CONCURRENCY, TURNS, TURN_TOKENS = 128, 32, 7, 1756
CAPACITY_BYTES = {"lmcache-local": 64 << 30, "mooncake": 1024 << 30}
"""At the paper's number of conversations."""


@dataclass(frozen=True, slots=True)
class ServingCost:
    """One tier at one size."""

    tier: str
    factor: int
    requests: int
    blocks: int
    """That prompts refer to, over all requests."""
    cpu_s: float
    timers: int
    callbacks: int
    peak_resident_bytes: int
    laws_broken: tuple[str, ...]

    @property
    def cpu_per_block_s(self) -> float:
        """CPU time for each block."""
        return self.cpu_s / self.blocks

    @property
    def cpu_per_event_s(self) -> float:
        """CPU time for each callback of the loop."""
        return self.cpu_s / self.callbacks

    @property
    def timers_per_block(self) -> float:
        """Timers for each block."""
        return self.timers / self.blocks


def bench_serving(
    *,
    sessions: int = PAPER_SESSIONS // FACTORS[-1],
    seed: int = 1,
    factors: Sequence[int] = FACTORS,
    tiers: Sequence[str] = TIERS,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[ServingCost, ...]:
    """Serve ``sessions`` conversations, and more by each factor, on every tier."""
    found: list[ServingCost] = []
    _cost(tiers[0], _workload(1, seed), 1, 1)  # imports and compilations are not counted
    for factor in sorted(factors):
        workload = _workload(sessions * factor, seed)
        for name in tiers:
            progress(f"{factor} x, {name}", len(found), len(factors) * len(tiers))
            found.append(_cost(name, workload, factor, sessions * factor))
    progress("done", len(found), len(found))
    return tuple(found)


def growth(costs: Sequence[ServingCost], name: str) -> tuple[float, float]:
    """Return how CPU time for each block and each event grows from smallest to largest size."""
    mine = sorted((cost for cost in costs if cost.tier == name), key=lambda cost: cost.factor)
    least, most = mine[0], mine[-1]
    return (
        most.cpu_per_block_s / least.cpu_per_block_s,
        most.cpu_per_event_s / least.cpu_per_event_s,
    )


def _cost(name: str, workload: Workload, factor: int, sessions: int) -> ServingCost:
    entry = tier(name)
    capacity = CAPACITY_BYTES.get(name)
    shape = model_shape("Qwen2.5-32B")
    cluster = ClusterSpec(
        roofline=Roofline(
            shape,
            load_as(AcceleratorProfile, "a100-80g"),
            load_as(ServingEngineProfile, "vllm-default"),
        ),
        block_tokens=BLOCK_TOKENS,
        prefill_servers=4,
        decode_servers=1,
        handover=LinkHandoverSpec(
            prefill_link=load_as(LinkProfile, "nic-100g"),
            decode_link=load_as(LinkProfile, "nic-200g"),
            copy_engine=load_as(CopyEngineProfile, "gpu-copy-gen4x16"),
        ),
        prefix_caching=entry.prefix_caching,
    )
    options = {}
    if capacity is not None:
        least = 64 * shape.block_bytes(BLOCK_TOKENS)
        options["capacity_bytes"] = max(least, capacity * sessions // PAPER_SESSIONS)
    begin_s = time.process_time()
    run = simulate(
        workload,
        cluster,
        entry.maker,
        Drive(order=Order.ROUNDS, concurrency=CONCURRENCY),
        options=options,
    )
    return ServingCost(
        tier=name,
        factor=factor,
        requests=len(run.served),
        blocks=sum(len(request.block_ids) for request in workload.requests),
        cpu_s=time.process_time() - begin_s,
        timers=run.timers,
        callbacks=run.callbacks,
        peak_resident_bytes=peak_resident_bytes(),
        laws_broken=tuple(law.name for law in run.laws if not law.ok),
    )


def _workload(sessions: int, seed: int) -> Workload:
    return generate(
        GeneratorKnobs(
            sessions=sessions,
            turns=TURNS,
            shared_system_tokens=0,
            first_input_tokens=TURN_TOKENS,
            first_input_stddev=TURN_TOKENS / 10,
            turn_input_tokens=TURN_TOKENS,
            turn_input_stddev=TURN_TOKENS / 10,
            output_tokens=1,
            think_s=0,
            block_tokens=BLOCK_TOKENS,
            seed=seed,
        ),
        name="conversations",
    )
