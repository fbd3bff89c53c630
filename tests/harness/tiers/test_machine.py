"""Random lives of requests on every tier: no wrong block, all comes back, bytes are conserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlbench.emu.clock import JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.kv.connector import Ticket
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import MIB, Desk, chain

BLOCK, SERVERS, LENGTH = 16 * MIB, 3, 18
STORED, HIT = KeyResult.STORED, KeyResult.HIT

TIGHT: dict[str, dict[str, Any]] = {
    "lmcache-local": {"capacity_bytes": 12 * BLOCK},
    "mooncake": {"capacity_bytes": 30 * BLOCK, "buffer_bytes": 5 * BLOCK},
    "mooncake-nvmeof": {
        "capacity_bytes": 30 * BLOCK,
        "buffer_bytes": 9 * BLOCK,
        "buffer_wait_s": 0.01,
        "put_timeout_s": 0.02,
        "late_puts": "revoke",
        "get_timeout_s": 0.01,
    },
    "redis": {"capacity_bytes": 20 * BLOCK, "buffer_bytes": 7 * BLOCK},
    "lmcache-redis": {"capacity_bytes": 20 * BLOCK, "local_bytes": 13 * BLOCK},
    "tract": {"capacity_bytes": 34 * BLOCK, "deadline_s": 1},
    "hymcache": {"staging_bytes": 9 * BLOCK, "device_capacity_bytes": 1 << 30},
}
"""Where blocks are evicted, buffers are full, chunks are cut, and puts and gets are late."""
BEHIND = ("mooncake", "mooncake-nvmeof", "redis", "lmcache-redis")

turns = st.tuples(
    st.just("turn"), st.integers(0, SERVERS - 1), st.integers(0, 2), st.integers(4, LENGTH)
)
pauses = st.tuples(st.just("sleep"), st.integers(0, 5), st.just(0), st.just(0))
steps = st.one_of(
    turns,
    pauses,
    turns,
    pauses,
    st.tuples(
        st.just("lookup"), st.integers(0, SERVERS - 1), st.integers(0, 2), st.integers(0, LENGTH)
    ),
    st.tuples(st.just("load"), st.integers(0, 7), st.integers(0, LENGTH), st.integers(0, LENGTH)),
    st.tuples(st.just("store"), st.integers(0, 7), st.integers(0, LENGTH), st.integers(0, LENGTH)),
    st.tuples(
        st.just("alien"), st.integers(0, SERVERS - 1), st.integers(0, 2), st.integers(0, LENGTH)
    ),
    st.tuples(st.just("release"), st.integers(0, 7), st.just(0), st.just(0)),
)
PAUSES_S = (1e-5, 1e-3, 0.01, 0.1, 0.5, 6.0)


class Life:
    """Makes steps, and keeps what is open."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.open: list[tuple[int, int, list[bytes], Ticket]] = []
        self.stores: list[Ticket] = []
        self.loads: list[tuple[Ticket, list[bytes], list[Buffer]]] = []
        self.jobs = JobSet(desk.clock)
        self.next = 1

    async def turn(self, server: int, number: int, length: int) -> None:
        """Begin a turn as an engine has it: look up, load, store the rest, release."""
        self.next += 1
        self.jobs.spawn(self._turn(self.next - 1, server, chain(length, number)))

    async def _turn(self, request: int, server: int, keys: list[bytes]) -> None:
        connector = self.desk.connector(server)
        matched = min(request % 3, len(keys))
        ticket = connector.submit_lookup(request, keys, BLOCK, matched=matched)
        have = matched + (await ticket.done.wait()).leading_hits
        buffers = [self.desk.empty() for _ in keys[matched:have]]
        load = connector.submit_load(request, keys[matched:have], buffers)
        self.loads.append((load, keys[matched:have], buffers))
        await load.done.wait()
        self._store(server, request, keys[have:])
        connector.release(request)

    async def step(self, what: str, a: int, b: int, c: int) -> None:
        await getattr(self, what)(a, b, c)

    async def lookup(self, server: int, number: int, length: int) -> None:
        keys, matched = chain(length, number), (self.next * 5) % 4
        ticket = self.desk.connector(server).submit_lookup(
            self.next, keys, BLOCK, matched=min(matched, length)
        )
        self.open.append((self.next, server, keys, ticket))
        self.next += 1

    async def load(self, which: int, begin: int, end: int) -> None:
        if self.open:
            request, server, keys, looked_up = self.open[which % len(self.open)]
            await looked_up.done.wait()
            wanted = keys[begin:end]
            buffers = [self.desk.empty() for _ in wanted]
            ticket = self.desk.connector(server).submit_load(request, wanted, buffers)
            self.loads.append((ticket, wanted, buffers))

    async def store(self, which: int, begin: int, end: int) -> None:
        if self.open:
            request, server, keys, _ = self.open[which % len(self.open)]
            self._store(server, request, keys[begin:end])

    async def alien(self, server: int, number: int, end: int) -> None:
        self._store(server, 0, chain(end, number))

    def _store(self, server: int, request: int, keys: list[bytes]) -> None:
        buffers = [self.desk.content().make(key) for key in keys]
        self.stores.append(self.desk.connector(server).submit_store(request, keys, buffers))

    async def release(self, which: int, _: int, __: int) -> None:
        if self.open:
            request, server, _keys, _ticket = self.open.pop(which % len(self.open))
            self.desk.connector(server).release(request)

    async def sleep(self, which: int, _: int, __: int) -> None:
        await self.desk.clock.sleep(PAUSES_S[which])

    async def end(self) -> tuple[int, int]:
        """Release all, and return how many blocks were stored and delivered."""
        await self.jobs.join()
        while self.open:
            await self.release(0, 0, 0)
        hits = 0
        for ticket, keys, buffers in self.loads:
            done = await ticket.done.wait()
            for key, buffer, result in zip(keys, buffers, done.results, strict=True):
                hits += result is HIT
                assert result is not HIT or self.desk.content().holds(buffer, key)
        stored = [(await ticket.done.wait()).results.count(STORED) for ticket in self.stores]
        return sum(stored), hits


def check_bytes(desk: Desk, stored: int, hits: int) -> None:
    """Copies carry whole blocks, those that arrived at least; what a port sends, one receives."""
    moved = {pipe.name: pipe.moved_bytes for pipe in desk.tier.pipes}
    copied = sum(nbytes for name, nbytes in moved.items() if name.endswith(".copy"))
    assert copied % BLOCK == 0
    assert copied >= (stored + hits) * BLOCK
    ports = {name: n for name, n in moved.items() if ".nic" in name}
    sent = sum(n for name, n in ports.items() if name.endswith("tx"))
    received = sum(n for name, n in ports.items() if name.endswith("rx"))
    assert sent == received
    if desk.tier.name in ("redis", "lmcache-redis"):
        assert moved["redis.thread"] == sent
    if desk.tier.name in BEHIND:
        counters = desk.tier.counters()
        assert counters["puts"] == stored, "every stored block is put, well or not"
        assert 0 <= counters["failed_puts"] <= stored


def live(name: str, life: list[tuple[str, int, int, int]]) -> None:
    desk = Desk(name, servers=SERVERS, block_tokens=128, **TIGHT[name])

    async def test() -> None:
        person = Life(desk)
        for step in life:
            await person.step(*step)
        stored, hits = await person.end()
        await desk.settle()
        assert not desk.tier.at_rest()
        if name != "hymcache":
            check_bytes(desk, stored, hits)

    desk.run(test)


def machine(name: str, examples: int) -> Callable[[], None]:
    """Return a test of one tier."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(steps, min_size=20, max_size=50))
    def test(life: list[tuple[str, int, int, int]]) -> None:
        live(name, life)

    return test  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["lmcache-local", *BEHIND])
def test_models_keep_the_contract_whatever_happens(name: str) -> None:
    machine(name, 60)()


@pytest.mark.parametrize("name", ["tract", "hymcache"])
def test_real_systems_keep_it_too(name: str) -> None:
    machine(name, 12)()


@pytest.mark.parametrize("name", [name for name in TIGHT if name not in ("tract", "hymcache")])
def test_close_in_the_midst_of_everything_gives_all_back(name: str) -> None:
    for pause in PAUSES_S[:5]:
        desk = Desk(name, servers=2, block_tokens=128, **TIGHT[name])

        async def test(desk: Desk = desk, pause: float = pause) -> None:
            life = Life(desk)
            await life.alien(0, 0, LENGTH)
            await desk.clock.sleep(0.02)
            await life.lookup(0, 0, LENGTH)
            await life.load(0, 0, LENGTH)
            await life.alien(1, 0, LENGTH)
            await life.lookup(1, 1, LENGTH)
            await life.store(1, 3, LENGTH)
            await desk.clock.sleep(pause)
            life.open.clear()
            await desk.tier.close()
            stored, _ = await life.end()
            assert not desk.tier.at_rest()
            if name in BEHIND:
                assert desk.tier.counters()["puts"] == stored

        desk.run(test)


@pytest.mark.parametrize("name", ["lmcache-local", "mooncake", "mooncake-nvmeof", "redis"])
def test_64_servers_at_once(name: str) -> None:
    desk = Desk(name, servers=64, capacity_bytes=1 << 40)

    async def test() -> None:
        servers = range(64)
        works = [desk.store(chain(10, server), server=server) for server in servers]
        await desk.clock.gather(*works)
        await desk.tier.quiesce()
        reads = [desk.read(chain(10, server), server=server) for server in servers]
        assert await desk.clock.gather(*reads) == [10] * 64

    desk.run(test)


@pytest.mark.parametrize("block_tokens", [48, 96, 300, 512])
@pytest.mark.parametrize("name", ["lmcache-local", "redis", "lmcache-redis"])
def test_blocks_that_do_not_divide_a_chunk(name: str, block_tokens: int) -> None:
    desk = Desk(name, block_tokens=block_tokens)

    async def test() -> None:
        each = max(1, 256 // block_tokens)
        await desk.store(chain(17))
        await desk.tier.quiesce()
        assert await desk.read(chain(17)) == 17 // each * each

    desk.run(test)
