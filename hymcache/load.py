"""The load path of a worker (HyMCache §4.1, §4.2): from announced blocks to verified bytes.

Per block: wait for the read token → staging budget → RDMA READ → verify against the footer → copy
to the GPU → token back. The 5 GB staging buffer is flow control: bytes are taken before an RDMA
operation and given back after the copy. It is taken *after* the read token, never before: a holder
of staging bytes must not wait for device frames. A load that is not done after 10 s ends with what
it has, and the engine recomputes the rest.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import PAGE_BYTES, Buffer
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget
from cxlbench.hymcache.counters import ConnectorCounters
from cxlbench.hymcache.lookup import Found
from cxlbench.hymcache.prefetch_window import prefetch_window
from cxlbench.hymcache.services import MasterClient, NodeClient
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.footer import Verify, parse_footer
from cxlbench.kv.payload import Verifier
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy

GONE = (Status.IO_ERROR, Status.NO_OBJECT)
"""What a device says of bytes that it does not have: one miss, and no later one for them. A link
that is down says nothing of the bytes."""


@dataclass(eq=False, slots=True)
class _Load:
    """One load under way."""

    request_id: int
    found: Found
    buffers: Sequence[Buffer]
    results: list[KeyResult]
    window: Budget
    failed: bool = False
    expired: bool = False
    jobs: list[Job[None]] = field(default_factory=list)


class LoadPath:
    """Runs the loads of one connector."""

    def __init__(
        self,
        clock: Clock,
        master: MasterClient,
        nodes: Mapping[int, NodeClient],
        *,
        staging: Budget,
        counters: ConnectorCounters,
        jobs: JobSet,
        deadline_s: float,
        window_bytes: int,
        verify: Verify,
        gpu_copy: GpuCopy | None,
        on_block: Callable[[BlockTimes], None] | None,
    ) -> None:
        self.clock = clock
        self.master = master
        self.nodes = nodes
        self.staging = staging
        self.counters = counters
        self.deadline_s = deadline_s
        self.window_bytes = window_bytes
        self.verify = verify
        self.gpu_copy = gpu_copy
        self._jobs = jobs
        self._on_block = on_block

    async def run(
        self,
        request_id: int,
        found: Found,
        size_bytes: int,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[KeyResult],
    ) -> None:
        """Load ``keys`` of what was found into ``buffers``; fills ``results``.

        When this ends, for whatever reason, nobody writes into a buffer any more.
        """
        places = {block.key: place for place, block in enumerate(found.blocks)}
        window = prefetch_window(max(len(keys), 1), size_bytes, self.window_bytes)
        in_flight = Budget(self.clock, window, name="reads in flight")
        load = _Load(request_id, found, buffers, results, in_flight)
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
            for job in load.jobs:
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
        payload = load.buffers[index]
        block, opened = load.found.blocks[place], load.found.stream_of(place)
        size = payload.nbytes
        if opened is None or size != block.size_bytes:
            return KeyResult.MISS
        asked_s = self.clock.now()
        position = opened.position_of(place)
        node, staged = self.nodes[block.node], opened.staged[block.device]
        token_out = True

        def consumed() -> None:
            nonlocal token_out
            if token_out:
                token_out = False
                node.consumed(opened.name, position, staged=staged)

        try:
            await node.token(opened.name, position, staged=staged)
            await self.staging.take(size)
            try:
                if self.clock.real() >= opened.until_s:
                    return KeyResult.LEASE_EXPIRED
                verifier = Verifier(full=self.verify is Verify.FULL)
                trailer = np.empty(PAGE_BYTES, dtype=np.uint8)
                done = await node.queue_pair.read(
                    opened.rkeys[block.device],
                    block.address,
                    payload,
                    trailer,
                    digest=verifier.digest,
                    until_s=opened.until_s,
                )
                consumed()
                if done.status in GONE:
                    self.master.gone(block.node, block.key, block.generation)
                if done.status is not Status.OK:
                    late = self.clock.real() >= opened.until_s
                    return KeyResult.LEASE_EXPIRED if late else KeyResult.ERROR
                footer = parse_footer(trailer)
                if not verifier.accepts(
                    footer, key=block.key, generation=block.generation, payload=payload
                ):
                    self.counters.mismatched += 1
                    self.master.gone(block.node, block.key, block.generation)
                    return KeyResult.MISS
                if self._on_block is not None:
                    self._on_block(
                        BlockTimes(load.request_id, asked_s, done.due_s, self.clock.real(), size)
                    )
                if self.gpu_copy is not None:
                    await self.gpu_copy.copy(size)
            finally:
                self.staging.give(size)
        except DeviceError as error:
            if error.status in GONE:
                self.master.gone(block.node, block.key, block.generation)
            if error.status is not Status.FLUSHED:
                return KeyResult.ERROR
            expired = self.clock.now() >= opened.until_s
            return KeyResult.LEASE_EXPIRED if expired else KeyResult.CANCELLED
        finally:
            consumed()
        return KeyResult.HIT
