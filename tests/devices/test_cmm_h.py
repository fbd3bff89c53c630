"""How CMM-H behaves: scans, write-back, shared refills, pins, policies, faults, sets, files."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cxlbench.devices import cmm_h_cache
from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.policies import PolicyError
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.devices.profile import CmmHProfile, load_as, scale_profile
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.pipe import finished
from cxlbench.emu.status import DeviceError, Status
from cxlbench.harness.held_clock import HeldWallClock
from cxlbench.harness.io_bench import run_io
from tests.devices.cmm_h_rig import GRANULE, Host, small_profile

MIB = 1 << 20


@pytest.fixture
def hosts():
    """Return a function that makes hosts; each is closed, and found at rest, after the test."""
    made: list[Host] = []

    def make(granules: int = 8, *, phantom: bool = True, policy=None, faults=None, **overrides):
        profile = small_profile(granules, **overrides)
        made.append(Host(profile, phantom=phantom, policy=policy, faults=faults))
        return made[-1]

    yield make
    for host in made:
        host.close()


def at(granule: int) -> int:
    return granule * GRANULE


def full_size(**overrides: str) -> CmmHProfile:
    return load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": "256 MiB", **overrides})


def scan(profile: CmmHProfile, nbytes: int, **options) -> float:
    """Return bytes/s of reading ``nbytes`` in order, pass after pass."""
    job = {"rw": "read", "bs": 2 * MIB, "iodepth": 8, "runtime_s": 0.5, **options}
    result = run_io(profile, size=nbytes, **job)
    assert result.correct
    return result.read.bytes_per_s


# -- bandwidth ----------------------------------------------------------------------------------


def test_scans_run_at_the_port_inside_the_dram_and_collapse_beyond_it():
    profile = full_size()
    inside = scan(profile, 256 * MIB)
    assert 0.95 < inside / profile.port_bandwidth <= 1
    assert scan(profile, 258 * MIB) < inside / 2, "one granule too many: LRU misses always"
    assert scan(profile, 512 * MIB) < inside / 2


@pytest.mark.parametrize(
    ("unit", "outstanding"), [("4 KiB", 16), ("4 KiB", 64), ("16 KiB", 16), ("8 KiB", 64)]
)
def test_refill_unit_and_outstanding_misses_give_the_bandwidth_beyond_the_cache(unit, outstanding):
    profile = full_size(refill_unit=unit, outstanding_misses=str(outstanding))
    expected = outstanding * profile.refill_unit / profile.ssd.read_latency
    assert expected < 2 * profile.ssd.read_bandwidth, "the SSDs must not be what limits"
    assert scan(profile, 1024 * MIB, runtime_s=2.0) == pytest.approx(expected, rel=0.01)


def test_the_ssds_limit_where_many_misses_are_outstanding():
    profile = full_size(refill_unit="2 MiB", outstanding_misses="4096")
    expected = 2 * profile.ssd.read_bandwidth
    assert scan(profile, 1024 * MIB, runtime_s=2.0) == pytest.approx(expected, rel=0.01)


def test_eager_write_back_slows_reads_that_miss_meanwhile():
    job = {"rw": "randrw", "rwmixread": 50, "bs": 2 * MIB, "size": 1024 * MIB, "iodepth": 8}
    wide = {"refill_unit": "2 MiB", "outstanding_misses": "4096"}
    reads = run_io(full_size(**wide), **{**job, "rw": "randread"}).read
    mixed = run_io(full_size(**wide), **job).read
    assert mixed.mean_s > 1.5 * reads.mean_s


def test_scale_keeps_the_seconds():
    whole = full_size()
    small = scan(whole, 512 * MIB, scale=16)
    assert small == pytest.approx(scan(whole, 512 * MIB), rel=0.01)
    assert scale_profile(whole, 16).miss_bandwidth == pytest.approx(whole.miss_bandwidth / 16)


# -- refills ------------------------------------------------------------------------------------


def _evicted(host: Host, tag: int = 1) -> None:
    host.drive(host.write(at(0), tag))
    host.drive(host.evict_all())


def test_two_readers_of_one_missing_object_share_one_refill(hosts):
    host = hosts()
    _evicted(host)

    async def both():
        return await host.clock.gather(host.read(at(0)), host.read(at(0)))

    before = host.device.ssds.ssds[0].read_bytes
    got = host.drive(both())
    assert all(host.holds(one, 1) for one in got)
    assert host.device.ssds.ssds[0].read_bytes - before == GRANULE
    assert (host.device.counters.misses, host.device.counters.refilled_bytes) == (1, GRANULE)


def test_a_reader_that_comes_during_a_refill_waits_for_its_end(hosts):
    host = hosts()
    _evicted(host)
    ends: list[float] = []

    async def read_after(delay_s: float) -> None:
        await host.clock.sleep(delay_s)
        await host.read(at(0))
        ends.append(host.clock.now())

    async def both() -> float:
        begin = host.clock.now()
        late = host.device.profile.ssd.read_latency / 2
        await host.clock.gather(read_after(0), read_after(late))
        return begin

    begin = host.drive(both())
    assert min(ends) - begin > host.device.profile.ssd.read_latency
    assert ends[1] >= ends[0]
    assert host.device.counters.misses == 1


@pytest.mark.parametrize(("missing", "moved"), [((0, 2), [2, 0]), ((0, 3), [1, 1])])
def test_only_the_missing_granules_are_read_each_from_its_own_ssd(hosts, missing, moved):
    host = hosts(granules=8, associativity="2")  # four sets
    host.drive(host.write(at(0), 1, 4 * GRANULE))
    for granule in missing:  # push them out of their sets, which have two ways
        for other in (granule + 8, granule + 12):
            host.drive(host.write(at(other), other))
    before = [ssd.read_bytes for ssd in host.device.ssds.ssds]
    assert host.holds(host.drive(host.read(at(0), 4 * GRANULE)), 1)
    after = [ssd.read_bytes for ssd in host.device.ssds.ssds]
    assert after == [old + GRANULE * n for old, n in zip(before, moved, strict=True)]
    assert (host.device.counters.hits, host.device.counters.misses) == (2, 2)


def test_a_failed_refill_ends_the_read_with_an_error_and_a_retry_works(hosts):
    host = hosts(faults=FaultPlan((FaultRule(point="ssd.read", kind="error", limit=1),)))
    _evicted(host)

    async def both():
        jobs = [host.clock.spawn(host.read(at(0))) for _ in range(2)]
        found = []
        for job in jobs:
            try:
                await job
            except DeviceError as error:
                found.append(error.status)
        return found

    assert host.drive(both()) == [Status.IO_ERROR] * 2, "both waited for the same refill"
    assert not any(host.device.at_rest().values())
    assert host.holds(host.drive(host.read(at(0))), 1)


# -- lines and write-back -----------------------------------------------------------------------


def test_a_dirty_victim_is_written_before_its_frame_is_reused(hosts):
    host = hosts(granules=2)
    for granule in range(3):
        host.drive(host.write(at(granule), granule))
    assert host.device.counters.written_back == 1, "the oldest, and no other"
    assert host.cached() == {1, 2}
    for granule in (0, 1, 2, 0):
        assert host.holds(host.drive(host.read(at(granule))), granule)


def test_a_pinned_granule_is_not_evicted(hosts):
    host = hosts(granules=3)
    host.drive(host.write(at(0), 0))
    view = host.drive(host.device.open_read(at(0), GRANULE))
    for granule in range(1, 12):
        host.drive(host.write(at(granule), granule))
        assert 0 in host.cached()
    assert host.holds(host.drive(host.take(view, GRANULE)), 0)
    view.close()
    assert host.device.counters.misses == 0


def test_a_read_waits_until_somebody_unpins(hosts):
    host = hosts(granules=2)
    for granule in range(3):
        host.drive(host.write(at(granule), granule))

    async def main():
        views = [await host.device.open_read(at(granule), GRANULE) for granule in (1, 2)]
        waiting = host.clock.spawn(host.read(at(0)))
        await host.clock.sleep(1)
        stuck = not waiting.done()
        for view in views:
            view.close()
        return stuck, await waiting

    stuck, got = host.drive(main())
    assert stuck
    assert host.holds(got, 0)


def test_a_write_that_lands_in_a_victim_while_it_is_written_back_is_not_lost(hosts):
    host = hosts(granules=2)
    half = GRANULE // 2
    host.drive(host.write(at(0), 1, half))
    host.drive(host.write(at(1), 2))

    async def main():
        evicting = host.clock.spawn(host.write(at(2), 3))
        await host.clock.sleep(1e-6)  # the write-back of granule 0 is under way
        assert host.device.counters.written_back == 0
        await host.write(at(0) + half, 4, half)  # the other half of the same granule
        await evicting
        await host.evict_all()
        return await host.read(at(0) + half, half), await host.read(at(0), half)

    second, first = host.drive(main())
    assert host.holds(second, 4)
    assert host.holds(first, 1)


def test_eager_write_back_leaves_nothing_dirty_and_lazy_leaves_all(hosts):
    for eager, written in (("true", 4), ("false", 0)):
        host = hosts(eager_write_back=eager)

        async def main(host=host):
            for granule in range(4):
                await host.write(at(granule), granule)
            await host.clock.sleep(1)

        host.drive(main())
        assert host.device.counters.written_back == written


def test_a_failed_write_back_is_tried_again(hosts):
    host = hosts(faults=FaultPlan((FaultRule(point="ssd.write", kind="error", limit=2),)))
    _evicted(host)
    assert host.lost == []
    assert host.device.counters.write_back_failed == 2
    assert host.holds(host.drive(host.read(at(0))), 1)


@pytest.mark.parametrize("kind", ["error", "short"])
def test_an_object_that_cannot_be_written_back_is_reported_lost(hosts, kind):
    host = hosts(faults=FaultPlan((FaultRule(point="ssd.write", kind=kind, limit=3),)))
    host.drive(host.write(at(0), 1))
    host.drive(host.device.quiesce())
    assert host.lost == [at(0)]
    assert (host.device.counters.lost, host.device.counters.written_back) == (1, 0)
    host.device.discard(at(0), GRANULE)
    host.drive(host.write(at(0), 2))
    host.drive(host.evict_all())
    assert host.holds(host.drive(host.read(at(0))), 2), "the next object is not affected"


def test_discard_while_its_write_back_is_in_flight(hosts):
    host = hosts(eager_write_back="true")

    async def main():
        await host.write(at(0), 1)
        await host.clock.sleep(1e-7)
        assert host.device.cache.pins == 1, "the write-back is under way"
        host.device.discard(at(0), GRANULE)
        await host.write(at(0), 2)
        await host.device.quiesce()
        await host.evict_all()
        return await host.read(at(0))

    assert host.holds(host.drive(main()), 2)
    assert host.lost == []


def test_a_discarded_object_is_dropped_without_write_back(hosts):
    host = hosts()
    host.drive(host.write(at(0), 1))
    host.device.discard(at(0), GRANULE)
    host.drive(host.device.quiesce())
    assert host.device.counters.written_back == 0
    with pytest.raises(DeviceError, match="nothing committed"):
        host.drive(host.read(at(0)))


def test_an_object_discarded_while_its_read_waits_for_room_is_not_read(hosts):
    host = hosts(granules=1)
    for granule in range(2):
        host.drive(host.write(at(granule), granule))

    async def main():
        view = await host.device.open_read(at(1), GRANULE)
        waiting = host.clock.spawn(host.read(at(0)))
        await host.clock.sleep(1)
        host.device.discard(at(0), GRANULE)
        view.close()
        await waiting

    with pytest.raises(DeviceError, match="discarded"):
        host.drive(main())


def test_a_cancelled_wait_for_room_leaves_no_pin(hosts):
    host = hosts(granules=2)
    for granule in range(4):
        host.drive(host.write(at(granule), granule))

    async def main():
        view = await host.device.open_read(at(3), GRANULE)
        other = await host.device.open_read(at(2), GRANULE)
        waiting = host.clock.spawn(host.read(at(0)))
        await host.clock.sleep(1)
        waiting.cancel()
        await waiting.ended()
        other.close()
        view.close()
        return await host.read(at(0))

    assert host.holds(host.drive(main()), 0)


# -- policies and sets --------------------------------------------------------------------------


def _survivors(host: Host) -> set[int]:
    """Fill four granules, read the first, and add two more."""
    for granule in range(4):
        host.drive(host.write(at(granule), granule))
    host.drive(host.read(at(0)))
    for granule in (4, 5):
        host.drive(host.write(at(granule), granule))
    return host.cached()


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("lru", {0, 3, 4, 5}),
        ("fifo", {2, 3, 4, 5}),
        ("clock", {0, 3, 4, 5}),
        ("newest:Mru", {1, 2, 3, 5}),
    ],
)
def test_the_policy_chooses_the_victims(hosts, monkeypatch, policy, kept):
    class Mru(LruPolicy):
        """A user's own: the most recent goes first."""

        def evict(self) -> int:
            return self._order.popitem()[0]

    module = ModuleType("newest")
    module.Mru = Mru
    monkeypatch.setitem(sys.modules, "newest", module)
    assert _survivors(hosts(granules=4, policy=policy)) == kept


def test_s3fifo_keeps_what_is_read_again_through_a_scan_and_lru_does_not(hosts):
    hits = {}
    for policy in ("s3fifo", "lru"):
        host = hosts(granules=20, policy=policy)
        for granule in range(10):
            host.drive(host.write(at(granule), granule))
        for _ in range(3):
            for granule in range(10):
                host.drive(host.read(at(granule)))
        for granule in range(100, 130):
            host.drive(host.write(at(granule), granule))
        hits[policy] = len(host.cached() & set(range(10)))
    assert hits["s3fifo"] >= 8
    assert hits["lru"] == 0


def test_a_profile_names_the_policy_and_an_unknown_one_is_refused(hosts):
    assert _survivors(hosts(granules=4, policy=None)) == {0, 3, 4, 5}
    with pytest.raises(PolicyError, match="did you mean lru"):
        CmmH(hosts().clock, small_profile(policy="lruu"), phantom=True)


def test_granules_compete_inside_their_set_only(hosts):
    host = hosts(granules=8, associativity="2")  # four sets
    for granule in (0, 1, 4, 8, 12):
        host.drive(host.write(at(granule), granule))
    assert host.cached() == {1, 8, 12}
    assert host.holds(host.drive(host.read(at(0))), 0)


@pytest.mark.parametrize("ways", ["1", "2", "0"])
def test_many_concurrent_reads_do_not_dead_lock(hosts, ways):
    host = hosts(granules=4, associativity=ways)
    objects = range(0, 48, 3)

    async def main():
        for granule in objects:
            await host.write(at(granule), granule, 3 * GRANULE)
        reads = [host.read(at(granule), 3 * GRANULE) for granule in objects for _ in range(3)]
        return await host.clock.gather(*reads)

    got = host.drive(main())
    assert len(got) == 48
    assert all(host.holds(one, 3 * (index // 3)) for index, one in enumerate(got))


def test_an_object_larger_than_the_cache_is_refused(hosts):
    host = hosts(granules=2)
    assert host.device.admit(at(0), 3 * GRANULE)
    with pytest.raises(DeviceError, match="larger than the cache"):
        host.drive(host.device.ready_to_receive(at(0)))
    host.device.cancel(at(0))


# -- protocol, files ----------------------------------------------------------------------------


def test_misuse_is_refused(hosts):
    host = hosts()
    device = host.device
    assert not device.admit(device.capacity_bytes, GRANULE)
    assert device.admit(at(0), GRANULE)
    with pytest.raises(ValueError, match="already taken"):
        device.admit(at(0), GRANULE)
    with pytest.raises(DeviceError, match="no reservation"):
        device.receive(at(0), host.content(1, GRANULE), None)
    host.drive(device.ready_to_receive(at(0)))
    with pytest.raises(DeviceError, match="reserved"):
        device.receive(at(0), host.content(1, 2 * GRANULE), None)
    with pytest.raises(DeviceError, match="nothing received"):
        device.commit(at(0))
    with pytest.raises(DeviceError, match="nothing committed"):
        host.drive(host.read(at(0)))
    device.cancel(at(0))
    with pytest.raises(ValueError, match="no open reservation"):
        device.cancel(at(0))
    assert device.chm_prefetch_object(at(0), GRANULE) is None


def test_more_capacity_than_the_ssds_have_is_refused(hosts):
    profile = small_profile()
    with pytest.raises(DeviceError, match="its 2 SSDs have"):
        CmmH(hosts().clock, profile, phantom=True, capacity_bytes=profile.capacity + 4096)


def test_real_files_under_the_wall_clock_give_the_bytes_and_the_trailer_back(tmp_path):
    profile = scale_profile(full_size(dram_capacity="32 MiB"), 16)
    clock = HeldWallClock()
    host = Host(profile, clock=clock, folder=tmp_path, trailer_bytes=4096)
    device = host.device
    nbytes, stride = 3 * 40960, 3 * 40960 + 4096
    footers = [host.content(1000 + tag, 4096) for tag in range(40)]

    async def store(tag: int) -> None:
        assert device.admit(tag * stride, nbytes)
        await device.ready_to_receive(tag * stride)
        await finished(clock, device.port.reserve(nbytes))
        device.receive(tag * stride, host.content(tag, nbytes), footers[tag])
        device.commit(tag * stride)

    async def check(tag: int) -> bool:
        view = await device.open_read(tag * stride, nbytes)
        try:
            into, footer = device.arena.buffer(nbytes), device.arena.buffer(4096)
            booking = view.port.reserve(nbytes)
            await view.arrived()
            view.copy_into(into, footer, None)
            await finished(clock, *view.bookings, booking)
        finally:
            view.close()
        return host.holds(into, tag) and bool((footer == footers[tag]).all())

    async def main() -> list[bool]:
        await clock.gather(*[store(tag) for tag in range(40)])
        return await clock.gather(*[check(tag) for tag in (*range(40), *range(40))])

    assert all(host.drive(main()))
    assert device.cache.evictions > 0
    assert device.counters.misses > 0
    host.close()
    assert list(tmp_path.iterdir()) == []


# -- would these tests notice? ------------------------------------------------------------------


def test_the_pin_test_notices_a_cache_that_evicts_pinned_lines(hosts, monkeypatch):
    def choose(self, number):
        return self._lines[self._policies[number].evict()]

    def frame(self, granule):
        if self._free[0]:
            return self._free[0].pop()
        victim = choose(self, 0)
        del self._lines[victim.granule]
        return victim.frame

    host = hosts(granules=3)
    with monkeypatch.context() as patch:
        patch.setattr(cmm_h_cache.Cache, "_frame", frame)
        host.drive(host.write(at(0), 0))
        view = host.drive(host.device.open_read(at(0), GRANULE))
        for granule in range(1, 12):
            host.drive(host.write(at(granule), granule))
        got = host.drive(host.take(view, GRANULE))
        view.close()
    assert 0 not in host.cached()
    assert not host.holds(got, 0)
