"""The LRU list against an ordered list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cxlbench.tract.layout import HEAD, TAIL, Layout, Sizes
from cxlbench.tract.lru import (
    NONE,
    PREVIOUS,
    append,
    link_of,
    next_of,
    oldest,
    slot_of_link,
    touch,
    unlink,
)
from tests.tract.plain import PlainMemory, PlainPod


def walk(mem: PlainMemory, layout: Layout) -> list[int]:
    """Return the list from its head, checking the links back."""
    found, previous, link = [], NONE, oldest(mem, layout)
    while link != NONE:
        assert mem.load(link + PREVIOUS) == previous
        found.append(slot_of_link(layout, link))
        previous, link = link, next_of(mem, link)
    assert mem.load(layout.cache_at + TAIL) == previous
    return found


class LruMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 9))
    def begin(self, slots: int) -> None:
        pod = PlainPod(Sizes(nodes=1, slots=slots, chunks=1, chunk_bytes=64))
        self.mem, self.layout = pod.nodes[0], pod.layout
        self.order: list[int] = []

    @precondition(lambda self: len(self.order) < self.layout.slots)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        absent = [s for s in range(self.layout.slots) if s not in self.order]
        slot = data.draw(st.sampled_from(absent))
        append(self.mem, self.layout, slot)
        self.order.append(slot)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.order))
        unlink(self.mem, self.layout, slot)
        self.order.remove(slot)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.order))
        touch(self.mem, self.layout, slot)
        self.order.remove(slot)
        self.order.append(slot)

    @invariant()
    def the_list_is_in_order_of_use(self) -> None:
        if hasattr(self, "mem"):
            assert walk(self.mem, self.layout) == self.order


LruMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestLruMachine = LruMachine.TestCase


def test_touching_the_newest_stores_nothing() -> None:
    pod = PlainPod(Sizes(nodes=1, slots=3, chunks=1, chunk_bytes=64))
    mem = pod.nodes[0]
    append(mem, pod.layout, 0)
    append(mem, pod.layout, 1)
    mem.stored.clear()
    touch(mem, pod.layout, 1)
    assert mem.stored == []


def test_links_are_offsets_from_the_regions_start() -> None:
    pod = PlainPod(Sizes(nodes=1, slots=3, chunks=1, chunk_bytes=64))
    append(pod.nodes[0], pod.layout, 2)
    assert pod.nodes[0].load(pod.layout.cache_at + HEAD) == pod.layout.lru_at + 2 * 16
    assert link_of(pod.layout, 2) == pod.layout.lru_at + 32


def test_the_walk_from_the_head_is_whole_after_every_store() -> None:
    """Recovery relies on it: only an entry on its way to the tail can be missing."""
    pod = PlainPod(Sizes(nodes=1, slots=5, chunks=1, chunk_bytes=64))
    mem, layout = pod.nodes[0], pod.layout
    for slot in range(5):
        append(mem, layout, slot)

    def forward() -> list[int]:
        found, link = [], oldest(mem, layout)
        while link != NONE:
            found.append(slot_of_link(layout, link))
            link = next_of(mem, link)
        return found

    class Stepped(PlainMemory):
        def store(self, off: int, value: int) -> None:
            super().store(off, value)
            states.append(forward())

    for slot in (0, 2, 4, 3):
        order = forward()
        states: list[list[int]] = []
        touch(Stepped(mem.words), layout, slot)
        without = [s for s in order if s != slot]
        assert all(state in (order, without, [*without, slot]) for state in states)
