"""A pod's region on a NUMA node, and its processes next to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlbench.emu import pod_mappings, pod_processes
from cxlbench.emu.memory import Arena
from cxlbench.emu.numa import bind_memory, node_of_device, numa_nodes
from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_processes import LivePod
from cxlbench.emu.status import HostLimitError

SHAPE = PodShape(1 << 16, nodes=1)


@pytest.fixture
def bound(monkeypatch):
    """Note what is bound, in the place of the system."""
    calls = []
    monkeypatch.setattr(
        pod_mappings, "bind_memory", lambda array, node: calls.append((array.nbytes, node))
    )
    return calls


def host_binds():
    arena = Arena(4096)
    try:
        bind_memory(arena.array, numa_nodes()[0].number)
    except (HostLimitError, IndexError):
        return False
    finally:
        arena.close()
    return True


def where(live):
    """Say on which processors this process may run, and how the region is bound."""
    address = f"{live.memory.region:x}"
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    (line,) = [line for line in maps if line.startswith(address)]
    return sorted(os.sched_getaffinity(0)), line.split()[1]


def test_the_region_is_bound_and_nothing_else(bound):
    with LivePod(SHAPE, numa_node=3):
        assert bound == [(1 << 16, 3)]


def test_without_a_node_nothing_is_bound(bound):
    with LivePod(SHAPE) as pod:
        assert (bound, pod.numa_node) == ([], None)


@pytest.mark.skipif(not host_binds(), reason="this host binds no memory to NUMA nodes")
def test_every_process_finds_the_region_bound_and_runs_next_to_it():
    node = numa_nodes()[0]
    with LivePod(SHAPE, numa_node=node.number) as pod:
        (process,) = pod.start(0, "tests.emu.test_live_numa:where")
        cpus, policy = process.result()
    assert cpus == sorted(node.cpus)
    assert policy == f"bind:{node.number}"


def test_a_node_that_the_host_has_not_is_refused_and_nothing_left(tmp_path):
    with pytest.raises(HostLimitError, match="no NUMA node 4000"):
        LivePod(SHAPE, numa_node=4000)
    assert [fd for fd in Path("/proc/self/fd").iterdir() if "cxlbench" in target(fd)] == []


def target(descriptor):
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


@pytest.fixture
def mounted(monkeypatch, tmp_path):
    """Let the test's folder be in a file system of some kind."""

    def be(kind):
        device = tmp_path.stat().st_dev
        here = f"{os.major(device)}:{os.minor(device)}"
        text = f"21 1 0:99 / /x rw - ext4 x rw\n22 1 {here} / /tmp rw shared:1 - {kind} x rw\n"
        (tmp_path / "mounts").write_text(text)
        monkeypatch.setattr(pod_mappings, "MOUNTS", tmp_path / "mounts")

    return be


def test_a_file_in_memory_is_bound(bound, mounted, tmp_path):
    mounted("tmpfs")
    with LivePod(SHAPE, region=tmp_path / "region", numa_node=0):
        assert bound == [(1 << 16, 0)]


def test_a_file_on_a_disk_is_refused_since_no_binding_moves_it(bound, mounted, tmp_path):
    mounted("ext4")
    with pytest.raises(HostLimitError, match="is a file on a disk"):
        LivePod(SHAPE, region=tmp_path / "region", numa_node=0)
    assert bound == []


def test_a_device_is_not_bound(bound):
    with pytest.raises(HostLimitError, match="lies where it lies"):
        pod_mappings.bind_region("/dev/zero", 4096, 0)
    assert bound == []


def test_a_dax_device_tells_next_to_which_node_it_is(tmp_path):
    for name, text in (("dax0.0", "1\n"), ("dax1.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert node_of_device(Path("/dev/dax0.0"), tmp_path) == 1
    assert node_of_device(Path("/dev/dax1.0"), tmp_path) is None
    assert node_of_device(Path("/dev/dax2.0"), tmp_path) is None


def test_processes_run_next_to_the_device_that_is_their_region(monkeypatch, tmp_path):
    asked = []

    def node_of(path):
        asked.append(path)

    monkeypatch.setattr(pod_processes, "node_of_device", node_of)
    with LivePod(SHAPE, region=tmp_path / "memory") as pod:
        assert pod.numa_node is None
    assert asked == [tmp_path / "memory"]
