"""Time to first token from a queue model: what ``cxlbench size`` asks hundreds of times.

Requests go to the GPU servers in turn, and each server serves its own in their order of arrival,
one prefill at a time. A request first reads the leading blocks that the tier has, then computes
the rest:

- reading: the tier hands out bytes at one rate, shared by all, first come first served; they
  come over the server's own link, which is busy meanwhile. Whichever ends last, and the link's
  latency, ends the read. Reads of one request overlap the prefills of those before it on its
  server.
- computing: one step of the roofline (``serve/roofline.py``) for all tokens that are missing.

The tier's SSDs also write every block that was computed, at the run's mean rate, and read at
what the law of mixed traffic leaves: ``read / read_bandwidth + write / write_bandwidth <= 1``.
Open loop: requests come at their trace times. Closed loop: so many sessions at a time, each to
its end, with its think times; the next turn comes after the answer, decoded alone.

It is a tandem of FIFO queues, exact for these assumptions and no closer to a real engine than
they are: left out are batching of prefills, decode steps between them, the GPUs' own prefix
caches, lookup, timeouts, and blocks that are evicted or not yet stored when they are asked for
again. The real simulation (``sizing_simulation.py``) has them.

Units: s, tokens, blocks, bytes, bytes/s.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxlbench.harness.requests import Request, Workload
from cxlbench.harness.serve.roofline import Roofline, StepWork

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

READING = "reading"
PASSES = 4
"""Runs until the rate of writes agrees with how long the run takes."""
LEAST_READ_SHARE = 0.05
"""Of the SSDs' bandwidth, which reads get however much is written: they have priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """How fast a tier hands out blocks.

    ``port_bytes_per_s`` is of all devices or memory nodes together, ``link_bytes_per_s`` of each
    server's link; the SSDs' are 0 where there are none.
    """

    port_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float = 0.0
    ssd_read_bytes_per_s: float = 0.0
    ssd_write_bytes_per_s: float = 0.0

    def read_bytes_per_s(self, written_bytes_per_s: float) -> float:
        """Return what all readers together get while so much is written."""
        if not self.ssd_read_bytes_per_s:
            return self.port_bytes_per_s
        left = max(1 - written_bytes_per_s / self.ssd_write_bytes_per_s, LEAST_READ_SHARE)
        return min(self.port_bytes_per_s, self.ssd_read_bytes_per_s * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A workload and the servers that it comes to.

    ``sessions_at_once`` makes a closed loop; None is an open one. ``speed`` divides arrival and
    think times.
    """

    workload: Workload
    roofline: Roofline
    servers: int
    sessions_at_once: int | None = None
    speed: float = 1.0

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.roofline.shape.block_bytes(self.workload.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRun:
    """What the model says; arrays are by request id. Shapes (requests,)."""

    ttft_s: Floats
    read_s: Floats
    """From arrival to the last byte."""
    queued_s: Floats
    """From then to the start of the prefill."""
    compute_s: Floats
    sequence: Ints
    """Requests in the order in which they came."""
    duration_s: float
    written_bytes_per_s: float
    read_bytes_per_s: float
    """What the tier could hand out to all, at that rate of writes."""

    def p95_s(self) -> float:
        """Return the 95th percentile of the time to first token; 0 without requests."""
        return float(np.percentile(self.ttft_s, 95)) if len(self.ttft_s) else 0.0

    def slowest_parts_s(self) -> dict[str, float]:
        """Return the mean parts of the time to first token, of the slowest 5 % of requests."""
        slow = self.ttft_s >= self.p95_s()
        if not slow.any():
            return {}
        return {
            READING: float(self.read_s[slow].mean()),
            "waiting for a GPU": float(self.queued_s[slow].mean()),
            "computing": float(self.compute_s[slow].mean()),
        }


def model_ttft(load: Load, hits: Ints, speed: TierSpeed) -> TtftRun:
    """Return the times to first token if each request finds ``hits`` leading blocks in the tier."""
    requests = load.workload.requests
    written = float(sum(len(r.block_ids) for r in requests) - hits.sum()) * load.block_bytes
    compute_s = prefill_times(load, hits)
    rate = 0.0
    run = _run(load, hits, compute_s, speed, rate)
    if speed.ssd_read_bytes_per_s:
        for _ in range(PASSES):
            before, rate = rate, written / run.duration_s if run.duration_s else 0.0
            if math.isclose(before, rate, rel_tol=0.01):
                break
            run = _run(load, hits, compute_s, speed, rate)
    return run


def prefill_times(load: Load, hits: Ints) -> Floats:
    """Return how long each request computes, s. Shape (requests,)."""
    tokens = load.workload.block_tokens
    times = np.empty(len(load.workload.requests))
    for request, hit in zip(load.workload.requests, hits.tolist(), strict=True):
        context = hit * tokens
        work = StepWork()
        work.add_chunk(max(1, request.input_tokens - context), context)
        times[request.request_id] = load.roofline.step_s(work)
    return times


def _run(
    load: Load, hits: Ints, compute_s: Floats, speed: TierSpeed, written_bytes_per_s: float
) -> TtftRun:
    count = len(load.workload.requests)
    rate = speed.read_bytes_per_s(written_bytes_per_s)
    link_free_s = [0.0] * load.servers
    gpu_free_s = [0.0] * load.servers
    tier_free_s = end_s = 0.0
    read_s, queued_s = np.zeros(count), np.zeros(count)
    sequence: list[int] = []
    computed, found = compute_s.tolist(), hits.tolist()
    arrivals = _Arrivals(load)
    for place, (arrival_s, request) in enumerate(arrivals):
        number, server = request.request_id, place % load.servers
        ready_s = arrival_s
        nbytes = found[number] * load.block_bytes
        if nbytes:
            tier_free_s = max(tier_free_s, arrival_s) + nbytes / rate
            over_link_s = max(link_free_s[server], arrival_s) + nbytes / speed.link_bytes_per_s
            link_free_s[server] = max(tier_free_s, over_link_s)
            ready_s = link_free_s[server] + speed.latency_s
        begin_s = max(ready_s, gpu_free_s[server])
        first_s = gpu_free_s[server] = begin_s + computed[number]
        read_s[number], queued_s[number] = ready_s - arrival_s, begin_s - ready_s
        sequence.append(number)
        end_s = max(end_s, first_s)
        arrivals.first_token(request, first_s)
    return TtftRun(
        ttft_s=read_s + queued_s + compute_s,
        read_s=read_s,
        queued_s=queued_s,
        compute_s=compute_s,
        sequence=np.array(sequence, dtype=np.int64),
        duration_s=end_s,
        written_bytes_per_s=written_bytes_per_s,
        read_bytes_per_s=rate,
    )


class _Arrivals:
    """Requests in the order in which they come, as (time, request)."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._due: list[tuple[float, int]] = []
        self._next: dict[int, Request] = {}
        self._waiting: list[tuple[Request, ...]] = []
        if load.sessions_at_once is None:
            self._due = [(r.arrival_s / load.speed, r.request_id) for r in load.workload.requests]
            return
        self._waiting = list(reversed(load.workload.sessions().values()))
        for _ in range(load.sessions_at_once):
            self._begin_session(0.0)

    def __iter__(self) -> Iterator[tuple[float, Request]]:
        while self._due:
            due_s, number = heapq.heappop(self._due)
            yield due_s, self._load.workload.requests[number]

    def first_token(self, request: Request, first_s: float) -> None:
        """Let what waits for a request come, now that its first token has a time."""
        if self._load.sessions_at_once is None:
            return
        end_s = first_s + self._decode_s(request)
        after = self._next.pop(request.request_id, None)
        if after is None:
            self._begin_session(end_s)
        else:
            heapq.heappush(self._due, (end_s + after.think_s / self._load.speed, after.request_id))

    def _begin_session(self, now_s: float) -> None:
        if not self._waiting:
            return
        requests = self._waiting.pop()
        for before, after in itertools.pairwise(requests):
            self._next[before.request_id] = after
        first = requests[0]
        heapq.heappush(self._due, (now_s + first.think_s / self._load.speed, first.request_id))

    def _decode_s(self, request: Request) -> float:
        work = StepWork(tokens=1, attended_tokens=request.input_tokens + 1)
        return max(0, request.output_tokens - 1) * self._load.roofline.step_s(work)
