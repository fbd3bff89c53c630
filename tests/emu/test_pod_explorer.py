"""Schedulers, scenarios, shrinking, saved schedules, replay and reports."""

from __future__ import annotations

import re

import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import (
    SavedSchedule,
    ScheduleFileError,
    explore,
    replay,
)
from cxlbench.emu.pod_failure import Kind, NotReproducedError, PodUsageError
from cxlbench.emu.pod_ops import clflush, load, store
from cxlbench.emu.pod_shrink import merged, shrink
from cxlbench.emu.user_objects import UserObjectError
from tests.emu.pod_programs import counting, message, sequence_lock

NAMED = "tests.emu.pod_programs:message_scenario"
SOUND = "tests.emu.pod_programs:sound_scenario"


@pytest.mark.parametrize("scheduler", ["random", "pct", "mixed"])
def test_correct_programs_are_quiet(scheduler):
    for scenario, schedules in ((message(), 600), (sequence_lock(), 600), (counting(), 250)):
        found = explore(scenario, schedules=schedules, scheduler=scheduler)
        assert not found.failed, found.report
        assert found.schedules == schedules


LOCK_MUTANTS = [
    ("counter not flushed", Cause.NEVER_FLUSHED),
    ("counter not invalidated", Cause.NO_INVALIDATE),
    ("payload not invalidated", Cause.NO_INVALIDATE),
    ("invalidates before the lock", Cause.NO_INVALIDATE),
    ("counter flush posted", Cause.POSTED),
    ("released before the DMA is complete", Cause.DMA_INCOMPLETE),
]


@pytest.mark.parametrize(("mutant", "cause"), LOCK_MUTANTS)
@pytest.mark.parametrize("scheduler", ["random", "pct"])
def test_mutants_of_a_locked_counter_are_found_with_their_cause(mutant, cause, scheduler):
    found = explore(counting(mutant), schedules=2_000, scheduler=scheduler)
    assert (found.report.kind, found.report.cause) == (Kind.CAUSALITY, cause)
    assert found.report.site[0].function == "count"
    assert found.report.later_site[0].function == "count"


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        ("release not flushed", Kind.HANG),
        ("polls without flush", Kind.HANG),
        ("grants two", Kind.EXCLUSION),
        ("unfair", Kind.WAITING),
    ],
)
def test_mutants_of_the_lock_itself_are_found(mutant, kind):
    others = [other for other in Kind if other is not kind]
    found = explore(counting(mutant, 4), schedules=500, scheduler="mixed", ignore=others)
    assert found.report.kind is kind


@pytest.mark.parametrize("mutant", ["half not invalidated", "sequence not invalidated"])
def test_mutants_of_a_sequence_lock_are_found(mutant):
    report = explore(sequence_lock(mutant), schedules=2_000, scheduler="mixed").report
    assert report.kind in (Kind.CAUSALITY, Kind.EXCEPTION)


# Depth first


def two_steps(pod):
    def writer(mem):
        store(mem, 0, 1)
        clflush(mem, 0)

    def reader(mem, seen):
        seen.append(load(mem, 0))

    seen = []
    pod.run(0, writer)
    pod.run(1, reader, seen)
    pod.at_end(lambda mem: outcomes.add(tuple(seen)))


outcomes = set()


def test_a_depth_first_search_ends_and_sees_every_outcome():
    outcomes.clear()
    found = explore(two_steps, scheduler="dfs", bound=2)
    assert found.exhausted
    assert not found.failed
    assert outcomes == {(0,), (1,)}


def test_a_larger_bound_visits_more_and_disturbances_still_more():
    counts = [
        explore(message(), scheduler="dfs", schedules=50_000, bound=bound, disturb=disturb)
        for bound, disturb in ((0, False), (1, False), (2, False), (2, True))
    ]
    assert all(found.exhausted and not found.failed for found in counts)
    visited = [found.schedules for found in counts]
    assert visited[0] == 1
    assert visited == sorted(set(visited))


def test_a_depth_first_search_stops_at_the_number_of_schedules():
    found = explore(message(), scheduler="dfs", schedules=5)
    assert (found.schedules, found.exhausted) == (5, False)


# Determinism, shrinking, replay


def test_an_exploration_is_the_same_every_time():
    first, again = (explore(counting("counter flush posted"), seed=3) for _ in range(2))
    assert first == again


def test_seeds_differ():
    lengths = {explore(counting(), schedules=3, seed=seed).steps for seed in range(5)}
    assert len(lengths) == 5


def test_an_exploration_can_be_divided():
    whole = explore(counting("payload not invalidated"), schedules=2_000)
    index = whole.schedule.index
    assert not explore(counting("payload not invalidated"), schedules=max(1, index)).failed
    part = explore(counting("payload not invalidated"), schedules=1, first=index)
    assert (part.report, part.schedule) == (whole.report, whole.schedule)


@pytest.mark.parametrize(("mutant", "cause"), LOCK_MUTANTS)
def test_a_shrunk_schedule_is_shorter_and_replays_to_the_same_failure(mutant, cause):
    whole = explore(counting(mutant), schedules=2_000, shrinking=False)
    shrunk = explore(counting(mutant), schedules=2_000)
    assert len(shrunk.schedule.choices) < len(whole.schedule.choices)
    assert shrunk.report.signature == whole.report.signature
    for found in (whole, shrunk):
        assert replay(found.schedule, target=counting(mutant)) == found.report


def test_a_saved_schedule_replays_from_its_file(tmp_path):
    found = explore(NAMED)
    path = tmp_path / "failure.json"
    found.schedule.save(path)
    assert SavedSchedule.load(path) == found.schedule
    assert replay(path) == found.report
    assert replay(str(path)) == found.report


def test_a_replay_of_repaired_code_says_that_nothing_fails():
    found = explore(NAMED)
    with pytest.raises(NotReproducedError, match="not when repeated"):
        replay(found.schedule, target=message())


def test_a_scenario_that_changes_from_run_to_run_is_refused():
    runs = []

    def scenario(pod):
        runs.append(None)
        message("data not flushed" if len(runs) == 2 else "")(pod)

    with pytest.raises(NotReproducedError, match="state kept between runs"):
        explore(scenario, schedules=50)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "not a saved schedule"), (b'{"format": "x"}', "not a saved schedule")],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ScheduleFileError, match=said):
        replay(path)


def test_a_schedule_of_another_format_is_refused(tmp_path):
    path = tmp_path / "x.json"
    explore(NAMED).schedule.save(path)
    path.write_bytes(path.read_bytes().replace(b"pod schedule 1", b"pod schedule 9"))
    with pytest.raises(ScheduleFileError, match="pod schedule 9"):
        replay(path)


def test_shrinking_leaves_what_is_needed():
    choices = [("evict", 0, line) for line in range(40)]
    needed = [choices[7], choices[31]]
    calls = []

    def fails(candidate):
        calls.append(candidate)
        return all(choice in candidate for choice in needed)

    assert shrink(choices, fails, attempts=500) == needed
    calls.clear()
    shrink(choices, fails, attempts=20)
    assert len(calls) == 20


def test_neighbouring_steps_of_one_task_are_one_choice():
    choices = [("run", 0, 1), ("run", 0, 2), ("fill", 0, 2), ("run", 0, 1), ("run", 1, 1)]
    assert merged(choices) == [("run", 0, 3), *choices[2:]]


# Reports


def test_a_report_says_what_where_why_and_in_which_order():
    report = explore(message("data not invalidated")).report
    text = report.text("cxlbench pod replay failure.json")
    for pattern in (
        r"^causality violation: no invalidate$",
        r"word at offset 0x0 \(line 0x0, word 0\): the data",
        r"load +pod_programs.py:\d+ in receive: got.append\(load\(mem, DATA\)\)",
        r"newer store +pod_programs.py:\d+ in send: store\(mem, DATA, 7\)",
        r"by writer \(node 0\), step \d+, value 7; in the device since step \d+",
        r"known since +pod_programs.py:\d+ in receive: if load\(mem, FLAG\):",
        r"flush the line before the load",
        r"device: 7",
        r"node 1: 0 in a clean copy taken at step \d+",
        r"writer \(node 0\) clflush 0x40 \[the flag\], lands",
        r"replay: cxlbench pod replay failure.json$",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


def test_a_long_interleaving_is_cut():
    report = explore(counting("counter not flushed", 6), shrinking=False, schedules=2_000).report
    assert len(str(report).splitlines()) < 60


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scheduler": "fair"}, PodUsageError),
        ({"schedules": 0}, PodUsageError),
        ({"first": -1}, PodUsageError),
        ({"max_steps": 0}, PodUsageError),
    ],
)
def test_impossible_explorations_are_refused(options, error):
    with pytest.raises(error):
        explore(message(), **options)


def test_a_target_that_is_not_there_is_named():
    with pytest.raises(UserObjectError, match="no_such"):
        explore("tests.emu.pod_programs:no_such")


def test_progress_is_told():
    told = []
    explore(SOUND, schedules=4, progress=told.append)
    assert told == [1, 2, 3, 4]
