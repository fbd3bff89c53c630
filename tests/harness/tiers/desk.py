"""A tier under the virtual clock, for tests; every run is checked at rest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cxlbench.devices.profile import load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.memory import Buffer
from cxlbench.harness.content import BlockContent
from cxlbench.harness.tiers.catalog import tier
from cxlbench.harness.tiers.tier import Tier, TierSite
from cxlbench.kv.connector import BlockTimes, Completion, Connector
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 16 * MIB
NAMESPACE = Namespace("model", "revision", "bfloat16", "layout", 128)


def chain(blocks: int, number: int = 0) -> list[bytes]:
    """Return the keys of a chain; chains of different numbers share nothing."""
    return trace_keys(NAMESPACE, range(number * 100_000, number * 100_000 + blocks))


def slow(kind: type[Any], **numbers: float) -> Any:
    """Return a source of profiles in which those of ``kind`` have other numbers."""

    def source(wanted: type[Any], name: str) -> Any:
        profile = load_as(wanted, name)
        return dataclasses.replace(profile, **numbers) if wanted is kind else profile

    return source


class Desk:
    """A tier by name, with ``servers`` prefill servers and blocks of ``size`` bytes."""

    def __init__(
        self,
        name: str,
        *,
        size: int = 16 * MIB,
        block_tokens: int = 256,
        servers: int = 2,
        profile: Any = load_as,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.size = size
        self.servers = servers
        self.blocks: list[BlockTimes] = []
        site = TierSite(
            prefill_servers=servers,
            block_bytes=size,
            block_tokens=block_tokens,
            profile=profile,
            options=options,
            on_block=self.blocks.append,
        )
        try:
            self.tier: Any = tier(name).maker(self.clock, site)
        except BaseException:
            self.clock.close()
            raise
        self._contents: dict[int, BlockContent] = {}
        self._names = iter(range(1000, 1 << 30))

    def connector(self, server: int = 0) -> Connector:
        """Return a server's connector."""
        found: Tier = self.tier
        connector = found.connector(server)
        assert connector is not None
        return connector

    def content(self, size: int | None = None) -> BlockContent:
        """Return what makes and checks blocks of a size."""
        nbytes = size or self.size
        if nbytes not in self._contents:
            self._contents[nbytes] = BlockContent(nbytes, phantom=True, seed=1)
        return self._contents[nbytes]

    def empty(self, size: int | None = None) -> Buffer:
        """Return a buffer to load into."""
        return self.content(size).empty()

    async def lookup(
        self,
        request: int,
        keys: Sequence[bytes],
        *,
        size: int | None = None,
        server: int = 0,
        matched: int = 0,
    ) -> Completion:
        """Look a chain up."""
        ticket = self.connector(server).submit_lookup(
            request, keys, size or self.size, matched=matched
        )
        return await ticket.done.wait()

    async def load(
        self, request: int, keys: Sequence[bytes], *, size: int | None = None, server: int = 0
    ) -> Completion:
        """Load blocks, and hold the tier to its word: a HIT has the right content."""
        buffers = [self.empty(size) for _ in keys]
        done = await self.connector(server).submit_load(request, keys, buffers).done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if result is KeyResult.HIT:
                assert self.content(size).holds(buffer, key), "a HIT has other bytes"
        return done

    async def store(
        self, keys: Sequence[bytes], *, request: int = 0, size: int | None = None, server: int = 0
    ) -> Completion:
        """Store blocks; puts may go on behind that."""
        buffers = [self.content(size).make(key) for key in keys]
        return await self.connector(server).submit_store(request, keys, buffers).done.wait()

    async def stored(self, keys: Sequence[bytes], **options: Any) -> None:
        """Store blocks that must all get stored, and wait until they can be found."""
        assert set((await self.store(keys, **options)).results) == {KeyResult.STORED}
        await self.tier.quiesce()
        assert not self.tier.counters().get("failed_puts", 0)

    async def read(self, keys: Sequence[bytes], *, server: int = 0) -> int:
        """Look up, load and release; return how many leading blocks were delivered."""
        request = next(self._names)
        hits = (await self.lookup(request, keys, server=server)).leading_hits
        done = await self.load(request, keys[:hits], server=server)
        self.connector(server).release(request)
        return done.leading_hits

    async def settle(self) -> None:
        """Let what was released be given back."""
        await self.tier.quiesce()
        await self.clock.sleep(0.02)

    def run(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a test, close, and check that nothing is held and nobody is left."""

        async def whole() -> Any:
            await self.tier.start()
            result = await test()
            await self.settle()
            held = self.tier.at_rest()
            assert not held, f"not at rest: {held}"
            await self.tier.close()
            connectors = [self.connector(server) for server in range(self.servers)]
            held = [connector.at_rest() for connector in connectors]
            assert not any(any(counts.values()) for counts in held), f"held at the end: {held}"
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, f"tasks are left: {left}"
            return result

        with self.clock:
            return self.clock.run(whole())
