"""A tier in a dictionary, strict about the contract, with switches for what can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cxlbench.emu.clock import Clock, Job
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Signal
from cxlbench.kv.connector import Completion, Ticket, Work
from cxlbench.kv.results import KeyResult


@dataclass(eq=False)
class FakeTier:
    """Satisfies ``cxlbench.kv.connector.Connector``; ``blocks`` outlive requests."""

    clock: Clock
    delay_s: float = 0.0
    blocks: dict[bytes, bytes] = field(default_factory=dict)

    fail_loads_from: int | None = None
    """Loads give MISS from this place on, with garbage in the buffers."""
    swap_blocks: bool = False
    """Loads deliver the bytes of another block and call them HIT: a broken tier."""
    capacity: int | None = None
    """Stores are refused when this many blocks are there."""
    hang: set[Work] = field(default_factory=set)
    """Work that never ends."""
    hang_close: bool = False
    refuse: set[Work] = field(default_factory=set)
    """Work whose submission raises."""

    lookups: list[tuple[int, tuple[bytes, ...], int]] = field(default_factory=list)
    loads: list[tuple[bytes, ...]] = field(default_factory=list)
    stores: list[tuple[bytes, ...]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    closed: bool = False
    _requests: dict[int, set[bytes]] = field(default_factory=dict)
    _jobs: dict[Job[None], Ticket] = field(default_factory=dict)
    _ended: list[Completion] = field(default_factory=list)

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is open already")
        assert 0 <= matched <= len(keys)
        assert len(set(keys)) == len(keys)
        self.lookups.append((request_id, tuple(keys), matched))
        found = self._requests[request_id] = set()

        def look() -> list[KeyResult]:
            results = []
            for key in keys[matched:]:
                there = len(self.blocks.get(key, b"")) == size_bytes
                if not there:
                    break
                found.add(key)
                results.append(KeyResult.HIT)
            return results + [KeyResult.MISS] * (len(keys) - matched - len(results))

        return self._start(request_id, Work.LOOKUP, len(keys) - matched, look)

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        if request_id not in self._requests:
            raise ValueError(f"request {request_id} has no lookup, or was released")
        assert len(keys) == len(buffers)
        self.loads.append(tuple(keys))
        found = self._requests[request_id]

        def load() -> list[KeyResult]:
            results = []
            others = list(reversed(list(self.blocks)))
            for place, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                assert isinstance(buffer, np.ndarray)
                lost = self.fail_loads_from is not None and place >= self.fail_loads_from
                if lost or key not in found or key not in self.blocks:
                    buffer[:] = 0x55
                    results.append(KeyResult.MISS)
                    continue
                source = key
                if self.swap_blocks:
                    source = next(other for other in others if other != key)
                buffer[:] = np.frombuffer(self.blocks[source], dtype=np.uint8)
                results.append(KeyResult.HIT)
            return results

        return self._start(request_id, Work.LOAD, len(keys), load)

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        assert len(keys) == len(buffers) > 0
        self.stores.append(tuple(keys))

        def store() -> list[KeyResult]:
            results = []
            for key, buffer in zip(keys, buffers, strict=True):
                assert isinstance(buffer, np.ndarray)
                if key in self.blocks:
                    results.append(KeyResult.EXISTS)
                elif self.capacity is not None and len(self.blocks) >= self.capacity:
                    results.append(KeyResult.NO_SPACE)
                else:
                    self.blocks[key] = buffer.tobytes()
                    results.append(KeyResult.STORED)
            return results

        return self._start(request_id, Work.STORE, len(keys), store)

    def release(self, request_id: int) -> None:
        self.released.append(request_id)
        self._requests.pop(request_id, None)
        for job, ticket in list(self._jobs.items()):
            if ticket.request_id == request_id:
                job.cancel()

    def poll(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def at_rest(self) -> dict[str, int]:
        return {"requests": len(self._requests), "tickets": len(self._jobs)}

    def open_tickets(self) -> list[Ticket]:
        return list(self._jobs.values())

    async def close(self) -> None:
        self.closed = True
        if self.hang_close:
            await self.clock.future()
        for job in list(self._jobs):
            job.cancel()
            await job.ended()

    def _start(
        self, request_id: int, work: Work, keys: int, act: Callable[[], list[KeyResult]]
    ) -> Ticket:
        if work in self.refuse:
            raise ValueError(f"{work.value}s are refused")
        ticket = Ticket(request_id, work, Signal(self.clock))
        results = [KeyResult.CANCELLED] * keys

        async def run() -> None:
            if self.delay_s:
                await self.clock.sleep(self.delay_s)
            if work in self.hang:
                await self.clock.future()
            results[:] = act()
            assert len(results) == keys

        def end(_task: object) -> None:
            # Not at the end of run(): a job that is cancelled before its first step never runs.
            work_of_it.close()
            del self._jobs[job]
            completion = Completion(request_id, work, tuple(results))
            self._ended.append(completion)
            ticket.done.set(completion)

        work_of_it = run()
        job = self.clock.spawn(work_of_it)
        self._jobs[job] = ticket
        job.add_done_callback(end)
        return ticket


def build(settings: Mapping[str, object], clock: Clock) -> FakeTier:
    """Return a tier with switches set by ``settings``."""
    return FakeTier(clock, **settings)  # type: ignore[arg-type]
