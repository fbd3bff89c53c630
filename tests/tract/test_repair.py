"""A node dies after any store: what is repaired, what is kept, and repair that dies itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.client import ObjectStore, name_words
from cxlbench.tract.fsck import fsck, open_and_check
from cxlbench.tract.index import PENDING, entry_at, make_tag, probe, write_pending
from cxlbench.tract.layout import CACHE_LOCK, HEAD, INTERNAL_LOCKS, Layout, Sizes
from cxlbench.tract.lock import LOCKED, WAITING, acquire, slot_of
from cxlbench.tract.lru import link_of
from cxlbench.tract.membership import DEAD, GONE, read_epoch, report_dead, survey
from cxlbench.tract.object_store import put
from cxlbench.tract.pins import add_pin
from cxlbench.tract.places import PLACE_WORDS
from cxlbench.tract.prefix_cache import delete, insert_chain, lookup_chain
from cxlbench.tract.recovery import restart_region
from cxlbench.tract.repair import is_quiet, repair, sweep
from cxlbench.tract.scenario_tasks import PAYLOAD_WORDS, chain_keys, content
from tests.tract.plain import PlainMemory, PlainPod

SIZES = Sizes(
    nodes=2, slots=8, chunks=10, chunk_bytes=8 * PAYLOAD_WORDS, roots=3, evict_above=4, heap_batch=2
)


class DeadError(Exception):
    """The node dies here."""


class Mortal(PlainMemory):
    """Memory of a node that dies after so many stores to the region, DMA included."""

    def __init__(self, words: Any, node: int, stores: int) -> None:
        super().__init__(words, node)
        self.left = stores

    def store(self, off: int, value: int) -> None:
        if self.left == 0:
            raise DeadError
        self.left -= 1
        super().store(off, value)

    def dma_write(self, off: int, words: Any) -> int:
        for i in range(len(words)):
            self.store(off + 8 * i, int(words[i]))
        return 1


def inserted(mem: Any, lay: Layout, first: int, blocks: int) -> None:
    places = np.zeros((blocks, PLACE_WORDS), np.int64)
    insert_chain(mem, lay, chain_keys(first, blocks), content(first, blocks), places)


def looked_up(mem: Any, lay: Layout, first: int, blocks: int) -> None:
    lookup_chain(mem, lay, chain_keys(first, blocks), np.zeros((blocks, PLACE_WORDS), np.int64))


def an_object(mem: Any, lay: Layout) -> None:
    put(mem, lay, *name_words("object"), np.arange(24, dtype=np.int64))


OPERATIONS: dict[str, Callable[[Any, Layout], object]] = {
    "insert that evicts": lambda mem, lay: inserted(mem, lay, 6, 2),
    "lookup": lambda mem, lay: looked_up(mem, lay, 1, 2),
    "delete": lambda mem, lay: delete(mem, lay, *chain_keys(2, 1)[0].tolist()),
    "put": an_object,
    "delete of an object": lambda mem, lay: ObjectStore(mem, lay).delete("old"),
}


def filled() -> PlainPod:
    """A pod with four blocks, which is when it evicts, and an object."""
    pod = PlainPod(SIZES)
    inserted(pod.nodes[0], pod.layout, 0, 4)
    ObjectStore(pod.nodes[0], pod.layout).put("old", np.arange(5, dtype=np.int64))
    return pod


def ready(pod: PlainPod) -> set[int]:
    found = set()
    for number in range(12):
        key = chain_keys(number, 1)[0].tolist()
        if probe(pod.nodes[0], pod.layout, *key)[0] >= 0:
            found.add(number)
    return found


def die_in(pod: PlainPod, operation: str, stores: int) -> bool:
    """Let node 1 die in the operation after so many stores; False if it ended before."""
    mem = Mortal(pod.words, 1, stores)
    mem.on_pause = pod.arbitrate
    try:
        OPERATIONS[operation](mem, pod.layout)
    except DeadError:
        return True
    return False


def repaired(pod: PlainPod, mem: PlainMemory) -> None:
    standing = np.array([LIVE, DEAD], np.int64)
    repair(mem, pod.layout, standing)


def assert_sound(pod: PlainPod, before: set[int]) -> None:
    report = fsck(pod.nodes[0], pod.layout, in_heaps=0)
    assert report.problems == ()
    assert (report.pins, report.pending, report.held_locks) == (0, 0, 0)
    assert len(before - ready(pod)) <= 2  # evicted or deleted by the operation, not lost
    assert pod.lock_free()
    inserted(pod.nodes[0], pod.layout, 8, 2)
    assert ready(pod) >= {8, 9}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_death_after_any_store_is_repaired(operation: str) -> None:
    stores = 0
    while True:
        pod = filled()
        before = ready(pod)
        if not die_in(pod, operation, stores):
            break
        repaired(pod, pod.nodes[0])
        assert_sound(pod, before)
        stores += 1
    assert stores > 5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_repair_that_dies_after_any_store_is_done_again(operation: str) -> None:
    for stores in (3, 11, 17, 24, 37, 60):
        for stores_of_repair in range(0, 200, 3):
            pod = filled()
            before = ready(pod)
            if not die_in(pod, operation, stores):
                break
            repairer = Mortal(pod.words, 0, stores_of_repair)
            try:
                repaired(pod, repairer)
            except DeadError:
                successor = PlainMemory(pod.words, 0)
                repaired(pod, successor)
                assert_sound(pod, before)
            else:
                break


def test_entries_that_were_ready_and_not_evicted_are_kept() -> None:
    pod = filled()
    assert ready(pod) == {0, 1, 2, 3}
    repaired(pod, pod.nodes[0])
    assert ready(pod) == {0, 1, 2, 3}
    places = np.zeros((4, PLACE_WORDS), np.int64)
    assert lookup_chain(pod.nodes[0], pod.layout, chain_keys(0, 4), places) == 4


def test_what_live_nodes_reserved_and_pinned_stays() -> None:
    pod = filled()
    mem, lay = pod.nodes[0], pod.layout
    looked_up(mem, lay, 0, 1)
    slot = 5
    write_pending(mem, lay, slot, 0, 5, 99, 0, 0, lay.pool_at + 9 * lay.chunk_bytes, 8)
    repaired(pod, mem)
    report = fsck(mem, lay, in_heaps=0)
    assert report.problems == ()
    assert (report.pins, report.pending) == (1, 1)
    assert mem.load(entry_at(lay, slot)) == make_tag(PENDING, 0, 1)


def test_reservations_and_pins_of_the_dead_go() -> None:
    pod = filled()
    mem, lay = pod.nodes[1], pod.layout
    looked_up(mem, lay, 0, 1)
    write_pending(mem, lay, 5, 1, 5, 99, 0, 0, lay.pool_at + 9 * lay.chunk_bytes, 8)
    repaired(pod, pod.nodes[0])
    report = fsck(mem, lay, in_heaps=0)
    assert (report.problems, report.pins, report.pending, report.held) == ((), 0, 0, 0)


def test_slots_of_the_dead_become_idle_and_others_stay() -> None:
    pod = filled()
    mem, lay = pod.nodes[0], pod.layout
    mem.store(slot_of(lay, CACHE_LOCK, 1), LOCKED)
    mem.store(slot_of(lay, 0, 1), WAITING)
    mem.store(slot_of(lay, 0, 0), WAITING)
    repaired(pod, mem)
    assert [mem.load(slot_of(lay, lock, 1)) for lock in range(INTERNAL_LOCKS)] == [0, 0, 0]
    assert mem.load(slot_of(lay, 0, 0)) == WAITING


def test_repair_waits_for_live_holders_only() -> None:
    pod = filled()
    mem, lay = pod.nodes[0], pod.layout
    standing = np.array([LIVE, DEAD], np.int64)
    assert is_quiet(mem, lay, standing)
    mem.store(slot_of(lay, CACHE_LOCK, 1), LOCKED)
    assert is_quiet(mem, lay, standing)
    mem.store(slot_of(lay, CACHE_LOCK, 1), 0)
    acquire(mem, lay, CACHE_LOCK)
    assert not is_quiet(mem, lay, standing)


def test_every_repair_begins_an_epoch_and_empties_heaps() -> None:
    pod = filled()
    mem, lay = pod.nodes[0], pod.layout
    epoch = read_epoch(mem, lay)
    repaired(pod, mem)
    assert read_epoch(mem, lay) == epoch + 1
    report = fsck(mem, lay)
    assert report.held == 0
    assert report.free + report.used == report.chunks


def test_a_region_that_all_nodes_left_is_usable_again() -> None:
    pod = filled()
    mem, lay = pod.nodes[1], pod.layout
    looked_up(mem, lay, 0, 2)
    report_dead(pod.nodes[0], lay, 1)
    die_in(pod, "insert that evicts", 20)
    fresh = PlainMemory(pod.words, 0)
    report = restart_region(fresh, lay)
    assert report.problems == ()
    assert (report.pins, report.pending, report.held, report.held_locks) == (0, 0, 0, 0)
    standing = np.full(2, GONE, np.int64)
    survey(fresh, lay, standing)
    assert standing.tolist() == [LIVE, LIVE]


def damaged_tag(mem: PlainMemory, lay: Layout) -> None:
    mem.store(entry_at(lay, 0), 9)


def damaged_block(mem: PlainMemory, lay: Layout) -> None:
    mem.store(entry_at(lay, 0) + 40, lay.pool_at + 8)


def shared_block(mem: PlainMemory, lay: Layout) -> None:
    mem.store(entry_at(lay, 0) + 40, mem.load(entry_at(lay, 1) + 40))


def lost_key(mem: PlainMemory, lay: Layout) -> None:
    mem.store(entry_at(lay, 0) + 8, 5)


def torn_list(mem: PlainMemory, lay: Layout) -> None:
    mem.store(link_of(lay, 2), 0)


def short_list(mem: PlainMemory, lay: Layout) -> None:
    mem.store(lay.cache_at + HEAD, link_of(lay, 0))


def wrong_count(mem: PlainMemory, lay: Layout) -> None:
    mem.store(lay.cache_at, 7)


def lost_bit(mem: PlainMemory, lay: Layout) -> None:
    mem.store(lay.bitmap_at, 0)


def stray_pin(mem: PlainMemory, lay: Layout) -> None:
    add_pin(mem, lay, 7, 1)


def strange_slot(mem: PlainMemory, lay: Layout) -> None:
    mem.store(slot_of(lay, 0, 0), 7)


def two_holders(mem: PlainMemory, lay: Layout) -> None:
    mem.store(slot_of(lay, 0, 0), LOCKED)
    mem.store(slot_of(lay, 0, 1), LOCKED)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (damaged_tag, "no possible state"),
        (damaged_block, "no chunk of the pool"),
        (shared_block, "two entries or roots refer to"),
        (lost_key, "a probe from their home"),
        (torn_list, "LRU links"),
        (short_list, "not in the LRU list"),
        (wrong_count, "live count"),
        (lost_bit, "bitmap is not set"),
        (stray_pin, "pins that no count can be, or of entries"),
        (strange_slot, "lock slots"),
        (two_holders, "more than one holder"),
    ],
)
def test_fsck_tells_every_kind_of_damage(
    damage: Callable[[PlainMemory, Layout], None], text: str
) -> None:
    pod = filled()
    assert fsck(pod.nodes[0], pod.layout).sound
    damage(pod.nodes[0], pod.layout)
    report = fsck(pod.nodes[0], pod.layout)
    assert not report.sound
    assert any(text in problem for problem in report.problems)


def test_fsck_tells_chunks_that_nobody_holds() -> None:
    pod = filled()
    held = fsck(pod.nodes[0], pod.layout).held
    assert fsck(pod.nodes[0], pod.layout, in_heaps=held).sound
    assert not fsck(pod.nodes[0], pod.layout, in_heaps=held - 1).sound


def test_a_region_is_opened_and_checked_at_once() -> None:
    pod = filled()
    layout, report = open_and_check(pod.nodes[1], 8 * len(pod.words))
    assert layout == pod.layout
    assert (report.sound, report.ready, report.roots) == (True, 4, 1)


def test_fsck_stores_nothing() -> None:
    pod = filled()
    pod.nodes[0].stored.clear()
    fsck(pod.nodes[0], pod.layout)
    assert pod.nodes[0].stored == []


def test_a_sweep_of_a_table_without_empty_slots_does_nothing() -> None:
    pod = PlainPod(Sizes(nodes=1, slots=2, chunks=1, chunk_bytes=64))
    for slot in range(2):
        pod.nodes[0].store(entry_at(pod.layout, slot), make_tag(3, 0, 1))
    assert sweep(pod.nodes[0], pod.layout) == 0
