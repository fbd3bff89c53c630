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

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
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
from cxlbench.hymcache.lookup import Found, Lookup
from cxlbench.hymcache.master import Master, RemoteBlock
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
    chain: tuple[bytes, ...]
    matched: int
    size_bytes: int
    found: Found = field(default_factory=Found)
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
        self._tickets: set[Ticket] = set()
        self._ended: deque[Completion] = deque()
        self._jobs = JobSet(self.clock)
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
        if size_bytes < 1:
            raise ValueError(f"blocks need at least one byte, got {size_bytes}")
        request = _Request(request_id, tuple(keys), matched, size_bytes)
        self._requests[request_id] = request
        ticket = self._ticket(request_id, Work.LOOKUP)
        wanted = len(keys) - matched
        self._start(request, ticket, self._run_lookup(request_id, request), wanted)
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
        ticket = self._ticket(request_id, Work.LOAD)
        self._start(request, ticket, self._run_load(request, keys, buffers), len(keys))
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
        request = self._requests.get(request_id)
        ticket = self._ticket(request_id, Work.STORE)
        self._start(request, ticket, self._run_store(request, keys, buffers), len(keys))
        return ticket

    def release(self, request_id: int) -> None:
        """Give back what a request holds; its open tickets end."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for job in list(request.jobs):
            job.cancel()
        for opened in request.found.streams:
            self.control.post(opened.stream.close)
        late = [job for job in request.found.opening if not job.done()]
        if late:
            # A hint is still on its way: close what it opens when it arrives.
            self._jobs.spawn(self._close_late(late))
        self.control.post(lambda: self.master.release(request_id))

    async def _close_late(self, opening: Sequence[Job[Any]]) -> None:
        for job in opening:
            with suppress(ControlError):
                opened = await job
                opened.stream.close()

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
        """Release everything, and wait for the tasks to end."""
        self._closed = True
        for request_id in list(self._requests):
            self.release(request_id)
        await self._jobs.cancel()

    # -- tasks ----------------------------------------------------------------------------------

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
        work: Coroutine[Any, Any, list[KeyResult]],
        keys: int,
    ) -> None:
        """Run ``work`` as the request's task; the ticket ends with it, whatever happens."""

        async def run() -> None:
            results = [KeyResult.CANCELLED] * keys
            try:
                results = await work
            except ControlError:
                self.counters.failed += 1
                results = [KeyResult.ERROR] * keys
            finally:
                work.close()
                completion = Completion(ticket.request_id, ticket.work, tuple(results))
                self._tickets.discard(ticket)
                self._ended.append(completion)
                ticket.done.set(completion)

        job = self._jobs.spawn(run())
        if request is not None and ticket.work is not Work.STORE:
            request.jobs.add(job)
            job.add_done_callback(lambda _: request.jobs.discard(job))

    # -- lookup and load ------------------------------------------------------------------------

    async def _run_lookup(self, request_id: int, request: _Request) -> list[KeyResult]:
        wanted = len(request.chain) - request.matched
        if wanted:
            await self._lookup.run(request_id, request.chain, request.matched, request.found)
        hits = request.found.blocks
        if hits:
            request.near = (hits[-1].node, hits[-1].device)
        return [KeyResult.HIT] * len(hits) + [KeyResult.MISS] * (wanted - len(hits))

    async def _run_load(
        self, request: _Request, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> list[KeyResult]:
        hits = request.found.blocks
        places = {block.key: place for place, block in enumerate(hits)}
        window = prefetch_window(max(len(keys), 1), request.size_bytes, self.window_bytes)
        load = _Load(
            request,
            keys,
            buffers,
            [KeyResult.MISS] * len(keys),
            Budget(self.clock, window, name="reads in flight"),
        )
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
                load.jobs.append(self.clock.spawn(self._load_block(load, index, place)))
            for job in load.jobs:
                await job.ended()
            if load.expired:
                for index, result in enumerate(load.results):
                    if result is not KeyResult.HIT and keys[index] in places:
                        load.results[index] = KeyResult.TIMEOUT
                        self.counters.timed_out += 1
        finally:
            alarm.cancel()
            for job in load.jobs:
                if not job.done():
                    job.cancel()
        return load.results

    def _expire(self, load: _Load) -> None:
        load.expired = True
        for job in load.jobs:
            job.cancel()

    async def _load_block(self, load: _Load, index: int, place: int) -> None:
        """Read one block; its result is in ``load.results`` when this ends."""
        result = KeyResult.CANCELLED
        try:
            result = await self._read_block(load, index, place)
        except DeviceError as error:
            result = KeyResult.CANCELLED if error.status is Status.FLUSHED else KeyResult.ERROR
        finally:
            if result is KeyResult.HIT:
                self.counters.loaded += 1
            else:
                load.failed = True
                self.counters.failed += result is KeyResult.ERROR
            load.results[index] = result
            load.window.give(1)

    async def _read_block(self, load: _Load, index: int, place: int) -> KeyResult:
        clock = self.clock
        asked_s = clock.now()
        request, block, payload = (
            load.request,
            load.request.found.blocks[place],
            load.buffers[index],
        )
        opened = request.found.stream_of(place)
        if opened is None:
            return KeyResult.MISS
        position = place - opened.first
        manager = self.nodes[opened.node]
        staged = manager.devices[block.device].prefetch_depth and manager.prefetcher.enabled
        await opened.stream.ready(position)
        if staged and self.control.half_s:
            await clock.sleep(self.control.half_s)  # the descriptor travels to the worker
        size = payload.nbytes
        if size != block.size_bytes:
            return KeyResult.MISS
        await self.staging.take(size)
        try:
            if clock.now() >= request.found.lease_until_s:
                return KeyResult.LEASE_EXPIRED
            verifier = Verifier(full=self.verify is Verify.FULL)
            trailer = np.empty(PAGE_BYTES, dtype=np.uint8)
            done = await self.queue_pairs[opened.node].read(
                opened.rkeys[block.device], block.address, payload, trailer, digest=verifier.digest
            )
            self.control.post(lambda: opened.stream.consumed(position))
            if done.status is not Status.OK:
                return KeyResult.ERROR
            if not verifier.accepts(
                parse_footer(trailer), key=block.key, generation=block.generation, payload=payload
            ):
                self.counters.mismatched += 1
                self.control.post(lambda: self.master.gone(block.node, block.key, block.generation))
                return KeyResult.MISS
            if self._on_block is not None:
                self._on_block(
                    BlockTimes(request.request_id, asked_s, done.due_s, clock.real(), size)
                )
            if self.gpu_copy is not None:
                await self.gpu_copy.copy(size)
        finally:
            self.staging.give(size)
        return KeyResult.HIT

    # -- store ----------------------------------------------------------------------------------

    async def _run_store(
        self, request: _Request | None, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> list[KeyResult]:
        results: list[KeyResult] = []
        near = request.near if request is not None else None
        chain = request.chain if request is not None else tuple(keys)
        for begin in range(0, len(keys), STORE_BATCH):
            batch = keys[begin : begin + STORE_BATCH]
            got, near = await self._store_batch(
                chain, batch, buffers[begin : begin + STORE_BATCH], near
            )
            results.extend(got)
            if KeyResult.NO_SPACE in got:
                # Heads before tails: what follows a refused block waits for a later turn too.
                results.extend([KeyResult.NO_SPACE] * (len(keys) - len(results)))
                break
        if request is not None:
            request.near = near
        self.counters.stored += results.count(KeyResult.STORED)
        self.counters.skipped += results.count(KeyResult.NO_SPACE)
        self.counters.exists += results.count(KeyResult.EXISTS)
        return results

    async def _store_batch(
        self,
        chain: Sequence[bytes],
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        near: tuple[int, int] | None,
    ) -> tuple[list[KeyResult], tuple[int, int] | None]:
        control, costs = self.control, self.control.costs
        size = buffers[0].nbytes
        allocated = await control.call(
            "master",
            costs.lookup_call + costs.lookup_key * len(keys),
            lambda: self.master.allocate(keys, size, near=near),
        )
        results = [refusal or KeyResult.ERROR for refusal in allocated.refusals]
        wanted = [i for i, refusal in enumerate(allocated.refusals) if refusal is None]
        if not wanted:
            return results, near
        node = self.nodes[allocated.node]
        open_tokens: dict[int, int] = {}
        open_keys = {keys[index] for index in wanted}
        try:
            device = near[1] if near is not None and near[0] == allocated.node else None
            answers = await control.call(
                f"node{allocated.node}",
                costs.reserve * len(wanted),
                lambda: node.reserve([keys[i] for i in wanted], size, device=device),
            )
            grants: dict[int, Grant] = {}
            for index, answer in zip(wanted, answers, strict=True):
                if isinstance(answer, Grant):
                    grants[index] = answer
                    open_tokens[answer.token] = index
                else:
                    results[index] = answer
            written = []
            for index, grant in grants.items():
                if await self._write_block(allocated.node, grant, buffers[index]):
                    written.append(index)
                else:
                    break  # what follows would be a tail without its head
            if written:
                near = (allocated.node, grants[written[-1]].device)
                tokens = [grants[index].token for index in written]
                committed = await control.call(
                    f"node{allocated.node}",
                    costs.commit * len(tokens),
                    lambda: node.commit(tokens),
                )
                stored = []
                for index, result in zip(written, committed, strict=True):
                    results[index] = result
                    del open_tokens[grants[index].token]
                    if result is KeyResult.STORED:
                        grant = grants[index]
                        stored.append(
                            (
                                index,
                                RemoteBlock(
                                    grant.key,
                                    node.node,
                                    grant.device,
                                    grant.address,
                                    size,
                                    grant.generation,
                                ),
                            )
                        )
                if stored:
                    await self._register(chain, allocated.ticket, stored, results, open_keys)
        finally:
            if open_tokens:
                tokens = list(open_tokens)
                control.post(lambda: node.abort(tokens))
            if open_keys:
                control.post(lambda: self.master.abort(allocated.ticket, open_keys))
        return results, near

    async def _register(
        self,
        chain: Sequence[bytes],
        ticket: int,
        stored: Sequence[tuple[int, RemoteBlock]],
        results: list[KeyResult],
        open_keys: set[bytes],
    ) -> None:
        blocks = [block for _, block in stored]
        answers = await self.control.call(
            "master",
            self.control.costs.register * len(blocks),
            lambda: self.master.register(ticket, blocks, chain=chain),
        )
        for (index, block), answer in zip(stored, answers, strict=True):
            results[index] = answer
            open_keys.discard(block.key)

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
