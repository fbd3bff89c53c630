"""Programs of the pod on a mapped node, with a buffer and a flush for all they have."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_ops import PodMemory
from cxlbench.emu.pod_processes import LivePod
from cxlbench.emu.pod_virtual_memory import VirtualMemory


@pytest.fixture
def pod():
    with LivePod(PodShape(4096, mode="mapped")) as pod:
        yield pod


@pytest.fixture
def nodes(pod):
    handles = [pod.mapped(n).handle() for n in range(2)]
    yield handles
    for one in handles:
        one.close()


def test_it_has_every_operation(nodes):
    operations = [name for name in vars(PodMemory) if not name.startswith("_")]
    assert len(operations) > 20
    assert [name for name in operations if not callable(getattr(nodes[0], name, None))] == []
    assert [name for name in operations if not hasattr(VirtualMemory, name)] == []


def test_a_store_is_seen_by_its_own_node_only(pod, nodes):
    a, b = nodes
    a.store(0, -7)
    assert (a.load(0), b.load(0), pod.device[0]) == (-7, 0, 0)


@pytest.mark.parametrize("flush", ["clflush", "clflushopt", "clwb"])
def test_a_flush_lands_whole_lines_and_an_old_copy_stays_old(pod, nodes, flush):
    a, b = nodes
    b.store(8, 5)
    b.clflush(8)
    a.store(0, 7)
    getattr(a, flush)(8)
    assert pod.device[:2].tolist() == [7, 0]
    assert (b.load(0), b.load(8)) == (0, 5)
    b.clflush(0)
    assert (b.load(0), b.load(8)) == (7, 0)


def test_clwb_keeps_the_old_copy_and_clflush_drops_it(nodes):
    a, b = nodes
    b.store(0, 7)
    b.clflush(0)
    a.clwb(0)
    assert a.load(0) == 0
    a.clflush(0)
    assert a.load(0) == 7


def test_a_nontemporal_store_takes_its_word_along_and_no_old_neighbour(pod, nodes):
    a, b = nodes
    b.store(8, 5)
    b.clflush(8)
    a.ntstore(0, 7)
    assert pod.device[:2].tolist() == [7, 5]


def test_a_dma_passes_its_own_nodes_stores_and_no_other_nodes_copy(pod, nodes):
    a, b = nodes
    a.store(80, 3)
    a.dma_wait(a.dma_write(8, np.arange(1, 9)))
    assert pod.device[:11].tolist() == [0, *range(1, 9), 0, 3]
    words = np.zeros(3, np.int64)
    handle = b.dma_read(64, words)
    assert b.dma_done(handle)
    assert words.tolist() == [8, 0, 3]
    assert b.load(8) == 0
    assert a.dma_write(0, np.zeros(0, np.int64)) == 1


def test_pausing_brings_nothing(nodes):
    a, b = nodes
    b.store(0, 7)
    b.clflush(0)
    a.pause(0, 8)
    assert a.load(0) == 0


def test_local_words_and_locks_are_the_nodes(nodes):
    a, b = nodes
    a.local_lock(1)
    a.local_store(3, 7)
    assert (a.local_cas(3, 7, 8), a.local_add(3, 1), a.local_load(3)) == (7, 8, 9)
    assert b.local_load(3) == 0
    a.local_unlock(1)
    assert [one.node_id() for one in nodes] == [0, 1]
    assert a.now() > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("load", (-8,)),
        ("load", (4096,)),
        ("load", (4,)),
        ("store", (4096, 1)),
        ("clflush", (4096,)),
        ("clwb", (-1,)),
        ("ntstore", (1, 1)),
        ("pause", (4090, 8)),
        ("dma_write", (4088, np.zeros(2, np.int64))),
        ("dma_read", (4, np.zeros(1, np.int64))),
    ],
)
def test_an_address_that_is_none_is_refused_and_nothing_stored(pod, nodes, name, arguments):
    with pytest.raises(PodAddressError, match="region of 4096 B"):
        getattr(nodes[0], name)(*arguments)
    pod.mapped(0).flush()
    assert not pod.device.any()
