"""What live pods leave behind, however they end: their region if it has a name, nothing else."""

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
from cxlbench.emu.pod_layout import PodLayoutError, PodShape
from cxlbench.emu.pod_mappings import PodInUseError, PodPaths, remove_left_behind
from cxlbench.emu.pod_processes import LivePod
from tests.emu.live_rig import SMALL

PROGRAMS = "tests.emu.live_programs"


@pytest.fixture
def pod():
    with LivePod(PodShape(1 << 14, nodes=2, processes=2, cache=SMALL)) as pod:
        yield pod


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
