"""``--json``: one document, alone on standard output, from every command in a real small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.test_cli import commands

TIMING_KEPT_OR_NOT = (0, 3)
"""A shared machine may be late: the document is the same."""

TIER = ("--workers", "2", "--gpu-blocks", "2", "--capacity", "4GiB")
RUNS = {
    ("demo",): [("--trace", "small.jsonl", "--budget", "0.5", "--scale", "512")],
    ("replay",): [
        ("small.jsonl", *TIER),
        ("small.jsonl", *TIER, "--out", "out"),
        ("small.jsonl", *TIER, "--wall", "--scale", "512", "--speed", "20", "--folder", "files"),
        ("small.jsonl", "--statistics"),
    ],
    ("generate",): [("--sessions", "2", "--turns", "2", "made.jsonl")],
    ("profiles", "list"): [()],
    ("profiles", "show"): [("cxl-hm-prototype",)],
    ("calibrate",): [("--no-fio", "--quick", "--seconds", "0.05", "--size", "1MiB")],
    ("doctor",): [()],
    ("io",): [
        ("--rw", "randread", "--bs", "1m", "--size", "8m"),
        ("--rw", "read", "--bs", "1m", "--size", "8m", "--wall", "--folder", "files"),
    ],
    ("bench", "clock"): [("--seconds", "0.2", "--timers", "2000")],
    ("bench", "datapath"): [("--size", "64KiB", "--rounds", "1")],
    ("bench", "master"): [("--objects", "2000", "--batches", "20")],
    ("bench", "replay"): [("small.jsonl",)],
}


ELSEWHERE = {
    ("pod", "explore"): "test_pod_cli.py",
    ("pod", "replay"): "test_pod_cli.py",
    ("pod", "lint"): "test_pod_cli.py",
    ("pod", "campaign"): "test_pod_campaign.py",
    ("pod", "stress"): "test_pod_stress.py",
    ("pod", "fsck"): "test_pod_fsck.py",
    ("bench", "pod"): "test_bench_pod.py",
    ("up",): "test_cli_processes.py",
    ("worker",): "test_cli_processes.py",
    ("status",): "test_cli_processes.py",
    ("chaos",): "test_chaos.py",
    ("sweep",): "test_cli_sweep.py",
    ("size",): "test_size.py",
    ("list",): "test_cli_experiments.py",
    ("run",): "test_cli_experiments.py",
    ("compare",): "test_cli_experiments.py",
    ("report",): "test_report_page.py",
    ("policies",): "test_cli_policies.py",
    ("bench", "model"): "test_bench_model.py",
    ("bench", "serving"): "test_bench_serving.py",
}
"""Commands that need more around them than a file: their own tests read their documents."""


def test_every_command_is_run():
    assert set(RUNS) | set(ELSEWHERE) == set(commands())
    for command, name in ELSEWHERE.items():
        text = (Path(__file__).parent / name).read_text()
        assert f'"{command[-1]}"' in text
        assert '"--json"' in text


@pytest.mark.parametrize(
    "words",
    [(*command, *options) for command, runs in RUNS.items() for options in runs],
    ids=" ".join,
)
@pytest.mark.usefixtures("small_trace")
def test_the_document_is_alone_on_standard_output(cli, monkeypatch, words):
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli(*words, "--json")
    assert ran.code in (TIMING_KEPT_OR_NOT if "--wall" in words else (0,)), ran.err
    document = json.loads(ran.out)
    assert document
    assert ran.out == json.dumps(document, sort_keys=True, indent=2) + "\n"


@pytest.mark.usefixtures("small_trace")
def test_progress_and_notes_of_the_demo_are_on_standard_error(cli, monkeypatch):
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli("demo", *RUNS["demo",][0], "--json")
    assert "CXL-HM + HyMCache, real bytes: " in ran.err
    assert "on real bytes this takes about " in ran.err
    assert len(ran.document["tiers"]) == 4


@pytest.mark.usefixtures("small_trace")
def test_a_demo_that_is_late_exits_0_and_says_so(cli, monkeypatch):
    """It compares tiers on whatever host there is; ``replay --wall`` and ``io --wall`` exit 3."""
    monkeypatch.setattr("cxlbench.harness.fidelity.MAX_LATE_P99_S", -1.0)
    ran = cli("demo", *RUNS["demo",][0])
    assert ran.code == 0
    assert ran.out.count("TIMING NOT KEPT") == 4
    assert cli("demo", *RUNS["demo",][0], "--json").document["tiers"][0]["timing_kept"] is False
    assert cli("io", *RUNS["io",][1]).code == 3
    assert cli("replay", *RUNS["replay",][2]).code == 3
