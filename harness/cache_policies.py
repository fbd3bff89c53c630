"""Hit rates of replacement policies on a workload's block references, up to the optimum.

A *reference* is one block of one request, in order of arrival and in the order of ``Order`` inside
a request. LRU comes from stack distances, one pass for all capacities (``trace_statistics.py``);
OPT is Belady's MIN (1966): the victim is the block whose next reference is farthest away, and
every miss is filled, so no policy that fills every miss has more hits. All others are the very
policies that a CMM-H runs (``devices/policies``), or a user's ``module:object``.

Two counts. *Plain*: a reference whose block is there. *Prefix-aware*: only if all blocks before it
in the chain hit as well, since an engine can use nothing behind a missing block (HyMCache §2); the
cache itself sees the same references in both. OPT is the optimum of the plain count alone.

Units: blocks, bytes; rates are 0 to 1. As in ``trace_statistics.py`` no time passes: a block is
there for the request that follows the one which made it. Memory about 100 bytes a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cxlbench.devices.policies import PolicyFactory, load_policy
from cxlbench.harness.requests import Workload, WorkloadError
from cxlbench.harness.trace_statistics import LRU, Order, stack_distances

OPT = "opt"
SIEVE = "cxlbench.devices.policies.sieve:SievePolicy"
AUTHORS_S3FIFO = "cxlbench.devices.policies.s3fifo_authors:AuthorsS3FifoPolicy"
STUDIED = (LRU, "fifo", "clock", SIEVE, "s3fifo", OPT)
"""What a study compares unless it is told otherwise."""

Progress = Callable[[str, int, int], None]


def short_name(policy: str) -> str:
    """Return what tables call a policy: built-in names, and a user's object without its module."""
    return {SIEVE: "sieve", AUTHORS_S3FIFO: "s3fifo (authors)"}.get(
        policy, policy.rpartition(":")[2]
    )


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The references of a workload as arrays.

    Attributes:
        blocks: block ids in the order in which a cache sees them, shape (references,).
        request: the position of each reference's request, not falling, shape (references,).
        depth: each block's place in its chain, 0 for the head, shape (references,).
    """

    blocks: NDArray[np.int64]
    request: NDArray[np.int64]
    depth: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def distinct(self) -> int:
        """Number of distinct blocks."""
        return len(np.unique(self.blocks))

    @classmethod
    def of(cls, workload: Workload, order: Order = Order.TAIL_FIRST) -> References:
        """Return the references of a workload; raise WorkloadError if it records no ids."""
        workload.require_ids("a comparison of replacement policies")
        step = -1 if order is Order.TAIL_FIRST else 1
        chains = [request.block_ids[::step] for request in workload.requests]
        lengths = np.array([len(one) for one in chains], dtype=np.int64)
        count = int(lengths.sum())
        blocks = np.fromiter(chain.from_iterable(chains), dtype=np.int64, count=count)
        request = np.repeat(np.arange(len(chains), dtype=np.int64), lengths)
        place = np.arange(count, dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if order is Order.TAIL_FIRST:
            place = lengths[request] - 1 - place
        return cls(blocks, request, place)

    def prefix_hits(self, hits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which hits count prefix-aware: those above the first miss of their request."""
        requests = int(self.request[-1]) + 1 if len(self) else 0
        first_miss = np.full(requests, np.iinfo(np.int64).max)
        np.minimum.at(first_miss, self.request[~hits], self.depth[~hits])
        reached: NDArray[np.bool_] = self.depth < first_miss[self.request]
        return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHits:
    """One policy at one capacity."""

    policy: str
    capacity_bytes: int
    capacity_blocks: int
    references: int
    hits: int
    prefix_hits: int

    @property
    def hit_rate(self) -> float:
        """Share of references that hit."""
        return self.hits / self.references if self.references else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of references that hit together with all before them in their chain."""
        return self.prefix_hits / self.references if self.references else 0.0


def compare_policies(
    references: References,
    capacities_bytes: Sequence[int],
    *,
    block_bytes: int,
    policies: Sequence[str] = STUDIED,
    progress: Progress = lambda *_: None,
) -> tuple[PolicyHits, ...]:
    """Return the hits of each policy at each capacity, capacities first.

    Raises:
        WorkloadError: a negative capacity, or a block below 1 byte.
        PolicyError: no such policy.
    """
    if block_bytes < 1:
        raise WorkloadError(f"block_bytes={block_bytes}: must be 1 or more")
    if any(capacity < 0 for capacity in capacities_bytes):
        raise WorkloadError(f"capacities_bytes={list(capacities_bytes)}: sizes are 0 or more")
    for policy in policies:
        if policy != OPT:
            load_policy(policy)
    run = HitMasks(references)
    rows: list[PolicyHits] = []
    total = len(policies) * len(capacities_bytes)
    for capacity in capacities_bytes:
        for policy in policies:
            progress(f"policies: {short_name(policy)}", len(rows), total)
            hits = run.hits(policy, capacity // block_bytes)
            rows.append(
                PolicyHits(
                    policy=policy,
                    capacity_bytes=capacity,
                    capacity_blocks=capacity // block_bytes,
                    references=len(references),
                    hits=int(hits.sum()),
                    prefix_hits=int(references.prefix_hits(hits).sum()),
                )
            )
    progress("policies", total, total)
    return tuple(rows)


class HitMasks:
    """Which references hit, by policy and capacity; what all capacities share is computed once."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._distances: NDArray[np.int64] | None = None
        self._next: NDArray[np.int64] | None = None

    def hits(self, policy: str, capacity_blocks: int) -> NDArray[np.bool_]:
        """Return a flag for each reference; raise PolicyError if there is no such policy."""
        blocks = self._references.blocks
        if policy == LRU:
            if self._distances is None:
                self._distances = stack_distances(blocks)
            return (self._distances >= 0) & (self._distances < capacity_blocks)
        if policy == OPT:
            if self._next is None:
                self._next = next_references(blocks)
            return optimal_hits(blocks, self._next, capacity_blocks)
        return policy_hits(blocks, load_policy(policy), capacity_blocks)


def policy_hits(
    blocks: NDArray[np.int64], factory: PolicyFactory, capacity_blocks: int
) -> NDArray[np.bool_]:
    """Return which references hit in a cache that a policy manages; every miss is filled."""
    hits = np.zeros(len(blocks), dtype=np.bool_)
    if capacity_blocks < 1:
        return hits
    policy = factory(capacity_blocks)
    touch, insert, evict = policy.touch, policy.insert, policy.evict
    found: list[int] = []
    resident = 0
    for position, block in enumerate(blocks.tolist()):
        if block in policy:
            found.append(position)
            touch(block)
            continue
        if resident == capacity_blocks:
            evict()
        else:
            resident += 1
        insert(block)
    hits[found] = True
    return hits


def next_references(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each reference's block is referenced next, shape (n,); n where it never is."""
    following = np.full(len(blocks), len(blocks), dtype=np.int64)
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def optimal_hits(
    blocks: NDArray[np.int64], following: NDArray[np.int64], capacity_blocks: int
) -> NDArray[np.bool_]:
    """Return which references hit under Belady's MIN; ``following`` as of ``next_references``.

    A heap holds the next reference of each resident block, farthest first. The block that is
    referenced now has the nearest one of all, so its entry is dropped only when it comes up:
    it lies in the past then.
    """
    count = len(blocks)
    hits = np.zeros(count, dtype=np.bool_)
    if capacity_blocks < 1:
        return hits
    present: set[int] = set()
    """The next references of all resident blocks, each of them a block of its own."""
    never = 0
    """Resident blocks that are never referenced again: any of them is the best victim."""
    heap: list[int] = []
    found: list[int] = []
    for position, after in enumerate(following.tolist()):
        if position in present:
            present.discard(position)
            found.append(position)
        elif len(present) + never == capacity_blocks:
            if never:
                never -= 1
            else:
                present.discard(-heappop(heap))
        if after == count:
            never += 1
        else:
            present.add(after)
            heappush(heap, -after)
    hits[found] = True
    return hits
