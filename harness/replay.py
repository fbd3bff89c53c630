"""Replays a workload on a tier, under either clock, and measures it.

How requests come, and what a run came to, is in ``serving.py``. The same text runs with real bytes
in real time, and with tags in virtual time.

Units: s, blocks; sizes at full scale in the specs.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from dataclasses import dataclass, field
from pathlib import Path

from cxlbench.emu.clock import Clock, VirtualClock, WallClock
from cxlbench.emu.faults import FaultPlan
from cxlbench.harness.content import BlockContent
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.fidelity import Fidelity, measure
from cxlbench.harness.io_jobs import counters_of
from cxlbench.harness.metrics import BlockLog, Figures
from cxlbench.harness.requests import Workload
from cxlbench.harness.rig import Rig, RigSpec, scaled_block_bytes
from cxlbench.harness.rig_checks import check_rig
from cxlbench.harness.serving import Engine, Pace, Progress, Serving, TierCounts, summarize
from cxlbench.harness.worker import RequestRecord

MESSAGES_S = 0.01
"""Long enough for one-way messages to arrive, and for no deadline to hide what was not returned."""


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
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed must be positive and finite, got {self.speed}")
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.gpu_blocks < 0:
            raise ValueError(f"gpu_blocks must not be negative, got {self.gpu_blocks}")
        if not 0 <= self.think_cap_s < math.inf:
            raise ValueError(f"think_cap_s must be finite and not negative, got {self.think_cap_s}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")

    @property
    def pace(self) -> Pace:
        """When requests come."""
        return Pace(self.closed_loop, self.think_cap_s, self.speed)

    @property
    def workers_engine(self) -> Engine:
        """The engine of each worker."""
        return Engine(self.engine, self.gpu_blocks, self.max_running)


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
    """Run ``workload``; real bytes (in ``folder``, else in RAM) in real time if ``wall``.

    Raises:
        RigSpecError, BlockTooLargeError, ScaleError: no rig can be built by ``spec``.
        HostLimitError: this host has no such folder or memory.
    """
    check_rig(spec.rig)
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
        self.spec = spec
        self.faults = faults or FaultPlan.none()
        phantom = clock.kind == "virtual"
        content = BlockContent(scaled_block_bytes(spec.rig), phantom=phantom, seed=spec.rig.seed)
        self.serving = Serving(
            clock,
            workload,
            engine=spec.workers_engine,
            pace=spec.pace,
            content=content,
            workers=spec.rig.workers,
            progress=progress,
        )
        self.rig = Rig(
            clock,
            spec.rig,
            phantom=phantom,
            folder=folder,
            faults=self.faults,
            on_block=lambda _, times: self.serving.note_block(times),
        )
        for number, connector in enumerate(self.rig.connectors):
            self.serving.add_worker(number, connector)

    async def all(self) -> ReplayResult:
        """Serve every request, settle, close, and summarize."""
        clock, serving = self.clock, self.serving
        start_s = clock.now()
        try:
            serving.start(start_s)
            await serving.join()
            end_s = clock.now()
            await serving.settle()
            await self.rig.quiesce()
            held = await self._held()
        except BaseException:
            await serving.cancel()
            # What was cut off has released what it held; this task's own time stands still.
            await clock.sleep_until(clock.real() + MESSAGES_S)
            raise
        finally:
            await self.rig.close()
        fidelity = measure(clock, self.rig.pipes) if clock.kind == "wall" else None
        outcome = serving.collect([connector.counters for connector in self.rig.connectors])
        figures = summarize(
            outcome,
            self._counts(held),
            duration_s=end_s - start_s,
            scale=self.spec.rig.scale,
            max_turns=self.spec.max_turns,
        )
        return ReplayResult(figures, tuple(outcome.records), fidelity, outcome.blocks)

    async def _held(self) -> dict[str, int]:
        """Return what is held after messages, and I/O that faults delay, have had their time."""
        await self.clock.sleep(MESSAGES_S)
        held = self.rig.at_rest()
        patience_s = sum(rule.delay_s for rule in self.faults.rules)
        if held and patience_s:
            await self.clock.sleep(patience_s)
            held = self.rig.at_rest()
        return held

    def _counts(self, held: dict[str, int]) -> TierCounts:
        devices = [counters_of(d) for node in self.rig.nodes.values() for d in node.devices]
        # Also what the plan holds and never happened: nobody may take silence for survival.
        injected = {f"{rule.point} {rule.kind}": 0 for rule in self.faults.rules}
        return TierCounts(
            evicted=self.rig.master.counters.evicted,
            lost=sum(counts.get("lost", 0) for counts in devices),
            failed_writes=sum(
                counts.get(name, 0)
                for counts in devices
                for name in ("flush_failed", "write_back_failed")
            ),
            injected=injected | self.faults.injected,
            held=held,
        )


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
