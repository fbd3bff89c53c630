"""The prefix index against a dictionary: load, wrap-around, tombstones, generations, full."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cxlbench.tract.codes import EXISTS, NOBODY, OK, TABLE_FULL
from cxlbench.tract.index import (
    EMPTY,
    GENERATION_MASK,
    PENDING,
    READY,
    TIDY_LIMIT,
    TOMBSTONE,
    confirm,
    entry_at,
    find_place,
    home_of,
    is_pending,
    make_tag,
    mark_ready,
    mark_removed,
    probe,
    tag_generation,
    tag_owner,
    tag_state,
    tidy,
    write_pending,
)
from cxlbench.tract.layout import Sizes
from cxlbench.tract.repair import sweep
from tests.tract.plain import PlainMemory, PlainPod

Key = tuple[int, int, int, int]
BLOCK, LENGTH_BYTES = 640, 64


def key(number: int, home: int) -> Key:
    return home, number, -number, -(2**63) + number


class Table:
    """The index alone, on plain memory."""

    def __init__(self, slots: int) -> None:
        pod = PlainPod(Sizes(nodes=1, slots=slots, chunks=1, chunk_bytes=64))
        self.mem: PlainMemory = pod.nodes[0]
        self.layout = pod.layout

    def insert(self, k: Key) -> tuple[int, int, int]:
        code, slot = find_place(self.mem, self.layout, *k)
        if code != OK:
            return code, slot, 0
        generation = write_pending(self.mem, self.layout, slot, 3, *k, BLOCK, LENGTH_BYTES)
        return OK, slot, generation

    def insert_ready(self, k: Key) -> tuple[int, int, int]:
        code, slot, generation = self.insert(k)
        if code == OK:
            mark_ready(self.mem, self.layout, slot, 3, generation, 17)
        return code, slot, generation

    def remove(self, slot: int) -> None:
        mark_removed(self.mem, self.layout, slot)
        tidy(self.mem, self.layout, slot)

    def probe(self, k: Key) -> tuple[int, int]:
        slot, generation, looked = probe(self.mem, self.layout, *k)
        assert looked <= self.layout.slots
        return slot, generation

    def tag(self, slot: int) -> int:
        return self.mem.load(entry_at(self.layout, slot))

    def states(self) -> list[int]:
        return [tag_state(self.tag(slot)) for slot in range(self.layout.slots)]

    def needless_tombstones(self) -> list[int]:
        """Tombstones over which no live entry's probe path runs, by definition."""
        states, needed = self.states(), set()
        for slot, state in enumerate(states):
            if state in (PENDING, READY):
                at = home_of(self.layout, self.mem.load(entry_at(self.layout, slot) + 8))
                while at != slot:
                    needed.add(at)
                    at = (at + 1) % self.layout.slots
        return [s for s, state in enumerate(states) if state == TOMBSTONE and s not in needed]


class IndexMachine(RuleBasedStateMachine):
    """Any order of reservations, publications and removals, at any load up to a full table."""

    SLOTS = 20

    @initialize(
        homes=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=3),
        generation=st.sampled_from([0, GENERATION_MASK - 2]),
    )
    def begin(self, homes: list[int], generation: int) -> None:
        self.table = Table(self.SLOTS)
        self.homes = homes
        for slot in range(self.SLOTS):
            self.table.mem.store(entry_at(self.table.layout, slot), make_tag(EMPTY, 0, generation))
        self.live: dict[Key, tuple[int, int, bool]] = {}
        self.reserved = 0
        self.base = generation

    def key(self, number: int) -> Key:
        return key(number, self.homes[number % len(self.homes)] + self.SLOTS * (number % 2))

    def fill(self, numbers: range) -> None:
        for number in numbers:
            if len(self.live) < self.SLOTS:
                self.reserve(number)

    @rule(number=st.integers(0, 29))
    def reserve(self, number: int) -> None:
        k = self.key(number)
        code, slot, generation = self.table.insert(k)
        if k in self.live:
            assert (code, slot) == (EXISTS, self.live[k][0])
        elif len(self.live) == self.SLOTS:
            assert code == TABLE_FULL
        else:
            assert code == OK
            assert is_pending(self.table.mem, self.table.layout, slot, 3, generation)
            self.live[k] = slot, generation, False

    @rule(start=st.integers(0, 29))
    def fill_to_95_percent(self, start: int) -> None:
        for number in range(start, start + 30):
            if len(self.live) < self.SLOTS * 95 // 100:
                self.reserve(number % 30)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        k = data.draw(st.sampled_from(sorted(self.live)))
        slot, generation, _ = self.live[k]
        mark_ready(self.table.mem, self.table.layout, slot, 3, generation, 17)
        self.live[k] = slot, generation, True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        k = data.draw(st.sampled_from(sorted(self.live)))
        slot, generation, _ = self.live.pop(k)
        self.table.remove(slot)
        assert not confirm(self.table.mem, self.table.layout, slot, generation, *k)
        assert tag_generation(self.table.tag(slot)) == generation

    @rule()
    def sweeping_finds_nothing_to_do(self) -> None:
        if EMPTY in self.table.states():
            assert sweep(self.table.mem, self.table.layout) == 0

    @invariant()
    def lookups_are_those_of_a_dictionary(self) -> None:
        if not hasattr(self, "table"):
            return
        for number in range(30):
            k = self.key(number)
            slot, generation = self.table.probe(k)
            if k in self.live and self.live[k][2]:
                assert (slot, generation) == self.live[k][:2]
                assert confirm(self.table.mem, self.table.layout, slot, generation, *k)
            else:
                assert slot == NOBODY

    @invariant()
    def no_tombstone_is_needless(self) -> None:
        if hasattr(self, "table") and EMPTY in self.table.states():
            assert self.table.needless_tombstones() == []


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase


def test_an_absent_key_in_a_full_table_ends_the_probe() -> None:
    table = Table(7)
    for number in range(7):
        assert table.insert_ready(key(number, 3))[0] == OK
    assert probe(table.mem, table.layout, *key(9, 3)) == (NOBODY, 0, 7)
    assert table.insert(key(9, 3))[0] == TABLE_FULL


def test_a_probe_wraps_around_the_end() -> None:
    table = Table(5)
    slots = [table.insert_ready(key(number, 4))[1] for number in range(3)]
    assert slots == [4, 0, 1]
    assert [table.probe(key(number, 4))[0] for number in range(3)] == slots


def test_a_pending_entry_is_not_found_but_not_reserved_twice() -> None:
    table = Table(5)
    table.insert(key(1, 0))
    assert table.probe(key(1, 0))[0] == NOBODY
    assert table.insert(key(1, 0))[0] == EXISTS


def test_a_probe_stores_nothing() -> None:
    table = Table(5)
    table.insert_ready(key(1, 0))
    table.mem.stored.clear()
    table.probe(key(1, 0))
    table.probe(key(2, 0))
    assert table.mem.stored == []


def test_a_probe_invalidates_every_line_it_reads() -> None:
    table = Table(9)
    for number in range(4):
        table.insert_ready(key(number, 0))
    table.mem.flushes = 0
    assert probe(table.mem, table.layout, *key(3, 0))[2] == 4
    assert table.mem.flushes == 4


def test_a_tag_is_stored_after_everything_else_of_its_entry() -> None:
    table = Table(3)
    table.mem.stored.clear()
    _, slot, generation = table.insert(key(1, 0))
    assert table.mem.stored[-1] == entry_at(table.layout, slot)
    mark_ready(table.mem, table.layout, slot, 3, generation, 17)
    assert table.mem.stored[-1] == entry_at(table.layout, slot)


def test_a_reused_slot_has_another_generation() -> None:
    table = Table(3)
    _, slot, first = table.insert_ready(key(1, 0))
    table.remove(slot)
    _, again, second = table.insert_ready(key(1, 0))
    assert (again, second) == (slot, first + 1)
    assert not confirm(table.mem, table.layout, slot, first, *key(1, 0))


def test_the_generation_wraps_to_zero() -> None:
    table = Table(1)
    table.mem.store(entry_at(table.layout, 0), make_tag(EMPTY, 0, GENERATION_MASK))
    _, slot, generation = table.insert_ready(key(1, 0))
    assert generation == 0
    assert table.probe(key(1, 0)) == (slot, 0)


def test_a_long_cluster_keeps_its_tombstones_until_a_sweep() -> None:
    table = Table(2 * TIDY_LIMIT)
    slots = [table.insert_ready(key(number, 0))[1] for number in range(TIDY_LIMIT + 10)]
    for slot in reversed(slots[5:]):
        mark_removed(table.mem, table.layout, slot)
    assert tidy(table.mem, table.layout, slots[5]) == 0
    assert sweep(table.mem, table.layout) == TIDY_LIMIT + 5
    assert table.states().count(READY) == 5
    assert table.states().count(TOMBSTONE) == 0


@pytest.mark.parametrize("owner", [0, 255])
@pytest.mark.parametrize("generation", [0, GENERATION_MASK])
def test_a_tag_keeps_its_parts_apart(owner: int, generation: int) -> None:
    tag = make_tag(READY, owner, generation)
    assert (tag_state(tag), tag_owner(tag), tag_generation(tag)) == (READY, owner, generation)
    assert 0 < tag < 2**63
