"""SIEVE, and S3-FIFO as its authors' simulator has it: hand-worked sequences and simple models."""

from __future__ import annotations

import pytest
from hypothesis import settings

from cxlbench.devices.policies import PolicyError, S3FifoPolicy, load_policy
from cxlbench.devices.policies.s3fifo_authors import AuthorsS3FifoPolicy
from cxlbench.devices.policies.sieve import SievePolicy
from tests.devices.test_policies import AnyPolicy, drain, hits_of

SIEVE = "cxlbench.devices.policies.sieve:SievePolicy"
AUTHORS = "cxlbench.devices.policies.s3fifo_authors:AuthorsS3FifoPolicy"


class SieveMachine(AnyPolicy):
    """SIEVE against a list with an index, oldest first."""

    name = SIEVE

    def __init__(self) -> None:
        super().__init__()
        self.visited: set[int] = set()
        self.hand: int | None = None
        """The block that the hand is at; None is the oldest one."""

    def touched(self, block: int) -> None:
        self.visited.add(block)

    def expected_victim(self, victim: int) -> int:
        order = self.resident
        at = 0 if self.hand is None else order.index(self.hand)
        while order[at] in self.visited:
            self.visited.discard(order[at])
            at = (at + 1) % len(order)
        self.hand = order[at + 1] if at + 1 < len(order) else None
        return order[at]


class SieveEvicting(SieveMachine):
    """Without removals from outside, which the model's hand does not follow."""

    remove = None  # type: ignore[assignment]


class AuthorsMachine(AnyPolicy):
    name = AUTHORS


TestSieve = SieveEvicting.TestCase
TestAuthors = AuthorsMachine.TestCase
for _case in (TestSieve, TestAuthors):
    _case.settings = settings(max_examples=40, stateful_step_count=40)
del _case


class SieveOwns(AnyPolicy):
    """With removals: what holds for every policy."""

    name = SIEVE


TestSieveOwns = SieveOwns.TestCase
TestSieveOwns.settings = settings(max_examples=40, stateful_step_count=40)


def test_sieve_passes_a_visited_block_once_and_leaves_it_in_its_place():
    policy = SievePolicy(3)
    for block in (1, 2, 3):
        policy.insert(block)
    policy.touch(1)
    assert policy.evict() == 2
    policy.insert(4)
    # The hand stands at 3 and goes on to 4; only then does it begin again at 1.
    assert drain(policy) == [3, 4, 1]


def test_sieve_keeps_a_hot_block_through_a_scan_that_lru_loses():
    references = [1, 1, *range(10, 30), 1]
    assert len(hits_of(SievePolicy(4), references)) == 2


def test_sieve_forgets_its_hand_with_the_block_that_it_stood_at():
    policy = SievePolicy(3)
    for block in (1, 2, 3):
        policy.insert(block)
    assert policy.evict() == 1
    policy.remove(2)
    assert drain(policy) == [3]


def test_the_authors_s3fifo_fills_main_first():
    policy = AuthorsS3FifoPolicy(20)
    for block in range(20):
        policy.insert(block)
    assert [policy.evict() for _ in range(3)] == [0, 1, 2]
    assert S3FifoPolicy(20).small_blocks == 2  # 0 and 1 were in small, 2 came from main


def test_the_authors_s3fifo_takes_from_small_while_main_has_its_share():
    policy = AuthorsS3FifoPolicy(20)
    hits_of(policy, range(20))
    # Main holds its 18: new blocks go to small, and each pushes out the one before it.
    hits_of(policy, range(100, 110))
    assert all(block in policy for block in range(2, 20))


def test_a_victim_does_not_push_out_the_ghost_that_comes_back():
    policy = AuthorsS3FifoPolicy(20)
    hits_of(policy, range(20))
    hits_of(policy, range(100, 118))  # 18 ghosts, the most there can be: 0, 1, 100 to 115
    policy.evict()
    policy.insert(0)  # the oldest ghost goes to main
    main = set(range(2, 20)) | {0}
    hits_of(policy, range(200, 203))
    assert len([block for block in main if block in policy]) >= 18
    assert 0 in policy


@pytest.mark.parametrize("name", [SIEVE, AUTHORS])
@pytest.mark.parametrize("capacity", [1, 2, 3, 11])
def test_they_work_at_small_capacities(name, capacity):
    policy = load_policy(name)(capacity)
    hits_of(policy, [block * 7 % 13 for block in range(200)])
    assert len(set(drain(policy))) == min(capacity, 13)


@pytest.mark.parametrize("name", [SIEVE, AUTHORS])
def test_they_refuse_a_capacity_below_one(name):
    with pytest.raises(PolicyError, match="capacity_blocks=0"):
        load_policy(name)(0)
