"""What a workload needs for a goal: the smallest DRAM, SSDs and link, what they cost, what limits.

*Hit rate*: the share of servable blocks (``reuse_distance.py``) that the tier serves. The
capacity follows exactly from the trace, for LRU; the link is the slowest on which reading a
block takes no longer than computing it, and on which the servers together keep up with their
reads.

*Time to first token*, 95th percentile: by the queue model (``ttft_model.py``). It takes the slowest
link that can meet the goal with all reuse; on it, for 1, 2, 4... nodes at least, the smallest
capacity by bisection; and of these the cheapest. More capacity never means fewer hits, but a read
that is slower than computing costs time, so that the model need not be monotone: what is returned
meets the goal, and next to nothing less on the way of the bisection does.

In a closed loop the order in which requests come depends on how fast they are served: the hits
are those of the order that the model gives with all reuse.

Units: bytes, s, US dollars; shares are 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxlbench.devices.profile import LinkProfile
from cxlbench.harness.requests import WorkloadError
from cxlbench.harness.reuse_distance import HitRateCurve, HitRateOutOfReachError, hit_rate_curve
from cxlbench.harness.serve.roofline import StepWork
from cxlbench.harness.sizing_parts import Catalogue, Cost, Kind, Parts
from cxlbench.harness.ttft_model import READING, Load, TierSpeed, TtftRun, model_ttft

Ints = NDArray[np.int64]

MOST_NODES = 64
ENDLESS = TierSpeed(port_bytes_per_s=1e15, link_bytes_per_s=1e15)
"""A tier that costs no time: what no real one can beat."""


class SizingError(WorkloadError):
    """A goal that no tier meets, or that needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A tier that meets the goal, as small as it may be."""

    kind: Kind
    capacity_bytes: int
    capacity_blocks: int
    parts: Parts
    link: str
    cost: Cost
    hit_rate: float
    ttft_p95_s: float
    """By the queue model."""
    limit: str
    """What would have to change first for a better figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """How a workload's hits depend on capacity."""

    curve: HitRateCurve
    sequence: Ints

    def hits(self, capacity_blocks: int) -> Ints:
        """Return each request's leading hits, by request id."""
        found = np.empty(self.curve.requests, dtype=np.int64)
        found[self.sequence] = self.curve.leading_hits(capacity_blocks)
        return found


def reuse_of(load: Load) -> Reuse:
    """Return the hits of a workload in the order in which its requests come.

    Raises:
        WorkloadError: no block ids, or a closed loop over a workload without sessions.
        SizingError: there is nothing to reuse at all.
    """
    workload = load.workload
    if load.sessions_at_once is not None:
        workload.require_sessions("a closed loop")
    curve = hit_rate_curve(workload)
    sequence = np.arange(len(workload.requests), dtype=np.int64)
    if load.sessions_at_once is not None:
        hits = curve.leading_hits(curve.largest_useful)
        sequence = model_ttft(load, hits, ENDLESS).sequence
        curve = hit_rate_curve(workload, sequence=sequence.tolist())
    if not curve.largest_useful:
        raise SizingError(
            f"nothing of {workload.name!r} is ever reused ({curve.servable:,} blocks of "
            f"{curve.requests:,} requests, none twice): no tier of any size has a hit"
        )
    return Reuse(curve=curve, sequence=sequence)


def burst_bytes(load: Load, reuse: Reuse) -> int:
    """Return what a request stores at once, bytes: the 95th percentile of its new blocks."""
    hits = reuse.hits(reuse.curve.largest_useful)
    new = [len(r.block_ids) - hit for r, hit in zip(load.workload.requests, hits, strict=True)]
    return math.ceil(float(np.percentile(new, 95))) * load.block_bytes if new else 0


def size_for_hit_rate(
    load: Load, reuse: Reuse, catalogue: Catalogue, goal: float
) -> tuple[Sized, ...]:
    """Return the smallest tier of each kind that reaches a hit rate.

    Raises:
        SizingError: compulsory misses leave less, or the goal needs no tier.
    """
    if not 0 < goal <= 1:
        raise SizingError(
            f"a hit rate of {goal:g} is no goal: it must be above 0 (which a tier of zero capacity "
            "reaches) and at most 1"
        )
    try:
        blocks = reuse.curve.capacity_for(goal)
    except HitRateOutOfReachError as error:
        raise SizingError(str(error)) from error
    hits = reuse.hits(blocks)
    links = catalogue.links_by_speed()
    found = []
    for kind in Kind:
        nodes = catalogue.least_nodes(kind, blocks * load.block_bytes)
        for link in links:
            tier = _Tier(load, catalogue, kind, link, nodes)
            run = tier.run(blocks, hits)
            slow = _too_slow(load, run, hits, link, tier.speed(blocks))
            if slow is None:
                break
        limit = slow or (
            f"capacity; the best at any is {reuse.curve.best_hit_rate:.1%} (first-time blocks)"
        )
        found.append(tier.sized(blocks, reuse, run, limit))
    return tuple(found)


def _too_slow(
    load: Load, run: TtftRun, hits: Ints, link: LinkProfile, speed: TierSpeed
) -> str | None:
    """Return why hits do not pay here, or None where they do."""
    work = StepWork()
    work.add_chunk(load.workload.block_tokens, 0)
    work.attended_tokens = 0
    compute_s = max(
        load.roofline.step_s(work) - load.roofline.step_s(StepWork()), 1e-12
    )  # of one block more in a step, the weights being read anyway
    if load.block_bytes / link.bandwidth > compute_s:
        return f"the link: a block is computed faster than read over {link.name}"
    read_bytes = float(hits.sum()) * load.block_bytes
    busy = read_bytes / run.read_bytes_per_s / run.duration_s if run.duration_s else 0.0
    if busy > 0.95:
        return "the tier's bandwidth: reads take all the time there is"
    return None


def size_for_ttft(
    load: Load,
    reuse: Reuse,
    catalogue: Catalogue,
    goal_s: float,
    *,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Sized, ...]:
    """Return the smallest tier of each kind with which the 95th percentile meets a goal.

    Raises:
        SizingError: no tier can, even one that costs no time; or the servers meet it without one.
    """
    if not goal_s > 0:
        raise SizingError(f"a time to first token of {goal_s:g} s is no goal: it must be above 0")
    curve = reuse.curve
    without = model_ttft(load, reuse.hits(0), ENDLESS).p95_s()
    if without <= goal_s:
        raise SizingError(
            f"no tier is needed: computing everything, the p95 of TTFT is {without:.3g} s, within "
            f"{goal_s:g} s; the capacity asked for is zero"
        )
    tried = [model_ttft(load, reuse.hits(curve.largest_useful), ENDLESS)]
    found = []
    for done, kind in enumerate(Kind):
        progress("sizing tiers", done, len(Kind))
        sized = _smallest(load, reuse, catalogue, kind, goal_s, tried)
        if sized is not None:
            found.append(sized)
    if not found:
        best = min(tried, key=TtftRun.p95_s)
        part = _largest(best)
        cure = "faster links" if part == READING else "more or faster GPUs, or a lower load"
        raise SizingError(
            f"a p95 of {goal_s:g} s is out of reach: the best possible is {best.p95_s():.3g} s, of "
            f"all tiers that were tried and an endless one that costs no time (hit rate "
            f"{curve.best_hit_rate:.1%}); most of it is {part}: it takes {cure}"
        )
    return tuple(found)


def _smallest(
    load: Load,
    reuse: Reuse,
    catalogue: Catalogue,
    kind: Kind,
    goal_s: float,
    tried: list[TtftRun],
) -> Sized | None:
    """Return the cheapest of the smallest tiers with 1, 2, 4... nodes or more, on one link."""
    full = reuse.curve.largest_useful
    best: Sized | None = None
    for link in catalogue.links_by_speed():
        nodes = 1
        while nodes <= MOST_NODES:
            tier = _Tier(load, catalogue, kind, link, nodes)
            nodes *= 2
            run = tier.run(full, reuse.hits(full))
            tried.append(run)
            if run.p95_s() > goal_s:
                continue
            sized = _shrunk(reuse, tier, full, goal_s)
            if best is not None and best.cost.high <= sized.cost.high:
                break
            best = sized
        if best is not None:
            return best
    return None


def _shrunk(reuse: Reuse, tier: _Tier, full: int, goal_s: float) -> Sized:
    """Return the least capacity, then the fewest nodes, that still meet the goal."""
    low, high = 0, full
    while high - low > 1:
        middle = (low + high) // 2
        if tier.run(middle, reuse.hits(middle)).p95_s() <= goal_s:
            high = middle
        else:
            low = middle
    hits = reuse.hits(high)
    least = tier.catalogue.least_nodes(tier.kind, high * tier.load.block_bytes)
    for nodes in range(least, tier.nodes):
        fewer = _Tier(tier.load, tier.catalogue, tier.kind, tier.link, nodes)
        if fewer.run(high, hits).p95_s() <= goal_s:
            tier = fewer
            break
    run = tier.run(high, hits)
    return tier.sized(high, reuse, run, _limit(run, tier.speed(high)))


def _largest(run: TtftRun) -> str:
    parts = run.slowest_parts_s()
    return max(parts, key=lambda name: parts[name])


def _limit(run: TtftRun, speed: TierSpeed) -> str:
    """Return what the slowest requests spend most of their time on."""
    part = _largest(run)
    if part == "computing":
        return "GPU compute: what is missing of the longest prompts"
    if part == "waiting for a GPU":
        return "GPU queue: the servers are too few for this load"
    if speed.ssd_read_bytes_per_s and run.read_bytes_per_s < speed.port_bytes_per_s:
        written = run.written_bytes_per_s / speed.ssd_write_bytes_per_s
        return f"SSD bandwidth ({written:.0%} of it goes to writes)"
    if speed.link_bytes_per_s < run.read_bytes_per_s:
        return "each server's link"
    return "the nodes' ports"


@dataclass(frozen=True, slots=True)
class _Tier:
    """A kind of tier with a link and a number of nodes, at any capacity."""

    load: Load
    catalogue: Catalogue
    kind: Kind
    link: LinkProfile
    nodes: int

    def parts(self, blocks: int) -> Parts:
        nbytes = blocks * self.load.block_bytes
        nodes = max(self.nodes, self.catalogue.least_nodes(self.kind, nbytes))
        return self.catalogue.parts(self.kind, nbytes, nodes, self.link)

    def speed(self, blocks: int) -> TierSpeed:
        return self.catalogue.speed(self.parts(blocks), self.link)

    def run(self, blocks: int, hits: Ints) -> TtftRun:
        return model_ttft(self.load, hits, self.speed(blocks))

    def sized(self, blocks: int, reuse: Reuse, run: TtftRun, limit: str) -> Sized:
        parts = self.parts(blocks)
        return Sized(
            kind=self.kind,
            capacity_bytes=blocks * self.load.block_bytes,
            capacity_blocks=blocks,
            parts=parts,
            link=self.link.name,
            cost=self.catalogue.cost(parts),
            hit_rate=reuse.curve.hit_rate(blocks),
            ttft_p95_s=run.p95_s(),
            limit=limit,
        )
