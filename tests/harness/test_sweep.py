"""Sweeps: a row for each point whatever happens to it, on the disk at once, gone on with later."""

from __future__ import annotations

import json
from functools import partial

import pytest

from cxlbench.harness.experiment import ExperimentError
from cxlbench.harness.results import Verdict
from cxlbench.harness.sweep import (
    OtherSetupError,
    PointTask,
    in_processes,
    in_this_process,
    load_experiment,
    run_sweep,
)
from cxlbench.harness.sweep_axes import make_design
from cxlbench.harness.sweep_rows import read_sweep, setup_hash, shares
from tests.harness.toy_experiment import EXPERIMENT, NEVER

WHERE = "tests.harness.toy_experiment:EXPERIMENT"


def swept(path, *sets, runner=in_this_process, quick=False, seed=0, **more):
    design = make_design(EXPERIMENT, sets=sets, quick=quick, seed=seed)
    return run_sweep(EXPERIMENT, WHERE, design, path, runner=runner, quick=quick, seed=seed, **more)


def task(**overrides: str) -> PointTask:
    setup = setup_hash(EXPERIMENT, quick=False)
    return PointTask(where=WHERE, setup=setup, quick=False, seed=0, point=0, overrides=overrides)


@pytest.fixture
def rows_file(tmp_path):
    return tmp_path / "toy.jsonl"


def test_a_row_has_keys_claims_checks_and_summarized_rows_and_seconds_apart(rows_file):
    file = swept(rows_file, "sessions=32,128")
    (first, second) = file.rows
    assert first.keys == {"sessions": "32"}
    assert [(c.name, c.verdict, c.value) for c in second.result.claims] == [
        ("faster", Verdict.HOLDS, 4.0),
        ("never", Verdict.OPEN, None),
    ]
    assert [(check.name, check.ok) for check in first.result.checks] == [("positive", True)]
    assert first.result.rows == 4
    assert first.result.summary == [
        {"system": "slow", "turn": 1.5, "ttft_s": 1.5, "note_s": None},
        {"system": "fast", "turn": 1.5, "ttft_s": 1.5, "note_s": None},
    ]
    raw = json.loads(rows_file.read_text().splitlines()[1])
    assert set(raw) == {"point", "keys", "result", "run"}
    assert raw["run"].keys() == {"seconds"}
    assert not file.partial


def test_the_header_says_whose_file_it_is(rows_file):
    swept(rows_file, "sessions=1,2", quick=True, seed=7)
    header = json.loads(rows_file.read_text().splitlines()[0])
    assert header["experiment"] == "toy"
    assert (header["seed"], header["quick"], header["points"]) == (7, True, 2)
    assert header["setup"] == setup_hash(EXPERIMENT, quick=True)
    assert "numpy" in header["versions"]


def test_two_files_of_one_sweep_differ_in_seconds_only(tmp_path):
    sets = ("sessions=8..64:5", "routing=round-robin,prefix-aware")
    one = swept(tmp_path / "one.jsonl", *sets)
    two = swept(tmp_path / "two.jsonl", *sets, runner=partial(in_processes, jobs=2))
    assert one.header == two.header
    assert [(r.point, r.keys, r.result) for r in one.rows] == [
        (r.point, r.keys, r.result) for r in two.rows
    ]
    lines = (tmp_path / "two.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["point"] for line in lines] == list(range(10))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_point_that_raises_is_a_row_with_the_error(rows_file, jobs):
    runner = partial(in_processes, jobs=jobs)
    file = swept(rows_file, "sessions=8,64,16", "trouble=raise", runner=runner)
    errors = [row.result.error for row in file.rows]
    assert errors[0] is None
    assert errors[2] is None
    assert errors[1] == "ValueError: 64 sessions are too many (toy_experiment.py, run)"


def test_a_point_whose_process_dies_is_a_row_and_is_run_again_when_the_sweep_goes_on(rows_file):
    marks = rows_file.with_name("marks")
    sets = ("sessions=8,64,16", "trouble=die", f"marks={marks}")
    runner = partial(in_processes, jobs=1)
    file = swept(rows_file, *sets, runner=runner)
    died = file.rows[1].result
    assert died.lost
    assert died.error == "its process ended, killed by signal 9"
    assert [row.result.error for row in (file.rows[0], file.rows[2])] == [None, None]
    swept(rows_file, *sets, runner=runner)
    ran = [line.split()[1] for line in marks.read_text().splitlines()]
    assert ran == ["8", "64", "16", "64"]


def test_points_that_have_a_row_are_not_run_again(rows_file):
    marks = rows_file.with_name("marks")
    sets = ("sessions=8..32:4", f"marks={marks}")
    whole = swept(rows_file, *sets)
    lines = rows_file.read_bytes().splitlines(keepends=True)
    rows_file.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    assert read_sweep(rows_file).partial
    marks.unlink()
    told = []
    again = swept(rows_file, *sets, progress=lambda *step: told.append(step))
    assert [row.result for row in again.rows] == [row.result for row in whole.rows]
    assert [line.split()[1] for line in marks.read_text().splitlines()] == ["24", "32"]
    assert told == [("points", 2, 4), ("points", 3, 4), ("points", 4, 4)]


def test_an_interrupt_leaves_what_has_ended(rows_file):
    def interrupted(tasks):
        yield from in_this_process(tasks[:2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(rows_file, "sessions=8,16,32", runner=interrupted)
    file = read_sweep(rows_file)
    assert file.partial
    assert [row.point for row in file.rows] == [0, 1]
    assert not swept(rows_file, "sessions=8,16,32").partial


def test_an_unknown_experiment_is_refused():
    with pytest.raises(ExperimentError):
        load_experiment("tests.harness.toy_experiment:NEVER")
    with pytest.raises(ExperimentError, match="no experiment"):
        load_experiment("no_such_thing_at_all")
    assert NEVER.name == "never"


@pytest.mark.parametrize(
    "runner", [in_this_process, partial(in_processes, jobs=1)], ids=["here", "process"]
)
def test_who_has_another_version_of_the_experiment_ends_the_sweep(runner):
    other = PointTask(where=WHERE, setup="other", quick=False, seed=0, point=0, overrides={})
    with pytest.raises(OtherSetupError, match="install the same version"):
        list(runner([other]))


def test_no_process_at_all_is_refused():
    with pytest.raises(ValueError, match="jobs=0"):
        list(in_processes([task()], jobs=0))


def test_shares_count_points_in_which_a_claim_holds(rows_file):
    swept(rows_file, "sessions=8,64,128,256", "trouble=none")
    assert shares("toy", rows_file.parent) == {"faster": (3, 4), "never": (0, 4)}


def test_shares_of_a_set_up_that_is_out_of_date_or_of_nothing_are_empty(rows_file):
    swept(rows_file, "sessions=8,64")
    folder = rows_file.parent
    assert shares("toy", folder, setup=setup_hash(EXPERIMENT, quick=False))
    assert shares("toy", folder, setup=setup_hash(EXPERIMENT, quick=True)) == {}
    assert shares("no_such_experiment", folder) == {}
    assert shares("no_such_experiment") == {}


def test_points_that_raised_are_not_counted_in_shares(rows_file):
    swept(rows_file, "sessions=8,64", "trouble=raise")
    assert shares("toy", rows_file.parent) == {"faster": (0, 1), "never": (0, 1)}
