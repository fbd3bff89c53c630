"""Replays a workload on a tier, under either clock, and measures it.

Open loop: requests arrive at their trace times, whatever the system does. Closed loop: a request
arrives a think time after its predecessor in the session has ended. Sessions stay on one worker.
The same text runs with real bytes in real time, and with tags in virtual time.

Units: s, blocks; sizes at full scale in the specs.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cxlbench.emu.clock import Clock, JobSet, VirtualClock, WallClock
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.sync import Signal
from cxlbench.harness.content import BlockContent
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.fidelity import Fidelity, measure
from cxlbench.harness.metrics import BlockLog, Figures, Spread, turn_figures
from cxlbench.harness.requests import Request, Workload
from cxlbench.harness.rig import Rig, RigSpec, scaled_block_bytes
from cxlbench.harness.worker import RequestRecord, Worker
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.identity import Namespace, trace_keys

MESSAGES_S = 0.01
"""Long enough for one-way messages to arrive, and for no deadline to hide what was not returned."""

Progress = Callable[[int, int], None]
"""Called with requests done and requests in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """How a workload is replayed on a rig."""

    rig: RigSpec
    engine: EngineModel
    gpu_blocks: int
    max_running: int = 64
    closed_loop: bool = False
    think_cap_s: float = 60.0
    speed: float = 1.0
    max_turns: int = 12

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed must be positive, got {self.speed}")
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.gpu_blocks < 0:
            raise ValueError(f"gpu_blocks must not be negative, got {self.gpu_blocks}")
        if self.think_cap_s < 0:
            raise ValueError(f"think_cap_s must not be negative, got {self.think_cap_s}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A finished replay. ``fidelity`` is None in virtual time."""

    figures: Figures
    records: tuple[RequestRecord, ...]
    fidelity: Fidelity | None
    blocks: BlockLog = field(default_factory=BlockLog, repr=False, compare=False)
    """Every block read; scaled bytes."""

    @property
    def correct(self) -> bool:
        """Whether no wrong byte was delivered and nothing is held at rest."""
        return not self.figures.wrong_blocks and not self.figures.held_at_rest


class TraceHasNoIdsError(ValueError):
    """A trace without block ids cannot be replayed on a cache."""


def replay(
    workload: Workload,
    spec: ReplaySpec,
    *,
    wall: bool,
    folder: Path | None = None,
    faults: FaultPlan | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Run ``workload``; real bytes (in ``folder``, else in RAM) in real time if ``wall``."""
    clock: Clock = WallClock() if wall else VirtualClock()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in mid-run would be lateness; nothing here needs cycles freed
    try:
        with clock:
            run = _Run(clock, workload, spec, folder=folder, faults=faults, progress=progress)
            return clock.run(run.all())
    finally:
        if collecting:
            gc.enable()


class _Run:
    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        spec: ReplaySpec,
        *,
        folder: Path | None,
        faults: FaultPlan | None,
        progress: Progress | None,
    ) -> None:
        self.clock = clock
        self.workload = workload
        self.spec = spec
        self.progress = progress
        self.faults = faults or FaultPlan.none()
        self.blocks = BlockLog()
        self.records: list[RequestRecord] = []
        self._turns: dict[int, int] = {}
        self._serving = JobSet(clock)
        phantom = clock.kind == "virtual"
        content = BlockContent(scaled_block_bytes(spec.rig), phantom=phantom, seed=spec.rig.seed)
        self.rig = Rig(
            clock,
            spec.rig,
            phantom=phantom,
            folder=folder,
            faults=self.faults,
            on_block=self._note_block,
        )
        shape = spec.engine.shape
        space = Namespace(
            model=shape.name,
            weights_revision="0",
            dtype=f"{shape.dtype_bytes}B",
            kv_layout="block",
            block_tokens=workload.block_tokens,
        )

        def keys_of(request: Request) -> Sequence[bytes]:
            return trace_keys(space, request.block_ids)

        computed: set[int] = set()
        self.workers = [
            Worker(
                clock,
                connector,
                spec.engine,
                content,
                number=number,
                gpu_blocks=spec.gpu_blocks,
                max_running=spec.max_running,
                keys_of=lru_cache(maxsize=None)(keys_of)
                if len(workload.requests) < 5000
                else keys_of,
                block_tokens=workload.block_tokens,
                computed=computed,
            )
            for number, connector in enumerate(self.rig.connectors)
        ]

    def _note_block(self, worker: int, times: BlockTimes) -> None:
        self.blocks.add(self._turns[times.request_id], times)

    async def all(self) -> ReplayResult:
        """Serve every request, settle, close, and summarize."""
        clock = self.clock
        start_s = clock.now()
        try:
            self._start(start_s)
            await self._serving.join()
            end_s = clock.now()
            for worker in self.workers:
                await worker.settle()
            await self.rig.quiesce()
            held = await self._held()
        except BaseException:
            await self._serving.cancel()
            # What was cut off has released what it held; this task's own time stands still.
            await clock.sleep_until(clock.real() + MESSAGES_S)
            raise
        finally:
            await self.rig.close()
        fidelity = measure(clock, self.rig.pipes) if clock.kind == "wall" else None
        figures = self._figures(end_s - start_s, held)
        return ReplayResult(figures, tuple(self.records), fidelity, self.blocks)

    async def _held(self) -> dict[str, int]:
        """Return what is held after messages, and I/O that faults delay, have had their time."""
        await self.clock.sleep(MESSAGES_S)
        held = self.rig.at_rest()
        patience_s = sum(rule.delay_s for rule in self.faults.rules)
        if held and patience_s:
            await self.clock.sleep(patience_s)
            held = self.rig.at_rest()
        return held

    def _start(self, start_s: float) -> None:
        route = _Router(len(self.workers), self.workload.has_sessions)
        if not self.spec.closed_loop:
            self._serving.spawn(self._open_loop(start_s, route))
            return
        ended: dict[int, Signal[None]] = {
            request.request_id: Signal(self.clock) for request in self.workload.requests
        }
        for request in self.workload.requests:
            self._serving.spawn(self._closed(request, ended, start_s, route(request)))

    async def _open_loop(self, start_s: float, route: _Router) -> None:
        for request in self.workload.requests:
            await self.clock.sleep_until(start_s + request.arrival_s / self.spec.speed)
            self._serving.spawn(self._serve(request, route(request)))

    async def _closed(
        self, request: Request, ended: dict[int, Signal[None]], start_s: float, worker: int
    ) -> None:
        if request.after is None:
            await self.clock.sleep_until(start_s + request.arrival_s / self.spec.speed)
        else:
            await ended[request.after].wait()
            await self.clock.sleep(min(request.think_s, self.spec.think_cap_s) / self.spec.speed)
        try:
            await self._serve(request, worker)
        finally:
            ended[request.request_id].set(None)

    async def _serve(self, request: Request, worker: int) -> None:
        self._turns[request.request_id] = request.turn
        record = await self.workers[worker].serve(request)
        self.records.append(record)
        if self.progress is not None:
            self.progress(len(self.records), len(self.workload.requests))

    def _figures(self, duration_s: float, held: dict[str, int]) -> Figures:
        records, blocks, scale = self.records, self.blocks, self.spec.rig.scale
        records.sort(key=lambda record: record.request_id)
        counters = [connector.counters for connector in self.rig.connectors]
        stores = [worker.stores for worker in self.workers]
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
            wrong_blocks=sum(worker.wrong_blocks for worker in self.workers),
            mismatched_blocks=sum(c.mismatched for c in counters),
            timed_out_blocks=sum(c.timed_out for c in counters),
            failed_loads=sum(c.failed for c in counters),
            evicted_blocks=self.rig.master.counters.evicted,
            read_bytes=int(sum(blocks.nbytes) * scale),
            block_read=Spread.of(blocks.latencies_s()),
            block_due=Spread.of(blocks.due_latencies_s()),
            block_late=Spread.of(blocks.latencies_s() - blocks.due_latencies_s()),
            ttft=Spread.of([r.ttft_s for r in records]),
            turns=turn_figures(records, blocks, scale=scale, max_turns=self.spec.max_turns),
            timers_per_block=self.clock.timers / moved,
            callbacks_per_block=self.clock.callbacks / moved,
            injected=dict(self.faults.injected),
            held_at_rest=held,
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


def part_within(workload: Workload, ends_s: dict[int, float], budget_s: float) -> Workload:
    """Return the requests of ``workload`` that are over within ``budget_s`` of a run.

    A request is kept with all that it waits for in a closed loop; at least the first one is kept.
    """
    kept = [
        request
        for request in workload.requests
        if ends_s.get(request.request_id, float("inf")) <= budget_s
    ] or list(workload.requests[:1])
    place = {request.request_id: number for number, request in enumerate(kept)}
    return dataclasses.replace(
        workload,
        requests=tuple(
            dataclasses.replace(
                request,
                request_id=number,
                after=None if request.after is None else place.get(request.after),
            )
            for number, request in enumerate(kept)
        ),
    )
