"""Sweeps that are stopped, politely or not: rows stay, workers end, the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cxlbench.harness.sweep_rows import read_sweep

WHERE = "tests.harness.toy_experiment:EXPERIMENT"
ROOT = Path(__file__).parents[2]


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_its_rows_ends_its_workers_and_goes_on(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends the children of a killed process")
    marks, out = tmp_path / "marks", tmp_path / "toy.jsonl"
    words = [
        *(sys.executable, "-m", "cxlbench.harness.cli", "sweep", WHERE),
        *("--set", "sessions=8,16,64,65", "--set", "trouble=hang", "--set", f"marks={marks}"),
        *("--jobs", "2", "-o", out),
    ]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        until = time.monotonic() + 60
        while not marks.exists() or len(marks.read_text().splitlines()) < 4:
            assert time.monotonic() < until
            assert running.poll() is None
            time.sleep(0.02)
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            running.send_signal(number)
        said, errors = running.communicate(timeout=60)
    assert [row.point for row in read_sweep(out).rows] == [0, 1]
    workers = {int(line.split()[0]) for line in marks.read_text().splitlines()}
    until = time.monotonic() + 20
    while any(map(alive, workers)):
        assert time.monotonic() < until
        time.sleep(0.02)
    if number != signal.SIGKILL:
        assert running.returncode == 128 + number
        assert "PARTIAL: toy, 2 of 4 points" in said
        assert "the same command goes on" in errors
        assert "Traceback" not in errors
