"""TraCT's connectors on a pod under the virtual clock, for tests; every run is checked at rest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cxlbench.devices.profile import SharedType3Profile, load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.memory import Buffer
from cxlbench.harness.content import BlockContent
from cxlbench.harness.tract_rig import TractRig, TractRigSpec
from cxlbench.kv.connector import BlockTimes, Completion
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult
from cxlbench.tract.codes import EXISTS
from cxlbench.tract.connector import TractConnector
from cxlbench.tract.index import BLOCK, entry_at, find_place
from cxlbench.tract.words import key_words

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NAMESPACE = Namespace("model", "revision", "bfloat16", "layout", 128)


def chain(blocks: int, number: int = 0) -> list[bytes]:
    """Return the keys of a chain; chains of different numbers share nothing."""
    return trace_keys(NAMESPACE, range(number * 100_000, number * 100_000 + blocks))


def memory(**changes: Any) -> SharedType3Profile:
    """Return the testbed's shared memory with some numbers changed."""
    return dataclasses.replace(load_as(SharedType3Profile, "niagara-2.0"), **changes)


class Desk:
    """The system under test: ``nodes`` nodes with a worker each, if ``spec`` says no other."""

    def __init__(
        self, *, size: int = 16 * MIB, phantom: bool = True, capacity: int = 4 * GIB, **spec: Any
    ) -> None:
        self.clock = VirtualClock()
        self.size = size
        self.blocks: list[BlockTimes] = []
        self.rig = TractRig(
            self.clock,
            TractRigSpec(block_bytes=size, capacity_bytes=capacity, **spec),
            on_block=lambda worker, times: self.blocks.append(times),
        )
        self.phantom = phantom
        self._content: dict[int, BlockContent] = {}
        self._names = iter(range(1000, 1 << 30))

    @property
    def connector(self) -> TractConnector:
        """The first worker's connector."""
        return self.rig.connectors[0]

    def content(self, size: int | None = None) -> BlockContent:
        """Return what makes and checks blocks of a size."""
        nbytes = size or self.size
        if nbytes not in self._content:
            self._content[nbytes] = BlockContent(nbytes, phantom=self.phantom, seed=1)
        return self._content[nbytes]

    def empty(self, size: int | None = None) -> Buffer:
        """Return a buffer to load into."""
        return self.content(size).empty()

    def name(self) -> int:
        """Return a fresh request id."""
        return next(self._names)

    async def lookup(
        self,
        request: int,
        keys: Sequence[bytes],
        *,
        size: int | None = None,
        worker: int = 0,
        matched: int = 0,
    ) -> Completion:
        """Look a chain up."""
        connector = self.rig.connectors[worker]
        ticket = connector.submit_lookup(request, keys, size or self.size, matched=matched)
        return await ticket.done.wait()

    async def load(
        self, request: int, keys: Sequence[bytes], *, size: int | None = None, worker: int = 0
    ) -> Completion:
        """Load blocks, and hold the tier to its word: a HIT has the right content."""
        buffers = [self.empty(size) for _ in keys]
        done = await self.rig.connectors[worker].submit_load(request, keys, buffers).done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if result is KeyResult.HIT:
                assert self.content(size).holds(buffer, key), "a HIT has other bytes"
        return done

    async def store(
        self, keys: Sequence[bytes], *, request: int = 0, size: int | None = None, worker: int = 0
    ) -> Completion:
        """Store blocks."""
        buffers = [self.content(size).make(key) for key in keys]
        return await self.rig.connectors[worker].submit_store(request, keys, buffers).done.wait()

    async def stored(self, keys: Sequence[bytes], **options: Any) -> None:
        """Store blocks that must all get stored."""
        assert set((await self.store(keys, **options)).results) == {KeyResult.STORED}

    async def read(self, keys: Sequence[bytes], *, size: int | None = None, worker: int = 0) -> int:
        """Look up, load and release; return how many leading blocks were delivered."""
        request = self.name()
        found = await self.lookup(request, keys, size=size, worker=worker)
        hits = found.leading_hits
        done = await self.load(request, keys[:hits], size=size, worker=worker)
        self.rig.connectors[worker].release(request)
        return done.leading_hits

    def offset(self, key: bytes) -> int | None:
        """Return where the block lies in the region, None if it has no entry."""
        pod, lay = self.rig.pod, self.rig.layout
        code, slot = pod.alone(find_place, lay, *key_words(key))
        if code != EXISTS:
            return None
        return pod.alone(lambda mem: int(mem.load(entry_at(lay, slot) + BLOCK)))

    async def settle(self) -> None:
        """Let what was released be given back."""
        await self.clock.sleep(0.01)

    def run(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a test, close, and check that nothing is held and nobody is left."""

        async def whole() -> Any:
            self.rig.start()
            result = await test()
            await self.settle()
            held = self.rig.at_rest()
            assert not held, f"not at rest: {held}"
            await self.rig.close()
            held = self.rig.at_rest()
            assert not held, f"held after the end: {held}"
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, f"tasks are left: {left}"
            return result

        with self.clock:
            return self.clock.run(whole())
