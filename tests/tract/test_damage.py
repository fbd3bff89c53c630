"""Regions with any words in them: opening, checking and repairing end, and say what is wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cxlbench.tract.client import ObjectStore
from cxlbench.tract.errors import NameNotFoundError, OutOfSpaceError, TractError
from cxlbench.tract.fsck import fsck, open_and_check
from cxlbench.tract.index import BLOCK, LENGTH, TAG, entry_at
from cxlbench.tract.layout import HEADER_WORDS
from cxlbench.tract.manager import becomes_arbiter
from cxlbench.tract.membership import INCARNATION, control_of, verdict_of
from cxlbench.tract.object_store import root_at
from cxlbench.tract.pins import pin_at
from cxlbench.tract.places import places_for
from cxlbench.tract.prefix_cache import fetch_chain
from cxlbench.tract.recovery import restart_region
from cxlbench.tract.scenario_tasks import PAYLOAD_WORDS, chain_keys, content
from tests.tract.plain import PlainMemory, PlainPod
from tests.tract.test_repair import filled, inserted

FULL = filled()
METADATA = FULL.layout.pool_at // 8
STRANGE = (
    *(0, 1, 2, 3, 7, 255, 256, -1, -64, 1 << 62, (1 << 63) - 1, -(1 << 63)),
    *(FULL.layout.pool_at, FULL.layout.lru_at, FULL.layout.lru_at + 16, FULL.layout.index_at),
)


def damaged(seed: int, first: int = 0) -> PlainPod:
    """Return a pod with some words of its metadata changed, those before ``first`` excepted."""
    rng = random.Random(seed)
    pod = filled()
    for _ in range(rng.choice([1, 1, 2, 4, 16, 64])):
        at = rng.randrange(first, METADATA)
        change = rng.randrange(3)
        if change == 0:
            pod.words[at] = rng.choice(STRANGE)
        elif change == 1:
            pod.words[at] ^= 1 << rng.randrange(63)
        else:
            pod.words[at] = rng.getrandbits(64) - (1 << 63)
    return pod


def test_any_damage_is_told_or_harmless_and_nothing_is_written() -> None:
    told = 0
    for seed in range(1500):
        pod = damaged(seed)
        before = pod.words.copy()
        try:
            told += not open_and_check(pod.nodes[0], 8 * len(pod.words))[1].sound
        except TractError:
            told += 1
        assert (pod.words == before).all()
    assert told > 750


def used(pod: PlainPod, node: int) -> None:
    """Use all of the region from a node; what is read must be what was stored."""
    mem, lay = pod.nodes[node], pod.layout
    found = np.zeros((1, PAYLOAD_WORDS), np.int64)
    for number in range(8):
        if fetch_chain(mem, lay, chain_keys(number, 1), found, places_for(1)):
            assert np.array_equal(found, content(number, 1))
    inserted(mem, lay, 5, 3)
    objects = ObjectStore(mem, lay)
    try:
        objects.read("old")
        objects.delete("old")
    except NameNotFoundError:
        pass
    try:
        objects.put("new", np.arange(3, dtype=np.int64))
        assert objects.read("new").tolist() == [0, 1, 2]
    except OutOfSpaceError:
        pass


def test_a_region_with_any_damage_is_sound_and_usable_after_a_restart() -> None:
    for seed in range(150):
        pod = damaged(seed, HEADER_WORDS)
        payload = pod.words[METADATA:].copy()
        assert restart_region(pod.nodes[0], pod.layout).problems == ()
        assert (pod.words[METADATA:] == payload).all()
        used(pod, seed % 2)
        assert fsck(pod.nodes[0], pod.layout).problems == ()


LAY = FULL.layout


@pytest.mark.parametrize(
    ("at", "word", "text"),
    [
        (LAY.epoch_at, 2, "epoch, verdicts"),
        (LAY.epoch_at, -1, "epoch, verdicts"),
        (verdict_of(LAY, 1), 2, "epoch, verdicts"),
        (control_of(LAY, 1) + INCARNATION, 1 << 60, "epoch, verdicts"),
        (LAY.cache_at, -(1 << 63), "live count"),
        (pin_at(LAY, 0, 0), 1 << 62, "pins that no count can be"),
        (entry_at(LAY, 0) + LENGTH, (1 << 63) - 1, "no chunk of the pool"),
        (entry_at(LAY, 0) + LENGTH, 12, "no chunk of the pool"),
        (entry_at(LAY, 0) + BLOCK, -(1 << 63), "no chunk of the pool"),
        (root_at(LAY, 0) + LENGTH, 12, "no chunk of the pool"),
    ],
)
def test_words_that_cannot_be_are_told(at: int, word: int, text: str) -> None:
    pod = filled()
    pod.words[at // 8] = word
    assert any(text in problem for problem in fsck(pod.nodes[0], pod.layout).problems)


def test_of_two_entries_on_one_chunk_repair_keeps_one() -> None:
    pod = filled()
    mem = pod.nodes[0]
    mem.store(entry_at(LAY, 1) + BLOCK, mem.load(entry_at(LAY, 0) + BLOCK))
    report = restart_region(mem, LAY)
    assert (report.problems, report.ready) == ((), 3)


def test_an_entry_that_no_probe_finds_is_dropped() -> None:
    pod = filled()
    mem = pod.nodes[0]
    mem.store(entry_at(LAY, 0) + TAG + 8, 5)
    report = restart_region(mem, LAY)
    assert (report.problems, report.ready) == ((), 3)


def test_an_arbiter_that_does_not_exist_is_succeeded() -> None:
    pod = filled()
    pod.nodes[0].store(LAY.epoch_at, 200)
    standing = np.zeros(LAY.nodes, np.int64)
    assert becomes_arbiter(pod.nodes[0], LAY, standing)
    assert not becomes_arbiter(PlainMemory(pod.words, 1), LAY, standing)
