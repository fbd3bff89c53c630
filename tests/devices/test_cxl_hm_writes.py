"""CXL-HM, the write side: admission, commit, flush, discard (HyMCache §3.4)."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import (
    BASE,
    FRAME,
    SIZE,
    STRIDE,
    at,
)


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


def test_a_batch_pays_for_its_programming_once(make_hm):
    """Within a batch an object is written while the one before it is programmed."""

    def flushed_after(batch_bytes):
        hm = make_hm(flush_batch=batch_bytes, ssd={"program_latency": 0.5})

        async def main():
            for slot in range(4):
                assert hm.admit(slot, 2 * FRAME)
                await hm.send(slot, size=2 * FRAME)
            begin = hm.clock.now()
            for slot in range(4):
                hm.device.commit(at(slot))
            await hm.device.quiesce()
            return hm.clock.now() - begin

        return hm.run(main())

    one_by_one, in_one = flushed_after(FRAME), flushed_after(8 * FRAME)
    assert one_by_one == pytest.approx(in_one + 3 * 0.5)


def test_waiting_for_flushes_ends_when_the_rest_of_a_batch_is_discarded(make_hm):
    """The first is still being programmed when there is nothing left to write after it."""
    hm = make_hm(ssd={"program_latency": 0.5})

    async def main():
        for slot in range(2):
            await hm.put(slot, flush=False)
        job = hm.clock.spawn(hm.device.quiesce())
        await hm.clock.sleep(1e-4)
        hm.device.discard(at(1), SIZE)
        await job
        return hm.device.counters.flushed

    assert hm.run(main()) == 1
