"""Driving a device directly: bandwidths that arithmetic gives, verified bytes, clear refusals."""

from __future__ import annotations

import pytest

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, ExpanderProfile, load_as
from cxlbench.harness.io_bench import IoJobError, describe_io
from cxlbench.harness.io_bench import run_io as run_io_bench

MIB, GIB = 1 << 20, 1 << 30


def run_io(device, **options):
    return run_io_bench(device, **{"rw": "read", "bs": 16 * MIB, "size": GIB, **options})


HM = load_as(CxlHmProfile, "cxl-hm-prototype")
CMM = load_as(CmmHProfile, "cmm-h-256g")
SMALL_CMM = load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": "2 GiB"})
DRAM = load_as(ExpanderProfile, "remote-dram")


@pytest.mark.parametrize("device", [HM, CMM, DRAM], ids=lambda profile: profile.kind)
@pytest.mark.parametrize("rw", ["read", "randread", "write", "randrw"])
def test_every_pattern_runs_on_every_device_and_every_read_is_right(device, rw):
    result = run_io(device, rw=rw, bs=16 * MIB, size=GIB, iodepth=2, numjobs=2, seed=3)
    assert result.read.operations + result.write.operations == 128
    assert result.verified == result.read.operations
    assert result.wrong == 0


def test_prefetch_hides_the_ssds_behind_the_port():
    plain = run_io(HM, rw="randread", size=8 * GIB, iodepth=1)
    ahead = run_io(HM, rw="randread", size=8 * GIB, iodepth=1, prefetch=8)
    port = HM.port_bandwidth
    assert ahead.read.bytes_per_s > 0.9 * port
    assert plain.read.bytes_per_s < 0.7 * port


def test_a_transparent_cache_that_is_scanned_falls_below_half_of_what_it_gives_in_dram():
    inside = run_io(SMALL_CMM, rw="read", size=GIB)
    beyond = run_io(SMALL_CMM, rw="read", size=8 * GIB)
    assert inside.read.bytes_per_s == pytest.approx(SMALL_CMM.port_bandwidth, rel=0.05)
    assert beyond.read.bytes_per_s < 0.5 * inside.read.bytes_per_s
    assert beyond.read.bytes_per_s == pytest.approx(SMALL_CMM.miss_bandwidth, rel=0.05)


@pytest.mark.parametrize(("misses", "unit"), [("32", "4 KiB"), ("64", "8 KiB"), ("16", "16 KiB")])
def test_the_bandwidth_beyond_the_cache_is_misses_times_unit_over_latency(misses, unit):
    device = load_as(
        CmmHProfile,
        "cmm-h-256g",
        overrides={"dram_capacity": "2 GiB", "outstanding_misses": misses, "refill_unit": unit},
    )
    expected = int(misses) * int(unit.split()[0]) * 1024 / device.ssd.read_latency
    result = run_io(device, rw="read", size=8 * GIB, iodepth=4)
    assert result.read.bytes_per_s == pytest.approx(expected, rel=0.01)


def test_real_bytes_on_real_files_are_verified_and_the_files_go(tmp_path):
    result = run_io(
        HM, rw="randread", size=256 * MIB, wall=True, scale=256, folder=tmp_path, prefetch=2
    )
    assert result.verified == result.read.operations > 0
    assert result.wrong == 0
    assert result.fidelity is not None
    assert list(tmp_path.iterdir()) == []
    assert "fidelity" in describe_io(result)


def test_the_same_seed_gives_the_same_figures():
    one, two = (run_io(HM, rw="randrw", size=GIB, iodepth=4, seed=5) for _ in range(2))
    assert one == two


def test_a_runtime_ends_the_passes():
    result = run_io(DRAM, rw="read", size=GIB, runtime_s=0.5)
    assert result.duration_s == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bs": 512}, "bs=512"),
        ({"size": MIB}, "size=1048576"),
        ({"rw": "trim"}, "rw='trim'"),
        ({"size": 3 << 40}, "need"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(options, message):
    with pytest.raises(IoJobError, match=message):
        run_io(HM, **options)


def test_prefetch_on_a_device_without_staging_says_so():
    with pytest.raises(IoJobError, match="no staging"):
        run_io(CMM, prefetch=1)
