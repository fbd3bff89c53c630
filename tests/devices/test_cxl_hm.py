"""CXL-HM: a DRAM that is split for good, staging that software drives, and writes that wait."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from cxlbench.devices.cxl_hm import FLUSH_TRIES, Prefetch
from cxlbench.emu.clock import VirtualClock, WallClock
from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import FRAME, MIB, PROFILE, SLOT, SSD, Rig

STAGING_FRAMES, RESERVED_FRAMES, BUFFER_FRAMES = 24, 4, 8
TRANSFER_S = FRAME / SSD.read_bandwidth
"""One frame from one SSD; a footer page comes on top."""


@pytest.fixture(params=[False, True], ids=["ram", "phantom"])
def phantom(request):
    return request.param


@pytest.fixture(autouse=True)
def rigs():
    """Whatever a test made holds nothing at its end."""
    made = []
    yield made
    for rig in made:
        rig.run(settle(rig))
        held = rig.device.at_rest()
        rig.close()
        rig.clock.close()
        assert held == dict.fromkeys(held, 0)


async def settle(rig):
    await rig.clock.sleep(10 if rig.clock.kind == "virtual" else 0.05)
    await rig.device.quiesce()


@pytest.fixture
def make(rigs, phantom):
    def made(clock=None, **options):
        options = {"phantom": phantom, **options}
        rigs.append(Rig(clock or VirtualClock(), **options))
        return rigs[-1]

    return made


@pytest.fixture
def rig(make):
    return make()


def at(number):
    """Return the address of the ``number``-th place."""
    return number * SLOT


# -- reads and prefetches ---------------------------------------------------------------------


def test_what_was_written_is_read_from_the_ssds_after_the_flush(rig):
    async def script():
        await rig.store(at(1), 7, 3 * FRAME)
        assert await rig.holds(at(1), 7, 3 * FRAME)

    rig.run(script())
    assert rig.device.counters.reads_demand == 1


def test_sizes_that_are_no_whole_frames_or_pages_come_back(rig):
    sizes = [1, PAGE_BYTES - 1, PAGE_BYTES + 1, FRAME + 1, 3 * FRAME + 17]

    async def script():
        for number, size in enumerate(sizes):
            await rig.store(at(number), number, size)
        return [await rig.holds(at(number), number, size) for number, size in enumerate(sizes)]

    assert all(rig.run(script()))


def test_a_prefetched_object_is_read_without_the_ssds(rig):
    async def script():
        await rig.store(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        await rig.device.chm_prefetch_wait(request)
        began = rig.clock.now()
        assert await rig.holds(at(1), 7)
        assert rig.clock.now() == began
        rig.device.chm_prefetch_release(request)

    rig.run(script())
    assert (rig.device.counters.reads_staged, rig.device.counters.reads_demand) == (1, 0)


def test_staging_takes_the_ssds_bandwidth_and_latency(make):
    rig = make(trailer_bytes=0)

    async def script():
        await rig.store(at(1), 7, 2 * FRAME)
        began = rig.clock.now()
        await rig.read(at(1), 2 * FRAME)
        return rig.clock.now() - began

    # One frame lies on each SSD.
    assert rig.run(script()) == pytest.approx(TRANSFER_S + SSD.read_latency)


def test_a_prefetch_takes_all_its_frames_or_none(rig):
    """20 frames may be prefetched: 18 are, so 3 more are refused and leave 2 that still fit."""

    async def script():
        held = [rig.device.chm_prefetch_object(at(n), 6 * FRAME) for n in range(3)]
        used = rig.device.staged_bytes
        assert rig.device.chm_prefetch_object(at(4), 3 * FRAME) is None
        assert rig.device.staged_bytes == used == 18 * FRAME
        held.append(rig.device.chm_prefetch_object(at(5), 2 * FRAME))
        assert None not in held
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())
    assert rig.device.counters.prefetch_refused == 1


def test_a_prefetch_beyond_the_depth_is_refused_at_once(rig):
    async def script():
        depth = rig.device.prefetch_depth
        held = [rig.device.chm_prefetch_object(at(n), FRAME) for n in range(depth)]
        assert None not in held
        assert rig.device.chm_prefetch_object(at(100), FRAME) is None
        rig.device.chm_prefetch_release(held.pop())
        held.append(rig.device.chm_prefetch_object(at(100), FRAME))
        assert held[-1] is not None
        for request in held:
            rig.device.chm_prefetch_release(request)
        return rig.clock.now()

    assert rig.run(script()) == 0


def hold_all_prefetchable(rig):
    """Prefetch until only the demand reserve is free."""
    held = [rig.device.chm_prefetch_object(at(n), 4 * FRAME) for n in range(5)]
    assert None not in held
    assert rig.device.staged_bytes == (STAGING_FRAMES - RESERVED_FRAMES) * FRAME
    return held


def test_a_demand_miss_completes_while_prefetches_hold_all_they_may(rig):
    """Without the reserve this dead-locks, which virtual time reports."""

    async def script():
        await rig.store(at(50), 7, 4 * FRAME)
        held = hold_all_prefetchable(rig)
        assert rig.device.chm_prefetch_object(at(51), FRAME) is None
        assert await rig.holds(at(50), 7, 4 * FRAME)
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_demand_misses_share_the_reserve_in_turn(rig):
    async def script():
        for n in range(6):
            await rig.store(at(50 + n), n, 4 * FRAME)
        held = hold_all_prefetchable(rig)
        reads = [rig.holds(at(50 + n), n, 4 * FRAME) for n in range(6)]
        assert all(await rig.clock.gather(*reads))
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_a_demanded_object_cannot_be_prefetched_out_of_the_reserve(rig):
    """A prefetch that joined it would hold the reserve for as long as it likes."""

    async def script():
        held = hold_all_prefetchable(rig)
        view = await rig.device.open_read(at(50), 2 * FRAME)
        assert rig.device.chm_prefetch_object(at(50), 2 * FRAME) is None
        view.close()
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_two_prefetches_of_one_object_share_its_frames(rig):
    async def script():
        await rig.store(at(1), 7, 2 * FRAME)
        first = rig.device.chm_prefetch_object(at(1), 2 * FRAME)
        second = rig.device.chm_prefetch_object(at(1), 2 * FRAME)
        assert rig.device.staged_bytes == 2 * FRAME
        await rig.device.chm_prefetch_wait(first)
        await rig.device.chm_prefetch_wait(second)
        rig.device.chm_prefetch_release(first)
        assert rig.device.staged_bytes == 2 * FRAME
        assert await rig.holds(at(1), 7, 2 * FRAME)
        rig.device.chm_prefetch_release(second)
        assert rig.device.staged_bytes == 0

    rig.run(script())
    assert rig.device.counters.staged == 1


def test_a_read_joins_a_staging_that_is_under_way(rig):
    async def script():
        await rig.store(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        assert await rig.holds(at(1), 7)
        rig.device.chm_prefetch_release(request)

    rig.run(script())
    assert rig.device.counters.staged == 1


def test_a_prefetch_released_in_flight_keeps_its_frames_until_its_io_ends(rig):
    async def script():
        request = rig.device.chm_prefetch_object(at(1), 2 * FRAME)
        rig.device.chm_prefetch_release(request)
        assert rig.device.staged_bytes == 2 * FRAME
        await rig.clock.sleep(TRANSFER_S)
        assert rig.device.staged_bytes == 2 * FRAME
        await rig.clock.sleep(1)
        assert rig.device.staged_bytes == 0

    rig.run(script())


def test_a_reader_keeps_the_frames_of_a_released_prefetch(rig):
    async def script():
        await rig.store(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        view = await rig.device.open_read(at(1), FRAME)
        rig.device.chm_prefetch_release(request)
        assert rig.device.staged_bytes == FRAME
        assert rig.is_object(rig.take(view, FRAME), 7)
        view.close()
        view.close()
        assert rig.device.staged_bytes == 0

    rig.run(script())


def test_a_request_cannot_be_released_twice(rig):
    async def script():
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        rig.device.chm_prefetch_release(request)
        with pytest.raises(ValueError, match="released twice"):
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_the_owner_learns_when_frames_go_free(rig):
    calls = []
    rig.device.on_frames_free = lambda: calls.append(rig.device.staged_bytes)

    async def script():
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        await rig.device.chm_prefetch_wait(request)
        await rig.clock.sleep(0.1)
        assert calls == []
        rig.device.chm_prefetch_release(request)

    rig.run(script())
    assert calls == [0]


def test_a_cancelled_demand_miss_leaves_nothing(rig):
    async def script():
        reads = [rig.clock.spawn(rig.read(at(n), 4 * FRAME)) for n in range(20)]
        await rig.clock.sleep(TRANSFER_S / 2)
        for read in reads:
            read.cancel()
        for read in reads:
            await read.ended()

    rig.run(script())


@pytest.mark.parametrize(
    ("address", "size_bytes"),
    [
        (-PAGE_BYTES, FRAME),
        (1, FRAME),
        (0, 0),
        (256 * SLOT - FRAME, FRAME),
        (256 * SLOT, FRAME),
    ],
    ids=["negative", "off the page", "empty", "trailer beyond the end", "beyond the end"],
)
def test_what_can_be_no_object_is_out_of_bounds(rig, address, size_bytes):
    def refused(call):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.status is Status.BOUNDS

    refused(lambda: rig.device.admit(address, size_bytes))
    refused(lambda: rig.device.chm_prefetch_object(address, size_bytes))
    refused(lambda: rig.run(rig.device.open_read(address, size_bytes)))


def test_an_object_larger_than_all_frames_is_refused(rig):
    with pytest.raises(DeviceError, match="do not fit"):
        rig.run(rig.device.open_read(0, (STAGING_FRAMES + 1) * FRAME))


def test_more_capacity_than_the_ssds_have_is_refused():
    with pytest.raises(DeviceError, match="SSDs have"):
        small = dataclasses.replace(PROFILE, ssd=dataclasses.replace(SSD, capacity=SLOT))
        Rig(VirtualClock(), profile=small, phantom=True)


# -- the partition ------------------------------------------------------------------------------


def test_reads_never_take_the_write_buffers_frames(rig):
    async def script():
        held = hold_all_prefetchable(rig)
        view = await rig.device.open_read(at(50), 4 * FRAME)
        assert rig.device.staged_bytes == rig.device.staging_bytes
        assert rig.write(at(60), 1, BUFFER_FRAMES * FRAME)
        view.close()
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_writes_never_take_staging_frames(rig):
    async def script():
        assert rig.write(at(60), 1, BUFFER_FRAMES * FRAME)
        assert not rig.device.admit(at(61), FRAME)
        for request in hold_all_prefetchable(rig):
            rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_staged_and_buffered_objects_share_no_byte(make):
    """Everything is held at once, and every object still is what it was."""
    rig = make(profile=dataclasses.replace(PROFILE, prefetch_depth=40))

    async def script():
        for n in range(20):
            await rig.store(at(n), n)
        held = [rig.device.chm_prefetch_object(at(n), FRAME) for n in range(20)]
        for request in held:
            await rig.device.chm_prefetch_wait(request)
        for n in range(30, 30 + BUFFER_FRAMES):
            assert rig.write(at(n), n)
        for n in [*range(20), *range(30, 30 + BUFFER_FRAMES)]:
            assert await rig.holds(at(n), n)
        for request in held:
            rig.device.chm_prefetch_release(request)

    rig.run(script())


# -- writes -------------------------------------------------------------------------------------


def test_admission_fails_at_once_when_full_and_succeeds_after_a_flush(rig):
    async def script():
        for n in range(BUFFER_FRAMES):
            assert rig.write(at(n), n)
        assert not rig.device.admit(at(20), FRAME)
        assert rig.clock.now() == 0
        await rig.device.quiesce()
        assert rig.device.admit(at(20), FRAME)
        rig.device.cancel(at(20))

    rig.run(script())
    assert rig.device.counters.write_refused == 1


def test_admission_takes_all_frames_or_none(rig):
    async def script():
        assert rig.device.admit(at(1), 6 * FRAME)
        assert not rig.device.admit(at(2), 3 * FRAME)
        assert rig.device.buffered_bytes == 6 * FRAME
        assert rig.device.admit(at(3), 2 * FRAME)
        rig.device.cancel(at(1))
        rig.device.cancel(at(3))

    rig.run(script())


def test_an_unflushed_object_is_read_from_the_write_buffer(rig):
    async def script():
        assert rig.write(at(1), 7, 2 * FRAME)
        assert await rig.holds(at(1), 7, 2 * FRAME)
        assert rig.clock.now() == 0

    rig.run(script())
    assert rig.device.counters.reads_buffered == 1


def test_a_reader_pins_the_buffers_copy_beyond_the_flush(rig):
    async def script():
        assert rig.write(at(1), 7)
        views = [await rig.device.open_read(at(1), FRAME) for _ in range(2)]
        await rig.device.quiesce()
        assert rig.device.buffered_bytes == FRAME
        for n in range(2, 1 + BUFFER_FRAMES):
            assert rig.write(at(n), n)
        assert not rig.device.admit(at(30), FRAME)
        for view in views:
            assert rig.is_object(rig.take(view, FRAME), 7)
            assert rig.device.buffered_bytes == BUFFER_FRAMES * FRAME
            view.close()
        assert rig.device.buffered_bytes == (BUFFER_FRAMES - 1) * FRAME

    rig.run(script())


def test_a_prefetch_of_an_unflushed_object_stages_nothing(rig):
    async def script():
        assert rig.write(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        await rig.device.chm_prefetch_wait(request)
        assert rig.device.staged_bytes == 0
        assert await rig.holds(at(1), 7)
        rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_an_unflushed_object_of_another_size_is_out_of_bounds(rig):
    async def script():
        assert rig.write(at(1), 7, 2 * FRAME)
        with pytest.raises(DeviceError) as caught:
            await rig.read(at(1), FRAME)
        assert caught.value.status is Status.BOUNDS

    rig.run(script())


@pytest.mark.parametrize("received", [False, True], ids=["reserved", "received"])
def test_what_is_not_committed_is_not_served(rig, received):
    async def script():
        assert rig.device.admit(at(1), FRAME)
        if received:
            rig.receive(at(1), 7, FRAME)
        assert not await rig.holds(at(1), 7)
        rig.device.cancel(at(1))

    rig.run(script())


def test_a_commit_replaces_what_was_staged_of_the_place_before(rig):
    async def script():
        await rig.store(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        rig.device.discard(at(1), FRAME)
        await rig.store(at(1), 8)
        assert await rig.holds(at(1), 8)
        rig.device.chm_prefetch_release(request)

    rig.run(script())


def test_staging_begun_before_a_commit_is_not_found_after_the_flush(rig):
    async def script():
        assert rig.device.admit(at(1), FRAME)
        view = await rig.device.open_read(at(1), FRAME)  # a stray reader, holds old frames
        rig.receive(at(1), 7, FRAME)
        rig.device.commit(at(1))
        await rig.device.quiesce()
        assert await rig.holds(at(1), 7)
        view.close()

    rig.run(script())


def test_receive_refuses_what_was_not_reserved(rig):
    def refused(status, address, payload, trailer):
        with pytest.raises(DeviceError) as caught:
            rig.device.receive(address, payload, trailer)
        assert caught.value.status is status

    assert rig.device.admit(at(1), FRAME)
    payload = rig.payload(7, FRAME)
    refused(Status.NO_OBJECT, at(2), payload, rig.trailer(7))
    refused(Status.BOUNDS, at(1), rig.payload(7, FRAME - 1), rig.trailer(7))
    refused(Status.BOUNDS, at(1), payload, np.zeros(PAGE_BYTES + 1, dtype=np.uint8))
    rig.device.cancel(at(1))
    refused(Status.NO_OBJECT, at(1), payload, rig.trailer(7))


def test_a_committed_object_takes_no_more_bytes(rig):
    async def script():
        assert rig.write(at(1), 7)
        with pytest.raises(DeviceError) as caught:
            rig.receive(at(1), 8, FRAME)
        assert caught.value.status is Status.NO_OBJECT
        assert await rig.holds(at(1), 7)

    rig.run(script())


def test_only_what_was_received_can_be_committed(rig):
    async def script():
        with pytest.raises(DeviceError, match="nothing received"):
            rig.device.commit(at(1))
        assert rig.device.admit(at(1), FRAME)
        with pytest.raises(DeviceError, match="nothing received"):
            rig.device.commit(at(1))
        rig.receive(at(1), 7, FRAME)
        rig.device.commit(at(1))
        with pytest.raises(DeviceError, match="nothing received"):
            rig.device.commit(at(1))

    rig.run(script())


def test_one_address_is_written_by_one_writer(rig):
    async def script():
        assert rig.device.admit(at(1), FRAME)
        with pytest.raises(ValueError, match="already being written"):
            rig.device.admit(at(1), FRAME)
        rig.device.cancel(at(1))

    rig.run(script())


@pytest.mark.parametrize("received", [False, True], ids=["reserved", "received"])
def test_cancel_frees_the_reservation(rig, received):
    async def script():
        assert rig.device.admit(at(1), BUFFER_FRAMES * FRAME)
        if received:
            rig.receive(at(1), 7, BUFFER_FRAMES * FRAME)
        rig.device.cancel(at(1))
        assert rig.device.buffered_bytes == 0
        with pytest.raises(ValueError, match="no open reservation"):
            rig.device.cancel(at(1))
        assert rig.write(at(1), 8)
        with pytest.raises(ValueError, match="no open reservation"):
            rig.device.cancel(at(1))

    rig.run(script())


def test_a_discarded_object_is_not_flushed(rig):
    async def script():
        assert rig.write(at(1), 7)
        rig.device.discard(at(1), FRAME)
        assert rig.device.buffered_bytes == 0
        await rig.device.quiesce()
        assert not await rig.holds(at(1), 7)

    rig.run(script())
    assert rig.device.counters.flushed == 0


def test_a_discard_while_it_is_read_leaves_the_reader_its_bytes(rig):
    async def script():
        assert rig.write(at(1), 7)
        view = await rig.device.open_read(at(1), FRAME)
        rig.device.discard(at(1), FRAME)
        for n in range(2, 1 + BUFFER_FRAMES):
            assert rig.write(at(n), n)
        assert rig.is_object(rig.take(view, FRAME), 7)
        view.close()

    rig.run(script())


def test_a_place_discarded_in_flush_can_be_written_again(rig):
    """The old flush ends before the new one begins, so the new object is what stays."""

    async def script():
        assert rig.write(at(1), 7)
        await rig.clock.sleep(1e-4)
        assert rig.device.counters.flush_batches == 1
        rig.device.discard(at(1), FRAME)
        assert rig.write(at(1), 8)
        assert await rig.holds(at(1), 8)
        await rig.device.quiesce()
        assert await rig.holds(at(1), 8)

    rig.run(script())
    assert rig.device.counters.flushed == 2


def test_a_device_without_trailers_holds_payloads_only(make):
    rig = make(trailer_bytes=0)

    async def script():
        await rig.store(at(1), 7, 3 * FRAME)
        assert await rig.holds(at(1), 7, 3 * FRAME)

    rig.run(script())


def test_what_a_frame_held_before_is_no_trailer_of_the_next_object(make):
    """A WRITE without a trailer must not bring back the footer of an object that is gone."""
    rig = make()

    async def script():
        assert rig.write(at(1), 7)
        rig.device.discard(at(1), FRAME)
        assert rig.device.admit(at(2), FRAME)
        rig.device.receive(at(2), rig.payload(8, FRAME), None)
        rig.device.commit(at(2))
        _, trailer = await rig.read(at(2))
        assert not np.array_equal(trailer, rig.trailer(7))

    rig.run(script())


# -- the flusher --------------------------------------------------------------------------------


def test_flushing_goes_in_batches(rig):
    """A batch is 4 frames, so 8 objects of one frame make two."""

    async def script():
        for n in range(BUFFER_FRAMES):
            assert rig.write(at(n), n)
        await rig.device.quiesce()

    rig.run(script())
    assert (rig.device.counters.flushed, rig.device.counters.flush_batches) == (8, 2)


def test_a_read_waits_for_no_more_than_a_chunk_of_a_flush(make):
    """All of the write buffer is flushed in one object; a read overtakes most of it."""
    chunk_scale = 256  # chunks of one page
    rig = make(
        profile=dataclasses.replace(PROFILE, ssd=dataclasses.replace(SSD, scale=chunk_scale))
    )

    async def script():
        await rig.store(at(50), 50)
        assert rig.write(at(1), 1, BUFFER_FRAMES * FRAME)
        latencies = []
        while rig.device.buffered_bytes:
            began = rig.clock.now()
            assert await rig.holds(at(50), 50)
            latencies.append(rig.clock.now() - began)
        return latencies

    latencies = rig.run(script())
    flush_s = BUFFER_FRAMES * FRAME / 2 / SSD.write_bandwidth
    chunk_s = PAGE_BYTES / SSD.write_bandwidth
    # Its own bytes lie on one SSD, and its trailer may too.
    alone_s = (FRAME + PAGE_BYTES) / SSD.read_bandwidth * (1 + SSD.mixed_penalty)
    bound_s = alone_s + SSD.read_latency + chunk_s
    assert len(latencies) > 2
    assert max(latencies) <= bound_s * (1 + 1e-9)
    assert bound_s < flush_s


def test_a_failed_flush_is_tried_again(make):
    rules = [FaultRule(point="ssd.write", kind="error", limit=FLUSH_TRIES - 1)]
    rig = make(rules=rules)
    lost = []
    rig.device.on_lost = lost.append

    async def script():
        await rig.store(at(1), 7)
        assert await rig.holds(at(1), 7)

    rig.run(script())
    assert lost == []
    assert rig.device.counters.flush_failed == FLUSH_TRIES - 1


@pytest.mark.parametrize("kind", ["error", "short"])
def test_an_object_that_cannot_be_flushed_is_reported_lost_and_leaks_nothing(make, kind):
    rig = make(rules=[FaultRule(point="ssd.write", kind=kind, limit=FLUSH_TRIES)])
    lost = []
    rig.device.on_lost = lost.append

    async def script():
        await rig.store(at(1), 7)
        assert lost == [at(1)]
        assert rig.device.buffered_bytes == 0
        assert not await rig.holds(at(1), 7)
        await rig.store(at(2), 8)
        assert await rig.holds(at(2), 8)

    rig.run(script())
    assert (rig.device.counters.lost, rig.device.counters.flushed) == (1, 1)


def test_the_owner_may_discard_what_is_lost(make):
    rig = make(rules=[FaultRule(point="ssd.write", kind="error", limit=FLUSH_TRIES)])
    rig.device.on_lost = lambda address: rig.device.discard(address, FRAME)

    async def script():
        await rig.store(at(1), 7)
        await rig.store(at(1), 8)
        assert await rig.holds(at(1), 8)

    rig.run(script())


def test_nobody_is_told_of_the_loss_of_what_was_discarded(make):
    rig = make(rules=[FaultRule(point="ssd.write", kind="error", limit=FLUSH_TRIES)])
    lost = []
    rig.device.on_lost = lost.append

    async def script():
        assert rig.write(at(1), 7)
        await rig.clock.sleep(1e-4)
        rig.device.discard(at(1), FRAME)
        await rig.device.quiesce()

    rig.run(script())
    assert lost == []


def test_a_failed_staging_is_an_error_and_a_retry_works(make):
    rig = make(rules=[FaultRule(point="ssd.read", kind="error", limit=1)])

    async def script():
        await rig.store(at(1), 7)
        request = rig.device.chm_prefetch_object(at(1), FRAME)
        reader = rig.clock.spawn(rig.read(at(1)))
        with pytest.raises(DeviceError) as caught:
            await rig.device.chm_prefetch_wait(request)
        assert caught.value.status is Status.IO_ERROR
        with pytest.raises(DeviceError):
            await reader
        again = rig.device.chm_prefetch_object(at(1), FRAME)
        await rig.device.chm_prefetch_wait(again)
        assert await rig.holds(at(1), 7)
        rig.device.chm_prefetch_release(request)
        assert await rig.holds(at(1), 7)
        rig.device.chm_prefetch_release(again)

    rig.run(script())


def test_a_failed_demand_miss_is_an_error_and_a_retry_works(make):
    rig = make(rules=[FaultRule(point="ssd.read", kind="error", limit=1)])

    async def script():
        await rig.store(at(1), 7)
        with pytest.raises(DeviceError):
            await rig.read(at(1))
        assert await rig.holds(at(1), 7)

    rig.run(script())


# -- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, TRANSFER_S / 2], ids=["unstarted", "in flight"])
def test_closing_ends_every_wait_with_an_error(phantom, delay_s):
    """Nobody is left waiting: not for staging, nor for frames, nor for a turn."""
    with VirtualClock() as clock:
        rig = Rig(clock, phantom=phantom)

        async def script():
            held = hold_all_prefetchable(rig)
            reads = [clock.spawn(rig.read(at(50 + n), 4 * FRAME)) for n in range(4)]
            waits = [clock.spawn(rig.device.chm_prefetch_wait(request)) for request in held]
            await clock.sleep(delay_s)
            await rig.device.close()
            for job in [*reads, *waits]:
                with pytest.raises(DeviceError) as caught:
                    await job
                assert caught.value.status is Status.FLUSHED
            for request in held:
                rig.device.chm_prefetch_release(request)

        clock.run(script())
        held = rig.device.at_rest()
        assert held == dict.fromkeys(held, 0)


def test_closing_ends_a_wait_for_the_flush(phantom):
    with VirtualClock() as clock:
        rig = Rig(clock, phantom=phantom)

        async def script():
            assert rig.write(at(1), 7)
            waits = clock.spawn(rig.device.quiesce())
            await clock.sleep(1e-4)
            await rig.device.close()
            await waits

        clock.run(script())


def test_a_closed_device_takes_nothing(phantom):
    with VirtualClock() as clock:
        rig = Rig(clock, phantom=phantom)
        rig.close()
        device = rig.device
        for call in (
            lambda: device.admit(at(1), FRAME),
            lambda: device.chm_prefetch_object(at(1), FRAME),
            lambda: clock.run(device.open_read(at(1), FRAME)),
        ):
            with pytest.raises(DeviceError) as caught:
                call()
            assert caught.value.status is Status.FLUSHED


def test_closing_twice_is_closing(phantom):
    with VirtualClock() as clock:
        rig = Rig(clock, phantom=phantom)
        rig.close()
        rig.close()


# -- real files ---------------------------------------------------------------------------------


FAST = dataclasses.replace(
    PROFILE,
    ssd=dataclasses.replace(
        SSD, read_bandwidth=4e9, write_bandwidth=2e9, read_latency=1e-5, program_latency=1e-5
    ),
)


def test_real_bytes_on_real_files_in_real_time(make, tmp_path):
    rig = make(WallClock(), phantom=False, folder=tmp_path, profile=FAST)
    sizes = {n: (1, FRAME, 3 * FRAME + 17, 2 * FRAME - 1)[n % 4] for n in range(24)}

    async def write(n):
        while not rig.write(at(n), n, sizes[n]):
            await rig.device.quiesce()

    async def check(n):
        request = rig.device.chm_prefetch_object(at(n), sizes[n]) if n % 2 else None
        try:
            if request is not None:
                await rig.device.chm_prefetch_wait(request)
            return await rig.holds(at(n), n, sizes[n])
        finally:
            if request is not None:
                rig.device.chm_prefetch_release(request)

    async def script():
        for n in sizes:
            await write(n)
            assert await rig.holds(at(n), n, sizes[n])
        await rig.device.quiesce()
        return await rig.clock.gather(*[check(n) for n in sizes])

    assert all(rig.run(script()))
    assert len(list(tmp_path.iterdir())) == 2


def test_frames_are_not_reused_while_a_thread_still_fills_them(make, tmp_path):
    rig = make(WallClock(), phantom=False, folder=tmp_path, profile=FAST)

    async def script():
        for n in range(12):
            await rig.store(at(n), n, 2 * FRAME)
        for turn in range(40):
            request = rig.device.chm_prefetch_object(at(turn % 12), 2 * FRAME)
            if request is not None:
                rig.device.chm_prefetch_release(request)
            n = (turn * 5 + 1) % 12
            assert await rig.holds(at(n), n, 2 * FRAME)

    rig.run(script())


def test_a_real_read_that_is_cancelled_leaves_nothing(make, tmp_path):
    rig = make(WallClock(), phantom=False, folder=tmp_path, profile=FAST)

    async def script():
        await rig.store(at(1), 7, 4 * FRAME)
        read = rig.clock.spawn(rig.read(at(1), 4 * FRAME))
        await asyncio.sleep(0)
        read.cancel()
        await read.ended()
        assert await rig.holds(at(1), 7, 4 * FRAME)

    rig.run(script())


def test_a_handle_is_compared_by_identity():
    """Two requests of one object are two things to release."""
    assert Prefetch(0, MIB, None) != Prefetch(0, MIB, None)
