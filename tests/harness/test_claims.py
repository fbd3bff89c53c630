"""Verdicts on a paper's number, from measured ones only."""

from __future__ import annotations

import math

import pytest

from cxlbench.harness.claims import BAND, PaperClaim, Sense
from cxlbench.harness.results import Verdict

HOLDS, DIRECTION, FAILS, OPEN = Verdict.HOLDS, Verdict.DIRECTION, Verdict.FAILS, Verdict.OPEN


def claim(**fields: object) -> PaperClaim:
    return PaperClaim(**{"name": "n", "statement": "s", "source": "fig. 1", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (3.0, HOLDS),
        (2.4, HOLDS),
        (3.6, HOLDS),
        (2.39, DIRECTION),
        (3.61, DIRECTION),
        (50, DIRECTION),
        (1.21, DIRECTION),
        (1.19, FAILS),
        (1.0, FAILS),
        (0.5, FAILS),
        (-3.0, FAILS),
    ],
)
def test_about_holds_within_its_band_and_has_a_direction(measured: float, verdict: Verdict) -> None:
    assert claim(expected=3.0, neutral=1.0).verdict(measured) is verdict
    assert BAND == 0.2


def test_a_loss_has_its_direction_below_neutral() -> None:
    one = claim(expected=0.5, neutral=1.0)
    assert [one.verdict(x) for x in (0.5, 0.9, 1.0, 1.5)] == [HOLDS, DIRECTION, FAILS, FAILS]


def test_without_a_neutral_value_there_is_no_direction() -> None:
    assert claim(expected=5.0).verdict(4.0) is HOLDS
    assert claim(expected=5.0).verdict(3.9) is FAILS


@pytest.mark.parametrize(
    ("sense", "verdicts"),
    [
        (Sense.AT_LEAST, (FAILS, DIRECTION, HOLDS, HOLDS)),
        (Sense.AT_MOST, (HOLDS, HOLDS, HOLDS, DIRECTION)),
    ],
)
def test_at_least_and_at_most_have_no_band(sense: Sense, verdicts: tuple[Verdict, ...]) -> None:
    one = claim(expected=15.0, sense=sense, neutral=0.0)
    assert tuple(one.verdict(x) for x in (-1.0, 14.9, 15.0, 16.0)) == verdicts


def test_a_statement_is_true_or_not() -> None:
    one = claim(sense=Sense.TRUE, neutral=0.0)
    assert one.verdict(1.0) is HOLDS
    assert one.verdict(0.0) is FAILS
    assert (one.judge(1.0).measured, one.judge(0.0).measured, one.judge(0).expected) == (
        "yes",
        "no",
        "yes",
    )


@pytest.mark.parametrize("measured", [None, math.nan])
def test_what_was_not_measured_is_not_decided(measured: float | None) -> None:
    for sense in Sense:
        assert claim(sense=sense, neutral=0.0).judge(measured).verdict is OPEN


def test_infinity_is_far_from_every_number() -> None:
    assert claim(expected=3.0, unit="turn").judge(math.inf).verdict is FAILS
    assert claim(expected=3.0, neutral=1.0).judge(math.inf).verdict is DIRECTION


def test_a_band_of_nothing_takes_the_number_itself() -> None:
    one = claim(expected=3.0, band=0.0)
    assert one.verdict(3.0) is HOLDS
    assert one.verdict(3.0001) is FAILS


def test_a_judged_claim_says_both_numbers_and_why() -> None:
    judged = claim(expected=1.2, sense=Sense.AT_LEAST, neutral=1.0, unit="x").judge(
        1.1234, reason="since", at="32 at once"
    )
    assert (judged.expected, judged.measured, judged.value) == ("at least 1.2 x", "1.12 x", 1.1234)
    assert (judged.verdict, judged.reason, judged.at) == (DIRECTION, "since", "32 at once")
    assert claim(unit="x").judge(None).measured == "-"
