"""Nodes as real processes: started, killed at any point, fenced, restarted; nothing left behind."""

from __future__ import annotations

import os
import signal

import pytest

from cxlbench.emu import pod_node_process
from cxlbench.emu.pod_attachment import Attachment
from cxlbench.emu.pod_layout import (
    JOURNAL_AT,
    JOURNAL_DATA_AT,
    JOURNAL_MASK_AT,
    LOCKS_AT,
    PROCESS_BYTES,
    PROCESS_ID_AT,
    PROCESSES_AT,
    ArrivalLaw,
    PodLayoutError,
    PodShape,
)
from cxlbench.emu.pod_mappings import PodInUseError
from cxlbench.emu.pod_node_process import (
    NodeDiedError,
    NodeFailedError,
    NodeForker,
    NodeStartError,
    NodeTimeoutError,
)
from cxlbench.emu.pod_processes import LivePod, NodeNotFencedError
from tests.emu.live_rig import SMALL, Rig

HELD = ArrivalLaw("held")
PROGRAMS = "tests.emu.live_programs"


@pytest.fixture(scope="module")
def forker():
    with NodeForker(prepare=[f"{PROGRAMS}:warm_up"]) as forker:
        yield forker


@pytest.fixture
def pod(forker):
    with LivePod(PodShape(1 << 14, nodes=2, processes=2, cache=SMALL), forker=forker) as pod:
        yield pod


def go(pod, node, name, *arguments, processes=1):
    """Start a program in processes that begin together; return them."""
    started = pod.start(node, f"{PROGRAMS}:run", name, *arguments, processes=processes)
    for process in started:
        process.receive()
    for process in started:
        process.send("go")
    return started


# Starting


def test_every_process_knows_its_place(pod):
    who = [process.result() for n in range(2) for process in pod.start(n, f"{PROGRAMS}:say_who")]
    assert who == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 1), (1, 1, 0, 1)]


def test_a_node_may_run_one_thing_after_another(pod):
    for _ in range(2):
        assert [one.result()[1] for one in pod.start(0, f"{PROGRAMS}:say_who")] == [0, 1]


def test_a_function_that_raises_shows_its_traceback(pod):
    (process,) = pod.start(0, f"{PROGRAMS}:fail", processes=1)
    with pytest.raises(NodeFailedError, match="ValueError: on purpose"):
        process.result()


@pytest.mark.parametrize("target", [f"{PROGRAMS}:no_such", "no.such.module:f", "nothing"])
def test_a_target_that_is_not_there_is_refused_before_anything_runs(pod, target):
    with pytest.raises(NodeStartError, match="cannot"):
        pod.start(0, target)
    assert pod.processes(0) == ()


def test_more_processes_than_places_are_refused(pod):
    pod.start(0, f"{PROGRAMS}:obey")
    with pytest.raises(NodeStartError, match="0 free places of 2"):
        pod.start(0, f"{PROGRAMS}:obey", processes=1)


def test_a_place_that_a_live_process_has_is_refused(pod):
    (process,) = pod.start(0, f"{PROGRAMS}:obey", processes=1)
    process.send(("load", 0))
    process.receive()
    with pytest.raises(PodInUseError, match=f"is {process.process_id}, which is alive"):
        Attachment(pod.paths, 0, 0)


@pytest.mark.parametrize(("node", "process"), [(2, 0), (-1, 0), (0, 2), (0, -2)])
def test_a_place_that_the_pod_does_not_have_is_refused(pod, node, process):
    with pytest.raises(PodLayoutError, match=f"no process {process} of node {node}"):
        Attachment(pod.paths, node, process)


def test_a_process_that_says_nothing_is_reported_in_time(pod):
    (process,) = pod.start(0, f"{PROGRAMS}:obey", processes=1)
    with pytest.raises(NodeTimeoutError, match="said nothing"):
        process.receive(timeout_s=0.01)


def test_a_preparation_that_fails_is_told_to_who_starts_a_process():
    with (
        NodeForker(prepare=[f"{PROGRAMS}:fail_to_prepare"]) as forker,
        LivePod(PodShape(1 << 12), forker=forker) as pod,
        pytest.raises(NodeStartError, match="LookupError: nothing to compile"),
    ):
        pod.start(0, f"{PROGRAMS}:say_who", processes=1)


def test_closing_does_not_wait_for_a_preparation(monkeypatch):
    monkeypatch.setattr(pod_node_process, "END_S", 10.0)
    with NodeForker(prepare=[f"{PROGRAMS}:prepare_for_ever"]) as forker:
        assert not forker.prepared(timeout_s=0.0)
    assert forker._zygote.returncode != -signal.SIGKILL
    with NodeForker() as forker:
        assert forker.prepared()
        assert forker.prepared(timeout_s=0.0)


# Several processes at speed


def test_local_locks_and_atomics_count_exactly_between_processes_of_a_node(pod):
    for process in go(pod, 0, "count_up", 5, 10, 200_000, 2, processes=2):
        process.result()
    memory = pod.memory(0)
    assert (memory.local_load(10), memory.local_load(11)) == (400_000, 4_000_000)


def test_two_nodes_hand_a_value_back_and_forth_by_flushing(pod):
    first, second = (
        go(pod, 0, "hand_over", 0, 64, 300, True)[0],
        go(pod, 1, "hand_over", 64, 0, 300, True)[0],
    )
    first.result()
    second.result()
    assert (pod.device[0], pod.device[8]) == (300, 300)


def test_two_nodes_that_forget_to_flush_wait_for_ever(pod):
    first, second = (
        go(pod, 0, "hand_over", 0, 64, 2, False)[0],
        go(pod, 1, "hand_over", 64, 0, 2, False)[0],
    )
    with pytest.raises(NodeTimeoutError):
        first.result(timeout_s=0.2)
    assert first.alive
    assert second.alive


def test_a_line_is_never_seen_half_written(pod):
    (writer,) = pod.start(0, f"{PROGRAMS}:run_and_tell", "write_lines_for_ever", 0, 3, processes=1)
    writer.receive()
    (reader,) = go(pod, 1, "torn_lines", 0, 3, 30_000)
    assert reader.result() == 0
    assert writer.alive
    assert pod.device[0] > 0


# Crashes


def test_a_crash_loses_dirty_lines(forker):
    with Rig(forker, arrival=HELD) as rig:
        a, b = rig.nodes
        a.store(0, 7)
        a.store(64, 8)
        a.clflush(64)
        rig.pod.kill(0)
        rig.pod.fence(0)
        assert (b.load(0), b.load(64)) == (0, 8)
        assert rig.boot(0).load(0) == 0


def test_each_write_back_in_flight_lands_or_not_independently(forker):
    fates = set()
    for seed in range(20):
        with Rig(forker, arrival=HELD, seed=seed) as rig:
            a, _ = rig.nodes
            for line in range(3):
                a.store(64 * line, 1)
                a.clflushopt(64 * line)
            report = rig.pod.fence(0)
            fates.add(tuple(rig.device(64 * line) for line in range(3)))
            assert report.landed == sum(rig.device(64 * line) for line in range(3))
            assert report.landed + report.dropped == 3
    assert {1, 2} & {sum(fate) for fate in fates}, "not all or nothing"
    assert len(fates) >= 6


def test_a_dma_of_a_node_that_dies_is_cut_between_lines_and_goes_no_further(forker):
    moved = set()
    for seed in range(12):
        with Rig(forker, arrival=HELD, seed=seed) as rig:
            a, b = rig.nodes
            a.array("out", [7] * 64)
            a.dma_write(0, "out")
            rig.pod.kill(0)
            rig.pod.fence(0)
            lines = rig.pod.device[:64].reshape(8, 8)
            assert all(len(set(line)) == 1 for line in lines.tolist())
            moved.add(int(lines[:, 0].sum()) // 7)
            before = rig.pod.device.copy()
            for line in range(8):
                assert b.load(64 * line) == before[8 * line]
            rig.pod.settle(0)
            assert (rig.pod.device == before).all()
    assert moved - {0, 8}, "none was cut in the middle"


def test_the_same_seed_gives_the_same_fate(forker):
    def fate():
        with Rig(forker, arrival=HELD, seed=5) as rig:
            for line in range(10):
                rig.nodes[0].store(64 * line, 1)
                rig.nodes[0].clflushopt(64 * line)
            rig.pod.fence(0)
            return [rig.device(64 * line) for line in range(10)]

    assert fate() == fate()


def test_nothing_of_a_node_lands_after_its_fence(pod):
    (writer,) = pod.start(0, f"{PROGRAMS}:run_and_tell", "write_lines_for_ever", 0, 3, processes=1)
    writer.receive()
    pod.fence(0)
    with pytest.raises(ProcessLookupError):
        os.kill(writer.process_id, 0)
    before = pod.device.copy()
    pod.settle(0)
    assert (pod.device == before).all()


def test_a_node_dies_with_any_of_its_processes_and_must_be_fenced(pod):
    first, second = pod.start(0, f"{PROGRAMS}:obey")
    first.kill()
    with pytest.raises(NodeNotFencedError, match="fence it first"):
        pod.start(0, f"{PROGRAMS}:obey")
    assert second.alive
    pod.fence(0)
    with pytest.raises(ProcessLookupError):
        os.kill(second.process_id, 0)
    assert [one.result()[2] for one in pod.start(0, f"{PROGRAMS}:say_who")] == [1, 1]


def test_waiting_for_a_killed_process_says_that_it_died(pod):
    (process,) = pod.start(0, f"{PROGRAMS}:obey", processes=1)
    process.kill()
    with pytest.raises(NodeDiedError, match="died before it returned"):
        process.result()
    with pytest.raises(NodeDiedError):
        process.send("anything")


def test_a_fence_frees_local_locks_and_empties_local_memory(pod):
    (process,) = pod.start(0, f"{PROGRAMS}:obey", processes=1)
    for command in (("local_lock", 3), ("local_store", 0, 7)):
        process.send(command)
        process.receive()
    pod.restart(0, f"{PROGRAMS}:obey")
    pod.memory(0).local_lock(3)
    assert pod.memory(0).local_load(0) == 0


def test_killed_at_any_point_a_node_leaves_whole_lines_and_no_lock(pod):
    for kill in range(15):
        (writer,) = pod.start(
            0, f"{PROGRAMS}:run_and_tell", "write_lines_for_ever", 64 * (kill % 2), 3, processes=1
        )
        writer.receive()
        (reader,) = go(pod, 1, "torn_lines", 0, 4, 40 * kill)  # a while, without a clock
        reader.result()
        pod.kill(0)
        pod.fence(0)
        (after,) = go(pod, 1, "torn_lines", 0, 4, 3)
        assert after.result(timeout_s=20) == 0


class HalfWritten:
    """A line of D that a process was killed over: two of its eight words are written."""

    def __init__(self, pod, line):
        (process,) = pod.start(0, f"{PROGRAMS}:say_who", processes=1)
        process.result()
        control = pod._host(0).control
        entry = PROCESSES_AT + (pod.shape.token(0, 0) - 1) * PROCESS_BYTES
        control.write_word(entry + PROCESS_ID_AT, process.process_id)
        control.write_word(entry + JOURNAL_AT, line)
        control.write_word(entry + JOURNAL_AT + JOURNAL_MASK_AT, 255)
        for word in range(8):
            control.write_word(entry + JOURNAL_AT + JOURNAL_DATA_AT + 8 * word, 5)
        control.write_word(LOCKS_AT + 64 * line, pod.shape.token(0, 0))
        pod.device[8 * line : 8 * line + 2] = 5
        self.lock = lambda: pod._host(0).control.words(LOCKS_AT + 64 * line, 1)[0]


def test_a_fence_completes_a_half_written_line(pod):
    half = HalfWritten(pod, 3)
    assert pod.fence(0).completed == 1
    assert pod.device[24:32].tolist() == [5] * 8
    assert half.lock() == 0


def test_a_survivor_completes_a_half_written_line_that_it_needs(pod):
    half = HalfWritten(pod, 3)
    (survivor,) = pod.start(1, f"{PROGRAMS}:obey", processes=1)
    survivor.send(("load", 3 * 64 + 56))
    assert survivor.receive(timeout_s=20) == 5
    assert half.lock() == 0
    assert pod.device[24:32].tolist() == [5] * 8
    assert pod.counters(1)["rescued"] == 1


def test_a_forking_process_that_does_not_end_by_itself_is_killed(monkeypatch):
    monkeypatch.setattr(pod_node_process, "END_S", 0.05)
    forker = NodeForker()
    forker.prepared()
    os.kill(forker._zygote.pid, signal.SIGSTOP)
    forker.close()
    assert forker._zygote.returncode == -signal.SIGKILL
