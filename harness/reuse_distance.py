"""How often a prefix cache of any size would hit, from one pass over a trace.

A prefix cache serves the *leading* blocks of a prompt: the first block that is missing ends the
hit, whatever lies behind it. Under LRU the blocks in a cache of ``n`` are the ``n`` most recent
ones, so a block hits if and only if its *reuse distance*, its place in the order of recency when
the request arrives, is below ``n``, for it and for every block before it (Mattson, Gecsei,
Slutz, Traiger, 1970). So the largest distance so far along the prompt is what the cache must
exceed, and one pass gives the hit rate of every size, exactly.

A request is looked up as a whole when it arrives; then all its blocks are referenced, hit or
missed, tail first unless asked otherwise, so that the head of a chain stays longest. Tail first,
a chained block is never more recent than the blocks before it, and the leading prefix costs
nothing extra; head first it does.

The hit rate is the share of *servable* blocks: all whole blocks of all prompts, but for one that
ends with its prompt's last token, which an engine computes anyway (``Request.reusable_blocks``).
A block's first appearance is a compulsory miss: it bounds the hit rate at every size.

Units: blocks. Time O(n log n), about 40 bytes a reference. Left out: time (a block is there at
once), the GPUs' own caches (what they hold is in the tier too), other policies
(``trace_statistics``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from cxlbench.harness.requests import Workload
from cxlbench.harness.trace_statistics import Order

NEVER = -1
"""The distance of a block that no cache serves: new, or behind one that is new."""

Ints = NDArray[np.int64]


class HitRateOutOfReachError(ValueError):
    """No capacity reaches the hit rate asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateCurve:
    """The hit rate of LRU prefix caches of all sizes.

    Attributes:
        requests: number of requests.
        servable: blocks that a cache may serve, the denominator of the hit rate.
        distinct: different blocks in all: the cache that never evicts.
        needed: for each servable block in order, the least cache that serves it is one more than
            this; ``NEVER`` where none does. Shape (servable,).
        first: where each request's blocks begin in ``needed``. Shape (requests + 1,).
    """

    requests: int
    servable: int
    distinct: int
    needed: Ints = field(repr=False)
    first: Ints = field(repr=False)
    _sorted: Ints = field(repr=False)

    def hits(self, capacity_blocks: int) -> int:
        """Return how many blocks a cache of that size serves."""
        return int(np.searchsorted(self._sorted, capacity_blocks, side="left"))

    def hit_rate(self, capacity_blocks: int) -> float:
        """Return the share of servable blocks that it serves; 0 where nothing is servable."""
        return self.hits(capacity_blocks) / self.servable if self.servable else 0.0

    @property
    def best_hit_rate(self) -> float:
        """The hit rate of a cache that never evicts: what compulsory misses leave."""
        return len(self._sorted) / self.servable if self.servable else 0.0

    @property
    def largest_useful(self) -> int:
        """Blocks of the least cache that reaches ``best_hit_rate``; 0 where nothing is reused."""
        return int(self._sorted[-1]) + 1 if len(self._sorted) else 0

    def capacity_for(self, hit_rate: float) -> int:
        """Return the blocks of the least cache that reaches a hit rate; 0 for a hit rate of 0.

        Raises:
            HitRateOutOfReachError: compulsory misses leave less.
            ValueError: it is no share.
        """
        if not 0 <= hit_rate <= 1:
            raise ValueError(f"hit_rate={hit_rate}: a share is from 0 to 1")
        if hit_rate > self.best_hit_rate:
            raise HitRateOutOfReachError(
                f"a hit rate of {hit_rate:.1%} is out of reach: {1 - self.best_hit_rate:.1%} of "
                f"the blocks are seen for the first time, or behind one that is, so that the best "
                f"possible is {self.best_hit_rate:.1%}, at any capacity"
            )
        wanted = _least_count(hit_rate, self.servable)
        return int(self._sorted[wanted - 1]) + 1 if wanted else 0

    def leading_hits(self, capacity_blocks: int) -> Ints:
        """Return how many leading blocks of each request it serves. Shape (requests,)."""
        served = (self.needed >= 0) & (self.needed < capacity_blocks)
        before = np.concatenate(([0], np.cumsum(served)))
        return np.asarray(before[self.first[1:]] - before[self.first[:-1]], dtype=np.int64)


def _least_count(share: float, of: int) -> int:
    """Return the least count that is at least a share of ``of``, as ``count / of`` says it."""
    count = int(share * of)
    while count and (count - 1) / of >= share:
        count -= 1
    while of and count / of < share:
        count += 1
    return count


def hit_rate_curve(
    workload: Workload,
    *,
    sequence: Sequence[int] | None = None,
    order: Order = Order.TAIL_FIRST,
) -> HitRateCurve:
    """Return the hit rates of LRU prefix caches under a workload.

    ``sequence`` are the requests by id in the order in which they come, as they arrive if left out;
    the curve's requests are in that order.

    Raises:
        WorkloadError: it records no block ids.
    """
    workload.require_ids("a hit-rate curve")
    requests = workload.requests
    if sequence is not None:
        requests = tuple(requests[request_id] for request_id in sequence)
    servable = _ints(request.reusable_blocks(workload.block_tokens) for request in requests)
    lengths = _ints(len(request.block_ids) for request in requests)
    ids = _ints(chain.from_iterable(request.block_ids for request in requests))
    distinct, dense = np.unique(ids, return_inverse=True)
    starts = _starts(lengths)
    first = _starts(servable)
    needed = np.full(int(first[-1]), NEVER, dtype=np.int64)
    _reach(
        np.ascontiguousarray(dense, dtype=np.int64),
        starts,
        servable,
        first,
        len(distinct),
        order is Order.TAIL_FIRST,
        needed,
    )
    return HitRateCurve(
        requests=len(requests),
        servable=int(first[-1]),
        distinct=len(distinct),
        needed=needed,
        first=first,
        _sorted=np.sort(needed[needed >= 0]),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _starts(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _reach_of(
    ids: Ints,
    starts: Ints,
    servable: Ints,
    first: Ints,
    distinct: int,
    tail_first: bool,
    needed: Ints,
) -> None:
    """Fill ``needed``.

    References are numbered as they happen. A binary indexed tree (Fenwick, 1994) holds a one at
    each block's last reference, so that a block's place in the order of recency is the number of
    ones behind its own.
    """
    count = len(ids)
    tree = np.zeros(count + 1, dtype=np.int64)
    last = np.full(distinct, -1, dtype=np.int64)
    live = 0
    now = 0
    for request in range(len(servable)):
        begin = starts[request]
        end = starts[request + 1]
        furthest = 0
        for place in range(servable[request]):
            at = last[ids[begin + place]]
            if at < 0:
                break
            distance = live
            node = at + 1
            while node > 0:
                distance -= tree[node]
                node -= node & -node
            furthest = max(furthest, distance)
            needed[first[request] + place] = furthest
        for step in range(end - begin):
            block = ids[end - 1 - step] if tail_first else ids[begin + step]
            at = last[block]
            if at < 0:
                live += 1
            else:
                node = at + 1
                while node <= count:
                    tree[node] -= 1
                    node += node & -node
            last[block] = now
            node = now + 1
            while node <= count:
                tree[node] += 1
                node += node & -node
            now += 1


_reach: Any = numba.njit(nogil=True)(_reach_of)
