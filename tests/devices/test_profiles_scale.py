"""The rule of scale, as properties of every built-in profile."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.profile import (
    CmmHProfile,
    CxlHmProfile,
    Profile,
    ScaleError,
    SsdProfile,
    list_profiles,
    load_as,
    load_profile,
    scale_profile,
    scaled_bytes,
)
from cxlbench.devices.profile_schema import Number, Scaling, schema_of
from cxlbench.devices.units import PAGE_BYTES, Dimension

PROFILES = [load_profile(summary.name) for summary in list_profiles()]
SCALES = st.one_of(st.integers(1, 4096), st.floats(1, 4096))
GIB = 1 << 30
MIB = 1 << 20


def numbers(profile: Profile, *scalings: Scaling) -> list[tuple[str, Number, float]]:
    """Return name, rule and value of the given numbers with one of the scalings."""
    return [
        (key.name, key.rule, getattr(profile, key.name))
        for key in schema_of(type(profile))
        if isinstance(key.rule, Number)
        and key.rule.scaling in scalings
        and getattr(profile, key.name) is not None
    ]


@given(profile=st.sampled_from(PROFILES), scale=SCALES)
def test_latencies_counts_rates_and_ratios_are_not_scaled(profile, scale):
    scaled = scale_profile(profile, scale)
    assert numbers(scaled, Scaling.NONE) == numbers(profile, Scaling.NONE)


@given(profile=st.sampled_from(PROFILES), scale=SCALES)
def test_bandwidths_are_divided(profile, scale):
    scaled = scale_profile(profile, scale)
    for name, _, value in numbers(profile, Scaling.BANDWIDTH):
        assert getattr(scaled, name) * scale == pytest.approx(value, rel=1e-12)


@given(profile=st.sampled_from(PROFILES), scale=SCALES)
def test_capacities_are_divided_to_whole_grains_and_never_hold_more(profile, scale):
    scaled = scale_profile(profile, scale)
    if scale == 1:
        return
    for name, rule, value in numbers(profile, Scaling.CAPACITY):
        grain = getattr(scaled, rule.grain) if rule.grain else PAGE_BYTES
        held = getattr(scaled, name)
        assert held % grain == 0
        assert held * scale <= value * (1 + 1e-12)
        assert (held + grain) * scale > value


@given(profile=st.sampled_from(PROFILES), scale=SCALES)
def test_windows_are_divided_to_whole_pages_and_never_go_below_one(profile, scale):
    scaled = scale_profile(profile, scale)
    for name, _, value in numbers(profile, Scaling.WINDOW):
        window = getattr(scaled, name)
        assert window % PAGE_BYTES == 0
        assert window == max(PAGE_BYTES, math.floor(value / scale / PAGE_BYTES) * PAGE_BYTES)


@given(profile=st.sampled_from(PROFILES), scale=SCALES)
def test_what_must_hold_an_object_is_never_below_its_share(profile, scale):
    scaled = scale_profile(profile, scale)
    for name, rule, value in numbers(profile, Scaling.RESERVE):
        held, grain = getattr(scaled, name), getattr(scaled, rule.grain)
        assert held % grain == 0
        assert held * scale >= value * (1 - 1e-12)
        assert (held - grain) * scale < value


@given(scale=SCALES)
def test_the_ssd_of_a_device_is_scaled_with_it(scale):
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    assert scale_profile(hm, scale).ssd == scale_profile(hm.ssd, scale)


@given(scale=st.integers(0, 9).map(lambda power: 2**power))
def test_powers_of_two_up_to_512_keep_the_number_of_frames(scale):
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    scaled = scale_profile(hm, scale)
    assert scaled.staging_frames == hm.staging_frames
    assert scaled.demand_frames == hm.demand_frames


@given(scale=SCALES, object_mib=st.sampled_from([16, 32, 168]))
def test_a_scaled_object_and_its_footer_page_fit_the_scaled_reserve(scale, object_mib):
    scaled = scale_profile(load_as(CxlHmProfile, "cxl-hm-prototype"), scale)
    payload = scaled_bytes(object_mib * MIB, scale, what="block")
    assert -(-payload // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES <= scaled.demand_reserve


@given(scale=SCALES)
def test_limits_that_act_page_by_page_are_scaled_as_bandwidths(scale):
    cmm_h = load_as(CmmHProfile, "cmm-h-256g")
    scaled = scale_profile(cmm_h, scale)
    assert scaled.miss_bandwidth * scale == pytest.approx(cmm_h.miss_bandwidth)
    ssd_bandwidth = scaled.ssd.random_read_bandwidth
    assert ssd_bandwidth * scale == pytest.approx(cmm_h.ssd.random_read_bandwidth)


def test_random_page_reads_are_bounded_by_operations():
    ssd = load_as(SsdProfile, "pm1743-class")
    assert ssd.random_read_bandwidth == pytest.approx(2.5e6 * 4096)


def test_a_refill_unit_of_the_full_size_device_may_exceed_a_scaled_granule():
    cmm_h = load_as(CmmHProfile, "cmm-h-256g", overrides={"refill_unit": "64 KiB"})
    assert scale_profile(cmm_h, 512).cache_granule == PAGE_BYTES


@pytest.mark.parametrize("name", ["cxl-hm-prototype", "cmm-h-256g"])
def test_scaling_keeps_provenance_and_states_the_scale(name):
    profile = load_profile(name)
    scaled = scale_profile(profile, 64)
    assert scaled.provenance == profile.provenance
    assert (profile.scale, scaled.scale) == (1, 64)


def test_scale_one_changes_nothing():
    profile = load_profile("cxl-hm-prototype")
    assert scale_profile(profile, 1) == profile


def test_a_scaled_profile_is_not_scaled_again():
    scaled = scale_profile(load_profile("local-dram"), 2)
    with pytest.raises(ScaleError, match="'local-dram' is at scale 2 already"):
        scale_profile(scaled, 2)


def test_a_capacity_below_a_page_is_refused_by_name():
    with pytest.raises(ScaleError, match="capacity of profile 'local-dram' is 2748 B, below one"):
        scale_profile(load_profile("local-dram"), 1e8)


def test_a_dram_without_room_for_its_reserve_at_scale_is_refused_by_name():
    overrides = {"dram_capacity": "224 MiB", "flush_batch": "2 MiB"}
    tight = load_profile("cxl-hm-prototype", overrides=overrides)
    with pytest.raises(ScaleError, match=r"demand_reserve of profile .* \(at scale 3000\)"):
        scale_profile(tight, 3000)


@pytest.mark.parametrize("scale", [0, -1, 0.5, math.nan, math.inf, True])
def test_an_impossible_scale_is_refused(scale):
    with pytest.raises(ScaleError, match="expected a number of at least 1"):
        scale_profile(load_profile("local-dram"), scale)


def test_an_object_below_a_page_is_refused_with_the_largest_scale_that_fits():
    with pytest.raises(ScaleError, match=r"Llama block .* 2048 B at scale 8192.* at most 4096"):
        scaled_bytes(16 * MIB, 8192, what="Llama block")


def test_an_object_below_a_page_at_full_size_fits_no_scale():
    with pytest.raises(ScaleError, match="too small at any scale"):
        scaled_bytes(100, 1, what="footer")


@given(nbytes=st.integers(PAGE_BYTES, 2**40), scale=SCALES)
def test_objects_are_divided_or_refused(nbytes, scale):
    try:
        result = scaled_bytes(nbytes, scale, what="object")
    except ScaleError:
        assert nbytes / scale < PAGE_BYTES
    else:
        assert result >= PAGE_BYTES
        assert nbytes / scale - 1 <= result <= nbytes / scale


def test_every_size_and_bandwidth_declares_how_it_scales():
    fixed = {"page_size", "refill_unit", "line", "node_cache"}
    for profile in PROFILES:
        for name, rule, _ in numbers(profile, Scaling.NONE):
            if rule.dimension in (Dimension.SIZE, Dimension.BANDWIDTH):
                assert name in fixed
