"""Prefetch windows and read tokens, on a device that only counts."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache.kv_manager import StoredObject
from cxlbench.hymcache.prefetch_window import PrefetchScheduler, ReadStream, prefetch_window
from tests.hymcache.rig import MIB, Rig, chain, profile

WINDOW = 128 * MIB


@dataclass(eq=False)
class Request:
    address: int
    size_bytes: int
    broken: bool = False


@dataclass
class CountingDevice:
    """Stages at once; refuses beyond its depth or its frames of 1 MiB."""

    prefetch_depth: int = 100
    frames: int = 10_000
    held: list[int] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    peak: int = 0
    broken: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.on_frames_free: Any = lambda: None
        self.on_lost: Any = lambda address: None

    def chm_prefetch_object(self, address: int, size_bytes: int) -> Request | None:
        frames = size_bytes // MIB
        if len(self.held) >= self.prefetch_depth or frames > self.frames:
            return None
        self.frames -= frames
        self.held.append(address)
        self.log.append(address)
        self.peak = max(self.peak, len(self.held))
        return Request(address, size_bytes, address in self.broken)

    async def chm_prefetch_wait(self, request: Request) -> None:
        if request.broken:
            raise DeviceError(Status.IO_ERROR, "broken")

    def chm_prefetch_release(self, request: Request) -> None:
        self.held.remove(request.address)
        self.frames += request.size_bytes // MIB
        self.on_frames_free()


class Bench:
    """A scheduler on counting devices, and objects to read."""

    def __init__(self, *devices: CountingDevice, enabled: bool = True) -> None:
        self.clock = VirtualClock()
        self.devices: Any = devices or (CountingDevice(),)
        self.bases = tuple(number << 40 for number in range(len(self.devices)))
        self.pins = 0
        self.scheduler = PrefetchScheduler(self.clock, self, window_bytes=WINDOW, enabled=enabled)
        self._next = 0

    def unpin(self, stored: StoredObject) -> None:
        self.pins -= 1

    def objects(self, count: int, size: int = 16 * MIB, device: int = 0) -> list[StoredObject]:
        made = []
        for _ in range(count):
            self._next += 1
            address = self.bases[device] + self._next * 200 * MIB
            made.append(StoredObject(b"", address, size, 1, device, 0))
        return made

    def open(self, objects: list[StoredObject], **options: Any) -> ReadStream:
        self.pins += len(objects)
        return self.scheduler.open(1, objects, **options)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.clock.run(work)
            assert self.scheduler.at_rest() == {"streams": 0, "read tokens": 0}
            assert self.pins == 0
            assert not any(device.held for device in self.devices)
        finally:
            self.clock.close()


# -- the window rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_mib", "hits", "window"),
    [(16, 100, 8), (32, 100, 4), (168, 100, 2), (64, 100, 2), (16, 3, 3), (168, 1, 1), (16, 0, 0)],
)
def test_the_window_is_128_mib_of_objects_at_least_two_and_at_most_the_hits(
    size_mib: int, hits: int, window: int
) -> None:
    assert prefetch_window(hits, size_mib * MIB, WINDOW) == window


@given(st.integers(0, 1000), st.integers(1, 1 << 30))
def test_the_window_is_never_more_than_its_bytes_beyond_double_buffering(
    hits: int, size: int
) -> None:
    window = prefetch_window(hits, size, WINDOW)
    assert 0 <= window <= hits
    assert window <= 2 or window * size <= WINDOW


@pytest.mark.parametrize(("size_mib", "hits"), [(16, 30), (32, 30), (168, 30), (16, 3), (168, 1)])
def test_the_device_never_has_more_staged_than_the_window(size_mib: int, hits: int) -> None:
    bench = Bench()
    (device,) = bench.devices
    window = prefetch_window(hits, size_mib * MIB, WINDOW)

    async def test() -> None:
        stream = bench.open(bench.objects(hits, size_mib * MIB))
        assert len(device.held) == window
        for position in range(hits):
            await stream.ready(position)
            assert len(device.held) == min(window, hits - position)
            stream.consumed(position)
        stream.close()
        assert device.peak == window
        assert device.log == [o.address for o in stream.objects]  # in reading order, each once

    bench.run(test())


@pytest.mark.parametrize(("size_mib", "window"), [(16, 8), (32, 4), (168, 2)])
def test_the_emulated_device_stages_a_window_while_the_worker_does_nothing(
    size_mib: int, window: int
) -> None:
    rig = Rig(size=size_mib * MIB)

    async def test() -> None:
        keys = chain(24)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        await rig.clock.sleep(1.0)
        assert rig.device.at_rest()["prefetch requests"] == window
        assert rig.device.staged_bytes == window * size_mib * MIB
        rig.connector.release(1)

    rig.run(test)


def test_chains_on_two_devices_have_a_window_on_each() -> None:
    bench = Bench(CountingDevice(), CountingDevice())

    async def test() -> None:
        objects = bench.objects(20, device=0) + bench.objects(20, device=1)
        stream = bench.open(objects)
        assert [len(device.held) for device in bench.devices] == [8, 8]
        for position in range(40):
            await stream.ready(position)
            stream.consumed(position)
        stream.close()
        assert [device.peak for device in bench.devices] == [8, 8]

    bench.run(test())


def test_without_prefetch_nothing_is_staged_and_everything_is_ready() -> None:
    bench = Bench(enabled=False)

    async def test() -> None:
        stream = bench.open(bench.objects(5))
        for position in range(5):
            await stream.ready(position)
        assert bench.pins == 5  # in use until consumed, though nothing is staged
        stream.consumed(0)
        assert bench.pins == 4
        stream.close()
        assert bench.devices[0].log == []

    bench.run(test())


def test_a_device_without_staging_is_read_at_once() -> None:
    bench = Bench(CountingDevice(prefetch_depth=0))

    async def test() -> None:
        stream = bench.open(bench.objects(3))
        for position in range(3):
            await stream.ready(position)
        assert bench.clock.now() == 0
        assert bench.devices[0].log == []
        assert bench.pins == 3
        stream.close()

    bench.run(test())


# -- tokens come back -----------------------------------------------------------------------------


def test_a_token_given_back_twice_counts_once() -> None:
    bench = Bench()

    async def test() -> None:
        stream = bench.open(bench.objects(20))
        await stream.ready(0)
        stream.consumed(0)
        stream.consumed(0)
        assert len(bench.devices[0].held) == 8
        assert bench.pins == 19
        stream.close()

    bench.run(test())


def test_a_closed_stream_refuses_and_wakes_who_waits() -> None:
    bench = Bench(CountingDevice(prefetch_depth=1))

    async def test() -> None:
        stream = bench.open(bench.objects(3))
        await stream.ready(0)
        waiting = bench.clock.spawn(stream.ready(1))
        await bench.clock.sleep(1)
        assert not waiting.done()
        stream.close()
        stream.close()
        with pytest.raises(DeviceError, match="closed"):
            await waiting
        with pytest.raises(DeviceError, match="closed"):
            await stream.ready(2)

    bench.run(test())


def test_a_stream_ends_with_its_lease_though_its_reader_is_gone() -> None:
    bench = Bench()

    async def test() -> None:
        stream = bench.open(bench.objects(20), until_s=11.0)
        await bench.clock.sleep(10.9)
        assert len(bench.devices[0].held) == 8
        await bench.clock.sleep(0.2)
        assert stream.closed

    bench.run(test())


def test_a_broken_object_is_reported_and_its_token_comes_back() -> None:
    bench = Bench()

    async def test() -> None:
        objects = bench.objects(3)
        bench.devices[0].broken = frozenset({objects[1].address})
        stream = bench.open(objects)
        await stream.ready(0)
        with pytest.raises(DeviceError, match="broken"):
            await stream.ready(1)
        stream.consumed(1)
        await stream.ready(2)
        stream.close()

    bench.run(test())


def test_blocks_that_the_worker_passes_over_give_their_tokens_back() -> None:
    bench = Bench()

    async def test() -> None:
        stream = bench.open(bench.objects(20))
        await stream.ready(12)
        assert bench.devices[0].log[-8:] == [o.address for o in stream.objects[12:20]]
        await stream.ready(3)  # read again later: no token any more, but no waiting either
        stream.close()

    bench.run(test())


def test_blocks_that_are_being_read_are_not_passed_over() -> None:
    bench = Bench()

    async def test() -> None:
        stream = bench.open(bench.objects(20))
        for position in (0, 1, 5):
            await stream.ready(position)
        held = bench.devices[0].held
        assert {o.address for o in (stream.objects[0], stream.objects[1])} <= set(held)
        assert stream.objects[3].address not in held
        stream.close()

    bench.run(test())


# -- depth and frames run out ---------------------------------------------------------------------


def test_refused_streams_get_their_turn_one_object_at_a_time() -> None:
    bench = Bench(CountingDevice(prefetch_depth=8))

    async def test() -> None:
        streams = [bench.open(bench.objects(16)) for _ in range(3)]
        owner = {o.address: n for n, s in enumerate(streams) for o in s.objects}
        first, device = streams[0], bench.devices[0]
        for position in range(6):
            await first.ready(position)
            first.consumed(position)
        assert [owner[address] for address in device.log[8:]] == [1, 2, 0, 1, 2, 0]
        for stream in streams:
            stream.close()

    bench.run(test())


@given(st.integers(2, 12), st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_stream_progresses_within_its_window(count: int, depth: int, random: Any) -> None:
    bench = Bench(CountingDevice(prefetch_depth=depth))

    async def reader(stream: ReadStream) -> None:
        lane = stream.lanes[0]
        for position in range(len(stream)):
            await stream.ready(position)
            assert lane.held <= lane.window
            await bench.clock.sleep(random.choice([0.0, 0.1, 1.0]))
            stream.consumed(position)
        stream.close()

    async def test() -> None:
        works = [reader(bench.open(bench.objects(random.randint(1, 12)))) for _ in range(count)]
        await bench.clock.gather(*works)
        assert bench.devices[0].peak <= depth

    bench.run(test())


def test_a_reader_does_not_wait_for_tokens_that_nobody_uses() -> None:
    bench = Bench(CountingDevice(prefetch_depth=8))

    async def test() -> None:
        idle = bench.open(bench.objects(20))
        active = bench.open(bench.objects(5))
        for position in range(5):
            await active.ready(position)
            active.consumed(position)
        assert bench.scheduler.unstaged == 5
        idle.close()
        active.close()

    bench.run(test())


def test_a_reader_without_staging_reads_one_object_at_a_time() -> None:
    bench = Bench(CountingDevice(prefetch_depth=8))

    async def test() -> None:
        idle = bench.open(bench.objects(20))
        active = bench.open(bench.objects(5))
        reads = [bench.clock.spawn(active.ready(position)) for position in range(5)]
        await bench.clock.sleep(1)
        assert [read.done() for read in reads] == [True, False, False, False, False]
        active.consumed(0)
        await bench.clock.sleep(1)
        assert [read.done() for read in reads] == [True, True, False, False, False]
        idle.close()
        await bench.clock.sleep(1)
        assert all(read.done() for read in reads)
        active.close()

    bench.run(test())


def test_an_object_that_can_never_be_staged_holds_up_nobody_else() -> None:
    bench = Bench(CountingDevice(frames=100))

    async def test() -> None:
        large = bench.open(bench.objects(3, size=168 * MIB))
        small = bench.open(bench.objects(3))
        for position in range(3):
            await large.ready(position)
            large.consumed(position)
            await small.ready(position)
            small.consumed(position)
        assert len(bench.devices[0].log) == 3
        large.close()
        small.close()

    bench.run(test())


def test_who_closes_at_the_head_of_the_line_lets_the_others_go_on() -> None:
    bench = Bench(CountingDevice(frames=100))

    async def test() -> None:
        holder = bench.open(bench.objects(6))
        large = bench.open(bench.objects(2, size=90 * MIB))
        small = bench.open(bench.objects(4, size=MIB))
        assert len(bench.devices[0].held) == 6
        large.close()
        assert len(bench.devices[0].held) == 10
        holder.close()
        small.close()

    bench.run(test())


def test_a_starved_reader_of_the_emulated_device_gets_its_blocks_by_demand_misses() -> None:
    rig = Rig(device=profile(prefetch_depth=8))

    async def test() -> None:
        idle, active = chain(20, 1), chain(20, 2)
        await rig.stored(idle)
        await rig.stored(active)
        await rig.lookup(1, idle)
        began = rig.clock.now()
        assert await rig.read(active) == 20
        assert rig.clock.now() - began < 1.0
        assert rig.device.counters.reads_demand == 20
        rig.connector.release(1)

    rig.run(test)
