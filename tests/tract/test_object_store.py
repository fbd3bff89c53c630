"""Named objects: put, get, delete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from cxlbench.tract.client import ObjectStore, StoredObject, name_words
from cxlbench.tract.codes import STALE
from cxlbench.tract.errors import (
    NameExistsError,
    NameNotFoundError,
    ObjectTooLargeError,
    OutOfSpaceError,
    RootNameError,
)
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import refill
from cxlbench.tract.layout import Sizes
from cxlbench.tract.membership import next_epoch
from cxlbench.tract.object_store import put
from cxlbench.tract.repair import drop_entries, mend_bitmap
from tests.tract.plain import PlainMemory, PlainPod


class Stores:
    def __init__(self, *, roots: int = 4, chunks: int = 8) -> None:
        self.pod = PlainPod(Sizes(nodes=2, slots=2, chunks=chunks, chunk_bytes=64, roots=roots))
        self.layout = self.pod.layout
        self.views = [ObjectStore(mem, self.layout) for mem in self.pod.nodes]

    def check(self) -> None:
        report = fsck(self.pod.nodes[0], self.layout, in_heaps=0)
        assert report.problems == ()
        assert self.pod.lock_free()


def words(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_an_object_is_found_by_name_on_every_node() -> None:
    stores = Stores()
    placed = stores.views[0].put("table", words(1, 2, 3))
    assert placed == StoredObject("table", stores.layout.pool_at, 24)
    assert stores.views[1].get("table") == placed
    assert stores.views[1].read("table").tolist() == [1, 2, 3]


def test_an_object_can_use_what_this_nodes_heap_holds() -> None:
    stores = Stores()
    refill(stores.pod.nodes[0], stores.layout, 8)
    with pytest.raises(OutOfSpaceError):
        stores.views[1].put("a", words(1))
    assert stores.views[0].put("a", words(1)).length == 8
    stores.check()


def test_an_object_may_span_chunks() -> None:
    stores = Stores()
    stores.views[0].put("long", np.arange(60, dtype=np.int64))
    assert stores.views[1].read("long").tolist() == list(range(60))
    assert fsck(stores.pod.nodes[0], stores.layout).used == 8
    stores.views[1].delete("long")
    assert fsck(stores.pod.nodes[0], stores.layout).free == 8


@pytest.mark.parametrize("name", ["", "x" * 33, "é" * 17, "a\0b"])
def test_names_that_cannot_be_are_refused_and_nothing_is_stored(name: str) -> None:
    stores = Stores()
    stores.pod.nodes[0].stored.clear()
    for call in (stores.views[0].get, stores.views[0].delete, stores.views[0].read):
        with pytest.raises(RootNameError, match="1 to 32"):
            call(name)
    with pytest.raises(RootNameError):
        stores.views[0].put(name, words(1))
    assert stores.pod.nodes[0].stored == []


def test_the_longest_name_is_a_name() -> None:
    stores = Stores()
    stores.views[0].put("x" * 32, words(1))
    assert stores.views[0].read("x" * 32).tolist() == [1]
    assert name_words("x") != name_words("xx")


def test_a_name_is_not_given_twice() -> None:
    stores = Stores()
    stores.views[0].put("a", words(1))
    with pytest.raises(NameExistsError, match="delete it first"):
        stores.views[1].put("a", words(2))
    assert stores.views[1].read("a").tolist() == [1]
    stores.check()


def test_what_is_absent_is_told() -> None:
    stores = Stores()
    for call in (stores.views[0].get, stores.views[0].delete, stores.views[0].read):
        with pytest.raises(NameNotFoundError, match="no object 'a'"):
            call("a")


@pytest.mark.parametrize("length", [0, 65])
def test_an_object_larger_than_the_pool_or_empty_is_refused(length: int) -> None:
    stores = Stores()
    stores.pod.nodes[0].stored.clear()
    with pytest.raises(ObjectTooLargeError, match="8 to 512"):
        stores.views[0].put("a", np.zeros(length, np.int64))
    assert stores.pod.nodes[0].stored == []


def test_no_run_of_free_chunks_is_told_and_nothing_is_lost() -> None:
    stores = Stores()
    for name in "abcd":
        stores.views[0].put(name, np.zeros(16, np.int64))
    stores.views[0].delete("b")
    stores.views[0].delete("d")
    with pytest.raises(OutOfSpaceError, match="adjacent"):
        stores.views[0].put("e", np.zeros(17, np.int64))
    stores.check()
    assert stores.views[0].put("e", np.zeros(16, np.int64)).length == 128


def test_no_free_root_is_told_and_its_chunks_are_free_again() -> None:
    stores = Stores(roots=2)
    stores.views[0].put("a", words(1))
    stores.views[0].put("b", words(1))
    with pytest.raises(OutOfSpaceError, match="all 2 roots"):
        stores.views[0].put("c", words(1))
    stores.check()


def test_a_put_between_whose_sections_a_recovery_came_stores_nothing() -> None:
    stores = Stores()
    mem, other = stores.pod.nodes
    between = iter((stores.pod.arbitrate, stores.pod.arbitrate))

    def pause() -> None:
        if next(between, None) is None:
            mem.on_pause = stores.pod.arbitrate
            next_epoch(other, stores.layout)
            used = np.zeros(stores.layout.bitmap_words, np.int64)
            drop_entries(other, stores.layout, stores.pod.standing, used)
            mend_bitmap(other, stores.layout, used)
        stores.pod.arbitrate()

    mem.on_pause = pause
    assert put(mem, stores.layout, *name_words("a"), words(1)) == STALE
    stores.check()
    with pytest.raises(NameNotFoundError):
        stores.views[0].get("a")


def test_an_object_is_flushed_before_its_root_is_ready() -> None:
    stores = Stores()
    order: list[tuple[str, int]] = []

    class Watched(PlainMemory):
        def store(self, off: int, value: int) -> None:
            super().store(off, value)
            order.append(("store", off))

        def clflush(self, off: int) -> None:
            order.append(("flush", off & -64))

    mem = Watched(stores.pod.words)
    mem.on_pause = stores.pod.arbitrate
    ObjectStore(mem, stores.layout).put("a", np.arange(12, dtype=np.int64))
    last = max(i for i, (what, off) in enumerate(order) if off >= stores.layout.pool_at)
    ready = max(i for i, step in enumerate(order) if step == ("store", stores.layout.roots_at))
    lines = {off for what, off in order if what == "flush" and off >= stores.layout.pool_at}
    assert last < ready
    assert lines == {stores.layout.pool_at, stores.layout.pool_at + 64}


class StoreMachine(RuleBasedStateMachine):
    """Two nodes and a dictionary."""

    @initialize(roots=st.integers(1, 5), chunks=st.integers(1, 10))
    def begin(self, roots: int, chunks: int) -> None:
        self.stores = Stores(roots=roots, chunks=chunks)
        self.model: dict[str, list[int]] = {}

    @rule(node=st.integers(0, 1), name=st.sampled_from("abcdef"), length=st.integers(1, 40))
    def put(self, node: int, name: str, length: int) -> None:
        value = [length * 100 + i for i in range(length)]
        try:
            self.stores.views[node].put(name, np.array(value, np.int64))
        except NameExistsError:
            assert name in self.model
        except (OutOfSpaceError, ObjectTooLargeError):
            full = len(self.model) == self.stores.layout.roots
            used = sum(-(-len(v) * 8 // 64) for v in self.model.values())
            assert full or used + -(-length * 8 // 64) > self.stores.layout.chunks or self.model
        else:
            assert name not in self.model
            self.model[name] = value

    @rule(node=st.integers(0, 1), name=st.sampled_from("abcdef"))
    def delete(self, node: int, name: str) -> None:
        if name in self.model:
            self.stores.views[node].delete(name)
            del self.model[name]
        else:
            with pytest.raises(NameNotFoundError):
                self.stores.views[node].delete(name)

    @invariant()
    def objects_are_those_of_the_dictionary(self) -> None:
        if hasattr(self, "stores"):
            for name, value in self.model.items():
                assert self.stores.views[1].read(name).tolist() == value
            self.stores.check()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase
