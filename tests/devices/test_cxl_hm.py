"""CXL-HM: staging by prefetch, demand misses, write admission and flush (HyMCache §3.3-3.4).

The checks of what matters most are functions, which are applied to the device and to *mutants* of
it, each with one plausible mistake: the check must fail on its mutant.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cxlbench.devices import cxl_hm
from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.emu.clock import DeadlockError
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import (
    BASE,
    BUFFER,
    DEPTH,
    FRAME,
    LARGE,
    RESERVE,
    SIZE,
    SLOTS,
    STAGING,
    STRIDE,
    HmRig,
    at,
)


@pytest.fixture(autouse=True)
def nothing_is_held_at_the_end(monkeypatch):
    """Every device of a test must be at rest when the test is over (mutants excepted)."""
    devices = []
    original = CxlHm.__init__

    def make(self, *args, **options):
        original(self, *args, **options)
        if type(self) is CxlHm:
            devices.append(self)

    monkeypatch.setattr(CxlHm, "__init__", make)
    yield
    assert [device.at_rest() for device in devices if any(device.at_rest().values())] == []


@pytest.fixture(params=["phantom", "ram"])
def make_hm(request):
    """Make devices that hold tags, or real bytes in RAM."""
    made = []

    def make(*rules, **options):
        made.append(HmRig(*rules, phantom=request.param == "phantom", **options))
        return made[-1]

    yield make
    for rig in made:
        rig.clock.close()


@pytest.fixture
def hm(make_hm):
    return make_hm()


# -- reads -----------------------------------------------------------------------------------------


def test_an_object_comes_back_by_prefetch_and_by_demand(hm):
    async def main():
        await hm.put(3)
        request = hm.prefetch(3)
        await hm.device.chm_prefetch_wait(request)
        staged = await hm.read(3)
        hm.device.chm_prefetch_release(request)
        return staged, await hm.read(3)

    assert hm.run(main()) == ((3, 0), (3, 0))
    counters = hm.device.counters
    assert (counters.reads_staged, counters.reads_demand, counters.staged) == (1, 1, 2)


@pytest.mark.parametrize("size", [1, PAGE_BYTES, FRAME, FRAME + 1, LARGE, RESERVE * FRAME])
def test_objects_of_any_size_come_back(hm, size):
    size = min(size, LARGE)

    async def main():
        await hm.put(0, size=size)
        await hm.put(1, size=size)
        return [await hm.read(slot, size) for slot in (0, 1)]

    assert hm.run(main()) == [(0, 0), (1, 0)]


def test_a_device_without_trailers_keeps_objects_too(make_hm):
    hm = make_hm(trailer_bytes=0)

    async def main():
        for slot in range(2):
            assert hm.admit(slot)
            done = await hm.pair.write(hm.region.rkey, BASE + at(slot), hm.content(slot, 0, SIZE))
            assert done.status is Status.OK
            hm.device.commit(at(slot))
        await hm.device.quiesce()
        buffer = hm.device.arena.buffer(SIZE)
        await hm.pair.read(hm.region.rkey, BASE + at(1), buffer)
        return hm.name_of(buffer)

    assert hm.run(main()) == (1, 0)


def test_a_staged_read_takes_no_ssd_time(hm):
    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(request)
        before, moved = hm.clock.now(), sum(ssd.read_bytes for ssd in hm.device.ssds.ssds)
        await hm.read(0)
        assert sum(ssd.read_bytes for ssd in hm.device.ssds.ssds) == moved
        hm.device.chm_prefetch_release(request)
        return hm.clock.now() - before

    assert hm.run(main()) == pytest.approx((SIZE + 16) / 1e8 + 1e-5)


def test_a_demand_miss_waits_for_the_ssds_and_then_for_the_port(hm):
    async def main():
        await hm.put(0)
        before = hm.clock.now()
        await hm.read(0)
        return hm.clock.now() - before

    staged = FRAME + PAGE_BYTES  # the larger of the two SSDs' shares: payload and footer, striped
    assert hm.run(main()) == pytest.approx(staged / 1e6 + 1e-3 + (SIZE + 16) / 1e8 + 1e-5, rel=0.35)


def test_two_prefetches_of_one_object_share_its_frames(hm):
    async def main():
        await hm.put(0)
        first, second = hm.prefetch(0), hm.prefetch(0)
        assert hm.device.staged_bytes == 2 * FRAME
        for request in (first, second):
            await hm.device.chm_prefetch_wait(request)
        hm.device.chm_prefetch_release(first)
        assert hm.device.staged_bytes == 2 * FRAME
        found = await hm.read(0)
        hm.device.chm_prefetch_release(second)
        return found, hm.device.staged_bytes

    assert hm.run(main()) == ((0, 0), 0)
    assert hm.device.counters.staged == 1


def test_a_read_joins_the_staging_that_is_under_way(hm):
    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        found = await hm.read(0)
        hm.device.chm_prefetch_release(request)
        return found

    assert hm.run(main()) == (0, 0)
    assert (hm.device.counters.staged, hm.device.counters.reads_demand) == (1, 0)


def test_demand_misses_of_one_object_stage_it_once(hm):
    async def main():
        await hm.put(0)
        return await hm.clock.gather(*[hm.read(0) for _ in range(5)])

    assert hm.run(main()) == [(0, 0)] * 5
    assert hm.device.counters.staged == 1


def test_frames_of_a_read_in_flight_outlive_the_prefetch(hm):
    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(request)
        view = await hm.device.open_read(at(0), SIZE)
        hm.device.chm_prefetch_release(request)
        held = hm.device.staged_bytes
        view.close()
        view.close()
        return held, hm.device.staged_bytes

    assert hm.run(main()) == (2 * FRAME, 0)


def test_a_prefetch_released_twice_is_refused(hm):
    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        hm.device.chm_prefetch_release(request)
        with pytest.raises(ValueError, match="released twice"):
            hm.device.chm_prefetch_release(request)

    hm.run(main())


def test_the_depth_bounds_what_is_held(hm):
    async def main():
        await hm.put(0)
        requests = [hm.prefetch(0) for _ in range(DEPTH)]
        assert None not in requests
        refused = hm.prefetch(0)
        hm.device.chm_prefetch_release(requests.pop())
        requests.append(hm.prefetch(0))
        for request in requests:
            hm.device.chm_prefetch_release(request)
        return refused, None in requests, hm.clock.now()

    before, refused, again = hm.clock.now(), *hm.run(main())[:2]
    assert (refused, again) == (None, False)
    assert hm.device.counters.prefetch_refused == 1
    assert before == 0.0


def test_a_prefetch_takes_all_its_frames_or_none_and_is_refused_at_once(hm):
    async def main():
        for slot in range(6):
            await hm.put(slot, size=LARGE)
        before = hm.clock.now()
        requests = [hm.prefetch(slot, LARGE) for slot in range(6)]
        assert hm.clock.now() == before
        assert [request is not None for request in requests] == [True] * 5 + [False]
        assert hm.device.staged_bytes == (STAGING - RESERVE) * FRAME
        for request in requests[:5]:
            hm.device.chm_prefetch_release(request)

    hm.run(main())


def test_a_refused_prefetch_is_told_when_frames_go_free(hm):
    """The KV Manager retries on release: a call that comes when the frames are really free."""
    free = []
    hm.device.on_frames_free = lambda: free.append(hm.device.staged_bytes)

    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        hm.device.chm_prefetch_release(request)
        assert free == []  # its I/O is still under way
        await hm.clock.sleep(1.0)

    hm.run(main())
    assert free == [0]


@pytest.mark.parametrize(
    ("address", "size"),
    [
        (0, 0),
        (0, -5 * FRAME),
        (-PAGE_BYTES, SIZE),
        (100, SIZE),
        (SLOTS * STRIDE, SIZE),
        (SLOTS * STRIDE - PAGE_BYTES, PAGE_BYTES),  # its footer would lie beyond the end
    ],
)
def test_where_no_object_can_be_nothing_is_read_written_or_staged(hm, address, size):
    async def main():
        for call in (hm.device.admit, hm.device.chm_prefetch_object):
            with pytest.raises(DeviceError) as caught:
                call(address, size)
            assert caught.value.status is Status.BOUNDS
        with pytest.raises(DeviceError) as caught:
            await hm.device.open_read(address, size)
        assert caught.value.status is Status.BOUNDS

    hm.run(main())


def test_an_object_larger_than_all_staging_is_refused_and_not_waited_for(make_hm):
    hm = make_hm(dram_capacity=8 * FRAME, demand_reserve=FRAME)  # six frames of staging
    with pytest.raises(DeviceError, match="do not fit the staging frames"):
        hm.run(hm.device.open_read(0, 7 * FRAME))
    hm.clock.run(hm.device.close())


def test_another_size_is_another_object(hm):
    """A reader with an outdated size gets no bytes of the frames beside the object."""

    async def main():
        await hm.put(0, size=LARGE)
        request = hm.prefetch(0, LARGE)
        await hm.device.chm_prefetch_wait(request)
        found = await hm.read(0, PAGE_BYTES), await hm.read(0, LARGE)
        hm.device.chm_prefetch_release(request)
        return found

    assert hm.run(main()) == (None, (0, 0))


def test_another_size_is_refused_where_the_object_is_still_buffered(hm):
    async def main():
        await hm.put(0, size=LARGE, flush=False)
        return await hm.read(0, PAGE_BYTES), await hm.read(0, LARGE)

    assert hm.run(main()) == (Status.BOUNDS, (0, 0))


def test_a_read_that_is_cancelled_gives_its_frames_back(hm):
    async def main():
        await hm.put(0)
        for wait_s in (0.0, 1e-3, 1e-2):
            job = hm.clock.spawn(hm.read(0))
            await hm.clock.sleep(wait_s)
            job.cancel()
            await job.ended()
        return await hm.read(0)

    assert hm.run(main()) == (0, 0)


def full_of_readers(make_hm):
    """A device whose twelve frames are all in use: by one prefetch, and by two views."""
    hm = make_hm(
        dram_capacity=16 * FRAME, demand_reserve=8 * FRAME, demand_outstanding=2, prefetch_depth=8
    )

    async def fill():
        for slot in range(5):
            await hm.put(slot, size=LARGE)
        for slot in (5, 6):
            await hm.put(slot)
        request = hm.prefetch(2, LARGE)
        views = [await hm.device.open_read(at(slot), LARGE) for slot in (0, 1)]
        assert hm.device.staged_bytes == 12 * FRAME
        return request, views

    return hm, fill


def test_a_demand_miss_that_waits_for_frames_may_give_up(make_hm):
    hm, fill = full_of_readers(make_hm)

    async def main():
        request, views = await fill()
        first, second = hm.clock.spawn(hm.read(3, LARGE)), hm.clock.spawn(hm.read(4, LARGE))
        await hm.clock.sleep(1.0)
        assert not second.done()
        first.cancel()
        views[0].close()
        found = await second
        views[1].close()
        hm.device.chm_prefetch_release(request)
        return found

    assert hm.run(main()) == (4, 0)


def test_frames_that_go_free_serve_all_demand_misses_that_they_can(make_hm):
    """Four frames go free, two objects of two frames wait, and both are kept open."""
    hm, fill = full_of_readers(make_hm)

    async def main():
        request, views = await fill()
        waiting = [hm.clock.spawn(hm.device.open_read(at(slot), SIZE)) for slot in (5, 6)]
        await hm.clock.sleep(1.0)
        assert not any(job.done() for job in waiting)
        views[0].close()
        for view in [await job for job in waiting] + [views[1]]:
            view.close()
        hm.device.chm_prefetch_release(request)

    hm.run(main())


def test_demand_misses_get_frames_before_prefetches_do(make_hm):
    hm, fill = full_of_readers(make_hm)

    async def main():
        request, views = await fill()
        retried = []
        hm.device.on_frames_free = lambda: retried.append(hm.prefetch(3, LARGE))
        waiting = hm.clock.spawn(hm.read(4, LARGE))
        await hm.clock.sleep(1.0)
        for view in views:
            view.close()
        found = await waiting
        hm.device.on_frames_free = lambda: None
        for held in (request, *retried):
            if held is not None:
                hm.device.chm_prefetch_release(held)
        return found

    assert hm.run(main()) == (4, 0)


# -- writes ----------------------------------------------------------------------------------------


def test_an_unflushed_object_is_read_from_the_write_buffer(hm):
    async def main():
        await hm.put(0, flush=False)
        return await hm.read(0)

    assert hm.run(main()) == (0, 0)
    assert hm.device.counters.reads_buffered == 1
    assert hm.device.counters.staged == 0


def test_a_prefetch_of_an_unflushed_object_needs_no_frames(hm):
    async def main():
        await hm.put(0, flush=False)
        request = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(request)
        used = hm.device.staged_bytes
        hm.device.chm_prefetch_release(request)
        return used

    assert hm.run(main()) == 0


def test_a_read_pins_the_buffered_object_beyond_its_flush(hm):
    async def main():
        await hm.put(0, flush=False)
        view = await hm.device.open_read(at(0), SIZE)
        await hm.device.quiesce()
        held = hm.device.buffered_bytes
        for slot in range(1, 4):  # overwrite whatever is free
            await hm.put(slot)
        buffer, footer = hm.device.arena.buffer(SIZE), np.zeros(16, dtype=np.uint8)
        view.copy_into(buffer, footer, None)
        view.close()
        return held, hm.name_of(buffer), hm.device.buffered_bytes

    assert hm.run(main()) == (2 * FRAME, (0, 0), 0)


def test_what_is_not_committed_is_not_flushed(hm):
    async def main():
        assert hm.admit(0)
        await hm.send(0)
        await hm.clock.sleep(10.0)
        flushed = hm.device.counters.flushed
        hm.device.cancel(at(0))
        return flushed, hm.device.buffered_bytes

    assert hm.run(main()) == (0, 0)


def test_only_what_was_received_can_be_committed_and_once(hm):
    async def main():
        with pytest.raises(DeviceError, match="nothing received"):
            hm.device.commit(at(0))
        assert hm.admit(0)
        with pytest.raises(DeviceError, match="nothing received"):
            hm.device.commit(at(0))
        await hm.send(0)
        hm.device.commit(at(0))
        with pytest.raises(DeviceError, match="nothing received"):
            hm.device.commit(at(0))

    hm.run(main())


def test_a_write_without_a_reservation_is_a_status(hm):
    async def main():
        nothing = await hm.send(0)
        await hm.put(1, flush=False)
        return nothing, await hm.send(1, 1), await hm.read(1)

    assert hm.run(main()) == (Status.NO_OBJECT, Status.NO_OBJECT, (1, 0))


def test_a_write_of_another_size_than_reserved_is_a_status(hm):
    async def main():
        assert hm.admit(0)
        status = await hm.send(0, size=SIZE - 1)
        hm.device.cancel(at(0))
        return status

    assert hm.run(main()) is Status.BOUNDS


def test_a_trailer_that_does_not_fit_its_slot_is_a_status(make_hm):
    hm = make_hm(trailer_bytes=64)

    async def main():
        assert hm.admit(0)
        footer = np.zeros(65, dtype=np.uint8)
        done = await hm.pair.write(hm.region.rkey, BASE + at(0), hm.content(0, 0, SIZE), footer)
        hm.device.cancel(at(0))
        return done.status

    assert hm.run(main()) is Status.BOUNDS


def test_an_address_is_reserved_once(hm):
    async def main():
        assert hm.admit(0)
        with pytest.raises(ValueError, match="already being written"):
            hm.admit(0)
        hm.device.cancel(at(0))
        with pytest.raises(ValueError, match="no open reservation"):
            hm.device.cancel(at(0))

    hm.run(main())


def test_a_committed_object_cannot_be_cancelled(hm):
    async def main():
        await hm.put(0, flush=False)
        with pytest.raises(ValueError, match="no open reservation"):
            hm.device.cancel(at(0))

    hm.run(main())


def test_discarding_before_the_flush_saves_the_write(hm):
    async def main():
        await hm.put(0, flush=False)
        await hm.put(1, flush=False)
        hm.device.discard(at(1), SIZE)
        await hm.device.quiesce()

    hm.run(main())
    assert hm.device.counters.flushed == 1


def test_discarding_what_is_being_read_leaves_the_reader_its_bytes(hm):
    async def main():
        await hm.put(0, flush=False)
        job = hm.clock.spawn(hm.read(0))
        await hm.clock.sleep(2e-5)
        hm.device.discard(at(0), SIZE)
        held = hm.device.buffered_bytes
        return held, await job

    assert hm.run(main()) == (2 * FRAME, (0, 0))


def test_an_address_can_be_written_again_while_its_old_object_is_being_flushed(hm):
    async def main():
        await hm.put(0, flush=False)
        await hm.clock.sleep(1e-3)  # the flush is under way
        assert hm.device.counters.flushed == 0
        hm.device.discard(at(0), SIZE)
        await hm.put(0, version=1)
        return await hm.read(0)

    assert hm.run(main()) == (0, 1)


def test_objects_are_flushed_in_the_order_of_their_commits(hm):
    order = []
    original = hm.device.ssds.write

    async def note(address, *rest, **options):
        order.append(address // STRIDE)
        await original(address, *rest, **options)

    hm.device.ssds.write = note

    async def main():
        for slot in (3, 1, 2):
            assert hm.admit(slot)
        for slot in (1, 2, 3):
            await hm.send(slot)
        for slot in (2, 3, 1):
            hm.device.commit(at(slot))

    hm.run(main())
    assert order == [2, 3, 1]


def test_flushing_goes_in_batches(make_hm):
    """Four objects of two frames, with batches of four frames: two batches."""
    hm = make_hm()

    async def main():
        for slot in range(4):
            assert hm.admit(slot, 2 * FRAME)
            await hm.send(slot, size=2 * FRAME)
        for slot in range(4):
            hm.device.commit(at(slot))

    hm.run(main())
    assert (hm.device.counters.flushed, hm.device.counters.flush_batches) == (4, 2)


def test_several_may_wait_for_the_flushes(hm):
    async def main():
        await hm.put(0, flush=False)
        await hm.clock.gather(*[hm.device.quiesce() for _ in range(3)])
        return hm.device.buffered_bytes

    assert hm.run(main()) == 0


def test_waiting_for_flushes_covers_what_is_committed_meanwhile(hm):
    async def later():
        await hm.clock.sleep(1e-3)
        await hm.put(1, flush=False)

    async def main():
        await hm.put(0, flush=False)
        job = hm.clock.spawn(later())
        await hm.device.quiesce()
        await job
        return hm.device.counters.flushed

    assert hm.run(main()) == 2


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_flush_that_fails_is_tried_again(make_hm, kind):
    hm = make_hm({"point": "ssd.write", "kind": kind, "limit": 2})

    async def main():
        await hm.put(0)
        return await hm.read(0)

    assert hm.run(main()) == (0, 0)
    counters = hm.device.counters
    assert (counters.flush_failed, counters.flushed, counters.lost) == (2, 1, 0)
    assert hm.lost == []


@pytest.mark.parametrize("kind", ["error", "short"])
def test_an_object_that_cannot_be_flushed_is_reported_lost_and_holds_nothing(make_hm, kind):
    hm = make_hm({"point": "ssd.write", "kind": kind, "limit": 3})

    async def main():
        await hm.put(0)
        await hm.put(1)
        return await hm.read(1)

    assert hm.run(main()) == (1, 0)
    assert hm.lost == [at(0)]
    assert hm.device.counters.lost == 1


def test_the_owner_may_discard_a_lost_object_at_once(make_hm):
    hm = make_hm({"point": "ssd.write", "kind": "error", "limit": 3})
    hm.device.on_lost = lambda address: hm.device.discard(address, SIZE)

    async def main():
        await hm.put(0)
        await hm.put(0, version=1)
        return await hm.read(0)

    assert hm.run(main()) == (0, 1)


def test_nobody_is_told_of_the_loss_of_a_discarded_object(make_hm):
    hm = make_hm({"point": "ssd.write", "kind": "error", "limit": 3})

    async def main():
        await hm.put(0, flush=False)
        await hm.clock.sleep(1e-3)
        hm.device.discard(at(0), SIZE)

    hm.run(main())
    assert hm.lost == []


def test_a_staging_error_reaches_all_who_wait_and_a_new_try_works(make_hm):
    hm = make_hm()
    whole = hm.device.ssds.read

    async def broken(*_):
        hm.device.ssds.read = whole
        await hm.clock.sleep(0.1)
        raise DeviceError(Status.IO_ERROR, "media error")

    async def main():
        await hm.put(0)
        hm.device.ssds.read = broken
        requests = [hm.prefetch(0), hm.prefetch(0)]
        joined = hm.clock.spawn(hm.read(0))
        for request in requests:
            with pytest.raises(DeviceError, match="media error"):
                await hm.device.chm_prefetch_wait(request)
        status = await joined
        again = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(again)
        found = await hm.read(0)
        for request in (*requests, again):
            hm.device.chm_prefetch_release(request)
        return status, found

    assert hm.run(main()) == (Status.IO_ERROR, (0, 0))


def test_a_demand_miss_that_fails_is_a_status_and_the_next_one_works(make_hm):
    hm = make_hm({"point": "ssd.read", "kind": "error", "limit": 1})

    async def main():
        await hm.put(0)
        return [await hm.read(0) for _ in range(2)]

    assert hm.run(main()) == [Status.IO_ERROR, (0, 0)]


def test_bit_rot_is_no_object(make_hm):
    hm = make_hm({"point": "ssd.read", "kind": "corrupt", "limit": 1})

    async def main():
        await hm.put(0, size=2 * FRAME)
        return [await hm.read(0, 2 * FRAME) for _ in range(2)]

    assert hm.run(main()) == [None, (0, 0)]


def test_closing_ends_those_who_wait_for_staging_with_an_error(hm):
    async def main():
        await hm.put(0)
        request = hm.prefetch(0)
        waiting = hm.clock.spawn(hm.device.chm_prefetch_wait(request))
        reading = hm.clock.spawn(hm.read(0))
        await hm.clock.sleep(1e-4)
        await hm.device.close()
        with pytest.raises(DeviceError) as caught:
            await waiting
        hm.device.chm_prefetch_release(request)
        return caught.value.status, await reading

    assert hm.clock.run(main()) == (Status.FLUSHED, Status.FLUSHED)


# -- what matters most: checks, and mutants on which they fail -------------------------------------


def check_frames_of_a_released_prefetch_stay_until_its_io_has_ended(make_hm):
    """The SSD is slow with the first object; frames freed early would get its bytes later."""
    hm = make_hm({"point": "ssd.read", "kind": "delay", "delay_s": 0.5, "limit": 1})

    async def main():
        await hm.put(0)
        await hm.put(1)
        hm.device.chm_prefetch_release(hm.prefetch(0))
        request = hm.prefetch(1)
        assert hm.device.staged_bytes == 4 * FRAME
        await hm.device.chm_prefetch_wait(request)
        await hm.clock.sleep(1.0)
        found = await hm.read(1)
        hm.device.chm_prefetch_release(request)
        return found

    assert hm.run(main()) == (1, 0)


def check_writes_are_refused_at_once_when_the_buffer_is_full_and_fit_after_a_flush(make_hm):
    hm = make_hm()

    async def main():
        assert [hm.admit(slot) for slot in range(5)] == [True] * 4 + [False]
        assert hm.clock.now() == 0.0
        assert hm.device.buffered_bytes == BUFFER * FRAME
        assert hm.device.counters.write_refused == 1
        for slot in range(4):
            await hm.send(slot)
            hm.device.commit(at(slot))
        await hm.device.quiesce()
        await hm.put(4)
        return [await hm.read(slot) for slot in range(5)]

    assert hm.run(main()) == [(slot, 0) for slot in range(5)]


def check_a_demand_miss_completes_while_prefetches_hold_all_they_can(make_hm):
    hm = make_hm(prefetch_depth=32)

    async def main():
        for slot in range(16):
            await hm.put(slot)
        requests = [hm.prefetch(slot) for slot in range(15)]
        found = await hm.read(15)
        for request in requests:
            if request is not None:
                hm.device.chm_prefetch_release(request)
        return found, sum(request is not None for request in requests)

    assert hm.run(main()) == ((15, 0), (STAGING - RESERVE) // 2)


def check_a_prefetch_cannot_keep_the_frames_of_a_demand_miss(make_hm):
    """A prefetch of an object that is just being demanded would hold on to the reserve."""
    hm = make_hm(prefetch_depth=32)

    async def main():
        for slot in range(7):
            await hm.put(slot, size=LARGE)
        requests = [hm.prefetch(slot, LARGE) for slot in range(5)]
        assert None not in requests
        demanded = hm.clock.spawn(hm.read(5, LARGE))
        await hm.clock.sleep(1e-4)
        requests.append(hm.prefetch(5, LARGE))
        found = await demanded, await hm.read(6, LARGE)
        for request in requests:
            if request is not None:
                hm.device.chm_prefetch_release(request)
        return found

    assert hm.run(main()) == ((5, 0), (6, 0))


def check_what_is_received_is_not_readable_before_the_commit(make_hm):
    """W2: nothing is findable before all its bytes are in place, and said to be."""
    hm = make_hm()

    async def main():
        await hm.put(0)
        hm.device.discard(at(0), SIZE)
        assert hm.admit(0)
        before = await hm.read(0)
        await hm.send(0, version=1)
        received = await hm.read(0)
        hm.device.commit(at(0))
        return before != (0, 1), received != (0, 1), await hm.read(0)

    assert hm.run(main()) == (True, True, (0, 1))


def check_a_new_object_is_never_read_from_what_was_staged_of_the_old_one(make_hm):
    """W3, W4: an address is used again while a slow reader still holds the old staging."""
    hm = make_hm()

    async def main():
        await hm.put(0)
        slow = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(slow)
        hm.device.discard(at(0), SIZE)
        await hm.put(0, version=1)
        request = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(request)
        found = await hm.read(0)
        hm.device.chm_prefetch_release(slow)
        hm.device.chm_prefetch_release(request)
        return found, await hm.read(0)

    assert hm.run(main()) == ((0, 1), (0, 1))


def check_what_is_staged_before_the_commit_is_not_read_after_the_flush(make_hm):
    hm = make_hm()

    async def main():
        await hm.put(0)
        hm.device.discard(at(0), SIZE)
        assert hm.admit(0)
        early = await hm.device.open_read(at(0), SIZE)  # the old bytes, before the WRITE
        await hm.send(0, version=1)
        hm.device.commit(at(0))
        await hm.device.quiesce()
        found = await hm.read(0)
        early.close()
        return found

    assert hm.run(main()) == (0, 1)


def check_a_flush_yields_to_reads(make_hm):
    """A read does not wait for the flush in service, but for one chunk and the penalty."""
    hm = make_hm(ssd={"mixed_penalty": 0.0})

    async def main():
        await hm.put(0)
        await hm.read(0)
        alone = hm.clock.now()
        await hm.read(0)
        alone = hm.clock.now() - alone
        assert hm.admit(1)
        await hm.send(1)
        for ssd in hm.device.ssds.ssds:
            ssd.pipe.chunk_bytes = PAGE_BYTES
        hm.device.commit(at(1))
        await hm.clock.sleep(1e-3)
        before = hm.clock.now()
        await hm.read(0)
        return hm.clock.now() - before - alone

    chunk_s = PAGE_BYTES / 5e5
    assert hm.run(main()) <= chunk_s + 1e-9


def check_a_flush_that_failed_leaves_nothing_in_the_buffer(make_hm):
    hm = make_hm({"point": "ssd.write", "kind": "error", "limit": 3})

    async def main():
        await hm.put(0)
        return hm.device.buffered_bytes, hm.lost

    assert hm.run(main()) == (0, [at(0)])


def check_reads_and_writes_keep_to_their_part_of_the_dram(make_hm):
    """Under writes beyond the buffer and prefetches beyond staging, nobody takes of the other."""
    hm = make_hm(prefetch_depth=64)

    async def main():
        for slot in range(14):
            await hm.put(slot)
        requests = [hm.prefetch(slot) for slot in range(14)]
        assert hm.device.staged_bytes == (STAGING - RESERVE) * FRAME
        admitted = [hm.admit(slot) for slot in range(20, 30)]
        assert sum(admitted) * 2 == BUFFER
        refused = hm.prefetch(13)
        for request in requests:
            if request is not None:
                hm.device.chm_prefetch_release(request)
        for slot, given in enumerate(admitted, 20):
            if given:
                hm.device.cancel(at(slot))
        return refused

    assert hm.run(main()) is None


class FreesAtRelease(CxlHm):
    """Mutant: staging I/O does not hold its frames."""

    def _stage(self, address, size_bytes, *, keep_back):
        staging = super()._stage(address, size_bytes, keep_back=keep_back)
        if staging is not None:
            staging.holders -= 1
        return staging

    async def _fill(self, staging):
        staging.holders += 10**6  # what ends here frees nothing
        ended = staging.holders
        staging.holders -= 10**6
        await self.ssds.read(staging.address, self.arena, staging.extents)
        staging.ready.set(None)
        assert ended


class AdmitsBeyondTheBuffer(CxlHm):
    """Mutant: writes that do not fit the buffer take staging frames."""

    def admit(self, address, size_bytes):
        own = self._write_buffer
        if own.free < own.needed(size_bytes):
            self._write_buffer = self._staging
        try:
            return super().admit(address, size_bytes)
        finally:
            self._write_buffer = own


class StagesInTheWriteBuffer(CxlHm):
    """Mutant: prefetches that find no frames take those of the write buffer."""

    def _stage(self, address, size_bytes, *, keep_back):
        own = self._staging
        if own.free - own.needed(size_bytes) < keep_back:
            self._staging = self._write_buffer
        try:
            return super()._stage(address, size_bytes, keep_back=0)
        finally:
            self._staging = own


class KeepsNothingBack(CxlHm):
    """Mutant: no demand reserve."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._reserve_frames = 0


class LetsPrefetchesHoldTheReserve(CxlHm):
    """Mutant: a prefetch may share any staging."""

    def _may_hold(self, frames):
        return True


class ReadsWhatIsNotCommitted(CxlHm):
    """Mutant: received is as good as committed."""

    async def open_read(self, address, size_bytes):
        entry = self._buffered.get(address)
        if entry is not None and entry.phase is cxl_hm._Phase.RECEIVED:
            entry.pins += 1
            return cxl_hm._View(self, entry.extents, size_bytes, buffered=entry)
        return await super().open_read(address, size_bytes)


class KeepsOldStaging(CxlHm):
    """Mutant: what was staged is found until its last holder goes."""

    def _forget_staged(self, address):
        pass


class FlushesInTheForeground(CxlHm):
    """Mutant: flushes and reads have the same priority."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        write = self.ssds.write
        self.ssds.write = lambda *args, priority: write(*args, priority=0)


class KeepsWhatItLost(CxlHm):
    """Mutant: a failed flush gives nothing back."""

    async def _flush(self, entry):
        lost = self.counters.lost
        give = self._end_buffered
        self._end_buffered = lambda entry: None if self.counters.lost > lost else give(entry)
        try:
            await super()._flush(entry)
        finally:
            del self._end_buffered


MUTANTS = [
    (check_frames_of_a_released_prefetch_stay_until_its_io_has_ended, FreesAtRelease),
    (
        check_writes_are_refused_at_once_when_the_buffer_is_full_and_fit_after_a_flush,
        AdmitsBeyondTheBuffer,
    ),
    (check_a_demand_miss_completes_while_prefetches_hold_all_they_can, KeepsNothingBack),
    (check_a_prefetch_cannot_keep_the_frames_of_a_demand_miss, LetsPrefetchesHoldTheReserve),
    (check_what_is_received_is_not_readable_before_the_commit, ReadsWhatIsNotCommitted),
    (check_a_new_object_is_never_read_from_what_was_staged_of_the_old_one, KeepsOldStaging),
    (check_what_is_staged_before_the_commit_is_not_read_after_the_flush, KeepsOldStaging),
    (check_a_flush_yields_to_reads, FlushesInTheForeground),
    (check_a_flush_that_failed_leaves_nothing_in_the_buffer, KeepsWhatItLost),
    (check_reads_and_writes_keep_to_their_part_of_the_dram, AdmitsBeyondTheBuffer),
    (check_reads_and_writes_keep_to_their_part_of_the_dram, StagesInTheWriteBuffer),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _ in MUTANTS))
def test_the_device_holds(make_hm, check):
    check(make_hm)


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_a_mutant_is_found_out(make_hm, check, mutant):
    with pytest.raises((AssertionError, DeadlockError)):
        check(functools.partial(make_hm, device_type=mutant))


# -- what it costs ---------------------------------------------------------------------------------


def test_a_prefetched_read_and_a_write_cost_few_timers(hm):
    """The budget is 15 timers a block for all layers; device and fabric may take 6 of them."""

    async def main():
        begin = hm.clock.timers, hm.clock.callbacks
        await hm.put(0)
        written = hm.clock.timers - begin[0], hm.clock.callbacks - begin[1]
        begin = hm.clock.timers, hm.clock.callbacks
        request = hm.prefetch(0)
        await hm.device.chm_prefetch_wait(request)
        await hm.read(0)
        hm.device.chm_prefetch_release(request)
        return written, (hm.clock.timers - begin[0], hm.clock.callbacks - begin[1])

    written, read = hm.run(main())
    assert written[0] <= 2
    assert read[0] <= 2
    assert written[1] <= 6
    assert read[1] <= 6
