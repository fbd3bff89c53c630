"""Latin-hypercube samples: each stratum once, each choice equally often, keys on their own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.latin_hypercube import cycled, strata

COUNTS = st.integers(1, 200)
SEEDS = st.integers(0, 1000)


@given(COUNTS, SEEDS)
def test_every_stratum_is_used_once(count, seed):
    places = strata("key", count, seed=seed)
    assert all(0 <= place < 1 for place in places)
    assert sorted(int(place * count) for place in places) == list(range(count))


@given(st.lists(st.text(), min_size=1, max_size=5, unique=True), COUNTS, SEEDS)
def test_choices_are_used_equally_often_to_one(choices, count, seed):
    used = Counter(cycled("key", choices, count, seed=seed))
    assert sum(used.values()) == count
    often = [used[choice] for choice in choices]
    assert max(often) - min(often) <= 1


def test_the_same_seed_and_key_give_the_same_sample_and_others_do_not():
    assert strata("a", 20, seed=1) == strata("a", 20, seed=1)
    assert strata("a", 20, seed=1) != strata("a", 20, seed=2)
    assert strata("a", 20, seed=1) != strata("b", 20, seed=1)
    assert cycled("a", "xyz", 20, seed=1) == cycled("a", "xyz", 20, seed=1)
    assert cycled("a", "xyz", 20, seed=1) != cycled("b", "xyz", 20, seed=1)


def test_strata_are_shuffled():
    places = strata("a", 50, seed=0)
    assert places != sorted(places)


@pytest.mark.parametrize("count", [0, -1])
def test_an_empty_sample_is_refused(count):
    with pytest.raises(ValueError, match="1 point or more"):
        strata("key", count, seed=0)


def test_nothing_to_choose_from_is_refused():
    with pytest.raises(ValueError, match="nothing to choose"):
        cycled("key", [], 3, seed=0)
