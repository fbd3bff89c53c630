"""The memory model across real processes: each test makes one row of its table be seen.

``a`` and ``b`` are processes of two nodes; write-backs are held in flight unless a test says when
they land, so that nothing depends on timing.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import TypingError

from cxlbench.emu.pod_dma import DMA_SLOTS, PodDmaError
from cxlbench.emu.pod_layout import ArrivalLaw, CacheGeometry, DeviceCosts, Disturbance, PodShape
from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_node_process import NodeFailedError, NodeForker
from cxlbench.emu.pod_processes import LivePod
from tests.emu.live_programs import compile_for
from tests.emu.live_rig import SMALL, Rig

HELD = ArrivalLaw("held")


@pytest.fixture(scope="module")
def forker():
    with NodeForker(prepare=["tests.emu.live_programs:warm_up"]) as forker:
        yield forker


@pytest.fixture(scope="module")
def shared(forker):
    with Rig(forker, arrival=HELD) as rig:
        yield rig


@pytest.fixture
def rig(shared):
    """Two nodes with empty caches on a zeroed device."""
    for node in range(2):
        shared.pod.fence(node)
    shared.pod.device[:] = 0
    shared.nodes = [shared.boot(node) for node in range(2)]
    return shared


# Loads and stores


def test_a_store_is_seen_by_its_own_node_only(rig):
    a, b = rig.nodes
    a.store(0, 7)
    assert (a.load(0), b.load(0), rig.device(0)) == (7, 0, 0)


def test_a_node_keeps_reading_its_old_copy_after_the_device_changed(rig):
    a, b = rig.nodes
    assert b.load(0) == 0
    a.store(0, 7)
    a.clflush(0)
    assert (rig.device(0), b.load(0)) == (7, 0)


def test_invalidating_the_old_copy_lets_the_new_value_in(rig):
    a, b = rig.nodes
    b.load(0)
    a.store(0, 7)
    a.clflush(0)
    b.clflush(0)
    assert b.load(0) == 7


def test_processes_of_one_node_share_its_cache(forker):
    with Rig(forker, nodes=1, processes=2) as rig:
        rig.nodes[0].store(0, 7)
        second = rig.boot(0)
        assert (second.load(0), rig.device(0)) == (7, 0)


def test_a_word_is_the_unit_and_the_line_its_carrier(rig):
    a, b = rig.nodes
    a.store(8, 1)
    a.store(56, 2)
    a.store(64, 3)
    a.clflush(16)
    assert [b.load(off) for off in (0, 8, 56, 64)] == [0, 1, 2, 0]


# Flushes


def test_clflush_is_complete_when_it_returns(rig):
    a, _ = rig.nodes
    a.store(0, 7)
    a.clflush(0)
    assert rig.device(0) == 7


def test_a_whole_line_write_back_overwrites_a_neighbours_word(rig):
    a, b = rig.nodes
    a.load(0)
    b.store(8, 5)
    b.clflush(8)
    a.store(0, 7)
    a.clflush(0)
    assert (rig.device(0), rig.device(8)) == (7, 0)


def test_flushing_a_clean_copy_writes_nothing(rig):
    a, b = rig.nodes
    a.load(0)
    b.store(8, 5)
    b.clflush(8)
    a.clflush(0)
    assert rig.device(8) == 5


@pytest.mark.parametrize("flush", ["clflushopt", "clwb"])
def test_a_posted_flush_has_not_landed_even_after_a_fence(rig, flush):
    a, b = rig.nodes
    a.store(0, 7)
    getattr(a, flush)(0)
    a.sfence()
    a.mfence()
    assert (rig.device(0), b.load(0)) == (0, 0)
    rig.pod.settle(0)
    assert rig.device(0) == 7


def test_a_fence_waits_for_arrival_on_a_device_that_promises_it(forker):
    with Rig(forker, arrival=HELD, fence_arrives=True) as rig:
        a, b = rig.nodes
        a.store(0, 7)
        a.clflushopt(0)
        assert rig.device(0) == 0
        a.sfence()
        assert b.load(0) == 7


def test_clflushopt_drops_the_copy(rig):
    a, b = rig.nodes
    a.load(0)
    b.store(0, 7)
    b.clflush(0)
    a.clflushopt(0)
    assert a.load(0) == 7


def test_clwb_keeps_the_copy_clean(rig):
    a, b = rig.nodes
    a.store(0, 7)
    a.clwb(0)
    rig.pod.settle(0)
    b.store(0, 9)
    b.clflush(0)  # b filled 7 and wrote the line with 9
    assert a.load(0) == 7
    a.clflush(0)  # clean: it does not write 7 back
    assert (rig.device(0), a.load(0)) == (9, 9)


def test_a_node_sees_its_own_write_back_in_flight(rig):
    a, b = rig.nodes
    a.store(0, 7)
    a.clflushopt(0)
    assert (a.load(0), b.load(0), rig.device(0)) == (7, 0, 0)


def test_the_newest_write_back_in_flight_is_seen_on_top(rig):
    a, _ = rig.nodes
    for value in (1, 2, 3):
        a.store(0, value)
        a.clflushopt(0)
    a.ntstore(8, 4)
    assert (a.load(0), a.load(8)) == (3, 4)


def test_write_backs_of_one_line_land_in_posting_order(forker):
    law = ArrivalLaw("operations", 0, 32)
    for seed in range(3):
        with Rig(forker, arrival=law, seed=seed, nodes=1) as rig:
            (a,) = rig.nodes
            seen = []
            for value in range(1, 61):
                a.store(0, value)
                a.clwb(0)
                seen.append(rig.device(0))
            rig.pod.settle(0)
            seen.append(rig.device(0))
            assert seen == sorted(seen)
            assert len(set(seen)) > 5
            assert seen[-1] == 60


def test_clflush_lands_what_is_in_flight_of_its_line_first(rig):
    a, _ = rig.nodes
    a.store(0, 1)
    a.clflushopt(0)
    a.store(64, 1)
    a.clflushopt(64)
    a.clflush(0)
    assert (rig.device(0), rig.device(64)) == (1, 0)
    rig.pod.settle(0)
    assert (rig.device(0), rig.device(64)) == (1, 1)


def test_ntstore_posts_one_word_behind_the_dirty_line(rig):
    a, b = rig.nodes
    a.store(8, 5)
    a.ntstore(0, 7)
    assert (rig.device(0), rig.device(8), a.load(0), a.load(8)) == (0, 0, 7, 5)
    b.store(16, 3)
    b.clflush(16)
    rig.pod.settle(0)
    assert (rig.device(0), rig.device(8), rig.device(16)) == (7, 5, 0)  # the line took 16 along


def test_ntstore_of_a_clean_line_leaves_the_neighbours_words_alone(rig):
    a, b = rig.nodes
    a.load(0)
    a.ntstore(0, 7)
    b.store(8, 5)
    b.clflush(8)
    rig.pod.settle(0)
    assert (rig.device(0), rig.device(8)) == (7, 5)


@pytest.mark.parametrize("unit", ["operations", "ns"])
def test_a_write_back_lands_while_its_node_goes_on(forker, unit):
    with Rig(forker, arrival=ArrivalLaw(unit, 20, 20), nodes=1) as rig:
        (a,) = rig.nodes
        a.store(0, 7)
        a.clflushopt(0)
        for _ in range(40):
            a.pause(0, 8)
        assert rig.device(0) == 7


def test_a_write_back_due_in_twenty_operations_is_not_there_after_ten(forker):
    with Rig(forker, arrival=ArrivalLaw("operations", 20, 20), nodes=1) as rig:
        (a,) = rig.nodes
        a.store(0, 7)
        a.clflushopt(0)
        for _ in range(10):
            a.pause(0, 8)
        assert rig.device(0) == 0


def test_one_write_back_more_than_fit_in_flight_makes_the_oldest_land(rig):
    a, _ = rig.nodes
    for line in range(SMALL.posted + 1):
        a.store(64 * line, 1)
        a.clflushopt(64 * line)
    assert [rig.device(64 * line) for line in range(3)] == [1, 0, 0]


# What happens at any time


def test_a_full_set_evicts_a_dirty_line_whole(rig):
    a, b = rig.nodes
    stride = 64 * SMALL.sets
    b.load(0)
    a.load(8)
    b.store(8, 5)
    b.clflush(8)
    a.store(0, 7)
    for way in range(1, SMALL.ways + 1):
        a.load(way * stride)
    assert rig.device(0) == 0, "an eviction is posted, not landed"
    rig.pod.settle(0)
    assert (rig.device(0), rig.device(8)) == (7, 0)


def test_an_evictions_write_back_queues_behind_those_of_its_line(rig):
    a, _ = rig.nodes
    a.store(0, 1)
    a.clwb(0)
    a.store(0, 2)
    for way in range(1, SMALL.ways + 1):
        a.load(way * 64 * SMALL.sets)
    assert a.load(0) == 2
    rig.pod.settle(0)
    assert rig.device(0) == 2


def test_the_adversary_evicts_and_so_publishes_what_was_never_flushed(forker):
    with Rig(forker, nodes=1, arrival=ArrivalLaw("operations", 0, 0)) as rig:
        (a,) = rig.nodes
        a.store(0, 7)
        for _ in range(100):
            a.load(0)
        assert rig.device(0) == 0
        rig.pod.disturb(Disturbance(evictions_per_million=200_000))
        for _ in range(100):
            a.load(0)
        assert rig.device(0) == 7
        assert rig.pod.counters(0)["disturbed"] > 0


def test_the_adversary_fills_lines_that_nobody_asked_for(forker):
    with Rig(
        forker, nodes=2, region_bytes=256, disturbance=Disturbance(fills_per_million=500_000)
    ) as rig:
        a, b = rig.nodes
        for _ in range(100):
            a.load(0)
        b.store(64, 7)
        b.clflush(64)
        assert rig.device(64) == 7
        assert a.load(64) == 0, "the line came in before b wrote it, though a never asked for it"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_adversary_does_a_node_sees_its_own_stores(forker, seed):
    shape = PodShape(
        1 << 14,
        nodes=1,
        seed=seed,
        cache=CacheGeometry(sets=8, ways=2, posted=8),
        arrival=ArrivalLaw("operations", 0, 512),
        disturbance=Disturbance(100_000, 100_000),
    )
    with LivePod(shape, forker=forker) as pod:
        compile_for(pod.memory(0), "walk")
        (process,) = pod.start(0, "tests.emu.live_programs:run", "walk", 200, 77, 30)
        process.receive()
        process.send("go")
        assert process.result() == 0
        assert pod.counters(0)["disturbed"] > 1000


# DMA


def test_a_dma_write_is_incomplete_until_its_completion_is_seen(forker):
    early = []
    for seed in range(12):
        with Rig(forker, arrival=HELD, seed=seed, nodes=1) as rig:
            (a,) = rig.nodes
            a.array("out", list(range(1, 129)))
            handle = a.dma_write(0, "out")
            early.append(sum(rig.device(8 * i) != i + 1 for i in range(128)))
            a.dma_wait(handle)
            assert [rig.device(8 * i) for i in range(128)] == list(range(1, 129))
    assert max(early) > 0
    assert any(missing % 8 == 0 and 0 < missing < 128 for missing in early), early  # cut at a line


def test_a_dma_write_is_seen_by_its_node_and_not_by_an_old_copy_elsewhere(rig):
    a, b = rig.nodes
    a.load(0)
    b.load(0)
    a.array("out", [7] * 8)
    a.dma_wait(a.dma_write(0, "out"))
    assert (a.load(0), b.load(0)) == (7, 0)


def test_a_dma_write_of_part_of_a_line_keeps_the_nodes_other_words(rig):
    a, _ = rig.nodes
    a.store(0, 1)
    a.store(8, 2)
    a.clflushopt(0)
    a.store(16, 3)
    a.array("out", [9])
    a.dma_wait(a.dma_write(8, "out"))
    assert [rig.device(off) for off in (0, 8, 16)] == [1, 9, 3]


def test_a_dma_read_sees_its_nodes_cache_and_no_other(rig):
    a, b = rig.nodes
    a.store(0, 7)
    b.store(8, 5)
    a.store(64, 1)
    a.clflushopt(64)
    a.array("in", [0] * 10)
    a.dma_wait(a.dma_read(0, "in"))
    assert a.words("in") == [7, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_a_dma_polled_to_completion_is_done_once(rig):
    a, _ = rig.nodes
    a.array("out", list(range(64)))
    handle = a.dma_write(8, "out")
    polls = 0
    while not a.dma_done(handle):
        polls += 1
        assert polls <= 9
    assert [rig.device(8 + 8 * i) for i in range(64)] == list(range(64))
    with pytest.raises(NodeFailedError, match="a handle is spent once it is complete"):
        a.dma_done(handle)


def test_a_dma_keeps_its_words_alive_until_it_is_complete_and_no_longer(shared):
    memory = shared.pod.memory(0)
    words = np.arange(512)
    before = sys.getrefcount(words)
    handles = [memory.dma_write(0, words), memory.dma_write(4096, np.arange(512) + 7)]
    assert sys.getrefcount(words) == before + 1
    for handle in handles:
        memory.dma_wait(handle)
    assert sys.getrefcount(words) == before
    assert shared.pod.device[512:1024].tolist() == list(range(7, 519))


def test_more_dma_in_flight_than_there_are_places_are_refused(shared):
    memory = shared.pod.memory(0)
    handles = [memory.dma_write(0, np.ones(1, dtype=np.int64)) for _ in range(DMA_SLOTS)]
    with pytest.raises(PodDmaError, match="wait for one before the next"):
        memory.dma_write(0, np.ones(1, dtype=np.int64))
    for handle in handles:
        memory.dma_wait(handle)


@pytest.mark.parametrize("words", [np.zeros(4), np.zeros((2, 2), dtype=np.int64), [1, 2]])
def test_a_dma_of_anything_but_words_is_refused(shared, words):
    with pytest.raises(TypingError, match="one-dimensional int64 array"):
        shared.pod.memory(0).dma_read(0, words)


def test_a_dma_costs_the_time_that_the_device_takes(forker):
    with Rig(forker, nodes=1, costs=DeviceCosts(line_ps=2_000_000)) as rig:
        (a,) = rig.nodes
        a.array("out", [1] * 800)
        begin = a.now()
        a.dma_wait(a.dma_write(0, "out"))
        assert a.now() - begin >= 100 * 2000


def test_what_misses_or_flushes_takes_the_devices_time_and_a_hit_does_not(forker):
    with Rig(forker, nodes=1, costs=DeviceCosts(fill_ns=2_000_000, flush_ns=3_000_000)) as rig:
        memory = rig.pod.memory(0)
        for operation, least_ns in ((memory.load, 2_000_000), (memory.clflush, 3_000_000)):
            begin = memory.now()
            operation(0)
            assert memory.now() - begin >= least_ns
        memory.load(0)
        assert min(timed(memory, 0) for _ in range(20)) < 2_000_000


def timed(memory, off):
    begin = memory.now()
    memory.load(off)
    return memory.now() - begin


# Local memory, arguments


def test_local_words_belong_to_one_node(rig):
    a, b = rig.nodes
    a.local_store(3, 7)
    assert (a.local_cas(3, 7, 8), a.local_cas(3, 7, 9), a.local_add(3, 1), a.local_load(3)) == (
        7,
        8,
        8,
        9,
    )
    assert b.local_load(3) == 0


def test_offset_zero_and_the_last_word_are_ordinary(rig):
    a, _ = rig.nodes
    last = rig.pod.shape.region_bytes - 8
    a.store(0, -1)
    a.store(last, -(2**63))
    assert (a.load(0), a.load(last)) == (-1, -(2**63))


@pytest.mark.parametrize(
    ("operation", "arguments", "why"),
    [
        ("load", (-8,), "outside the region"),
        ("load", (1 << 14,), "outside the region"),
        ("store", ((1 << 14) - 4, 1), "not aligned"),
        ("load", (4,), "not aligned"),
        ("clflush", (1 << 14,), "outside the region"),
        ("ntstore", (1, 1), "not aligned"),
        ("local_load", (4096,), "no local word"),
        ("local_lock", (-1,), "no local lock"),
    ],
)
def test_a_word_that_is_not_there_is_refused(shared, operation, arguments, why):
    with pytest.raises(PodAddressError, match=why):
        getattr(shared.pod.memory(0), operation)(*arguments)


def test_a_dma_beyond_the_region_is_refused_and_writes_nothing(rig):
    before = rig.pod.device.copy()
    with pytest.raises(PodAddressError, match="not all inside"):
        rig.pod.memory(0).dma_write((1 << 14) - 8, np.array([1, 2]))
    assert (rig.pod.device == before).all()
    with pytest.raises(PodDmaError, match="no DMA in flight"):
        rig.pod.memory(0).dma_wait(0)


# The whole, against a model


class Model:
    """The memory model in a page of Python: what two nodes and a device may show."""

    def __init__(self):
        self.device = [0] * 32
        self.cache = [{}, {}]
        self.dirty = [set(), set()]
        self.posted = [[], []]

    def view(self, n, line):
        words = self.device[line * 8 : line * 8 + 8]
        for where, image in self.posted[n]:
            if where == line:
                words = [old if new is None else new for old, new in zip(words, image, strict=True)]
        return words

    def fill(self, n, line):
        if line not in self.cache[n]:
            self.cache[n][line] = self.view(n, line)
        return self.cache[n][line]

    def land(self, n, line=None):
        kept = []
        for where, image in self.posted[n]:
            if line in (None, where):
                for word, new in enumerate(image):
                    if new is not None:
                        self.device[where * 8 + word] = new
            else:
                kept.append((where, image))
        self.posted[n] = kept

    def give_up(self, n, line, *, drop=True):
        if line in self.dirty[n]:
            self.dirty[n].remove(line)
            self.posted[n].append((line, list(self.cache[n][line])))
        if drop:
            self.cache[n].pop(line, None)

    def do(self, n, operation, word, value):
        line = word // 8
        if operation == "load":
            return self.fill(n, line)[word % 8]
        if operation == "store":
            self.fill(n, line)[word % 8] = value
            self.dirty[n].add(line)
        elif operation == "clflush":
            self.land(n, line)
            self.give_up(n, line)
            self.land(n, line)
        elif operation in ("clflushopt", "clwb"):
            self.give_up(n, line, drop=operation == "clflushopt")
        elif operation == "ntstore":
            self.give_up(n, line)
            self.posted[n].append((line, [value if at == word % 8 else None for at in range(8)]))
        else:
            self.land(n)
        return None


OPERATIONS = ["load", "store", "clflush", "clflushopt", "clwb", "ntstore", "settle"]
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(OPERATIONS), st.integers(0, 31)), max_size=60
)


@settings(max_examples=150)
@given(steps=STEPS)
def test_any_sequence_of_operations_does_what_the_model_says(shared, steps):
    for node in range(2):
        shared.pod.fence(node)
    shared.pod.device[:] = 0
    model = Model()
    for value, (node, operation, word) in enumerate(steps, start=1):
        memory = shared.pod.memory(node)
        expected = model.do(node, operation, word, value)
        if operation == "settle":
            shared.pod.settle(node)
        elif operation in ("store", "ntstore"):
            getattr(memory, operation)(8 * word, value)
        else:
            assert getattr(memory, operation)(8 * word) == expected
        assert shared.pod.device[:32].tolist() == model.device
