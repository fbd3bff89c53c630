"""The doctor: it looks at everything, and what is missing is told, not raised."""

from __future__ import annotations

import os

import pytest

from cxlbench.harness import doctor
from cxlbench.harness.doctor import State, examine


def by_name(found):
    return {finding.name: finding for finding in found.findings}


@pytest.fixture
def no_timers(monkeypatch):
    monkeypatch.setattr(doctor, "_timers", lambda duration_s: (10e-6, 100e-6))


def test_everything_is_looked_at(tmp_path):
    found = examine(tmp_path, lateness_s=0.02)
    names = set(by_name(found))
    assert {"Python", "numpy", "numba", "cores", "memory", "huge pages", "NUMA nodes"} <= names
    assert {"/dev/dax*", "fio", "timers", "GPU", f"folder {tmp_path}"} <= names
    assert list(tmp_path.iterdir()) == []


def test_the_main_job_runs_here(tmp_path, no_timers):
    assert examine(tmp_path).ok


def test_a_folder_that_cannot_be_used_is_told(tmp_path, no_timers):
    (tmp_path / "file").write_text("in the way")
    there = tmp_path / "file" / "below"
    found = examine(there)
    assert by_name(found)[f"folder {there}"].state is State.MISSING
    assert not found.ok
    feature = next(one for one in found.features if one.name.startswith("real bytes in files"))
    assert not feature.available
    assert "cannot be used" in feature.why


def test_a_folder_that_is_not_there_yet_is_no_error_and_is_not_made(tmp_path, no_timers):
    there = tmp_path / "not" / "yet"
    found = examine(there)
    assert found.ok
    assert f"a run would make it in {tmp_path}" in by_name(found)[f"folder {there}"].value
    assert list(tmp_path.iterdir()) == []


def test_late_timers_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_timers", lambda duration_s: (1e-3, 5e-3))
    found = examine(tmp_path)
    assert by_name(found)["timers"].value == "late by 1000 us at p50, 5.00 ms at p99"
    honest = next(one for one in found.features if one.name == "honest timing")
    assert not honest.available


def test_one_core_is_told(tmp_path, no_timers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert by_name(examine(tmp_path))["cores"].state is State.NOTE


def test_a_package_that_is_not_there_is_told():
    assert doctor._package("no-such-package").state is State.MISSING


def test_a_host_without_proc_and_sys_is_no_error(tmp_path, no_timers, monkeypatch):
    monkeypatch.setattr(doctor, "_number_in", lambda path, label: None)
    monkeypatch.setattr(doctor, "_text", lambda path: "")
    assert by_name(examine(tmp_path))["huge pages"].value == "none in this system"


def test_the_command_prints_findings_and_features(cli, no_timers):
    ran = cli("doctor")
    assert ran.code == 0
    assert "late by 10 us" in ran.out
    assert "real bytes in files" in ran.out


def test_the_command_speaks_json(cli, no_timers):
    document = cli("doctor", "--json").document
    assert document["ok"] is True
    assert {one["name"] for one in document["findings"]} >= {"cores", "memory"}


def test_a_host_that_cannot_run_the_bench_exits_2(cli, no_timers, monkeypatch):
    monkeypatch.setattr(doctor, "PYTHON_AT_LEAST", (9, 0))
    assert cli("doctor").code == 2
