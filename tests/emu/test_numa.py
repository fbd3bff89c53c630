"""NUMA nodes: which there are, and what is bound to them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cxlbench.emu import numa
from cxlbench.emu.memory import Arena
from cxlbench.emu.numa import bind_memory, find_node, nearest_cpus, numa_nodes, parse_cpus
from cxlbench.emu.status import HostLimitError


@pytest.fixture
def host(tmp_path):
    """Two sockets, and CXL memory as a node without processors, nearest to the second."""
    nodes = ((0, "0-1,4", "10 21 24"), (1, "2-3", "21 10 14"), (2, "", "24 14 10"))
    for number, cpus, distances in nodes:
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "distance").write_text(distances + "\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:    1024 kB\n")
    return tmp_path


def test_lists_of_processors_are_read():
    assert parse_cpus("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("") == frozenset()


def test_nodes_tell_their_processors_memory_and_distances(host):
    nodes = numa_nodes(host)
    assert [node.number for node in nodes] == [0, 1, 2]
    assert nodes[0].cpus == {0, 1, 4}
    assert nodes[2].cpus == frozenset()
    assert nodes[2].memory_bytes == 1 << 20
    assert nodes[2].distances == (24, 14, 10)


def test_a_node_without_processors_is_served_from_the_nearest_that_has_some(host):
    assert nearest_cpus(0, host) == {0, 1, 4}
    assert nearest_cpus(2, host) == {2, 3}


def test_a_node_that_is_not_there_is_named_beside_those_that_are(host):
    with pytest.raises(HostLimitError, match="no NUMA node 7: it has 0, 1, 2"):
        find_node(7, host)


def test_a_host_that_tells_of_no_nodes_is_not_an_error_until_one_is_asked_for(tmp_path):
    assert numa_nodes(tmp_path) == []
    with pytest.raises(HostLimitError, match="none that it tells of"):
        find_node(0, tmp_path)


def test_memory_is_bound_to_a_node_of_this_host_or_refused_with_a_reason():
    nodes = numa_nodes()
    if not nodes:
        pytest.skip("this host tells of no NUMA nodes")
    arena = Arena(1 << 20)
    arena.array[:] = 7
    refused = None
    try:
        bind_memory(arena.array, nodes[0].number)
    except HostLimitError as error:
        refused = str(error)
    assert refused is None or "to NUMA node" in refused
    assert np.all(arena.array == 7)
    arena.close()


def test_memory_is_bound_only_where_the_system_call_is_known(monkeypatch):
    monkeypatch.setattr(numa, "find_node", lambda number: None)
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    with pytest.raises(HostLimitError, match="vax"):
        bind_memory(np.zeros(4096, dtype=np.uint8), 0)


def test_memory_that_is_not_mapped_in_whole_pages_is_refused_by_the_system():
    if not numa_nodes():
        pytest.skip("this host tells of no NUMA nodes")
    arena = Arena(1 << 20)
    with pytest.raises(HostLimitError, match="NUMA node"):
        bind_memory(arena.array[64:4096], numa_nodes()[0].number)
    arena.close()


def test_threads_run_on_the_processors_of_their_node(monkeypatch):
    bound = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus), raising=False
    )
    monkeypatch.setattr(numa, "nearest_cpus", lambda number: frozenset({2, 3}))
    assert numa.bind_threads(1) == {2, 3}
    assert bound == [{2, 3}]
