"""The connector of tiers that are models: the contract of ``kv/connector.py`` for ``plain.py``.

Loads are in ``plain_paths.py``, stores in ``plain_stores.py``. Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Budget
from cxlbench.harness.tiers.plain_paths import Load, LoadPath
from cxlbench.harness.tiers.plain_stores import StorePath
from cxlbench.harness.tiers.plain_work import Asked, Offer, asked_of, payload_of, refuse
from cxlbench.kv.connector import Completion, Ticket, Work
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy, TicketDesk, check_load, check_lookup, check_store

if TYPE_CHECKING:
    from cxlbench.harness.tiers.plain import PlainTier

CLOSE_S = 30.0
"""After which a close cuts off what has not ended."""


class PlainConnector:
    """A plain tier as one server sees it. Satisfies ``cxlbench.kv.connector.Connector``."""

    def __init__(self, tier: PlainTier, server: int, copy: GpuCopy) -> None:
        self.server = server
        self.clock: Clock = tier.clock
        self.staging: Budget | None = None
        nbytes = tier.handling.staging_bytes
        if nbytes is not None:
            self.staging = Budget(self.clock, nbytes, name=f"staging of server {server}")
        self._tier = tier
        self._requests: dict[int, Asked] = {}
        self._open_loads: dict[int, list[Load]] = {}
        self._jobs = JobSet(self.clock)
        self._tickets = TicketDesk(self.clock, self._jobs)
        self._loads = LoadPath(tier, self._jobs, self.staging, copy, self._let_go_if_idle)
        self._stores = StorePath(tier, self._jobs, self.staging, copy)

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        """Start a lookup; see the contract."""
        check_lookup(self._requests, request_id, keys, matched)
        self._check_size(size_bytes)
        ticket = self._tickets.open(request_id, Work.LOOKUP)
        asked = Asked(self.server, request_id, tuple(keys), matched, size_bytes)
        self._requests[request_id] = asked
        results = [KeyResult.CANCELLED] * (len(keys) - matched)
        self._tickets.run(ticket, results, self._look_up(asked, results))
        return ticket

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a load; see the contract."""
        asked = check_load(
            self._requests.get(request_id), request_id, keys, buffers, self._check_size
        )
        ticket = self._tickets.open(request_id, Work.LOAD)
        load = Load(self.clock, asked, keys, buffers)
        self._open_loads.setdefault(request_id, []).append(load)
        self._tickets.run(ticket, load.results, self._load(load))
        return ticket

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a store; see the contract."""
        check_store(keys, buffers, self._check_size)
        ticket = self._tickets.open(request_id, Work.STORE)
        results = [KeyResult.CANCELLED] * len(keys)
        offer = self._offer(request_id, keys, buffers)
        self._tickets.run(ticket, results, self._stores.run(offer, results))
        return ticket

    def release(self, request_id: int) -> None:
        """Give back what a request holds; its open lookups and loads end, its stores go on."""
        asked = self._requests.pop(request_id, None)
        if asked is None:
            return
        asked.released = True
        for load in self._open_loads.pop(request_id, ()):
            load.end()
        self._let_go_if_idle(asked)

    def poll(self) -> list[Completion]:
        """Return the completions since the last call; see the contract."""
        return self._tickets.poll()

    def at_rest(self) -> dict[str, int]:
        """Count what this connector holds."""
        return {
            "requests": len(self._requests),
            "tickets": len(self._tickets),
            "bytes staged": self.staging.used if self.staging is not None else 0,
            "puts": self._stores.under_way,
        }

    async def settle(self) -> None:
        """Wait until nothing is going on."""
        await self._jobs.join()

    async def close(self) -> None:
        """Release everything, abandon stores, and wait until all work has ended, puts too."""
        self._tickets.closed = self._stores.ending = True
        for request_id in list(self._requests):
            self.release(request_id)
        cut: list[Job[None]] = []
        alarm = self.clock.call_at(
            self.clock.now() + CLOSE_S, lambda: cut.append(self.clock.spawn(self._jobs.cancel()))
        )
        await self._jobs.join()
        alarm.cancel()
        for job in cut:
            await job

    def _check_size(self, size_bytes: int) -> None:
        most = self._tier.largest_block_bytes()
        if not 1 <= size_bytes <= most:
            raise ValueError(
                f"blocks of tier {self._tier.name} have from 1 B to {most} B, got {size_bytes} B"
            )

    async def _look_up(self, asked: Asked, results: list[KeyResult]) -> None:
        hits = 0
        try:
            if results and not asked.released:
                hits = await asked_of(self._tier, "find", _find(self._tier, asked))
                if not isinstance(hits, int) or not 0 <= hits <= len(results):
                    refuse(
                        self._tier,
                        "find",
                        f"returned {hits!r}: of {len(results)} blocks that were asked for, from 0 "
                        f"to {len(results)} can be found",
                    )
        finally:
            asked.looked_up = True
            if asked.released:
                self._let_go_if_idle(asked)
        if asked.released:
            return
        found = range(asked.matched, asked.matched + hits)
        asked.places = {asked.chain[place]: place for place in found}
        results[:] = [KeyResult.HIT] * hits + [KeyResult.MISS] * (len(results) - hits)

    def _let_go_if_idle(self, asked: Asked) -> None:
        if asked.released and asked.looked_up and not asked.working:
            self._tier.let_go(asked)

    async def _load(self, load: Load) -> None:
        await self._loads.run(load)
        mine = self._open_loads.get(load.asked.request_id)
        if mine is not None and load in mine:
            mine.remove(load)

    def _offer(self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> Offer:
        """Return the blocks of a store, with their position in the chain of an open request."""
        asked = self._requests.get(request_id)
        chain: Sequence[bytes] = asked.chain if asked is not None else ()
        known = bool(keys) and keys[0] in chain
        return Offer(
            self.server,
            keys,
            [payload_of(buffer) for buffer in buffers],
            buffers[0].nbytes if buffers else 0,
            chain.index(keys[0]) if known else 0,
            chain if known else (),
        )


async def _find(tier: PlainTier, asked: Asked) -> int:
    """Await a tier's answer in here, where also one that is no coroutine is told."""
    return await tier.find(asked)
