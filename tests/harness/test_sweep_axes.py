"""What a sweep varies: grids, samples of assumptions, and what is refused before it begins."""

from __future__ import annotations

import dataclasses

import pytest

from cxlbench.harness.experiment import Context, ExperimentError, Knob
from cxlbench.harness.sweep_axes import SweepError, as_number, make_design
from tests.harness.toy_experiment import EXPERIMENT

KNOBS_ONLY = dataclasses.replace(EXPERIMENT, profiles=("nic-100g",))


def values(key, *sets, **more):
    points = make_design(EXPERIMENT, sets=sets, **more).points
    return list(dict.fromkeys(point[key] for point in points))


def test_a_list_of_values_is_a_grid_in_its_order():
    assert make_design(EXPERIMENT, sets=("sessions=8,4",)).points == (
        {"sessions": "8"},
        {"sessions": "4"},
    )


def test_several_keys_make_all_combinations():
    design = make_design(EXPERIMENT, sets=("sessions=4,8", "routing=round-robin,prefix-aware"))
    assert [tuple(point.values()) for point in design.points] == [
        ("4", "round-robin"),
        ("4", "prefix-aware"),
        ("8", "round-robin"),
        ("8", "prefix-aware"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("share=0.2..0.8:4", ["0.2", "0.4", "0.6", "0.8"]),
        ("sessions=1..4:3", ["1", "2", "4"]),
        ("sessions=1..3:9", ["1", "2", "3"]),
        ("nic-100g.bandwidth=50..200 Gb/s:2", ["50 Gb/s", "200 Gb/s"]),
        ("nic-100g.bandwidth=50 Gb/s..200 Gb/s:2", ["50 Gb/s", "200 Gb/s"]),
        ("nic-100g.latency=1 us,3us", ["1 us", "3us"]),
        ("cxl-hm-prototype.dram_capacity=16..64 GiB:2", ["16777216 KiB", "67108864 KiB"]),
    ],
)
def test_ranges_are_evenly_spaced_with_their_unit(text, expected):
    assert values(text.partition("=")[0], text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sesions=1,2", "did you mean 'sessions'"),
        ("nic-100g.bandwith=1 GB/s", "did you mean 'nic-100g.bandwidth'"),
        ("sessions", "is not KEY=V1,V2"),
        ("sessions=", "is not KEY=V1,V2"),
        ("sessions=1,,2", "empty value"),
        ("sessions=1,1", "given twice"),
        ("sessions=one", "whole number"),
        ("sessions=1..5", "LOW..HIGH:N"),
        ("sessions=5..1:3", "goes up"),
        ("sessions=1..5:1", "2 values or more"),
        ("nic-100g.bandwidth=1 GB/s..200 Gb/s:3", "same unit"),
        ("nic-100g.bandwidth=100", "without a unit"),
        ("nic-100g.bandwidth=1 GiB", "expected a bandwidth"),
        ("routing=random", "round-robin, prefix-aware"),
        ("cxl-hm-prototype.dram_capacity=1 GiB,3 MiB", "not a multiple"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_what_could(text, said):
    with pytest.raises(ExperimentError, match=said.replace(".", r"\.")):
        make_design(EXPERIMENT, sets=(text,))


def test_a_key_given_twice_is_refused():
    with pytest.raises(SweepError, match="put all its values into one"):
        make_design(EXPERIMENT, sets=("sessions=1,2", "sessions=3"))


def test_nothing_to_sweep_is_refused():
    with pytest.raises(SweepError, match="nothing to sweep"):
        make_design(EXPERIMENT)


def test_too_many_points_are_refused_before_they_are_made():
    with pytest.raises(SweepError, match="1,000,000 points"):
        make_design(KNOBS_ONLY, sets=("share=0..1:1000", "sessions=1..1000:1000"))


def test_assumptions_are_sampled_between_low_and_high():
    design = make_design(EXPERIMENT, samples=16, seed=3)
    assert len(design.points) == 16
    bounds = {a.key: a for a in EXPERIMENT.assumptions() if not a.choices}
    for point in design.points:
        for key, text in point.items():
            found = bounds.get(key)
            value = as_number(text)
            if found is None or value is None or text in ("on", "off"):
                continue
            low, high = as_number(found.low), as_number(found.high)
            halved = any(
                one in [p.get(key) for p in design.points] for one in (f"{low}", f"{high}")
            )
            assert halved or 0.45 * low <= value <= 2.1 * high
    shares = sorted(float(point["share"]) for point in design.points)
    assert [int((share - 0.35) / 0.3 * 16) for share in shares] == list(range(16))


def test_choices_are_used_equally_often():
    routings = [point["routing"] for point in make_design(EXPERIMENT, samples=16).points]
    assert sorted(routings) == ["prefix-aware"] * 8 + ["round-robin"] * 8


@pytest.mark.parametrize("quick", [False, True])
def test_every_sampled_point_is_possible(quick):
    design = make_design(EXPERIMENT, samples=40, quick=quick, seed=1)
    for point in design.points:
        Context(EXPERIMENT, quick=quick, overrides=point)
    assert "cxl-hm-prototype.staging_frame" in design.keys
    assert "cmm-h-256g.refill_unit" in design.keys


def test_sizes_that_must_divide_others_are_halved_and_doubled():
    design = make_design(EXPERIMENT, samples=12)
    frames = {p.get("cxl-hm-prototype.staging_frame") for p in design.points} - {None}
    assert frames == {"1 MiB", "2 MiB", "4 MiB"}


def test_what_is_not_varied_is_listed_with_the_reason():
    kept = {one.key: one.why for one in make_design(EXPERIMENT, samples=4).kept}
    assert "zero" in kept["cmm-h-256g.associativity"]
    every = {assumption.key for assumption in EXPERIMENT.assumptions()}
    assert every == set(make_design(EXPERIMENT, samples=4).keys) | kept.keys()


def test_keys_of_the_grid_are_not_sampled_and_samples_run_at_each_of_its_points():
    design = make_design(EXPERIMENT, sets=("share=0.4,0.6",), samples=5)
    assert [point["share"] for point in design.points] == ["0.4"] * 5 + ["0.6"] * 5
    first, second = design.points[0], design.points[5]
    assert {**first, "share": "0.6"} == second


def test_the_same_seed_gives_the_same_points_and_another_does_not():
    assert make_design(EXPERIMENT, samples=8, seed=1) == make_design(EXPERIMENT, samples=8, seed=1)
    assert make_design(EXPERIMENT, samples=8, seed=1) != make_design(EXPERIMENT, samples=8, seed=2)


def test_an_experiment_without_assumptions_has_none_to_vary():
    sure = dataclasses.replace(
        EXPERIMENT, profiles=(), knobs=(Knob(name="sessions", value=1, source="s"),)
    )
    with pytest.raises(SweepError, match="no assumption that can be varied"):
        make_design(sure, samples=4)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.5", 0.5),
        ("100 Gb/s", 12.5e9),
        ("12.5 GB/s", 12.5e9),
        ("4096 KiB", 4 << 20),
        ("round-robin", None),
        ("on", None),
        ("5 apples", None),
    ],
)
def test_values_are_compared_in_base_units(text, number):
    assert as_number(text) == number


def test_a_range_of_more_values_than_a_sweep_has_points_is_refused_at_once():
    with pytest.raises(SweepError, match="1,000,000,000 points; a sweep has"):
        make_design(EXPERIMENT, sets=["sessions=1..2:1000000000"])
