"""Plain reads and writes on one device: figures, verification, staging ahead, refused jobs."""

from __future__ import annotations

import pytest

from cxlbench.devices.expander import Expander
from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, ExpanderProfile, load_as
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.status import DeviceError
from cxlbench.harness.io_bench import IoJobError, describe_io, run_io
from cxlbench.harness.results import to_text

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def hm():
    return load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"dram_capacity": "4 GiB"})


@pytest.fixture(scope="module")
def cmm():
    return load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": "1 GiB"})


@pytest.fixture(scope="module")
def dram():
    return load_as(ExpanderProfile, "remote-dram")


def test_every_object_is_read_once_and_verified(hm):
    result = run_io(hm, rw="randread", bs=4 * MIB, size=256 * MIB, iodepth=3, numjobs=2)
    assert (result.read.operations, result.write.operations) == (128, 0)
    assert (result.verified, result.wrong, result.correct) == (128, 0, True)
    assert result.read.bytes == 512 * MIB == sum(result.read.windows_bytes)
    assert result.counters["staged"] == 128


def test_dram_is_read_at_the_bandwidth_of_its_profile(dram):
    result = run_io(dram, rw="read", bs=16 * MIB, size=4 * GIB, iodepth=4)
    assert result.read.bytes_per_s == pytest.approx(dram.bandwidth, rel=0.01)
    one = run_io(dram, rw="read", bs=16 * MIB, size=GIB).read
    expected = 16 * MIB / dram.bandwidth + dram.latency
    assert one.mean_s == pytest.approx(expected)
    assert one.p50_s == pytest.approx(expected)
    assert one.p999_s == pytest.approx(expected)
    assert one.iops == pytest.approx(1 / expected)


def test_staging_ahead_hides_the_ssds_behind_one_reader(hm):
    job = {"rw": "randread", "bs": 16 * MIB, "size": 2 * GIB}
    without = run_io(hm, **job)
    ahead = run_io(hm, **job, prefetch=8)
    assert ahead.read.bytes_per_s > 1.8 * without.read.bytes_per_s
    assert ahead.read.bytes_per_s > 0.9 * min(hm.port_bandwidth, 2 * hm.ssd.read_bandwidth)
    assert (ahead.counters["reads_demand"], ahead.counters["reads_staged"]) == (0, 128)
    assert ahead.counters["staged"] == 128, "each object is staged once"
    assert ahead.correct


def test_a_refused_prefetch_is_asked_again(hm):
    few = load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"prefetch_depth": "2"})
    result = run_io(few, rw="read", bs=16 * MIB, size=GIB, prefetch=8)
    assert result.counters["prefetch_refused"] > 0
    assert result.counters["reads_staged"] == 64
    assert result.correct


def test_a_runtime_ends_the_run_and_gives_staged_objects_back(hm):
    result = run_io(hm, rw="read", bs=16 * MIB, size=GIB, prefetch=8, iodepth=2, runtime_s=2.5)
    assert result.duration_s == pytest.approx(2.5, abs=0.01)
    assert result.read.operations > 64, "the range is gone over again and again"
    assert len(result.read.windows_bytes) == 3
    assert result.read.windows_bytes[0] == pytest.approx(result.read.bytes_per_s, rel=0.02)
    assert result.held_at_rest == {}


@pytest.mark.parametrize("rw", ["rw", "randrw"])
def test_a_mix_has_its_share_of_reads_and_sees_the_newest_bytes(cmm, rw):
    job = {"rw": rw, "rwmixread": 70, "bs": 2 * MIB, "size": 2 * GIB}
    result = run_io(cmm, **job, iodepth=16, runtime_s=1.0, seed=3)
    done = result.read.operations + result.write.operations
    assert done > 2048
    assert result.read.operations / done == pytest.approx(0.7, abs=0.04)
    assert result.verified == result.read.operations
    assert result.correct


def test_writes_of_a_staging_device_sustain_what_the_ssds_take(hm):
    result = run_io(hm, rw="write", bs=16 * MIB, size=16 * GIB, iodepth=4)
    assert result.counters["write_refused"] > 0
    ssds = 2 * hm.ssd.write_bandwidth
    ahead = hm.write_buffer_bytes / result.write.bytes  # complete, but not on the SSDs yet
    assert ssds * 0.9 < result.write.bytes_per_s < ssds * (1 + 1.5 * ahead)


def test_a_rewritten_object_reads_as_its_newest_version_after_many_passes(dram):
    result = run_io(dram, rw="randrw", bs=4096, size=8 * 4096, iodepth=8, runtime_s=1e-4)
    assert result.write.operations > 30
    assert result.verified == result.read.operations > 30
    assert result.wrong == 0


def test_corrupt_bytes_are_counted_and_the_run_is_not_correct(hm):
    rot = FaultRule(point="ssd.read", kind="corrupt", skip=3, limit=2)
    result = run_io(hm, rw="read", bs=MIB, size=16 * MIB, faults=FaultPlan((rot,)))
    assert (result.wrong, result.verified, result.correct) == (2, 14, False)


def test_a_failing_device_ends_the_run_with_its_error(hm):
    broken = FaultRule(point="ssd.read", kind="error", skip=3, limit=1)
    with pytest.raises(DeviceError, match="injected read error"):
        run_io(hm, rw="read", bs=MIB, size=16 * MIB, prefetch=2, faults=FaultPlan((broken,)))


def test_scale_keeps_the_figures(hm):
    job = {"rw": "randread", "bs": 16 * MIB, "size": 2 * GIB, "iodepth": 4, "prefetch": 8}
    full, small = run_io(hm, **job), run_io(hm, **job, scale=64)
    assert small.read.bytes == full.read.bytes
    assert small.read.bytes_per_s == pytest.approx(full.read.bytes_per_s, rel=0.01)


def test_the_seed_decides_the_order_and_nothing_else_does(cmm):
    job = {"rw": "randrw", "bs": 2 * MIB, "size": 2 * GIB, "iodepth": 2}
    first, again = (run_io(cmm, **job, seed=1) for _ in range(2))
    assert to_text(first) == to_text(again)
    assert to_text(run_io(cmm, **job, seed=2)) != to_text(first)


def test_real_bytes_in_files_are_verified_and_the_files_removed(hm, cmm, tmp_path):
    for device in (hm, cmm):
        job = {"rw": "randrw", "bs": 16 * MIB, "size": 512 * MIB, "iodepth": 4, "scale": 64}
        result = run_io(device, **job, wall=True, folder=tmp_path)
        assert result.correct
        assert result.verified == result.read.operations > 0
        assert result.fidelity is not None
    assert list(tmp_path.iterdir()) == []


def test_a_device_of_the_users_own_is_driven_too(dram):
    def make(clock, site):
        return Expander(clock, dram, name=site.name, phantom=site.phantom)

    result = run_io(make, rw="randread", bs=MIB, size=64 * MIB, iodepth=2)
    assert (result.device, result.verified, result.correct) == ("device", 64, True)


def test_the_report_names_operations_bandwidth_and_what_is_held(hm):
    text = describe_io(run_io(hm, rw="read", bs=MIB, size=16 * MIB))
    assert "GB/s" in text
    assert "p99.9 ms" in text
    assert "16, wrong 0" in text
    assert "nothing" in text


def test_bytes_that_the_device_counted_have_a_unit_and_are_of_full_size():
    profile = load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": "1 GiB"})
    text = describe_io(run_io(profile, rw="read", bs=16 * MIB, size=256 * MIB, scale=4))
    assert "hit_bytes 256 MiB" in text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"size": MIB - 1}, "at least one object of bs=1 MiB"),
        ({"bs": 2048}, "whole pages of 4096"),
        ({"bs": 6000}, "whole pages of 4096"),
        ({"rw": "trim"}, "must be one of read, write"),
        ({"iodepth": 0}, "at least 1"),
        ({"rwmixread": 101}, "percentage"),
        ({"runtime_s": 0.0}, "above zero"),
        ({"runtime_s": float("inf")}, "finite"),
        ({"runtime_s": float("nan")}, "finite"),
        ({"prefetch": -1}, "must not be negative"),
        ({"rw": "randrw", "prefetch": 1}, "only pure reads"),
        ({"size": 4 << 40}, "need 4 TiB"),
        ({"size": GIB, "numjobs": 2048}, "need 2 TiB"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(hm, asked, message):
    with pytest.raises(IoJobError, match=message):
        run_io(hm, **{"rw": "read", "bs": MIB, "size": GIB, **asked})


def test_staging_ahead_needs_a_device_with_staging(cmm, dram):
    for device in (cmm, dram):
        with pytest.raises(IoJobError, match="no staging"):
            run_io(device, rw="read", bs=MIB, size=16 * MIB, prefetch=1)


def test_an_object_that_never_fits_is_refused_at_once(hm):
    with pytest.raises(DeviceError, match="the largest is"):
        run_io(hm, rw="read", bs=GIB, size=GIB)


def test_files_need_real_time(hm, tmp_path):
    with pytest.raises(IoJobError, match="wall=True"):
        run_io(hm, rw="read", bs=MIB, size=MIB, folder=tmp_path)
