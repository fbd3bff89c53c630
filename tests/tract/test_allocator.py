"""Bitmap and heaps: no chunk twice, none lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cxlbench.tract.bitmap import count_taken, is_taken, mark_run, take_from_word, take_run
from cxlbench.tract.codes import NOBODY
from cxlbench.tract.heap import free_chunk, heap_pop, heap_push, held_chunks, refill, trim
from cxlbench.tract.layout import Sizes
from cxlbench.tract.membership import next_epoch, read_epoch
from cxlbench.tract.repair import mend_bitmap
from tests.tract.plain import PlainPod


def pod_of(chunks: int, *, nodes: int = 3, heap_batch: int = 4) -> PlainPod:
    return PlainPod(
        Sizes(nodes=nodes, slots=2, chunks=chunks, chunk_bytes=64, heap_batch=heap_batch)
    )


class AllocatorMachine(RuleBasedStateMachine):
    """Three nodes take and give single chunks by their heaps and runs by the bitmap."""

    @initialize(chunks=st.integers(1, 75), heap_batch=st.integers(1, 9))
    def begin(self, chunks: int, heap_batch: int) -> None:
        self.pod = pod_of(chunks, heap_batch=heap_batch)
        self.lay = self.pod.layout
        self.used: list[tuple[int, int]] = []

    def taken(self) -> set[int]:
        return {c for first, n in self.used for c in range(first, first + n)}

    @rule(node=st.integers(0, 2), wanted=st.integers(1, 12))
    def fill_heap(self, node: int, wanted: int) -> None:
        mem = self.pod.nodes[node]
        free = self.lay.chunks - count_taken(mem, self.lay)
        before = held_chunks(mem, self.lay)
        goal = min(max(wanted, self.lay.heap_batch), self.lay.heap_capacity)
        expected = before if before >= wanted else min(before + free, goal)
        assert refill(mem, self.lay, wanted) == expected == held_chunks(mem, self.lay)

    @rule(node=st.integers(0, 2))
    def pop(self, node: int) -> None:
        mem = self.pod.nodes[node]
        held = held_chunks(mem, self.lay)
        chunk = heap_pop(mem, 0)
        if held == 0:
            assert chunk == NOBODY
        else:
            assert chunk not in self.taken()
            assert is_taken(mem, self.lay, chunk)
            self.used.append((chunk, 1))

    @precondition(lambda self: any(n == 1 for _, n in self.used))
    @rule(node=st.integers(0, 2), data=st.data())
    def push(self, node: int, data: st.DataObject) -> None:
        mem = self.pod.nodes[node]
        one = data.draw(st.sampled_from([u for u in self.used if u[1] == 1]))
        fits = held_chunks(mem, self.lay) < self.lay.heap_capacity
        assert heap_push(mem, self.lay, 0, one[0]) is fits
        if fits:
            self.used.remove(one)

    @rule(node=st.integers(0, 2), length=st.integers(1, 40))
    def take(self, node: int, length: int) -> None:
        mem = self.pod.nodes[node]
        bits = [is_taken(mem, self.lay, c) for c in range(self.lay.chunks)]
        runs = range(self.lay.chunks - length + 1)
        expected = next((c for c in runs if not any(bits[c : c + length])), NOBODY)
        assert take_run(mem, self.lay, length) == expected
        if expected != NOBODY:
            self.used.append((expected, length))

    @precondition(lambda self: self.used)
    @rule(node=st.integers(0, 2), data=st.data())
    def give(self, node: int, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.used))
        self.used.remove(run)
        mark_run(self.pod.nodes[node], self.lay, *run, False)

    @rule(node=st.integers(0, 2), keep=st.integers(0, 5))
    def give_back(self, node: int, keep: int) -> None:
        mem = self.pod.nodes[node]
        before = held_chunks(mem, self.lay)
        trim(mem, self.lay, keep)
        assert held_chunks(mem, self.lay) == min(before, keep)

    @invariant()
    def every_chunk_is_free_or_used_or_held_once(self) -> None:
        if not hasattr(self, "pod"):
            return
        mem = self.pod.nodes[0]
        held = sum(held_chunks(node, self.lay) for node in self.pod.nodes)
        assert count_taken(mem, self.lay) == len(self.taken()) + held
        assert len(self.taken()) == sum(n for _, n in self.used)
        assert all(is_taken(mem, self.lay, chunk) for chunk in self.taken())
        assert self.pod.lock_free()


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.integers(1, 70), st.integers(0, 40))
def test_bits_beyond_the_last_chunk_are_never_given(chunks: int, wanted: int) -> None:
    pod = pod_of(chunks)
    last = pod.layout.bitmap_words - 1
    found = take_from_word(pod.nodes[0], pod.layout, last, wanted)
    in_last = chunks - 32 * last
    assert found == (1 << min(wanted, in_last)) - 1


def test_one_store_takes_a_whole_batch() -> None:
    pod = pod_of(32, heap_batch=8)
    mem = pod.nodes[0]
    mem.stored.clear()
    refill(mem, pod.layout, 1)
    bitmap = range(pod.layout.bitmap_at, pod.layout.lru_at)
    assert len([off for off in mem.stored if off in bitmap]) == 1
    assert held_chunks(mem, pod.layout) == 8


def test_a_heap_of_an_older_epoch_is_empty() -> None:
    pod = pod_of(16)
    mem = pod.nodes[0]
    refill(mem, pod.layout, 4)
    next_epoch(mem, pod.layout)
    mend_bitmap(mem, pod.layout, np.zeros(pod.layout.bitmap_words, np.int64))
    assert held_chunks(mem, pod.layout) == 0
    assert heap_pop(mem, read_epoch(mem, pod.layout)) == NOBODY
    assert count_taken(mem, pod.layout) == 0


def test_a_chunk_of_an_older_epoch_is_not_freed_again() -> None:
    pod = pod_of(16)
    mem, other = pod.nodes[0], pod.nodes[1]
    refill(mem, pod.layout, 1)
    chunk = heap_pop(mem, 0)
    next_epoch(other, pod.layout)
    mend_bitmap(other, pod.layout, np.zeros(pod.layout.bitmap_words, np.int64))
    assert take_run(other, pod.layout, chunk + 1) == 0
    free_chunk(mem, pod.layout, 0, chunk)
    assert is_taken(other, pod.layout, chunk)


def test_nodes_search_from_where_they_found_last() -> None:
    pod = pod_of(96, heap_batch=32)
    mem = pod.nodes[0]
    refill(mem, pod.layout, 32)
    refill(mem, pod.layout, 64)
    mem.stored.clear()
    refill(mem, pod.layout, 96)
    assert held_chunks(mem, pod.layout) == 96
