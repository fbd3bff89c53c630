"""HyMCache's KV connector: the worker's side of the tier (§4.1), under the contract in ``kv``.

It turns the contract's calls into tasks, keeps what a request holds, and gives it back. The work is
done in ``lookup.py``, ``load.py`` and ``store.py``, which share the worker's staging budget.

Units: bytes, s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Budget
from cxlbench.hymcache.counters import ConnectorCounters
from cxlbench.hymcache.load import LoadPath
from cxlbench.hymcache.lookup import Found, Lookup, OpenStream
from cxlbench.hymcache.node_service import Name
from cxlbench.hymcache.services import MasterClient, NodeClient
from cxlbench.hymcache.store import Store, StorePath
from cxlbench.kv.connector import BlockTimes, Completion, Ticket, Work
from cxlbench.kv.footer import Verify
from cxlbench.kv.results import KeyResult
from cxlbench.kv.tickets import GpuCopy, TicketDesk, check_load, check_lookup, check_store

STAGING_BYTES = 5 << 30
DEADLINE_S = 10.0


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


class HyMCacheConnector:
    """The tier as one worker sees it. Satisfies ``cxlbench.kv.connector.Connector``."""

    def __init__(
        self,
        clock: Clock,
        master: MasterClient,
        nodes: Mapping[int, NodeClient],
        *,
        staging_bytes: int = STAGING_BYTES,
        deadline_s: float = DEADLINE_S,
        window_bytes: int = 128 << 20,
        verify: Verify = Verify.FULL,
        gpu_copy: GpuCopy | None = None,
        batch_keys: int = 32,
        on_block: Callable[[BlockTimes], None] | None = None,
    ) -> None:
        self.clock = clock
        self.master = master
        self.nodes = nodes
        self.counters = ConnectorCounters()
        self.staging = Budget(self.clock, staging_bytes, name="staging buffer")
        self._requests: dict[int, _Request] = {}
        self._serials = itertools.count(1)
        self._jobs = JobSet(self.clock)
        self._tickets = TicketDesk(self.clock, self._jobs)
        self._lookup = Lookup(
            master, nodes, names=self._name, jobs=self._jobs, batch_keys=batch_keys
        )
        self._load = LoadPath(
            clock,
            master,
            nodes,
            staging=self.staging,
            counters=self.counters,
            jobs=self._jobs,
            deadline_s=deadline_s,
            window_bytes=window_bytes,
            verify=verify,
            gpu_copy=gpu_copy,
            on_block=on_block,
        )
        self._store = StorePath(
            clock,
            master,
            nodes,
            names=self._name,
            staging=self.staging,
            counters=self.counters,
        )
        self._stores: set[Job[None]] = set()

    # -- the contract ---------------------------------------------------------------------------

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        """Start a lookup; see the contract."""
        check_lookup(self._requests, request_id, keys, matched)
        self._check_size(size_bytes)
        ticket = self._tickets.open(request_id, Work.LOOKUP)
        request = _Request(request_id, self._name(), tuple(keys), matched, size_bytes)
        self._requests[request_id] = request
        results = [KeyResult.CANCELLED] * (len(keys) - matched)
        job = self._tickets.run(ticket, results, self._run_lookup(request, results))
        self._cancellable(request, job)
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
        work = self._load.run(request_id, request.found, request.size_bytes, keys, buffers, results)
        self._cancellable(request, self._tickets.run(ticket, results, work))
        return ticket

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Start a store; see the contract."""
        check_store(keys, buffers, self._check_size)
        request = self._requests.get(request_id)
        ticket = self._tickets.open(request_id, Work.STORE)
        results = [KeyResult.CANCELLED] * len(keys)
        job = self._tickets.run(ticket, results, self._run_store(request, keys, buffers, results))
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
        for node, name in request.found.asked:
            self.nodes[node].close_stream(name)
        self.master.release(request.reader)

    def poll(self) -> list[Completion]:
        """Return the completions since the last call; see the contract."""
        return self._tickets.poll()

    def stream_of(self, request_id: int, place: int) -> OpenStream:
        """Return the stream that a hit of an open request is read by, for measurements."""
        opened = self._requests[request_id].found.stream_of(place)
        if opened is None:
            raise LookupError(f"place {place} of request {request_id} is no hit")
        return opened

    def at_rest(self) -> dict[str, int]:
        """Count what this connector holds."""
        return {
            "requests": len(self._requests),
            "tickets": len(self._tickets),
            "staging bytes": self.staging.used,
        }

    async def close(self) -> None:
        """Release everything, and wait until the tasks have ended and the last messages are in."""
        self._tickets.closed = True
        for request_id in list(self._requests):
            self.release(request_id)
        for job in list(self._stores):
            job.cancel()
        await self._jobs.join()
        await self.master.delivered()
        for node in self.nodes.values():
            await node.delivered()

    def _name(self) -> Name:
        """Return a fresh name for something that Master or a node hands out."""
        return self.master.member, next(self._serials)

    # -- tasks ----------------------------------------------------------------------------------

    def _check_size(self, size_bytes: int) -> None:
        if not 1 <= size_bytes <= self.staging.capacity:
            raise ValueError(
                f"blocks have from 1 B to the {self.staging.capacity} B of the staging buffer, "
                f"got {size_bytes} B"
            )

    def _cancellable(self, request: _Request, job: Job[None]) -> None:
        """Let the request's release end ``job``."""
        request.jobs.add(job)
        job.add_done_callback(lambda _: request.jobs.discard(job))

    # -- the work -------------------------------------------------------------------------------

    async def _run_lookup(self, request: _Request, results: list[KeyResult]) -> None:
        found = request.found
        if results:
            await self._lookup.run(
                request.request_id, request.reader, request.chain, request.matched, found
            )
        elif request.chain:
            # The engine has all of it: nothing to look up, but the chain is in use.
            self.master.touch(request.chain)
        hits = found.blocks
        if hits:
            request.near = (hits[-1].node, hits[-1].device)
        self.counters.failed += found.failed
        rest = KeyResult.ERROR if found.failed else KeyResult.MISS
        results[:] = [KeyResult.HIT] * len(hits) + [rest] * (len(results) - len(hits))
        request.looked_up = True

    async def _run_store(
        self,
        request: _Request | None,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[KeyResult],
    ) -> None:
        chain = request.chain if request is not None else tuple(keys)
        near = request.near if request is not None else None
        store = Store(chain, keys, buffers, results, near)
        try:
            await self._store.run(store)
        finally:
            if request is not None:
                request.near = store.near
