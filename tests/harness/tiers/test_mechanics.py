"""What decides hits in each model: chunks, pins, leases, watermarks, buffers, failed stores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cxlbench.devices.profile import ObjectStoreProfile, RemoteVolumeProfile, load_as
from cxlbench.harness.tiers.catalog import CATALOG, UnknownTierError, tier
from cxlbench.harness.tiers.segments import Segments
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import GIB, MIB, Desk, chain

HIT, MISS = KeyResult.HIT, KeyResult.MISS
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE
TIMEOUT = KeyResult.TIMEOUT
BLOCK = 16 * MIB


def slow(kind: type[Any], **numbers: float) -> Any:
    """Return a source of profiles in which those of ``kind`` have other numbers."""

    def source(wanted: type[Any], name: str) -> Any:
        profile = load_as(wanted, name)
        return dataclasses.replace(profile, **numbers) if wanted is kind else profile

    return source


# -- local DRAM -----------------------------------------------------------------------------------


def test_only_whole_chunks_are_kept() -> None:
    desk = Desk("lmcache-local", block_tokens=128)

    async def test() -> None:
        keys = chain(5)
        assert (await desk.store(keys)).results == (STORED,) * 4 + (EXISTS,)
        assert await desk.read(keys) == 4

    desk.run(test)


def test_a_chunk_that_begins_in_the_gpu_is_kept_whole() -> None:
    desk = Desk("lmcache-local", block_tokens=128)

    async def test() -> None:
        keys = chain(8)
        await desk.store(keys[:5])
        await desk.lookup(1, keys, matched=5)
        assert (await desk.store(keys[5:], request=1)).results == (STORED,) * 3
        desk.connector().release(1)
        assert await desk.read(keys) == 8

    desk.run(test)


def test_tails_are_evicted_before_heads() -> None:
    desk = Desk("lmcache-local", capacity_bytes=10 * BLOCK)

    async def test() -> None:
        old = chain(6, 1)
        await desk.stored(old)
        await desk.read(old)
        await desk.stored(chain(7, 2))
        assert await desk.read(old) == 3

    desk.run(test)


def test_a_store_ends_where_everything_is_pinned() -> None:
    desk = Desk("lmcache-local", capacity_bytes=10 * BLOCK)

    async def test() -> None:
        held, new = chain(6, 1), chain(6, 2)
        await desk.stored(held)
        await desk.lookup(1, held)
        assert (await desk.store(new)).results == (STORED,) * 4 + (NO_SPACE,) * 2
        assert (await desk.load(1, held)).results == (HIT,) * 6
        desk.connector().release(1)
        assert await desk.read(new) == 4

    desk.run(test)


def test_servers_share_nothing() -> None:
    desk = Desk("lmcache-local")

    async def test() -> None:
        await desk.stored(chain(4), server=0)
        assert await desk.read(chain(4), server=1) == 0

    desk.run(test)


# -- distributed DRAM -----------------------------------------------------------------------------


def master(blocks: int, **numbers: Any) -> Segments:
    profile = dataclasses.replace(load_as(ObjectStoreProfile, "mooncake-store"), **numbers)
    return Segments(profile, blocks, 1, seed=0)


def fill(segments: Segments, begin: int, end: int, now: float) -> list[bool]:
    taken = []
    for number in range(begin, end):
        entry = segments.allocate(number.to_bytes(2, "big"), 1, now)
        if entry is not None:
            segments.commit(entry, number, now)
        taken.append(entry is not None)
    return taken


def test_above_the_watermark_a_share_is_evicted_oldest_first() -> None:
    segments = master(100)
    fill(segments, 0, 95, 1.0)
    segments.wake(1.015)
    assert segments.store.evicted == 0
    fill(segments, 95, 98, 1.02)
    segments.wake(1.031)
    # 3 % above the watermark, and 5 % more, of 98.
    assert segments.store.evicted == 8
    assert segments.store.find((7).to_bytes(2, "big")) is None
    assert segments.store.find((8).to_bytes(2, "big")) is not None


def test_the_master_looks_once_an_interval() -> None:
    segments = master(100)
    fill(segments, 0, 99, 1.0)
    segments.wake(1.0301)
    first = segments.store.evicted
    fill(segments, 100, 100 + first, 1.031)
    segments.wake(1.0399)
    assert segments.store.evicted == first
    segments.wake(1.0401)
    assert segments.store.evicted > first


def test_leased_objects_are_not_evicted_until_the_lease_ends() -> None:
    segments = master(100)
    fill(segments, 0, 100, 1.0)
    for number in range(50):
        assert segments.look(number.to_bytes(2, "big"), 1, 1.0) is not None
    segments.wake(1.1)
    assert segments.store.evicted == 10
    assert segments.store.find((0).to_bytes(2, "big")) is not None
    assert segments.store.find((50).to_bytes(2, "big")) is None


def test_an_allocation_that_fails_makes_the_master_evict() -> None:
    segments = master(100, eviction_high_watermark=1.0)
    assert fill(segments, 0, 101, 1.0) == [True] * 100 + [False]
    segments.wake(1.011)
    assert segments.store.evicted == 5
    assert fill(segments, 200, 203, 1.02) == [True] * 3


def test_a_put_without_room_in_the_buffer_fails_and_breaks_the_chain() -> None:
    desk = Desk("mooncake", buffer_bytes=10 * BLOCK)

    async def test() -> None:
        old, new = chain(10, 1), chain(20, 2)
        await desk.stored(old[:8])
        await desk.stored(old[8:])
        await desk.lookup(1, old)
        load = desk.connector().submit_load(1, old, [desk.empty() for _ in old])
        await desk.clock.sleep(0.002)
        assert (await desk.store(new)).results == (TIMEOUT,) * 20
        assert (await load.done.wait()).leading_hits == 10
        desk.connector().release(1)
        assert await desk.read(new) == 0
        await desk.stored(new[:8])

    desk.run(test)


def test_a_put_that_waits_for_the_buffer_gets_it_when_the_get_is_over() -> None:
    desk = Desk("mooncake", buffer_bytes=10 * BLOCK, buffer_wait_s=1)

    async def test() -> None:
        old = chain(10, 1)
        await desk.stored(old)
        await desk.lookup(1, old)
        load = desk.connector().submit_load(1, old, [desk.empty() for _ in old])
        await desk.clock.sleep(0.002)
        await desk.stored(chain(8, 2))
        assert load.done.is_set()
        desk.connector().release(1)

    desk.run(test)


def test_a_put_that_takes_too_long_is_revoked() -> None:
    desk = Desk("mooncake", put_timeout_s=0.001)

    async def test() -> None:
        assert (await desk.store(chain(8))).results == (TIMEOUT,) * 8
        assert await desk.read(chain(8)) == 0

    desk.run(test)


def test_a_get_that_takes_too_long_has_nothing() -> None:
    desk = Desk("mooncake-nvmeof", get_timeout_s=0.1)

    async def test() -> None:
        keys = chain(100)  # 1.68 GB at 6.5 GB/s
        await desk.stored(keys)
        await desk.lookup(1, keys)
        began = desk.clock.now()
        assert (await desk.load(1, keys)).results == (TIMEOUT,) * 100
        assert desk.clock.now() - began == pytest.approx(0.1)
        desk.connector().release(1)
        assert await desk.read(keys[:20]) == 20

    desk.run(test)


def test_bytes_that_come_after_the_lease_are_lost() -> None:
    desk = Desk("mooncake", profile=slow(ObjectStoreProfile, lease=0.02), segments=1)

    async def test() -> None:
        keys = chain(80)
        await desk.stored(keys)
        await desk.lookup(1, keys, server=1)
        results = (await desk.load(1, keys, server=1)).results
        hits = results.count(HIT)
        assert 8 <= hits < 40
        assert results == (HIT,) * hits + (KeyResult.LEASE_EXPIRED,) * (80 - hits)
        desk.connector(1).release(1)

    desk.run(test)


# -- NVMe-oF --------------------------------------------------------------------------------------


def test_volumes_that_nobody_else_reaches_are_caches_of_their_own() -> None:
    for reach, hits in (("own", 0), ("owner", 6)):
        desk = Desk("mooncake-nvmeof", reach=reach)

        async def test(desk: Desk = desk, hits: int = hits) -> None:
            await desk.stored(chain(6), server=0)
            assert await desk.read(chain(6), server=0) == 6
            assert await desk.read(chain(6), server=1) == hits

        desk.run(test)


def test_a_slow_file_system_bounds_what_fast_ssds_deliver() -> None:
    def load_s(bandwidth: float) -> float:
        desk = Desk("mooncake-nvmeof", profile=slow(RemoteVolumeProfile, file_bandwidth=bandwidth))

        async def test() -> float:
            await desk.stored(chain(40))
            began = desk.clock.now()
            await desk.read(chain(40))
            return desk.clock.now() - began

        took: float = desk.run(test)
        return took

    assert load_s(1e9) == pytest.approx(40 * BLOCK / 1e9, rel=0.05)
    assert load_s(1e12) < 40 * BLOCK / 15e9


# -- Redis ----------------------------------------------------------------------------------------


def test_without_a_local_cache_stores_fail_that_redis_is_too_slow_for() -> None:
    desk = Desk("redis", buffer_bytes=10 * BLOCK)

    async def test() -> None:
        done = await desk.store(chain(40))
        stored = done.results.count(STORED)
        assert 8 <= stored <= 12
        assert done.results == (STORED,) * stored + (TIMEOUT,) * (40 - stored)

    desk.run(test)


def test_eviction_takes_heads_metadata_and_values_alike_and_breaks_chains() -> None:
    desk = Desk("redis", capacity_bytes=100 * BLOCK)

    async def test() -> None:
        chains = [chain(20, number) for number in range(8)]
        for keys in chains:
            await desk.clock.sleep(2)
            await desk.store(keys)
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
        results = (await desk.store(chain(20))).results
        # The tenth value fills the memory, so that its metadata is refused.
        assert results == (STORED,) * 9 + (KeyResult.ERROR,) * 11

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


# -- the catalog ----------------------------------------------------------------------------------


def test_the_nearest_names_are_told() -> None:
    with pytest.raises(UnknownTierError, match="did you mean mooncake"):
        tier("moonkake")
    with pytest.raises(UnknownTierError, match="there are recompute, gpu-prefix-cache"):
        tier("xyz")


def test_every_tier_says_what_it_is_and_where_from() -> None:
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert entry.description
        assert entry.source
    assert not CATALOG["recompute"].prefix_caching
    assert CATALOG["gpu-prefix-cache"].prefix_caching


def test_capacity_is_per_server_locally_and_in_all_where_it_is_shared() -> None:
    local = Desk("lmcache-local", capacity_bytes=GIB)
    shared = Desk("mooncake", capacity_bytes=GIB)

    async def fill(desk: Desk) -> int:
        for server in range(2):
            for part in range(7):
                await desk.store(chain(56, server)[part * 8 : part * 8 + 8], server=server)
        return sum([await desk.read(chain(56, server), server=server) for server in range(2)])

    assert local.run(lambda: fill(local)) == 112
    assert shared.run(lambda: fill(shared)) < 64
