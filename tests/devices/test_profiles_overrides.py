"""Where profiles are found, what overrides do, and how units read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.profile import (
    CmmHProfile,
    CxlHmProfile,
    SsdProfile,
    list_profiles,
    load_as,
    load_profile,
)
from cxlbench.devices.profile_files import builtin_profiles
from cxlbench.devices.units import (
    UNITS,
    Dimension,
    UnitError,
    format_base,
    format_number,
    parse_quantity,
    to_base,
)

TABLES = {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in builtin_profiles()}
GIB = 1 << 30


def own_ssd(folder: Path, name: str = "my-ssd") -> Path:
    """Save a user's SSD of 7 GB/s."""
    text = TABLES["pm1743-class"].replace("pm1743-class", name).replace("value = 13.0", "value = 7")
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_override_is_read_with_its_unit():
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"dram_capacity": "32 GiB"})
    assert hm.dram_capacity == 32 * GIB


def test_an_override_says_so_in_the_provenance():
    hm = load_profile("cxl-hm-prototype", overrides={"dram_capacity": "32 GiB"})
    quantity = hm.provenance["dram_capacity"]
    assert (quantity.value, quantity.unit, quantity.statistic) == (32, "GiB", "override")
    assert not quantity.assumption


def test_an_override_leaves_the_other_provenance_alone():
    plain = load_profile("cxl-hm-prototype").provenance
    other = load_profile("cxl-hm-prototype", overrides={"dram_capacity": "32 GiB"}).provenance
    assert {k: v for k, v in other.items() if k != "dram_capacity"} == {
        k: v for k, v in plain.items() if k != "dram_capacity"
    }


def test_an_override_reaches_into_the_ssd():
    overrides = {"ssd.read_bandwidth": "7 GB/s"}
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides=overrides)
    assert hm.ssd.read_bandwidth == 7e9
    assert hm.ssd.provenance["read_bandwidth"].statistic == "override"


def test_an_override_gives_an_optional_number_that_the_file_leaves_out():
    dram = load_profile("remote-dram", overrides={"latency_low": "100 ns"})
    assert dram.provenance["latency_low"].source == "given on load"


def test_counts_and_ratios_need_no_unit_in_an_override():
    overrides = {"ssd_count": "4", "write_buffer_share": "0.25"}
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides=overrides)
    assert (hm.ssd_count, hm.write_buffer_share) == (4, 0.25)


@pytest.mark.parametrize(("word", "value"), [("off", False), ("on", True), ("false", False)])
def test_flags_are_words_in_an_override(word, value):
    cmm_h = load_as(CmmHProfile, "cmm-h-256g", overrides={"eager_write_back": word})
    assert cmm_h.eager_write_back is value


def test_the_policy_can_be_replaced_by_a_users_object():
    cmm_h = load_as(CmmHProfile, "cmm-h-256g", overrides={"policy": "mine.policies:Sieve"})
    assert cmm_h.policy == "mine.policies:Sieve"


def test_the_ssd_can_be_replaced_by_name(tmp_path):
    own_ssd(tmp_path)
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"ssd": "my-ssd"}, folder=tmp_path)
    assert hm.ssd.read_bandwidth == 7e9


def test_the_ssd_can_be_replaced_by_path(tmp_path):
    overrides = {"ssd": str(own_ssd(tmp_path)), "ssd.queue_depth": "8"}
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides=overrides)
    assert (hm.ssd.name, hm.ssd.queue_depth) == ("my-ssd", 8)


def test_a_reference_is_first_looked_for_beside_its_file(tmp_path):
    own_ssd(tmp_path, "pm1743-class")
    path = tmp_path / "cxl-hm-prototype.toml"
    path.write_text(TABLES["cxl-hm-prototype"], encoding="utf-8")
    assert load_as(CxlHmProfile, path).ssd.read_bandwidth == 7e9


def test_a_relative_path_in_a_profile_is_relative_to_its_file(tmp_path):
    own_ssd(tmp_path)
    path = tmp_path / "cxl-hm-prototype.toml"
    text = TABLES["cxl-hm-prototype"].replace('"pm1743-class"', '"my-ssd.toml"')
    path.write_text(text, encoding="utf-8")
    assert load_as(CxlHmProfile, path).ssd.name == "my-ssd"


def test_a_users_profile_goes_before_the_builtin_one_of_its_name(tmp_path):
    own_ssd(tmp_path, "pm1743-class")
    assert load_as(SsdProfile, "pm1743-class", folder=tmp_path).read_bandwidth == 7e9


def test_a_folder_that_is_not_there_leaves_the_builtin_ones(tmp_path):
    assert load_profile("nic-100g", folder=tmp_path / "gone").name == "nic-100g"


def test_a_list_holds_a_users_profiles_beside_the_builtin_ones(tmp_path):
    own_ssd(tmp_path)
    summaries = {summary.name: summary for summary in list_profiles(tmp_path)}
    assert set(summaries) == {*TABLES, "my-ssd"}
    assert not summaries["my-ssd"].is_builtin
    assert summaries["pm1743-class"].is_builtin


def test_a_list_is_in_the_order_of_names_and_says_what_each_is():
    summaries = list_profiles()
    assert [s.name for s in summaries] == sorted(TABLES)
    assert all(s.description and s.error is None for s in summaries)


@pytest.mark.parametrize(
    ("value", "unit", "dimension", "base"),
    [
        (1, "GiB", Dimension.SIZE, 2**30),
        (1, "GB", Dimension.SIZE, 10**9),
        (0.1, "GB", Dimension.SIZE, 10**8),
        (1.5, "KiB", Dimension.SIZE, 1536),
        (100, "Gb/s", Dimension.BANDWIDTH, 12.5e9),
        (1, "GiB/s", Dimension.BANDWIDTH, 2.0**30),
        (57.3, "us", Dimension.TIME, 57.3e-6),
        (2.5, "M IOPS", Dimension.RATE, 2.5e6),
        (250, "K IOPS", Dimension.RATE, 250e3),
        (3, "1/s", Dimension.RATE, 3.0),
        (312, "TFLOP/s", Dimension.COMPUTE, 312e12),
        (10500, "USD", Dimension.COST, 10500.0),
    ],
)
def test_units_convert_exactly(value, unit, dimension, base):
    assert to_base(value, unit, dimension) == base


def test_a_part_of_a_byte_is_refused():
    with pytest.raises(UnitError, match=r"0\.3 KiB, expected a whole number of bytes"):
        to_base(0.3, "KiB", Dimension.SIZE)


@given(
    unit=st.sampled_from([u for u in UNITS if u != "flag"]),
    gap=st.sampled_from(["", " ", "  "]),
    value=st.integers(0, 10**6),
)
def test_what_is_written_with_a_unit_reads_as_it_was(unit, gap, value):
    gap = " " if unit[0].isdigit() else gap
    assert parse_quantity(f" {value}{gap}{unit}", UNITS[unit].dimension) == (value, unit)


@given(value=st.floats(1e-9, 1e12))
def test_a_float_reads_as_it_was_formatted(value):
    text = format_number(value)
    assert parse_quantity(f"{text} GB/s", Dimension.BANDWIDTH)[0] == value


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (512 << 20, Dimension.SIZE, "512 MiB"),
        (100, Dimension.SIZE, "100 B"),
        (0, Dimension.SIZE, "0 B"),
        (421.875e6, Dimension.BANDWIDTH, "421.9 MB/s"),
        (27e9, Dimension.BANDWIDTH, "27 GB/s"),
        (57.3e-6, Dimension.TIME, "57.3 us"),
        (2.5e6, Dimension.RATE, "2.5 M IOPS"),
        (0.5, Dimension.RATIO, "0.5"),
        (True, Dimension.FLAG, "on"),
    ],
)
def test_base_values_print_in_the_unit_that_suits_them(value, dimension, text):
    assert format_base(value, dimension) == text
