"""HyMCache's KV connector: the worker's side of the tier (§4.1), under the contract in ``kv``.

Reads: Lookup → wait for the read token → RDMA READ into the staging budget → verify against the
footer → copy to the GPU → token back. Writes: Master names the node → KV Manager grants → RDMA
WRITE → commit → register, in batches. A load that is not done after 10 s ends with what it has, and
the engine recomputes the rest. The 5 GB staging buffer is flow control: bytes are taken before an
RDMA operation and given back after the copy. It is taken *after* the read token, never before: a
holder of staging bytes must not wait for device frames.

Units: bytes, s.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.fabric import QueuePair
from cxlbench.emu.memory import PAGE_BYTES, Buffer
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget, Signal
from cxlbench.hymcache.control import ControlError, ControlPlane
from cxlbench.hymcache.kv_manager import Grant, KvManager
from cxlbench.hymcache.lookup import Found, Lookup, OpenStream
from cxlbench.hymcache.master import AllocateReply, Master, RemoteBlock
from cxlbench.hymcache.prefetch_window import prefetch_window
from cxlbench.kv.connector import BlockTimes, Completion, Ticket, Work
from cxlbench.kv.footer import Footer, Verify, pack_footer, parse_footer
from cxlbench.kv.payload import Verifier, checksum_of
from cxlbench.kv.results import KeyResult

STAGING_BYTES = 5 << 30
DEADLINE_S = 10.0
STORE_BATCH = 32


class GpuCopy(Protocol):
    """Copies between the staging buffer and the GPU, as far as they take time."""

    async def copy(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are copied."""


@dataclass(slots=True)
class ConnectorCounters:
    """What one connector saw."""

    loaded: int = 0
    stored: int = 0
    skipped: int = 0
    exists: int = 0
    mismatched: int = 0
    timed_out: int = 0
    failed: int = 0


@dataclass(eq=False, slots=True)
class _Request:
    request_id: int
    reader: tuple[int, int]
    """The name of its lease at Master: unique, whatever ids the workers give their requests."""
    chain: tuple[bytes, ...]
    matched: int
    size_bytes: int
    found: Found = field(default_factory=Found)
    looked_up: bool = False
    jobs: set[Job[Any]] = field(default_factory=set)
    near: tuple[int, int] | None = None


@dataclass(eq=False, slots=True)
class _Load:
    """One load under way."""

    request: _Request
    keys: Sequence[bytes]
    buffers: Sequence[Buffer]
    results: list[KeyResult]
    window: Budget
    failed: bool = False
    expired: bool = False
    jobs: list[Job[None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Batch:
    """One batch of a store under way, and what is to be given back if it does not end well."""

    chain: Sequence[bytes]
    keys: Sequence[bytes]
    buffers: Sequence[Buffer]
    results: list[KeyResult]
    after: bytes | None
    """The block of the chain before the first one."""
    node: int = 0
    ticket: int = 0
    writing: set[bytes] = field(default_factory=set)
    """Keys that are WRITING at Master."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Write tokens at the node: index by token."""

    @property
    def failure(self) -> KeyResult | None:
        """The first answer that is neither STORED nor EXISTS."""
        good = (KeyResult.STORED, KeyResult.EXISTS)
        return next((result for result in self.results if result not in good), None)


class HyMCacheConnector:
    """The tier as one worker sees it. Satisfies ``cxlbench.kv.connector.Connector``."""

    def __init__(
        self,
        control: ControlPlane,
        master: Master,
        nodes: Mapping[int, KvManager],
        queue_pairs: Mapping[int, QueuePair],
        *,
        staging_bytes: int = STAGING_BYTES,
        deadline_s: float = DEADLINE_S,
        window_bytes: int = 128 << 20,
        verify: Verify = Verify.FULL,
        gpu_copy: GpuCopy | None = None,
        batch_keys: int = 32,
        on_block: Callable[[BlockTimes], None] | None = None,
    ) -> None:
        self.clock: Clock = control.clock
        self.control = control
        self.master = master
        self.nodes = nodes
        self.queue_pairs = queue_pairs
        self.deadline_s = deadline_s
        self.window_bytes = window_bytes
        self.verify = verify
        self.gpu_copy = gpu_copy
        self.counters = ConnectorCounters()
        self.staging = Budget(self.clock, staging_bytes, name="staging buffer")
        self._lookup = Lookup(control, master, nodes, batch_keys=batch_keys)
        self._on_block = on_block
        self._requests: dict[int, _Request] = {}
        self._member = master.join()
        self._serials = itertools.count(1)
        self._tickets: set[Ticket] = set()
        self._ended: deque[Completion] = deque()
        self._jobs = JobSet(self.clock)
        self._stores: set[Job[None]] = set()
        self._closed = False

    # -- the contract ---------------------------------------------------------------------------

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        """Start a lookup; see the contract."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is open already; release it first")
        if not 0 <= matched <= len(keys):
            raise ValueError(f"matched must be within 0..{len(keys)}, got {matched}")
        self._check_size(size_bytes)
        ticket = self._ticket(request_id, Work.LOOKUP)
        reader = (self._member, next(self._serials))
        request = _Request(request_id, reader, tuple(keys), matched, size_bytes)
        self._requests[request_id] = request
        results = [KeyResult.CANCELLED] * (len(keys) - matched)
        self._start(request, ticket, results, self._run_lookup(request, results))
        return ticket

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a load; see the contract."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id} has no lookup, or was released")
        if not request.looked_up:
            raise ValueError(f"the lookup of request {request_id} has not ended; wait for it")
        for buffer in buffers:
            self._check_size(buffer.nbytes)
        ticket = self._ticket(request_id, Work.LOAD)
        results = [KeyResult.CANCELLED] * len(keys)
        self._start(request, ticket, results, self._run_load(request, keys, buffers, results))
        return ticket

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a store; see the contract."""
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")
        sizes = {buffer.nbytes for buffer in buffers}
        if len(sizes) > 1:
            raise ValueError(f"the blocks of one store have one size, got {sorted(sizes)}")
        for size in sizes:
            self._check_size(size)
        request = self._requests.get(request_id)
        ticket = self._ticket(request_id, Work.STORE)
        results = [KeyResult.CANCELLED] * len(keys)
        job = self._start(
            request, ticket, results, self._run_store(request, keys, buffers, results)
        )
        self._stores.add(job)
        job.add_done_callback(lambda _: self._stores.discard(job))
        return ticket

    def release(self, request_id: int) -> None:
        """Give back what a request holds; its open lookups and loads end, its stores go on."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.found.released = True
        for job in list(request.jobs):
            job.cancel()
        for opened in request.found.streams:
            self.control.post(opened.stream.close)
        self.control.post(lambda: self.master.release(request.reader))

    def poll(self) -> list[Completion]:
        """Return the completions since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def at_rest(self) -> dict[str, int]:
        """Count what this connector holds."""
        return {
            "requests": len(self._requests),
            "tickets": len(self._tickets),
            "staging bytes": self.staging.used,
        }

    async def close(self) -> None:
        """Release everything, and wait until the tasks have ended and the last messages are in."""
        self._closed = True
        for request_id in list(self._requests):
            self.release(request_id)
        for job in list(self._stores):
            job.cancel()
        await self._jobs.join()
        if self.control.half_s:
            await self.clock.sleep(self.control.half_s)

    # -- tasks ----------------------------------------------------------------------------------

    def _check_size(self, size_bytes: int) -> None:
        if not 1 <= size_bytes <= self.staging.capacity:
            raise ValueError(
                f"blocks have from 1 B to the {self.staging.capacity} B of the staging buffer, "
                f"got {size_bytes} B"
            )

    def _ticket(self, request_id: int, work: Work) -> Ticket:
        if self._closed:
            raise RuntimeError("the connector is closed")
        ticket = Ticket(request_id, work, Signal(self.clock))
        self._tickets.add(ticket)
        return ticket

    def _start(
        self,
        request: _Request | None,
        ticket: Ticket,
        results: list[KeyResult],
        work: Coroutine[Any, Any, None],
    ) -> Job[None]:
        """Run ``work``, which fills ``results``; the ticket ends with it, whatever happens."""

        async def run() -> None:
            try:
                await work
            finally:
                self._end(ticket, results)

        def ended(job: Job[None]) -> None:
            work.close()  # a task that is cancelled before its first step never gets there
            self._end(ticket, results)
            if request is not None:
                request.jobs.discard(job)

        job = self._jobs.spawn(run())
        if request is not None and ticket.work is not Work.STORE:
            request.jobs.add(job)
        job.add_done_callback(lambda _: ended(job))
        return job

    def _end(self, ticket: Ticket, results: Sequence[KeyResult]) -> None:
        if ticket not in self._tickets:
            return
        self._tickets.discard(ticket)
        completion = Completion(ticket.request_id, ticket.work, tuple(results))
        self._ended.append(completion)
        ticket.done.set(completion)

    # -- lookup and load ------------------------------------------------------------------------

    async def _run_lookup(self, request: _Request, results: list[KeyResult]) -> None:
        found = request.found
        if results:
            await self._lookup.run(
                request.request_id, request.reader, request.chain, request.matched, found
            )
        elif request.chain:
            # The engine has all of it: nothing to look up, but the chain is in use.
            self.control.post(lambda: self.master.table.touch(request.chain))
        hits = found.blocks
        if hits:
            request.near = (hits[-1].node, hits[-1].device)
        self.counters.failed += found.failed
        rest = KeyResult.ERROR if found.failed else KeyResult.MISS
        results[:] = [KeyResult.HIT] * len(hits) + [rest] * (len(results) - len(hits))
        request.looked_up = True

    async def _run_load(
        self,
        request: _Request,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[KeyResult],
    ) -> None:
        places = {block.key: place for place, block in enumerate(request.found.blocks)}
        window = prefetch_window(max(len(keys), 1), request.size_bytes, self.window_bytes)
        in_flight = Budget(self.clock, window, name="reads in flight")
        load = _Load(request, keys, buffers, results, in_flight)
        alarm = self.clock.call_at(self.clock.now() + self.deadline_s, self._expire, load)
        try:
            for index, key in enumerate(keys):
                place = places.get(key)
                if place is None or load.failed or load.expired:
                    break
                await load.window.take(1)
                if load.failed or load.expired:
                    load.window.give(1)
                    break
                load.jobs.append(self._jobs.spawn(self._load_block(load, index, place)))
            for job in load.jobs:
                await job.ended()
            for index, key in enumerate(keys):
                if index >= len(load.jobs):
                    results[index] = KeyResult.MISS
                if load.expired and key in places and not results[index].delivered:
                    results[index] = KeyResult.TIMEOUT
                    self.counters.timed_out += 1
        finally:
            alarm.cancel()
            for job in load.jobs:
                job.cancel()
            for job in load.jobs:  # nobody writes into a buffer when the ticket has ended
                if not job.done():
                    await job.ended()

    def _expire(self, load: _Load) -> None:
        load.expired = True
        for job in load.jobs:
            job.cancel()

    async def _load_block(self, load: _Load, index: int, place: int) -> None:
        """Read one block; its result is in ``load.results`` when this ends."""
        result = KeyResult.CANCELLED
        try:
            result = await self._read_block(load, index, place)
        finally:
            if result is KeyResult.HIT:
                self.counters.loaded += 1
            else:
                load.failed = True
                self.counters.failed += result is KeyResult.ERROR
            load.results[index] = result
            load.window.give(1)

    async def _read_block(self, load: _Load, index: int, place: int) -> KeyResult:
        request, payload = load.request, load.buffers[index]
        block, opened = request.found.blocks[place], request.found.stream_of(place)
        size = payload.nbytes
        if opened is None or size != block.size_bytes:
            return KeyResult.MISS
        asked_s = self.clock.now()
        position = place - opened.first
        token_out = True

        def consumed() -> None:
            nonlocal token_out
            if token_out:
                token_out = False
                self.control.post(lambda: opened.stream.consumed(position))

        try:
            await self._token(opened, block, position)
            await self.staging.take(size)
            try:
                if self.clock.now() >= opened.until_s:
                    return KeyResult.LEASE_EXPIRED
                verifier = Verifier(full=self.verify is Verify.FULL)
                trailer = np.empty(PAGE_BYTES, dtype=np.uint8)
                done = await self.queue_pairs[opened.node].read(
                    opened.rkeys[block.device],
                    block.address,
                    payload,
                    trailer,
                    digest=verifier.digest,
                )
                consumed()
                if done.status is not Status.OK:
                    return KeyResult.ERROR
                footer = parse_footer(trailer)
                if not verifier.accepts(
                    footer, key=block.key, generation=block.generation, payload=payload
                ):
                    self.counters.mismatched += 1
                    self.control.post(
                        lambda: self.master.gone(block.node, block.key, block.generation)
                    )
                    return KeyResult.MISS
                if self._on_block is not None:
                    self._on_block(
                        BlockTimes(request.request_id, asked_s, done.due_s, self.clock.real(), size)
                    )
                if self.gpu_copy is not None:
                    await self.gpu_copy.copy(size)
            finally:
                self.staging.give(size)
        except DeviceError as error:
            if error.status is not Status.FLUSHED:
                return KeyResult.ERROR
            expired = self.clock.now() >= opened.until_s
            return KeyResult.LEASE_EXPIRED if expired else KeyResult.CANCELLED
        finally:
            consumed()
        return KeyResult.HIT

    async def _token(self, opened: OpenStream, block: RemoteBlock, position: int) -> None:
        """Wait for the read token of a block."""
        manager = self.nodes[opened.node]
        await opened.stream.ready(position)
        staged = manager.devices[block.device].prefetch_depth and manager.prefetcher.enabled
        if staged and self.control.half_s:
            await self.clock.sleep(self.control.half_s)  # the descriptor travels to the worker

    # -- store ----------------------------------------------------------------------------------

    async def _run_store(
        self,
        request: _Request | None,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[KeyResult],
    ) -> None:
        near = request.near if request is not None else None
        chain = request.chain if request is not None else tuple(keys)
        after = _before(chain, keys[0]) if keys else None
        try:
            for begin in range(0, len(keys), STORE_BATCH):
                end = min(begin + STORE_BATCH, len(keys))
                batch = _Batch(
                    chain, keys[begin:end], buffers[begin:end], results[begin:end], after
                )
                try:
                    near = await self._store_batch(batch, near)
                except ControlError:
                    self.counters.failed += 1
                    batch.results = [
                        KeyResult.ERROR if result is KeyResult.CANCELLED else result
                        for result in batch.results
                    ]
                finally:
                    results[begin:end] = batch.results
                    self._give_up(batch)
                failure = batch.failure
                if failure is not None:
                    # Heads before tails: what follows it waits for a later turn, too.
                    results[end:] = [failure] * (len(keys) - end)
                    break
                after = keys[end - 1]
        finally:
            if request is not None:
                request.near = near
            self.counters.stored += results.count(KeyResult.STORED)
            self.counters.skipped += results.count(KeyResult.NO_SPACE)
            self.counters.exists += results.count(KeyResult.EXISTS)

    def _give_up(self, batch: _Batch) -> None:
        """Give back what a batch still holds at its node and at Master."""
        if batch.tokens:
            self.control.post(lambda: self.nodes[batch.node].abort(list(batch.tokens)))
        if batch.writing:
            self.control.post(lambda: self.master.abort(batch.ticket, batch.writing))

    async def _store_batch(
        self, batch: _Batch, near: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Store a batch; return where the chain goes on. What fails is left to ``_give_up``."""
        control, costs, keys = self.control, self.control.costs, batch.keys
        size = batch.buffers[0].nbytes

        # What a callee hands out is noted where it does so: its answer may never arrive.
        def allocate() -> AllocateReply:
            reply = self.master.allocate(keys, size, near=near, after=batch.after)
            batch.ticket, batch.node = reply.ticket, reply.node
            batch.writing.update(keys[i] for i, no in enumerate(reply.refusals) if no is None)
            return reply

        allocated = await control.call(
            "master", costs.lookup_call + costs.lookup_key * len(keys), allocate
        )
        wanted = [index for index, no in enumerate(allocated.refusals) if no is None]
        for index, refusal in enumerate(allocated.refusals):
            batch.results[index] = refusal or KeyResult.CANCELLED
        if allocated.device is not None:
            near = (allocated.node, allocated.device)
        if not wanted:
            return near
        node = self.nodes[allocated.node]

        def reserve() -> list[Grant | KeyResult]:
            answers = node.reserve([keys[i] for i in wanted], size, device=allocated.device)
            for index, answer in zip(wanted, answers, strict=True):
                if isinstance(answer, Grant):
                    batch.tokens[answer.token] = index
            return answers

        answers = await control.call(f"node{node.node}", costs.reserve * len(wanted), reserve)
        written: list[tuple[int, Grant]] = []
        whole = True
        for index, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, KeyResult):
                batch.results[index] = answer
            elif whole and await self._write_block(node.node, answer, batch.buffers[index]):
                written.append((index, answer))
            else:
                whole = False  # what follows would be a tail without its head
                batch.results[index] = KeyResult.ERROR
        if not written:
            return near
        committed = await control.call(
            f"node{node.node}",
            costs.commit * len(written),
            lambda: node.commit([grant.token for _, grant in written]),
        )
        blocks: list[RemoteBlock] = []
        whole = True
        for (index, grant), result in zip(written, committed, strict=True):
            whole = whole and result is KeyResult.STORED
            if not whole:
                batch.results[index] = KeyResult.ERROR if result is KeyResult.STORED else result
            else:
                blocks.append(
                    RemoteBlock(
                        grant.key, node.node, grant.device, grant.address, size, grant.generation
                    )
                )

        def register() -> None:
            answers = self.master.register(batch.ticket, blocks, chain=batch.chain)
            for (index, grant), answer in zip(written, answers, strict=False):
                batch.results[index] = answer
                if answer is KeyResult.STORED:
                    batch.writing.discard(grant.key)
                    del batch.tokens[grant.token]

        if blocks:
            await control.call("master", costs.register * len(blocks), register)
            near = (node.node, blocks[-1].device)
        return near

    async def _write_block(self, node: int, grant: Grant, payload: Buffer) -> bool:
        await self.clock.breathe()
        footer = Footer(grant.key, grant.generation, payload.nbytes, checksum_of(payload))
        trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
        record = pack_footer(footer)
        trailer[: len(record)] = np.frombuffer(record, dtype=np.uint8)
        await self.staging.take(payload.nbytes)
        try:
            done = await self.queue_pairs[node].write(grant.rkey, grant.address, payload, trailer)
        finally:
            self.staging.give(payload.nbytes)
        return done.status is Status.OK


def _before(chain: Sequence[bytes], key: bytes) -> bytes | None:
    """Return the block before ``key``; one that is not in the chain yet comes after its end."""
    if key in chain:
        place = chain.index(key)
        return chain[place - 1] if place else None
    return chain[-1] if chain else None
