"""How much reuse a workload has, and what a cache of a given size would catch of it.

A reference is one block of one request, in order of arrival. Its *stack distance* is the number
of distinct other blocks referenced since the same block was referenced last: LRU of ``n`` blocks
hits exactly the references of a distance below ``n`` (Mattson et al. 1970), so that one pass gives
LRU's hit rates at all sizes. Other policies are simulated, one pass a size.

The blocks of one request are referenced all at once, so their order is a choice. *Tail first*
leaves the head of a chain the most recent, as engines do that free a request's blocks from its
tail on (a chain without its head is worthless); *head first* is how a device sees them read. The
figures in ``docs/traces.md`` are tail first; the choice matters for small caches only.

A cache here holds whole blocks, a partial last block takes a full one's room, and every miss is
filled. That is the upper bound a trace offers, not what a system reaches: no time passes, and a
block behind a missing one still counts as a hit.

Units: bytes; shares are 0 to 1. Time O(n log n), memory about 80 bytes a reference.
``count_references`` needs no workload in memory, only a set of the distinct blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cxlbench.devices.policies import PolicyFactory, load_policy
from cxlbench.harness.requests import Request, Workload, WorkloadError

LRU = "lru"


class Order(enum.StrEnum):
    """In which order the blocks of one request are referenced."""

    TAIL_FIRST = "tail-first"
    HEAD_FIRST = "head-first"


@dataclass(frozen=True, slots=True)
class ReferenceCounts:
    """What one pass over requests counts."""

    requests: int
    references: int
    distinct: int

    @property
    def hit_share(self) -> float:
        """Share of references whose block was seen before: the hit rate of an endless cache."""
        return 1 - self.distinct / self.references if self.references else 0.0


@dataclass(frozen=True, slots=True)
class CapacityHits:
    """The hit share at one cache size."""

    capacity_bytes: int
    capacity_blocks: int
    hit_share: float


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """The statistics of a workload.

    Attributes:
        name: the workload's name.
        counts: requests, references, distinct blocks.
        block_bytes: bytes of a full block.
        footprint_bytes: of all distinct blocks.
        max_stack_distance: LRU of one block more gets every possible hit; None without any.
        input_tokens_p50: median prompt length.
        input_tokens_p90: 90th percentile.
        input_tokens_max: longest prompt.
        policy: what managed the caches below.
        order: in which order a request's blocks were referenced.
        capacities: in the order asked for.
    """

    name: str
    counts: ReferenceCounts
    block_bytes: int
    footprint_bytes: int
    max_stack_distance: int | None
    input_tokens_p50: int
    input_tokens_p90: int
    input_tokens_max: int
    policy: str
    order: Order
    capacities: tuple[CapacityHits, ...]


def count_references(requests: Iterable[Request]) -> ReferenceCounts:
    """Count over requests with chained ids, without holding them.

    A chained block that was seen was seen with its whole prefix, so the new blocks of a request
    are its last ones: only those, and one more, are looked at.
    """
    seen: set[int] = set()
    count = references = 0
    for request in requests:
        count += 1
        references += len(request.block_ids)
        for block in reversed(request.block_ids):
            if block in seen:
                break
            seen.add(block)
    return ReferenceCounts(count, references, len(seen))


def trace_statistics(
    workload: Workload,
    capacities_bytes: Sequence[int] = (),
    *,
    block_bytes: int | None = None,
    bytes_per_token: int | None = None,
    policy: str = LRU,
    order: Order = Order.TAIL_FIRST,
) -> TraceStatistics:
    """Return the statistics of a workload.

    Args:
        workload: with recorded block ids.
        capacities_bytes: cache sizes to try; one smaller than a block hits nothing.
        block_bytes: bytes of a full block; or else
        bytes_per_token: bytes of KV a token (Llama-3.1-8B in BF16: 128 KiB).
        policy: a name or ``module:object``, see ``load_policy``.
        order: in which order a request's blocks are referenced.

    Raises:
        WorkloadError: no block ids, or not exactly one positive size.
        PolicyError: no such policy.
    """
    workload.require_ids("a reuse statistic")
    size_bytes = _block_bytes(workload, block_bytes, bytes_per_token)
    if any(capacity < 0 for capacity in capacities_bytes):
        raise WorkloadError(f"capacities_bytes={list(capacities_bytes)}: sizes are 0 or more")
    factory = load_policy(policy)
    requests = workload.requests
    counts = count_references(requests)
    step = -1 if order is Order.TAIL_FIRST else 1
    references = np.fromiter(
        chain.from_iterable(request.block_ids[::step] for request in requests),
        dtype=np.int64,
        count=counts.references,
    )
    distances = stack_distances(references)
    blocks = [capacity // size_bytes for capacity in capacities_bytes]
    if policy == LRU:
        reached = np.sort(distances[distances >= 0])
        hits = [int(np.searchsorted(reached, count, side="left")) for count in blocks]
    else:
        ids = references.tolist()
        hits = [simulated_hits(ids, factory, count) for count in blocks]
    lengths = np.array([request.input_tokens for request in requests] or [0], dtype=np.int64)
    return TraceStatistics(
        name=workload.name,
        counts=counts,
        block_bytes=size_bytes,
        footprint_bytes=counts.distinct * size_bytes,
        max_stack_distance=int(distances.max()) if (distances >= 0).any() else None,
        input_tokens_p50=round(float(np.percentile(lengths, 50))),
        input_tokens_p90=round(float(np.percentile(lengths, 90))),
        input_tokens_max=int(lengths.max()),
        policy=policy,
        order=order,
        capacities=tuple(
            CapacityHits(capacity, count, hit / counts.references if counts.references else 0.0)
            for capacity, count, hit in zip(capacities_bytes, blocks, hits, strict=True)
        ),
    )


def _block_bytes(workload: Workload, block_bytes: int | None, bytes_per_token: int | None) -> int:
    if (block_bytes is None) == (bytes_per_token is None):
        raise WorkloadError(
            f"block_bytes={block_bytes}, bytes_per_token={bytes_per_token}: give exactly one"
        )
    size = block_bytes if bytes_per_token is None else bytes_per_token * workload.block_tokens
    if size is None or size < 1:
        raise WorkloadError(
            f"block_bytes={block_bytes}, bytes_per_token={bytes_per_token}: must be 1 or more"
        )
    return size


def stack_distances(references: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each reference's LRU stack distance, shape (n,); -1 for a block's first reference.

    With ``before[i]`` the index of the reference to the same block before ``i``, the references
    in between are ``i - before[i] - 1``; one of them is a repetition inside the interval exactly
    if its own ``before`` lies above ``before[i]``. Those are counted for all ``i`` at once.
    """
    count = len(references)
    before = np.full(count, -1, dtype=np.int64)
    order = np.argsort(references, kind="stable")
    same = references[order[1:]] == references[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    repeated = np.flatnonzero(before >= 0)
    distances = np.full(count, -1, dtype=np.int64)
    previous = before[repeated]
    distances[repeated] = repeated - previous - 1 - larger_to_the_left(previous)
    return distances


def larger_to_the_left(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each value, all distinct and >= 0, how many larger ones stand left of it.

    Splits the values by one binary digit after the other, from the highest: among values with
    equal higher digits, in their order, each with digit 0 has those with digit 1 before it.
    """
    larger = np.zeros(len(values), dtype=np.int64)
    if not len(values):
        return larger
    place = np.arange(len(values))
    group = np.zeros(len(values), dtype=np.int64)
    for digit in range(int(values.max()).bit_length() - 1, -1, -1):
        ones = (values[place] >> digit) & 1
        ones_before = np.cumsum(ones) - ones
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        sizes = np.diff(starts, append=len(values))
        in_group_before = ones_before - np.repeat(ones_before[starts], sizes)
        zeros = ones == 0
        larger[place[zeros]] += in_group_before[zeros]
        group = group * 2 + ones
        resorted = np.argsort(group, kind="stable")
        place, group = place[resorted], group[resorted]
    return larger


def simulated_hits(references: Iterable[int], factory: PolicyFactory, capacity_blocks: int) -> int:
    """Return how many references hit in a cache that a policy manages; every miss is filled."""
    if capacity_blocks < 1:
        return 0
    policy = factory(capacity_blocks)
    touch, insert, evict = policy.touch, policy.insert, policy.evict
    hits = resident = 0
    for block in references:
        if block in policy:
            hits += 1
            touch(block)
            continue
        if resident == capacity_blocks:
            evict()
        else:
            resident += 1
        insert(block)
    return hits
