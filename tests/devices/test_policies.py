"""Replacement policies: exact against simple models, hand-worked sequences, and loading by name."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlbench.devices.policies import (
    POLICY_NAMES,
    ClockPolicy,
    FifoPolicy,
    LruPolicy,
    PolicyError,
    ReplacementPolicy,
    S3FifoPolicy,
    load_policy,
)

CAPACITY = 5
BLOCKS = st.integers(0, 9)


def hits_of(policy: ReplacementPolicy, references: Iterable[int]) -> list[int]:
    """Run a cache over references; return those that hit."""
    hits = []
    for block in references:
        if block in policy:
            hits.append(block)
            policy.touch(block)
        else:
            if len(policy) == policy.capacity_blocks:
                policy.evict()
            policy.insert(block)
    return hits


def drain(policy: ReplacementPolicy) -> list[int]:
    return [policy.evict() for _ in range(len(policy))]


class AnyPolicy(RuleBasedStateMachine):
    """What holds for every policy: it owns a set of blocks, and each victim comes from it."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy = load_policy(self.name)(capacity_blocks=CAPACITY)
        self.resident: list[int] = []

    @rule(block=BLOCKS)
    def reference(self, block: int) -> None:
        if block in self.resident:
            self.policy.touch(block)
            self.touched(block)
            return
        if len(self.resident) == CAPACITY:
            with pytest.raises(PolicyError):
                self.policy.insert(block)
            self.evict()
        self.policy.insert(block)
        self.resident.append(block)

    @precondition(lambda self: self.resident)
    @rule()
    def evict(self) -> None:
        victim = self.policy.evict()
        assert victim == self.expected_victim(victim)
        self.resident.remove(victim)

    @rule(block=BLOCKS)
    def remove(self, block: int) -> None:
        if block in self.resident:
            self.policy.remove(block)
            self.resident.remove(block)
        else:
            with pytest.raises(PolicyError):
                self.policy.remove(block)

    @rule(block=BLOCKS)
    def misuse(self, block: int) -> None:
        with pytest.raises(PolicyError):
            (self.policy.insert if block in self.resident else self.policy.touch)(block)
        if not self.resident:
            with pytest.raises(PolicyError):
                self.policy.evict()

    @invariant()
    def agrees_on_what_is_resident(self) -> None:
        assert len(self.policy) == len(self.resident) <= CAPACITY
        assert [block for block in range(10) if block in self.policy] == sorted(self.resident)

    def touched(self, block: int) -> None:
        """Update the model's order on a hit."""

    def expected_victim(self, victim: int) -> int:
        """Return the block that must go; a model without an order only asks that it is there."""
        assert victim in self.resident
        return victim

    def teardown(self) -> None:
        assert sorted(drain(self.policy)) == sorted(self.resident)


class LruMachine(AnyPolicy):
    def touched(self, block: int) -> None:
        self.resident.remove(block)
        self.resident.append(block)

    def expected_victim(self, victim: int) -> int:
        return self.resident[0]


class FifoMachine(AnyPolicy):
    name = "fifo"

    def expected_victim(self, victim: int) -> int:
        return self.resident[0]


class ClockMachine(AnyPolicy):
    """CLOCK against a ring of slots with a hand, the textbook's picture."""

    name = "clock"

    def __init__(self) -> None:
        super().__init__()
        self.referenced: set[int] = set()

    def touched(self, block: int) -> None:
        self.referenced.add(block)

    def expected_victim(self, victim: int) -> int:
        while self.resident[0] in self.referenced:
            self.referenced.discard(self.resident[0])
            self.resident.append(self.resident.pop(0))
        return self.resident[0]

    @invariant()
    def forgets_the_bits_of_removed_blocks(self) -> None:
        self.referenced &= set(self.resident)


class S3FifoMachine(AnyPolicy):
    name = "s3fifo"

    @invariant()
    def ghosts_are_bounded_and_not_resident(self) -> None:
        policy = self.policy
        assert isinstance(policy, S3FifoPolicy)
        assert len(policy._ghost) <= policy.main_blocks
        assert not set(policy._ghost) & set(self.resident)


TestLru = LruMachine.TestCase
TestFifo = FifoMachine.TestCase
TestClock = ClockMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
for _case in (TestLru, TestFifo, TestClock, TestS3Fifo):
    _case.settings = settings(max_examples=40, stateful_step_count=40)
del _case


def test_lru_has_no_hit_on_a_loop_one_block_longer_than_the_cache():
    assert hits_of(LruPolicy(4), [1, 2, 3, 4, 5] * 10) == []
    assert len(hits_of(LruPolicy(5), [1, 2, 3, 4, 5] * 10)) == 45


def test_fifo_ignores_hits_where_lru_does_not():
    references = [1, 2, 3, 1, 4, 1]
    assert hits_of(FifoPolicy(3), references) == [1]
    assert hits_of(LruPolicy(3), references) == [1, 1]


def test_clock_gives_a_block_that_was_hit_one_more_round():
    policy = ClockPolicy(3)
    for block in (1, 2, 3):
        policy.insert(block)
    policy.touch(1)
    assert policy.evict() == 2  # the hand passes 1 and clears its bit
    policy.insert(4)
    assert drain(policy) == [3, 1, 4]


def test_clock_evicts_in_order_of_filling_when_all_were_hit():
    policy = ClockPolicy(3)
    for block in (1, 2, 3):
        policy.insert(block)
        policy.touch(block)
    assert drain(policy) == [1, 2, 3]


def s3fifo(*, small: Iterable[int]) -> S3FifoPolicy:
    """Return a policy of 20 blocks (2 small, 18 main) with these in the small queue."""
    policy = S3FifoPolicy(20)
    for block in small:
        policy.insert(block)
    return policy


def test_s3fifo_shares_are_a_tenth_and_the_rest():
    policy = S3FifoPolicy(20)
    assert (policy.small_blocks, policy.main_blocks) == (2, 18)


def test_s3fifo_evicts_one_hit_wonders_first_in_first_out():
    policy = s3fifo(small=range(1, 6))
    policy.touch(1)  # one hit is not more than one
    assert drain(policy) == [1, 2, 3, 4, 5]


def test_s3fifo_moves_a_block_hit_twice_to_the_main_queue():
    policy = s3fifo(small=range(1, 6))
    policy.touch(2)
    policy.touch(2)
    # 2 moves to main on the way; small keeps its share of two, 4 and 5, until main is empty.
    assert [policy.evict() for _ in range(3)] == [1, 3, 4]
    assert policy.evict() == 2
    assert policy.evict() == 5


def test_s3fifo_puts_a_block_that_comes_back_from_the_ghosts_into_main():
    policy = s3fifo(small=range(1, 5))
    assert policy.evict() == 1
    policy.insert(1)
    # small holds 2, 3, 4 and main holds 1: small gives until it is below its share.
    assert [policy.evict() for _ in range(3)] == [2, 3, 1]


def test_s3fifo_forgets_the_oldest_ghost_beyond_the_size_of_main():
    policy = S3FifoPolicy(3)  # one small, two main, so two ghosts
    assert hits_of(policy, [1, 2, 3]) == []
    assert drain(policy) == [1, 2, 3]
    for block in (2, 3, 1):
        policy.insert(block)
    # 2 and 3 were ghosts and went to main; 1 was forgotten, so it is in small, which gives first.
    assert drain(policy) == [1, 2, 3]


def s3fifo_main(blocks: Iterable[int]) -> S3FifoPolicy:
    """Return a policy of 20 blocks with these in the main queue, by way of the ghosts."""
    policy = s3fifo(small=blocks)
    for block in drain(policy):
        policy.insert(block)
    return policy


def test_s3fifo_main_takes_one_off_a_counter_on_each_pass():
    policy = s3fifo_main([1, 2, 3])
    for _ in range(3):
        policy.touch(1)
    policy.touch(3)
    # 1 is passed once before 2 goes, then 3 and 1 once each, and 3 has nothing left.
    assert drain(policy) == [2, 3, 1]


def test_s3fifo_counts_three_hits_at_most():
    policy = s3fifo_main([1, 2])
    for _ in range(9):
        policy.touch(1)
    for _ in range(3):
        policy.touch(2)
    assert drain(policy) == [1, 2]


def test_s3fifo_starts_a_moved_block_anew_in_main():
    policy = s3fifo(small=[1, 2, 3])
    for _ in range(3):
        policy.touch(1)
    assert policy.evict() == 2  # on the way, 1 moved to main
    policy.insert(2)
    assert policy.evict() == 1  # small, which holds 3, is below its share of two
    assert drain(policy) == [2, 3]


def test_s3fifo_evicts_from_main_when_a_moved_block_overfills_it():
    policy = s3fifo_main(range(18))
    policy.insert(100)
    policy.insert(101)
    policy.touch(100)
    policy.touch(100)
    assert policy.evict() == 0
    assert 101 in policy


def test_s3fifo_keeps_a_hot_set_through_a_scan_that_lru_loses():
    hot = list(range(10))
    scan = list(range(100, 200))
    references = hot * 3 + scan + hot
    assert len(hits_of(S3FifoPolicy(20), references)) == 30
    assert len(hits_of(LruPolicy(20), references)) == 20


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("capacity", [1, 2, 3, 11])
def test_every_policy_works_at_small_capacities(name, capacity):
    policy = load_policy(name)(capacity)
    hits_of(policy, [block * 7 % 13 for block in range(200)])
    assert len(policy) == min(capacity, 13)
    assert len(set(drain(policy))) == min(capacity, 13)


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_capacity_that_is_not_a_positive_whole_number_is_refused(name, capacity):
    with pytest.raises(PolicyError, match=f"capacity_blocks={capacity}"):
        load_policy(name)(capacity)


def test_lru_does_a_million_operations_a_second():
    policy = LruPolicy(1000)
    operations = 100_000

    def run() -> float:
        start = time.perf_counter()
        touch, insert, evict = policy.touch, policy.insert, policy.evict
        for block in range(operations // 4):
            if len(policy) == 1000:
                evict()
            insert(block)
            touch(block)
            touch(block)
        seconds = time.perf_counter() - start
        while len(policy):
            policy.evict()
        return seconds

    assert operations / min(run() for _ in range(5)) > 1e6


def test_a_policy_loads_by_name_in_any_case():
    assert load_policy("S3FIFO") is S3FifoPolicy


def test_an_unknown_name_is_answered_with_the_nearest_ones():
    with pytest.raises(PolicyError, match=r"'lur'; did you mean lru.*fifo, clock, s3fifo"):
        load_policy("lur")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_policies.py").write_text(
        "from cxlbench.devices.policies import FifoPolicy\n"
        "class Mine(FifoPolicy):\n    pass\n"
        "class Liar(FifoPolicy):\n"
        "    def evict(self):\n        return 12345\n"
        "    def touch(self, block):\n        return {}[block]\n"
        "class Half:\n"
        "    capacity_blocks = 1\n"
        "    def __init__(self, capacity_blocks):\n        pass\n"
        "    def touch(self, block):\n        pass\n"
        "class Greedy(FifoPolicy):\n"
        "    def __init__(self):\n        super().__init__(1)\n"
        "number = 3\n"
    )
    yield "my_policies"
    sys.modules.pop("my_policies", None)


def test_a_users_policy_loads_by_module_and_object(user_module):
    policy = load_policy(f"{user_module}:Mine")(7)
    assert type(policy.own).__name__ == "Mine"
    assert policy.capacity_blocks == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:Mine", "cannot import 'no_such_module'.*PYTHONPATH"),
        (":Mine", "cannot import ''"),
        ("my_policies:Mime", "no object 'Mime'; did you mean Mine"),
        ("my_policies:", "say which object of the module, as my_policies:NAME"),
        ("my_policies:number", "number is 3, not a class"),
        ("my_policies:Greedy", r"Greedy\(1\) failed with TypeError"),
        ("my_policies:Half", "lacks insert, evict, remove, __len__, __contains__"),
    ],
)
def test_a_users_object_that_is_no_policy_is_refused_when_loaded(user_module, spec, message):
    with pytest.raises(PolicyError, match=message):
        load_policy(spec)


def test_a_users_policy_that_makes_victims_up_or_raises_is_named_with_what_it_did(user_module):
    policy = load_policy(f"{user_module}:Liar")(7)
    policy.insert(3)
    with pytest.raises(PolicyError, match=r"my_policies:Liar'.*evict\(\) returned 12345"):
        policy.evict()
    told = r"my_policies:Liar'.*touch\(3\) raised KeyError: 3 \(.*my_policies.py:8\)"
    with pytest.raises(PolicyError, match=told):
        policy.touch(3)


def test_a_victim_is_no_victim_twice(user_module):
    policy = load_policy(f"{user_module}:Mine")(2)
    policy.insert(3)
    policy.insert(4)
    assert (policy.evict(), len(policy), 3 in policy, 4 in policy) == (3, 1, False, True)
    policy.remove(4)
    with pytest.raises(PolicyError, match="nothing is resident"):
        policy.evict()
