"""What comes out of the mechanics alone when the footprint outgrows the DRAM (HyMCache §3.1-3.3).

Sixteen conversations append 64 blocks of 16 MiB (1 GiB) a turn and re-read all of their prefix, all
at once, through a 200 Gb/s node link; compute and worker links are no bottleneck. Tiers have 8 GiB
of DRAM. Nothing here is tuned to come out: two outcomes hang on numbers that no source gives
(refills in flight of CMM-H, demand misses in flight of CXL-HM); the tests that vary them say so.
"""

from __future__ import annotations

from functools import cache

import pytest

from cxlbench.devices.profile import (
    CmmHProfile,
    CxlHmProfile,
    ExpanderProfile,
    LinkProfile,
    load_as,
)
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.metrics import Figures
from cxlbench.harness.replay import replay
from tests.harness.workbench import BLOCK_TOKENS, GIB, MIB, engine, spec

TURNS = 12
NODE_LINK = load_as(LinkProfile, "nic-200g")
LINE_RATE = NODE_LINK.bandwidth
DRAM_GIB = 8
BEYOND = range(DRAM_GIB + 2, TURNS + 1)
"""Turns that begin with more KV stored than fits the DRAM."""

PROFILES = {
    "cmm-h": (CmmHProfile, "cmm-h-256g", "dram_capacity"),
    "cxl-hm": (CxlHmProfile, "cxl-hm-prototype", "dram_capacity"),
    "dram": (ExpanderProfile, "remote-dram", "capacity"),
}


@cache
def run(
    kind: str,
    *overrides: tuple[str, str],
    prefetch: bool = True,
    dram_gib: int = DRAM_GIB,
    block_mib: int = 16,
    turns: int = TURNS,
) -> Figures:
    made, name, dram = PROFILES[kind]
    device = load_as(made, name, overrides={dram: f"{dram_gib} GiB", **dict(overrides)})
    work = generate(
        GeneratorKnobs(
            sessions=16,
            turns=turns,
            shared_system_tokens=0,
            first_input_tokens=4 * BLOCK_TOKENS + 1,
            turn_input_tokens=4 * BLOCK_TOKENS - 1,
            output_tokens=1,
            think_s=1.0,
            seed=3,
        )
    )
    chosen = spec(
        kind,
        gpu_blocks=1,
        compute=engine(peak_compute="100000 TFLOP/s"),
        rig={
            "device": device,
            "block_bytes": block_mib * MIB,
            "device_capacity_bytes": None if kind == "dram" else 128 * GIB,
            "workers": 4,
            "worker_link": NODE_LINK,
            "node_link": NODE_LINK,
            "copy_engine": None,
            "prefetch": prefetch,
        },
        max_turns=turns,
    )
    result = replay(work, chosen, wall=False)
    assert result.correct
    return result.figures


def rates(figures: Figures) -> dict[int, float]:
    """Return the read bandwidth of each turn that reads, as a share of the link."""
    return {turn.turn: turn.read_bytes_per_s / LINE_RATE for turn in figures.turns[1:]}


def mean(values) -> float:
    found = list(values)
    return sum(found) / len(found)


def beyond(figures: Figures) -> float:
    """Return the mean bandwidth of the turns beyond the DRAM, as a share of the link."""
    return mean(rates(figures)[turn] for turn in BEYOND)


def test_inside_its_dram_cmm_h_reads_at_line_rate():
    figures = run("cmm-h")
    inside = [rate for turn, rate in rates(figures).items() if turn < DRAM_GIB]
    assert min(inside) > 0.9
    assert min(rates(run("cmm-h", dram_gib=32)).values()) > 0.9


def test_beyond_its_dram_cmm_h_falls_below_half_of_that():
    small, large = run("cmm-h"), run("cmm-h", dram_gib=32)
    assert small.hit_rate == large.hit_rate == 1
    for turn in BEYOND:
        assert rates(small)[turn] < rates(large)[turn] / 2


def test_cxl_hm_with_prefetch_stays_near_line_rate_when_the_ssds_can_feed_it():
    """Two SSDs read 26 GB/s, the link takes 25."""
    figures = run("cxl-hm")
    assert figures.hit_rate == 1
    for turn in BEYOND:
        assert rates(figures)[turn] >= 0.8


def test_one_ssd_cannot_feed_the_link():
    figures = run("cxl-hm", ("ssd_count", "1"))
    ssd = load_as(CxlHmProfile, "cxl-hm-prototype").ssd.read_bandwidth / LINE_RATE
    for turn in BEYOND:
        assert 0.8 * ssd < rates(figures)[turn] < 1.01 * ssd


def test_without_prefetch_cxl_hm_is_slower_in_every_turn():
    with_it, without = run("cxl-hm"), run("cxl-hm", prefetch=False)
    assert without.hit_rate == 1
    for turn, rate in rates(without).items():
        assert rate < rates(with_it)[turn]
    assert without.block_read.mean_s > with_it.block_read.mean_s
    assert without.block_read.p90_s > with_it.block_read.p90_s


def test_beyond_the_dram_the_tiers_come_in_the_papers_order():
    cmm, plain, staged = run("cmm-h"), run("cxl-hm", prefetch=False), run("cxl-hm")
    assert beyond(cmm) < beyond(plain) < beyond(staged)


def test_dram_alone_keeps_its_speed_and_loses_its_hits_as_the_footprint_grows():
    by_turn = {turn.turn: turn for turn in run("dram").turns}
    assert by_turn[DRAM_GIB - 2].hit_rate == 1
    assert all(by_turn[turn].hit_rate < 0.5 for turn in BEYOND)
    whole = [run("dram", turns=turns).hit_rate for turns in (6, 9, 12)]
    assert whole[0] == 1
    assert whole == sorted(whole, reverse=True)
    assert whole[2] < whole[1] < whole[0]
    for turn in by_turn.values():
        if turn.tier_blocks >= 64:
            assert turn.read_bytes_per_s > 0.9 * LINE_RATE


def test_more_dram_keeps_more_hits():
    hits = [run("dram", dram_gib=size).hit_rate for size in (4, 8, 16)]
    assert hits[0] < hits[1] < hits[2] == 1


def collapse(block_mib: int) -> int:
    """Return the first turn in which CMM-H reads at less than half the line rate."""
    turns = min(TURNS, TURNS * 24 // block_mib)
    figures = run("cmm-h", block_mib=block_mib, turns=turns)
    return next((turn for turn, rate in rates(figures).items() if rate < 0.5), TURNS + 1)


def test_cmm_h_collapses_earlier_for_larger_blocks():
    turns = [collapse(size) for size in (8, 16, 32, 64)]
    assert turns == sorted(turns, reverse=True)
    assert len(set(turns)) == 4
    # It is when the footprint passes the DRAM: each turn adds 1, 2, 4 GiB.
    for size, turn in zip((16, 32, 64), turns[1:], strict=True):
        assert DRAM_GIB <= turn * size / 16 <= 2 * DRAM_GIB


@pytest.mark.parametrize("policy", ["fifo", "clock", "s3fifo"])
def test_no_replacement_policy_saves_a_transparent_cache(policy):
    """Each turn reads everything in the same order: the worst case for recency."""
    figures = run("cmm-h", ("policy", policy))
    assert mean(rates(figures)[turn] for turn in range(TURNS - 1, TURNS + 1)) < 0.5


# -- what hangs on assumptions ------------------------------------------------------------------


def test_how_deep_cmm_h_falls_hangs_on_its_refills_in_flight():
    """64 pages in flight are 4.6 GB/s (an assumption); four times as many nearly hide the latency.

    Then it stays above half of the link, and still behind staging. What is left of the latency are
    pages that are read beside writes, which take longer.
    """
    assumed = run("cmm-h")
    more = run("cmm-h", ("outstanding_misses", "256"))
    most = run("cmm-h", ("outstanding_misses", "4096"))
    assert beyond(assumed) < 0.5 < beyond(more)
    assert beyond(more) < beyond(most) < 1.15 * beyond(more)
    assert beyond(most) < 0.9 * beyond(run("cxl-hm"))


def test_what_is_left_of_the_gap_is_writes_that_meet_reads():
    """With any number of refills, SSDs that lose nothing by mixing come closer to the line rate."""
    most = ("outstanding_misses", "4096")
    assert beyond(run("cmm-h", most, ("ssd.mixed_penalty", "0"))) > beyond(run("cmm-h", most))


def test_what_prefetch_is_worth_hangs_on_demand_misses_in_flight():
    """One at a time is an assumption; with four, bandwidth under load needs no prefetch."""
    four = run("cxl-hm", ("demand_outstanding", "4"), ("demand_reserve", "768 MiB"), prefetch=False)
    assert beyond(four) == pytest.approx(beyond(run("cxl-hm")), rel=0.05)


def test_a_write_buffer_smaller_than_a_turns_writes_costs_hits():
    """Refused blocks are offered again a turn later, with all others: bursts stay too large."""
    small = run("cxl-hm", ("write_buffer_share", "0.03"))
    assert small.skipped_blocks > 0
    assert small.hit_rate < run("cxl-hm").hit_rate == 1
