"""The command line as such: help, errors, exit codes, JSON, interrupts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import click
import pytest

from cxlbench.emu.status import DeviceError, HostLimitError, Status
from cxlbench.harness.cli import main
from cxlbench.harness.cli.group import USER_ERRORS
from cxlbench.harness.cli.options import SIZE
from cxlbench.harness.results import Claim, Verdict

MIB = 1 << 20


def commands(group=main, words=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name)


def runs_alone(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(cli, words):
    ran = cli(*words, "--help")
    assert ran.code == 0
    assert "Example" in ran.out
    assert f"cxlbench {' '.join(words)}" in ran.out.partition("Example")[2]
    assert "--json" in ran.out


def test_the_help_says_what_the_exit_codes_mean(cli):
    text = " ".join(cli("--help").out.split())
    assert "0 fine; 1 wrong data was delivered, or something leaked" in text
    assert "2 a bad option or file" in text
    assert "3 `replay --wall`, `io --wall` or `worker` did not keep its timing (`demo` only" in text


def test_help_imports_none_of_the_heavy_packages():
    loaded = runs_alone(
        "import sys\nfrom cxlbench.harness.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([m for m in ('numpy', 'numba', 'matplotlib', 'tqdm') if m in sys.modules])"
    )
    assert loaded.splitlines()[-1] == "[]"


def test_the_version_is_the_packages(cli):
    assert cli("--version").out == "cxlbench, version 0.1.0\n"


def test_an_unknown_option_is_a_usage_error(cli, small_trace):
    ran = cli("replay", small_trace, "--wal")
    assert (ran.code, ran.out) == (2, "")
    assert "--wall" in ran.err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16MiB", 16 * MIB),
        ("64 GiB", 64 << 30),
        ("4k", 4096),
        ("1m", MIB),
        ("1.5g", 3 << 29),
        ("1GB", 10**9),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_as_people_and_fio_write_them(text, nbytes):
    assert SIZE.convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["16 furlongs", "-4k", "0", "GiB", "1.5", "0.1 B", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HostLimitError("the disk is full"), "the disk is full"),
        (DeviceError(Status.BOUNDS, "too large"), str(DeviceError(Status.BOUNDS, "too large"))),
        (PermissionError(13, "Permission denied", "x"), "x: Permission denied"),
        (OSError("no words of the system"), "no words of the system"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_host_is_one_line_and_no_traceback(cli, monkeypatch, error, text):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("cxlbench.harness.calibrate.calibrate", fail)
    ran = cli("calibrate", "--no-fio")
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: {text}\n")


def test_debug_shows_where_an_error_came_from(cli, monkeypatch):
    def fail(*args, **kwargs):
        raise HostLimitError("the disk is full")

    monkeypatch.setattr("cxlbench.harness.calibrate.calibrate", fail)
    with pytest.raises(HostLimitError):
        main(["--debug", "calibrate", "--no-fio"])


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("nobody expected this")

    monkeypatch.setattr("cxlbench.harness.calibrate.calibrate", fail)
    with pytest.raises(KeyError):
        main(["calibrate", "--no-fio"])


@pytest.mark.parametrize(("module", "name"), USER_ERRORS, ids=[name for _, name in USER_ERRORS])
def test_the_errors_that_users_are_told_of_exist(module, name):
    import importlib

    assert issubclass(getattr(importlib.import_module(module), name), Exception)


def test_json_of_profiles_is_alone_on_standard_output(cli):
    ran = cli("profiles", "list", "--json")
    names = [profile["name"] for profile in ran.document]
    assert {"cxl-hm-prototype", "cmm-h-256g", "pm1743-class"} <= set(names)
    assert (ran.code, ran.err) == (0, "")


def test_profiles_show_prints_value_statistic_and_source(cli):
    ran = cli("profiles", "show", "pm1743-class")
    assert "read_bandwidth" in ran.out
    assert "13 GB/s" in ran.out
    assert "vendor peak, sequential" in ran.out
    assert "Samsung PM1743 announcement" in ran.out
    assert max(map(len, ran.out.splitlines())) < 140, "in a file too, a line can be read"


def test_profiles_show_takes_overrides_and_scale(cli):
    ran = cli(
        *("profiles", "show", "cxl-hm-prototype", "--set", "dram_capacity=32GiB"),
        *("--set", "ssd.read_latency=80us", "--scale", "64", "--json"),
    )
    numbers = {row["name"]: row for row in ran.document["numbers"]}
    assert numbers["dram_capacity"]["value"] == "32 GiB (512 MiB at scale 64)"
    assert numbers["dram_capacity"]["mark"] == "override"
    assert numbers["ssd.read_latency"]["value"] == "80 us"


def test_profiles_list_shows_a_broken_file_of_the_users_with_its_error(cli, tmp_path):
    (tmp_path / "own.toml").write_text('kind = "ssd"\nname = "own"\ndescription = "mine"\n')
    ran = cli("profiles", "list", "--in", tmp_path, "--json")
    own = next(one for one in ran.document if one["name"] == "own")
    assert "capacity: is missing" in own["error"]


def test_a_profile_without_a_unit_is_refused_by_name(cli, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'kind = "link"\nname = "own"\ndescription = "mine"\n'
        '[bandwidth]\nvalue = 3\nstatistic = "guess"\nsource = "me"\n'
    )
    ran = cli("profiles", "show", path)
    assert ran.code == 2
    assert "bandwidth: has no unit (such as GB/s, MB/s, GiB/s)" in ran.err
    assert "Traceback" not in ran.err


def test_an_unknown_profile_names_the_nearest(cli):
    ran = cli("profiles", "show", "cxl-hm-prototyp")
    assert ran.code == 2
    assert "did you mean 'cxl-hm-prototype'" in ran.err


@pytest.mark.parametrize("text", ["dram_capacity", "=3", "a="])
def test_an_override_that_is_none_is_refused(cli, text):
    ran = cli("profiles", "show", "cxl-hm-prototype", "--set", text)
    assert ran.code == 2
    assert "is not KEY=VALUE" in ran.err


def test_an_override_given_twice_is_refused(cli):
    ran = cli(*("profiles", "show", "pm1743-class"), *("--set", "capacity=1TB") * 2)
    assert ran.code == 2
    assert "given twice" in ran.err


def test_generate_writes_the_same_file_for_the_same_seed(cli, tmp_path):
    knobs = ("--sessions", "2", "--turns", "3", "--output-stddev", "20")
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        (tmp_path / name).mkdir()
        ran = cli("generate", *knobs, "--seed", seed, tmp_path / name / "x.jsonl.gz", "--json")
        assert ran.document["requests"] == 6
    one, same, other = ((tmp_path / name / "x.jsonl.gz").read_bytes() for name in "abc")
    assert one != other
    assert one == same


def test_generate_refuses_a_knob_by_name_and_leaves_no_file(cli, tmp_path):
    ran = cli("generate", "--turns", "0", tmp_path / "x.jsonl")
    assert (ran.code, ran.err) == (2, "error: turns=0: must be 1 or more\n")
    assert not list(tmp_path.glob("x*"))


def test_generate_into_a_folder_that_is_not_there_is_an_error(cli, tmp_path):
    ran = cli("generate", tmp_path / "nowhere" / "x.jsonl")
    assert ran.code == 2
    assert "cannot be written" in ran.err


def test_bench_master_reports_bars(cli):
    ran = cli("bench", "master", "--objects", "2000", "--batches", "20", "--json")
    assert ran.code == 0
    assert ran.document["measured"]["objects"] == 2000
    assert set(ran.document["passed"]) == {
        "table: hits",
        "table: misses",
        "lookup with leases: hits",
        "lookup with leases: misses",
        "a slot",
        "load",
    }
    measured = ran.document["measured"]
    # Who hands out descriptors and leases is slower than the table that it asks.
    assert 0 < measured["leased_hit_keys_per_s"] < measured["hit_keys_per_s"]


def test_bench_datapath_prints_bars_and_peak_memory(cli):
    ran = cli("bench", "datapath", "--size", "64KiB", "--rounds", "1")
    assert ran.code == 0
    assert "warm get, every byte checked" in ran.out
    assert "peak memory" in ran.out


def test_bench_datapath_with_wrong_data_exits_1(cli, monkeypatch):
    from cxlbench.harness import bench_datapath

    def wrong(**options):
        raise bench_datapath.WrongDataError("object 3 came back with other bytes")

    monkeypatch.setattr(bench_datapath, "bench_datapath", wrong)
    ran = cli("bench", "datapath", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "object 3" in ran.err


def test_progress_goes_to_standard_error_in_plain_lines(cli, small_trace, monkeypatch):
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli("replay", small_trace, "--json")
    assert json.loads(ran.out)["correct"] is True
    assert "replaying requests: 9 of 9\n" in ran.err


def told(err: str, what: str) -> list[tuple[int, int]]:
    """Return the lines of progress of one kind of work: done, and of how much."""
    lines = re.findall(rf"^{what}: ([\d,]+) of ([\d,]+)$", err, re.MULTILINE)
    return [(int(done.replace(",", "")), int(of.replace(",", ""))) for done, of in lines]


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (
            ("bench", "master", "--objects", "640", "--batches", "9"),
            {"measuring Master, batches of keys": 128},
        ),
        (
            ("bench", "datapath", "--size", "64KiB", "--rounds", "1"),
            {"measuring the data path, rounds": 8},
        ),
        (
            ("generate", "--sessions", "3", "--turns", "2", "x.jsonl"),
            {"making sessions": 3, "writing requests": 6},
        ),
        (
            ("io", "--bs", "1m", "--size", "8m"),
            {"writing the range, objects": 8, "measuring, operations": 8},
        ),
        (("io", "--bs", "1m", "--size", "8m", "--runtime", "0.01"), {"measuring, ms": 10}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_what_can_take_long_shows_progress_up_to_its_end(cli, monkeypatch, words, works):
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli(*words)
    assert ran.code == 0
    for what, total in works.items():
        lines = told(ran.err, what)
        assert lines == sorted(lines)
        assert lines[-1] == (total, total)


@dataclass
class FakeDemo:
    ok: bool
    claims = (Claim(statement="s", source="x", expected="1", measured="2", verdict=Verdict.FAILS),)

    def text(self):
        return "the whole report"

    def to_json(self):
        return {"tiers": [], "ok": self.ok, "plot": "demo.png"}


@pytest.fixture
def fake_demo(monkeypatch):
    """Replace the demo itself; return the options that it is called with."""
    asked = []

    def run_demo(options, progress, note):
        asked.append(options)
        note("on real bytes this takes about 3 s")
        progress("a tier", 1, 2)
        return FakeDemo(ok=options.seed != 13)

    monkeypatch.setattr("cxlbench.harness.demo.run_demo", run_demo)
    return asked


def test_the_demo_prints_its_report_and_writes_its_result(cli, fake_demo, tmp_path):
    ran = cli("demo", "--quick", "--out", tmp_path / "out", "--scale", "64")
    assert (ran.code, ran.out) == (0, "the whole report\n")
    assert fake_demo[0].quick
    assert fake_demo[0].scale == 64
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["figures"] == {"tiers": [], "ok": True}
    assert result["inputs"]["quick"] is True
    assert [claim["verdict"] for claim in result["claims"]] == ["does not hold"]
    assert "on real bytes this takes about 3 s" in ran.err


def test_the_demo_speaks_json(cli, fake_demo):
    assert cli("demo", "--json").document["plot"] == "demo.png"


def test_a_demo_with_wrong_data_exits_1(cli, fake_demo):
    assert cli("demo", "--seed", "13").code == 1


@dataclass(frozen=True)
class Found:
    """What a run of ``io`` found, as far as the command looks at it."""

    bytes: int = 3
    correct: bool = True
    fidelity: None = None


def test_io_hands_fios_words_to_the_bench(cli, monkeypatch):
    asked = {}
    found = Found()

    def run_io(device, **options):
        asked.update(options, device=device.name)
        return found

    fake = ModuleType("cxlbench.harness.io_bench")
    fake.run_io = run_io
    fake.describe_io = lambda found: f"moved {found.bytes} bytes"
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    words = ("--rw", "randrw", "--rwmixread", "70", "--bs", "4k", "--iodepth", "8")
    ran = cli("io", *words, "--size", "1g", "--prefetch", "2", "--set", "dram_capacity=8GiB")
    assert (ran.code, ran.out) == (0, "moved 3 bytes\n")
    assert asked["device"] == "cxl-hm-prototype"
    assert (asked["rw"], asked["rwmixread"], asked["bs"]) == ("randrw", 70, 4096)
    assert (asked["iodepth"], asked["size"], asked["prefetch"]) == (8, 1 << 30, 2)
    assert (asked["wall"], asked["scale"], asked["runtime_s"]) == (False, 1, None)
    assert cli("io", "--json").document["bytes"] == 3
    found = Found(correct=False)
    assert cli("io").code == 1


def test_io_with_too_small_a_size_names_the_size_it_needs(cli):
    """T2: as fio refuses a file smaller than its offset."""
    ran = cli("io", "--bs", "16m", "--size", "1m")
    assert (ran.code, ran.out) == (2, "")
    assert "size=1 MiB: must hold at least one object of bs=16 MiB" in ran.err
    assert "use a size of 16 MiB or more" in ran.err
    assert "Traceback" not in ran.err


def test_io_refuses_a_folder_in_virtual_time(cli):
    ran = cli("io", "--folder", "files")
    assert ran.code == 2
    assert "--wall" in ran.err
