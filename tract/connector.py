"""TraCT's KV connector: a worker on one node of the pod, under the contract in ``kv``.

There is no server: the worker itself looks into the shared index and moves blocks between its GPU
and the shared memory (TraCT, § prefix cache, § serving). What the contract asks for:

* a lookup pins the leading blocks that are READY; the pins are given back on ``release``, or after
  a load that timed out, or when the lease is over;
* a load copies pinned blocks and checks each against the checksum in its entry; what does not
  verify is a miss, and is removed once nobody pins it;
* a store reserves, copies and publishes (see ``storing``).

Programs are never cut off: a wait for a lock cannot be withdrawn. The ticket of a load that is
released or late ends when the copies under way have ended, so that nobody writes into its buffers
afterwards.

Units: bytes, s. Left out: waiting for a block that another node is just storing (it is a miss).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.emu.pod_ops import WORD
from cxlbench.kv.connector import BlockTimes, Completion, Ticket, Work
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy, TicketDesk, check_load, check_lookup, check_store
from cxlbench.tract import chains, prefix_cache
from cxlbench.tract.copying import Copier, ProgramRunner
from cxlbench.tract.counters import TractCounters
from cxlbench.tract.layout import Layout
from cxlbench.tract.places import (
    BLOCK_AT,
    CHECKSUM,
    LENGTH_BYTES,
    numbers_of,
    places_for,
)
from cxlbench.tract.storing import StorePath
from cxlbench.tract.words import key_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

DEADLINE_S = 10.0
WINDOW_BYTES = 128 << 20


@dataclass(eq=False, slots=True)
class _Request:
    request_id: int
    chain: tuple[bytes, ...]
    matched: int
    size_bytes: int
    places: Words
    found: dict[bytes, int] = field(default_factory=dict)
    """The row in ``places`` of each block that may be loaded."""
    pinned: int = 0
    looked_up: bool = False
    released: bool = False
    expired: bool = False
    """Its pins are to be given back although it is open."""
    lease: asyncio.Handle | None = None
    loads: int = 0
    bad: list[bytes] = field(default_factory=list)
    """Blocks that did not verify."""

    @property
    def over(self) -> bool:
        """Whether nothing may be begun any more that needs its pins."""
        return self.released or self.expired


class TractConnector:
    """The pod's prefix cache as one worker sees it. Satisfies ``cxlbench.kv.connector.Connector``.

    ``node`` runs programs on the worker's node, whose manager must be running. ``gpu_copy`` paces
    copies on the GPU's side; ``window_bytes`` bounds what is copied at once. ``lease_s`` is how
    long blocks stay pinned between a lookup and its load.
    """

    def __init__(
        self,
        clock: Clock,
        node: ProgramRunner,
        layout: Layout,
        *,
        window_bytes: int = WINDOW_BYTES,
        deadline_s: float = DEADLINE_S,
        lease_s: float | None = None,
        gpu_copy: GpuCopy | None = None,
        on_block: Callable[[BlockTimes], None] | None = None,
    ) -> None:
        self.clock = clock
        self.layout = layout
        self.deadline_s = deadline_s
        self.lease_s = deadline_s + 1 if lease_s is None else lease_s
        self.counters = TractCounters()
        self.copier = Copier(clock, node, layout, window_bytes=window_bytes, gpu_copy=gpu_copy)
        self._node = node
        self._on_block = on_block
        self._requests: dict[int, _Request] = {}
        self._jobs = JobSet(clock)
        self._tickets = TicketDesk(clock, self._jobs)
        self._stores = StorePath(node, layout, self.copier, self._jobs, self.counters)
        self._pins = 0

    # -- the contract ---------------------------------------------------------------------------

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        """Start a lookup; see the contract."""
        check_lookup(self._requests, request_id, keys, matched)
        self._check_size(size_bytes)
        numbers = numbers_of(keys)
        ticket = self._tickets.open(request_id, Work.LOOKUP)
        request = _Request(request_id, tuple(keys), matched, size_bytes, places_for(len(keys)))
        self._requests[request_id] = request
        results = [KeyResult.CANCELLED] * (len(keys) - matched)
        self._tickets.run(ticket, results, self._run_lookup(request, numbers, results))
        return ticket

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a load; see the contract."""
        request = check_load(
            self._requests.get(request_id), request_id, keys, buffers, self._check_size
        )
        ticket = self._tickets.open(request_id, Work.LOAD)
        results = [KeyResult.CANCELLED] * len(keys)
        request.loads += 1
        self._tickets.run(ticket, results, self._run_load(request, keys, buffers, results))
        return ticket

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a store; see the contract."""
        check_store(keys, buffers, self._check_size)
        numbers = numbers_of(keys)
        ticket = self._tickets.open(request_id, Work.STORE)
        results = [KeyResult.CANCELLED] * len(keys)
        self._tickets.run(ticket, results, self._stores.run(numbers, buffers, results))
        return ticket

    def release(self, request_id: int) -> None:
        """Give back what a request holds; its open lookups and loads end, its stores go on."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.released = True
        if request.lease is not None:
            request.lease.cancel()
        self._unpin_if_idle(request)

    def poll(self) -> list[Completion]:
        """Return the completions since the last call; see the contract."""
        return self._tickets.poll()

    def at_rest(self) -> dict[str, int]:
        """Count what this connector holds."""
        return {
            "requests": len(self._requests),
            "tickets": len(self._tickets),
            "pins": self._pins,
            "reservations": self._stores.reserved,
            "bytes being copied": self.copier.window.used,
        }

    async def close(self) -> None:
        """Release everything, abandon stores, and wait until all work has ended.

        What has not ended after the deadline is cut off where it waits.
        """
        self._tickets.closed = self._stores.ending = True
        for request_id in list(self._requests):
            self.release(request_id)
        cut: list[Job[None]] = []
        late_s = self.clock.now() + self.deadline_s
        alarm = self.clock.call_at(
            late_s, lambda: cut.append(self.clock.spawn(self._jobs.cancel()))
        )
        await self._jobs.join()
        alarm.cancel()
        for job in cut:
            await job

    # -- tickets --------------------------------------------------------------------------------

    def _check_size(self, size_bytes: int) -> None:
        most = self.layout.chunk_bytes
        if not WORD <= size_bytes <= most or size_bytes % WORD:
            raise ValueError(
                f"blocks have from {WORD} B to the {most} B of the region's chunk, in whole words"
                f" of {WORD} B, got {size_bytes} B"
            )

    # -- lookup and pins ------------------------------------------------------------------------

    async def _run_lookup(
        self, request: _Request, numbers: Words, results: list[KeyResult]
    ) -> None:
        if len(numbers):
            request.pinned = await self._node.run(
                chains.look_up, self.layout, numbers, request.matched, request.places
            )
            self._pins += request.pinned
        request.looked_up = True
        if request.released:
            self._unpin_if_idle(request)
            return
        lengths = request.places[request.matched :, LENGTH_BYTES]
        hits = 0
        while hits < request.pinned and lengths[hits] == request.size_bytes:
            request.found[request.chain[request.matched + hits]] = request.matched + hits
            hits += 1
        self.counters.hits += hits
        results[:] = [KeyResult.HIT] * hits + [KeyResult.MISS] * (len(results) - hits)
        if request.pinned:
            end_s = self.clock.now() + self.lease_s
            request.lease = self.clock.call_at(end_s, self._expire, request)

    def _expire(self, request: _Request) -> None:
        """Take the pins of an open request back, as soon as no load uses them."""
        request.expired = True
        self._unpin_if_idle(request)

    def _unpin_if_idle(self, request: _Request) -> None:
        if not request.over or request.loads:
            return
        pinned, request.pinned = request.pinned, 0
        if pinned:
            self._jobs.spawn(self._unpin(request, pinned))

    async def _unpin(self, request: _Request, pinned: int) -> None:
        places = request.places[request.matched :]
        await self._node.run(prefix_cache.unpin_chain, self.layout, places, pinned)
        self._pins -= pinned
        for key in request.bad:
            # If another reader pins it, that one finds it bad too and removes it.
            await self._node.run(prefix_cache.delete, self.layout, *key_words(key))

    # -- load -----------------------------------------------------------------------------------

    async def _run_load(
        self,
        request: _Request,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[KeyResult],
    ) -> None:
        late_s = self.clock.now() + self.deadline_s
        copies: list[Job[None]] = []
        for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            row = request.found.get(key)
            if row is None or buffer.nbytes != request.size_bytes:
                results[i] = KeyResult.MISS
                continue
            await self.copier.take(buffer.nbytes)
            if request.over or self.clock.now() >= late_s:
                self.copier.give(buffer.nbytes)
                break
            copies.append(self._jobs.spawn(self._load_block(request, row, buffer, results, i)))
        for copy in copies:
            await copy
        if not request.released:
            self._end_load(request, results, late=self.clock.now() >= late_s)
        request.loads -= 1
        self._unpin_if_idle(request)

    def _end_load(self, request: _Request, results: list[KeyResult], *, late: bool) -> None:
        """Say why blocks were not copied. After a timeout the request has no pins any more."""
        left = [i for i, result in enumerate(results) if result is KeyResult.CANCELLED]
        for i in left:
            results[i] = KeyResult.TIMEOUT if late else KeyResult.LEASE_EXPIRED
        if left and late:
            self.counters.timed_out += len(left)
            request.expired = True

    async def _load_block(
        self, request: _Request, row: int, buffer: Buffer, results: list[KeyResult], i: int
    ) -> None:
        asked_s = self.clock.now()
        key, place = request.chain[row], request.places[row]
        at, check = int(place[BLOCK_AT]), int(place[CHECKSUM])
        right, due_s = await self.copier.read(at, buffer, key, check)
        if not right:
            results[i] = KeyResult.MISS
            self.counters.mismatched += 1
            request.bad.append(key)
            return
        results[i] = KeyResult.HIT
        self.counters.loaded += 1
        if self._on_block is not None:
            done_s = self.clock.real()
            self._on_block(BlockTimes(request.request_id, asked_s, due_s, done_s, buffer.nbytes))
