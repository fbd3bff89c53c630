"""The ablations on devices at quick scale: their balances, and the mechanics they must show."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest

from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.experiments import dram_for_latency, policy_references, prefetch_depth
from cxlbench.experiments.device_runs import MIB, together, variant
from cxlbench.harness.experiment import Check, ExperimentError
from tests.experiments.ablation_runs import ON_DEVICES, is_whole, one_row, quick, rows, stops


@pytest.mark.parametrize("name", ON_DEVICES)
def test_everything_comes_out_even_and_every_claim_is_judged(name):
    is_whole(name)


@pytest.mark.parametrize("name", ON_DEVICES)
def test_who_stops_a_run_gets_what_there_is_marked_partial(name):
    stops(name)


# -- policies ------------------------------------------------------------------------------------


def test_staging_reads_more_from_dram_than_any_policy_of_the_same_size():
    shares = {row["policy"]: row["dram_share"] for row in rows("policy_ablation", table="tier")}
    staged = shares.pop("staging")
    assert staged > 0.99
    assert all(share < staged for share in shares.values())


def test_prefetch_is_what_makes_staging_hits():
    assert (
        one_row("policy_ablation", table="tier", policy="staging, no prefetch")["dram_share"] < 0.2
    )


def test_lru_is_the_worst_and_opt_the_best_of_the_policies_without_time():
    shares = {
        row["policy"]: row["plain_dram_share"]
        for row in rows("policy_ablation", table="references")
        if row["policy"] != "staging"
    }
    assert min(shares, key=shares.__getitem__) == "lru"
    assert max(shares, key=shares.__getitem__) == "opt"


def test_staged_windows_that_do_not_fit_are_not_all_in_dram():
    device = load_as(CxlHmProfile, "cxl-hm-prototype")
    few, many = (
        policy_references.staged_share(device, 16 * MIB, window_bytes=128 * MIB, requests=n)
        for n in (8, 1000)
    )
    assert few == 1
    # 512 prefetches in flight, of 8 for each of 1000 requests.
    assert many == device.prefetch_depth / 8000


def test_a_trace_takes_the_place_of_the_conversations(trace_path):
    path = trace_path("lmcache_agent_miniswe_hash128.jsonl.gz")
    few = (("workload.sessions", "2"), ("workload.turns", "2"))
    found = quick("policy_ablation", ("workload.trace", str(path)), *few)
    row = next(row for row in found.rows if row["table"] == "references")
    assert row["references"] == 19_179
    assert row["seen_again"] == 19_179 - 1_245


# -- depth ---------------------------------------------------------------------------------------


def test_deeper_prefetch_is_never_slower_than_none():
    for requests in (1, 4):
        for mib in prefetch_depth.QUICK_SIZES_MIB:
            found = rows("prefetch_depth", requests=requests, object_bytes=mib * MIB)
            none, *deeper = sorted(found, key=lambda row: row["depth"])
            assert none["depth"] == 0
            for row in deeper:
                assert row["read_bytes_per_s"] >= none["read_bytes_per_s"]


def test_one_request_alone_gains_most_from_prefetch():
    def gain(requests: int, mib: int) -> float:
        none, deep = (
            one_row("prefetch_depth", requests=requests, object_bytes=mib * MIB, depth=depth)
            for depth in (0, 8)
        )
        return deep["read_bytes_per_s"] / none["read_bytes_per_s"]

    for mib in prefetch_depth.QUICK_SIZES_MIB:
        assert gain(1, mib) > gain(4, mib)


def test_a_smaller_object_needs_prefetch_more():
    """The time to the first byte is the same for all sizes."""
    rates = [
        one_row("prefetch_depth", requests=1, object_bytes=mib * MIB, depth=0)["read_bytes_per_s"]
        for mib in prefetch_depth.QUICK_SIZES_MIB
    ]
    assert rates == sorted(rates)


# -- write buffer --------------------------------------------------------------------------------


def test_a_larger_write_buffer_refuses_less_and_loses_fewer_hits():
    found = rows("write_buffer")
    for small, large in pairwise(found):
        assert small["write_buffer_share"] < large["write_buffer_share"]
        assert small["refused_share"] >= large["refused_share"]
        assert small["hit_rate"] <= large["hit_rate"]
    assert found[0]["refused_share"] > found[-1]["refused_share"]


def test_refused_blocks_are_stored_later():
    refused = [row for row in rows("write_buffer") if row["skipped_blocks"]]
    assert any(row["recovered_blocks"] for row in refused)


# -- DRAM ----------------------------------------------------------------------------------------


def test_a_cache_needs_more_dram_than_a_staging_window():
    assert (
        one_row(
            "dram_for_latency",
            table="needed",
            tier="CXL-HM, staging",
            footprint_times=1,
            target=2.0,
        )["dram_bytes"]
        < one_row(
            "dram_for_latency", table="needed", tier="CMM-H, LRU", footprint_times=1, target=2.0
        )["dram_bytes"]
    )


def test_a_staged_hit_takes_as_long_with_little_dram_as_with_much():
    found = rows("dram_for_latency", table="range", tier="CXL-HM, staging")
    for one, other in pairwise(found):
        if one["footprint_bytes"] == other["footprint_bytes"]:
            assert one["last_turn_block_read_mean_s"] == pytest.approx(
                other["last_turn_block_read_mean_s"], rel=0.2
            )


def test_a_cache_is_fast_once_it_holds_the_footprint():
    found = rows("dram_for_latency", table="range", tier="CMM-H, LRU")
    for small in found:
        if small["dram_share"] <= 0.5:
            for large in found:
                if large["dram_share"] > 1:
                    slow, fast = (row["last_turn_block_read_mean_s"] for row in (small, large))
                    assert slow > 2 * fast


def point(dram: int, latency_s: float, hit_rate: float = 1.0) -> dram_for_latency.Point:
    turn = SimpleNamespace(block_read=SimpleNamespace(mean_s=latency_s))
    figures = SimpleNamespace(turns=(turn,), hit_rate=hit_rate)
    run = SimpleNamespace(figures=figures)
    return dram_for_latency.Point(tier="t", times=1, dram_bytes=dram, run=run)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([point(1, 9.0), point(2, 3.0), point(4, 1.0)], 2),
        ([point(1, 1.0), point(2, 9.0), point(4, 1.0)], 4),
        ([point(1, 1.0, 0.5), point(2, 1.0), point(4, 1.0)], 2),
        ([point(1, 1.0), point(2, 9.0)], None),
    ],
)
def test_needed_is_the_least_from_which_on_all_meet_the_target(points, expected):
    found = dram_for_latency.needed_bytes(points, "t", 1, target_s=4.0, hit_rate=0.9)
    assert found == expected


def test_a_variant_that_cannot_be_is_refused():
    device = load_as(CxlHmProfile, "cxl-hm-prototype")
    assert variant(device, ssd_count=4).ssd_count == 4
    assert dataclasses.replace(device) == variant(device)
    with pytest.raises(ExperimentError, match="write_buffer_share"):
        variant(device, write_buffer_share=2.0)


def test_a_law_that_one_run_breaks_is_broken_and_the_run_is_named():
    held, broken = together(
        [
            Check(name="a: law", ok=True),
            Check(name="b: other: law", ok=True),
            Check(name="c: other: law", ok=False, detail="2 of 3"),
        ]
    )
    assert (held.name, held.ok) == ("law", True)
    assert (broken.name, broken.ok, broken.detail) == ("other: law", False, "c: 2 of 3")
