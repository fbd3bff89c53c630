"""What the tests of the command line share: a runner, a cache of their own, small workloads."""

from __future__ import annotations

import pytest

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.traces import write_workload
from tests.harness.cli_runner import Cli

SMALL = GeneratorKnobs(
    sessions=3,
    turns=3,
    shared_system_tokens=128,
    first_input_tokens=384,
    turn_input_tokens=128,
    output_tokens=16,
    think_s=0.2,
    seed=5,
)


@pytest.fixture
def cli(capfd, tmp_path, monkeypatch):
    """Run commands in an empty folder, with no calibration known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Cli(capfd)


@pytest.fixture
def small_trace(tmp_path):
    """Write a small workload of three sessions with three turns."""
    path = tmp_path / "small.jsonl"
    write_workload(generate(SMALL, name="small"), path)
    return path
