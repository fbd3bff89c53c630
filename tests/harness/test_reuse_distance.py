"""The hit-rate curve: against an LRU cache that is really run, at every size."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError
from cxlbench.harness.reuse_distance import (
    NEVER,
    HitRateOutOfReachError,
    hit_rate_curve,
)
from cxlbench.harness.trace_statistics import Order, trace_statistics

BLOCK = 16


def workload(*prompts: tuple[int, ...], extra: int = 1, has_ids: bool = True) -> Workload:
    requests = tuple(
        Request(
            request_id=position,
            session="a",
            turn=1,
            arrival_s=float(position),
            input_tokens=BLOCK * len(blocks) + extra,
            output_tokens=1,
            block_ids=blocks,
        )
        for position, blocks in enumerate(prompts)
    )
    return Workload("w", BLOCK, Mode.WHOLE_BLOCKS, requests, has_sessions=False, has_ids=has_ids)


def lru_hits(work: Workload, capacity: int, order: Order) -> list[int]:
    """Run an LRU cache: look the leading blocks up, then use all of them."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in work.requests:
        hits = 0
        for block in request.block_ids[: request.reusable_blocks(BLOCK)]:
            if block not in cache:
                break
            hits += 1
        found.append(hits)
        step = -1 if order is Order.TAIL_FIRST else 1
        for block in request.block_ids[::step]:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return found


@st.composite
def chains(draw):
    """Prompts as paths in a tree: a block's id stands for its whole prefix."""
    prompts, ids = [], {}
    for _ in range(draw(st.integers(0, 12))):
        words = draw(st.lists(st.integers(0, 2), max_size=8))
        prefixes = [tuple(words[: end + 1]) for end in range(len(words))]
        prompts.append(tuple(ids.setdefault(prefix, len(ids)) for prefix in prefixes))
    return prompts


@given(chains(), st.sampled_from(Order), st.sampled_from([0, 1]))
def test_hits_are_those_of_a_cache_that_is_run_at_every_size(prompts, order, extra):
    work = workload(*prompts, extra=extra)
    curve = hit_rate_curve(work, order=order)
    for capacity in range(curve.distinct + 2):
        expected = lru_hits(work, capacity, order)
        assert curve.leading_hits(capacity).tolist() == expected
        assert curve.hits(capacity) == sum(expected)


@given(chains(), st.permutations(range(3)))
def test_requests_may_come_in_another_order(prompts, first):
    prompts = (*prompts, (), (), ())
    sequence = [*first, *range(3, len(prompts))]
    moved = workload(*(prompts[number] for number in sequence))
    there = hit_rate_curve(workload(*prompts), sequence=sequence)
    assert there.leading_hits(3).tolist() == hit_rate_curve(moved).leading_hits(3).tolist()


@given(chains(), st.floats(0, 1))
def test_the_capacity_for_a_hit_rate_is_the_least(prompts, share):
    curve = hit_rate_curve(workload(*prompts))
    goal = share * curve.best_hit_rate
    capacity = curve.capacity_for(goal)
    assert curve.hit_rate(capacity) >= goal
    assert capacity == 0 or curve.hit_rate(capacity - 1) < goal


@given(chains())
def test_more_capacity_is_never_worse_and_ends_at_the_best(prompts):
    curve = hit_rate_curve(workload(*prompts))
    rates = [curve.hit_rate(capacity) for capacity in range(curve.distinct + 2)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert curve.hit_rate(curve.largest_useful) == curve.best_hit_rate == rates[-1]
    assert curve.largest_useful <= curve.distinct


@given(chains())
def test_a_plain_lru_that_looks_up_block_by_block_sees_no_more(prompts):
    """It may evict a block of the request that is being served; in the end both see all reuse."""
    work = workload(*prompts)
    curve = hit_rate_curve(work)
    sizes = list(range(curve.distinct + 1))
    plain = trace_statistics(work, sizes, block_bytes=1, order=Order.TAIL_FIRST).capacities
    assert all(at.hit_share <= curve.hit_rate(at.capacity_blocks) for at in plain)
    assert plain[-1].hit_share == curve.best_hit_rate


def test_a_block_behind_a_missing_one_is_no_hit():
    # Block 9 is in any cache of three at the end; the new block 7 before it hides it.
    curve = hit_rate_curve(workload((1, 9), (7, 9)))
    assert curve.needed.tolist() == [NEVER, NEVER, NEVER, NEVER]
    assert curve.best_hit_rate == 0


def test_the_block_of_a_prompts_last_token_is_not_servable():
    assert hit_rate_curve(workload((1, 2), (1, 2), extra=0)).servable == 2
    assert hit_rate_curve(workload((1, 2), (1, 2), extra=1)).servable == 4


def test_a_rate_beyond_compulsory_misses_is_refused_with_the_best_possible():
    curve = hit_rate_curve(workload((1, 2), (1, 2), (1, 2), (3, 4)))
    assert curve.best_hit_rate == 0.5
    with pytest.raises(HitRateOutOfReachError, match=r"best possible is 50\.0%"):
        curve.capacity_for(0.6)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(rate):
    with pytest.raises(ValueError, match="from 0 to 1"):
        hit_rate_curve(workload((1,), (1,))).capacity_for(rate)


def test_without_ids_there_is_no_curve():
    with pytest.raises(WorkloadError, match="block ids"):
        hit_rate_curve(workload((), has_ids=False))


def test_a_trace_without_requests_has_an_empty_curve():
    curve = hit_rate_curve(workload())
    assert (curve.servable, curve.best_hit_rate, curve.largest_useful) == (0, 0.0, 0)
    assert curve.capacity_for(0) == 0
    assert curve.leading_hits(5).tolist() == []


def test_sessions_that_take_turns_need_room_for_all_of_them():
    chat = generate(
        GeneratorKnobs(
            sessions=4, turns=3, shared_system_tokens=0, first_input_tokens=1024, block_tokens=128
        )
    )
    curve = hit_rate_curve(chat)
    others = [r for r in chat.requests if r.turn == 1]
    in_turn_1 = sum(len(request.block_ids) for request in others)
    assert curve.hits(in_turn_1 // 4) == 0
    assert int(np.sum(curve.leading_hits(10**6))) == curve.hits(10**6) > 0
