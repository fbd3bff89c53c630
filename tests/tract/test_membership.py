"""Incarnations, obituaries, verdicts, and who becomes the arbiter."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.layout import CACHE_LOCK, Sizes
from cxlbench.tract.lock import LOCKED, slot_of
from cxlbench.tract.manager import becomes_arbiter, tend
from cxlbench.tract.membership import (
    BACK,
    BACK_UNREPAIRED,
    DEAD,
    GONE,
    announce,
    arbiter_in,
    await_admission,
    has_best_claim,
    read_epoch,
    read_news,
    report_dead,
    survey,
)
from tests.tract.plain import PlainMemory, PlainPod


class Members:
    def __init__(self, nodes: int = 4) -> None:
        self.pod = PlainPod(Sizes(nodes=nodes, slots=2, chunks=2, chunk_bytes=64))
        self.nodes, self.lay = self.pod.nodes, self.pod.layout

    def standing(self, node: int = 0) -> list[int]:
        found = np.zeros(self.lay.nodes, np.int64)
        survey(self.nodes[node], self.lay, found)
        return found.tolist()

    def tend(self, node: int = 0) -> int:
        return tend(self.nodes[node], self.lay, np.zeros(self.lay.nodes, np.int64))

    def becomes_arbiter(self, node: int) -> bool:
        return becomes_arbiter(self.nodes[node], self.lay, np.zeros(self.lay.nodes, np.int64))

    def arbiter(self) -> int:
        return arbiter_in(self.nodes[0].load(self.lay.epoch_at))


def test_after_formatting_all_are_live_and_node_0_is_the_arbiter() -> None:
    members = Members()
    assert members.standing() == [LIVE] * 4
    assert [members.becomes_arbiter(node) for node in range(4)] == [True, False, False, False]
    assert read_epoch(members.nodes[0], members.lay) == 0


def test_a_life_from_death_to_admission() -> None:
    members = Members()
    assert report_dead(members.nodes[1], members.lay, 2) == 0
    assert members.standing() == [LIVE, LIVE, DEAD, LIVE]
    assert members.tend() == 1
    assert members.standing() == [LIVE, LIVE, GONE, LIVE]
    assert announce(members.nodes[2], members.lay) == 1
    assert members.standing() == [LIVE, LIVE, BACK, LIVE]
    assert members.tend() == 1
    assert members.standing() == [LIVE] * 4
    await_admission(members.nodes[2], members.lay, 1)
    assert members.tend() == 0


def test_a_node_that_comes_back_before_the_repair_is_its_own_obituary() -> None:
    members = Members()
    incarnation = announce(members.nodes[2], members.lay)
    assert members.standing() == [LIVE, LIVE, BACK_UNREPAIRED, LIVE]
    members.tend()
    assert members.standing() == [LIVE] * 4
    await_admission(members.nodes[2], members.lay, incarnation)


def test_an_old_obituary_does_not_kill_a_new_incarnation() -> None:
    members = Members()
    report_dead(members.nodes[1], members.lay, 2)
    members.tend()
    announce(members.nodes[2], members.lay)
    members.tend()
    assert members.standing() == [LIVE] * 4
    assert report_dead(members.nodes[3], members.lay, 2) == 1
    assert members.standing() == [LIVE, LIVE, DEAD, LIVE]


def test_a_new_incarnation_that_dies_before_admission_is_dead_again() -> None:
    members = Members()
    report_dead(members.nodes[1], members.lay, 2)
    members.tend()
    announce(members.nodes[2], members.lay)
    report_dead(members.nodes[1], members.lay, 2)
    assert members.standing()[2] == GONE
    assert announce(members.nodes[2], members.lay) == 2
    assert members.standing()[2] == BACK


def test_two_obituaries_of_one_death_are_one_death() -> None:
    members = Members()
    for node in (0, 1, 3):
        report_dead(members.nodes[node], members.lay, 2)
    assert members.tend() == 1
    assert members.tend() == 0


def test_the_successor_is_the_lowest_live_node() -> None:
    members = Members()
    report_dead(members.nodes[3], members.lay, 0)
    assert [members.becomes_arbiter(node) for node in (3, 2)] == [False, False]
    assert members.becomes_arbiter(1)
    assert members.arbiter() == 1
    assert read_epoch(members.nodes[1], members.lay) == 1
    report_dead(members.nodes[3], members.lay, 1)
    assert not members.becomes_arbiter(3)
    assert members.becomes_arbiter(2)


def test_a_returning_lower_node_leaves_the_arbiter_in_place() -> None:
    members = Members()
    report_dead(members.nodes[3], members.lay, 0)
    assert members.becomes_arbiter(1)
    members.tend(1)
    announce(members.nodes[0], members.lay)
    assert not members.becomes_arbiter(0)
    members.tend(1)
    assert members.standing() == [LIVE] * 4
    assert not members.becomes_arbiter(0)
    assert members.arbiter() == 1


def test_an_arbiter_that_restarts_does_not_go_on_as_if_nothing_was() -> None:
    members = Members()
    announce(members.nodes[0], members.lay)
    assert not members.becomes_arbiter(0)
    assert members.becomes_arbiter(1)


def test_the_last_node_takes_over_from_itself() -> None:
    members = Members(nodes=2)
    report_dead(members.nodes[0], members.lay, 1)
    members.tend()
    incarnation = announce(members.nodes[0], members.lay)
    assert members.becomes_arbiter(0)
    members.tend(0)
    await_admission(members.nodes[0], members.lay, incarnation)
    assert members.standing() == [LIVE, GONE]


@pytest.mark.parametrize(
    ("standing", "best"),
    [
        ([LIVE, LIVE, LIVE], 0),
        ([DEAD, LIVE, LIVE], 1),
        ([GONE, BACK, LIVE], 2),
        ([BACK_UNREPAIRED, BACK, DEAD], 0),
        ([GONE, DEAD, BACK], 2),
    ],
)
def test_exactly_one_node_has_the_best_claim(standing: list[int], best: int) -> None:
    members = Members(nodes=3)
    words = np.array(standing, np.int64)
    willing = [n for n in range(3) if standing[n] in (LIVE, BACK, BACK_UNREPAIRED)]
    claims = [n for n in willing if has_best_claim(members.lay, n, words)]
    assert claims == [best]


def test_news_grow_with_every_death_and_return() -> None:
    members = Members()
    seen = [read_news(members.nodes[0], members.lay)]
    report_dead(members.nodes[1], members.lay, 2)
    seen.append(read_news(members.nodes[0], members.lay))
    members.tend()
    announce(members.nodes[2], members.lay)
    seen.append(read_news(members.nodes[0], members.lay))
    assert seen == [0, 1, 2]


def test_repair_is_put_off_while_a_live_node_is_inside() -> None:
    members = Members()
    members.nodes[3].store(slot_of(members.lay, CACHE_LOCK, 3), LOCKED)
    report_dead(members.nodes[1], members.lay, 2)
    assert members.tend() == -1
    assert members.standing()[2] == DEAD
    members.nodes[3].store(slot_of(members.lay, CACHE_LOCK, 3), 0)
    assert members.tend() == 1


def test_incarnations_survive_an_announcement_that_never_landed() -> None:
    members = Members()
    report_dead(members.nodes[1], members.lay, 2)
    lost = PlainMemory(members.pod.words.copy(), 2)
    assert announce(lost, members.lay) == 1
    assert report_dead(members.nodes[1], members.lay, 2) == 0
    assert announce(members.nodes[2], members.lay) == 1
