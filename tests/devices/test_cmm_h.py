"""CMM-H: what a transparent cache costs, shares, keeps and loses (HyMCache §3.3)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.policies import PolicyError
from cxlbench.devices.policies.fifo import FifoPolicy
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.devices.profile import CmmHProfile, load_as, scale_profile
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from cxlbench.kv.device import MemoryDevice
from tests.devices.cmm_h_rig import GRANULE, Host, small_profile

MIB = 1 << 20
BLOCK = 16 * MIB


@pytest.fixture(params=["phantom", "ram"])
def make_host(request):
    """Make small devices with tags, or with bytes in RAM; all must be at rest at the end."""
    hosts = []

    def make(profile=None, *rules, **options):
        host = Host(
            profile or small_profile(), *rules, phantom=request.param == "phantom", **options
        )
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def host(make_host):
    return make_host()


class NewestFirst(LruPolicy):
    """Evicts what was used last: what a user's own policy may look like."""

    __slots__ = ()

    def evict(self):
        return self._order.popitem()[0]


def profile(dram_blocks=32, **overrides):
    """Return the device of full size with DRAM for so many blocks of 16 MiB."""
    given = {"dram_capacity": f"{dram_blocks * BLOCK} B", **overrides}
    return load_as(CmmHProfile, "cmm-h-256g", overrides=given)


class Blocks(Host):
    """Blocks of 16 MiB, as tags, on a device of full size."""

    def __init__(self, device_profile, blocks, **options):
        self.blocks = range(blocks)
        scaled = int(BLOCK / device_profile.scale)
        self.block_bytes = scaled
        super().__init__(
            device_profile, phantom=True, capacity_bytes=4 * blocks * scaled, **options
        )

    async def fill(self):
        for block in self.blocks:
            await self.write(block * self.block_bytes, block, self.block_bytes)
        await self.device.quiesce()

    async def scan(self, blocks=None):
        """Read blocks in their order, four at a time."""
        left = iter(blocks or self.blocks)

        async def reader():
            for block in left:
                await self.read(block * self.block_bytes, block, self.block_bytes)

        await self.clock.gather(*[reader() for _ in range(4)])

    def bandwidth(self, blocks=None):
        """Return bytes/s of a scan, at full size."""
        count = len(blocks or self.blocks)
        return count * BLOCK / self.timed(self.scan(blocks))


def opened(device_profile, blocks, **options):
    host = Blocks(device_profile, blocks, **options)
    host.drive(host.fill())
    return host


async def store(host, *granules, tag=None):
    for granule in granules:
        await host.write(granule * GRANULE, granule if tag is None else tag)


async def fetch(host, *granules):
    for granule in granules:
        await host.read(granule * GRANULE, granule)


async def discarded(host, *granules):
    for granule in granules:
        host.device.discard(granule * GRANULE, GRANULE)


# -- bandwidth --------------------------------------------------------------------------------


def test_inside_the_cache_scans_run_at_the_port_and_beyond_it_below_half_of_that():
    inside, beyond = opened(profile(32), 32), opened(profile(32), 40)
    fast = [inside.bandwidth() for _ in range(3)]
    slow = [beyond.bandwidth() for _ in range(3)]
    assert min(fast) >= 0.95 * inside.device.profile.port_bandwidth
    assert max(slow) < 0.5 * min(fast)
    assert beyond.counters.hits == 0, "strict LRU drops each block just before it is needed again"
    inside.close()
    beyond.close()


@pytest.mark.parametrize(
    ("outstanding", "unit", "expected"),
    [
        (64, "4 KiB", 64 * 4096 / 57.3e-6),
        (16, "4 KiB", 16 * 4096 / 57.3e-6),
        (16, "16 KiB", 16 * 16384 / 57.3e-6),
        (128, "4 KiB", 128 * 4096 / 57.3e-6),
        (1024, "64 KiB", 26e9),  # two SSDs of 13 GB/s
    ],
)
def test_refill_unit_and_outstanding_misses_set_the_bandwidth_beyond_the_cache(
    outstanding, unit, expected
):
    host = opened(profile(outstanding_misses=str(outstanding), refill_unit=unit), 80)
    assert host.device.profile.ssd.read_latency == 57.3e-6
    assert host.bandwidth() == pytest.approx(expected, rel=0.01)
    host.close()


def test_scale_keeps_the_bandwidths():
    for blocks in (32, 48):
        full = opened(profile(32), blocks)
        small = opened(scale_profile(profile(32), 64), blocks)
        assert small.bandwidth() == pytest.approx(full.bandwidth(), rel=0.02)
        full.close()
        small.close()


@pytest.mark.parametrize("eager", ["true", "false"])
def test_written_data_slows_the_reads_of_misses_when_it_goes_to_flash_eagerly(eager):
    host = opened(profile(64, eager_write_back=eager), 80)
    alone = host.bandwidth(range(40))
    dirty_evictions = host.counters.dirty_evictions

    async def write():
        for block in range(100, 200):
            await host.write(block * BLOCK, block, BLOCK)
            await host.clock.sleep(BLOCK / 8e9)

    async def both():
        writing = host.clock.spawn(write())
        await host.scan(range(40, 56))
        writing.cancel()
        await writing.ended()
        open_ones = [a for a, stored in host.device._objects.items() if not stored.committed]
        for address in open_ones:
            host.device.cancel(address)

    beside = 16 * BLOCK / host.timed(both())
    if eager == "true":
        assert beside < 0.9 * alone
    else:
        assert beside > 0.97 * alone
    assert host.counters.dirty_evictions == dirty_evictions
    host.close()


def test_a_miss_beside_writes_takes_longer_by_the_penalty_of_the_ssds():
    host = opened(profile(4), 8)

    async def miss(begin):
        begin()
        await host.read(0, 0, BLOCK)

    alone = host.timed(miss(lambda: None))
    host.drive(host.scan(range(4, 8)))
    ssds = host.device.ssds
    beside = host.timed(miss(lambda: ssds.book_write(0, 4 * MIB, priority=0)))
    assert beside == pytest.approx(alone * (1 + host.device.profile.ssd.mixed_penalty), rel=1e-3)
    host.close()


@pytest.mark.parametrize(("nbytes", "count", "share"), [(4096, 8192, 0.5), (4 * MIB, 128, 0.93)])
def test_a_stream_of_writes_reaches_what_the_ssds_take(nbytes, count, share):
    """Four at a time: one writer alone waits for the access latency of each small object."""
    host = Host(profile(4), phantom=True, capacity_bytes=4096 * MIB)

    async def run():
        for first in range(0, count, 4):
            numbers = range(first, first + 4)
            await host.clock.gather(*[host.write(n * nbytes, n, nbytes) for n in numbers])
        await host.device.quiesce()

    reached = count * nbytes / host.timed(run())
    assert reached > share * 2 * host.device.profile.ssd.write_bandwidth
    assert host.counters.written_back_bytes == count * nbytes
    host.close()


def test_an_access_smaller_than_a_refill_unit_costs_the_whole_unit():
    host = Host(
        small_profile(32, cache_granule="64 KiB", dram_capacity="256 KiB", refill_unit="64 KiB"),
        phantom=True,
    )
    page = PAGE_BYTES

    async def run():
        for number in range(8):
            await host.write(number * 64 * 1024 + 3 * page, number, page)
        await host.read(3 * page, 0, page)

    host.drive(run())
    assert (host.counters.missed_bytes, host.counters.refilled_bytes) == (page, 64 * 1024)
    host.close()


def test_a_miss_takes_two_timers():
    host = opened(profile(8), 16)
    before = host.clock.timers
    host.drive(host.read(0, 0, BLOCK))
    assert host.counters.misses == 8
    assert host.clock.timers - before == 2
    host.close()


# -- sharing and pins ---------------------------------------------------------------------------


def test_two_readers_of_one_missing_granule_share_a_refill(host):
    ends = []

    async def reader(delay_s):
        await host.clock.sleep(delay_s)
        await host.read(0, 0)
        ends.append(host.clock.now())

    async def run():
        await store(host, *range(9))  # granule 0 is out
        read = host.counters.refilled_bytes
        await host.clock.gather(reader(0.0), reader(20e-6))
        assert host.counters.refilled_bytes - read == GRANULE

    host.drive(run())
    assert (host.counters.refills, host.counters.misses) == (1, 2)
    assert ends[0] == ends[1], "who comes in the middle waits for the same end"


def test_who_comes_after_a_refill_has_a_hit(host):
    async def run():
        await store(host, *range(9))
        await fetch(host, 0, 0)

    host.drive(run())
    assert (host.counters.misses, host.counters.hits) == (1, 1)


@pytest.mark.parametrize(("missing", "moved"), [((0, 2), [2, 0]), ((0, 3), [1, 1])])
def test_only_the_missing_granules_are_read_each_from_its_own_ssd(make_host, missing, moved):
    host = make_host(small_profile(associativity="2"))  # four sets of two
    ssds = host.device.ssds.ssds

    async def run():
        await host.write(0, 1, 4 * GRANULE)
        for granule in missing:
            await store(host, granule + 8, granule + 12)  # the same set
        before = [ssd.read_bytes for ssd in ssds]
        await host.read(0, 1, 4 * GRANULE)
        return [(ssd.read_bytes - old) / GRANULE for ssd, old in zip(ssds, before, strict=True)]

    assert host.drive(run()) == moved
    assert (host.counters.hits, host.counters.misses) == (2, 2)


@pytest.mark.parametrize("ways", ["1", "2", "0"])
def test_many_readers_at_once_do_not_dead_lock(make_host, ways):
    host = make_host(small_profile(4, associativity=ways))
    objects = range(0, 48, 3)

    async def run():
        for granule in objects:
            await host.write(granule * GRANULE, granule, 3 * GRANULE)
        await host.clock.gather(
            *[host.read(g * GRANULE, g, 3 * GRANULE) for g in objects for _ in range(3)]
        )

    host.drive(run())


def test_a_pinned_granule_stays_while_others_are_pushed_through(host):
    async def run():
        await store(host, *range(8))
        view = await host.device.open_read(0, GRANULE)
        await store(host, *range(8, 40))
        into = host.device.arena.buffer(GRANULE)
        view.copy_into(into, None, None)
        view.close()
        assert host.holds(into, 0)
        assert 0 in host.cached()

    host.drive(run())


def test_who_needs_a_frame_waits_until_one_is_unpinned(host):
    async def run():
        await store(host, *range(9))
        views = [await host.device.open_read(g * GRANULE, GRANULE) for g in range(1, 9)]
        waiting = host.clock.spawn(fetch(host, 0))
        await host.clock.sleep(1.0)
        assert not waiting.done()
        views.pop(3).close()
        await waiting
        assert host.cached() == {0, 1, 2, 3, 5, 6, 7, 8}
        for view in views:
            view.close()

    host.drive(run())


@pytest.mark.parametrize("after_s", [0.0, 10e-6, 1e-3])
def test_a_reader_cut_off_at_any_time_leaves_nothing_behind(host, after_s):
    async def run():
        await store(host, *range(9))
        reader = host.clock.spawn(host.read(0, 0))
        await host.clock.sleep(after_s)
        reader.cancel()
        await reader.ended()
        await host.clock.sleep(1.0)
        assert not any(host.device.at_rest().values())
        await fetch(host, 0)

    host.drive(run())


def test_a_reader_cut_off_while_its_victim_is_written_lets_others_go_on(host):
    async def run():
        await store(host, *range(9))
        await host.clock.sleep(1.0)
        reader = host.clock.spawn(host.read(0, 0))
        await host.clock.sleep(1e-6)
        reader.cancel()
        await fetch(host, 0, *range(1, 9))

    host.drive(run())


# -- write-back ---------------------------------------------------------------------------------


def test_a_dirty_victim_is_on_the_ssds_before_its_frame_is_reused(host):
    device = host.device

    async def run():
        await store(host, *range(8))
        begin = host.clock.now()
        device.admit(8 * GRANULE, GRANULE)
        await device.ready_to_receive(8 * GRANULE)
        assert host.clock.now() - begin > device.profile.ssd.program_latency
        assert 0 not in host.cached()
        into = device.arena.buffer(GRANULE)
        line = device.cache.line(8)
        await device.ssds.backing.read(0, device.arena, [(line.base, GRANULE)])
        device.arena.load([(line.base, GRANULE)], into)
        assert host.holds(into, 0), "the old content is on the SSDs"
        device.cancel(8 * GRANULE)

    host.drive(run())
    assert (host.counters.dirty_evictions, host.counters.written_back_bytes) == (1, GRANULE)


def test_a_write_into_a_victim_that_is_being_written_back_keeps_it(host):
    async def run():
        await host.write(0, 1, PAGE_BYTES)
        await store(host, *range(1, 8))
        evicting = host.clock.spawn(store(host, 8))
        await host.clock.sleep(1e-6)
        await host.write(PAGE_BYTES, 2, PAGE_BYTES)  # the other half of granule 0
        await evicting
        assert 0 in host.cached()
        await store(host, *range(9, 20))
        await host.read(PAGE_BYTES, 2, PAGE_BYTES)
        await host.read(0, 1, PAGE_BYTES)

    host.drive(run())
    assert host.counters.misses == 2


def test_without_eager_write_back_nothing_is_written_until_it_must(host):
    async def run():
        await store(host, *range(8))
        await host.clock.sleep(1.0)
        assert host.counters.written_back == 0
        await host.device.quiesce()

    host.drive(run())
    assert host.counters.written_back == 8


def test_eager_write_back_cleans_what_was_written_so_that_evictions_do_not_wait(make_host):
    host = make_host(small_profile(eager_write_back="true"))

    async def run():
        await store(host, *range(8))
        await host.clock.sleep(0.01)
        assert host.counters.written_back == 8
        begin = host.clock.now()
        host.device.admit(8 * GRANULE, GRANULE)
        await host.device.ready_to_receive(8 * GRANULE)
        assert host.clock.now() == begin
        host.device.cancel(8 * GRANULE)

    host.drive(run())
    assert host.counters.dirty_evictions == 0


def test_a_discarded_object_is_not_written_back(host):
    async def run():
        await store(host, *range(8))
        await discarded(host, *range(8))
        await host.device.quiesce()

    host.drive(run())
    assert host.counters.written_back_bytes == 0
    assert host.cached() == set()


def test_an_object_stored_where_another_was_is_the_one_that_is_read(make_host):
    host = make_host(small_profile(eager_write_back="true"))

    async def run():
        for version in range(20):
            await store(host, 0, tag=version)
            if version % 3:
                await host.clock.sleep(version * 10e-6)  # its write-back is in flight, or over
            await host.read(0, version)
            await discarded(host, 0)
        await store(host, 0, tag=99)
        await store(host, *range(1, 12))
        await host.read(0, 99)

    host.drive(run())
    assert host.counters.misses == 1


@pytest.mark.parametrize("shift", [0, PAGE_BYTES])
def test_new_bytes_do_not_wait_for_the_write_back_of_what_was_there(make_host, shift):
    host = make_host(small_profile(eager_write_back="true"))

    async def run():
        await store(host, 0)
        await host.clock.sleep(1e-6)  # its write-back is in flight
        await discarded(host, 0)
        begin = host.clock.now()
        await host.write(shift, 99, PAGE_BYTES)
        assert host.clock.now() - begin < host.device.profile.ssd.program_latency / 10
        await host.clock.sleep(0.01)
        assert host.counters.written_back == 1, "the new object, with nobody asking for it"
        await store(host, *range(1, 12))
        await host.read(shift, 99, PAGE_BYTES)

    host.drive(run())
    assert host.counters.misses == 1


def test_waiting_for_quiet_includes_refills_that_nobody_waits_for(make_host):
    host = make_host(None, FaultRule(point="ssd.read", kind="delay", delay_s=2.0))

    async def run():
        await store(host, *range(9))
        reader = host.clock.spawn(host.read(0, 0))
        await host.clock.sleep(0.5)
        reader.cancel()
        await host.device.quiesce()
        assert not any(host.device.at_rest().values())

    host.drive(run())


def test_a_late_refill_of_an_object_that_is_gone_does_not_land_on_the_next_one(make_host):
    slow = FaultRule(point="ssd.read", kind="delay", delay_s=2.0, limit=1)
    host = make_host(None, slow)

    async def run():
        await store(host, *range(9))
        reader = host.clock.spawn(host.read(0, 0))
        await host.clock.sleep(0.5)
        reader.cancel()
        await reader.ended()
        await discarded(host, 0)
        await store(host, 0, tag=77)
        await host.clock.sleep(3.0)
        await host.read(0, 77)

    host.drive(run())
    assert host.counters.hits == 1


def test_a_write_that_is_repeated_before_its_commit_replaces_the_first(host):
    async def run():
        assert host.device.admit(0, GRANULE)
        for tag in (1, 2):
            await host.pair.write(host.region.rkey, 0, host.content(tag, GRANULE))
        host.device.commit(0)
        await store(host, *range(1, 10))
        await host.read(0, 2)

    host.drive(run())


# -- failures -----------------------------------------------------------------------------------


def test_a_failed_refill_ends_the_read_and_the_next_one_tries_again(make_host):
    host = make_host(None, FaultRule(point="ssd.read", kind="error", limit=1))

    async def run():
        await store(host, *range(9))
        failed = await host.clock.gather(*[host.try_read(0) for _ in range(2)])
        assert [done.status for done, _, _ in failed] == [Status.IO_ERROR] * 2
        assert not any(host.device.at_rest().values())
        await fetch(host, 0)

    host.drive(run())


@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_failed_write_back_is_tried_again(make_host, kind):
    host = make_host(None, FaultRule(point="ssd.write", kind=kind, limit=2))

    async def run():
        await store(host, 0)
        await host.device.quiesce()
        await store(host, *range(1, 12))
        await fetch(host, 0)

    host.drive(run())
    assert (host.counters.write_back_failed, host.counters.lost, host.lost) == (2, 0, [])


@pytest.mark.parametrize("kind", ["error", "short"])
def test_an_object_that_the_ssds_do_not_take_is_reported_and_never_read(make_host, kind):
    host = make_host(None, FaultRule(point="ssd.write", kind=kind, limit=3))

    async def run():
        await store(host, 4)
        await host.device.quiesce()
        done, _, _ = await host.try_read(4 * GRANULE)
        assert done.status is Status.IO_ERROR
        await discarded(host, 4)
        await store(host, 4, tag=5)
        await store(host, *range(10, 20))
        await host.read(4 * GRANULE, 5)

    host.drive(run())
    assert (host.lost, host.counters.lost) == ([4 * GRANULE], 1)


def test_neighbours_in_one_write_that_fails_are_all_lost(make_host):
    host = make_host(None, FaultRule(point="ssd.write", kind="error", limit=3))

    async def run():
        for number in range(2):  # both in granule 0
            await host.write(number * PAGE_BYTES, number, PAGE_BYTES)
        await store(host, *range(1, 9))

    host.drive(run())
    assert host.lost == [0, PAGE_BYTES]


def test_an_object_lost_before_its_commit_cannot_be_committed(make_host):
    broken = FaultRule(point="ssd.write", kind="error", limit=3)
    host = make_host(small_profile(eager_write_back="true"), broken)

    async def run():
        assert host.device.admit(0, GRANULE)
        await host.pair.write(host.region.rkey, 0, host.content(1, GRANULE))
        await host.clock.sleep(1.0)
        with pytest.raises(DeviceError, match="not written back"):
            host.device.commit(0)
        host.device.cancel(0)

    host.drive(run())
    assert host.lost == [], "its owner learns of it from the commit"


def test_rot_on_the_ssds_is_delivered_and_left_to_the_readers_checksum(make_host):
    host = make_host(None, FaultRule(point="ssd.read", kind="corrupt", limit=1))

    async def run():
        await store(host, *range(9))
        done, into, _ = await host.try_read(0)
        assert done.status is Status.OK
        assert not host.holds(into, 0)

    host.drive(run())


@pytest.mark.parametrize("stage", ["admitted", "ready", "received"])
def test_r4_what_a_dead_writer_held_comes_back_with_its_reservation(host, stage):
    device = host.device
    assert device.admit(0, GRANULE)

    async def run():
        if stage != "admitted":
            await device.ready_to_receive(0)
        if stage == "received":
            device.receive(0, host.content(1, GRANULE), None)
        device.cancel(0)
        await store(host, 0, tag=2)
        await host.read(0, 2)

    host.drive(run())
    assert not any(device.at_rest().values())


def test_nothing_is_readable_before_its_commit_or_after_its_discard(host):
    device = host.device

    async def refused(nbytes=GRANULE):
        done, _, _ = await host.try_read(0, nbytes)
        assert done.status is Status.NO_OBJECT

    async def run():
        await refused()
        device.admit(0, GRANULE)
        await refused()
        await host.pair.write(host.region.rkey, 0, host.content(1, GRANULE))
        await refused()
        device.commit(0)
        await host.read(0, 1)
        await refused(PAGE_BYTES)
        device.discard(0, GRANULE)
        await refused()

    host.drive(run())


def test_a_reader_that_waits_for_a_frame_does_not_get_what_was_discarded_meanwhile(host):
    async def run():
        await store(host, *range(9))
        views = [await host.device.open_read(g * GRANULE, GRANULE) for g in range(1, 9)]
        reader = host.clock.spawn(host.try_read(0))
        await host.clock.sleep(1.0)
        await discarded(host, 0)
        for view in views:
            view.close()
        done, _, _ = await reader
        assert done.status is Status.NO_OBJECT

    host.drive(run())


def test_r6_closing_ends_who_waits_for_a_frame_and_refuses_who_comes_later():
    host = Host(small_profile(), phantom=True)
    device = host.device

    async def run():
        await store(host, *range(9))
        views = [await device.open_read(granule * GRANULE, GRANULE) for granule in range(1, 9)]
        reader = host.clock.spawn(host.try_read(0))
        await host.clock.sleep(1.0)
        await device.close()
        for view in views:
            view.close()
        done, _, _ = await reader
        assert done.status is Status.FLUSHED
        with pytest.raises(DeviceError, match="closed"):
            await device.open_read(8 * GRANULE, GRANULE)
        with pytest.raises(DeviceError, match="closed"):
            device.admit(20 * GRANULE, GRANULE)

    host.drive(run())
    host.clock.close()


def test_closing_before_a_refill_has_begun_fails_its_reader():
    host = Host(small_profile(), phantom=True)

    async def run():
        await store(host, *range(9))
        await host.device.quiesce()
        await host.clock.sleep(1.0)
        view = await host.device.open_read(0, GRANULE)
        await host.device.close()
        with pytest.raises(DeviceError, match="cut off"):
            await view.arrived()
        view.close()

    host.drive(run())
    host.clock.close()


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "hits"), [("lru", 0), ("clock", 0), ("fifo", 0), ("s3fifo", 3)])
def test_a_scan_pushes_out_what_is_used_often_but_for_s3_fifo(make_host, policy, hits):
    host = make_host(policy=policy, trailer_bytes=PAGE_BYTES)
    hot = [0, 1, 2]

    async def use(number, act):
        await act(number * GRANULE, number, PAGE_BYTES)  # a page, and its trailer

    async def run():
        for number in hot:
            await use(number, host.write)
            for _ in range(3):
                await use(number, host.read)
        for number in range(3, 23):
            await use(number, host.write)
            await use(number, host.read)
        before = host.counters.hits
        for number in hot:
            await use(number, host.read)
        return host.counters.hits - before

    assert host.drive(run()) == hits


@pytest.mark.parametrize(
    "policy", [f"{__name__}:NewestFirst", NewestFirst, NewestFirst(8)], ids=["name", "type", "one"]
)
def test_a_policy_of_the_users_own_decides(policy):
    host = Host(small_profile(), phantom=True, policy=policy)
    host.drive(store(host, *range(12)))
    assert host.cached() == {*range(7), 11}
    host.close()


@pytest.mark.parametrize("granules", [2, 8])
def test_a_policy_that_makes_victims_up_is_named(granules):
    class Liar(FifoPolicy):
        def evict(self):
            return 4711

    host = Host(small_profile(granules), phantom=True, policy=Liar)
    with pytest.raises(PolicyError, match=r"Liar\.evict"):
        host.drive(store(host, *range(granules + 1)))
    host.device.cancel(granules * GRANULE)
    host.close()


@pytest.mark.parametrize(
    ("policy", "associativity", "reason"),
    [(LruPolicy(4), 0, "hold 8 blocks"), (LruPolicy(8), 4, "2 sets"), ("lri", 0, "did you mean")],
)
def test_a_policy_that_cannot_serve_is_refused(policy, associativity, reason):
    refused = small_profile(associativity=str(associativity))
    with VirtualClock() as clock, pytest.raises(PolicyError, match=reason):
        CmmH(clock, refused, phantom=True, policy=policy)


def test_a_direct_mapped_cache_evicts_on_conflicts_while_it_has_room(make_host):
    host = make_host(small_profile(associativity="1"))
    host.drive(store(host, 0, 8, 16))
    assert host.cached() == {16}
    assert host.counters.evictions == 2
    host.drive(fetch(host, 0, 8, 16))
    assert host.counters.misses == 3


def test_sets_of_ways_hold_an_object_as_large_as_the_cache(make_host):
    host = make_host(small_profile(associativity="2"))

    async def run():
        await host.write(3 * GRANULE, 1, 8 * GRANULE)
        await host.write(20 * GRANULE, 2, 8 * GRANULE)
        await host.read(3 * GRANULE, 1, 8 * GRANULE)

    host.drive(run())
    assert host.counters.misses == 8


# -- addresses, protocol ------------------------------------------------------------------------


def test_it_is_a_memory_device_without_staging(host):
    device = host.device
    assert isinstance(device, MemoryDevice)
    assert device.prefetch_depth == 0
    assert device.chm_prefetch_object(0, GRANULE) is None
    with pytest.raises(DeviceError, match="no staging"):
        device.chm_prefetch_release(object())
    with pytest.raises(DeviceError, match="no staging"):
        host.drive(device.chm_prefetch_wait(object()))


@pytest.mark.parametrize(
    ("address", "nbytes"), [(-4096, 4096), (0, 0), (100, 4096), (256 * GRANULE - 4096, 4097)]
)
def test_an_object_that_cannot_be_there_is_refused_with_the_reason(host, address, nbytes):
    with pytest.raises(DeviceError) as caught:
        host.device.admit(address, nbytes)
    assert caught.value.status is Status.BOUNDS


def test_an_object_larger_than_the_whole_cache_is_not_admitted(host):
    assert host.device.admit(0, 8 * GRANULE)
    with pytest.raises(DeviceError, match="does not fit its cache"):
        host.device.admit(20 * GRANULE, 8 * GRANULE + 1)
    with pytest.raises(DeviceError, match="does not fit its cache"):  # it would touch nine
        host.device.admit(40 * GRANULE + PAGE_BYTES, 8 * GRANULE)
    host.device.cancel(0)


def test_an_address_is_admitted_once(host):
    assert host.device.admit(0, GRANULE)
    with pytest.raises(ValueError, match="already taken"):
        host.device.admit(0, GRANULE)
    host.device.cancel(0)
    with pytest.raises(ValueError, match="no open reservation"):
        host.device.cancel(0)


def test_bytes_that_were_not_reserved_are_refused(host):
    device = host.device

    async def run():
        device.admit(0, GRANULE)
        with pytest.raises(DeviceError, match="not made ready"):
            device.receive(0, host.content(1, GRANULE), None)
        await device.ready_to_receive(0)
        with pytest.raises(DeviceError, match="reserved"):
            device.receive(0, host.content(1, PAGE_BYTES), None)
        with pytest.raises(DeviceError, match="trailer"):
            device.receive(0, host.content(1, GRANULE), np.zeros(1, dtype=np.uint8))
        with pytest.raises(DeviceError, match="nothing received"):
            device.commit(0)
        device.cancel(0)

    host.drive(run())


def test_a_capacity_beyond_the_ssds_is_refused():
    with VirtualClock() as clock, pytest.raises(DeviceError, match="its 2 SSDs have"):
        CmmH(clock, small_profile(), phantom=True, capacity_bytes=3 * 10**12)


# -- real bytes, real time ----------------------------------------------------------------------


def test_on_real_files_in_real_time_every_byte_survives_eviction(tmp_path):
    device_profile = scale_profile(
        profile(16, cache_granule="256 KiB", outstanding_misses="256"), 64
    )
    block = BLOCK // 64
    host = Host(
        device_profile,
        wall=True,
        folder=tmp_path,
        trailer_bytes=PAGE_BYTES,
        capacity_bytes=64 * (block + PAGE_BYTES),
    )
    blocks = range(48)

    async def run():
        for number in blocks:
            await host.write(number * (block + PAGE_BYTES), number, block)
        for turn in (blocks, reversed(blocks)):
            left = iter(turn)

            async def reader(left=left):
                for number in left:
                    await host.read(number * (block + PAGE_BYTES), number, block)

            await asyncio.wait_for(host.clock.gather(reader(), reader()), 30)

    host.drive(run())
    assert host.counters.misses > 48 * 4
    assert host.counters.hits > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cmm-h0.ssd0", "cmm-h0.ssd1"]
    host.close()
    assert list(tmp_path.iterdir()) == []
