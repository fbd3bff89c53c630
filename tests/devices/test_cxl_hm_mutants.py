"""What matters most of CXL-HM, as checks that are known to fail.

Each check is applied to the device, and to a *mutant* of it with one plausible mistake, on which
it must fail.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cxlbench.devices.cxl_hm import CxlHm, View
from cxlbench.devices.cxl_hm_write_buffer import Phase
from cxlbench.emu.clock import DeadlockError
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from tests.devices.cxl_hm_rig import (
    BASE,
    BUFFER,
    FOOTER_BYTES,
    FRAME,
    LARGE,
    RESERVE,
    SIZE,
    STAGING,
    at,
)


def check_frames_of_a_released_prefetch_stay_until_its_io_has_ended(make_hm):
    """The SSD is slow with the first object; frames freed early would get its bytes later."""
    hm = make_hm({"point": "ssd.read", "kind": "delay", "delay_s": 0.5, "limit": 1})

    async def main():
        await hm.put(0)
        await hm.put(1)
        hm.device.chm_prefetch_release(hm.prefetch(0))
        request = hm.prefetch(1)
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


def check_no_object_is_too_large_for_its_demand_miss(make_hm):
    """Two reads of what nobody prefetched, beside prefetches that hold all they can."""
    hm = make_hm(demand_reserve=2 * FRAME, prefetch_depth=32)

    async def main():
        try:
            for slot in range(3):
                await hm.put(slot, size=LARGE)  # four frames; two are kept back
        except DeviceError as error:
            return error.status
        for slot in range(3, 18):
            await hm.put(slot)
        requests = [hm.prefetch(slot) for slot in range(3, 18)]
        await hm.read(0, LARGE)  # waits for frames that nobody will free
        return requests

    assert hm.run(main()) is Status.BOUNDS


def check_a_write_without_a_trailer_does_not_keep_an_old_one(make_hm):
    """Whose footer is in the slot must not vouch for bytes that came without one."""
    hm = make_hm()

    async def main():
        for version in range(4):  # all slots of the buffer have been used
            await hm.put(version, version=0)
        assert hm.admit(9)
        done = await hm.pair.write(hm.region.rkey, BASE + at(9), hm.content(9, 0, SIZE))
        assert done.status is Status.OK
        hm.device.commit(at(9))
        view = await hm.device.open_read(at(9), SIZE)
        footer = np.ones(FOOTER_BYTES, dtype=np.uint8)
        view.copy_into(hm.device.arena.buffer(SIZE), footer, None)
        view.close()
        return footer.tolist()

    assert hm.run(main()) == [0] * FOOTER_BYTES


class FreesAtRelease(CxlHm):
    """Mutant: staging I/O does not hold its frames."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        area = self.staging
        stage = area.stage

        def early(address, size_bytes, *, keep_back):
            staging = stage(address, size_bytes, keep_back=keep_back)
            if staging is not None:
                staging.holders -= 1
            return staging

        async def fill(staging):
            await self.ssds.read(staging.address, self.arena, staging.extents)
            staging.ready.set(None)

        area.stage, area.fill = early, fill


class AdmitsBeyondTheBuffer(CxlHm):
    """Mutant: writes that do not fit the buffer take staging frames."""

    def admit(self, address, size_bytes):
        own = self.write_buffer.frames
        if own.free < own.needed(size_bytes):
            self.write_buffer.frames = self.staging.frames
        try:
            return super().admit(address, size_bytes)
        finally:
            self.write_buffer.frames = own


class StagesInTheWriteBuffer(CxlHm):
    """Mutant: prefetches that find no frames take those of the write buffer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        area, stage = self.staging, self.staging.stage

        def anywhere(address, size_bytes, *, keep_back):
            own = area.frames
            if own.free - own.needed(size_bytes) < keep_back:
                area.frames = self.write_buffer.frames
            try:
                return stage(address, size_bytes, keep_back=0)
            finally:
                area.frames = own

        area.stage = anywhere


class KeepsNothingBack(CxlHm):
    """Mutant: no demand reserve."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.staging.reserve_frames = 0


class LetsPrefetchesHoldTheReserve(CxlHm):
    """Mutant: a prefetch may share any staging."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.staging.may_hold = lambda frames: True


class ReadsWhatIsNotCommitted(CxlHm):
    """Mutant: received is as good as committed."""

    async def open_read(self, address, size_bytes):
        entry = self.write_buffer.entries.get(address)
        if entry is not None and entry.phase is Phase.RECEIVED:
            entry.pins += 1
            return View(self, entry)
        return await super().open_read(address, size_bytes)


class KeepsOldStaging(CxlHm):
    """Mutant: what was staged is found until its last holder goes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.staging.forget = lambda address: None


class FlushesInTheForeground(CxlHm):
    """Mutant: flushes and reads have the same priority."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        write = self.ssds.write
        self.ssds.write = lambda *args, priority, **more: write(*args, priority=0, **more)


class KeepsWhatItLost(CxlHm):
    """Mutant: a failed flush gives nothing back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        buffer, end = self.write_buffer, self.write_buffer.end
        buffer.end = lambda entry: None if buffer.lost else end(entry)


class AdmitsWhatNoMissCanStage(CxlHm):
    """Mutant: objects may be larger than what is kept back for their demand misses."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.largest_object_bytes = self.write_buffer_bytes


class KeepsTheOldTrailer(CxlHm):
    """Mutant: a WRITE without a trailer leaves what the slot held."""

    def receive(self, address, payload, trailer):
        if trailer is None:
            entry = self.write_buffer.entries[address]
            self.arena.store(entry.extents[:-1], payload)
            entry.phase = Phase.RECEIVED
        else:
            super().receive(address, payload, trailer)


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
    (check_no_object_is_too_large_for_its_demand_miss, AdmitsWhatNoMissCanStage),
    (check_a_write_without_a_trailer_does_not_keep_an_old_one, KeepsTheOldTrailer),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _ in MUTANTS))
def test_the_device_holds(make_hm, check):
    check(make_hm)


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_a_mutant_is_found_out(make_hm, check, mutant):
    with pytest.raises((AssertionError, DeadlockError)):
        check(functools.partial(make_hm, device_type=mutant))
