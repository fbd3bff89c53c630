"""How blocks go from a GPU to a tier that is a model.

A *store* copies its blocks group by group into staging and lets the tier keep them, heads first.
Where it does not get staging, the rest of it is refused: at once (NO_SPACE) or after the time that
it may wait (TIMEOUT). It ends when the tier has kept all of them; with puts in the background, when
they are in host memory. Their staging is held until they have been put.

Units: bytes, s, blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.sync import Budget
from cxlbench.harness.tiers.plain_work import Offer, asked_of, checked
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy

if TYPE_CHECKING:
    from cxlbench.harness.tiers.plain import PlainTier

KEPT = (KeyResult.STORED, KeyResult.EXISTS)


class StorePath:
    """The stores of one server. When ``ending`` is set, they stop after the group they are at."""

    def __init__(
        self, tier: PlainTier, jobs: JobSet, staging: Budget | None, copy: GpuCopy
    ) -> None:
        self.ending = False
        self.under_way = 0
        """Blocks that are being put in the background."""
        self._tier = tier
        self._clock: Clock = tier.clock
        self._how = tier.handling
        self._jobs = jobs
        self._staging = staging
        self._copy = copy

    async def run(self, offer: Offer, results: list[KeyResult]) -> None:
        """Store blocks, heads first; ``results`` has one for each at the end."""
        keeps: list[Job[None]] = []
        for begin, end in self._groups(offer):
            if self.ending:
                break
            part = offer.part(begin, end)
            todo = []
            reserved = await asked_of(self._tier, "reserve", self._tier.reserve(part))
            checked(self._tier, "reserve", reserved, len(part.keys), None)
            for i, result in enumerate(reserved, begin):
                if result is None:
                    todo.append(i)
                else:
                    results[i] = result
            full = self._how.ends_when_full and KeyResult.NO_SPACE in results[begin:end]
            chosen = await self._take(offer, todo)
            left = todo[len(chosen) :]
            if left:
                self._tier.abandon(part, [offer.keys[i] for i in left])
            if chosen:
                await self._copy_out(part, [offer.keys[i] for i in chosen])
                if self._how.puts_in_background:
                    self._put(offer, part, chosen, results)
                else:
                    keeps.append(self._jobs.spawn(self._keep(offer, part, chosen, results)))
            if full or left:
                waited = self._how.store_wait_s and not full
                why = KeyResult.TIMEOUT if waited else KeyResult.NO_SPACE
                for i in [*left, *range(end, len(results))]:
                    results[i] = why
                break
        for keep in keeps:
            await keep
        counted = self._tier.counted
        counted["stored_blocks"] += results.count(KeyResult.STORED)
        counted["refused_blocks"] += results.count(KeyResult.NO_SPACE)
        counted["failed_stores"] += results.count(KeyResult.TIMEOUT)
        counted["failed_stores"] += results.count(KeyResult.ERROR)

    def _groups(self, offer: Offer) -> Iterator[tuple[int, int]]:
        """Yield groups that begin at whole multiples of their length in the chain."""
        begin, count = 0, len(offer.keys)
        if not count:
            return
        group = self._how.blocks_at_once(offer.size_bytes)
        while begin < count:
            end = min(count, begin + group - (offer.position + begin) % group)
            yield begin, end
            begin = end

    async def _take(self, offer: Offer, todo: list[int]) -> list[int]:
        """Take staging for blocks of a group; return those, whole chunks, that have it in time."""
        staging, wait_s, size = self._staging, self._how.store_wait_s, offer.size_bytes
        if staging is None or not todo or staging.try_take(len(todo) * size):
            return todo
        if not wait_s:
            fit = min(len(todo), staging.free // size)
            chunk = self._how.chunk_blocks
            while fit and (offer.position + todo[fit - 1] + 1) % chunk:
                fit -= 1
            return todo[:fit] if fit and staging.try_take(fit * size) else []
        waiting = self._jobs.spawn(staging.take(len(todo) * size))
        alarm = self._clock.call_at(self._clock.now() + wait_s, waiting.cancel)
        try:
            await waiting.ended()
        finally:
            alarm.cancel()
        return [] if waiting.task.cancelled() else todo

    async def _copy_out(self, part: Offer, keys: Sequence[bytes]) -> None:
        try:
            await self._copy.copy(len(keys) * part.size_bytes)
        except BaseException:
            self._tier.abandon(part, keys)
            self._give(len(keys) * part.size_bytes)
            raise

    def _put(self, offer: Offer, part: Offer, chosen: list[int], results: list[KeyResult]) -> None:
        """Begin to put blocks that are in host memory: the engine need not wait for the rest."""
        self._tier.take_in(part, [offer.keys[i] for i in chosen])
        for i in chosen:
            results[i] = KeyResult.STORED
        outcome = [KeyResult.CANCELLED] * len(results)
        self.under_way += len(chosen)
        put = self._jobs.spawn(self._keep(offer, part, chosen, outcome))
        put.add_done_callback(lambda _: self._count_put([outcome[i] for i in chosen]))

    def _count_put(self, outcome: list[KeyResult]) -> None:
        counted = self._tier.counted
        self.under_way -= len(outcome)
        counted["puts"] += len(outcome)
        counted["failed_puts"] += sum(result not in KEPT for result in outcome)

    async def _keep(
        self, offer: Offer, part: Offer, chosen: list[int], results: list[KeyResult]
    ) -> None:
        keys = [offer.keys[i] for i in chosen]
        kept = False
        try:
            payloads = [offer.payloads[i] for i in chosen]
            done = await asked_of(self._tier, "keep", self._tier.keep(part, keys, payloads))
            checked(self._tier, "keep", done, len(chosen), KeyResult)
            kept = True
            for i, result in zip(chosen, done, strict=True):
                results[i] = result
        finally:
            if not kept:
                self._tier.abandon(part, keys)
            self._give(len(keys) * offer.size_bytes)

    def _give(self, nbytes: int) -> None:
        if self._staging is not None:
            self._staging.give(nbytes)
