"""What a sweep says: shares, and which keys matter."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.results import Verdict
from cxlbench.harness.sweep_rows import (
    CheckRow,
    ClaimRow,
    PointResult,
    PointRow,
    SweepFile,
    SweepHeader,
)
from cxlbench.harness.sweep_summary import correlation, key_weight, ranks, summarize

POINTS = 40


def file(rows, keys, points=None):
    header = SweepHeader(
        format="",
        version=1,
        experiment="toy",
        seed=0,
        quick=False,
        points=points or len(rows),
        keys=keys,
        design="",
        setup="",
        versions={},
        kept={},
    )
    return SweepFile(header=header, rows=tuple(rows))


def row(point, keys, value, verdict=Verdict.HOLDS, **more):
    claims = [ClaimRow(name="c", verdict=verdict, value=value)]
    return PointRow(point=point, keys=keys, result=PointResult(claims=claims, **more))


def drawn():
    random_ = random.Random(4)
    rows = []
    for point in range(POINTS):
        a, b, noise = random_.random(), random_.random(), random_.random()
        choice = random_.choice(["x", "y", "z"])
        value = 10 * a**3 - b + 0.001 * noise + {"x": 0, "y": 2, "z": 1}[choice]
        keys = {"a": f"{a} GB/s", "b": str(b), "nothing": str(noise), "choice": choice}
        rows.append(row(point, keys, value))
    return file(rows, ["b", "nothing", "choice", "a"])


def test_keys_that_matter_are_listed_the_strongest_first_with_their_sign():
    (claim,) = summarize(drawn()).claims
    assert claim.keys[0].key == "a"
    assert "nothing" not in [weight.key for weight in claim.keys]
    strongest = claim.keys[0]
    assert 0.6 < strongest.strength < 1
    assert str(strongest).startswith("a +0.")


def test_a_key_with_which_the_value_falls_has_a_minus():
    keys = [str(number) for number in range(10)]
    weight = key_weight("k", keys, np.arange(10.0)[::-1])
    assert weight is not None
    assert weight.strength == pytest.approx(-1)
    assert str(weight) == "k -1.00"


def test_a_choice_has_a_strength_without_a_sign():
    keys = ["p", "q"] * 10
    weight = key_weight("k", keys, np.array([1.0, 5.0] * 10))
    assert weight is not None
    assert weight.choice
    assert str(weight) == "k 1.00"


def test_values_in_different_units_are_compared():
    keys = [f"{n} MB/s" for n in range(500, 1000, 100)] + [f"{n} GB/s" for n in range(1, 6)]
    weight = key_weight("k", keys, np.arange(10.0))
    assert weight is not None
    assert weight.strength == pytest.approx(1)


def test_points_where_a_key_kept_its_value_do_not_count_for_it():
    keys = [None, *map(str, range(10)), None]
    weight = key_weight("k", keys, np.array([100.0, *range(10), -100.0]))
    assert weight is not None
    assert weight.strength == pytest.approx(1)


@pytest.mark.parametrize("keys", [["1"] * 10, [str(n) for n in range(4)], [None] * 9])
def test_a_key_that_does_not_vary_or_too_few_points_say_nothing(keys):
    assert key_weight("k", keys, np.arange(float(len(keys)))) is None


def test_chance_alone_is_seldom_listed():
    random_ = random.Random(1)
    listed = 0
    for _ in range(200):
        keys = [str(random_.random()) for _ in range(32)]
        values = np.array([random_.random() for _ in range(32)])
        listed += key_weight("k", keys, values) is not None
    assert listed < 200 * 0.1


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_ranks_of_equal_values_are_their_mean(values):
    found = ranks(np.array(values, dtype=float))
    for value, rank in zip(values, found, strict=True):
        below = sum(other < value for other in values)
        same = values.count(value)
        assert rank == below + (same + 1) / 2


def test_a_ranking_without_variation_correlates_with_nothing():
    assert correlation(np.ones(4), np.arange(4.0)) == 0


def test_shares_errors_and_broken_laws_are_counted():
    rows = [
        row(0, {}, 3.0),
        row(1, {}, 2.0, Verdict.DIRECTION),
        row(2, {}, None, Verdict.OPEN),
        row(3, {}, 0.5, Verdict.FAILS, checks=[CheckRow(name="law", ok=False)]),
        PointRow(point=4, keys={}, result=PointResult(error="ValueError: no")),
    ]
    found = summarize(file(rows, [], points=9))
    (claim,) = found.claims
    assert (claim.points, claim.holds, claim.direction, claim.fails, claim.undecided) == (
        *(4, 1, 1, 1, 1),
    )
    assert (claim.least, claim.median, claim.greatest) == (0.5, 2.0, 3.0)
    assert found.errors == ((4, "ValueError: no"),)
    assert found.broken_checks == (("law", 1),)
    assert (found.done, found.points, found.partial) == (5, 9, True)
    assert found.threshold is None


def test_a_sweep_without_rows_says_nothing():
    found = summarize(file([], ["a"], points=3))
    assert (found.claims, found.done, found.partial) == ((), 0, True)
