"""TraCT's text on a mapped pod: two nodes with a view each, and what one forgets to flush."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_node_process import NodeFailedError, NodeForker
from cxlbench.emu.pod_processes import LivePod
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import held_chunks
from cxlbench.tract.layout import Sizes, plan
from cxlbench.tract.mutant_loader import Mutant
from cxlbench.tract.stress import HITS, INSERTED, WRONG
from tests.tract import mapped_programs

WORDS = 8
SIZES = Sizes(
    nodes=2, slots=32, chunks=16, chunk_bytes=8 * WORDS, user_locks=1, roots=2, heap_batch=2
)
LAYOUT = plan(SIZES)
COUNTER_AT = LAYOUT.pool_at
PROGRAMS = mapped_programs.__name__

UNFLUSHED = Mutant(
    name="header-unflushed",
    file="region.py",
    old="    publish(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))\n",
    new="    store(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))\n",
    scenario="format_and_open",
    kinds=(),
)
"""Initializes the region and forgets to flush the line that says so."""
HALF_FLUSHED = dataclasses.replace(
    UNFLUSHED,
    name="sizes-unflushed",
    old="        store(mem, i * WORD, int(words[i]))\n    clflush(mem, LINE)\n",
    new="        store(mem, i * WORD, int(words[i]))\n",
)
"""Flushes that line, and forgets the one after it."""


@pytest.fixture(scope="module")
def forker() -> Iterator[NodeForker]:
    with NodeForker() as made:
        yield made


class Mapped:
    """A mapped pod of two nodes for one region."""

    def __init__(self, forker: NodeForker) -> None:
        self.pod = LivePod(
            PodShape(
                LAYOUT.region_bytes,
                nodes=2,
                processes=3,
                mode="mapped",
                local_locks=LAYOUT.local_locks,
                local_words=LAYOUT.local_words,
            ),
            forker=forker,
        )

    def start(self, node: int, what: str, *args: object) -> Any:
        target = f"{PROGRAMS}:{what}"
        return self.pod.start(node, target, LAYOUT.region_bytes, *args, processes=1)[0]

    def run(self, node: int, what: str, *args: object) -> Any:
        return self.start(node, what, *args).result()

    def initialize(self, mutant: Mutant | None = None, folder: object = None) -> Any:
        change = None if mutant is None else dataclasses.asdict(mutant)
        target = f"{PROGRAMS}:initialize"
        started = self.pod.start(
            0, target, SIZES, LAYOUT.region_bytes, change, str(folder), processes=1
        )
        return started[0].result()

    def close(self) -> None:
        for node in range(2):
            self.pod.kill(node)
        self.pod.close()


@pytest.fixture
def fresh(forker: NodeForker) -> Iterator[Mapped]:
    mapped = Mapped(forker)
    yield mapped
    mapped.close()


@pytest.fixture
def mapped(fresh: Mapped) -> Mapped:
    """A formatted pod with a manager on each node."""
    assert fresh.initialize() is None
    for node in range(2):
        fresh.start(node, "manager")
    return fresh


# Initializing


def test_a_region_that_one_node_made_opens_on_the_other(fresh: Mapped) -> None:
    assert fresh.run(1, "opens")[0] == "ForeignRegionError"
    assert fresh.initialize() is None
    assert fresh.run(1, "opens") is None


@pytest.mark.parametrize(
    ("mutant", "error"),
    [(UNFLUSHED, "ForeignRegionError"), (HALF_FLUSHED, "CorruptedHeaderError")],
    ids=lambda one: getattr(one, "name", ""),
)
def test_one_that_forgets_to_flush_it_is_seen_to_fail_on_the_second_node(
    fresh: Mapped, tmp_path: object, mutant: Mutant, error: str
) -> None:
    fresh.initialize(mutant, tmp_path)
    failed = fresh.run(1, "opens")
    assert failed is not None, "the second node did not notice"
    assert failed[0] == error


def test_what_was_forgotten_works_on_its_own_node(fresh: Mapped, tmp_path: object) -> None:
    """So no test on one node finds it: a view that flushes nothing holds its own stores."""
    fresh.initialize(UNFLUSHED, tmp_path)
    view = fresh.pod.mapped(0).map()
    assert view[:8] != bytes(8)
    assert fresh.pod.device[0] == 0
    view.close()


# The lock


def test_no_increment_is_lost(mapped: Mapped) -> None:
    counters = [mapped.start(node, "counter", COUNTER_AT, 40) for node in range(2)]
    for process in counters:
        process.result()
    assert mapped.pod.device[COUNTER_AT // 8] == 80


def test_the_lock_excludes_the_other_node(mapped: Mapped) -> None:
    holder = mapped.start(0, "hold")
    assert holder.receive() == "held"
    waiting = mapped.start(1, "counter", COUNTER_AT, 1)
    mapped.run(0, "opens")
    assert waiting.alive
    assert mapped.pod.device[COUNTER_AT // 8] == 0
    holder.send("release")
    waiting.result()
    assert mapped.pod.device[COUNTER_AT // 8] == 1


# The object store


def test_what_one_node_puts_the_other_gets_until_it_is_deleted(mapped: Mapped) -> None:
    values = [-(2**63), 0, 7, 2**63 - 1, 5, 6, 7, 8, 9]
    assert mapped.run(0, "put", "weights", values) == 8 * len(values)
    assert mapped.run(1, "get", "weights") == values
    mapped.run(1, "delete", "weights")
    with pytest.raises(NodeFailedError, match="NameNotFoundError"):
        mapped.run(0, "get", "weights")


# The index


def blocks(first: int, last: int) -> list[list[int]]:
    return [[100 * n + i for i in range(WORDS)] for n in range(first, last)]


def test_what_one_node_inserts_the_other_finds_with_its_bytes(mapped: Mapped) -> None:
    assert mapped.run(0, "insert", 0, 4, WORDS) == ["STORED"] * 4
    assert mapped.run(1, "probe", 0, 6, WORDS) == blocks(0, 4)
    assert mapped.run(1, "insert", 2, 6, WORDS) == ["EXISTS", "EXISTS", "STORED", "STORED"]
    assert mapped.run(0, "probe", 0, 6, WORDS) == blocks(0, 6)


def test_what_one_node_evicts_the_other_does_not_find(mapped: Mapped) -> None:
    mapped.run(0, "insert", 0, 1, WORDS)
    mapped.run(0, "insert", 1, 2, WORDS)
    assert mapped.run(1, "probe", 0, 1, WORDS) == blocks(0, 1)  # now the newest
    assert mapped.run(1, "evict", 1) == 1
    assert mapped.run(0, "probe", 0, 1, WORDS) == blocks(0, 1)
    assert mapped.run(0, "probe", 1, 2, WORDS) == []


def test_blocks_that_come_and_go_on_both_nodes_are_right_and_the_region_sound(
    mapped: Mapped,
) -> None:
    workers = [mapped.start(node, "worker", 3 + node, 30, 24, WORDS) for node in range(2)]
    totals = [process.result() for process in workers]
    assert [t[WRONG] for t in totals] == [0, 0]
    assert sum(t[INSERTED] for t in totals) > 20
    assert sum(t[HITS] for t in totals) > 5
    handles = [mapped.pod.mapped(node).handle() for node in range(2)]
    held = sum(held_chunks(handle, LAYOUT) for handle in handles)
    report = fsck(handles[0], LAYOUT, in_heaps=held)
    assert report.problems == ()
    assert (report.pins, report.pending, report.held_locks) == (0, 0, 0)
    assert report.free + report.used + report.held == SIZES.chunks
    for handle in handles:
        handle.close()
