"""Runs a workload on a cluster with a tier in virtual time, and checks the books at the end.

``simulate`` is what experiments call: it builds clock, tier and cluster, drives the requests, waits
until everything has come to rest, and returns figures with the laws that must hold of every run:
requests, tokens, blocks and bytes are conserved, nothing is busy for longer than the run, Little's
law, nothing held, no wrong block.

Units: s, tokens, blocks, bytes at full size.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cxlbench.devices.profile import load_as
from cxlbench.emu.clock import Clock, DeadlockError, VirtualClock
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.content import BlockContent
from cxlbench.harness.metrics import Spread
from cxlbench.harness.requests import Request, Workload
from cxlbench.harness.serve.cluster import Cluster, ClusterSpec
from cxlbench.harness.serve.conservation import Law, laws_of
from cxlbench.harness.serve.drive import Drive, drive
from cxlbench.harness.serve.served import Served
from cxlbench.harness.tiers.plain_work import TierFaultError, is_own
from cxlbench.harness.tiers.tier import ProfileSource, Tier, TierMaker, TierSite
from cxlbench.harness.worker import StoreCounters
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.identity import Namespace, trace_keys

MESSAGES_S = 0.01
"""Long enough for the last one-way messages to arrive."""

STUCK_AFTER_S = 24 * 3600.0
"""A user's tier with which no request gets on for so long will never answer."""


@dataclass(frozen=True, slots=True)
class TurnServed:
    """One turn of the conversations."""

    turn: int
    requests: int
    ttft: Spread
    e2e: Spread
    seen_blocks: int
    gpu_blocks: int
    tier_blocks: int
    span_s: float
    """From the first arrival of the turn to its last end."""

    @property
    def hit_rate(self) -> float:
        """Blocks not computed again, of those that had been computed before."""
        return (self.gpu_blocks + self.tier_blocks) / max(self.seen_blocks, 1)

    @property
    def requests_per_s(self) -> float:
        """Requests of the turn over its span."""
        return self.requests / self.span_s if self.span_s else 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """A finished run."""

    tier: str
    served: tuple[Served, ...]
    turns: tuple[TurnServed, ...]
    duration_s: float
    ttft: Spread
    e2e: Spread
    token_gap: Spread
    stores: StoreCounters
    counters: Mapping[str, float]
    """What the tier counted."""
    gpu_busy: Mapping[str, float]
    """Share of the run in which each server computed."""
    pipe_busy: Mapping[str, float]
    """Share of the run in which each pipe moved bytes."""
    pipe_bytes: Mapping[str, int]
    laws: tuple[Law, ...]
    complete: bool
    timers: int
    callbacks: int
    blocks: Sequence[BlockTimes] = field(repr=False, default=())

    @property
    def requests_per_s(self) -> float:
        """Throughput, requests/s."""
        return len(self.served) / self.duration_s if self.duration_s else 0.0

    @property
    def hit_rate(self) -> float:
        """Blocks not computed again, of those that had been computed before."""
        seen = sum(s.seen for s in self.served)
        return sum(s.matched + s.loaded for s in self.served) / max(seen, 1)

    @property
    def tier_hit_rate(self) -> float:
        """Of the blocks seen before that the GPU did not have, those that the tier delivered."""
        missing = sum(s.seen - min(s.matched, s.seen) for s in self.served)
        return sum(s.loaded for s in self.served) / max(missing, 1)

    @property
    def skipped_share(self) -> float:
        """Stores refused for want of space, of all stores that were tried."""
        stores = self.stores
        tried = stores.stored + stores.skipped + stores.failed
        return stores.skipped / tried if tried else 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """The mean time to the first token, broken down."""
        if not self.served:
            return {}
        parts: dict[str, float] = {}
        for record in self.served:
            for name, seconds in record.parts_s.items():
                parts[name] = parts.get(name, 0.0) + seconds
        return {name: total / len(self.served) for name, total in parts.items()}


def simulate(
    workload: Workload,
    spec: ClusterSpec,
    tier: TierMaker,
    how: Drive,
    *,
    profile: ProfileSource = load_as,
    options: Mapping[str, object] | None = None,
    seed: int = 0,
    log_blocks: bool = False,
    clock: Clock | None = None,
    content: BlockContent | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Simulated:
    """Serve ``workload`` on a cluster with a tier, in virtual time unless a clock is given.

    ``content`` makes the blocks where they are not tags of the full size: real bytes, at the scale
    of the tier that ``tier`` makes.

    Raises:
        ModelDoesNotFitError, PromptTooLongError: the GPUs are too small.
        TierOptionError: the tier has no such setting.
        WorkloadError: the workload has no block ids.
        TierFaultError: a user's tier raised, answered what cannot be, or never answers.
    """
    workload.require_ids("a run with a KV cache")
    collecting = gc.isenabled()
    gc.disable()  # reference counts free nearly everything; collections would cost a third more
    try:
        with clock or VirtualClock() as running:
            content = content or BlockContent(spec.block_bytes // 8 * 8, phantom=True, seed=seed)
            run = _Run(
                running, workload, spec, tier, profile, options or {}, seed, log_blocks, content
            )
            try:
                return running.run(run.all(how, progress, stopping))
            except DeadlockError as error:
                if is_own(run.tier):
                    raise run.stuck(str(error)) from error
                raise
    finally:
        if collecting:
            gc.enable()


class _Run:
    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        spec: ClusterSpec,
        maker: TierMaker,
        profile: ProfileSource,
        options: Mapping[str, object],
        seed: int,
        log_blocks: bool,
        content: BlockContent,
    ) -> None:
        self.clock = clock
        self.workload = workload
        self.blocks: list[BlockTimes] = []
        self._alarm: asyncio.Handle | None = None
        self._gap_s = 0.0
        site = TierSite(
            prefill_servers=spec.prefill_servers,
            decode_servers=spec.decode_servers,
            block_bytes=spec.block_bytes,
            block_tokens=spec.block_tokens,
            profile=profile,
            options=options,
            seed=seed,
            on_block=self.blocks.append if log_blocks else None,
        )
        self.tier: Tier = maker(clock, site)
        shape = spec.roofline.shape
        self._space = Namespace(
            model=shape.name,
            weights_revision="0",
            dtype=f"{shape.dtype_bytes}B",
            kv_layout="block",
            block_tokens=spec.block_tokens,
        )
        self.cluster = Cluster(clock, spec, self.tier, content, self._keys_of)

    def _keys_of(self, request: Request) -> Sequence[bytes]:
        return trace_keys(self._space, request.block_ids)

    async def all(
        self,
        how: Drive,
        progress: Callable[[int, int], None],
        stopping: Callable[[], bool],
    ) -> Simulated:
        clock, cluster, tier = self.clock, self.cluster, self.tier
        begin_s = clock.now()
        if is_own(tier):
            self._gap_s = _longest_gap_s(self.workload) / how.speed
            self._watch(before=self._steps())
        try:
            await tier.start()
            complete = await drive(
                clock, cluster, self.workload, how, progress=progress, stopping=stopping
            )
            end_s = clock.now()
            await cluster.settle()
            await tier.quiesce()
            await clock.sleep(MESSAGES_S)
            held = tier.at_rest() | cluster.at_rest()
        except BaseException:
            await cluster.cancel()
            await clock.sleep(MESSAGES_S)
            raise
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            await tier.close()
        settled_s = clock.now()
        # The longest a pipe can have been busy: stores and flushes go on behind the last answer.
        idle_s = max([settled_s, *(pipe.idle_at_s for pipe in self._pipes())])
        return self._summary(end_s - begin_s, idle_s - begin_s, held, complete=complete)

    def _watch(self, before: int, idle_s: float = 0.0) -> None:
        """End the run when a user's tier keeps it from getting on, busy as it may be itself."""
        if idle_s >= STUCK_AFTER_S + self._gap_s:
            self.clock.fail(self.stuck(f"nothing was computed for {idle_s / 3600:.0f} h"))
            return
        every_s = STUCK_AFTER_S / 24

        def look() -> None:
            now = self._steps()
            self._watch(now, idle_s + every_s if now == before else 0.0)

        self._alarm = self.clock.call_at(self.clock.now() + every_s, look)

    def _steps(self) -> int:
        """Return a count that grows as long as requests get on."""
        servers = [*self.cluster.prefill, *self.cluster.decode]
        tokens = sum(s.counters.prompt_tokens + s.counters.answer_tokens for s in servers)
        return tokens + len(self.cluster.served)

    def stuck(self, why: str) -> TierFaultError:
        """Return what to say of a user's tier that never answers: what is open, and where."""
        held = ", ".join(f"{name} {count}" for name, count in self.tier.at_rest().items())
        return TierFaultError(
            f"tier {self.tier.name!r} never answers: {len(self.cluster.served)} of "
            f"{len(self.workload.requests)} requests were served when nothing went on any more; "
            f"it holds {held or 'nothing'} ({why})"
        )

    def _pipes(self) -> list[Pipe]:
        handover = self.cluster.handover
        return [*self.tier.pipes, *(handover.pipes if handover is not None else ())]

    def _summary(
        self, duration_s: float, idle_s: float, held: dict[str, int], *, complete: bool
    ) -> Simulated:
        cluster, tier = self.cluster, self.tier
        served = sorted(cluster.served, key=lambda record: record.request_id)
        servers = [*cluster.prefill, *cluster.decode]
        pipes = self._pipes()
        gaps = np.concatenate(
            [np.asarray(s.counters.token_gaps_s, dtype=float) for s in servers] or [np.empty(0)]
        )
        return Simulated(
            tier=tier.name,
            served=tuple(served),
            turns=_turns(served),
            duration_s=duration_s,
            ttft=Spread.of([record.ttft_s for record in served]),
            e2e=Spread.of([record.e2e_s for record in served]),
            token_gap=Spread.of(gaps),
            stores=cluster.stores,
            counters=dict(tier.counters()),
            gpu_busy={s.name: s.counters.busy_s / duration_s for s in servers if duration_s},
            pipe_busy={p.name: p.busy_s / idle_s for p in pipes if idle_s},
            pipe_bytes={p.name: p.moved_bytes for p in pipes},
            laws=laws_of(cluster, self.workload, pipes, idle_s, held, complete),
            complete=complete,
            timers=self.clock.timers,
            callbacks=self.clock.callbacks,
            blocks=self.blocks,
        )


def _longest_gap_s(workload: Workload) -> float:
    """Return the longest time for which a workload itself lets nothing happen."""
    arrivals = [0.0, *sorted(request.arrival_s for request in workload.requests)]
    gaps = [later - before for before, later in itertools.pairwise(arrivals)]
    return max([*gaps, *(request.think_s for request in workload.requests)], default=0.0)


def _turns(served: Sequence[Served]) -> tuple[TurnServed, ...]:
    by_turn: dict[int, list[Served]] = {}
    for record in served:
        by_turn.setdefault(record.turn, []).append(record)
    return tuple(
        TurnServed(
            turn,
            len(mine),
            Spread.of([r.ttft_s for r in mine]),
            Spread.of([r.e2e_s for r in mine]),
            sum(r.seen for r in mine),
            sum(r.matched for r in mine),
            sum(r.loaded for r in mine),
            max(r.end_s for r in mine) - min(r.arrival_s for r in mine),
        )
        for turn, mine in sorted(by_turn.items())
    )
