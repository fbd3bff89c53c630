"""LMCache over Redis: eviction by samples, broken chains, puts in the background."""

from __future__ import annotations

import pytest

from cxlbench.devices.profile import (
    CopyEngineProfile,
    load_as,
)
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import BLOCK, Desk, chain

HIT, MISS = KeyResult.HIT, KeyResult.MISS
STORED, NO_SPACE = KeyResult.STORED, KeyResult.NO_SPACE
COPY = load_as(CopyEngineProfile, "gpu-copy-gen4x16")


@pytest.mark.parametrize("name", ["mooncake", "mooncake-nvmeof", "redis", "lmcache-redis"])
def test_a_store_ends_with_the_copies_and_the_put_goes_on(name: str) -> None:
    desk = Desk(name)

    async def test() -> None:
        keys, began = chain(40), desk.clock.now()
        assert (await desk.store(keys)).results == (STORED,) * 40
        assert desk.clock.now() - began == pytest.approx(40 * BLOCK / COPY.bandwidth, rel=0.2)
        assert desk.tier.at_rest()["puts"] > 0
        assert desk.tier.counters()["puts"] < 40
        await desk.tier.quiesce()
        assert not desk.tier.at_rest()
        assert (desk.tier.counters()["puts"], desk.tier.counters()["failed_puts"]) == (40, 0)
        assert await desk.read(keys) == 40

    desk.run(test)


def test_what_redis_has_not_taken_yet_is_found_in_the_local_cache_only() -> None:
    for name, found in (("redis", 0), ("lmcache-redis", 40)):
        desk = Desk(name)

        async def test(desk: Desk = desk, found: int = found) -> None:
            buffers = [desk.content().make(key) for key in chain(40)]
            ticket = desk.connector().submit_store(0, chain(40), buffers)
            await ticket.done.wait()
            assert (await desk.lookup(1, chain(40))).leading_hits in range(found, found + 12)
            desk.connector().release(1)

        desk.run(test)


def test_close_waits_for_puts() -> None:
    desk = Desk("lmcache-redis")

    async def test() -> None:
        await desk.store(chain(40))
        await desk.connector().close()
        assert desk.tier.counters()["puts"] == 40
        assert not desk.tier.at_rest()

    desk.run(test)


def test_a_get_overtakes_puts() -> None:
    desk = Desk("redis")

    async def test() -> None:
        await desk.stored(chain(8, 1))
        await desk.store(chain(200, 2))  # 4 s of SETs
        began = desk.clock.now()
        assert await desk.read(chain(8, 1)) == 8
        assert desk.clock.now() - began < 0.3

    desk.run(test)


def test_a_buffer_that_cuts_a_chunk_keeps_whole_chunks_only() -> None:
    desk = Desk("redis", block_tokens=128, buffer_bytes=7 * BLOCK)

    async def test() -> None:
        results = (await desk.store(chain(20))).results
        kept = results.count(STORED)
        assert kept in (6, 8)
        assert results == (STORED,) * kept + (NO_SPACE,) * (20 - kept)
        await desk.tier.quiesce()
        assert desk.tier.counters()["failed_puts"] == 0
        assert await desk.read(chain(20)) == kept

    desk.run(test)


def test_without_a_local_cache_stores_fail_that_redis_is_too_slow_for() -> None:
    desk = Desk("redis", buffer_bytes=10 * BLOCK)

    async def test() -> None:
        done = await desk.store(chain(40))
        stored = done.results.count(STORED)
        assert 8 <= stored <= 12
        assert done.results == (STORED,) * stored + (NO_SPACE,) * (40 - stored)

    desk.run(test)


def test_eviction_takes_heads_metadata_and_values_alike_and_breaks_chains() -> None:
    desk = Desk("redis", capacity_bytes=100 * BLOCK)

    async def test() -> None:
        chains = [chain(20, number) for number in range(8)]
        for keys in chains:
            await desk.clock.sleep(2)
            await desk.store(keys)
        await desk.tier.quiesce()
        redis = desk.tier.redis
        assert redis.evicted_metadata > 10
        assert redis.evicted_values > 10
        kept = sum(redis.exists(key) for keys in chains for key in keys)
        usable = sum([await desk.read(keys) for keys in chains])
        assert usable < 0.9 * kept

    desk.run(test)


def test_a_value_that_is_gone_is_a_miss_and_then_not_found() -> None:
    desk = Desk("redis")

    async def test() -> None:
        keys, redis = chain(3), desk.tier.redis
        await desk.stored(keys)
        redis._delete(redis._keys[(keys[1], False)])
        assert (await desk.lookup(1, keys)).leading_hits == 3
        assert (await desk.load(1, keys)).results == (HIT, MISS, HIT)
        desk.connector().release(1)
        assert await desk.read(keys) == 1

    desk.run(test)


def test_without_eviction_a_full_redis_refuses() -> None:
    desk = Desk("redis", capacity_bytes=10 * BLOCK, policy="noeviction")

    async def test() -> None:
        assert (await desk.store(chain(20))).results == (STORED,) * 20
        await desk.tier.quiesce()
        # The tenth value fills the memory, so that its metadata is refused.
        assert desk.tier.counters()["failed_puts"] == 11
        assert await desk.read(chain(20)) == 9

    desk.run(test)


def test_small_commands_do_not_wait_for_large_values() -> None:
    desk = Desk("redis")

    async def test() -> None:
        await desk.stored(chain(2, 1))
        store = desk.connector().submit_store(0, chain(100), [desk.empty() for _ in range(100)])
        await desk.clock.sleep(0.5)
        began = desk.clock.now()
        await desk.lookup(1, chain(2, 1))
        assert desk.clock.now() - began < 0.001
        desk.connector().release(1)
        await store.done.wait()

    desk.run(test)


def test_a_chunk_read_from_redis_stays_in_the_local_cache() -> None:
    desk = Desk("lmcache-redis", local_bytes=30 * BLOCK)

    async def test() -> None:
        old = chain(20, 1)
        await desk.stored(old)
        await desk.stored(chain(30, 2))
        times = []
        for _ in range(2):
            began = desk.clock.now()
            assert await desk.read(old) == 20
            times.append(desk.clock.now() - began)
        assert times[1] < times[0] / 5

    desk.run(test)
