"""What the loader refuses, each by the file and the key."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from cxlbench.devices.profile import (
    CxlHmProfile,
    ProfileError,
    SsdProfile,
    list_profiles,
    load_as,
    load_profile,
)
from cxlbench.devices.profile_files import builtin_profiles

TABLES = {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in builtin_profiles()}


@pytest.fixture
def edited(tmp_path):
    """Return a function that saves a built-in profile with one text in it replaced."""

    def save(name: str, old: str, new: str) -> Path:
        text = TABLES[name]
        assert old in text
        path = tmp_path / f"{name}.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    return save


def number(key: str, value: str, unit: str = "GB/s") -> str:
    """Return the table of one number, as TOML."""
    return f'[{key}]\nvalue = {value}\nunit = "{unit}"\nstatistic = "peak"\nsource = "a test"\n'


def link(tmp_path: Path, *tables: str) -> Path:
    """Save a link profile; of its four numbers, those in ``tables`` replace good ones."""
    good = {
        "bandwidth": number("bandwidth", "1"),
        "latency": number("latency", "1", "us"),
        "message_overhead": number("message_overhead", "0", "ns"),
        "outstanding_reads": number("outstanding_reads", "16", "count"),
    }
    for table in tables:
        good[table[1 : table.index("]")]] = table
    path = tmp_path / "my-link.toml"
    head = 'kind = "link"\nname = "my-link"\ndescription = "a link"\n'
    path.write_text(head + "".join(good.values()), encoding="utf-8")
    return path


def refusal(path: Path | str, key: str, overrides: dict[str, str] | None = None) -> str:
    """Load what must be refused; return the message for ``key``, the only one."""
    with pytest.raises(ProfileError) as caught:
        load_profile(path, overrides=overrides)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.file in str(caught.value)
    return problem.message


def test_the_link_that_these_tests_spoil_is_good(tmp_path):
    assert load_profile(link(tmp_path)).name == "my-link"


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path):
    message = refusal(link(tmp_path, number("latencies", "1", "us")), "latencies")
    assert message == "is an unknown key; did you mean 'latency'?"


def test_an_unknown_key_inside_a_number_is_refused(tmp_path):
    table = number("latency", "1", "us") + "note = 1\n"
    assert "unknown key; possible: value" in refusal(link(tmp_path, table), "latency.note")


def test_a_missing_number_is_refused(edited):
    path = edited("nic-100g", "[latency]", "[bandwidth.x]")
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages["latency"] == "is missing; a table [latency] with a time"


@pytest.mark.parametrize("part", ["value", "unit", "statistic", "source"])
def test_a_number_without_one_of_its_parts_is_refused(tmp_path, part):
    table = "".join(
        line for line in number("latency", "1", "us").splitlines(True) if not line.startswith(part)
    )
    assert refusal(link(tmp_path, table), "latency").startswith(f"has no {part}")


def test_a_missing_unit_says_which_units_there_are(tmp_path):
    table = '[bandwidth]\nvalue = 1\nstatistic = "peak"\nsource = "a test"\n'
    assert "GB/s, MB/s, GiB/s" in refusal(link(tmp_path, table), "bandwidth")


@pytest.mark.parametrize("part", ["unit", "statistic", "source"])
def test_an_empty_part_is_refused(tmp_path, part):
    good = number("latency", "1", "us")
    (line,) = [line for line in good.splitlines() if line.startswith(part)]
    table = good.replace(line, f'{part} = " "')
    assert f"has the {part} ' '" in refusal(link(tmp_path, table), "latency")


def test_a_bare_number_is_refused(edited):
    path = edited("local-dram", "[capacity]", "capacity = 7\n[latency.x]")
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert "capacity: is the bare value 7, expected a table [capacity]" in str(caught.value)


def test_a_wrong_dimension_is_refused_with_what_would_be_right(tmp_path):
    message = refusal(link(tmp_path, number("bandwidth", "13", "ms")), "bandwidth")
    assert message == "is in ms (a time), expected a bandwidth such as GB/s, MB/s, GiB/s"


def test_an_unknown_unit_is_refused(tmp_path):
    message = refusal(link(tmp_path, number("bandwidth", "13", "GBps")), "bandwidth")
    assert "unknown unit 'GBps', expected a bandwidth" in message


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("-1", "is -1 GB/s, expected above zero"),
        ("0", "is 0 GB/s, expected above zero"),
        ("nan", "is nan, expected a finite number"),
        ("inf", "is inf, expected a finite number"),
        ("1e999", "is inf, expected a finite number"),
        ("true", "is true, expected a finite number"),
        ('"fast"', "has the value 'fast', expected a number"),
    ],
)
def test_an_impossible_bandwidth_is_refused(tmp_path, value, reason):
    assert refusal(link(tmp_path, number("bandwidth", value)), "bandwidth") == reason


def test_a_negative_overhead_is_refused_where_zero_is_possible(tmp_path):
    message = refusal(link(tmp_path, number("message_overhead", "-1", "ns")), "message_overhead")
    assert message == "is -1 ns, expected zero or more"


def test_a_count_that_is_not_whole_is_refused(tmp_path):
    path = link(tmp_path, number("outstanding_reads", "1.5", "count"))
    assert "expected a whole number" in refusal(path, "outstanding_reads")


def test_a_ratio_above_one_is_refused():
    message = refusal("a100-80g", "prefill_share", overrides={"prefill_share": "1.5"})
    assert message == "is 1.5, expected at most 1"


def test_a_range_upside_down_is_refused():
    overrides = {"latency_low": "300 ns"}
    assert "above its upper end" in refusal("local-dram", "latency_low", overrides=overrides)


def test_an_assumption_that_does_not_say_so_is_refused(edited):
    path = edited("nic-100g", "assumption = true\n", "")
    assert "no assumption = true" in refusal(path, "latency")


def test_an_assumption_mark_that_is_no_flag_is_refused(edited):
    path = edited("nic-100g", "assumption = true\n", "assumption = 1\n")
    assert "has assumption = 1, expected true or false" in refusal(path, "latency")


def test_a_flag_that_is_a_number_is_refused(edited):
    path = edited("cmm-h-256g", "value = true", "value = 1")
    assert refusal(path, "eager_write_back") == "is 1, expected true or false"


@pytest.mark.parametrize(
    ("key", "overrides", "reason"),
    [
        ("write_buffer_share", {"write_buffer_share": "1.5"}, "larger than DRAM (64 GiB)"),
        ("write_buffer_share", {"write_buffer_share": "0.00001"}, "below one frame (2 MiB)"),
        ("staging_frame", {"staging_frame": "512 B"}, "multiple of the 4096 B page"),
        ("dram_capacity", {"dram_capacity": "68000000 KB"}, "not a multiple of staging_frame"),
        ("demand_reserve", {"demand_reserve": "3 MiB"}, "not a multiple of staging_frame"),
        ("demand_reserve", {"demand_reserve": "56 GiB"}, "one frame for prefetches (2 MiB)"),
        ("demand_reserve", {"demand_outstanding": "97"}, "one frame for each of 97"),
        ("flush_batch", {"flush_batch": "9 GiB"}, "more than the write buffer ever holds (8 GiB)"),
        ("cost_low", {"cost_low": "12000 USD"}, "above its upper end"),
    ],
)
def test_a_cxl_hm_that_cannot_be_is_refused(key, overrides, reason):
    assert reason in refusal("cxl-hm-prototype", key, overrides=overrides)


def test_dram_that_holds_exactly_the_reserve_and_a_frame_is_enough():
    overrides = {
        "dram_capacity": "222 MiB",
        "write_buffer_share": "0.127",
        "flush_batch": "2 MiB",
    }
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides=overrides)
    assert hm.staging_frames == hm.demand_frames + 1


@pytest.mark.parametrize(
    ("key", "overrides", "reason"),
    [
        ("cache_granule", {"cache_granule": "1 KiB", "refill_unit": "1 KiB"}, "4096 B page"),
        ("refill_unit", {"refill_unit": "3 MiB"}, "does not divide the cache granule"),
        ("associativity", {"associativity": "200000"}, "more than the 131072 granules"),
        ("dram_capacity", {"dram_capacity": "3 MiB"}, "not a multiple of cache_granule"),
    ],
)
def test_a_cmm_h_that_cannot_be_is_refused(key, overrides, reason):
    assert reason in refusal("cmm-h-256g", key, overrides=overrides)


def test_an_ssd_page_that_is_no_power_of_two_is_refused():
    overrides = {"page_size": "5000 B"}
    assert "power of two" in refusal("pm1743-class", "page_size", overrides=overrides)


def test_a_line_that_is_no_power_of_two_is_refused():
    assert "power of two" in refusal("niagara-2.0", "line", overrides={"line": "65 B"})


def test_an_access_with_flush_below_one_without_is_refused():
    overrides = {"flushed_access_latency": "100 ns"}
    assert "above its upper end" in refusal("niagara-2.0-cmpi", "latency", overrides=overrides)


def test_everything_that_is_wrong_with_a_file_is_said_at_once(tmp_path):
    path = link(
        tmp_path,
        number("bandwidth", "0"),
        number("latency", "1", "GB"),
        number("outstanding", "1", "count"),
    )
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert [p.key for p in caught.value.problems] == ["outstanding", "bandwidth", "latency"]
    assert len(str(caught.value).splitlines()) == 3


def test_rules_between_fields_are_checked_beside_a_broken_field():
    overrides = {"load_latency": "1 GB", "write_buffer_share": "2"}
    with pytest.raises(ProfileError) as caught:
        load_profile("cxl-hm-prototype", overrides=overrides)
    assert {p.key for p in caught.value.problems} == {"load_latency", "write_buffer_share"}


def test_an_error_can_cross_a_process_border():
    with pytest.raises(ProfileError) as caught:
        load_profile("nothing-like-it")
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_an_unknown_kind_is_refused_with_the_nearest(edited):
    path = edited("nic-100g", 'kind = "link"', 'kind = "lnk"')
    assert refusal(path, "kind") == "is 'lnk', unknown; did you mean 'link'?"


def test_a_missing_kind_says_which_there_are(edited):
    path = edited("nic-100g", 'kind = "link"', "")
    assert "is missing; possible: ssd, cxl-hm, cmm-h" in refusal(path, "kind")


def test_a_kind_that_is_no_text_is_refused(edited):
    path = edited("nic-100g", 'kind = "link"', "kind = [1]")
    assert "is [1], unknown" in refusal(path, "kind")


def test_a_missing_description_is_refused(edited):
    path = edited("nic-100g", "description", "# description")
    assert refusal(path, "description") == "is missing"


def test_a_name_that_is_not_the_file_name_is_refused(edited):
    path = edited("nic-100g", 'name = "nic-100g"', 'name = "mine"')
    assert "expected the name of the file, 'nic-100g'" in refusal(path, "name")


def test_an_unknown_profile_is_refused_with_the_nearest():
    with pytest.raises(ProfileError, match="no profile 'nic-10g'; did you mean 'nic-100g'"):
        load_profile("nic-10g")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"gone\.toml' is not there"):
        load_profile(tmp_path / "gone.toml")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="is a folder"):
        load_profile(tmp_path)


def test_a_file_that_is_no_toml_is_refused_with_the_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('kind = "link"\nname = = 1\n')
    with pytest.raises(ProfileError, match=r"bad\.toml' is not TOML: .*line 2"):
        load_profile(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(b"kind = '\xff'\n")
    with pytest.raises(ProfileError, match="is not UTF-8 text"):
        load_profile(path)


def test_a_number_too_long_to_read_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="holds a number that cannot be read"):
        load_profile(link(tmp_path, number("bandwidth", "9" * 5000)))


def test_a_reference_to_a_profile_that_is_not_there_is_refused(edited):
    path = edited("cxl-hm-prototype", 'ssd = "pm1743-class"', 'ssd = "pm1743"')
    assert "no profile 'pm1743'; did you mean 'pm1743-class'" in refusal(path, "ssd")


def test_a_reference_to_another_kind_is_refused(edited):
    path = edited("cxl-hm-prototype", 'ssd = "pm1743-class"', 'ssd = "nic-100g"')
    assert "kind: is 'link', expected 'ssd'" in refusal(path, "ssd")


def test_a_missing_reference_is_refused(edited):
    path = edited("cxl-hm-prototype", 'ssd = "pm1743-class"', "")
    assert "is missing; the name of a profile of kind 'ssd'" in refusal(path, "ssd")


def test_a_reference_that_is_no_text_is_refused(edited):
    path = edited("cxl-hm-prototype", 'ssd = "pm1743-class"', "ssd = 7")
    assert "is 7, expected the name of a profile of kind 'ssd'" in refusal(path, "ssd")


def test_problems_of_a_referenced_file_name_both_files(edited):
    edited("pm1743-class", "value = 13.0", "value = 0")
    path = edited("cxl-hm-prototype", "Agilex", "agilex")
    message = refusal(path, "ssd")
    assert "'pm1743-class' is refused: pm1743-class.toml: read_bandwidth: is 0 GB/s" in message


def test_a_policy_without_a_name_is_refused(edited):
    path = edited("cmm-h-256g", 'policy = "lru"', 'policy = ""')
    assert "expected a name" in refusal(path, "policy")


def test_a_profile_of_another_kind_than_asked_for_is_refused():
    with pytest.raises(ProfileError, match="nic-100g: kind: is 'link', expected 'ssd'"):
        load_as(SsdProfile, "nic-100g")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("32", "without a unit: expected such as '32 GiB'"),
        ("lots", "expected a number and a unit such as '4 GiB'"),
        ("32 ms", "is in ms (a time), expected a size"),
        ("-1 GiB", "expected above zero"),
        ("", "expected a number and a unit"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(text, reason):
    overrides = {"dram_capacity": text}
    assert reason in refusal("cxl-hm-prototype", "dram_capacity", overrides=overrides)


@pytest.mark.parametrize("key", ["dram_capacty", "policy.x", "ssd_count.x"])
def test_an_override_of_an_unknown_key_is_refused(key):
    assert "unknown key in overrides" in refusal("cxl-hm-prototype", key, overrides={key: "1"})


def test_an_override_of_an_unknown_key_of_the_ssd_is_refused():
    message = refusal("cxl-hm-prototype", "ssd", overrides={"ssd.read_bandwith": "1 GB/s"})
    assert "did you mean 'read_bandwidth'" in message


def test_a_list_with_a_broken_file_shows_it_and_all_others(edited):
    path = edited("nic-100g", 'unit = "us"', 'unit = "GB"')
    summaries = {summary.name: summary for summary in list_profiles(path.parent)}
    assert "latency" in (summaries["nic-100g"].error or "")
    assert set(TABLES) == set(summaries)


@pytest.mark.parametrize(
    ("key", "given", "most"),
    [
        ("dram_capacity", "1e30 GiB", "64 TiB"),
        ("dram_capacity", "1000 TiB", "64 TiB"),
        ("ssd_count", "1e9", "1024"),
        ("prefetch_depth", "2000000000", "1048576"),
    ],
)
def test_what_no_hardware_is_and_no_host_could_emulate_is_refused(key, given, most):
    """And not run until the memory is gone, or for ever."""
    message = refusal("cxl-hm-prototype", key, overrides={key: given})
    assert message.endswith(f"expected at most {most}")


def test_an_ssd_of_an_endless_size_is_refused():
    with pytest.raises(ProfileError, match=r"expected at most 1\.049e\+06 TiB"):
        load_profile("cxl-hm-prototype", overrides={"ssd.capacity": "1e30 TB"})


def test_a_count_of_zero_is_told_without_a_unit():
    message = refusal("cxl-hm-prototype", "ssd_count", overrides={"ssd_count": "0"})
    assert message == "is 0, expected above zero"


def test_a_file_that_names_itself_is_refused(tmp_path):
    text = TABLES["cxl-hm-prototype"].replace('name = "cxl-hm-prototype"', 'name = "loop"')
    (tmp_path / "loop.toml").write_text(re.sub(r'ssd = "[^"]*"', 'ssd = "loop"', text))
    with pytest.raises(ProfileError, match="'loop' is the file itself, expected the name of a"):
        load_profile(tmp_path / "loop.toml")


def test_a_profile_that_lies_here_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(ProfileError, match=r"no profile 'mine'; .* by its path: './mine.toml'"):
        load_profile("mine")
