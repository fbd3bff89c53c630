"""A point of an experiment: knobs and profile numbers with overrides, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CmmHProfile,
    CxlHmProfile,
    LinkProfile,
    ProfileError,
)
from cxlbench.harness.experiment import Context, ExperimentError, Knob
from tests.harness.toy_experiment import EXPERIMENT


def context(**overrides: str) -> Context:
    given = {key.replace("__", "."): text for key, text in overrides.items()}
    return Context(EXPERIMENT, overrides=given)


def at(key: str, text: str) -> Context:
    return Context(EXPERIMENT, overrides={key: text})


# -- knobs ----------------------------------------------------------------------------------------


def test_a_knob_has_its_value_the_quick_one_or_the_override() -> None:
    assert context().count("sessions") == 32
    assert Context(EXPERIMENT, quick=True).count("sessions") == 16
    assert Context(EXPERIMENT, quick=True, overrides={"sessions": "5"}).count("sessions") == 5
    assert Context(EXPERIMENT, quick=True).number("share") == 0.5
    assert context(routing="prefix-aware").choice("routing") == "prefix-aware"


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (Knob(name="k", value=3, source=""), "17", 17),
        (Knob(name="k", value=3.0, source=""), "1e3", 1000.0),
        (Knob(name="k", value=True, source=""), "False", False),
        (Knob(name="k", value="a", source=""), "any text", "any text"),
        (Knob(name="k", value="a", source="", choices=("a", "b")), "b", "b"),
        (Knob(name="k", value=1, source="", choices=("1", "2")), "2", 2),
    ],
)
def test_a_text_becomes_a_value_of_the_knobs_kind(knob: Knob, text: str, value: object) -> None:
    found = knob.parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("knob", "text", "says"),
    [
        (Knob(name="k", value=3, source=""), "1.5", "k='1.5': must be a whole number"),
        (Knob(name="k", value=3.0, source=""), "much", "k='much': must be a number"),
        (Knob(name="k", value=3, source=""), "-1", "must be finite and not negative"),
        (Knob(name="k", value=3.0, source=""), "inf", "must be finite and not negative"),
        (Knob(name="k", value=3.0, source=""), "nan", "must be finite and not negative"),
        (Knob(name="k", value=True, source=""), "1", "must be true or false"),
        (Knob(name="k", value="a", source="", choices=("a", "b")), "c", "possible are a, b"),
    ],
)
def test_a_text_that_is_no_value_is_refused(knob: Knob, text: str, says: str) -> None:
    with pytest.raises(ExperimentError, match=says):
        knob.parse(text)


def test_an_unknown_knob_gets_the_nearest_ones() -> None:
    with pytest.raises(ExperimentError, match="did you mean 'sessions'"):
        context().knob("session")


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("sesions", "4", "did you mean 'sessions'"),
        ("nic-100g.bandwith", "4", "did you mean 'nic-100g.bandwidth'"),
        ("nic-200g.bandwidth", "200 Gb/s", "did you mean 'nic-100g.bandwidth'"),
        ("sessions", "four", "must be a whole number"),
    ],
)
def test_a_point_with_a_key_or_value_that_cannot_be_is_refused_at_once(
    key: str, text: str, says: str
) -> None:
    with pytest.raises(ExperimentError, match=says):
        at(key, text)


@pytest.mark.parametrize("text", ["fast", "-1 GB/s", "3 s"])
def test_an_impossible_profile_number_is_refused_at_once(text: str) -> None:
    with pytest.raises(ProfileError, match="bandwidth"):
        at("nic-100g.bandwidth", text)


def test_the_setup_is_every_knobs_value() -> None:
    found = context(sessions="7").setup()
    assert found["sessions"] == 7
    assert list(found) == [knob.name for knob in EXPERIMENT.knobs]


# -- profiles -------------------------------------------------------------------------------------


def test_a_profile_has_the_overrides_of_this_point() -> None:
    assert context().profile(LinkProfile, "nic-100g").bandwidth == 12.5e9
    changed = at("nic-100g.bandwidth", "200 Gb/s")
    assert changed.profile(LinkProfile, "nic-100g").bandwidth == 25e9
    assert changed.profile(AcceleratorProfile, "a100-80g").peak_compute == 312e12


def test_a_profile_inside_another_has_them_too() -> None:
    devices = Context(
        _with_profiles("cxl-hm-prototype", "cmm-h-256g", "pm1743-class"),
        overrides={"pm1743-class.read_bandwidth": "1 GB/s"},
    )
    assert devices.profile(CxlHmProfile, "cxl-hm-prototype").ssd.read_bandwidth == 1e9
    assert devices.profile(CmmHProfile, "cmm-h-256g").ssd.read_bandwidth == 1e9


def _with_profiles(*names: str) -> Any:
    return replace(EXPERIMENT, profiles=names)


def test_a_profile_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ExperimentError, match="reads profile 'nic-200g', which it does not"):
        context().profile(LinkProfile, "nic-200g")


# -- what is not known ----------------------------------------------------------------------------


def test_assumptions_are_collected_from_knobs_and_profiles() -> None:
    found = {one.key: one for one in EXPERIMENT.assumptions()}
    assert {"share", "routing", "nic-100g.latency", "a100-80g.prefill_share"} <= set(found)
    assert "sessions" not in found
    assert "nic-100g.bandwidth" not in found
    share = found["share"]
    assert (share.value, share.low, share.high) == ("0.5", "0.35", "0.65")
    assert found["routing"].choices == ("round-robin", "prefix-aware")
    latency = found["nic-100g.latency"]
    assert (latency.value, latency.low, latency.high) == ("2 us", "1.4 us", "2.6 us")


def test_every_end_of_a_range_is_a_value_that_a_point_takes() -> None:
    for one in EXPERIMENT.assumptions():
        for text in (one.low, one.high, *one.choices):
            if text:
                at(one.key, text)


def test_shares_stay_below_one_and_counts_above_nothing() -> None:
    found = {one.key: one for one in _with_profiles("a100-80g", "nic-100g").assumptions()}
    assert found["a100-80g.bandwidth_share"].high == "1"
    assert found["nic-100g.outstanding_reads"].low == "11"
    assert found["nic-100g.outstanding_reads"].high == "21"


def test_a_range_that_is_given_takes_the_place_of_thirty_percent() -> None:
    knobs = (
        Knob(name="many", value=32, source="", assumption=True, low=16, high=64),
        Knob(name="one", value=1, source="", assumption=True),
        Knob(name="flag", value=True, source="", assumption=True),
    )
    many, one, flag = replace(EXPERIMENT, knobs=knobs, profiles=()).assumptions()
    assert (many.low, many.high) == ("16", "64")
    assert (one.low, one.high) == ("1", "1")
    assert flag.choices == ("false", "true")


def test_a_points_memo_key_hangs_on_all_that_a_run_hangs_on() -> None:
    points = {
        Context(EXPERIMENT, quick=quick, seed=seed, overrides=overrides).point()
        for quick in (False, True)
        for seed in (0, 1)
        for overrides in ({}, {"sessions": "4"}, {"nic-100g.bandwidth": "1 GB/s"})
    }
    assert len(points) == 12
    assert at("sessions", "4").point() == at("sessions", "4").point()
