"""The rules of causality, one by one, and against a naive search in the graph of events."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlbench.emu.causality import Cause, History, Incarnation, before
from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_model import ZERO
from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    dma_done,
    dma_read,
    dma_wait,
    dma_write,
    load,
    local_add,
    local_load,
    local_lock,
    local_store,
    local_unlock,
    ntstore,
    optimistic_begin,
    optimistic_end,
    pause,
    store,
)
from cxlbench.emu.pod_run import Run
from cxlbench.emu.pod_scenario import Pod
from cxlbench.emu.schedule_random import RandomSchedule
from tests.emu.pod_programs import message


class Words:
    """A history of one word, made by hand."""

    def __init__(self, tasks):
        self.history = History()
        self.tasks = [Incarnation(index + 1) for index in range(tasks)]
        for task in self.tasks:
            task.room_for(tasks)

    def store(self, task, word=0):
        stored = self.tasks[task].write(0)
        self.history.add(word, stored)
        return stored

    def missed(self, task, got, word=0):
        return self.history.missed(got, word, self.tasks[task].known)


def test_a_concurrent_store_is_not_older():
    words = Words(2)
    words.store(0)
    assert words.missed(1, ZERO) is None


def test_a_store_that_the_task_knows_of_must_not_be_missed():
    words = Words(2)
    first = words.store(0)
    words.tasks[1].join(first)
    assert words.missed(1, ZERO) is first


def test_knowing_goes_through_a_third_task():
    words = Words(3)
    first = words.store(0)
    words.tasks[1].join(first)
    flag = words.store(1, word=8)
    words.tasks[2].join(flag)
    assert words.missed(2, ZERO) is first


def test_the_newest_store_that_was_missed_is_named():
    words = Words(2)
    words.store(0)
    second = words.store(0)
    words.tasks[1].join(second)
    assert words.missed(1, ZERO) is second


def test_a_store_that_is_unordered_to_what_was_returned_is_not_missed():
    words = Words(3)
    known = words.store(0)
    words.tasks[2].join(known)
    other = words.store(1)
    assert words.missed(2, other) is None
    assert words.missed(2, known) is None


def test_own_stores_count():
    words = Words(2)
    own = words.store(0)
    assert words.missed(0, ZERO) is own


def test_an_initial_value_is_before_everything():
    words = Words(1)
    preset = words.history.preset(0, 9)
    own = words.store(0)
    assert words.missed(0, preset) is own
    assert before(preset, own)
    assert not before(own, preset)


def test_the_words_of_one_dma_are_not_ordered_among_themselves():
    words = Words(2)
    task = words.tasks[0]
    earlier = words.store(0, word=16)
    for word, stored in enumerate(task.dma_writes([1, 2])):
        words.history.add(word, stored)
    words.tasks[1].join(words.history.last[0])
    assert words.missed(1, ZERO, word=1) is None
    assert words.missed(1, ZERO, word=16) is earlier
    after = words.store(0, word=24)
    words.tasks[1].join(after)
    assert words.missed(1, ZERO, word=1) is words.history.last[1]


def test_a_new_incarnation_knows_nothing_and_is_known_by_nobody():
    words = Words(1)
    words.store(0)
    again = Incarnation(2)
    words.tasks[0].room_for(2)
    assert words.history.missed(ZERO, 0, again.known) is None
    stored = again.write(1)
    assert not words.tasks[0].knows(stored)
    words.tasks[0].join(stored)
    assert words.tasks[0].knows(stored)


def test_what_is_learnt_from_an_old_store_does_not_reach_newer_tasks():
    words = Words(1)
    early = words.store(0)  # its clock is shorter than those of later tasks
    late = Incarnation(5)
    late.join(early)
    assert late.knows(early)
    assert len(late.known) == 6


# Causes, by whole programs


@pytest.mark.parametrize(
    ("mutant", "cause"),
    [
        ("data not flushed", Cause.NEVER_FLUSHED),
        ("data flush posted", Cause.POSTED),
        ("data not invalidated", Cause.NO_INVALIDATE),
    ],
)
@pytest.mark.parametrize("scheduler", ["random", "pct", "dfs"])
def test_the_cause_of_an_old_load_is_named_with_both_lines(mutant, cause, scheduler):
    report = explore(message(mutant), schedules=200, scheduler=scheduler).report
    assert (report.kind, report.cause) == (Kind.CAUSALITY, cause)
    assert report.objects == ("the data",)
    assert report.later_site[0].function == "send"
    assert report.site[0].function == "receive"
    text = str(report)
    assert "store(mem, DATA, 7)" in text
    assert "got.append(load(mem, DATA))" in text


def test_a_posted_flush_is_enough_where_fences_wait_for_arrival():
    def scenario(pod):
        pod.fences_wait_for_arrival()
        message("data flush posted")(pod)

    assert not explore(scenario, schedules=300, scheduler="mixed").failed


def publish_dma(mem, early):
    handle = dma_write(mem, 0, np.arange(1, 17, dtype=np.int64))
    if not early:
        dma_wait(mem, handle)
    store(mem, 4 * LINE, 1)
    clflush(mem, 4 * LINE)
    if early:
        while not dma_done(mem, handle):
            pause(mem, 0, 8)


def fetch_dma(mem, by_dma):
    while True:
        clflush(mem, 4 * LINE)
        if load(mem, 4 * LINE):
            break
        pause(mem, 4 * LINE, 8)
    if by_dma:
        words = np.zeros(16, np.int64)
        clflush(mem, 0)
        clflush(mem, LINE)
        dma_wait(mem, dma_read(mem, 0, words))
        assert words.tolist() == list(range(1, 17))
    else:
        clflush(mem, 0)
        assert load(mem, 0) == 1


@pytest.mark.parametrize("by_dma", [False, True])
def test_a_publication_before_the_dma_is_complete_is_found(by_dma):
    def scenario(pod):
        pod.run(0, publish_dma, True)
        pod.run(1, fetch_dma, by_dma)

    report = explore(scenario, schedules=100).report
    assert (report.kind, report.cause) == (Kind.CAUSALITY, Cause.DMA_INCOMPLETE)
    assert report.later_site[0].function == "publish_dma"


@pytest.mark.parametrize("by_dma", [False, True])
def test_a_publication_after_the_dma_is_complete_is_quiet(by_dma):
    def scenario(pod):
        pod.run(0, publish_dma, False)
        pod.run(1, fetch_dma, by_dma)

    assert not explore(scenario, schedules=300, scheduler="mixed").failed


def neighbour(mem, off):
    load(mem, off)
    store(mem, off, 3)
    clflush(mem, off)


def test_a_word_undone_by_another_nodes_whole_line_is_found_as_overwritten():
    def scenario(pod):
        message()(pod)
        pod.run(2, neighbour, 8, name="neighbour")

    ignored = (Kind.LINE_RACE, Kind.REGRESS)
    report = explore(scenario, schedules=500, ignore=ignored).report
    assert (report.kind, report.cause) == (Kind.CAUSALITY, Cause.OVERWRITTEN)
    assert explore(scenario, schedules=500, ignore=(Kind.LINE_RACE,)).report.kind is Kind.REGRESS
    assert explore(scenario, schedules=500).report.kind is Kind.LINE_RACE


def test_equal_values_do_not_hide_an_old_load():
    def send_zero(mem):
        store(mem, 0, 0)
        store(mem, LINE, 1)
        clflush(mem, LINE)

    def look(mem):
        clflush(mem, LINE)
        if load(mem, LINE):
            load(mem, 0)

    def scenario(pod):
        pod.run(0, send_zero)
        pod.run(1, look)

    assert explore(scenario, schedules=100).report.cause is Cause.NEVER_FLUSHED


def test_tasks_of_one_node_that_do_not_speak_are_not_ordered():
    def first(mem):
        store(mem, 0, 1)
        clflush(mem, 0)

    def second(mem):
        store(mem, LINE, 1)
        clflush(mem, LINE)

    def look(mem):
        clflush(mem, LINE)
        if load(mem, LINE):
            load(mem, 0)  # may be old: nothing says that the first task's store came before

    def scenario(pod):
        pod.run(0, first)
        pod.run(0, second)
        pod.run(1, look)

    assert not explore(scenario, schedules=300, scheduler="mixed").failed


@pytest.mark.parametrize("way", ["lock", "word", "add", "memory"])
def test_tasks_of_one_node_are_ordered_by_what_they_say_to_each_other(way):
    def first(mem):
        store(mem, 0, 1)
        if way == "lock":
            local_lock(mem, 0)
            local_unlock(mem, 0)
        elif way == "word":
            local_store(mem, 0, 1)
        elif way == "add":
            local_add(mem, 0, 1)
        else:
            store(mem, 8, 1)

    def second(mem):
        if way == "lock":
            local_lock(mem, 0)
            local_unlock(mem, 0)
        elif way in ("word", "add"):
            local_load(mem, 0)
        else:
            load(mem, 8)
        store(mem, LINE, 1)
        clflush(mem, LINE)

    def look(mem):
        clflush(mem, LINE)
        if load(mem, LINE):
            clflush(mem, 0)
            load(mem, 0)

    def scenario(pod):
        pod.run(0, first)
        pod.run(0, second)
        pod.run(1, look)

    assert explore(scenario, schedules=300).report.cause is Cause.NEVER_FLUSHED


def test_stale_loads_of_an_optimistic_section_count_only_if_it_is_valid():
    def look(mem, valid):
        load(mem, 0)
        clflush(mem, LINE)
        flag = load(mem, LINE)
        optimistic_begin(mem)
        data = load(mem, 0)
        optimistic_end(mem, valid)
        return flag, data

    def scenario(valid):
        def build(pod):
            pod.run(0, lambda mem: (neighbour(mem, 0), neighbour(mem, LINE)))
            pod.run(1, look, valid)

        return build

    assert explore(scenario(True), schedules=200).report.cause is Cause.NO_INVALIDATE
    assert not explore(scenario(False), schedules=200).failed


# Against the graph

WORDS = [0, 8, LINE]
OPERATIONS = ["load", "load", "load", "store", "store", "clflush", "clflush", "ntstore", "lock"]
operations = st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(WORDS))
programs = st.lists(st.lists(operations, min_size=8, max_size=20), min_size=3, max_size=3)


def perform(mem, todo, log):
    me = mem.index
    for what, off in todo:
        if what == "lock":
            local_lock(mem, 0)
            log.append((me, "lock", mem.node.number, 0))
            local_unlock(mem, 0)
        elif what == "load":
            got = load(mem, off)
            log.append((me, "load", off, got))
        elif what == "clflush":
            clflush(mem, off)
        else:
            value = 100 * me + len(log) + 1
            (store if what == "store" else ntstore)(mem, off, value)
            log.append((me, "store", off, value))


def first_violation(log):
    """Return the index of the first load in ``log`` that goes back, by reachability."""
    n = len(log)
    edges = {i: set() for i in range(n)}  # predecessors
    last_of_task, store_of_value, last_holder = {}, {}, {}
    for i, (task, what, off, value) in enumerate(log):
        if task in last_of_task:
            edges[i].add(last_of_task[task])
        last_of_task[task] = i
        if what == "store":
            store_of_value[value] = i
        if what == "lock":
            edges[i] |= {last_holder[off]} if off in last_holder else set()
            last_holder[off] = i
    reach = [set() for _ in range(n)]  # what is before i

    def close(i):
        reach[i] = set()
        for j in edges[i]:
            reach[i] |= reach[j] | {j}

    for i, (_, what, off, value) in enumerate(log):
        close(i)
        if what != "load":
            continue
        got = store_of_value.get(value)
        for x in reach[i]:
            newer = log[x][1:3] == ("store", off) and x != got
            if newer and (got is None or got in reach[x]):
                return i
        if got is not None:
            edges[i].add(got)
            close(i)
    return None


@settings(max_examples=300)
@given(programs, st.integers(0, 10_000))
def test_the_clocks_agree_with_a_search_in_the_graph_of_events(todo, seed):
    log = []
    found = []
    run = Run(
        RandomSchedule(seed, length=30),
        max_steps=10_000,
        ignore=frozenset(Kind),
    )
    pod = Pod(run)
    for index, (node, program) in enumerate(zip((0, 0, 1), todo, strict=True)):
        pod.run(node, perform, program, log, name=str(index))
    pod.built()
    run.checks.stale_load = lambda task, stale: found.append((len(log), task.index, stale.word))
    run.execute()
    expected = first_violation(log)
    assert (expected is None) == (not found)
    if found:
        _, task, word = found[0]
        assert (log[expected][0], log[expected][2]) == (task, word * 8)


def test_the_search_in_the_graph_knows_an_old_load():
    stored, flagged = (0, "store", 0, 1), (0, "store", LINE, 2)
    seen, old = (1, "load", LINE, 2), (1, "load", 0, 0)
    assert first_violation([stored, flagged, seen, old]) == 3
    assert first_violation([stored, flagged, old, seen]) is None
    for a, b in pairwise([stored, flagged]):
        assert first_violation([a, b]) is None


def test_a_line_that_nobody_has_touched_yet_may_be_in_a_cache_already():
    """A log with a fresh line for each record: who reads without an invalidate is found out."""
    log = 100 * LINE

    def append(mem):
        for record in range(1, 4):
            handle = dma_write(mem, log + record * 5 * LINE, np.array([record], np.int64))
            dma_wait(mem, handle)
            store(mem, 0, record)
            clflush(mem, 0)

    def follow(mem):
        seen = 0
        while seen < 3:
            clflush(mem, 0)
            newest = load(mem, 0)
            for record in range(seen + 1, newest + 1):
                load(mem, log + record * 5 * LINE)
            seen = newest
            pause(mem, 0, 8)

    def scenario(pod):
        pod.run(0, append)
        pod.run(1, follow)

    report = explore(scenario, schedules=300, scheduler="mixed").report
    assert report.cause is Cause.NO_INVALIDATE
    assert (report.later_site[0].function, report.site[0].function) == ("append", "follow")
