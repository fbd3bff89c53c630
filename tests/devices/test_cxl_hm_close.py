"""Closing a CXL-HM: nobody is left waiting, nothing is left held, nothing starts afterwards."""

from __future__ import annotations

import pytest

from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import LARGE, SIZE, HmRig, at

PREFETCHABLE = 5
"""So many ``LARGE`` objects fill the staging frames, up to the demand reserve."""


@pytest.fixture(params=["ram", "phantom"])
def hm(request):
    rig = HmRig(phantom=request.param == "phantom")
    yield rig
    rig.check_rest()
    rig.clock.close()


async def outcome(job):
    """Return "ok", or the status that ended the job."""
    try:
        await job
    except DeviceError as error:
        return error.status
    return "ok"


async def close_after(hm, after_s):
    if after_s:
        await hm.clock.sleep(after_s)
    await hm.device.close()


@pytest.mark.parametrize("after_s", [0.0, 1e-4], ids=["not begun", "in flight"])
def test_who_waits_for_a_prefetch_gets_an_error(hm, after_s):
    async def main():
        requests = [hm.prefetch(slot) for slot in range(3)]
        jobs = [hm.clock.spawn(outcome(hm.device.chm_prefetch_wait(r))) for r in requests]
        await close_after(hm, after_s)
        ends = [await job for job in jobs]
        for request in requests:
            hm.device.chm_prefetch_release(request)
        return ends

    assert hm.clock.run(main()) == [Status.FLUSHED] * 3


@pytest.mark.parametrize("after_s", [0.0, 1e-4], ids=["not begun", "in flight"])
def test_demand_misses_and_those_behind_them_get_an_error(hm, after_s):
    """One is staged, the others wait for their turn: ``demand_outstanding`` is 1."""

    async def main():
        jobs = [hm.clock.spawn(hm.read(slot, LARGE)) for slot in range(3)]
        await close_after(hm, after_s)
        return [await job for job in jobs]

    assert hm.clock.run(main()) == [Status.FLUSHED] * 3


def test_a_demand_miss_that_waits_for_frames_gets_an_error(hm):
    """Prefetches hold all they may, an open read the reserve; none of them goes."""

    async def main():
        held = [hm.prefetch(slot, LARGE) for slot in range(PREFETCHABLE)]
        view = await hm.device.open_read(at(20), LARGE)
        waiting = hm.clock.spawn(hm.read(21, LARGE))
        await hm.clock.sleep(1.0)
        assert not waiting.done()
        await hm.device.close()
        end = await waiting
        view.close()
        for request in held:
            hm.device.chm_prefetch_release(request)
        return end

    assert hm.clock.run(main()) is Status.FLUSHED


def test_who_waits_for_the_flushes_goes_on(hm):
    async def main():
        await hm.put(0, flush=False)
        waiting = hm.clock.spawn(hm.device.quiesce())
        await hm.clock.sleep(1e-4)
        await hm.device.close()
        await waiting
        await hm.device.quiesce()
        return hm.device.counters.flushed

    assert hm.clock.run(main()) == 0


def test_frames_that_go_free_at_the_end_start_nothing_new(hm):
    """An owner that prefetches whenever frames go free would keep the device busy for ever."""
    calls = []
    hm.device.on_frames_free = lambda: calls.append(hm.prefetch(9))

    async def main():
        hm.device.chm_prefetch_release(hm.prefetch(0))
        await hm.clock.sleep(1e-4)
        await hm.device.close()

    hm.clock.run(main())
    assert calls == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda device: device.admit(at(0), SIZE),
        lambda device: device.chm_prefetch_object(at(0), SIZE),
    ],
    ids=["admit", "prefetch"],
)
def test_a_closed_device_starts_nothing(hm, ask):
    hm.clock.run(hm.device.close())
    with pytest.raises(DeviceError, match="is closed") as caught:
        ask(hm.device)
    assert caught.value.status is Status.FLUSHED


def test_a_read_of_a_closed_device_is_a_status(hm):
    async def main():
        await hm.put(0, flush=False)
        await hm.device.quiesce()
        await hm.device.close()
        return await hm.read(0)

    assert hm.clock.run(main()) is Status.FLUSHED


def test_what_was_open_can_be_given_back_after_the_end(hm):
    async def main():
        request = hm.prefetch(0)
        view = await hm.device.open_read(at(1), SIZE)
        assert hm.admit(2)
        await hm.device.close()
        hm.device.cancel(at(2))
        view.close()
        hm.device.chm_prefetch_release(request)

    hm.clock.run(main())


def test_closing_twice_is_closing_once(hm):
    async def main():
        await hm.device.close()
        await hm.device.close()

    hm.clock.run(main())
