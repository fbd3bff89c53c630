"""Workers that serve a workload's requests at their times, and what a run of them came to.

Requests of a session stay on one worker. All workers of a run may be in one process, or each in one
of its own: then every process takes from the same workload what is its worker's, and ``Outcome``
is what they hand back. Open loop: requests arrive at their trace times, whatever the system does.
Closed loop: a request arrives a think time after its predecessor in the session has ended.

Units: s, blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.sync import Signal
from cxlbench.harness.content import BlockContent
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.metrics import BlockLog, Figures, Spread, turn_figures
from cxlbench.harness.requests import Request, Workload
from cxlbench.harness.worker import RequestRecord, StoreCounters, Worker
from cxlbench.hymcache.counters import ConnectorCounters
from cxlbench.kv.connector import BlockTimes, Connector
from cxlbench.kv.identity import Namespace, trace_keys

FEW_REQUESTS = 5000
"""Of so many the keys are kept from lookup to store; of more they would fill the memory."""

Progress = Callable[[int, int], None]
"""Called with requests done and requests in all."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests come."""

    closed_loop: bool
    think_cap_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class Engine:
    """The serving engine of each worker."""

    model: EngineModel
    gpu_blocks: int
    max_running: int


@dataclass(slots=True)
class Outcome:
    """What the workers of one or of several processes came to. Bytes are scaled."""

    records: list[RequestRecord] = field(default_factory=list)
    blocks: BlockLog = field(default_factory=BlockLog)
    counters: list[ConnectorCounters] = field(default_factory=list)
    stores: list[StoreCounters] = field(default_factory=list)
    wrong_blocks: int = 0
    timers: int = 0
    callbacks: int = 0


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What the tier itself counted in a run, and what it still held at the end."""

    evicted: int = 0
    lost: int = 0
    failed_writes: int = 0
    injected: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)


class Serving:
    """Serves those requests of a workload whose workers are in this process."""

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        *,
        engine: Engine,
        pace: Pace,
        content: BlockContent,
        workers: int,
        salt: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.clock = clock
        self.pace = pace
        self.outcome = Outcome()
        self.workers: dict[int, Worker] = {}
        self._engine = engine
        self._content = content
        self._progress = progress
        self._block_tokens = workload.block_tokens
        self._requests = workload.requests
        self._route = _Router(workers, workload.has_sessions)
        self._computed: set[int] = set()
        self._turns: dict[int, int] = {}
        self._jobs = JobSet(clock)
        self._mine = 0
        shape = engine.model.shape
        self._space = Namespace(
            model=shape.name,
            weights_revision="0",
            dtype=f"{shape.dtype_bytes}B",
            kv_layout="block",
            block_tokens=workload.block_tokens,
            salt=salt,
        )

    def note_block(self, times: BlockTimes) -> None:
        """Log a block read; connectors call this."""
        self.outcome.blocks.add(self._turns[times.request_id], times)

    def add_worker(self, number: int, connector: Connector) -> None:
        """Make a worker on a connector."""
        self.workers[number] = Worker(
            self.clock,
            connector,
            self._engine.model,
            self._content,
            number=number,
            gpu_blocks=self._engine.gpu_blocks,
            max_running=self._engine.max_running,
            keys_of=lru_cache(maxsize=None)(self._keys_of)
            if len(self._requests) < FEW_REQUESTS
            else self._keys_of,
            block_tokens=self._block_tokens,
            computed=self._computed,
        )

    def _keys_of(self, request: Request) -> Sequence[bytes]:
        return trace_keys(self._space, request.block_ids)

    def start(self, start_s: float) -> None:
        """Let the requests arrive; trace time 0 is ``start_s``."""
        routed = [(request, self._route(request)) for request in self._requests]
        mine = [(request, worker) for request, worker in routed if worker in self.workers]
        self._mine = len(mine)
        if not self.pace.closed_loop:
            self._jobs.spawn(self._open_loop(start_s, mine))
            return
        ended: dict[int, Signal[None]] = {
            request.request_id: Signal(self.clock) for request, _ in mine
        }
        for request, worker in mine:
            self._jobs.spawn(self._closed(request, ended, start_s, worker))

    async def _open_loop(self, start_s: float, mine: Sequence[tuple[Request, int]]) -> None:
        for request, worker in mine:
            await self.clock.sleep_until(start_s + request.arrival_s / self.pace.speed)
            self._jobs.spawn(self._serve(request, worker))

    async def _closed(
        self, request: Request, ended: dict[int, Signal[None]], start_s: float, worker: int
    ) -> None:
        pace = self.pace
        if request.after is None:
            await self.clock.sleep_until(start_s + request.arrival_s / pace.speed)
        else:
            await ended[request.after].wait()
            await self.clock.sleep(min(request.think_s, pace.think_cap_s) / pace.speed)
        try:
            await self._serve(request, worker)
        finally:
            ended[request.request_id].set(None)

    async def _serve(self, request: Request, worker: int) -> None:
        self._turns[request.request_id] = request.turn
        record = await self.workers[worker].serve(request)
        records = self.outcome.records
        records.append(record)
        if self._progress is not None:
            self._progress(len(records), self._mine)

    async def join(self) -> None:
        """Wait until all requests have been served."""
        await self._jobs.join()

    async def settle(self) -> None:
        """Wait until all stores have ended."""
        for worker in self.workers.values():
            await worker.settle()

    async def cancel(self) -> None:
        """Cut off what is being served."""
        await self._jobs.cancel()

    def collect(self, counters: Sequence[ConnectorCounters]) -> Outcome:
        """Return the outcome, with the connectors' counters."""
        outcome = self.outcome
        outcome.records.sort(key=lambda record: record.request_id)
        outcome.counters = list(counters)
        outcome.stores = [worker.stores for worker in self.workers.values()]
        outcome.wrong_blocks = sum(worker.wrong_blocks for worker in self.workers.values())
        outcome.timers, outcome.callbacks = self.clock.timers, self.clock.callbacks
        return outcome


def summarize(
    outcome: Outcome, tier: TierCounts, *, duration_s: float, scale: float, max_turns: int
) -> Figures:
    """Return a run's figures, bytes at full size."""
    records, blocks, counters, stores = (
        outcome.records,
        outcome.blocks,
        outcome.counters,
        outcome.stores,
    )
    moved = max(len(blocks.nbytes) + sum(s.stored for s in stores), 1)
    reusable = sum(r.reusable for r in records)
    matched = sum(r.matched for r in records)
    return Figures(
        requests=len(records),
        duration_s=duration_s,
        reusable_blocks=reusable,
        seen_blocks=sum(r.seen for r in records),
        gpu_blocks=matched,
        tier_blocks=sum(r.loaded for r in records),
        announced_blocks=sum(r.found for r in records),
        looked_up_blocks=reusable - matched,
        stored_blocks=sum(s.stored for s in stores),
        skipped_blocks=sum(s.skipped for s in stores),
        recovered_blocks=sum(s.recovered for s in stores),
        failed_stores=sum(s.failed for s in stores),
        wrong_blocks=outcome.wrong_blocks,
        mismatched_blocks=sum(c.mismatched for c in counters),
        timed_out_blocks=sum(c.timed_out for c in counters),
        failed_loads=sum(c.failed for c in counters),
        evicted_blocks=tier.evicted,
        read_bytes=int(sum(blocks.nbytes) * scale),
        block_read=Spread.of(blocks.latencies_s()),
        block_due=Spread.of(blocks.due_latencies_s()),
        block_late=Spread.of(blocks.latencies_s() - blocks.due_latencies_s()),
        ttft=Spread.of([r.ttft_s for r in records]),
        turns=turn_figures(records, blocks, scale=scale, max_turns=max_turns),
        timers_per_block=outcome.timers / moved,
        callbacks_per_block=outcome.callbacks / moved,
        injected=tier.injected,
        held_at_rest=tier.held,
        lost_blocks=tier.lost,
        failed_writes=tier.failed_writes,
    )


class _Router:
    """Requests of a session go to the worker of its first one; others in turn."""

    def __init__(self, workers: int, sticky: bool) -> None:
        self._turn = itertools.cycle(range(workers))
        self._sticky = sticky
        self._home: dict[str, int] = {}

    def __call__(self, request: Request) -> int:
        if not self._sticky:
            return next(self._turn)
        if request.session not in self._home:
            self._home[request.session] = next(self._turn)
        return self._home[request.session]
