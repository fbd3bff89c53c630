"""Replays a workload on TraCT: the workers of ``worker.py`` on the rig of ``tract_rig.py``.

Every worker serves any request, as the nodes of a pod do that prefill and decode for each other:
what one stored the others read. A workload with sessions is a closed loop.

Units: s, blocks. Left out: what ``replay.py`` has for HyMCache beside it (figures by turn, faults).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cxlbench.emu.clock import Clock, JobSet, VirtualClock, WallClock
from cxlbench.emu.sync import Signal
from cxlbench.harness.content import BlockContent
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.metrics import BlockLog
from cxlbench.harness.requests import Request, Workload
from cxlbench.harness.tract_rig import TractRig, TractRigSpec
from cxlbench.harness.worker import RequestRecord, StoreCounters, Worker
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.identity import Namespace, trace_keys


@dataclass(frozen=True, slots=True)
class TractReplay:
    """A finished replay; times in s, sizes in blocks."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    stores: StoreCounters
    wrong_blocks: int
    mismatched_blocks: int
    held_at_rest: dict[str, int]
    blocks: BlockLog = field(repr=False, compare=False)

    @property
    def tier_blocks(self) -> int:
        """Blocks that came from the shared memory."""
        return sum(record.loaded for record in self.records)

    @property
    def hit_rate(self) -> float:
        """Blocks not computed again, of those that had been computed before."""
        seen = sum(record.seen for record in self.records)
        used = sum(record.matched + record.loaded for record in self.records)
        return used / seen if seen else 0.0

    @property
    def correct(self) -> bool:
        """Whether no wrong byte was delivered and nothing is held at rest."""
        return not self.wrong_blocks and not self.held_at_rest


def replay_on_tract(
    workload: Workload,
    spec: TractRigSpec,
    engine: EngineModel,
    *,
    gpu_blocks: int,
    max_running: int = 64,
    wall: bool = False,
    seed: int = 0,
) -> TractReplay:
    """Run ``workload`` on TraCT, requests to the workers in turn; a closed loop if it has sessions.

    With tags in virtual time; with real bytes in real time if ``wall``. Raises what ``TractRig``
    does.
    """
    clock: Clock = WallClock() if wall else VirtualClock()
    with clock:
        run = _Run(
            clock, workload, spec, engine, gpu_blocks=gpu_blocks, max_running=max_running, seed=seed
        )
        return clock.run(run.all())


class _Run:
    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        spec: TractRigSpec,
        engine: EngineModel,
        *,
        gpu_blocks: int,
        max_running: int,
        seed: int,
    ) -> None:
        self.clock = clock
        self.workload = workload
        self.blocks = BlockLog()
        self.records: list[RequestRecord] = []
        self._turns = {request.request_id: request.turn for request in workload.requests}
        phantom = clock.kind == "virtual"
        self.rig = TractRig(clock, spec, on_block=self._note_block)
        content = BlockContent(self.rig.block_bytes, phantom=phantom, seed=seed)
        shape = engine.shape
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
                engine,
                content,
                number=number,
                gpu_blocks=gpu_blocks,
                max_running=max_running,
                keys_of=keys_of,
                block_tokens=workload.block_tokens,
                computed=computed,
            )
            for number, connector in enumerate(self.rig.connectors)
        ]

    def _note_block(self, worker: int, times: BlockTimes) -> None:
        self.blocks.add(self._turns[times.request_id], times)

    async def all(self) -> TractReplay:
        """Serve every request, settle, close, and summarize."""
        start_s = self.clock.now()
        self.rig.start()
        serving = JobSet(self.clock)
        ended: list[Signal[None]] = [Signal(self.clock) for _ in self.workload.requests]
        for request in self.workload.requests:
            serving.spawn(self._serve(request, start_s, ended))
        await serving.join()
        end_s = self.clock.now()
        for worker in self.workers:
            await worker.settle()
        await self.rig.close()
        held = self.rig.at_rest()
        stores = StoreCounters()
        for worker in self.workers:
            for name in ("stored", "skipped", "recovered", "failed"):
                setattr(stores, name, getattr(stores, name) + getattr(worker.stores, name))
        self.records.sort(key=lambda record: record.request_id)
        return TractReplay(
            records=tuple(self.records),
            duration_s=end_s - start_s,
            stores=stores,
            wrong_blocks=sum(worker.wrong_blocks for worker in self.workers),
            mismatched_blocks=sum(c.counters.mismatched for c in self.rig.connectors),
            held_at_rest=held,
            blocks=self.blocks,
        )

    async def _serve(self, request: Request, start_s: float, ended: Sequence[Signal[None]]) -> None:
        if request.after is None:
            await self.clock.sleep_until(start_s + request.arrival_s)
        else:
            await ended[request.after].wait()
            await self.clock.sleep(request.think_s)
        try:
            worker = self.workers[request.request_id % len(self.workers)]
            self.records.append(await worker.serve(request))
        finally:
            ended[request.request_id].set(None)
