"""TraCT's connector in virtual time: results, sharing between nodes, eviction, deadlines, close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cxlbench.emu.memory import PhantomBuffer
from cxlbench.kv.connector import Work, held
from cxlbench.kv.payload import ObjectTag
from cxlbench.kv.results import KeyResult
from cxlbench.tract.errors import KeyLengthError
from tests.tract.rig import KIB, MIB, Desk, chain, memory

HIT, MISS, ERROR = KeyResult.HIT, KeyResult.MISS, KeyResult.ERROR
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE
CANCELLED = KeyResult.CANCELLED
SMALL = 64 * KIB


def small(**options: Any) -> Desk:
    """Return a desk of real bytes, with blocks of 64 KiB and room for about 60."""
    return Desk(**{"size": SMALL, "phantom": False, "capacity": 4 * MIB, **options})


def room_for(blocks: int, **options: Any) -> Desk:
    """Return a desk whose region holds so many blocks of 1 MiB."""
    desk = Desk(size=MIB, capacity=blocks * MIB + 256 * KIB, **options)
    assert desk.rig.layout.chunks == blocks
    return desk


# -- what goes in comes out -----------------------------------------------------------------------


@pytest.mark.parametrize("phantom", [True, False])
def test_every_byte_comes_back_on_either_node(phantom: bool) -> None:
    desk = small(phantom=phantom)

    async def test() -> None:
        keys = chain(20)
        await desk.stored(keys, worker=0)
        assert await desk.read(keys, worker=0) == 20
        assert await desk.read(keys, worker=1) == 20
        assert [c.counters.loaded for c in desk.rig.connectors] == [20, 20]

    desk.run(test)


def test_many_workers_read_at_once_what_any_of_them_stored() -> None:
    desk = Desk(nodes=3, workers=6)

    async def test() -> None:
        chains = [chain(10, number) for number in range(6)]
        await desk.clock.gather(*[desk.stored(keys, worker=w) for w, keys in enumerate(chains)])
        works = [desk.read(keys, worker=w) for keys in chains for w in range(6)]
        assert await desk.clock.gather(*works) == [10] * 36

    desk.run(test)


def test_a_block_asked_for_in_another_size_is_a_miss() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys, size=MIB)
        assert (await desk.lookup(1, keys)).results == (MISS,) * 3
        assert (await desk.load(1, keys)).results == (MISS,) * 3
        desk.connector.release(1)
        assert await desk.read(keys, size=MIB) == 3

    desk.run(test)


def test_blocks_of_several_sizes_are_used_at_once() -> None:
    desk = small()

    async def test() -> None:
        for number, size in enumerate((64, 4096, SMALL - 8, SMALL)):
            await desk.stored(chain(5, number), size=size)
            assert await desk.read(chain(5, number), size=size, worker=1) == 5

    desk.run(test)


# -- a result for each key ------------------------------------------------------------------------


def test_a_store_answers_for_each_key() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(8)
        await desk.stored(keys[2:4])
        done = await desk.store(keys, worker=1)
        assert done.results == (STORED, STORED, EXISTS, EXISTS, *[STORED] * 4)
        assert (await desk.store(keys)).results == (EXISTS,) * 8
        counters = [c.counters for c in desk.rig.connectors]
        assert [(c.stored, c.exists) for c in counters] == [(2, 8), (6, 2)]

    desk.run(test)


def test_a_load_answers_for_each_key() -> None:
    desk = Desk()

    async def test() -> None:
        keys, strangers = chain(6), chain(2, 2)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        assert (await desk.load(1, [*keys, *strangers])).results == (HIT,) * 6 + (MISS,) * 2
        assert (await desk.load(1, [*strangers, *keys])).results == (MISS,) * 2 + (HIT,) * 6
        desk.connector.release(1)

    desk.run(test)


def test_a_lookup_ends_at_the_first_block_that_is_not_there() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(6)
        await desk.stored([*keys[:2], *keys[3:]])
        assert (await desk.lookup(1, keys)).results == (HIT, HIT, *[MISS] * 4)
        desk.connector.release(1)

    desk.run(test)


def test_some_of_the_blocks_can_be_loaded_and_the_rest_later() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(40)
        await desk.stored(keys)
        await desk.lookup(1, keys, worker=1)
        for part in (keys[20:], keys[:10], keys[5:30]):
            assert set((await desk.load(1, part, worker=1)).results) == {HIT}
        desk.rig.connectors[1].release(1)

    desk.run(test)


def test_empty_calls_end() -> None:
    desk = Desk()

    async def test() -> None:
        assert (await desk.lookup(1, [])).results == ()
        assert (await desk.load(1, [])).results == ()
        assert (await desk.store([])).results == ()
        desk.connector.release(1)

    desk.run(test)


def test_completions_can_be_polled() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(2)
        assert desk.connector.poll() == []
        await desk.store(keys, request=7)
        await desk.lookup(8, keys)
        polled = desk.connector.poll()
        assert [(done.request_id, done.work) for done in polled] == [
            (7, Work.STORE),
            (8, Work.LOOKUP),
        ]
        assert desk.connector.poll() == []
        desk.connector.release(8)

    desk.run(test)


def test_the_time_of_a_block_runs_from_the_question_to_the_verified_bytes() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys)
        await desk.lookup(5, keys)
        began = desk.clock.now()
        await desk.load(5, keys)
        desk.connector.release(5)
        assert len(desk.blocks) == 3
        for times in desk.blocks:
            assert times.request_id == 5
            assert times.nbytes == desk.size
            assert began <= times.asked_s < times.due_s <= times.done_s <= desk.clock.now()

    desk.run(test)


def test_what_the_engine_has_is_not_looked_up_but_counts_as_used() -> None:
    desk = room_for(8)

    async def test() -> None:
        old, other = chain(3, 1), chain(3, 2)
        await desk.stored(old)
        await desk.stored(other)
        found = await desk.lookup(1, old, matched=2, worker=1)
        assert found.results == (HIT,)
        desk.rig.connectors[1].release(1)
        await desk.lookup(2, old, matched=3, worker=1)
        desk.rig.connectors[1].release(2)
        await desk.stored(chain(5, 3))  # three blocks must go, two are free
        assert [desk.offset(key) is not None for key in old] == [True] * 3
        assert [desk.offset(key) is not None for key in other] == [False] * 3

    desk.run(test)


# -- misuse ---------------------------------------------------------------------------------------


def test_calls_that_make_no_sense_are_refused_and_hold_nothing() -> None:
    desk = Desk()

    async def test() -> None:
        keys, connector = chain(3), desk.connector
        buffers = [desk.empty() for _ in keys]
        with pytest.raises(ValueError, match=r"matched must be within 0\.\.3, got 4"):
            connector.submit_lookup(1, keys, desk.size, matched=4)
        for size in (0, 12, desk.size + 8):
            with pytest.raises(ValueError, match=f"got {size} B"):
                connector.submit_lookup(1, keys, size)
        with pytest.raises(KeyLengthError):
            connector.submit_lookup(1, [b"short"], desk.size)
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
        with pytest.raises(ValueError, match="in whole words"):
            connector.submit_store(1, keys, [desk.empty(24 * MIB) for _ in keys])
        with pytest.raises(ValueError, match="one size"):
            connector.submit_store(1, keys[:2], [desk.empty(MIB), desk.empty(2 * MIB)])
        with pytest.raises(KeyLengthError):
            connector.submit_store(1, [bytes(33)], buffers[:1])
        connector.release(1)
        connector.release(1)
        connector.release(12345)

    desk.run(test)


def test_a_closed_connector_refuses() -> None:
    desk = Desk()

    async def test() -> None:
        await desk.connector.close()
        with pytest.raises(RuntimeError, match="closed"):
            desk.connector.submit_lookup(1, chain(1), desk.size)
        assert not held(desk.connector)

    desk.run(test)


# -- space ----------------------------------------------------------------------------------------


def test_a_full_region_evicts_the_chain_that_was_used_longest_ago_tails_first() -> None:
    desk = room_for(12)

    async def test() -> None:
        first, second, third = (chain(4, number) for number in range(3))
        for worker, keys in enumerate((first, second, third)):
            await desk.stored(keys, worker=worker % 2)
        assert await desk.read(first, worker=1) == 4
        await desk.stored(chain(2, 9), worker=1)
        assert [desk.offset(key) is not None for key in second] == [True, True, False, False]
        assert [await desk.read(keys) for keys in (first, second, third)] == [4, 2, 4]

    desk.run(test)


def test_a_block_that_is_pinned_is_not_evicted_and_the_store_is_refused() -> None:
    desk = room_for(4)

    async def test() -> None:
        keys, new = chain(4), chain(2, 1)
        await desk.stored(keys)
        await desk.lookup(1, keys, worker=1)
        assert (await desk.store(new)).results == (NO_SPACE, NO_SPACE)
        assert desk.connector.counters.skipped == 2
        assert (await desk.load(1, keys, worker=1)).results == (HIT,) * 4
        desk.rig.connectors[1].release(1)
        await desk.settle()
        await desk.stored(new)

    desk.run(test)


def test_a_chain_longer_than_the_region_keeps_its_head() -> None:
    desk = room_for(40)

    async def test() -> None:
        keys = chain(60)
        done = await desk.store(keys)
        assert done.results == (STORED,) * 40 + (NO_SPACE,) * 20
        assert await desk.read(keys, worker=1) == 40

    desk.run(test)


def test_of_two_workers_that_store_one_chain_each_block_is_stored_by_one() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(50)
        works = [desk.store(keys, worker=worker) for worker in range(2)]
        first, second = await desk.clock.gather(*works)
        for one, other in zip(first.results, second.results, strict=True):
            assert {one, other} == {STORED, EXISTS}
        assert await desk.read(keys) == 50

    desk.run(test)


def test_workers_that_store_and_read_under_pressure_get_nothing_wrong() -> None:
    desk = small(nodes=2, workers=4, capacity=3 * MIB)

    async def test() -> None:
        async def work(worker: int) -> None:
            for turn in range(12):
                keys = chain(6 + (worker + turn) % 5, (worker + turn * 3) % 7)
                hits = await desk.read(keys, worker=worker)
                await desk.store(keys[hits:], worker=worker)

        await desk.clock.gather(*[work(worker) for worker in range(4)])
        counters = [connector.counters for connector in desk.rig.connectors]
        assert sum(c.loaded for c in counters) > 0
        assert sum(c.mismatched + c.failed + c.timed_out for c in counters) == 0

    desk.run(test)


# -- pins and their end ---------------------------------------------------------------------------


async def pins(desk: Desk) -> int:
    await desk.settle()
    return desk.rig.check().pins


def test_pins_are_held_from_lookup_to_release() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(5)
        await desk.stored(keys)
        await desk.lookup(1, keys, worker=1)
        await desk.load(1, keys[:2], worker=1)
        assert await pins(desk) == 5
        assert held(desk.rig.connectors[1]) == {"requests": 1, "pins": 5}
        desk.rig.connectors[1].release(1)
        assert await pins(desk) == 0

    desk.run(test)


def test_a_request_that_is_released_in_its_lookup_keeps_nothing() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(5)
        await desk.stored(keys)
        ticket = desk.connector.submit_lookup(1, keys, desk.size)
        await desk.clock.sleep(20e-6)
        assert not ticket.done.is_set()
        desk.connector.release(1)
        assert (await ticket.done.wait()).results == (CANCELLED,) * 5
        assert await pins(desk) == 0

    desk.run(test)


@pytest.mark.parametrize("phantom", [True, False])
def test_a_request_that_is_released_in_its_load_ends_soon_and_what_is_hit_is_right(
    phantom: bool,
) -> None:
    desk = small(phantom=phantom, window_bytes=2 * SMALL)

    async def test() -> None:
        keys = chain(30)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        buffers = [desk.empty() for _ in keys]
        ticket = desk.connector.submit_load(1, keys, buffers)
        await desk.clock.sleep(30e-6)
        desk.connector.release(1)
        results = (await ticket.done.wait()).results
        hits = results.count(HIT)
        assert 2 <= hits <= 8
        assert results == (HIT,) * hits + (CANCELLED,) * (30 - hits)
        for key, buffer in zip(keys[:hits], buffers, strict=False):
            assert desk.content().holds(buffer, key)
        assert await pins(desk) == 0
        # The name may be used again.
        assert (await desk.lookup(1, keys)).leading_hits == 30
        desk.connector.release(1)

    desk.run(test)


def test_nobody_writes_into_a_buffer_after_its_ticket_has_ended() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(10)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        buffers = [desk.empty() for _ in keys]
        ticket = desk.connector.submit_load(1, keys, buffers)
        desk.connector.release(1)
        await ticket.done.wait()
        before = [buffer.copy() for buffer in buffers]  # type: ignore[union-attr]
        await desk.clock.sleep(1.0)
        assert all((a == b).all() for a, b in zip(before, buffers, strict=True))

    desk.run(test)


def test_a_load_that_is_late_ends_with_what_it_has_and_gives_the_pins_back() -> None:
    desk = Desk(memory=memory(bandwidth=20e6), window_bytes=32 * MIB, deadline_s=10.0)

    async def test() -> None:
        keys = chain(20)
        await desk.stored(keys)
        await desk.lookup(1, keys, worker=1)
        began = desk.clock.now()
        done = await desk.load(1, keys, worker=1)
        # 16 MiB take 0.84 s; of those begun before the deadline two are on their way at once.
        assert 10 <= desk.clock.now() - began < 12
        hits = done.leading_hits
        assert 11 <= hits <= 14
        assert done.results[hits:] == (KeyResult.TIMEOUT,) * (20 - hits)
        assert desk.rig.connectors[1].counters.timed_out == 20 - hits
        assert await pins(desk) == 0
        again = await desk.load(1, keys[:2], worker=1)
        assert again.results == (KeyResult.LEASE_EXPIRED,) * 2
        desk.rig.connectors[1].release(1)

    desk.run(test)


def test_blocks_are_not_pinned_for_ever_if_nobody_loads_or_releases_them() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(4)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        await desk.clock.sleep(10.5)
        assert await pins(desk) == 4
        await desk.clock.sleep(1.0)
        assert await pins(desk) == 0
        assert (await desk.load(1, keys)).results == (KeyResult.LEASE_EXPIRED,) * 4
        desk.connector.release(1)

    desk.run(test)


# -- never wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phantom", [True, False])
def test_damaged_bytes_are_a_miss_and_their_entry_is_removed(phantom: bool) -> None:
    desk = small(phantom=phantom)

    async def test() -> None:
        keys = chain(6)
        await desk.stored(keys)
        at = desk.offset(keys[2])
        assert at is not None
        desk.rig.pod.device.words[at // 8 + 3] ^= 1
        await desk.lookup(1, keys, worker=1)
        done = await desk.load(1, keys, worker=1)
        assert done.results == (HIT, HIT, MISS, HIT, HIT, HIT)
        assert desk.rig.connectors[1].counters.mismatched == 1
        desk.rig.connectors[1].release(1)
        await desk.settle()
        assert desk.offset(keys[2]) is None
        assert (await desk.store(keys)).results.count(STORED) == 1
        assert await desk.read(keys, worker=1) == 6

    desk.run(test)


def test_a_block_without_a_tag_is_never_a_hit() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(1)
        nobody = [PhantomBuffer(desk.size)]
        assert (await desk.connector.submit_store(1, keys, nobody).done.wait()).results == (STORED,)
        assert await desk.read(keys) == 0
        await desk.settle()
        other = [PhantomBuffer(desk.size, ObjectTag.of(chain(1, 5)[0]))]
        assert (await desk.connector.submit_store(1, keys, other).done.wait()).results == (STORED,)
        assert await desk.read(keys) == 0

    desk.run(test)


# -- close ----------------------------------------------------------------------------------------


def test_close_abandons_a_store_under_way_and_its_blocks_are_never_found() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(30)
        ticket = desk.connector.submit_store(1, keys, [desk.content().make(key) for key in keys])
        await desk.clock.sleep(0.01)
        assert desk.rig.check().pending == 30
        assert held(desk.connector)["reservations"] == 30
        await desk.connector.close()
        assert (await ticket.done.wait()).results == (CANCELLED,) * 30
        report = desk.rig.check()
        assert (report.pending, report.ready) == (0, 0)
        assert await desk.read(keys, worker=1) == 0
        await desk.stored(keys, worker=1)

    desk.run(test)


def test_close_ends_lookups_and_loads() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(20)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        load = desk.connector.submit_load(1, keys, [desk.empty() for _ in keys])
        lookup = desk.connector.submit_lookup(2, keys, desk.size)
        await desk.connector.close()
        assert load.done.is_set()
        assert lookup.done.is_set()
        assert set(lookup.done.peek().results) == {CANCELLED}
        assert not held(desk.connector)

    desk.run(test)


# -- time -----------------------------------------------------------------------------------------


def journal(**options: Any) -> Sequence[Any]:
    desk = Desk(nodes=2, workers=4, **options)

    async def test() -> tuple[Any, ...]:
        chains = [chain(9, number) for number in range(4)]
        await desk.clock.gather(*[desk.store(keys, worker=w) for w, keys in enumerate(chains)])
        await desk.clock.gather(
            *[desk.read(keys, worker=(w + 1) % 4) for w, keys in enumerate(chains)]
        )
        return desk.clock.now(), desk.clock.timers, desk.clock.callbacks, tuple(desk.blocks)

    return tuple(desk.run(test))


def test_virtual_time_is_the_same_each_time() -> None:
    assert journal() == journal()


def test_nodes_share_the_bandwidth_of_the_memory() -> None:
    desk = Desk(copy_engine=None)

    async def test() -> None:
        chains = [chain(20, number) for number in range(2)]
        for keys in chains:
            await desk.stored(keys)
        began = desk.clock.now()
        await desk.clock.gather(*[desk.read(keys, worker=w) for w, keys in enumerate(chains)])
        took = desk.clock.now() - began
        least = 40 * desk.size / memory().bandwidth
        assert least < took < 1.1 * least

    desk.run(test)


def test_the_window_bounds_what_is_copied_at_once() -> None:
    desk = Desk(window_bytes=40 * MIB)

    async def test() -> None:
        chains = [chain(10, number) for number in range(3)]
        await desk.clock.gather(*[desk.stored(keys) for keys in chains])
        await desk.clock.gather(*[desk.read(keys) for keys in chains])
        assert desk.connector.copier.window.peak == 32 * MIB

    desk.run(test)


def test_a_block_larger_than_the_window_goes_alone() -> None:
    desk = Desk(window_bytes=MIB)

    async def test() -> None:
        await desk.stored(chain(3))
        assert await desk.read(chain(3), worker=1) == 3

    desk.run(test)


def test_events_per_block_stay_within_the_budget() -> None:
    desk = Desk(capacity=16 << 30)

    async def test() -> None:
        chains = [chain(60, number) for number in range(8)]
        clock = desk.clock
        for work in (desk.stored, desk.read):
            timers, callbacks = clock.timers, clock.callbacks
            await clock.gather(*[work(keys) for keys in chains])
            assert (clock.timers - timers) / 480 <= 15
            assert (clock.callbacks - callbacks) / 480 <= 45

    desk.run(test)


def test_close_cuts_off_what_waits_for_a_lock_that_nobody_grants() -> None:
    desk = Desk()

    async def test() -> None:  # no manager runs
        ticket = desk.connector.submit_store(1, chain(2), [desk.empty(), desk.empty()])
        await desk.clock.sleep(1.0)
        await desk.connector.close()
        assert desk.clock.now() == pytest.approx(11.0)
        assert ticket.done.peek().results == (CANCELLED, CANCELLED)
        assert not held(desk.connector)

    with desk.clock:
        desk.clock.run(test())
