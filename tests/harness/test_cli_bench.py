"""``cxlbench bench``: a verdict on every bar, and ``--strict`` makes a missed one an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cxlbench.harness import bench_clock, bench_datapath, bench_master, bench_replay, fidelity

QUICK = {
    "clock": ("--seconds", "0.2", "--timers", "2000"),
    "datapath": ("--size", "64KiB", "--rounds", "1"),
    "master": ("--objects", "2000", "--batches", "20"),
}


@pytest.fixture
def met(monkeypatch):
    """Lower every bar to what any host meets."""
    for name in bench_datapath.BARS:
        monkeypatch.setitem(bench_datapath.BARS, name, 0.0)
    monkeypatch.setattr(bench_master, "MIN_KEYS_PER_S", 1)
    monkeypatch.setattr(bench_clock, "MIN_TIMERS_PER_S", 1)
    for limit in ("MAX_BANDWIDTH_ERROR", "MAX_LATE_P50_S", "MAX_LATE_P99_S"):
        monkeypatch.setattr(fidelity, limit, 1e9)


MISS = {
    "clock": (
        bench_clock,
        "MIN_TIMERS_PER_S",
        10**12,
        "virtual time: timers a second, 1,000 pending",
    ),
    "datapath": (bench_datapath, "BARS", dict.fromkeys(bench_datapath.BARS, 1000000000.0), "put"),
    "master": (bench_master, "MIN_KEYS_PER_S", 10**12, "lookup with leases: hits"),
}


def verdicts(out: str) -> dict[str, str]:
    """Return what a table says of each row: pass, MISSED or nothing."""
    rows = {}
    for line in out.splitlines():
        name = line.split("  ")[0].strip()
        if name and "---" not in line:
            rows[name] = next((w for w in ("pass", "MISSED") if line.split()[-1] == w), "")
    return rows


@pytest.mark.parametrize("command", QUICK)
@pytest.mark.usefixtures("met")
def test_met_bars_are_said_to_be_and_strict_is_content(cli, command):
    ran = cli("bench", command, *QUICK[command], "--strict")
    assert ran.code == 0
    found = [verdict for verdict in verdicts(ran.out).values() if verdict]
    assert len(found) >= 4
    assert set(found) == {"pass"}
    assert "MISSED" not in ran.err


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("command", QUICK)
@pytest.mark.usefixtures("met")
def test_a_missed_bar_is_named_and_an_error_only_if_strict(cli, monkeypatch, command, strict):
    where, name, value, row = MISS[command]
    monkeypatch.setattr(where, name, value)
    ran = cli("bench", command, *QUICK[command], *(["--strict"] if strict else []))
    assert ran.code == (1 if strict else 0)
    assert verdicts(ran.out)[row] == "MISSED"
    assert row in ran.err
    assert ran.err.splitlines()[-1].startswith("MISSED ")
    assert "Traceback" not in ran.err


@pytest.mark.usefixtures("met")
def test_a_missed_bar_is_in_the_json_which_is_whole_when_strict_fails(cli, monkeypatch):
    monkeypatch.setattr(bench_master, "MIN_KEYS_PER_S", 10**12)
    ran = cli("bench", "master", *QUICK["master"], "--strict", "--json")
    assert ran.code == 1
    assert ran.document["passed"]["table: hits"] is False
    assert ran.document["passed"]["a slot"] is True


# -- replays --------------------------------------------------------------------------------------


def alone(*words):
    """Run the command in a process of its own: memory counts from its start."""
    return subprocess.run(
        [sys.executable, "-m", "cxlbench.harness.cli", "bench", "replay", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_replay_is_measured_in_time_memory_and_events(small_trace):
    ran = alone(small_trace, "--strict")
    assert ran.returncode == 0, ran.stderr
    assert "small: 9 requests" in ran.stdout
    found = verdicts(ran.stdout)
    assert [name for name, verdict in found.items() if verdict == "pass"] == [
        "CPU time from file to figures, s",
        "peak resident memory, GB",
        "timers a block",
        "callbacks a block",
    ]


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        ("MAX_CPU_S", "CPU time from file to figures, s"),
        ("MAX_RESIDENT_BYTES", "peak resident memory, GB"),
        ("MAX_TIMERS", "timers a block"),
        ("MAX_CALLBACKS", "callbacks a block"),
    ],
)
def test_each_bar_of_a_replay_can_be_missed(cli, small_trace, monkeypatch, limit, row):
    monkeypatch.setattr(bench_replay, limit, 0)
    ran = cli("bench", "replay", small_trace, "--strict")
    assert ran.code == 1
    assert verdicts(ran.out)[row] == "MISSED"
    assert cli("bench", "replay", small_trace).code == 0


def test_a_measured_replay_is_the_replay(cli, small_trace):
    found = cli("bench", "replay", small_trace, "--json").document["measured"]
    figures = cli("replay", small_trace, "--json").document["figures"]
    for name in ("requests", "hit_rate", "timers_per_block", "callbacks_per_block"):
        assert found[name] == figures[name]
    assert found["virtual_s"] == figures["duration_s"]
    assert found["blocks"] == figures["block_read"]["count"] + figures["stored_blocks"]
    assert found["cpu_s"] > 0
    assert found["peak_resident_bytes"] > 50e6, "no Python with numpy is smaller"


def test_a_part_of_a_trace_can_be_measured(cli, small_trace):
    ran = cli("bench", "replay", small_trace, "--limit", "4", "--json")
    assert ran.document["measured"]["requests"] == 4


def test_a_replay_with_wrong_data_exits_1_without_strict(cli, small_trace, monkeypatch):
    from cxlbench.harness.replay import ReplayResult

    monkeypatch.setattr(ReplayResult, "correct", property(lambda self: False))
    ran = cli("bench", "replay", small_trace)
    assert ran.code == 1
    assert "WRONG" in ran.err


def test_what_is_measured_has_a_function_of_its_own():
    """The command line only says what these found."""
    for module in (bench_clock, bench_datapath, bench_master, bench_replay):
        assert callable(getattr(module, module.__name__.rpartition(".")[2]))
