"""How blocks come to a GPU from a tier that is a model; ``plain_stores.py`` is the way back.

A *load* fetches its blocks group by group. A group has its staging before it is fetched, and the
next one is fetched while it is copied to the GPU. A load ends when its last group is copied, when
it is released, or at its timeout; what is on its way then still moves, and is thrown away.

Units: bytes, s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Budget, Signal
from cxlbench.harness.tiers.plain_work import Asked, Payload, asked_of, checked, put_payload
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy

if TYPE_CHECKING:
    from cxlbench.harness.tiers.plain import PlainTier


class Load:
    """A load under way. ``over`` is set when its ticket is to end."""

    __slots__ = ("alarm", "asked", "buffers", "keys", "over", "results")

    def __init__(
        self, clock: Clock, asked: Asked, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> None:
        self.asked = asked
        self.keys = keys
        self.buffers = buffers
        self.results = [KeyResult.CANCELLED] * len(keys)
        self.over: Signal[None] = Signal(clock)
        self.alarm: asyncio.Handle | None = None

    def end(self) -> None:
        """End the ticket with the results as they are."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.over.set(None)


class LoadPath:
    """The loads of one server."""

    def __init__(
        self,
        tier: PlainTier,
        jobs: JobSet,
        staging: Budget | None,
        copy: GpuCopy,
        idle: Callable[[Asked], None],
    ) -> None:
        """``idle`` is called when a load of a request has nothing on its way any more."""
        self._tier = tier
        self._clock: Clock = tier.clock
        self._how = tier.handling
        self._jobs = jobs
        self._staging = staging
        self._copy = copy
        self._idle = idle

    async def run(self, load: Load) -> None:
        """Serve a load until its ticket is to end."""
        asked, wanted = load.asked, []
        for i, (key, buffer) in enumerate(zip(load.keys, load.buffers, strict=True)):
            if key in asked.places and buffer.nbytes == asked.size_bytes:
                wanted.append(i)
            else:
                load.results[i] = KeyResult.MISS
        if wanted and not load.over.is_set():
            self._arm(load)
            asked.working += 1
            self._jobs.spawn(self._pump(load, wanted))
            await load.over.wait()

    def _arm(self, load: Load) -> None:
        if load.alarm is not None:
            load.alarm.cancel()
        end_s = self._clock.now() + self._how.load_timeout_s
        load.alarm = self._clock.call_at(end_s, self._expire, load)

    def _expire(self, load: Load) -> None:
        results, counted = load.results, self._tier.counted
        for i, result in enumerate(results):
            if result is KeyResult.CANCELLED or (self._how.loses_all and result is KeyResult.HIT):
                results[i] = KeyResult.TIMEOUT
                counted["timed_out_blocks"] += 1
        counted["timed_out_loads"] += 1
        load.end()

    async def _pump(self, load: Load, wanted: list[int]) -> None:
        asked, how, group = load.asked, self._how, 0
        copies: list[Job[None]] = []
        try:
            await asked_of(self._tier, "prepare", self._tier.prepare(asked, load.keys))
            group = batch = how.blocks_at_once(asked.size_bytes)
            if how.whole_loads:
                batch = len(wanted)
                if self._staging is not None:
                    batch = min(batch, self._staging.capacity // asked.size_bytes)
            for begin in range(0, len(wanted), batch):
                if load.over.is_set():
                    break
                await self._fetch_batch(load, wanted[begin : begin + batch], group, copies)
            for copy in copies:
                await copy
        finally:
            load.end()
            asked.working -= 1
            self._idle(asked)

    async def _fetch_batch(
        self, load: Load, batch: list[int], group: int, copies: list[Job[None]]
    ) -> None:
        """Take staging for a batch and fetch its groups; it goes back with their copies."""
        asked, how = load.asked, self._how
        staged = len(batch) * asked.size_bytes if self._staging is not None else 0
        await self._take(staged)
        try:
            for at in range(0, len(batch), group):
                if load.over.is_set():
                    break
                if how.timeout_per_group:
                    self._arm(load)
                chosen = batch[at : at + group]
                begin_s = self._clock.now()
                fetching = self._tier.fetch(asked, [load.keys[i] for i in chosen])
                payloads = await asked_of(self._tier, "fetch", fetching)
                checked(self._tier, "fetch", payloads, len(chosen), None)
                passed_on = 0 if how.whole_loads else staged
                staged -= passed_on
                deliver = self._deliver(load, chosen, payloads, begin_s, passed_on)
                copies.append(self._jobs.spawn(deliver))
            if how.whole_loads:
                for copy in copies:
                    await copy
        finally:
            self._give(staged)

    async def _deliver(
        self,
        load: Load,
        chosen: list[int],
        payloads: Sequence[Payload | KeyResult],
        begin_s: float,
        staged: int,
    ) -> None:
        """Copy a group to the GPU, unless the load is over."""
        asked, results, on_block = load.asked, load.results, self._tier.site.on_block
        try:
            hits = sum([not isinstance(payload, KeyResult) for payload in payloads])
            if hits and not load.over.is_set():
                await self._copy.copy(hits * asked.size_bytes)
            if load.over.is_set():
                return
            now = self._clock.now()
            for i, payload in zip(chosen, payloads, strict=True):
                if isinstance(payload, KeyResult):
                    results[i] = payload
                    continue
                put_payload(load.buffers[i], payload)
                results[i] = KeyResult.HIT
                if on_block is not None:
                    size = asked.size_bytes
                    on_block(BlockTimes(asked.request_id, begin_s, now, now, size))
            self._tier.counted["loaded_blocks"] += hits
            self._tier.counted["lost_blocks"] += len(chosen) - hits
        finally:
            self._give(staged)

    async def _take(self, nbytes: int) -> None:
        if self._staging is not None:
            await self._staging.take(nbytes)

    def _give(self, nbytes: int) -> None:
        if self._staging is not None and nbytes:
            self._staging.give(nbytes)
