"""Built-in profiles: every number has its source, and the calibration table is all there."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from tabulate import tabulate

from cxlbench.devices.profile import (
    KINDS,
    CmmHProfile,
    CxlHmProfile,
    LinkProfile,
    SsdProfile,
    describe_profile,
    list_profiles,
    load_as,
    load_profile,
    scale_profile,
)
from cxlbench.devices.profile_schema import Number, schema_of
from cxlbench.devices.units import Dimension, to_base

GIB = 1 << 30
MIB = 1 << 20
BUILTIN = [summary.name for summary in list_profiles()]


def test_there_is_a_builtin_profile_of_every_kind():
    assert {summary.kind for summary in list_profiles()} == set(KINDS)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_number_of_a_builtin_profile_has_unit_statistic_and_source(name):
    profile = load_profile(name)
    for key in schema_of(type(profile)):
        if not isinstance(key.rule, Number) or getattr(profile, key.name) is None:
            continue
        quantity = profile.provenance[key.name]
        assert quantity.unit
        assert quantity.statistic
        assert len(quantity.source) > 5


@pytest.mark.parametrize("name", BUILTIN)
def test_the_base_value_is_the_written_quantity_in_base_units(name):
    profile = load_profile(name)
    rules = {key.name: key.rule for key in schema_of(type(profile))}
    for field, quantity in profile.provenance.items():
        base = to_base(quantity.value, quantity.unit, rules[field].dimension)
        assert getattr(profile, field) == base


@pytest.mark.parametrize("name", BUILTIN)
def test_what_is_called_an_assumption_is_marked_so(name):
    for quantity in load_profile(name).provenance.values():
        assert quantity.assumption or quantity.statistic != "assumption"
        assert quantity.assumption or "no source" not in quantity.source


CALIBRATION = [
    ("local-dram", "latency_low", 80e-9, "HyMCache"),
    ("local-dram", "latency_high", 140e-9, "HyMCache"),
    ("remote-dram", "latency_high", 280e-9, "HyMCache"),
    ("local-dram", "latency", 95.0e-9, "Cylon"),
    ("remote-dram", "latency", 139.3e-9, "Cylon"),
    ("expander-x8-gen5", "latency_low", 170e-9, "HyMCache"),
    ("expander-x8-gen5", "latency_high", 250e-9, "HyMCache"),
    ("expander-melody", "latency_low", 140e-9, "Melody"),
    ("expander-melody", "latency_high", 410e-9, "Melody"),
    ("expander-x8-gen5", "latency", 250e-9, "x8 Gen5"),
    ("expander-x8-gen5", "bandwidth", 17.8e9, "x8 Gen5"),
    ("cxl-switch-xconn", "latency", 750e-9, "HyMCache"),
    ("niagara-2.0", "latency", 640e-9, "TraCT"),
    ("niagara-2.0", "bandwidth", 10.1e9, "TraCT"),
    ("niagara-2.0", "capacity", 64 * GIB, "TraCT"),
    ("niagara-2.0-hymcache", "latency", 600e-9, "HyMCache"),
    ("niagara-2.0-cmpi", "latency", 790e-9, "second-hand"),
    ("niagara-2.0-cmpi", "flushed_access_latency", 2.2e-6, "second-hand"),
    ("niagara-2.0-cmpi", "bandwidth", 9.5e9, "second-hand"),
    ("cmm-h-256g", "hit_latency", 505e-9, "HotStorage"),
    ("cmm-h-256g", "port_bandwidth", 27e9, "HotStorage"),
    ("cmm-h-256g", "dram_capacity", 256 * GIB, "HyMCache"),
    ("cxl-hm-prototype", "dram_capacity", 64 * GIB, "HyMCache"),
    ("cxl-hm-prototype", "ssd_count", 2, "HyMCache"),
    ("pm1743-class", "capacity", 10**12, "HyMCache"),
    ("pm1743-class", "read_bandwidth", 13e9, "PM1743"),
    ("pm1743-class", "write_bandwidth", 6.6e9, "PM1743"),
    ("pm1743-class", "read_iops", 2.5e6, "PM1743"),
    ("pm1743-class", "write_iops", 250e3, "PM1743"),
    ("pm1743-class", "firmware_latency", 21.5e-6, "NVMeVirt"),
    ("pm1743-class", "page_read_latency_low", 29.8e-6, "NVMeVirt"),
    ("pm1743-class", "page_read_latency_high", 41.8e-6, "NVMeVirt"),
    ("pm1743-class", "program_latency", 185e-6, "NVMeVirt"),
    ("a100-80g", "peak_compute", 312e12, "NVIDIA"),
    ("a100-80g", "prefill_share_low", 0.4, "prefill"),
    ("a100-80g", "prefill_share_high", 0.6, "prefill"),
    ("software-default", "control_round_trip", 79e-6, "ZeroMQ"),
]


@pytest.mark.parametrize(("name", "field", "value", "source"), CALIBRATION)
def test_the_calibration_table_is_in_the_profiles(name, field, value, source):
    profile = load_profile(name)
    assert getattr(profile, field) == pytest.approx(value, rel=1e-12)
    assert source in profile.provenance[field].source


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("pm1743-class", "mixed_penalty"),
        ("niagara-2.0", "flush_latency"),
        ("cmm-h-256g", "refill_unit"),
        ("cmm-h-256g", "outstanding_misses"),
        ("cxl-hm-prototype", "write_buffer_share"),
        ("a100-80g", "prefill_share"),
    ],
)
def test_what_no_source_gives_is_an_assumption(name, field):
    assert load_profile(name).provenance[field].assumption


@pytest.mark.parametrize("name", BUILTIN)
def test_outcomes_of_the_table_are_no_inputs(name):
    """Bandwidth of a CMM-H beyond its DRAM (about 5 GB/s) and its p99.9 (1547 us) are checks."""
    profile = load_profile(name)
    rules = {key.name: key.rule for key in schema_of(type(profile))}
    outcomes = {Dimension.BANDWIDTH: 5e9, Dimension.TIME: 1547e-6}
    for field in profile.provenance:
        outcome = outcomes.get(rules[field].dimension)
        if outcome is not None:
            assert abs(getattr(profile, field) / outcome - 1) > 0.1, field


def test_the_read_latency_of_the_ssd_is_firmware_plus_the_mean_page_read():
    ssd = load_as(SsdProfile, "pm1743-class")
    assert ssd.firmware_latency is not None
    assert ssd.page_read_latency_low is not None
    assert ssd.page_read_latency_high is not None
    mean = (ssd.page_read_latency_low + ssd.page_read_latency_high) / 2
    assert ssd.read_latency == pytest.approx(ssd.firmware_latency + mean)


def test_network_gigabits_are_bits():
    assert load_as(LinkProfile, "nic-100g").bandwidth == 12.5e9
    assert load_as(LinkProfile, "nic-200g").bandwidth == 25e9


def test_the_dram_of_cxl_hm_is_split_into_whole_frames_without_a_rest():
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    assert hm.write_buffer_bytes == 8 * GIB
    assert hm.staging_frames * hm.staging_frame + hm.write_buffer_bytes == hm.dram_capacity


def test_the_demand_reserve_holds_the_largest_object_of_the_papers():
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    assert hm.demand_frames * hm.staging_frame > 168 * MIB


def test_a_cxl_hm_exposes_the_capacity_of_its_ssds():
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    assert hm.capacity == 2 * 10**12


def test_outstanding_misses_bound_the_bandwidth_of_misses():
    few = load_as(CmmHProfile, "cmm-h-256g", overrides={"outstanding_misses": "8"})
    assert few.miss_bandwidth == pytest.approx(8 * 4096 / few.ssd.read_latency)


def test_operations_bound_the_bandwidth_of_misses():
    busy = load_as(
        CmmHProfile,
        "cmm-h-256g",
        overrides={"outstanding_misses": "100000", "ssd.read_iops": "100 K IOPS"},
    )
    assert busy.miss_bandwidth == pytest.approx(2 * 100e3 * 4096)


def test_the_ssds_bound_the_bandwidth_of_misses():
    wide = load_as(
        CmmHProfile,
        "cmm-h-256g",
        overrides={"outstanding_misses": "100000", "refill_unit": "256 KiB"},
    )
    assert wide.miss_bandwidth == pytest.approx(26e9)


def test_profiles_are_values():
    first, second = (load_profile("cxl-hm-prototype") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_profile_cannot_be_changed():
    profile = load_profile("local-dram")
    with pytest.raises(AttributeError):
        profile.latency = 0.0


def test_a_description_has_a_row_for_every_number_and_for_those_of_its_ssd():
    hm = load_as(CxlHmProfile, "cxl-hm-prototype")
    names = [row.name for row in describe_profile(hm)]
    expected = [key.name for key in schema_of(CxlHmProfile)]
    assert [name for name in names if "." not in name] == expected
    assert "ssd.read_bandwidth" in names


def test_a_description_shows_value_with_unit_statistic_source_and_mark():
    rows = {row.name: row for row in describe_profile(load_profile("pm1743-class"))}
    row = rows["read_bandwidth"]
    assert row[1:3] == ("13 GB/s", "vendor peak, sequential")
    assert "PM1743" in row.source
    assert rows["mixed_penalty"].mark == "assumption"
    assert row.mark == ""


def test_a_description_of_a_scaled_profile_shows_both_sizes():
    scaled = scale_profile(load_profile("cxl-hm-prototype"), 64)
    rows = {row.name: row for row in describe_profile(scaled)}
    assert rows["dram_capacity"].value == "64 GiB (1 GiB at scale 64)"
    assert rows["load_latency"].value == "505 ns"


def test_a_description_marks_overrides_and_keeps_what_they_replace():
    hm = load_profile("cxl-hm-prototype", overrides={"dram_capacity": "32 GiB"})
    row = next(row for row in describe_profile(hm) if row.name == "dram_capacity")
    assert (row.value, row.mark) == ("32 GiB", "override")
    assert "64 GiB" in row.source


def test_rows_print_as_a_table_with_their_names_as_headers():
    table = tabulate(describe_profile(load_profile("local-dram")), headers="keys")
    assert table.splitlines()[0].split() == ["name", "value", "statistic", "source", "mark"]


def test_optional_numbers_that_are_not_given_have_no_row():
    names = [row.name for row in describe_profile(load_profile("remote-dram"))]
    assert "latency_low" not in names


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_guide_names_every_number_of_every_kind(kind):
    guide = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    (row,) = [line for line in guide.splitlines() if line.startswith(f"| `{kind}` |")]
    named = re.findall(r"`([a-z0-9_]+)`", row.split("|", 2)[2])
    assert named == [key.name for key in schema_of(KINDS[kind])]
