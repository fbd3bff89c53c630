"""Sweeps on Ray: the same rows as here, and clear words where there is no Ray (tox -e ray)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cxlbench.harness import sweep_ray
from cxlbench.harness.sweep import in_this_process, run_sweep
from cxlbench.harness.sweep_axes import SweepError, make_design
from cxlbench.harness.sweep_ray import on_ray
from cxlbench.harness.sweep_rows import read_sweep
from tests.harness.test_sweep import task
from tests.harness.toy_experiment import EXPERIMENT

WHERE = "tests.harness.toy_experiment:EXPERIMENT"
ROOT = Path(__file__).parents[2]
WITHOUT_RAY = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(WITHOUT_RAY, reason="Ray is not installed: tox -e ray")


def ray_sweep(out, *words):
    return subprocess.run(
        [sys.executable, "-m", "cxlbench.harness.cli", "sweep", WHERE, "-o", out, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )


@pytest.mark.ray
@needs_ray
def test_a_local_ray_gives_the_rows_that_this_process_gives(tmp_path):
    words = ("--set", "sessions=8,16,64,32", "--set", "trouble=raise")
    ran = ray_sweep(tmp_path / "ray.jsonl", *words, "--ray", "local", "--jobs", "2")
    assert ran.returncode == 0, ran.stderr
    assert "toy, 4 of 4 points" in ran.stdout
    design = make_design(EXPERIMENT, sets=words[1::2], seed=1)
    here = run_sweep(
        EXPERIMENT, WHERE, design, tmp_path / "here.jsonl", runner=in_this_process, seed=1
    )
    there = read_sweep(tmp_path / "ray.jsonl")
    assert there.header == here.header
    assert [(r.keys, r.result) for r in there.rows] == [(r.keys, r.result) for r in here.rows]
    assert there.rows[2].result.error.startswith("ValueError: 64 sessions")


@pytest.mark.ray
@needs_ray
def test_a_point_whose_process_dies_is_a_row_on_ray_too(tmp_path):
    words = ("--set", "sessions=8,64", "--set", "trouble=die")
    ran = ray_sweep(tmp_path / "ray.jsonl", *words, "--ray", "local", "--jobs", "1")
    assert ran.returncode == 0, ran.stderr
    fine, died = read_sweep(tmp_path / "ray.jsonl").rows
    assert fine.result.error is None
    assert died.result.lost
    assert died.result.error.startswith("Ray lost it, ")


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "auto"])
def test_a_cluster_that_is_not_there_is_said_so(tmp_path, address):
    ran = ray_sweep(tmp_path / "ray.jsonl", "--set", "sessions=8,16", "--ray", address)
    assert ran.returncode == 2
    assert f"there is no Ray cluster at '{address}'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SweepError, match=r"pip install 'cxlbench\[ray\]'"):
        next(on_ray([task()], address="local"))


def test_with_nothing_left_to_do_no_cluster_is_started(monkeypatch):
    monkeypatch.setattr(sweep_ray, "_ray", lambda: pytest.fail("was asked for"))
    assert list(partial(on_ray, address="local")([])) == []
