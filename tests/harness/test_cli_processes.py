"""``cxlbench up``, ``worker`` and ``status``, as a shell runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "cxlbench.harness.cli"]
UP = ("--scale", "1024", "--capacity", "16GiB", "--run-dir", "run")
HEADER = "part    process    serves at\n"
TIMING_NOT_KEPT = 3
"""Allowed here: the machine that runs tests may be busy."""


def cli(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@contextlib.contextmanager
def up(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``cxlbench up``; it is there when this returns, and is ended by Ctrl-C."""
    with (
        (folder / "up.err").open("w") as errors,
        subprocess.Popen(
            [*COMMAND, "up", *UP, *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() in ("{\n", HEADER), (folder / "up.err").read_text()
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def document(process: subprocess.Popen[str]) -> dict:
    """Return the JSON document that ``up --json`` prints."""
    assert process.stdout is not None
    text = "{\n"
    while True:
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
        text += process.stdout.readline()


def until(true, *, within_s=20.0):
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_deployment_serves_workers_is_asked_and_leaves_nothing(tmp_path):
    with up(tmp_path) as process:
        ran = cli(tmp_path, "worker", "--sessions", "2", "--turns", "2", "--run-dir", "run")
        assert ran.returncode in (0, TIMING_NOT_KEPT), ran.stderr
        assert re.search(r"wrong blocks +0\n", ran.stdout)
        assert re.search(r"held at rest +nothing\n", ran.stdout)
        assert "fidelity: " in ran.stdout
        again = cli(
            tmp_path, "worker", "--sessions", "2", "--turns", "2", "--run-dir", "run", "--json"
        )
        figures = json.loads(again.stdout)["figures"]
        assert figures["requests"] == 4
        assert figures["wrong_blocks"] == figures["stored_blocks"] == 0
        assert figures["tier_blocks"] == figures["announced_blocks"] > 0

        asked = cli(tmp_path, "status", "--run-dir", "run")
        assert asked.returncode == 0
        assert re.search(r"Master +up +1 ", asked.stdout)
        assert re.search(r"node 0 +up +1 +\d+ +nothing", asked.stdout)
        second = cli(tmp_path, "up", *UP)
        assert second.returncode == 2
        assert second.stderr.startswith("error: a deployment runs in run already")
    assert process.returncode == 0
    assert (tmp_path / "up.err").read_text() == "stopped\n"
    assert [path.name for path in tmp_path.iterdir()] == ["up.err"]


def test_a_worker_of_an_unthrottled_deployment_judges_no_timing(tmp_path):
    with up(tmp_path, "--unthrottled"):
        words = ("worker", "--sessions", "2", "--turns", "2", "--run-dir", "run")
        ran = cli(tmp_path, *words)
        assert ran.returncode == 0, ran.stderr
        assert "no timing is emulated" in ran.stdout
        assert "fidelity: " not in ran.stdout
        assert "TIMING NOT KEPT" not in ran.stdout + ran.stderr


def test_a_folder_that_cannot_be_made_is_refused_with_the_option(tmp_path):
    (tmp_path / "file").touch()
    ran = cli(tmp_path, "up", *UP, "--folder", "file/ssd")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: cannot use file/ssd for the SSDs' files: ")
    assert "--folder" in ran.stderr


def test_a_process_that_dies_is_reported_and_with_restart_started_again(tmp_path):
    with up(tmp_path, "--restart", "--json") as process:
        pids = {part["part"]: part["pid"] for part in document(process)["parts"]}
        os.kill(pids["node 0"], signal.SIGKILL)
        until(lambda: "node 0 is started again" in (tmp_path / "up.err").read_text())
        assert "node 0 ended (killed by SIGKILL)" in (tmp_path / "up.err").read_text()

        def whole() -> bool:
            asked = cli(tmp_path, "status", "--run-dir", "run", "--json")
            parts = json.loads(asked.stdout)["parts"]
            return asked.returncode == 0 and parts[0]["figures"]["nodes"] == 1

        until(whole)
    assert process.returncode == 0


def test_without_restart_a_dead_process_is_reported_and_ends_in_exit_code_2(tmp_path):
    with up(tmp_path, "--json") as process:
        pids = {part["part"]: part["pid"] for part in document(process)["parts"]}
        os.kill(pids["node 0"], signal.SIGKILL)
        until(lambda: "its blocks are misses" in (tmp_path / "up.err").read_text())
        asked = cli(tmp_path, "status", "--run-dir", "run")
        assert asked.returncode == 2
        assert re.search(r"node 0 +does not answer", asked.stdout)
    assert process.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["up.err"]


def test_where_nothing_runs_status_and_worker_say_so(tmp_path):
    for command in ("status", "worker"):
        ran = cli(tmp_path, command)
        assert ran.returncode == 2
        assert ran.stderr.startswith("error: no deployment runs in run/cxlbench: run `cxlbench up")


def test_everything_that_is_wrong_with_a_configuration_is_said_at_once(tmp_path):
    (tmp_path / "tier.toml").write_text("nodes = 0\nnode = 3\n")
    ran = cli(tmp_path, "up", "--config", "tier.toml", "--scale", "tiny")
    assert ran.returncode == 2
    for said in ("tier.toml: nodes: 0", "did you mean nodes?", "--scale: scale: 'tiny'"):
        assert said in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tier.toml"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("worker", "--limit", "3"), "it is for a TRACE"),
        (("replay", "x.jsonl", "--processes"), "--processes is for --wall"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, args, said):
    ran = cli(tmp_path, *args)
    assert ran.returncode == 2
    assert said in ran.stderr
