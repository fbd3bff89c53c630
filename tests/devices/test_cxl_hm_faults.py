"""CXL-HM when the SSDs fail: an error or a second try, nothing held, never other bytes."""

from __future__ import annotations

import pytest

from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import (
    FRAME,
    SIZE,
    at,
)


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

    async def broken(*_, **__):
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
