"""The connector on a whole HyMCache in virtual time: results, placement, refusal, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.hymcache.kv_manager import Placement
from cxlbench.hymcache.master import NodePolicy
from cxlbench.kv.connector import Work
from cxlbench.kv.footer import Verify
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import GIB, MIB, Rig, chain, faults, profile, small_profile

MakeRig = Callable[..., Rig]
HIT, MISS, ERROR = KeyResult.HIT, KeyResult.MISS, KeyResult.ERROR
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE
SMALL = 64 << 10


def small(make_rig: MakeRig, **options: Any) -> Rig:
    """Return a rig of real bytes, with blocks of 64 KiB."""
    extent = SMALL + PAGE_BYTES
    defaults = {
        "size": SMALL,
        "phantom": False,
        "device": small_profile(SMALL),
        "capacity": 200 * extent,
        "segment": 10 * extent,
        "window": 8 * SMALL,
    }
    return make_rig(**{**defaults, **options})


# -- what goes in comes out -----------------------------------------------------------------------


@pytest.mark.parametrize("verify", list(Verify))
def test_every_byte_comes_back(make_rig: MakeRig, verify: Verify) -> None:
    rig = small(make_rig, verify=verify)

    async def test() -> None:
        keys = chain(40)
        await rig.stored(keys)
        assert await rig.read(keys) == 40
        assert rig.connector.counters.loaded == 40

    rig.run(test)


def test_a_block_can_be_read_at_once_when_it_is_stored_and_before_it_is_flushed(
    make_rig: MakeRig,
) -> None:
    rig = small(make_rig, device=small_profile(SMALL, ssd={"write_bandwidth": 1e7}))

    async def test() -> None:
        keys = chain(4)
        assert (await rig.store(keys)).results == (STORED,) * 4
        assert await rig.read(keys) == 4
        assert rig.device.counters.reads_buffered == 4

    rig.run(test)


def test_blocks_of_several_sizes_are_used_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(devices=2, nodes=2)
    sizes = (16 * MIB, 32 * MIB, 168 * MIB)

    async def test() -> None:
        async def serve(number: int, size: int) -> None:
            keys = chain(30, number)
            for blocks in (6, 18, 30):
                loaded, done = await rig.turn(keys[:blocks], size=size)
                assert loaded == {6: 0, 18: 6, 30: 18}[blocks]
                assert set(done.results) == {STORED}
                await rig.quiesce()
            assert await rig.read(keys, size=size) == 30

        works = [serve(number, sizes[number % 3]) for number in range(9)]
        await rig.clock.gather(*works)

    rig.run(test)


def test_a_block_asked_for_in_another_size_is_a_miss(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(3)
        await rig.stored(keys)
        assert (await rig.lookup(1, keys, size=32 * MIB)).leading_hits == 3
        assert (await rig.load(1, keys, size=32 * MIB)).results == (MISS,) * 3
        rig.connector.release(1)

    rig.run(test)


def test_workers_share_what_any_of_them_stored(make_rig: MakeRig) -> None:
    rig = make_rig(workers=3, nodes=2)

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys, worker=0)
        works = [rig.read(keys, worker=worker) for worker in range(3)]
        assert await rig.clock.gather(*works) == [20, 20, 20]

    rig.run(test)


# -- a result for each key ------------------------------------------------------------------------


def test_a_store_answers_for_each_key(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(8)
        await rig.stored(keys[2:4])
        done = await rig.store(keys)
        assert done.results == (STORED, STORED, EXISTS, EXISTS, *[STORED] * 4)
        assert (await rig.store(keys)).results == (EXISTS,) * 8
        counters = rig.connector.counters
        assert (counters.stored, counters.exists) == (8, 10)

    rig.run(test)


def test_a_load_answers_for_each_key(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys, strangers = chain(6), chain(2, 2)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        assert (await rig.load(1, [*keys, *strangers])).results == (HIT,) * 6 + (MISS,) * 2
        assert (await rig.load(1, [*strangers, *keys])).results == (MISS,) * 8
        rig.connector.release(1)

    rig.run(test)


def test_some_of_the_blocks_can_be_loaded_and_the_rest_later(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(40)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        began = rig.clock.now()
        assert (await rig.load(1, keys[20:])).results == (HIT,) * 20
        assert (await rig.load(1, keys[:10])).results == (HIT,) * 10
        assert (await rig.load(1, keys[5:30])).results == (HIT,) * 25
        assert rig.clock.now() - began < 1.0
        assert rig.device.counters.reads_staged >= 20
        rig.connector.release(1)

    rig.run(test)


def test_empty_calls_end(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        assert (await rig.lookup(1, [])).results == ()
        assert (await rig.load(1, [])).results == ()
        assert (await rig.store([])).results == ()
        rig.connector.release(1)

    rig.run(test)


def test_completions_can_be_polled(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(2)
        assert rig.connector.poll() == []
        await rig.store(keys, request=7)
        await rig.lookup(8, keys)
        polled = rig.connector.poll()
        assert [(done.request_id, done.work) for done in polled] == [
            (7, Work.STORE),
            (8, Work.LOOKUP),
        ]
        assert rig.connector.poll() == []
        rig.connector.release(8)

    rig.run(test)


def test_the_time_of_a_block_runs_from_the_question_to_the_verified_bytes(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(3)
        await rig.stored(keys)
        await rig.lookup(5, keys)
        began = rig.clock.now()
        await rig.load(5, keys)
        rig.connector.release(5)
        assert len(rig.blocks) == 3
        for times in rig.blocks:
            assert times.request_id == 5
            assert times.nbytes == rig.size
            assert began <= times.asked_s < times.due_s <= times.done_s <= rig.clock.now()

    rig.run(test)


# -- misuse ---------------------------------------------------------------------------------------


def test_calls_that_make_no_sense_are_refused_and_hold_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(staging=32 * MIB)

    async def test() -> None:
        keys, connector = chain(3), rig.connector
        buffers = [rig.empty() for _ in keys]
        with pytest.raises(ValueError, match=r"matched must be within 0\.\.3, got 4"):
            connector.submit_lookup(1, keys, rig.size, matched=4)
        with pytest.raises(ValueError, match="got 0 B"):
            connector.submit_lookup(1, keys, 0)
        with pytest.raises(ValueError, match="33554432 B of the staging buffer, got 33554433 B"):
            connector.submit_lookup(1, keys, 32 * MIB + 1)
        with pytest.raises(ValueError, match="no lookup, or was released"):
            connector.submit_load(1, keys, buffers)
        connector.submit_lookup(1, keys, rig.size)
        with pytest.raises(ValueError, match="has not ended"):
            connector.submit_load(1, keys, buffers)
        with pytest.raises(ValueError, match="open already"):
            connector.submit_lookup(1, keys, rig.size)
        await rig.clock.sleep(0.01)
        with pytest.raises(ValueError, match="3 keys need as many buffers, got 2"):
            connector.submit_load(1, keys, buffers[:2])
        with pytest.raises(ValueError, match="3 keys need as many buffers, got 2"):
            connector.submit_store(1, keys, buffers[:2])
        with pytest.raises(ValueError, match="staging buffer"):
            connector.submit_load(1, keys, [rig.empty(33 * MIB) for _ in keys])
        with pytest.raises(ValueError, match="staging buffer"):
            connector.submit_store(1, keys, [rig.empty(33 * MIB) for _ in keys])
        with pytest.raises(ValueError, match="one size"):
            connector.submit_store(1, keys[:2], [rig.empty(MIB), rig.empty(2 * MIB)])
        connector.release(1)
        connector.release(1)
        connector.release(12345)

    rig.run(test)


def test_a_closed_connector_refuses(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.connector.close()
        with pytest.raises(RuntimeError, match="closed"):
            rig.connector.submit_lookup(1, chain(1), rig.size)
        assert rig.connector.at_rest()["requests"] == 0

    rig.run(test)


# -- placement ------------------------------------------------------------------------------------


def places(rig: Rig, keys: list[bytes]) -> set[tuple[int, int] | None]:
    return {rig.place(key) for key in keys}


def test_a_chain_stays_on_one_device_of_one_node_across_turns(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2)

    async def test() -> None:
        chains = [chain(40, number) for number in range(4)]
        for blocks in (10, 25, 40):
            for keys in chains:
                await rig.turn(keys[:blocks])
                await rig.quiesce()
        homes = [places(rig, keys) for keys in chains]
        assert all(len(home) == 1 for home in homes)
        assert set().union(*homes) == {(0, 0), (0, 1), (1, 0), (1, 1)}

    rig.run(test)


def test_a_chain_stays_where_it_is_when_the_engine_still_has_its_head(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2)

    async def test() -> None:
        keys = chain(40)
        await rig.turn(keys[:10])
        for begin, end in ((10, 20), (20, 40)):
            request = rig.name()
            found = await rig.lookup(request, keys[:end], matched=begin)
            assert found.leading_hits == 0
            done = await rig.store(keys[begin:end], request=request)
            assert set(done.results) == {STORED}
            rig.connector.release(request)
        assert len(places(rig, keys)) == 1

    rig.run(test)


def test_blocks_that_are_generated_follow_their_prompt(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2)

    async def test() -> None:
        keys = chain(40)
        await rig.turn(keys[:10])
        request = rig.name()
        await rig.lookup(request, keys[:10], matched=10)
        done = await rig.store(keys[10:14], request=request)
        assert set(done.results) == {STORED}
        rig.connector.release(request)
        assert len(places(rig, keys[:14])) == 1

    rig.run(test)


def test_a_chain_that_is_offered_whole_goes_on_where_its_head_is(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2)

    async def test() -> None:
        keys = chain(80)
        await rig.store(keys[:40])
        await rig.quiesce()
        done = await rig.store(keys)
        assert done.results == (EXISTS,) * 40 + (STORED,) * 40
        assert len(places(rig, keys)) == 1

    rig.run(test)


def test_one_store_of_several_batches_stays_together(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=3, devices=2)

    async def test() -> None:
        keys = chain(100)
        assert set((await rig.store(keys)).results) == {STORED}
        assert len(places(rig, keys)) == 1

    rig.run(test)


def test_chains_that_span_nodes_and_devices_are_read_whole(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2)

    async def test() -> None:
        keys = chain(60)
        spans = [(0, 0), (0, 1), (1, 1), (0, 0), (1, 0), (1, 1)]
        for number, (node, device) in enumerate(spans):
            await rig.store_at(keys[number * 10 : number * 10 + 10], node, device)
        await rig.quiesce()
        assert await rig.read(keys) == 60
        assert rig.connector.counters.mismatched == 0

    rig.run(test)


def test_load_aware_placement_levels_chains_of_different_length(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2, devices=2, placement=Placement.LOAD_AWARE, policy=NodePolicy.MOST_FREE)

    async def test() -> None:
        for number, blocks in enumerate([24, 2, 9, 14, 3, 20, 5, 11, 7, 16]):
            await rig.stored(chain(blocks, number)[:8])
            await rig.turn(chain(blocks, number))
            await rig.quiesce()
        used = [a.live_extents for m in rig.nodes.values() for a in m.allocators]
        assert sum(used) == 111
        assert max(used) - min(used) <= 24

    rig.run(test)


# -- write admission ------------------------------------------------------------------------------


def test_a_full_write_buffer_skips_at_once_and_a_later_turn_stores(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB), link_bytes_per_s=1e12)

    async def test() -> None:
        keys = chain(40)
        loaded, done = await rig.turn(keys)
        first = done.results.count(STORED)
        assert loaded == 0
        assert 16 <= first < 40
        assert done.results == (STORED,) * first + (NO_SPACE,) * (40 - first)
        # Nobody waited for a flush: 16 blocks take 40 ms to flush.
        assert rig.clock.now() < 0.015
        assert rig.connector.counters.skipped == 40 - first
        loaded, done = await rig.turn(keys)
        assert loaded == first
        while set(done.results) != {STORED}:
            await rig.quiesce()
            loaded, done = await rig.turn(keys)
        assert await rig.read(keys) == 40

    rig.run(test)


def test_after_a_refusal_no_tail_is_stored_without_its_head(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB), link_bytes_per_s=1e12)

    async def test() -> None:
        chains = [chain(120, number) for number in range(6)]
        await rig.clock.gather(*[rig.store(keys) for keys in chains])
        await rig.quiesce()
        for keys in chains:
            there = [rig.place(key) is not None for key in keys]
            assert there == sorted(there, reverse=True)

    rig.run(test)


def test_of_two_workers_that_store_one_chain_each_block_is_stored_by_one(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(workers=2, nodes=2)

    async def test() -> None:
        keys = chain(20)
        first, second = await rig.clock.gather(rig.store(keys, worker=0), rig.store(keys, worker=1))
        for one, other in zip(first.results, second.results, strict=True):
            assert {one, other} == {STORED, EXISTS}
        assert await rig.read(keys) == 20

    rig.run(test)


# -- staging buffer -------------------------------------------------------------------------------


def test_the_staging_buffer_bounds_what_is_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(staging=32 * MIB)

    async def test() -> None:
        chains = [chain(12, number) for number in range(6)]
        for keys in chains:
            await rig.stored(keys)
        works = [rig.read(keys) for keys in chains] + [rig.store(chain(12, 99))]
        await rig.clock.gather(*works)  # type: ignore[arg-type]
        assert rig.connector.staging.peak <= 32 * MIB
        assert rig.connector.counters.loaded == 72

    rig.run(test)


# -- deadline -------------------------------------------------------------------------------------


def test_a_load_that_is_not_done_after_10_s_ends_with_what_it_has(make_rig: MakeRig) -> None:
    rule = FaultRule(point="ssd.read", kind="delay", skip=3, limit=1, delay_s=30.0)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        began = rig.clock.now()
        done = await rig.load(1, keys)
        assert rig.clock.now() - began == pytest.approx(10.0)
        assert done.leading_hits == 3
        assert done.results[3] is KeyResult.TIMEOUT
        assert set(done.results[3:]) <= {HIT, KeyResult.TIMEOUT}
        assert rig.connector.counters.timed_out == done.results.count(KeyResult.TIMEOUT)
        rig.connector.release(1)
        await rig.clock.sleep(0.1)
        held = {name: count for name, count in rig.at_rest().items() if count}
        # The frames come back when the SSD has answered, and not before.
        assert held == {"staging frames": 8, "footer slots": 1}
        assert rig.connector.staging.used == 0
        await rig.clock.sleep(25)
        assert await rig.read(keys) == 20

    rig.run(test)


def test_a_read_that_hangs_does_not_touch_what_is_stored_at_its_address_next(
    make_rig: MakeRig,
) -> None:
    extent = 16 * MIB + PAGE_BYTES
    rule = FaultRule(point="ssd.read", kind="delay", limit=1, delay_s=30.0)
    rig = make_rig(capacity=extent, segment=extent, fault_plan=faults(rule))

    async def test() -> None:
        old, new = chain(1, 1), chain(1, 2)
        await rig.stored(old)
        await rig.lookup(1, old)
        await rig.clock.sleep(0.01)
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        rig.master.evict(old)
        await rig.stored(new)
        began = rig.clock.now()
        assert await rig.read(new) == 1
        assert rig.clock.now() - began < 1.0

    rig.run(test, settle_s=40)


def test_a_timed_out_load_gives_its_tokens_back_before_the_request_is_released(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="ssd.read", kind="delay", delay_s=30.0)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(8)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        done = await rig.load(1, keys)
        assert set(done.results) == {KeyResult.TIMEOUT}
        await rig.clock.sleep(0.01)
        assert rig.node.at_rest()["read tokens"] == 0
        rig.connector.release(1)

    rig.run(test, settle_s=40)


def test_a_lease_that_has_ended_refuses_the_read(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(5)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        await rig.clock.sleep(11.5)
        done = await rig.load(1, keys)
        assert done.results[0] is KeyResult.LEASE_EXPIRED
        assert HIT not in done.results
        assert rig.node.at_rest()["streams"] == 0
        rig.connector.release(1)

    rig.run(test)


def test_a_lease_that_ends_during_the_load_refuses_the_rest(make_rig: MakeRig) -> None:
    rig = make_rig(lease_s=0.02, link_bytes_per_s=5e9)

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        done = await rig.load(1, keys)
        assert 0 < done.leading_hits < 20
        assert done.results[done.leading_hits] is KeyResult.LEASE_EXPIRED
        rig.connector.release(1)

    rig.run(test)


# -- faults on the wire and in the devices --------------------------------------------------------


@pytest.mark.parametrize("phantom", [True, False])
@pytest.mark.parametrize("point", ["fabric.read", "ssd.read"])
def test_damaged_bytes_are_a_miss_and_their_entry_is_dropped(
    make_rig: MakeRig, point: str, phantom: bool
) -> None:
    rule = FaultRule(point=point, kind="corrupt", skip=2, limit=1)
    plan = faults(rule)
    rig = make_rig(fault_plan=plan) if phantom else small(make_rig, fault_plan=plan)

    async def test() -> None:
        keys = chain(6)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        done = await rig.load(1, keys)
        assert done.results[:3] == (HIT, HIT, MISS)
        assert rig.connector.counters.mismatched == 1
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        assert rig.place(keys[2]) is None
        assert rig.master.counters.dropped == 1
        assert (await rig.store(keys)).results.count(STORED) == 1
        assert await rig.read(keys) == 6

    rig.run(test)


@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(point="fabric.read", kind="down", skip=2, limit=1),
        FaultRule(point="ssd.read", kind="error", skip=2, limit=1),
    ],
    ids=["link down", "media error"],
)
def test_a_read_that_fails_is_an_error_and_not_a_miss(make_rig: MakeRig, rule: FaultRule) -> None:
    """What the device cannot give is forgotten; what the link did not bring is still there."""
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        done = await rig.load(1, keys)
        assert done.results[:3] == (HIT, HIT, ERROR)
        assert rig.connector.counters.failed == 1
        assert done.results[12:] == (MISS,) * 8  # not asked for any more
        await rig.clock.sleep(0.05)
        assert rig.node.at_rest()["read tokens"] <= 8
        rig.connector.release(1)
        assert await rig.read(keys) == (2 if rule.point == "ssd.read" else 20)

    rig.run(test)


@pytest.mark.parametrize("kind", ["error", "short"])
def test_what_cannot_be_flushed_is_not_found_any_more(make_rig: MakeRig, kind: Any) -> None:
    rule = FaultRule(point="ssd.write", kind=kind, skip=2, limit=3)
    rig = small(make_rig, fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(6)
        await rig.store(keys)
        await rig.quiesce()
        assert [rig.place(key) is not None for key in keys] == [True, True, False, True, True, True]
        assert await rig.read(keys) == 2

    rig.run(test)


def test_an_object_that_is_lost_between_lookup_and_load_is_one_miss(make_rig: MakeRig) -> None:
    rule = FaultRule(point="ssd.write", kind="error", skip=1, limit=3)
    rig = make_rig(fault_plan=faults(rule), device=profile(ssd={"write_bandwidth": 1e9}))

    async def test() -> None:
        keys = chain(3)
        await rig.store(keys)
        assert (await rig.lookup(1, keys)).leading_hits == 3
        await rig.quiesce()
        done = await rig.load(1, keys)
        assert done.results[:2] == (HIT, MISS)
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        assert await rig.read(keys) == 1

    rig.run(test)


def test_a_write_that_fails_is_not_published_nor_is_what_follows_it(make_rig: MakeRig) -> None:
    rule = FaultRule(point="fabric.write", kind="down", skip=2, limit=1)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(50)
        done = await rig.store(keys)
        assert done.results == (STORED, STORED, *[ERROR] * 48)
        await rig.clock.sleep(0.01)
        assert await rig.read(keys) == 2
        assert (await rig.store(keys)).results == (EXISTS, EXISTS, *[STORED] * 48)

    rig.run(test)


def test_a_write_slower_than_its_reservation_is_refused_and_given_back(make_rig: MakeRig) -> None:
    rule = FaultRule(point="fabric.write", kind="delay", limit=1, delay_s=9.9999)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(3)
        assert (await rig.store(keys)).results == (ERROR,) * 3
        assert rig.node.expired_reservations == 3
        await rig.clock.sleep(0.01)
        assert (await rig.store(keys)).results == (STORED,) * 3

    rig.run(test)


STEPS = {"allocate": ("master", 0), "reserve": ("node0", 0), "commit": ("node0", 1)}


@pytest.mark.parametrize("step", [*STEPS, "register"])
def test_a_store_whose_message_is_lost_leaves_nothing_behind(make_rig: MakeRig, step: str) -> None:
    where, skip = STEPS.get(step, ("master", 1))
    rule = FaultRule(point="control", kind="down", where=where, skip=skip, limit=1)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(40)
        assert (await rig.store(keys)).results == (ERROR,) * 40
        await rig.clock.sleep(0.001)
        await rig.quiesce()
        assert not rig.at_rest()
        assert await rig.read(keys) == 0
        assert (await rig.store(keys)).results == (STORED,) * 40
        assert await rig.read(keys) == 40

    rig.run(test)


def test_what_earlier_batches_of_a_store_have_done_stays_done(make_rig: MakeRig) -> None:
    rule = FaultRule(point="control", kind="down", where="node0", skip=2)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        done = await rig.store(chain(50))
        assert done.results == (STORED,) * 32 + (ERROR,) * 18
        assert rig.connector.counters.stored == 32

    rig.run(test)


def test_a_slow_registration_is_refused_and_the_space_comes_back(make_rig: MakeRig) -> None:
    rule = FaultRule(point="control", kind="delay", where="master", skip=1, limit=1, delay_s=12.0)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(3)
        assert (await rig.store(keys)).results == (KeyResult.LEASE_EXPIRED,) * 3
        assert rig.node.allocators[0].live_extents == 0
        assert (await rig.store(keys)).results == (STORED,) * 3

    rig.run(test)


def test_a_slow_writer_does_not_disturb_who_stored_the_key_after_its_deadline(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="control", kind="delay", where="master", skip=1, limit=1, delay_s=13.0)
    rig = make_rig(fault_plan=faults(rule), workers=2)

    async def test() -> None:
        keys = chain(3)
        slow = rig.clock.spawn(rig.store(keys, worker=0))
        await rig.clock.sleep(11.5)
        assert (await rig.store(keys, worker=1)).results == (STORED,) * 3
        assert (await slow).results == (KeyResult.LEASE_EXPIRED,) * 3
        await rig.clock.sleep(0.01)
        assert await rig.read(keys) == 3

    rig.run(test)


# -- reads before writes --------------------------------------------------------------------------


def read_latency(make_rig: MakeRig, *, flush: bool) -> float:
    rig = make_rig(device=profile(write_buffer_share=0.5, dram_capacity=8 * GIB))

    async def test() -> None:
        keys = chain(64)
        for begin in range(0, 64, 32):
            await rig.store(keys[begin : begin + 32])
            await rig.quiesce()
        if flush:
            for number in range(1, 7):
                await rig.store(chain(32, number))
            assert rig.device.at_rest()["write-buffer frames"] > 64 * 8
        rig.blocks.clear()
        assert await rig.read(keys) == 64
        if flush:
            assert rig.device.at_rest()["write-buffer frames"] > 0

    rig.run(test, settle_s=2)
    times = sorted(block.done_s - block.asked_s for block in rig.blocks)
    return float(np.median(times))


def test_flushing_yields_to_reads(make_rig: MakeRig) -> None:
    # The profile's law of mixed traffic makes a read that meets a write half as long again.
    assert read_latency(make_rig, flush=True) < 1.6 * read_latency(make_rig, flush=False)


# -- many requests --------------------------------------------------------------------------------


def test_50_long_requests_have_bounded_windows_and_are_served_alike(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(prefetch_depth=160), link_bytes_per_s=12.5e9)
    peaks: list[int] = []

    async def test() -> None:
        chains = [chain(40, number) for number in range(50)]
        for keys in chains:
            await rig.stored(keys)
        ended: list[float] = []
        began = rig.clock.now()

        async def serve(keys: list[bytes]) -> None:
            assert await rig.read(keys) == 40
            ended.append(rig.clock.now() - began)

        async def watch() -> None:
            while len(ended) < 50:
                held = [
                    lane.held
                    for stream in rig.node.prefetcher._streams
                    for lane in stream.lanes.values()
                ]
                assert max(held, default=0) <= 8
                peaks.append(sum(held))
                await rig.clock.sleep(0.001)

        await rig.clock.gather(watch(), *[serve(keys) for keys in chains])
        assert max(peaks) <= 160
        # All have the same work: with fair turns they end near each other, late in the run.
        assert min(ended) > 0.6 * max(ended)
        moved = 50 * 40 * rig.size
        assert moved / max(ended) > 0.9 * 12.5e9

    rig.run(test)


def test_a_request_that_is_released_lets_the_others_have_its_window(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(prefetch_depth=8))

    async def test() -> None:
        first, second = chain(20, 1), chain(20, 2)
        await rig.stored(first)
        await rig.stored(second)
        await rig.lookup(1, first)
        await rig.lookup(2, second)
        lanes = {
            s.request_id: lane for s in rig.node.prefetcher._streams for lane in s.lanes.values()
        }
        assert (lanes[1].held, lanes[2].held) == (8, 0)
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        assert lanes[2].held == 8
        rig.connector.release(2)

    rig.run(test)


def test_events_per_block_stay_within_the_budget(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        chains = [chain(60, number) for number in range(8)]
        clock = rig.clock
        timers, callbacks = clock.timers, clock.callbacks
        for keys in chains:
            await rig.stored(keys)
        assert (clock.timers - timers) / 480 <= 15
        assert (clock.callbacks - callbacks) / 480 <= 45
        timers, callbacks = clock.timers, clock.callbacks
        await clock.gather(*[rig.read(keys) for keys in chains])
        assert (clock.timers - timers) / 480 <= 15
        assert (clock.callbacks - callbacks) / 480 <= 45

    rig.run(test)
