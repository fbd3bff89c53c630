"""Mooncake in DRAM and on SSDs: leases, watermarks, buffers, late puts and gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cxlbench.devices.profile import (
    ObjectStoreProfile,
    RemoteVolumeProfile,
    load_as,
)
from cxlbench.harness.tiers.segments import Segments
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import BLOCK, Desk, chain, slow

HIT, TIMEOUT = KeyResult.HIT, KeyResult.TIMEOUT
STORED, NO_SPACE = KeyResult.STORED, KeyResult.NO_SPACE


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
        assert (await desk.store(new)).results == (NO_SPACE,) * 20
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


@pytest.mark.parametrize(("late_puts", "found"), [("keep", 8), ("revoke", 0)])
def test_a_put_that_takes_too_long_goes_on_or_is_revoked(late_puts: str, found: int) -> None:
    desk = Desk("mooncake", put_timeout_s=0.001, late_puts=late_puts)

    async def test() -> None:
        assert (await desk.store(chain(8))).results == (STORED,) * 8
        await desk.tier.quiesce()
        counters = desk.tier.counters()
        assert (counters["puts"], counters["late_put_blocks"]) == (8, 8)
        assert counters["failed_puts"] == 8 - found
        assert await desk.read(chain(8)) == found

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
