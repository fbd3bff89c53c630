"""Waiting in an explored pod: who sleeps is woken, who cannot be is found, time goes on."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind, PodUsageError
from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    dma_done,
    dma_read,
    load,
    local_cas,
    local_load,
    local_lock,
    local_store,
    local_unlock,
    now,
    pause,
    store,
)
from tests.emu.pod_programs import FLAG, message


def flag_up(mem, off=FLAG, flush=True):
    store(mem, off, 1)
    if flush:
        clflush(mem, off)


def wait_for(mem, off=FLAG):
    clflush(mem, off)
    while not load(mem, off):
        pause(mem, off, 8)
        clflush(mem, off)


def two(first, second, *, nodes=(0, 1)):
    def scenario(pod):
        pod.run(nodes[0], first, name="first")
        pod.run(nodes[1], second, name="second")

    return scenario


def quiet(scenario, schedules=300, **options):
    found = explore(scenario, schedules=schedules, scheduler="mixed", **options)
    assert not found.failed, found.report
    return found


def the_failure(scenario, schedules=300, **options):
    return explore(scenario, schedules=schedules, scheduler="mixed", **options).report


ORDERS = ["flush, load, pause", "load, flush, pause", "load, pause, flush"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_poll_in_any_order_is_woken(order):
    def poll(mem):
        while True:
            for step in order.split(", "):
                if step == "flush":
                    clflush(mem, FLAG)
                elif step == "pause":
                    pause(mem, FLAG, 8)
                elif load(mem, FLAG):
                    return

    quiet(two(flag_up, poll), schedules=600)
    assert explore(two(flag_up, poll), scheduler="dfs", bound=3, schedules=5_000).exhausted


def test_polls_are_woken_by_what_they_wait_for_and_not_only_at_the_end():
    def poll(mem, woken):
        wait_for(mem)
        woken.append(True)

    def goes_on(mem, woken):
        flag_up(mem)
        for _ in range(3_000):
            load(mem, 9 * LINE)
        assert woken

    def scenario(pod):
        woken = []
        pod.run(0, goes_on, woken)
        pod.run(1, poll, woken)

    found = explore(scenario, schedules=30, scheduler="random")
    assert not found.failed, found.report


def test_a_pause_outside_of_a_loop_ends():
    def pauses(mem):
        for _ in range(3):
            pause(mem, FLAG, 8)

    quiet(two(pauses, pauses))


@pytest.mark.parametrize("polls", [3, 10, 200])
def test_who_counts_its_polls_and_gives_up_does_not_hang(polls):
    def patient(mem):
        for _ in range(polls):
            clflush(mem, FLAG)
            if load(mem, FLAG):
                return
            pause(mem, FLAG, 8)
        store(mem, FLAG, 1)
        clflush(mem, FLAG)

    quiet(two(patient, wait_for))


@pytest.mark.parametrize("scheduler", ["random", "pct"])
def test_a_hang_is_told_soon(scheduler):
    for first in range(20):
        report = explore(
            two(wait_for, wait_for), schedules=1, first=first, scheduler=scheduler
        ).report
        assert report.kind is Kind.HANG
        assert report.step < 500


def test_who_counts_and_never_gives_up_hangs():
    def patient(mem):
        polls = 0
        while not load(mem, FLAG):
            polls += 1
            pause(mem, FLAG, 8)

    report = explore(two(patient, patient), schedules=1, max_steps=2_000).report
    assert report.kind is Kind.HANG


def test_a_poll_without_a_flush_hangs():
    report = the_failure(message("polls without flush"), ignore=[Kind.CAUSALITY])
    assert report.kind is Kind.HANG
    assert "polled without a flush?" in str(report)


def test_a_flag_that_is_never_flushed_hangs():
    report = the_failure(two(lambda mem: flag_up(mem, flush=False), wait_for))
    assert report.kind is Kind.HANG
    assert "is dirty in node 0: stored, not flushed" in str(report)


def test_two_local_locks_taken_in_two_orders_hang():
    def taker(a, b):
        def program(mem):
            local_lock(mem, a)
            local_lock(mem, b)
            local_unlock(mem, b)
            local_unlock(mem, a)

        return program

    report = the_failure(two(taker(0, 1), taker(1, 0), nodes=(0, 0)))
    assert report.kind is Kind.HANG
    assert "waits for local lock 0" in str(report)
    quiet(two(taker(0, 1), taker(1, 0)))


def test_a_loop_without_pause_ends_at_the_bound():
    def spin(mem):
        while not load(mem, FLAG):
            pass

    report = explore(two(spin, spin), schedules=1, max_steps=2_000).report
    assert report.kind is Kind.HANG
    assert "without pause()" in report.message


def test_tasks_of_one_node_wake_each_other_by_a_store():
    quiet(two(lambda mem: flag_up(mem, flush=False), wait_for, nodes=(0, 0)))


def test_a_pause_is_also_ended_by_a_change_in_the_nodes_own_memory():
    def wait_local(mem):
        while not local_load(mem, 3):
            pause(mem, 0, 8)

    quiet(two(lambda mem: local_store(mem, 3, 1), wait_local, nodes=(0, 0)))


def test_a_pause_is_also_ended_by_the_completion_of_a_dma():
    def read(mem):
        words = np.zeros(1, np.int64)
        handle = dma_read(mem, 0, words)
        while not dma_done(mem, handle):
            pause(mem, 10 * LINE, 8)

    quiet(two(read, flag_up))


def test_a_pause_on_many_lines_ends_when_any_of_them_changes():
    def wait_for_any(mem):
        while True:
            for line in range(4):
                clflush(mem, line * LINE)
                if load(mem, line * LINE):
                    return
            pause(mem, 0, 4 * LINE)

    for line in range(4):
        quiet(two(lambda mem, at=line: flag_up(mem, at * LINE), wait_for_any), schedules=100)


def test_who_waits_by_the_clock_goes_on_when_nothing_else_happens():
    def wait_a_while(mem):
        end = now(mem) + 1_000_000
        while now(mem) < end:
            pause(mem, FLAG, 8)

    assert quiet(two(wait_a_while, flag_up)).steps < 300 * 200


def test_time_goes_on_with_steps():
    times = []

    def look(mem):
        times.append(now(mem))
        load(mem, 0)
        times.append(now(mem))

    explore(two(look, flag_up), schedules=1)
    assert times[0] < times[1]


def test_a_daemon_does_not_keep_the_pod_running():
    def scenario(pod):
        pod.run(0, flag_up)
        pod.run(1, lambda mem: wait_for(mem, 5 * LINE), daemon=True)

    quiet(scenario)


def test_local_locks_exclude():
    inside = []

    def enter(mem):
        local_lock(mem, 0)
        inside.append(mem)
        assert len(inside) == 1
        load(mem, 0)
        inside.remove(mem)
        local_unlock(mem, 0)

    def scenario(pod):
        inside.clear()
        for _ in range(3):
            pod.run(0, enter)

    quiet(scenario)


def test_compare_and_swap_lets_one_win():
    winners = []

    def scenario(pod):
        won = []
        winners.append(won)
        for task in range(3):
            pod.run(
                0, lambda mem, me=task: won.append(me) if local_cas(mem, 0, 0, 1) == 0 else None
            )

    quiet(scenario, schedules=100)
    assert all(len(won) == 1 for won in winners)
    assert len({tuple(won) for won in winners}) == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (lambda mem: load(mem, 4), "multiples of 8"),
        (lambda mem: load(mem, 1 << 20), "the region has 1048576 bytes"),
        (lambda mem: store(mem, -8, 1), "multiples of 8"),
        (lambda mem: store(mem, 0, 1 << 63), "not a signed 64-bit integer"),
        (lambda mem: clflush(mem, 1 << 20), "the region has"),
        (lambda mem: pause(mem, 0, 0), "at least one byte"),
        (lambda mem: dma_read(mem, 0, np.zeros(4)), "1-d array of int64"),
        (lambda mem: dma_read(mem, (1 << 20) - 8, np.zeros(2, np.int64)), "dma_read of 2 words"),
        (lambda mem: dma_done(mem, 5), "no DMA 5"),
        (lambda mem: local_unlock(mem, 1), "nobody holds"),
        (lambda mem: [local_lock(mem, 1), local_lock(mem, 1)], "not re-entrant"),
    ],
)
def test_what_no_pod_can_do_is_refused_with_what_is_possible(program, said):
    report = explore(two(program, flag_up), schedules=1).report
    assert report.kind is Kind.EXCEPTION
    assert PodUsageError.__name__ in report.message
    assert said in report.message


def test_offset_zero_is_an_ordinary_offset():
    quiet(two(lambda mem: flag_up(mem, 0), lambda mem: wait_for(mem, 0)))


def poll_without_sleep(mem):
    """Wait for the flag in a loop that lands something on the line it pauses on each time."""
    counter = FLAG + 2 * LINE
    clflush(mem, FLAG)
    while not load(mem, FLAG):
        store(mem, counter, load(mem, counter) + 1)
        clflush(mem, counter)
        pause(mem, counter, 8)
        clflush(mem, FLAG)


def test_a_task_that_polls_without_sleeping_starves_nobody():
    found = explore(
        two(poll_without_sleep, flag_up), schedules=100, scheduler="pct", max_steps=5000
    )
    assert not found.failed, found.report
