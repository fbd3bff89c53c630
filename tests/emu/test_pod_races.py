"""Races, regress, critical sections and the lint of flushes."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import explore, lint_flushes
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    clflushopt,
    critical_enter,
    critical_leave,
    critical_want,
    dma_wait,
    dma_write,
    load,
    local_lock,
    local_unlock,
    mfence,
    ntstore,
    pause,
    store,
)
from cxlbench.emu.race_checks import lint_text
from tests.emu.pod_programs import FLAG, message


def stores_at(off, how=store):
    def program(mem):
        how(mem, off, 1)
        clflush(mem, off)

    return program


def both(first, second, nodes=(0, 1)):
    def scenario(pod):
        pod.run(nodes[0], first, name="first")
        pod.run(nodes[1], second, name="second")

    return scenario


def kind_of(scenario, **options):
    report = explore(scenario, schedules=100, scheduler="mixed", **options).report
    return report and report.kind


def test_unordered_stores_to_one_word_race():
    report = explore(both(stores_at(0), stores_at(0)), schedules=100).report
    assert report.kind is Kind.WRITE_RACE
    assert report.later_site[0].function == report.site[0].function == "program"


def test_tasks_of_one_node_race_on_a_word_too():
    assert kind_of(both(stores_at(0), stores_at(0), nodes=(0, 0))) is Kind.WRITE_RACE


def test_tasks_of_one_node_may_share_a_line():
    assert kind_of(both(stores_at(0), stores_at(8), nodes=(0, 0))) is None


def test_two_nodes_may_not_share_a_line():
    assert kind_of(both(stores_at(0), stores_at(8))) is Kind.LINE_RACE


def test_two_nodes_may_use_neighbouring_lines():
    assert kind_of(both(stores_at(0), stores_at(LINE))) is None


def test_words_stored_past_the_caches_may_share_a_line():
    assert kind_of(both(stores_at(0, ntstore), stores_at(8, ntstore))) is None
    assert kind_of(both(stores_at(0, ntstore), stores_at(8))) is Kind.LINE_RACE


def by_dma(mem, off, value):
    dma_wait(mem, dma_write(mem, off, np.array([value], np.int64)))


def test_words_of_dma_may_share_a_line_with_each_other_and_not_with_a_cache():
    assert kind_of(both(stores_at(0, by_dma), stores_at(8, by_dma))) is None
    assert kind_of(both(stores_at(0, by_dma), stores_at(8))) is Kind.LINE_RACE
    assert kind_of(both(stores_at(0, by_dma), stores_at(0, by_dma))) is Kind.WRITE_RACE


def test_stores_under_a_local_lock_do_not_race():
    def locked(mem):
        local_lock(mem, 0)
        store(mem, 0, load(mem, 0) + 1)
        local_unlock(mem, 0)

    assert kind_of(both(locked, locked, nodes=(0, 0))) is None


def test_a_stale_line_written_back_over_a_newer_word_is_a_regress():
    def later(mem):
        load(mem, 8)
        while not load(mem, FLAG):
            clflush(mem, FLAG)
        store(mem, 8, 1)  # ordered after the other node's store, but on an old copy
        clflush(mem, 8)

    def scenario(pod):
        message()(pod)
        pod.run(2, later, name="later")

    report = explore(scenario, schedules=300, scheduler="mixed").report
    assert (report.kind, report.cause) == (Kind.REGRESS, Cause.NO_INVALIDATE)
    assert report.offset == 0
    assert report.later_site[0].function == "send"


def ring(mutant=""):
    """Nodes pass a token; who has it stores a word of its own on a line that all share."""

    def turn(mem, node, rounds=2):
        for number in range(node, 3 * rounds, 3):
            while load(mem, FLAG) != number:
                pause(mem, FLAG, 8)
                clflush(mem, FLAG)
            if mutant != "no invalidate":
                clflush(mem, 0)
            share(mem, node, number)
            store(mem, FLAG, number + 1)
            clflush(mem, FLAG)

    def share(mem, node, number):
        if mutant == "DMA incomplete":
            dma_write(mem, 8 * node, np.array([number], np.int64))
            return
        store(mem, 8 * node, number)
        if mutant == "posted":
            clflushopt(mem, 0)
            mfence(mem)
        elif mutant != "never flushed":
            clflush(mem, 0)

    def scenario(pod):
        for node in range(3):
            pod.run(node, turn, node, name=f"node {node}")

    return scenario


def test_nodes_that_share_a_line_in_turns_are_quiet():
    assert kind_of(ring()) is None


@pytest.mark.parametrize(
    "cause", [Cause.NO_INVALIDATE, Cause.NEVER_FLUSHED, Cause.POSTED, Cause.DMA_INCOMPLETE]
)
def test_a_regress_tells_why_and_which_store_brought_it_about(cause):
    found = explore(ring(str(cause)), schedules=500, scheduler="mixed", ignore=[Kind.CAUSALITY])
    report = found.report
    assert (report.kind, report.cause) == (Kind.REGRESS, cause)
    assert report.site[0].function == report.later_site[0].function == "share"


# Critical sections


def enter(mem, lock=0):
    critical_want(mem, lock)
    critical_enter(mem, lock)
    load(mem, 0)
    critical_leave(mem, lock)


def test_two_tasks_inside_one_section_are_found():
    report = explore(both(enter, enter), schedules=100).report
    assert report.kind is Kind.EXCLUSION
    assert "is inside" in report.message


def test_two_sections_may_be_entered_at_once():
    assert kind_of(both(enter, lambda mem: enter(mem, 1))) is None


def test_leaving_a_section_without_being_inside_is_an_error():
    assert kind_of(both(lambda mem: critical_leave(mem, 0), enter)) is Kind.EXCEPTION


@pytest.mark.parametrize(("entries", "fails"), [(2, False), (3, True)])
def test_waiting_is_bounded_by_the_entries_of_other_nodes(entries, fails):
    def often(mem):
        for _ in range(entries):
            critical_want(mem, 0)
            critical_enter(mem, 0)
            critical_leave(mem, 0)
            load(mem, 0)

    def waits(mem):
        critical_want(mem, 0)
        load(mem, 0)

    def scenario(pod):
        pod.bounded_waiting(2)
        pod.run(0, often, name="often")
        pod.run(1, waits, name="the one that waits")

    report = explore(scenario, schedules=200, scheduler="mixed").report
    assert (report is not None) is fails
    if fails:
        assert report.kind is Kind.WAITING
        assert "while the one that waits waits" in report.message


def test_entries_of_the_waiting_tasks_own_node_do_not_count():
    def often(mem):
        for _ in range(5):
            critical_enter(mem, 0)
            critical_leave(mem, 0)
            load(mem, 0)

    def waits(mem):
        critical_want(mem, 0)
        load(mem, 0)

    def scenario(pod):
        pod.bounded_waiting(0)
        pod.run(0, often)
        pod.run(0, waits)

    assert kind_of(scenario) is None


# The lint


def needless(program, *others):
    def scenario(pod):
        pod.run(0, program)
        for other in others:
            pod.run(1, other)

    lint = lint_flushes(scenario, schedules=50)
    return lint, [site.site.rsplit(" ", 1)[1] for site in lint.needless()]


def test_a_flush_of_what_is_neither_dirty_nor_old_is_needless():
    def twice(mem):
        store(mem, 0, 1)
        clflush(mem, 0)
        clflush(mem, 0)

    lint, found = needless(twice)
    assert found == ["twice"]
    assert lint.needless()[0].flushes == 50
    text = lint_text(lint, schedules=50, flush_ns=412)
    assert "50 flushes in 50 schedules, none had an effect" in text
    assert "1.0 a run x 412 ns = 412 ns a run" in text


def test_a_flush_that_refreshed_an_old_copy_in_some_schedule_is_not_needless():
    def look(mem):
        load(mem, 0)
        clflush(mem, 0)
        load(mem, 0)

    assert needless(look, stores_at(0))[1] == []
    assert needless(look)[1] == ["look"]


def test_the_lint_says_so_if_nothing_is_needless():
    lint, found = needless(stores_at(0))
    assert found == []
    assert lint_text(lint, schedules=50, flush_ns=1).startswith("every flush had an effect")


def test_the_lint_says_how_many_schedules_failed_and_why():
    def waits_for_ever(mem):
        clflush(mem, 0)
        while True:
            load(mem, 0)

    def scenario(pod):
        pod.run(0, waits_for_ever)

    lint = lint_flushes(scenario, schedules=3, max_steps=200)
    assert lint.failed == 3
    text = lint_text(lint, schedules=3, flush_ns=1)
    assert text.startswith("3 of 3 schedules failed (the first: hang, ")
    assert "every flush had an effect" not in text


def test_the_lint_of_a_program_without_a_flush_says_that():
    lint, _ = needless(lambda mem: store(mem, 0, 1))
    assert lint_text(lint, schedules=50, flush_ns=1) == "no flush in 50 schedules"
