"""CXL-HM on real files in real time: the bytes are right, and a failing disk is an error."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.status import HostLimitError, Status
from tests.devices.cxl_hm_rig import LARGE, SIZE, HmRig, at

FAST = {"ssd": {"read_bandwidth": 1e8, "write_bandwidth": 1e8}}


@pytest.fixture
def hm(tmp_path):
    with WallClock() as clock:
        yield HmRig(phantom=False, clock=clock, folder=tmp_path, **FAST)


def test_bytes_come_back_from_the_files_by_prefetch_and_by_demand(hm):
    async def one(slot):
        size = (SIZE, LARGE)[slot % 2]
        if slot % 3:
            request = hm.prefetch(slot, size)
            if request is not None:
                await hm.device.chm_prefetch_wait(request)
                found = await hm.read(slot, size)
                hm.device.chm_prefetch_release(request)
                return found
        return await hm.read(slot, size)

    async def main():
        for slot in range(12):
            await hm.put(slot, size=(SIZE, LARGE)[slot % 2])
        return await hm.clock.gather(*[one(slot) for slot in range(12)])

    assert hm.run(main()) == [(slot, 0) for slot in range(12)]


def test_reads_are_right_while_flushes_go_on(hm):
    async def main():
        for slot in range(4):
            await hm.put(slot)
        found = []
        for slot in range(4, 12):
            while not hm.admit(slot):
                await hm.clock.sleep(1e-3)
            await hm.send(slot)
            hm.device.commit(at(slot))
            found.append(await hm.read(slot))
            found.append(await hm.read(slot - 4))
        return found

    assert hm.run(main()) == [(s, 0) for slot in range(4, 12) for s in (slot, slot - 4)]


def test_closing_with_io_in_flight_leaves_no_file_and_no_thread(hm, tmp_path):
    async def main():
        await hm.put(0)
        await hm.put(1, flush=False)
        request = hm.prefetch(0)
        await hm.clock.sleep(1e-4)
        hm.device.chm_prefetch_release(request)
        await hm.device.close()  # in the middle of a flush, too
        return list(tmp_path.iterdir())

    assert hm.clock.run(main()) == []


@contextlib.contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at(1), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_the_object_and_nothing_else(hm):
    """R7: the owner hears of the loss; what lies in the part that fits stays readable."""

    async def main():
        await hm.put(0)
        with full_disk():
            await hm.put(30)
        return await hm.read(0)

    assert hm.run(main()) == (0, 0)
    assert hm.lost == [at(30)]


def test_a_device_that_does_not_fit_the_disk_is_refused(tmp_path):
    with WallClock() as clock, full_disk(), pytest.raises(HostLimitError, match="larger scale"):
        HmRig(phantom=False, clock=clock, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_were_cut_off_give_an_error_for_what_is_missing(hm, tmp_path):
    """H8: a miss for these objects, no crash, and no other bytes."""

    async def main():
        for slot in (0, 20):
            await hm.put(slot)
        for file in tmp_path.iterdir():
            os.truncate(file, at(5))
        return [await hm.read(slot) for slot in (20, 0, 20)]

    assert hm.run(main()) == [Status.IO_ERROR, (0, 0), Status.IO_ERROR]


def test_two_devices_of_one_name_cannot_share_a_folder(hm, tmp_path):
    with pytest.raises(HostLimitError, match="give each device a name or a folder of its own"):
        HmRig(phantom=False, clock=hm.clock, folder=tmp_path)
    hm.run(hm.put(0))
