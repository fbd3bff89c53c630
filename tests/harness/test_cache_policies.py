"""Hit rates of policies and of OPT: brute force, closed forms, inclusion, prefix-aware counting."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.policies import PolicyError
from cxlbench.harness.cache_policies import (
    AUTHORS_S3FIFO,
    OPT,
    STUDIED,
    HitMasks,
    References,
    compare_policies,
    next_references,
    short_name,
)
from cxlbench.harness.requests import Mode, Workload, WorkloadError
from cxlbench.harness.trace_statistics import Order, simulated_hits
from tests.harness.workbench import ask, chat, workload

ALL = (*STUDIED, AUTHORS_S3FIFO)
SEQUENCES = st.lists(st.integers(0, 6), max_size=12)


def references(blocks) -> References:
    array = np.array(blocks, dtype=np.int64)
    return References(array, np.arange(len(array)), np.zeros(len(array), dtype=np.int64))


def count(blocks, policy: str, capacity: int) -> int:
    return int(HitMasks(references(blocks)).hits(policy, capacity).sum())


def most_hits(blocks: tuple[int, ...], capacity: int) -> int:
    """Return the most hits of any choice of victims, by trying all of them."""

    @cache
    def best(position: int, resident: frozenset[int]) -> int:
        if position == len(blocks):
            return 0
        block = blocks[position]
        if block in resident:
            return 1 + best(position + 1, resident)
        if len(resident) < capacity:
            return best(position + 1, resident | {block})
        return max(best(position + 1, resident - {victim} | {block}) for victim in resident)

    return best(0, frozenset())


@given(SEQUENCES, st.integers(1, 5))
def test_opt_has_the_most_hits_that_any_choice_of_victims_can_have(blocks, capacity):
    assert count(blocks, OPT, capacity) == most_hits(tuple(blocks), capacity)


@given(st.lists(st.integers(0, 30), max_size=150), st.integers(0, 12))
def test_no_policy_has_more_hits_than_opt(blocks, capacity):
    best = count(blocks, OPT, capacity)
    for policy in ALL:
        assert count(blocks, policy, capacity) <= best


@given(st.lists(st.integers(0, 30), max_size=150), st.integers(1, 11))
@pytest.mark.parametrize("policy", ["lru", OPT])
def test_a_larger_cache_of_a_stack_policy_hits_whatever_a_smaller_one_hits(policy, blocks, size):
    """LRU and OPT are stack algorithms (Mattson et al. 1970); OPT's sets nest by count here."""
    small, large = count(blocks, policy, size), count(blocks, policy, size + 1)
    assert small <= large
    if policy == "lru":
        masks = HitMasks(references(blocks))
        assert not (masks.hits(policy, size) & ~masks.hits(policy, size + 1)).any()


@given(st.lists(st.integers(0, 30), max_size=150), st.integers(1, 12))
def test_lru_by_stack_distances_is_the_policy_object(blocks, capacity):
    by_object = count(blocks, "cxlbench.devices.policies:LruPolicy", capacity)
    assert count(blocks, "lru", capacity) == by_object


@given(SEQUENCES)
def test_next_references_are_where_the_block_comes_again(blocks):
    found = next_references(np.array(blocks, dtype=np.int64)).tolist()
    for position, block in enumerate(blocks):
        later = [p for p in range(position + 1, len(blocks)) if blocks[p] == block]
        assert found[position] == (later[0] if later else len(blocks))


@pytest.mark.parametrize(("blocks", "capacity", "rounds"), [(10, 6, 20), (7, 6, 30), (50, 10, 4)])
def test_on_a_loop_lru_has_no_hit_and_opt_its_closed_form(blocks, capacity, rounds):
    """A loop of n blocks in a cache of c < n, after the first round.

    OPT hits c - 1 of each n - 1 references: it swaps one place through all that do not fit.
    """
    loop = list(range(blocks)) * rounds
    assert count(loop, "lru", capacity) == count(loop, "fifo", capacity) == 0
    hits = count(loop, OPT, capacity)
    after = blocks * (rounds - 1)
    assert abs(hits - after * (capacity - 1) / (blocks - 1)) < blocks
    assert hits > 0


@pytest.mark.parametrize("policy", ALL)
def test_a_cache_that_holds_all_blocks_misses_each_once(policy):
    blocks = [number * 7 % 13 for number in range(200)]
    assert count(blocks, policy, 13) == 200 - 13


@pytest.mark.parametrize("policy", ALL)
def test_a_cache_without_room_hits_nothing(policy):
    assert count([1, 1, 1], policy, 0) == 0


def test_uniform_random_references_hit_in_lru_as_often_as_the_cache_is_large():
    """Independent references: each block is there with the share of the blocks that are cached."""
    blocks = np.random.default_rng(3).integers(0, 100, 40_000)
    for capacity in (10, 50):
        assert abs(count(blocks, "lru", capacity) / len(blocks) - capacity / 100) < 0.01


def chains() -> Workload:
    """Return three requests of one chain of five blocks."""
    whole = [0, 1, 2, 3, 4]
    return workload(ask(whole), ask(whole), ask(whole))


def test_tail_first_lru_keeps_the_head_of_a_chain_that_does_not_fit():
    found = References.of(chains(), Order.TAIL_FIRST)
    assert found.blocks[:5].tolist() == [4, 3, 2, 1, 0]
    assert found.depth[:5].tolist() == [4, 3, 2, 1, 0]
    # A loop of five over three blocks: LRU has none in either order.
    assert not HitMasks(found).hits("lru", 3).any()


def test_a_hit_behind_a_missing_block_does_not_count_prefix_aware():
    work = workload(ask([0, 1, 2]), ask([0, 1, 2]))
    found = References.of(work, Order.HEAD_FIRST)
    hits = np.array([False, False, False, True, False, True])
    assert found.prefix_hits(hits).tolist() == [False, False, False, True, False, False]
    tail = References.of(work, Order.TAIL_FIRST)
    assert tail.prefix_hits(np.array([0, 0, 0, 1, 1, 0], bool)).sum() == 0


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from(list(Order)))
def test_prefix_hits_are_the_leading_hits_of_each_request(seed, capacity, order):
    work = chat(sessions=4, turns=3, seed=seed)
    found = References.of(work, order)
    hits = HitMasks(found).hits("lru", capacity)
    counted = found.prefix_hits(hits)
    assert not (counted & ~hits).any()
    for number, request in enumerate(work.requests):
        mine = found.request == number
        by_depth = hits[mine][np.argsort(found.depth[mine])]
        leading = 0
        while leading < len(by_depth) and by_depth[leading]:
            leading += 1
        assert counted[mine].sum() == leading
        assert mine.sum() == len(request.block_ids)


def test_a_study_counts_what_the_policies_count():
    work = chat(sessions=6, turns=5)
    found = References.of(work)
    rows = compare_policies(found, [20 * 1000, 60 * 1000], block_bytes=1000, policies=ALL)
    assert [(row.policy, row.capacity_blocks) for row in rows] == [
        (policy, blocks) for blocks in (20, 60) for policy in ALL
    ]
    for row in rows:
        assert row.references == len(found) == sum(len(r.block_ids) for r in work.requests)
        assert 0 <= row.prefix_hits <= row.hits <= row.references - found.distinct
    by_name = {(row.policy, row.capacity_blocks): row for row in rows}
    from cxlbench.devices.policies import ClockPolicy

    ids = found.blocks.tolist()
    assert by_name["clock", 60].hits == simulated_hits(ids, ClockPolicy, 60)
    for before, after in pairwise(
        by_name[policy, blocks] for policy in ("lru", OPT) for blocks in (20, 60)
    ):
        if before.policy == after.policy:
            assert before.hits <= after.hits


def test_bad_studies_are_refused():
    found = references([1, 2])
    with pytest.raises(WorkloadError, match="block_bytes=0"):
        compare_policies(found, [10], block_bytes=0)
    with pytest.raises(WorkloadError, match="capacities_bytes"):
        compare_policies(found, [-1], block_bytes=1)
    with pytest.raises(PolicyError, match="did you mean clock"):
        compare_policies(found, [1], block_bytes=1, policies=["clok"])
    without = Workload("lengths", 128, Mode.WHOLE_BLOCKS, (), has_sessions=False, has_ids=False)
    with pytest.raises(WorkloadError, match="needs block ids"):
        References.of(without)


def test_names_in_tables_are_short():
    assert [short_name(policy) for policy in ALL] == [
        "lru",
        "fifo",
        "clock",
        "sieve",
        "s3fifo",
        "opt",
        "s3fifo (authors)",
    ]
    assert short_name("mine.policies:Best") == "Best"


def test_no_references_have_no_hits():
    empty = References.of(workload())
    for row in compare_policies(empty, [100], block_bytes=1, policies=ALL):
        assert (row.hits, row.hit_rate, row.prefix_hit_rate) == (0, 0.0, 0.0)
