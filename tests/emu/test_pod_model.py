"""The table of the memory model: every row is seen to have its effect."""

from __future__ import annotations

import pytest

from cxlbench.emu.pod_model import BY_DMA, LOST
from tests.emu.pod_pair import Pair, a_read, a_store, a_write


@pytest.fixture
def pair():
    return Pair()


def test_a_load_keeps_seeing_the_copy_however_old_it_is(pair):
    assert pair.load(1, 0) == 0
    pair.store(0, 0, 5)
    pair.nodes[0].clflush(0)
    assert pair.held(0) == 5
    assert pair.load(1, 0) == 0


def test_a_load_of_an_absent_line_takes_the_device(pair):
    pair.load(1, 0)
    pair.store(0, 0, 5)
    pair.nodes[0].clflush(0)
    pair.nodes[1].clflush(0)
    assert pair.load(1, 0) == 5


def test_a_store_stays_in_the_cache(pair):
    pair.store(0, 0, 5)
    assert pair.load(0, 0) == 5
    assert pair.held(0) == 0
    assert pair.load(1, 0) == 0


def test_a_store_fills_its_line_first(pair):
    pair.store(0, 3, 5)
    pair.nodes[0].clflush(0)
    pair.store(1, 0, 6)
    assert pair.load(1, 3) == 5
    assert pair.seen.fills == [(0, 0), (1, 0)]


def test_clflush_writes_the_whole_line_over_a_neighbours_word(pair):
    pair.load(1, 0)
    pair.store(0, 0, 5)
    pair.nodes[0].clflush(0)
    pair.store(1, 1, 6)  # on the copy from before
    pair.nodes[1].clflush(0)
    assert (pair.held(0), pair.held(1)) == (0, 6)


def test_clflush_of_a_clean_line_lands_nothing(pair):
    pair.load(0, 0)
    pair.nodes[0].clflush(0)
    assert pair.seen.landings == []
    assert not pair.nodes[0].lines


def test_clflush_lands_earlier_write_backs_of_its_line_in_order(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clwb(0)
    pair.store(0, 1, 6)
    pair.nodes[0].clwb(0)
    pair.store(0, 2, 7)
    pair.store(0, 8, 9)
    pair.nodes[0].clwb(1)
    pair.nodes[0].clflush(0)
    assert [stores for _, _, stores, _ in pair.seen.landings] == [[5], [6], [7]]
    assert list(pair.nodes[0].posted) == [1]


def test_clflush_waits_for_write_backs_in_flight_even_without_a_copy(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clflushopt(0)
    pair.nodes[0].clflush(0)
    assert pair.held(0) == 5


@pytest.mark.parametrize("flush", ["clflushopt", "clwb", "evict"])
def test_a_posted_flush_has_not_landed(pair, flush):
    pair.store(0, 0, 5)
    getattr(pair.nodes[0], flush)(0)
    assert pair.held(0) == 0
    assert pair.load(1, 0) == 0
    pair.nodes[0].land(0)
    assert pair.held(0) == 5


@pytest.mark.parametrize(("flush", "kept"), [("clflushopt", False), ("clwb", True)])
def test_clwb_keeps_the_copy_and_clflushopt_does_not(pair, flush, kept):
    pair.store(0, 0, 5)
    getattr(pair.nodes[0], flush)(0)
    assert (0 in pair.nodes[0].lines) is kept
    assert 0 not in pair.nodes[0].dirty


def test_a_posted_write_back_carries_the_line_as_it_was_when_posted(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clwb(0)
    pair.store(0, 0, 6)
    pair.nodes[0].land(0)
    assert pair.held(0) == 5


def test_write_backs_of_one_line_land_in_posting_order(pair):
    for value in (5, 6):
        pair.store(0, 0, value)
        pair.nodes[0].clflushopt(0)
    pair.nodes[0].land(0)
    assert pair.held(0) == 5
    pair.nodes[0].land(0)
    assert pair.held(0) == 6
    assert not pair.nodes[0].land(0)


def test_write_backs_of_two_lines_land_in_any_order(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clflushopt(0)
    pair.store(0, 8, 6)
    pair.nodes[0].clflushopt(1)
    pair.nodes[0].land(1)
    assert (pair.held(0), pair.held(8)) == (0, 6)


def test_a_node_sees_its_own_write_backs_in_flight(pair):  # W12 sst#2708
    pair.store(0, 0, 5)
    pair.nodes[0].evict(0)
    assert pair.load(0, 0) == 5
    assert pair.held(0) == 0
    assert pair.load(1, 0) == 0


def test_a_node_sees_the_newest_of_its_write_backs_in_flight(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clflushopt(0)
    pair.nodes[0].ntstore(1, a_store(6))
    pair.store(0, 0, 7)
    pair.nodes[0].clflushopt(0)
    assert [pair.load(0, word) for word in (0, 1)] == [7, 6]


def test_ntstore_carries_one_word_past_the_cache(pair):
    pair.load(0, 0)
    pair.store(1, 1, 6)
    pair.nodes[1].clflush(0)
    assert pair.nodes[0].ntstore(0, a_store(5))
    assert 0 not in pair.nodes[0].lines
    assert pair.held(0) == 0
    pair.nodes[0].land(0)
    assert (pair.held(0), pair.held(1)) == (5, 6)


def test_ntstore_posts_the_dirty_line_before_the_word(pair):
    pair.store(0, 1, 4)
    pair.nodes[0].ntstore(0, a_store(5))
    pair.nodes[0].land(0)
    assert (pair.held(0), pair.held(1)) == (0, 4)
    pair.nodes[0].land(0)
    assert (pair.held(0), pair.held(1)) == (5, 4)


def test_an_evicted_dirty_line_queues_behind_posted_ones(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].clwb(0)
    pair.store(0, 0, 6)
    pair.nodes[0].evict(0)
    pair.nodes[0].land(0)
    assert pair.held(0) == 5
    pair.nodes[0].drain(0)
    assert pair.held(0) == 6


def test_an_eviction_of_a_clean_line_only_drops_it(pair):
    pair.load(0, 0)
    assert pair.nodes[0].evict(0)
    assert not pair.nodes[0].posted
    assert not pair.nodes[0].evict(0)


def test_a_speculative_fill_makes_later_loads_old(pair):
    pair.nodes[1].fill(0)
    pair.store(0, 0, 5)
    pair.nodes[0].clflush(0)
    assert pair.load(1, 0) == 0


def test_a_fill_does_not_replace_a_copy(pair):
    pair.store(0, 0, 5)
    pair.nodes[0].fill(0)
    assert pair.load(0, 0) == 5


# DMA


def test_a_dma_write_lands_line_by_line_in_any_order(pair):
    dma = a_write(pair.nodes[0], 6, range(1, 13))
    assert [piece[:2] for piece in dma.pieces] == [(0, 6), (1, 0), (2, 0)]
    dma.copy(1)
    assert [pair.held(word) for word in (6, 8, 15, 16)] == [0, 3, 10, 0]
    dma.copy(0)
    dma.copy(2)
    assert [pair.held(word) for word in range(5, 19)] == [0, *range(1, 13), 0]
    assert not dma.left


def test_a_dma_write_drops_the_nodes_own_copy_and_lands_what_it_had(pair):
    pair.store(0, 7, 9)
    pair.nodes[0].clwb(0)
    pair.store(0, 6, 8)
    dma = a_write(pair.nodes[0], 0, [1])
    assert dma.copy(0)
    assert [pair.load(0, word) for word in (0, 6, 7)] == [1, 8, 9]
    assert not pair.nodes[0].posted


def test_a_dma_write_does_not_reach_another_nodes_copy(pair):
    pair.load(1, 0)
    a_write(pair.nodes[0], 0, [1]).copy(0)
    assert pair.load(1, 0) == 0


def test_a_dma_read_sees_the_nodes_own_cache(pair):
    pair.store(0, 0, 5)
    dma = a_read(pair.nodes[0], 0, 2)
    dma.copy(0)
    assert [stored.value for stored in dma.got] == [5, 0]


def test_a_dma_read_sees_an_old_copy_of_its_node_and_not_the_device(pair):
    pair.load(1, 0)
    pair.store(0, 0, 5)
    pair.nodes[0].clflush(0)
    dma = a_read(pair.nodes[1], 0, 1)
    dma.copy(0)
    assert dma.got[0].value == 0


def test_a_dma_read_fills_no_cache(pair):
    a_read(pair.nodes[0], 0, 8).copy(0)
    assert not pair.nodes[0].lines


def test_a_dma_takes_its_words_when_they_are_copied(pair):
    dma = a_write(pair.nodes[0], 0, [1] * 16)
    dma.copy(0)
    dma.words[:] = 2
    dma.copy(1)
    assert (pair.held(0), pair.held(8)) == (1, 2)


def test_a_cut_dma_loses_what_was_not_copied(pair):
    dma = a_write(pair.nodes[0], 0, [1] * 16)
    dma.copy(1)
    dma.cut()
    assert [dma.stores[index].how for index in (0, 8)] == [LOST, BY_DMA]


# A crash


def test_a_crash_loses_dirty_lines(pair):
    pair.store(0, 0, 5)
    lost = pair.nodes[0].die(0)
    assert [stored.value for stored in lost] == [5]
    assert (pair.held(0), pair.load(0, 0)) == (0, 0)


@pytest.mark.parametrize("survivors", range(4))
def test_each_write_back_in_flight_survives_a_crash_or_not(pair, survivors):
    for word, value in ((0, 5), (8, 6)):
        pair.store(0, word, value)
        pair.nodes[0].clflushopt(word >> 3)
    lost = pair.nodes[0].die(survivors)
    assert pair.held(0) == (5 if survivors & 1 else 0)
    assert pair.held(8) == (6 if survivors & 2 else 0)
    assert len(lost) == 2 - survivors.bit_count()
    assert all(stored.how == LOST for stored in lost)


def test_of_two_words_in_flight_to_one_line_the_later_may_survive_alone(pair):
    pair.nodes[0].ntstore(0, a_store(5))
    pair.nodes[0].ntstore(1, a_store(6))
    pair.nodes[0].die(2)
    assert (pair.held(0), pair.held(1)) == (0, 6)


def test_the_device_tells_whether_somebody_else_changed_the_line(pair):
    pair.store(0, 0, 5)
    pair.store(1, 1, 6)
    pair.nodes[0].clflush(0)
    pair.nodes[1].clflush(0)
    assert [untouched for *_, untouched in pair.seen.landings] == [True, False]
