"""Single-turn requests whose groups share a prefix."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from cxlbench.harness.requests import Workload, WorkloadError
from cxlbench.harness.shared_prefixes import SharedPrefixKnobs, generate_shared_prefixes

BLOCK = 128


def made(**changes: Any) -> Workload:
    knobs: dict[str, Any] = {
        "requests": 400,
        "rate_per_s": 2.0,
        "input_tokens": 5000,
        "unique_tokens": 1000,
        "output_tokens": 100,
        "groups": 8,
    }
    return generate_shared_prefixes(SharedPrefixKnobs(**{**knobs, **changes}), name="shared")


def test_a_group_shares_its_first_tokens_and_nothing_more() -> None:
    work = made()
    shared = 4000 // BLOCK
    heads = {request.block_ids[:shared] for request in work.requests}
    assert len(heads) == 8
    assert len({block for head in heads for block in head}) == 8 * shared
    tails = [block for request in work.requests for block in request.block_ids[shared:]]
    assert len(tails) == len(set(tails)) == 400 * (5000 // BLOCK - shared)
    assert not set(tails) & {block for head in heads for block in head}


def test_a_block_that_is_shared_in_part_is_the_requests_own() -> None:
    work = made(input_tokens=1000, unique_tokens=900, groups=1, requests=2)
    first, second = (request.block_ids for request in work.requests)
    assert len(first) == len(second) == 1000 // BLOCK
    assert not set(first) & set(second)  # 100 tokens are not a block


def test_lengths_have_their_means_and_spreads() -> None:
    work = made(requests=2000, input_stddev=200, output_stddev=30)
    lengths = [request.input_tokens for request in work.requests]
    assert sum(lengths) / 2000 == pytest.approx(5000, rel=0.01)
    assert min(lengths) > 4000
    answers = [request.output_tokens for request in work.requests]
    assert sum(answers) / 2000 == pytest.approx(100, rel=0.02)
    assert len(set(answers)) > 50
    assert {request.output_tokens for request in made().requests} == {100}


def test_arrivals_are_random_at_their_rate() -> None:
    at_s = [request.arrival_s for request in made(requests=2000, rate_per_s=4.0).requests]
    gaps = [after - before for before, after in pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.15)  # exponential


def test_skew_draws_some_groups_more_often() -> None:
    def counts(skew: float) -> list[int]:
        work = made(requests=2000, skew=skew)
        return sorted(Counter(r.block_ids[0] for r in work.requests).values(), reverse=True)

    assert counts(0)[0] < 1.4 * counts(0)[-1]
    # Zipf: the first group has eight times the share of the eighth.
    assert counts(1)[0] > 5 * counts(1)[-1]


def test_a_longer_unique_part_means_fewer_blocks_seen_before() -> None:
    def seen(unique: int) -> float:
        known: set[int] = set()
        again = total = 0
        for request in made(unique_tokens=unique).requests:
            again += sum(block in known for block in request.block_ids)
            total += len(request.block_ids)
            known.update(request.block_ids)
        return again / total

    assert seen(500) > seen(2500) > seen(4500) > 0


def test_the_same_seed_gives_the_same_requests() -> None:
    assert made(seed=3, input_stddev=100) == made(seed=3, input_stddev=100)
    assert made(seed=4).requests != made(seed=3).requests


def test_prompts_that_share_nothing() -> None:
    work = made(unique_tokens=5000)
    blocks = [block for request in work.requests for block in request.block_ids]
    assert len(blocks) == len(set(blocks))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"requests": 0}, "requests=0"),
        ({"groups": 0}, "groups=0"),
        ({"rate_per_s": 0}, "rate_per_s=0"),
        ({"rate_per_s": float("inf")}, "rate_per_s=inf"),
        ({"input_stddev": -1}, "input_stddev=-1"),
        ({"skew": float("nan")}, "skew=nan"),
        ({"output_tokens": 0}, "output_tokens=0"),
        ({"unique_tokens": 6000}, "unique_tokens=6000 is more than input_tokens=5000"),
    ],
)
def test_impossible_knobs_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        made(**change)
