"""What scenarios are built with: regions, tasks, checks at the end and all along."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind, PodUsageError
from cxlbench.emu.pod_ops import LINE, clflush, dma_read, dma_wait, dma_write, load, store
from tests.emu.pod_programs import message, send


def test_what_is_prepared_is_there_and_known_to_all():
    def prepare(mem):
        store(mem, 0, 5)
        dma_wait(mem, dma_write(mem, LINE, np.array([6, 7], np.int64)))
        return "done"

    def look(mem):
        words = np.zeros(2, np.int64)
        dma_wait(mem, dma_read(mem, LINE, words))
        assert (load(mem, 0), words.tolist()) == (5, [6, 7])
        store(mem, 0, 8)

    def scenario(pod):
        assert pod.prepare(prepare) == "done"
        pod.run(0, look)

    assert not explore(scenario, schedules=50).failed


def test_what_is_stored_over_a_prepared_word_can_be_missed():
    def scenario(pod):
        pod.prepare(lambda mem: store(mem, 0, 3))
        message("data not flushed")(pod)

    report = explore(scenario).report
    assert report.cause is Cause.NEVER_FLUSHED
    assert "initial value 3" in str(report)


def test_a_region_that_one_node_initializes_without_a_flush_fails_on_the_second():  # W11 maru#67
    def initialize(mem):
        store(mem, 0, 0x4D41)
        store(mem, LINE, 1)
        clflush(mem, LINE)

    def attach(mem):
        clflush(mem, LINE)
        clflush(mem, 0)
        if load(mem, LINE):
            assert load(mem, 0) == 0x4D41

    def scenario(pod):
        pod.run(0, initialize)
        pod.run(1, attach)

    report = explore(scenario).report
    assert (report.cause, report.offset) == (Cause.NEVER_FLUSHED, 0)


def test_space_that_two_nodes_hand_out_without_a_lock_is_found():  # W10 LMCache#5030
    def allocate(mem, taken):
        for chunk in range(4):
            clflush(mem, chunk * LINE)
            if not load(mem, chunk * LINE):
                store(mem, chunk * LINE, 1)
                clflush(mem, chunk * LINE)
                taken.append(chunk)
                return

    def scenario(pod):
        taken = []
        pod.run(0, allocate, taken)
        pod.run(1, allocate, taken)
        pod.invariant(lambda: len(set(taken)) == len(taken))

    assert explore(scenario).report.kind is Kind.WRITE_RACE
    assert explore(scenario, ignore=[Kind.WRITE_RACE, Kind.LINE_RACE]).report.kind is Kind.INVARIANT


def test_the_check_at_the_end_sees_what_landed_and_not_what_is_dirty():
    def scenario(pod):
        def program(mem):
            store(mem, 0, 1)
            clflush(mem, 0)
            store(mem, LINE, 2)

        def landed(mem):
            assert (load(mem, 0), load(mem, LINE)) == (1, 0)

        pod.run(0, program)
        pod.at_end(landed)

    assert not explore(scenario, scheduler="dfs").failed


@pytest.mark.parametrize("how", ["assert", "False"])
def test_a_check_at_the_end_fails_the_run(how):
    def is_five(mem):
        if how == "assert":
            assert load(mem, 0) == 5, "five expected"
        return load(mem, 0) == 5

    def scenario(pod):
        pod.run(0, send, "")
        pod.at_end(is_five)

    report = explore(scenario, schedules=1).report
    assert report.kind is Kind.INVARIANT
    assert "is_five does not hold" in report.message
    assert ("five expected" in report.message) is (how == "assert")


def test_a_lambda_at_the_end_is_named_by_its_line():
    def scenario(pod):
        pod.run(0, send, "")
        pod.at_end(lambda mem: load(mem, 0) == 5)

    line = scenario.__code__.co_firstlineno + 2
    report = explore(scenario, schedules=1).report
    assert f"the lambda at test_pod_scenario.py:{line} does not hold" in report.message


def test_an_invariant_is_checked_whenever_tasks_may_switch():
    def scenario(pod):
        taken = []

        def at_most_one():
            return len(taken) <= 1

        def take(mem):
            taken.append(mem)
            load(mem, 0)
            taken.remove(mem)

        pod.run(0, take)
        pod.run(1, take)
        pod.invariant(at_most_one)

    report = explore(scenario).report
    assert report.kind is Kind.INVARIANT
    assert "at_most_one does not hold" in report.message


def test_an_exception_of_a_task_is_a_failure_with_its_traceback():
    def program(mem):
        raise ValueError(f"found {load(mem, 0)}")

    def scenario(pod):
        pod.run(0, program, name="the one that fails")

    report = explore(scenario, schedules=1).report
    assert report.kind is Kind.EXCEPTION
    assert "the one that fails raised ValueError: found 0" in report.message
    assert "raise ValueError" in str(report)


def test_a_task_may_start_another_that_knows_what_it_knows():
    def parent(mem, pod):
        store(mem, 0, 1)
        pod.run(1, child, name="child")

    def child(mem):
        load(mem, 0)

    def scenario(pod):
        pod.run(0, parent, pod)

    report = explore(scenario, schedules=5).report
    assert (report.cause, report.task) == (Cause.NEVER_FLUSHED, "child")


def test_tasks_end_with_the_run_even_if_they_catch_everything():
    def stubborn(mem):
        while True:
            try:
                load(mem, 0)
            except Exception:
                continue

    def scenario(pod):
        pod.run(0, send, "")
        pod.run(1, stubborn, daemon=True)

    assert not explore(scenario, schedules=20).failed


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (lambda pod: None, "started no task"),
        (lambda pod: pod.region(100), "multiple of 64"),
        (lambda pod: [pod.run(0, send, ""), pod.region(128)], "before the first"),
        (lambda pod: [pod.run(0, send, ""), pod.prepare(send, "")], "before the first run"),
        (lambda pod: pod.on_crash((), send), "at least one"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused(scenario, said):
    with pytest.raises(PodUsageError, match=said):
        explore(scenario)
