"""Nodes as real processes: started, killed at any point, fenced, restarted; nothing left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
from cxlbench.emu.pod_mappings import PodInUseError, PodPaths, remove_left_behind
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


# What is left behind


def test_a_pod_in_a_folder_removes_its_files_and_keeps_its_region(tmp_path):
    with LivePod(PodShape(1 << 12, cache=SMALL), folder=tmp_path / "pod") as pod:
        pod.memory(0).store(0, 7)
        assert sorted(p.name for p in (tmp_path / "pod").iterdir()) == [
            "control",
            "node-0",
            "node-1",
            "region",
        ]
    assert [p.name for p in (tmp_path / "pod").iterdir()] == ["region"]


def test_a_region_keeps_its_bytes_from_one_pod_to_the_next(tmp_path):
    for turn in range(3):
        with LivePod(PodShape(1 << 12, cache=SMALL), region=tmp_path / "memory") as pod:
            assert pod.memory(1).load(8) == turn
            pod.memory(0).store(8, turn + 1)  # dirty: an orderly end writes it back


def test_a_region_that_is_too_small_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "memory").write_bytes(b"precious" * 8)
    with pytest.raises(PodLayoutError, match="has 64 B, the pod's region needs 4096 B"):
        LivePod(PodShape(1 << 12), region=tmp_path / "memory")
    assert (tmp_path / "memory").read_bytes() == b"precious" * 8


def test_two_pods_on_one_region_are_refused(tmp_path):
    with LivePod(PodShape(1 << 12), region=tmp_path / "memory"):
        with pytest.raises(PodInUseError, match="another pod has"):
            LivePod(PodShape(1 << 12), region=tmp_path / "memory")
        with pytest.raises(PodInUseError):
            LivePod(PodShape(1 << 12), folder=tmp_path / "b", region=tmp_path / "memory")


def test_two_pods_in_one_folder_are_refused_and_the_first_goes_on(tmp_path):
    with LivePod(PodShape(1 << 12, cache=SMALL), folder=tmp_path) as pod:
        pod.memory(0).store(0, 7)
        with pytest.raises(PodInUseError):
            LivePod(PodShape(1 << 12), folder=tmp_path)
        with pytest.raises(PodInUseError):
            remove_left_behind(tmp_path)
        assert pod.memory(0).load(0) == 7


def test_a_folder_without_a_pod_says_so(tmp_path):
    with pytest.raises(PodLayoutError, match="no pod in it"):
        PodPaths.of_folder(tmp_path)


@pytest.mark.parametrize("at", [0, 8, 16, 40])
def test_a_control_file_that_is_not_a_pods_is_refused(tmp_path, at):
    with LivePod(PodShape(1 << 12), folder=tmp_path):
        paths = PodPaths.of_folder(tmp_path)
        raw = bytearray(Path(paths.control).read_bytes())
        raw[at] ^= 0xFF
        other = tmp_path / "other"
        other.write_bytes(raw)
        spoiled = PodPaths(str(other), paths.region, paths.nodes)
        with pytest.raises(PodLayoutError, match=r"not a pod|version|corrupt"):
            Attachment(spoiled, 0, 0)


def test_another_pods_node_file_is_refused(pod):
    swapped = PodPaths(pod.paths.control, pod.paths.region, pod.paths.nodes[::-1])
    with pytest.raises(PodLayoutError, match="not the file of node 0"):
        Attachment(swapped, 0, 0)


HOST = """
import sys
from pathlib import Path
from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_processes import LivePod
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
pod = LivePod(PodShape(1 << 12, nodes=2, processes=2), folder=folder)
target = "tests.emu.live_programs:turn_for_ever"
processes = [one for node in range(2) for one in pod.start(node, target)]
print(*(one.process_id for one in processes), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def host_killed_in_the_middle(*arguments):
    """A host with four node processes dies by SIGKILL; yields their ids once all are gone."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with host:
        ids = [int(word) for word in host.stdout.readline().split()]
        assert len(ids) == 4
        watches = [os.pidfd_open(number) for number in ids]
        host.send_signal(signal.SIGKILL)
        for watch in watches:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            assert poll.poll(20_000), "a node process outlived its host"
            os.close(watch)
    yield ids


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watching strangers die needs pidfd")
def test_node_processes_die_with_their_host_and_leave_nothing_in_shared_memory():
    def shared_memory():  # but for semaphores, which other programs come and go with
        return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}

    before = shared_memory()
    with host_killed_in_the_middle():
        assert shared_memory() <= before


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watching strangers die needs pidfd")
def test_a_folder_that_a_killed_host_left_is_taken_over_or_removed(tmp_path):
    with host_killed_in_the_middle(str(tmp_path)):
        assert (tmp_path / "control").exists()
        with LivePod(PodShape(1 << 12, cache=SMALL), folder=tmp_path) as pod:
            pod.memory(0).store(0, 7)
    with host_killed_in_the_middle(str(tmp_path)):
        assert len(remove_left_behind(tmp_path)) == 4
        assert list(tmp_path.iterdir()) == []
