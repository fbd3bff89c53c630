"""The contract of ``kv/connector.py``, for every tier of the catalog that has connectors."""

from __future__ import annotations

from typing import Any

import pytest

from cxlbench.harness.tiers.catalog import CATALOG
from cxlbench.kv.connector import Work
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import GIB, Desk, chain

HIT, MISS, CANCELLED = KeyResult.HIT, KeyResult.MISS, KeyResult.CANCELLED
STORED, EXISTS = KeyResult.STORED, KeyResult.EXISTS

WITHOUT = {"recompute", "gpu-prefix-cache", "nixl"}
NAMES = [name for name in CATALOG if name not in WITHOUT]
SHARED = [name for name in NAMES if name != "lmcache-local"]
SMALL: dict[str, dict[str, Any]] = {
    "lmcache-local": {"capacity_bytes": 4 * GIB},
    "mooncake": {"capacity_bytes": 8 * GIB},
    "redis": {"capacity_bytes": 4 * GIB},
    "lmcache-redis": {"capacity_bytes": 4 * GIB, "local_bytes": 4 * GIB},
    "tract": {"capacity_bytes": 4 * GIB},
    "mooncake-nvmeof": {"capacity_bytes": 8 * GIB},
}
"""Small enough to be quick, large enough to hold what is stored here."""


@pytest.fixture(params=NAMES)
def desk(request: pytest.FixtureRequest) -> Desk:
    """Return a desk with the tier, two servers and blocks of 16 MiB."""
    return Desk(request.param, **SMALL.get(request.param, {}))


@pytest.fixture(params=SHARED)
def shared(request: pytest.FixtureRequest) -> Desk:
    """Return a desk whose servers share the tier."""
    return Desk(request.param, **SMALL.get(request.param, {}))


def test_what_was_stored_comes_back(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(40)
        await desk.stored(keys)
        assert await desk.read(keys) == 40
        assert await desk.read(chain(10, 1)) == 0

    desk.run(test)


def test_servers_share_what_any_of_them_stored(shared: Desk) -> None:
    async def test() -> None:
        keys = chain(20)
        await shared.stored(keys, server=0)
        works = [shared.read(keys, server=server) for server in range(2)]
        assert await shared.clock.gather(*works) == [20, 20]

    shared.run(test)


def test_a_block_asked_for_in_another_size_is_never_delivered(desk: Desk) -> None:
    async def test() -> None:
        keys, half = chain(3), desk.size // 2
        await desk.stored(keys)
        await desk.lookup(1, keys, size=half)
        assert (await desk.load(1, keys, size=half)).results == (MISS,) * 3
        desk.connector().release(1)

    desk.run(test)


def test_a_store_answers_for_each_key(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(8)
        await desk.stored(keys[2:4])
        assert (await desk.store(keys)).results == (STORED, STORED, EXISTS, EXISTS, *[STORED] * 4)
        await desk.tier.quiesce()
        assert (await desk.store(keys)).results == (EXISTS,) * 8

    desk.run(test)


def test_a_load_answers_for_each_key(desk: Desk) -> None:
    async def test() -> None:
        keys, strangers = chain(6), chain(2, 2)
        await desk.stored(keys)
        assert (await desk.lookup(1, keys)).results == (HIT,) * 6
        assert (await desk.load(1, [*keys, *strangers])).results == (HIT,) * 6 + (MISS,) * 2
        desk.connector().release(1)

    desk.run(test)


def test_a_lookup_counts_the_blocks_up_to_the_first_one_missing(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(6)
        await desk.stored(keys[:2])
        await desk.stored(keys[3:])
        assert (await desk.lookup(1, keys)).leading_hits == 2
        desk.connector().release(1)

    desk.run(test)


def test_what_the_engine_has_is_not_looked_up(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(5)
        await desk.stored(keys)
        assert (await desk.lookup(1, keys, matched=2)).results == (HIT,) * 3
        assert (await desk.load(1, keys[2:])).results == (HIT,) * 3
        desk.connector().release(1)
        assert (await desk.lookup(2, keys, matched=5)).results == ()
        desk.connector().release(2)

    desk.run(test)


def test_some_of_the_blocks_can_be_loaded_and_the_rest_later(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(40)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        for part in (keys[20:], keys[:10], keys[5:30]):
            assert set((await desk.load(1, part)).results) == {HIT}
        desk.connector().release(1)

    desk.run(test)


def test_empty_calls_end(desk: Desk) -> None:
    async def test() -> None:
        assert (await desk.lookup(1, [])).results == ()
        assert (await desk.load(1, [])).results == ()
        assert (await desk.store([])).results == ()
        desk.connector().release(1)

    desk.run(test)


def test_completions_can_be_polled(desk: Desk) -> None:
    async def test() -> None:
        keys, connector = chain(2), desk.connector()
        assert connector.poll() == []
        await desk.store(keys, request=7)
        await desk.lookup(8, keys)
        polled = [(done.request_id, done.work) for done in connector.poll()]
        assert polled == [(7, Work.STORE), (8, Work.LOOKUP)]
        assert connector.poll() == []
        connector.release(8)

    desk.run(test)


def test_the_time_of_a_block_runs_from_the_question_to_the_bytes(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys)
        await desk.lookup(5, keys)
        began = desk.clock.now()
        await desk.load(5, keys)
        desk.connector().release(5)
        assert len(desk.blocks) == 3
        for times in desk.blocks:
            assert (times.request_id, times.nbytes) == (5, desk.size)
            assert began <= times.asked_s < times.due_s <= times.done_s <= desk.clock.now()

    desk.run(test)


def test_calls_that_make_no_sense_are_refused_and_hold_nothing(desk: Desk) -> None:
    async def test() -> None:
        keys, connector = chain(3), desk.connector()
        buffers = [desk.empty() for _ in keys]
        with pytest.raises(ValueError, match=r"matched must be within 0\.\.3, got 4"):
            connector.submit_lookup(1, keys, desk.size, matched=4)
        with pytest.raises(ValueError, match="got 0 B"):
            connector.submit_lookup(1, keys, 0)
        with pytest.raises(ValueError, match="no lookup, or was released"):
            connector.submit_load(1, keys, buffers)
        connector.submit_lookup(1, keys, desk.size)
        with pytest.raises(ValueError, match="has not ended"):
            connector.submit_load(1, keys, buffers)
        with pytest.raises(ValueError, match="open already"):
            connector.submit_lookup(1, keys, desk.size)
        await desk.clock.sleep(0.01)
        with pytest.raises(ValueError, match="3 keys need as many buffers, got 2"):
            connector.submit_load(1, keys, buffers[:2])
        with pytest.raises(ValueError, match="3 keys need as many buffers, got 2"):
            connector.submit_store(1, keys, buffers[:2])
        with pytest.raises(ValueError, match="one size"):
            connector.submit_store(1, keys[:2], [desk.empty(8192), desk.empty(4096)])
        for request in (1, 1, 12345):
            connector.release(request)

    desk.run(test)


def test_a_closed_connector_refuses(desk: Desk) -> None:
    async def test() -> None:
        await desk.connector().close()
        with pytest.raises(RuntimeError, match="closed"):
            desk.connector().submit_lookup(1, chain(1), desk.size)

    desk.run(test)


def test_a_request_that_is_released_in_its_lookup_keeps_nothing(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(5)
        await desk.stored(keys)
        ticket = desk.connector().submit_lookup(1, keys, desk.size)
        await desk.clock.sleep(1e-6)
        assert not ticket.done.is_set()
        desk.connector().release(1)
        assert set((await ticket.done.wait()).results) == {CANCELLED}
        await desk.settle()
        assert not desk.tier.at_rest()
        assert await desk.read(keys) == 5

    desk.run(test)


def test_a_request_that_is_released_in_its_load_ends_soon_and_what_is_hit_is_right(
    desk: Desk,
) -> None:
    async def test() -> None:
        keys = chain(60)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        buffers = [desk.empty() for _ in keys]
        ticket = desk.connector().submit_load(1, keys, buffers)
        await desk.clock.sleep(0.012)
        assert not ticket.done.is_set()
        released = desk.clock.now()
        desk.connector().release(1)
        results = (await ticket.done.wait()).results
        assert desk.clock.now() - released < 0.2
        assert results.count(CANCELLED) > 0
        assert set(results) <= {HIT, CANCELLED}
        for key, buffer, result in zip(keys, buffers, results, strict=True):
            assert result is not HIT or desk.content().holds(buffer, key)
        await desk.settle()
        assert await desk.read(keys) == 60

    desk.run(test)


def test_nobody_writes_into_a_buffer_after_its_ticket_has_ended(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(30)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        buffers = [desk.empty() for _ in keys]
        ticket = desk.connector().submit_load(1, keys, buffers)
        await desk.clock.sleep(0.005)
        desk.connector().release(1)
        await ticket.done.wait()
        before = [buffer.tag for buffer in buffers]  # type: ignore[union-attr]
        await desk.clock.sleep(1.0)
        assert before == [buffer.tag for buffer in buffers]  # type: ignore[union-attr]

    desk.run(test)


def test_a_store_goes_on_after_release(desk: Desk) -> None:
    async def test() -> None:
        keys = chain(20)
        await desk.lookup(1, keys)
        buffers = [desk.content().make(key) for key in keys]
        ticket = desk.connector().submit_store(1, keys, buffers)
        desk.connector().release(1)
        assert (await ticket.done.wait()).results == (STORED,) * 20
        await desk.tier.quiesce()
        assert await desk.read(keys) == 20

    desk.run(test)


def test_of_two_servers_that_store_one_chain_both_get_answers(shared: Desk) -> None:
    async def test() -> None:
        keys = chain(20)
        both = await shared.clock.gather(*[shared.store(keys, server=s) for s in range(2)])
        for done in both:
            assert set(done.results) <= {STORED, EXISTS}
        assert all(STORED in pair for pair in zip(*[d.results for d in both], strict=True))
        await shared.tier.quiesce()
        assert await shared.read(keys) == 20

    shared.run(test)


def test_close_ends_everything(desk: Desk) -> None:
    async def test() -> None:
        keys, connector = chain(40), desk.connector()
        await desk.stored(keys)
        await desk.lookup(1, keys)
        tickets = [
            connector.submit_load(1, keys, [desk.empty() for _ in keys]),
            connector.submit_lookup(2, keys, desk.size),
            connector.submit_store(3, chain(20, 1), [desk.empty() for _ in range(20)]),
        ]
        await connector.close()
        assert all(ticket.done.is_set() for ticket in tickets)
        assert not any(connector.at_rest().values())

    desk.run(test)
