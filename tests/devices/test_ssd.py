"""SSDs: reads and writes share the device's time, and what mixing them costs."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.profile import SsdProfile, load_as, scale_profile
from cxlbench.devices.ssd import Ssd, SsdArray, make_backing
from cxlbench.emu.backing import FileBacking, PhantomBacking, RamBacking
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.memory import PAGE_BYTES, TORN, Arena, PhantomArena, PhantomBuffer
from cxlbench.emu.pipe import finished
from cxlbench.emu.status import DeviceError, Status

MIB = 1 << 20
PROFILE = dataclasses.replace(
    load_as(SsdProfile, "pm1743-class"),
    read_bandwidth=16.0 * MIB,
    write_bandwidth=8.0 * MIB,
    read_iops=1000.0,
    write_iops=100.0,
    read_latency=0.25,
    program_latency=0.5,
    mixed_penalty=0.5,
)


@pytest.fixture
def clock():
    with VirtualClock() as made:
        yield made


@pytest.fixture
def ssd(clock):
    return Ssd(clock, PROFILE, "ssd0")


def sleep(clock, delay_s):
    async def main():
        await clock.sleep(delay_s)

    clock.run(main())


def test_a_read_takes_its_bytes_over_the_read_bandwidth(ssd):
    assert ssd.read(4 * MIB).end_s == 0.25


def test_reads_and_writes_share_the_devices_time(ssd):
    """A second of work at full read bandwidth and one at full write bandwidth take two."""
    ssd.read(16 * MIB)
    assert ssd.write(8 * MIB, priority=0).end_s == 2.0


def test_an_operation_takes_no_less_than_its_share_of_the_iops(ssd):
    assert ssd.read(PAGE_BYTES).end_s == 1 / 1000
    assert ssd.write(PAGE_BYTES, priority=0).end_s == pytest.approx(1 / 1000 + 1 / 100)


def test_a_read_alone_pays_no_penalty_after_writes_have_ended(ssd, clock):
    ssd.write(8 * MIB, priority=0)
    sleep(clock, 1.0)
    assert ssd.read(4 * MIB).cost_s == 0.25


def test_a_read_behind_a_foreground_write_pays_the_penalty(ssd):
    ssd.read(16 * MIB)
    ssd.write(8 * MIB, priority=0)
    assert ssd.read(4 * MIB).cost_s == 0.25 * 1.5


def test_a_read_that_meets_a_flush_in_service_pays_the_penalty(ssd, clock):
    ssd.write(8 * MIB, priority=1)
    sleep(clock, 0.3)
    assert ssd.read(4 * MIB).cost_s == 0.25 * 1.5


def test_a_flush_that_waits_behind_reads_costs_the_next_read_nothing(ssd, clock):
    ssd.read(16 * MIB)
    flush = ssd.write(8 * MIB, priority=1)
    sleep(clock, 0.5)
    read = ssd.read(4 * MIB)
    assert (read.cost_s, read.end_s) == (0.25, 1.25)
    assert flush.end_s == 2.25


def test_the_penalty_applies_to_small_reads_too(ssd, clock):
    ssd.write(8 * MIB, priority=1)
    sleep(clock, 0.3)
    assert ssd.read(PAGE_BYTES).cost_s == pytest.approx(1.5 / 1000)


def test_a_flush_yields_to_a_read_at_the_next_chunk(ssd, clock):
    """A chunk of 1 MiB takes 0.125 s to write: the third is in service at 0.3 s."""
    flush = ssd.write(8 * MIB, priority=1)
    sleep(clock, 0.3)
    read = ssd.read(4 * MIB)
    assert (read.start_s, read.end_s) == (0.375, 0.375 + 0.375)
    assert flush.end_s == 1.0 + 0.375


def test_a_foreground_write_does_not_yield(ssd, clock):
    ssd.write(8 * MIB, priority=0)
    sleep(clock, 0.3)
    assert ssd.read(4 * MIB).start_s == 1.0


def test_a_long_row_of_writes_is_not_remembered_for_ever(ssd, clock):
    async def main():
        for _ in range(200):
            await finished(clock, ssd.write(PAGE_BYTES, priority=1))

    clock.run(main())
    assert len(ssd._writes) <= 2


def test_bytes_are_counted(ssd):
    ssd.read(3 * MIB)
    ssd.write(2 * MIB, priority=1)
    assert (ssd.read_bytes, ssd.written_bytes) == (3 * MIB, 2 * MIB)


def test_scale_divides_bytes_and_bandwidth_and_leaves_latencies_and_iops(clock):
    full = load_as(SsdProfile, "pm1743-class")
    small = scale_profile(full, 64)
    times = [
        (ssd.read(size).end_s, ssd.write(size, priority=0).end_s)
        for ssd, size in ((Ssd(clock, full, "full"), 64 * MIB), (Ssd(clock, small, "1/64"), MIB))
    ]
    assert times[0] == pytest.approx(times[1])
    for name in ("read_latency", "program_latency", "read_iops", "write_iops"):
        assert getattr(small, name) == getattr(full, name)


# -- several SSDs ---------------------------------------------------------------------------------

STRIPE = 4 * PAGE_BYTES
CAPACITY = 64 * MIB


def array(clock, count=2, *, phantom=False, faults=None, folder=None):
    return SsdArray(
        clock,
        PROFILE,
        count,
        backing=make_backing(
            phantom=phantom,
            folder=folder,
            size_bytes=CAPACITY,
            stripe_bytes=STRIPE,
            count=count,
            name="dev",
        ),
        stripe_bytes=STRIPE,
        name="dev",
        faults=faults,
    )


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 5))
def test_each_ssd_gets_the_pages_that_lie_on_it(first, pages, count):
    with VirtualClock() as clock:
        ssds = array(clock, count, phantom=True)
        ssds.book_read(first * PAGE_BYTES, pages * PAGE_BYTES)
        ssds.book_write(first * PAGE_BYTES, pages * PAGE_BYTES, priority=1)
        lie_on = [0] * count
        for page in range(first, first + pages):
            lie_on[page // (STRIPE // PAGE_BYTES) % count] += PAGE_BYTES
        assert [ssd.read_bytes for ssd in ssds.ssds] == lie_on
        assert [ssd.written_bytes for ssd in ssds.ssds] == lie_on


def test_a_part_that_is_not_there_costs_no_operation(clock):
    assert len(array(clock, 4, phantom=True).book_read(0, PAGE_BYTES)) == 1


def test_striped_reads_go_on_at_the_same_time(clock):
    with_one, with_four = array(clock, 1, phantom=True), array(clock, 4, phantom=True)
    assert max(booking.end_s for booking in with_one.book_read(0, 16 * MIB)) == 1.0
    assert max(booking.end_s for booking in with_four.book_read(0, 16 * MIB)) == 0.25


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Stored:
    """One object of 64 KiB in an array, written without faults."""

    extents = ((0, 64 * 1024),)
    there = ((128 * 1024, 64 * 1024),)

    def __init__(self, clock, *rules, phantom=False):
        self.clock = clock
        self.faults = FaultPlan(tuple(FaultRule(**rule) for rule in rules))
        self.ssds = array(clock, phantom=phantom, faults=self.faults)
        self.arena = PhantomArena(MIB) if phantom else Arena(MIB)
        content = PhantomBuffer(65536, "object") if phantom else noise(65536)
        self.arena.store(self.extents, content)

    def write(self, priority=1):
        self.clock.run(self.ssds.write(0, self.arena, self.extents, priority=priority))

    def read(self):
        self.clock.run(self.ssds.read(0, self.arena, self.there))
        buffer = self.arena.buffer(65536)
        self.arena.load(self.there, buffer)
        return buffer


def test_bytes_come_back_after_bandwidth_and_latency(clock):
    stored = Stored(clock)
    stored.write()
    written = clock.now()
    assert np.array_equal(stored.read(), noise(65536))
    assert written == pytest.approx(1 / 100 + 0.5)
    assert clock.now() - written == pytest.approx(32768 / (16 * MIB) + 0.25)
    assert stored.ssds.reads_in_flight == 0


def test_tags_come_back(clock):
    stored = Stored(clock, phantom=True)
    stored.write()
    assert stored.read().tag == "object"


@pytest.mark.parametrize("phantom", [True, False])
def test_an_injected_read_error_is_raised_once(clock, phantom):
    stored = Stored(clock, {"point": "ssd.read", "kind": "error", "limit": 1}, phantom=phantom)
    stored.write()
    with pytest.raises(DeviceError, match="dev: injected read error") as caught:
        stored.read()
    assert caught.value.status is Status.IO_ERROR
    assert stored.ssds.reads_in_flight == 0
    stored.read()


def test_an_injected_delay_is_added_to_a_read(clock):
    stored = Stored(clock, {"point": "ssd.read", "kind": "delay", "delay_s": 3.0})
    stored.write()
    before = clock.now()
    stored.read()
    assert clock.now() - before >= 3.0


def test_bit_rot_reaches_the_reader_silently(clock):
    stored = Stored(clock, {"point": "ssd.read", "kind": "corrupt"})
    stored.write()
    assert np.unpackbits(stored.read() ^ noise(65536)).sum() == 1


def test_bit_rot_of_a_tag_leaves_no_object(clock):
    stored = Stored(clock, {"point": "ssd.read", "kind": "corrupt"}, phantom=True)
    stored.write()
    assert stored.read().tag == TORN


@pytest.mark.parametrize("kind", ["error", "short"])
@pytest.mark.parametrize("phantom", [True, False])
def test_a_write_that_did_not_happen_is_an_error(clock, kind, phantom):
    stored = Stored(clock, {"point": "ssd.write", "kind": kind, "limit": 1}, phantom=phantom)
    with pytest.raises(DeviceError) as caught:
        stored.write()
    assert caught.value.status is Status.IO_ERROR
    stored.write()
    assert (stored.read().tag == "object") if phantom else (stored.read() == noise(65536)).all()


def test_an_injected_delay_comes_before_a_write(clock):
    stored = Stored(clock, {"point": "ssd.write", "kind": "delay", "delay_s": 3.0})
    stored.write()
    assert clock.now() == pytest.approx(3.0 + 1 / 100 + 0.5)


def test_the_backing_is_files_where_there_is_a_folder_and_else_ram_or_tags(tmp_path, clock):
    for options, kind in (
        ({"folder": tmp_path}, FileBacking),
        ({}, RamBacking),
        ({"phantom": True, "folder": tmp_path}, PhantomBacking),
    ):
        backing = array(clock, **options).backing
        assert isinstance(backing, kind)
        assert backing.size_bytes == CAPACITY
        backing.close()


def test_files_are_named_for_the_device_and_the_ssd(tmp_path, clock):
    ssds = array(clock, 3, folder=tmp_path)
    arena = Arena(MIB)
    arena.store([(0, PAGE_BYTES)], noise(PAGE_BYTES))
    asyncio.run(ssds.backing.write(STRIPE, arena, [(0, PAGE_BYTES)]))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dev.ssd0", "dev.ssd1", "dev.ssd2"]
    assert (tmp_path / "dev.ssd1").read_bytes()[:PAGE_BYTES] == noise(PAGE_BYTES).tobytes()
    ssds.backing.close()
    arena.close()
