"""CXL-HM, the read side: staging by prefetch and by demand (HyMCache §3.4)."""

from __future__ import annotations

import pytest

from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import (
    BASE,
    DEPTH,
    FRAME,
    LARGE,
    RESERVE,
    SIZE,
    SLOTS,
    STAGING,
    STRIDE,
    at,
    profile,
)

ACCESS_S = profile().load_latency


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

    assert hm.run(main()) == pytest.approx((SIZE + 16) / 1e8 + 1e-5 + ACCESS_S)


def test_a_demand_miss_waits_for_the_ssds_and_then_for_the_port(hm):
    async def main():
        await hm.put(0)
        before = hm.clock.now()
        await hm.read(0)
        return hm.clock.now() - before

    share = 3 * PAGE_BYTES  # of four pages and the footer's, striped by two pages over two SSDs
    assert hm.run(main()) == pytest.approx(share / 1e6 + 1e-3 + (SIZE + 16) / 1e8 + 1e-5 + ACCESS_S)


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
    with pytest.raises(DeviceError, match="the largest is"):
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


def test_who_asks_for_another_size_does_not_end_the_sharing_of_what_is_staged(hm):
    async def main():
        await hm.put(0)
        first = hm.prefetch(0)
        assert await hm.read(0, PAGE_BYTES) is None
        second = hm.prefetch(0)
        for request in (first, second):
            hm.device.chm_prefetch_release(request)

    hm.run(main())
    assert hm.device.counters.staged == 2  # the object, and what was asked in error


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
