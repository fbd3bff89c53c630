"""Nodes that die: what is lost, who recovers, and what a fence promises."""

from __future__ import annotations

import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import explore, replay
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_model import LOST
from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    clflushopt,
    critical_enter,
    critical_leave,
    critical_want,
    load,
    local_add,
    local_load,
    local_lock,
    pause,
    store,
)
from cxlbench.emu.pod_run import Run
from cxlbench.emu.pod_scenario import Pod
from cxlbench.emu.schedule_replay import ReplaySchedule

DONE = 8 * LINE


def scripted(scenario, choices, draws=()):
    """Run ``scenario`` under exactly these choices, then plainly to the end."""
    run = Run(ReplaySchedule(choices, draws), max_steps=1_000)
    pod = Pod(run)
    scenario(pod)
    pod.built()
    run.execute()
    if run.failure is None:
        pod.ended()
    return run


def fill_lines(mem, lines=3):
    for line in range(lines):
        store(mem, line * LINE, line + 1)
        clflush(mem, line * LINE)


def idle(mem):
    load(mem, DONE)


def held(run, lines=3):
    return [run.device.line(line)[0].value for line in range(lines)]


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_node_may_die_at_any_point(steps):
    def scenario(pod):
        pod.run(0, fill_lines)
        pod.run(1, idle)

    run = scripted(scenario, [("run", 0, steps), ("crash", 0, 0)])
    assert held(run) == [1, 2, 3][: (steps - 1) // 2] + [0] * (3 - (steps - 1) // 2)
    assert run.failure is None


def test_a_dead_node_loses_its_tasks_its_cache_and_its_local_memory():
    def program(mem):
        local_add(mem, 0, 5)
        local_lock(mem, 0)
        store(mem, 0, 1)
        pause(mem, DONE, 8)
        pause(mem, DONE, 8)

    def recover(mem, dead, pod):
        pod.fence(dead)
        pod.restart(dead, again)

    def again(mem):
        local_lock(mem, 0)
        assert (local_load(mem, 0), load(mem, 0)) == (0, 0)
        store(mem, DONE, 1)
        clflush(mem, DONE)

    def scenario(pod):
        pod.run(0, program)
        pod.run(1, idle)
        pod.on_crash(0, recover, pod)

    run = scripted(scenario, [("run", 0, 5), ("crash", 0, 0), ("suspect", 0, 0)])
    assert run.failure is None
    assert run.device.line(DONE >> 6)[0].value == 1
    assert [task.name for task in run.tasks[2:]] == ["recovery of node 0", "node 0 again"]


@pytest.mark.parametrize("bits", range(4))
def test_what_a_dead_node_had_in_flight_lands_or_not(bits):
    def program(mem):
        for line in range(2):
            store(mem, line * LINE, line + 1)
            clflushopt(mem, line * LINE)
        idle(mem)

    def scenario(pod):
        pod.run(0, program)
        pod.run(1, idle)

    run = scripted(scenario, [("run", 0, 5), ("crash", 0, bits)])
    assert held(run, 2) == [bits & 1, bits & 2]
    lost = [run.checks.history.last[line * 8].how == LOST for line in range(2)]
    assert lost == [not bits & 1, not bits & 2]


def test_nothing_of_a_fenced_node_lands_any_more():
    def program(mem):
        store(mem, 0, 1)
        clflushopt(mem, 0)
        store(mem, 0, 2)
        while True:
            pause(mem, DONE, 8)

    def recover(mem, dead, pod):
        pod.fence(dead)
        load(mem, DONE)

    def scenario(pod):
        pod.run(0, program, daemon=True)
        pod.run(1, idle)
        pod.on_crash(0, recover, pod)

    choices = [
        ("run", 0, 4),
        ("suspect", 0, 0),
        ("run", 2, 2),
        ("evict", 0, 0),
        ("land", 0, 0),
        ("land", 0, 0),
    ]
    assert held(scripted(scenario, choices, draws=[0]), 1) == [0]
    assert held(scripted(scenario, choices, draws=[1]), 1) == [1]


def test_a_suspected_live_node_goes_on_until_its_fence():
    def recover(mem, dead, pod):
        load(mem, DONE)
        pod.fence(dead)

    def scenario(pod):
        pod.run(0, fill_lines)
        pod.run(1, idle)
        pod.on_crash(0, recover, pod)

    run = scripted(scenario, [("suspect", 0, 0), ("run", 0, 5), ("run", 2, 3), ("run", 0, 9)])
    assert held(run) == [1, 2, 0]
    assert run.nodes[0].fenced
    assert not run.nodes[0].alive


def test_the_recovery_runs_on_the_lowest_node_that_is_left():
    hosts = []

    def recover(mem, dead, pod):
        hosts.append((mem.node_id(), dead))
        pod.fence(dead)

    def scenario(pod):
        for node in range(3):
            pod.run(node, fill_lines if node == 0 else idle)
        pod.on_crash((0, 1, 2), recover, pod, at_most=2)

    scripted(scenario, [("run", 0, 2), ("crash", 0, 0)])
    scripted(scenario, [("run", 0, 2), ("crash", 2, 0)])
    assert hosts == [(1, 0), (0, 2)]


def test_a_recovery_whose_host_dies_begins_again_elsewhere():
    seen = []

    def recover(mem, dead, pod):
        seen.append((mem.node_id(), dead))
        pod.fence(dead)
        load(mem, DONE)
        load(mem, DONE)

    def scenario(pod):
        for node in range(3):
            pod.run(node, fill_lines)
        pod.on_crash((0, 1, 2), recover, pod, at_most=2)

    run = scripted(
        scenario,
        [("crash", 0, 0), ("suspect", 0, 0), ("run", 3, 2), ("crash", 1, 0), ("suspect", 1, 0)],
    )
    assert seen == [(1, 0), (2, 0), (2, 1)]
    assert run.failure is None


def test_a_recovery_whose_suspected_host_dies_begins_again_elsewhere():
    seen = []

    def recover(mem, dead, pod):
        seen.append((mem.node_id(), dead))
        pod.fence(dead)
        load(mem, DONE)

    def scenario(pod):
        for node in range(3):
            pod.run(node, fill_lines)
        pod.on_crash((0, 1, 2), recover, pod, at_most=2)

    steps = [("crash", 0, 0), ("suspect", 0, 0), ("run", 3, 1), ("suspect", 1, 0), ("crash", 1, 0)]
    run = scripted(scenario, steps)
    assert seen == [(1, 0), (2, 0), (2, 1)]
    assert run.failure is None


def test_a_death_may_leave_a_line_with_its_first_store_and_without_its_second():
    torn = []

    def writer(mem):
        for _ in range(50):
            load(mem, DONE)
        store(mem, 0, 1)
        store(mem, 8, 1)
        clflush(mem, 0)

    def scenario(pod):
        pod.run(0, writer)
        pod.run(1, idle)
        pod.on_crash(0, lambda mem, dead: pod.fence(dead), suspect_live=False)
        pod.at_end(lambda mem: torn.append((mem.load(0), mem.load(8)) == (1, 0)))

    assert not explore(scenario, schedules=400, scheduler="mixed").failed
    assert any(torn)


def test_a_node_that_dies_unnoticed_is_suspected_before_the_pod_ends():
    recovered = []

    def scenario(pod):
        pod.run(0, fill_lines)
        pod.run(1, idle)
        pod.on_crash(0, lambda mem, dead: recovered.append(dead))

    scripted(scenario, [("crash", 0, 0)])
    assert recovered == [0]


def test_the_last_live_node_does_not_die():
    def scenario(pod):
        pod.run(0, fill_lines)
        pod.on_crash(0, lambda mem, dead: None)

    found = explore(scenario, schedules=200, scheduler="mixed")
    assert not found.failed
    assert found.steps >= 200 * 6


def test_crashes_happen_at_every_step_of_some_schedule_and_in_half_of_them():
    points = []

    def counted(mem, seen):
        for line in range(3):
            store(mem, line * LINE, 1)
            seen[0] += 1

    def scenario(pod):
        seen = [0]
        points.append(seen)
        pod.run(0, counted, seen)
        pod.run(1, idle)
        pod.on_crash(0, lambda mem, dead: pod.fence(dead))

    assert not explore(scenario, schedules=400, scheduler="mixed").failed
    reached = [seen[0] for seen in points]
    assert set(reached) == {0, 1, 2, 3}
    assert reached.count(3) > 100


# What the checker makes of it


def publish(mem, careful):
    store(mem, 0, 7)
    if careful:
        clflush(mem, 0)
    store(mem, LINE, 1)
    clflush(mem, LINE)


def take(mem, dead):
    clflush(mem, LINE)
    if load(mem, LINE):
        clflush(mem, 0)
        load(mem, 0)


def crashing(careful, recover=take):
    def scenario(pod):
        pod.run(0, publish, careful, name="publisher")
        pod.run(1, idle)
        pod.on_crash(0, recover, suspect_live=False)

    return scenario


def test_a_store_that_died_with_its_node_can_still_be_missed():
    found = explore(crashing(careful=False), schedules=500, scheduler="mixed")
    assert found.report.cause is Cause.NEVER_FLUSHED
    assert any(choice[0] == "crash" for choice in found.schedule.choices)
    assert replay(found.schedule, target=crashing(careful=False)) == found.report
    assert not explore(crashing(careful=True), schedules=500, scheduler="mixed").failed


def overwrite(mem, dead):
    store(mem, 0, 9)
    clflush(mem, 0)


def test_a_recovery_that_stores_without_a_fence_races_with_what_landed():
    report = explore(crashing(True, overwrite), schedules=500, scheduler="mixed").report
    assert report.kind is Kind.WRITE_RACE
    assert "recovery of node 0" in report.task


def test_stores_that_never_landed_race_with_nothing():
    def dirty_only(mem):
        store(mem, 0, 7)
        idle(mem)
        idle(mem)

    def scenario(pod):
        pod.run(0, dirty_only)
        pod.run(1, idle)
        pod.on_crash(0, overwrite, suspect_live=False)

    run = scripted(scenario, [("run", 0, 2), ("crash", 0, 0)])
    assert run.failure is None


def test_nothing_of_a_fenced_node_races():
    def fenced(pod):
        def recover(mem, dead):
            pod.fence(dead)
            overwrite(mem, dead)

        crashing(True, recover)(pod)

    assert not explore(fenced, schedules=500, scheduler="mixed").failed


FREE, WRITING, READY = 0, 1, 2


def put(mem):
    store(mem, 0, WRITING)
    clflush(mem, 0)
    store(mem, LINE, 7)
    clflush(mem, LINE)
    store(mem, 0, READY)
    clflush(mem, 0)


@pytest.mark.parametrize("reclaims", [False, True])
def test_an_entry_that_a_dead_node_was_writing_is_reclaimed(reclaims):  # R5 LMCache#5105
    def scenario(pod):
        def recover(mem, dead):
            pod.fence(dead)
            clflush(mem, 0)
            if load(mem, 0) == WRITING and reclaims:
                store(mem, 0, FREE)
                clflush(mem, 0)

        def nothing_is_half_written(mem):
            assert load(mem, 0) in (FREE, READY)

        pod.run(0, put, name="writer")
        pod.run(1, idle)
        pod.on_crash(0, recover)
        pod.at_end(nothing_is_half_written)

    found = explore(scenario, schedules=300, scheduler="mixed")
    assert found.failed is not reclaims
    if not reclaims:
        assert found.report.kind is Kind.INVARIANT
        assert "(node 0 crashed)" in str(found.report)


def hold(mem):
    critical_want(mem, 0)
    critical_enter(mem, 0)
    load(mem, 0)
    load(mem, 0)
    critical_leave(mem, 0)


@pytest.mark.parametrize("fence", [False, True])
def test_a_dead_node_is_inside_its_section_until_its_fence(fence):
    def scenario(pod):
        def recover(mem, dead):
            if fence:
                pod.fence(dead)
            hold(mem)

        pod.run(0, hold, name="holder")
        pod.run(1, idle)
        pod.on_crash(0, recover, suspect_live=False)

    run = scripted(scenario, [("run", 0, 2), ("crash", 0, 0)])
    assert (run.failure is None) is fence
    if not fence:
        assert run.failure.kind is Kind.EXCLUSION
        assert "holder is inside, dead and not fenced" in run.failure.message


@pytest.mark.parametrize(
    ("recover", "said"),
    [
        (lambda mem, dead, pod: pod.fence(7), "this pod has nodes [0, 1]"),
        (lambda mem, dead, pod: pod.fence(1), "cannot fence itself"),
        (lambda mem, dead, pod: pod.restart(0, idle), "fence it first"),
        (lambda mem, dead, pod: pod.run(0, idle), "node 0 is dead"),
    ],
)
def test_what_cannot_be_done_to_a_node_is_refused(recover, said):
    def scenario(pod):
        pod.run(0, idle)
        pod.run(1, idle)
        pod.on_crash(0, recover, pod)

    run = scripted(scenario, [("crash", 0, 0)])
    assert run.failure.kind is Kind.EXCEPTION
    assert said in run.failure.message


def test_a_scenario_can_ask_who_lives():
    alive = []

    def recover(mem, dead, pod):
        alive.append([pod.is_alive(node) for node in (0, 1, 2)])
        pod.fence(dead)
        pod.restart(dead, idle)
        alive.append([pod.is_alive(node) for node in (0, 1, 2)])

    def scenario(pod):
        pod.run(0, fill_lines)
        pod.run(1, idle)
        pod.on_crash(0, recover, pod)

    run = scripted(scenario, [("crash", 0, 0), ("suspect", 0, 0)])
    assert run.failure is None
    assert alive == [[False, True, False], [True, True, False]]
