"""The table of the memory model, row by row, in every executor that can show the row.

A row is a short sequence of operations on two nodes and what must be seen; the executors differ in
how they keep the bytes and not in that. What is posted is held back until it is told to land.
"""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pod_layout import ArrivalLaw, PodShape
from cxlbench.emu.pod_processes import LivePod
from cxlbench.emu.pod_virtual import PodCosts, VirtualPod
from tests.emu.pod_pair import Pair, a_read, a_store, a_write

NBYTES = 4096


class Explored:
    """The explorer's device and caches."""

    def __init__(self):
        self.pair = Pair()

    def do(self, node, name, off=0, *rest):
        cache = self.pair.nodes[node]
        if name == "load":
            return cache.load(off // 8).value
        if name in ("store", "ntstore"):
            getattr(cache, name)(off // 8, a_store(*rest))
        elif name in ("clflush", "clflushopt", "clwb"):
            getattr(cache, name)(off // 64)
        elif name == "dma_write":
            dma = a_write(cache, off // 8, rest[0])
            dma.copy(0)
        elif name == "dma_read":
            dma = a_read(cache, off // 8, rest[0])
            dma.copy(0)
            return [stored.value for stored in dma.got]
        return None  # fences order, and nothing here is out of order

    def device(self, off):
        return self.pair.held(off // 8)

    def settle(self, node):
        self.pair.nodes[node].drain()

    def crash(self, node):
        self.pair.nodes[node].die(0)

    def close(self):
        pass


class Handles:
    """What executors with handles share."""

    def do(self, node, name, off=None, *rest):
        mem = self.handle(node)
        if name == "dma_write":
            return mem.dma_wait(mem.dma_write(off, np.array(rest[0], np.int64)))
        if name == "dma_read":
            words = np.zeros(rest[0], np.int64)
            mem.dma_wait(mem.dma_read(off, words))
            return words.tolist()
        return getattr(mem, name)(*(() if off is None else (off, *rest)))


class Emulated(Handles):
    """A live pod with emulated caches."""

    def __init__(self):
        self.pod = LivePod(PodShape(NBYTES, arrival=ArrivalLaw("held")))

    def handle(self, node):
        return self.pod.memory(node)

    def device(self, off):
        return int(self.pod.device[off // 8])

    def settle(self, node):
        self.pod.settle(node)

    def crash(self, node):
        self.pod.fence(node)

    def close(self):
        self.pod.close()


class Mapped(Emulated):
    """A mapped pod, through nothing but buffers and flushes."""

    def __init__(self):
        self.pod = LivePod(PodShape(NBYTES, mode="mapped"))
        self.handles = {}

    def handle(self, node):
        if node not in self.handles:
            self.handles[node] = self.pod.mapped(node).handle()
        return self.handles[node]

    def crash(self, node):
        if node in self.handles:
            self.handles.pop(node).close()
        self.pod.fence(node)

    def close(self):
        for handle in self.handles.values():
            handle.close()
        self.pod.close()


class Virtual(Handles):
    """A pod under a virtual clock; what is posted takes a day."""

    DAY_S = 86_400.0

    def __init__(self):
        self.clock = VirtualClock()
        costs = PodCosts(
            fill_s=1e-6,
            flush_s=1e-6,
            invalidate_s=1e-6,
            bytes_per_s=1e9,
            dma_latency_s=1e-6,
            arrival_shortest_s=self.DAY_S,
            arrival_longest_s=self.DAY_S,
        )
        self.pod = VirtualPod(self.clock, NBYTES, costs, nodes=2)

    def do(self, node, *words):
        def program(mem):
            self.mem = mem
            return Handles.do(self, node, *words)

        return self.clock.run(self.pod.run(node, program))

    def handle(self, node):
        return self.mem

    def device(self, off):
        return int(self.pod.device.words[off // 8])

    def settle(self, node):
        cache = self.pod.nodes[node].cache
        for line in list(cache.posted):
            cache.land_posted(line, None)

    def close(self):
        self.clock.close()


ALL = (Explored, Emulated, Virtual, Mapped)
POSTING = (Explored, Emulated, Virtual)
DYING = (Explored, Emulated, Mapped)


@pytest.fixture
def pod(request):
    made = request.param()
    yield made
    made.close()


def in_every(*kinds):
    return pytest.mark.parametrize("pod", kinds, indirect=True, ids=lambda kind: kind.__name__)


@in_every(*ALL)
def test_a_load_is_from_the_copy_however_old_until_it_is_dropped(pod):
    assert pod.do(1, "load", 0) == 0
    pod.do(0, "store", 0, 7)
    assert (pod.do(0, "load", 0), pod.do(1, "load", 0), pod.device(0)) == (7, 0, 0)
    pod.do(0, "clflush", 0)
    assert (pod.device(0), pod.do(1, "load", 0)) == (7, 0)
    pod.do(1, "clflush", 0)
    assert pod.do(1, "load", 0) == 7


@in_every(*ALL)
def test_clflush_writes_the_whole_line_and_its_old_neighbours_with_it(pod):
    pod.do(0, "load", 0)
    pod.do(1, "store", 8, 5)
    pod.do(1, "clflush", 8)
    assert pod.device(8) == 5
    pod.do(0, "store", 0, 7)
    pod.do(0, "clflush", 0)
    assert (pod.device(0), pod.device(8)) == (7, 0)


@in_every(*POSTING)
@pytest.mark.parametrize("flush", ["clflushopt", "clwb"])
def test_what_is_posted_has_not_landed_after_a_fence_and_its_node_sees_it(pod, flush):
    pod.do(0, "store", 0, 7)
    pod.do(0, flush, 0)
    pod.do(0, "sfence")
    pod.do(0, "mfence")
    assert (pod.device(0), pod.do(0, "load", 0), pod.do(1, "load", 0)) == (0, 7, 0)
    pod.settle(0)
    assert pod.device(0) == 7


@in_every(*POSTING)
def test_clflush_lands_what_was_posted_of_its_line_before(pod):
    pod.do(0, "store", 0, 1)
    pod.do(0, "clflushopt", 0)
    pod.do(0, "store", 64, 1)
    pod.do(0, "clflushopt", 64)
    pod.do(0, "clflush", 0)
    assert (pod.device(0), pod.device(64)) == (1, 0)


@in_every(*ALL)
def test_clwb_keeps_the_copy_and_it_is_clean(pod):
    pod.do(0, "store", 0, 7)
    pod.do(0, "clwb", 0)
    pod.settle(0)
    pod.do(1, "clflush", 0)
    pod.do(1, "store", 0, 9)
    pod.do(1, "clflush", 0)
    assert (pod.device(0), pod.do(0, "load", 0)) == (9, 7)
    pod.do(0, "clflush", 0)
    assert (pod.device(0), pod.do(0, "load", 0)) == (9, 9)


@in_every(*ALL)
def test_a_nontemporal_store_carries_its_word_and_no_old_neighbour(pod):
    pod.do(0, "load", 0)
    pod.do(0, "ntstore", 0, 7)
    pod.settle(0)
    assert pod.device(0) == 7
    pod.do(1, "clflush", 0)
    pod.do(1, "store", 8, 5)
    pod.do(1, "clflush", 8)
    assert (pod.device(0), pod.device(8)) == (7, 5)


@in_every(*POSTING)
def test_a_nontemporal_store_is_posted_behind_the_dirty_line(pod):
    pod.do(0, "store", 8, 5)
    pod.do(0, "ntstore", 0, 7)
    assert (pod.device(0), pod.device(8)) == (0, 0)
    assert (pod.do(0, "load", 0), pod.do(0, "load", 8)) == (7, 5)
    pod.settle(0)
    assert (pod.device(0), pod.device(8)) == (7, 5)


@in_every(*ALL)
def test_dma_is_coherent_with_the_cache_of_its_own_node_only(pod):
    for node in (0, 1):
        pod.do(node, "load", 0)
    pod.do(0, "store", 16, 4)
    pod.do(0, "store", 64, 1)
    pod.do(0, "dma_write", 0, [7, 8])
    assert (pod.do(0, "load", 0), pod.do(1, "load", 0)) == (7, 0)
    assert [pod.device(off) for off in (0, 8, 16)] == [7, 8, 4]
    assert pod.do(0, "dma_read", 64, 2) == [1, 0]
    pod.do(1, "store", 128, 3)
    assert pod.do(0, "dma_read", 128, 2) == [0, 0]


@in_every(*DYING)
def test_a_crash_loses_what_was_dirty_and_nothing_else(pod):
    pod.do(0, "store", 0, 7)
    pod.do(0, "store", 64, 8)
    pod.do(0, "clflush", 64)
    pod.crash(0)
    assert (pod.device(0), pod.device(64)) == (0, 8)
    pod.do(1, "clflush", 64)
    assert (pod.do(1, "load", 0), pod.do(1, "load", 64)) == (0, 8)


@in_every(*DYING)
def test_nothing_of_a_dead_node_lands_after_its_end(pod):
    pod.do(0, "store", 0, 7)
    pod.do(0, "clflushopt", 0)
    pod.do(0, "store", 64, 8)
    pod.crash(0)
    before = [pod.device(off) for off in (0, 64)]
    pod.do(1, "store", 64, 1)
    pod.do(1, "clflush", 64)
    pod.settle(0)
    assert [pod.device(off) for off in (0, 64)] == [before[0], 1]


@in_every(*ALL)
def test_offset_zero_and_the_last_word_are_words(pod):
    for off in (0, NBYTES - 8):
        pod.do(0, "store", off, -(2**63))
        pod.do(0, "clflush", off)
        assert pod.do(1, "load", off) in (-(2**63), 0)
        pod.do(1, "clflush", off)
        assert pod.do(1, "load", off) == -(2**63)
