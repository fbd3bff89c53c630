"""The same question asked of the real code: HyMCache under the serving model, in virtual time.

The queue model's answer is where the search begins; the capacity is doubled or halved until the
goal lies between two, and bisected to ``TOLERANCE``. Nodes, SSDs, DRAM and link stay as the
model chose them. ``gpu_caches`` are the GPUs' own prefix caches: off where a goal is the tier's
own hit rate.
What the model leaves out is in here: batching, decode, the GPUs' own prefix
caches, lookup, prefetch, timeouts, stores that are refused or late. Each step is a whole run.

Units: bytes, s, blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cxlbench.devices.profile import CxlHmProfile, Profile, load_as
from cxlbench.harness.rig import BlockTooLargeError
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.routing import Routing
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.sizing import Sized, SizingError
from cxlbench.harness.sizing_parts import DEVICE
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.harness.ttft_model import Load

P = TypeVar("P", bound=Profile)

TOLERANCE = 0.1
MOST_RUNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSize:
    """The least capacity that meets the goal in the simulation, and its run's figures."""

    capacity_bytes: int
    hit_rate: float
    """Of servable blocks; the GPUs' own hits count, where they have prefix caches."""
    ttft_p95_s: float
    runs: int
    laws_broken: tuple[str, ...]


def simulated_size(
    load: Load,
    sized: Sized,
    meets: Callable[[float, float], bool],
    *,
    gpu_caches: bool = True,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> SimulatedSize:
    """Return the least capacity for which ``meets(hit rate, p95 of TTFT)`` is true.

    Raises:
        SizingError: no capacity up to eight times the model's answer meets it.
    """
    step = _Steps(load, sized, meets, gpu_caches, seed, progress)
    high = sized.capacity_blocks
    while not step.good(high):
        if high >= 8 * sized.capacity_blocks:
            best = step.found[high]
            raise SizingError(
                f"the simulation does not meet the goal up to {high:,} blocks (p95 of TTFT "
                f"{best.ttft_p95_s:.3g} s, hit rate {best.hit_rate:.1%}), though the model does "
                f"with {sized.capacity_blocks:,}"
            )
        high *= 2
    low = high // 2
    while low >= 1 and step.good(low):
        high, low = low, low // 2
    while high - low > max(1, TOLERANCE * high) and len(step.found) < MOST_RUNS:
        middle = (low + high) // 2
        if step.good(middle):
            high = middle
        else:
            low = middle
    return step.found[high]


class _Steps:
    def __init__(
        self,
        load: Load,
        sized: Sized,
        meets: Callable[[float, float], bool],
        gpu_caches: bool,
        seed: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.found: dict[int, SimulatedSize] = {}
        self._load, self._sized, self._meets = load, sized, meets
        self._gpu_caches, self._seed, self._progress = gpu_caches, seed, progress

    def good(self, blocks: int) -> bool:
        found = self.found.get(blocks)
        if found is None:
            found = self.found[blocks] = self._run(blocks)
        return self._meets(found.hit_rate, found.ttft_p95_s)

    def _run(self, blocks: int) -> SimulatedSize:
        what = f"simulating {blocks:,} blocks, run {len(self.found) + 1}"
        try:
            run = simulate_at(
                self._load,
                self._sized,
                blocks,
                gpu_caches=self._gpu_caches,
                seed=self._seed,
                progress=lambda done, total: self._progress(what, done, total),
            )
        except BlockTooLargeError:  # so small a tier holds nothing
            return self._result(blocks, 0.0, math.inf, ())
        servable = sum(record.reusable for record in run.served)
        hits = sum(record.matched + record.loaded for record in run.served)
        broken = tuple(law.name for law in run.laws if not law.ok)
        ttfts = sorted(record.ttft_s for record in run.served)
        return self._result(blocks, hits / servable if servable else 0.0, _p95(ttfts), broken)

    def _result(
        self, blocks: int, hit_rate: float, p95_s: float, broken: tuple[str, ...]
    ) -> SimulatedSize:
        return SimulatedSize(
            capacity_bytes=blocks * self._load.block_bytes,
            hit_rate=hit_rate,
            ttft_p95_s=p95_s,
            runs=len(self.found) + 1,
            laws_broken=broken,
        )


def _p95(ordered: list[float]) -> float:
    """Return the 95th percentile, linear between two ranks as numpy's."""
    if not ordered:
        return 0.0
    place = 0.95 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def simulate_at(
    load: Load,
    sized: Sized,
    blocks: int,
    *,
    gpu_caches: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Simulated:
    """Run the workload on HyMCache with so many blocks of capacity."""
    parts = sized.parts
    overrides = {
        "dram_capacity": f"{parts.dram_bytes // parts.nodes} B",
        "ssd_count": str(max(1, parts.ssds // parts.nodes)),
    }

    def profile(kind: type[P], name: str, /) -> P:
        of_device = issubclass(kind, CxlHmProfile)
        return load_as(kind, name, overrides=overrides if of_device else None)

    sessions = load.sessions_at_once
    how = Drive(
        order=Order.OPEN if sessions is None else Order.SESSIONS,
        concurrency=sessions or 0,
        speed=load.speed,
    )
    spec = ClusterSpec(
        roofline=load.roofline,
        block_tokens=load.workload.block_tokens,
        prefill_servers=load.servers,
        routing=Routing.ROUND_ROBIN,
        prefix_caching=gpu_caches,
    )
    return simulate(
        load.workload,
        spec,
        HyMCacheTier,
        how,
        profile=profile,
        options={
            "device": DEVICE,
            "nodes": parts.nodes,
            "device_capacity_bytes": math.ceil(blocks / parts.nodes) * footprint(load.block_bytes),
            "worker_link": sized.link,
        },
        seed=seed,
        progress=progress,
    )


def footprint(block_bytes: int) -> int:
    """Return what a block takes on a device: its payload and its footer's page."""
    page = 4096
    return -(-block_bytes // page) * page + page
