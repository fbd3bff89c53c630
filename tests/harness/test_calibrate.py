"""Calibration: the probes, the cache file, and which wall runs are refused by it."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, ExpanderProfile, load_as
from cxlbench.emu.status import HostLimitError
from cxlbench.harness import disk_probe
from cxlbench.harness.calibrate import (
    LARGE,
    SMALL,
    Calibration,
    cache_file,
    calibrate,
    check_host_feeds,
    check_room,
    fitting_scale,
    mixed_bandwidth,
    patterns,
    place_of,
    remember,
    remembered,
    required_scale,
)
from cxlbench.harness.disk_probe import Pattern, Rate, fio_command, parse_fio

FIO_REPORT = """fio: a warning before the document
{"fio version": "fio-3.33", "jobs": [{"jobname": "cxlbench",
 "read": {"bw_bytes": 1500000000, "bw": 1464843}, "write": {"bw_bytes": 500000000, "bw": 488281}}]}
"""
MIXED = Pattern(random=False, block_bytes=LARGE, read_share=0.7)
MIB = 1 << 20

FAKE_FIO = """#!/bin/sh
echo "$@" >> "$FIO_LOG"
cat <<'END'
%s
END
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake_fio(tmp_path, monkeypatch):
    """Put a program called fio on the path that logs its arguments and prints a report."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "fio"
    program.write_text(FAKE_FIO % FIO_REPORT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FIO_LOG", str(tmp_path / "fio.log"))
    return program


def host(read, write, *, place="here"):
    """A host that moves reads and writes at these bytes/s, and mixtures as an SSD does."""
    rates = []
    for pattern in patterns():
        share = pattern.read_share
        total = 1 / (share / read + (1 - share) / write)
        rates.append(Rate(pattern, total * share, total * (1 - share)))
    return Calibration(place, "made up", True, tuple(rates))


@pytest.fixture
def prototype():
    return load_as(CxlHmProfile, "cxl-hm-prototype")


def test_the_built_in_probe_moves_bytes_both_ways_and_leaves_no_file(tmp_path):
    found = calibrate(tmp_path, seconds=0.2, use_fio=False, quick=True, size_bytes=8 * MIB)
    by_share = {rate.pattern.read_share: rate for rate in found.rates}
    assert by_share[1.0].read_bytes_per_s > 0
    assert by_share[1.0].write_bytes_per_s == 0
    assert by_share[0.0].write_bytes_per_s > 0
    assert found.method == "built-in probe"
    assert list(tmp_path.iterdir()) == []


def test_all_patterns_are_measured_unless_quick():
    kinds = {(p.random, p.block_bytes) for p in patterns()}
    assert kinds == {(r, b) for r in (False, True) for b in (LARGE, SMALL)}
    assert {p.read_share for p in patterns()} == {1.0, 0.7, 0.5, 0.0}
    assert {(p.random, p.block_bytes) for p in patterns(quick=True)} == {(False, LARGE)}


def test_fio_is_told_what_to_measure(tmp_path, fake_fio):
    found = calibrate(tmp_path, seconds=4, size_bytes=MIB)
    assert found.method == "fio"
    assert {rate.read_bytes_per_s for rate in found.rates} == {1.5e9}
    lines = (tmp_path / "fio.log").read_text().splitlines()
    assert len(lines) == len(patterns())
    assert sum("--rw=randrw" in line and "--rwmixread=70" in line for line in lines) == 2
    assert all("--output-format=json" in line and "--time_based" in line for line in lines)


def test_fio_uses_direct_io_where_the_file_system_has_it(tmp_path):
    file = tmp_path / "probe"
    file.write_bytes(bytes(4096))
    command = fio_command(tmp_path / "fio", file, MIB, MIXED, 2.0)
    assert f"--direct={int(disk_probe.is_direct(file))}" in command
    assert "--rw=rw" in command
    assert f"--bs={LARGE}" in command


def test_fios_report_is_read_past_its_warnings():
    rate = parse_fio(FIO_REPORT, MIXED)
    assert (rate.read_bytes_per_s, rate.write_bytes_per_s) == (1.5e9, 5e8)
    assert rate.bytes_per_s == 2e9


@pytest.mark.parametrize(
    "text", ["", "{}", '{"jobs": []}', '{"jobs": [{"read": {}}]}', "{nonsense"]
)
def test_another_report_of_fio_is_refused(text):
    with pytest.raises(HostLimitError, match="fio's report is not as expected"):
        parse_fio(text, MIXED)


def test_a_failing_fio_is_an_error_that_names_the_way_out(tmp_path, fake_fio):
    fake_fio.write_text("#!/bin/sh\necho 'fio: engine not loadable' >&2\nexit 1\n")
    (tmp_path / "disk").mkdir()
    with pytest.raises(HostLimitError, match=r"fio failed \(1\): fio: engine not .*--no-fio"):
        calibrate(tmp_path / "disk", seconds=1, size_bytes=MIB)
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_fio_answers(tmp_path):
    with disk_probe.probe_file(tmp_path, 4 * MIB) as file:
        fio = disk_probe.find_fio()
        rate = disk_probe.fio_runner(fio, file, 4 * MIB)(Pattern(False, LARGE, 1.0), 1.0)
    assert rate.read_bytes_per_s > 0


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    real = os.statvfs

    def small(path):
        found = list(real(path))
        found[4] = 10
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(HostLimitError, match="MiB free, calibration wants"):
        calibrate(tmp_path, use_fio=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(HostLimitError, match="cannot calibrate in"),
        disk_probe.probe_file(tmp_path / "file" / "below", 4 * MIB),
    ):
        pass


@pytest.mark.parametrize("name", ["typo", "file"])
def test_what_is_no_folder_is_refused_and_not_made(tmp_path, name):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(HostLimitError, match="is no folder"):
        calibrate(tmp_path / name, use_fio=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_calibration_is_remembered_for_its_file_system(tmp_path):
    assert remembered(tmp_path) is None
    found = host(2e9, 1e9, place=place_of(tmp_path))
    remember(found)
    assert remembered(tmp_path) == found
    assert remembered(tmp_path / "not" / "there" / "yet") == found


def test_calibrations_of_several_places_are_kept(tmp_path):
    remember(host(1e9, 1e9, place="there"))
    remember(host(2e9, 1e9, place=place_of(tmp_path)))
    places = json.loads(cache_file().read_text())["places"]
    assert set(places) == {"there", place_of(tmp_path)}


@pytest.mark.parametrize("text", ["", "nonsense", '{"version": 99}', '{"places": 3}'])
def test_a_damaged_cache_is_as_good_as_none(tmp_path, text):
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text)
    assert remembered(tmp_path) is None
    remember(host(2e9, 1e9, place=place_of(tmp_path)))
    assert remembered(tmp_path) is not None


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(HostLimitError, match=r"not remembered: .*set XDG_CACHE_HOME"):
        remember(host(2e9, 1e9))
    assert remembered(tmp_path) is None


def test_figures_that_cannot_be_remembered_are_printed_and_an_error(cli, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ran = cli("calibrate", "--no-fio", "--quick", "--seconds", "0.05", "--size", "1MiB")
    assert ran.code == 2
    assert "scale from which on this folder feeds it" in ran.out
    assert "remembered in" not in ran.out
    assert "error: not remembered: " in ran.err


def test_fio_ends_with_the_calibration_that_started_it(tmp_path, monkeypatch):
    """Its own processes too: it is killed as a group."""
    fio = tmp_path / "fio"
    fio.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path / 'child'}\nwait\n")
    fio.chmod(0o755)
    with pytest.raises(HostLimitError, match="did not end within"):
        disk_probe._run([str(fio)], timeout_s=1.0)
    child = int((tmp_path / "child").read_text())
    for _ in range(500):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("fio's child runs on")


def test_the_scale_needed_is_that_of_the_pattern_the_host_is_worst_at(prototype):
    # Two SSDs read 26 GB/s and write 13.2 GB/s.
    assert required_scale(prototype, host(2.6e9, 13.2e9)) == pytest.approx(10)
    assert required_scale(prototype, host(26e9, 1.32e9)) == pytest.approx(10)
    assert required_scale(prototype, host(2.6e9, 1.32e9), devices=2) == pytest.approx(20)


def test_mixed_traffic_counts(prototype):
    good = host(26e9, 13.2e9)
    weak = Calibration(
        good.place,
        good.method,
        True,
        tuple(
            Rate(r.pattern, r.read_bytes_per_s / 4, r.write_bytes_per_s / 4)
            if r.pattern.read_share == 0.5
            else r
            for r in good.rates
        ),
    )
    assert required_scale(prototype, good) == 1
    assert required_scale(prototype, weak) == pytest.approx(4)


def test_a_host_faster_than_the_device_needs_no_scale(prototype):
    assert required_scale(prototype, host(100e9, 100e9)) == 1


def test_a_device_without_ssds_needs_nothing_of_a_disk():
    assert required_scale(load_as(ExpanderProfile, "remote-dram"), host(1.0, 1.0)) == 1


def test_a_disk_that_moved_nothing_feeds_no_device():
    dead = Calibration("here", "made up", True, (Rate(MIXED, 0.0, 0.0),))
    assert required_scale(load_as(CmmHProfile, "cmm-h-256g"), dead) == math.inf


def test_an_ssd_shares_its_time_between_reads_and_writes(prototype):
    assert mixed_bandwidth(prototype.ssd, 1.0) == 13e9
    assert mixed_bandwidth(prototype.ssd, 0.0) == pytest.approx(6.6e9)
    half = mixed_bandwidth(prototype.ssd, 0.5) / 2
    assert half / 13e9 + half / 6.6e9 == pytest.approx(1)


@pytest.mark.parametrize(("needed", "fits"), [(1, 1), (1.01, 2), (10, 16), (64, 64), (65, 128)])
def test_scales_are_suggested_as_powers_of_two(needed, fits):
    assert fitting_scale(needed) == fits


def test_a_run_that_the_host_cannot_feed_is_refused_with_the_scale_that_fits(tmp_path, prototype):
    remember(host(2.6e9, 13.2e9, place=place_of(tmp_path)))
    with pytest.raises(HostLimitError, match=r"needs scale 10\.0 or more; use --scale 16"):
        check_host_feeds(prototype, 8, tmp_path)
    assert check_host_feeds(prototype, 16, tmp_path) is not None


def test_without_a_calibration_nothing_is_refused_or_measured(tmp_path, prototype):
    assert check_host_feeds(prototype, 1, tmp_path) is None


def test_files_larger_than_the_disk_are_refused_with_the_scale_that_fits(tmp_path):
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    check_room([free // 2], tmp_path, scale=1)
    with pytest.raises(HostLimitError, match=r"larger than the disk.*use --scale 8"):
        check_room([3 * free, 3 * free], tmp_path / "made" / "later", scale=1)


def test_the_command_prints_rates_and_the_scale_of_each_device(cli, tmp_path):
    ran = cli("calibrate", "--no-fio", "--quick", "--seconds", "0.2", "--size", "4MiB")
    assert ran.code == 0
    assert "sequential 1 MiB" in ran.out
    assert "cxl-hm-prototype" in ran.out
    assert "so --scale" in ran.out


def test_the_command_says_how_to_get_fio(cli, monkeypatch):
    monkeypatch.setattr(disk_probe, "find_fio", lambda: None)
    ran = cli("calibrate", "--quick", "--seconds", "0.2", "--size", "4MiB", "--json")
    assert ran.document["calibration"]["method"] == "built-in probe"
    assert "fio is not installed" in ran.err


def test_a_calibrated_host_refuses_a_replay_it_cannot_feed(cli, small_trace, tmp_path):
    remember(host(2.6e6, 1.32e6, place=place_of(tmp_path)))
    wall = ("replay", small_trace, "--wall", "--folder", tmp_path / "files", "--scale", "512")
    ran = cli(*wall, "--capacity", "4GiB")
    assert ran.code == 2
    assert "cannot feed 1 x cxl-hm-prototype at scale 512" in ran.err
    assert cli(*wall, "--capacity", "4GiB", "--unchecked", "--speed", "20").code in (0, 3)
