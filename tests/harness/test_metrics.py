"""What a replay's figures are made of: busy time, spreads, and rows by turn that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.metrics import OTHER_TURNS, BlockLog, Spread, busy_s, turn_figures
from cxlbench.harness.worker import RequestRecord
from cxlbench.kv.connector import BlockTimes

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 20))


def record(turn: int, *, reusable=0, seen=0, matched=0, loaded=0, ttft_s=1.0) -> RequestRecord:
    return RequestRecord(
        request_id=0,
        worker=0,
        turn=turn,
        arrival_s=5.0,
        lookup_s=5.0,
        load_s=5.0,
        first_token_s=5.0 + ttft_s,
        end_s=5.0 + ttft_s,
        reusable=reusable,
        seen=seen,
        matched=matched,
        found=loaded,
        loaded=loaded,
        computed_tokens=1,
    )


def log_of(*reads: tuple[int, float, float, int]) -> BlockLog:
    """Return a log of (turn, asked, done, bytes)."""
    log = BlockLog()
    for turn, asked_s, done_s, nbytes in reads:
        log.add(turn, BlockTimes(0, asked_s, done_s, done_s, nbytes))
    return log


@given(st.lists(SPAN, max_size=20))
def test_busy_time_is_the_union_of_intervals(spans):
    """Against the set of whole seconds that lie in any of them."""
    begin = np.array([first for first, _ in spans], dtype=float)
    end = np.array([first + length for first, length in spans], dtype=float)
    seconds = {s for first, length in spans for s in range(first, first + length)}
    assert busy_s(begin, end) == len(seconds)


def test_no_reads_are_no_busy_time():
    assert busy_s(np.array([]), np.array([])) == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_a_spread_is_between_the_smallest_and_the_largest_and_in_order(values):
    spread = Spread.of(values)
    assert spread.count == len(values)
    assert min(values) <= spread.p50_s <= spread.p90_s <= spread.p99_s <= max(values)
    assert spread.mean_s == pytest.approx(sum(values) / len(values))


def test_percentiles_are_those_of_the_values():
    spread = Spread.of(range(101))
    assert (spread.p50_s, spread.p90_s, spread.p99_s) == (50, 90, 99)


def test_a_spread_of_nothing_is_zero():
    assert Spread.of(()) == Spread(0, 0.0, 0.0, 0.0, 0.0)


def test_a_turns_bandwidth_is_its_bytes_over_the_time_in_which_it_read():
    # Turn 2 reads from 1 to 4 s and from 10 to 11 s, turn 3 meanwhile.
    log = log_of((2, 1, 3, 100), (2, 2, 4, 100), (3, 0, 20, 7), (2, 10, 11, 200))
    rows = turn_figures([record(2), record(3)], log, scale=1, max_turns=9)
    assert [row.read_bytes for row in rows] == [400, 7]
    assert [row.read_bytes_per_s for row in rows] == [100, 0.35]


def test_bytes_and_bandwidth_are_reported_at_full_size():
    log = log_of((1, 0, 2, 100))
    (row,) = turn_figures([record(1)], log, scale=64, max_turns=9)
    assert (row.read_bytes, row.read_bytes_per_s) == (6400, 3200)


def test_a_turn_without_reads_has_no_bandwidth_and_no_latencies():
    rows = turn_figures([record(1), record(2)], log_of((2, 0, 1, 5)), scale=1, max_turns=9)
    assert rows[0].read_bytes == rows[0].read_bytes_per_s == rows[0].block_read.count == 0
    assert turn_figures([record(1)], BlockLog(), scale=1, max_turns=9)[0].read_bytes_per_s == 0


def test_late_turns_are_joined_in_the_last_row():
    records = [record(turn, matched=turn) for turn in (9, 1, 4, 2)]
    log = log_of((4, 0, 1, 5), (9, 0, 1, 5), (1, 0, 1, 5))
    rows = turn_figures(records, log, scale=1, max_turns=2)
    assert [row.turn for row in rows] == [1, 2, OTHER_TURNS]
    assert [row.gpu_blocks for row in rows] == [1, 2, 13]
    assert [row.read_bytes for row in rows] == [5, 0, 10]


def test_hit_rate_is_of_blocks_that_had_been_computed_before():
    made = record(2, reusable=10, seen=8, matched=2, loaded=4)
    (row,) = turn_figures([made], BlockLog(), scale=1, max_turns=9)
    assert row.hit_rate == 6 / 8


def test_latency_runs_from_asked_to_done_and_ttft_from_arrival():
    (row,) = turn_figures([record(1, ttft_s=0.25)], log_of((1, 2, 2.5, 1)), scale=1, max_turns=9)
    assert row.block_read.p50_s == 0.5
    assert row.ttft.p50_s == pytest.approx(0.25)


@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 5), min_size=1, max_size=30),
    st.lists(st.integers(0, 40), max_size=30),
    st.integers(1, 9),
)
def test_turns_add_up_to_the_whole(rows, reads, max_turns):
    records = [record(turn, reusable=a, seen=b, matched=c, loaded=d) for turn, a, b, c, d in rows]
    log = log_of(*[(rows[n % len(rows)][0], n, n + 1, 8 * n) for n in reads])
    turns = turn_figures(records, log, scale=2, max_turns=max_turns)
    for figure, part in (
        ("reusable_blocks", "reusable"),
        ("seen_blocks", "seen"),
        ("gpu_blocks", "matched"),
        ("tier_blocks", "loaded"),
    ):
        whole = sum(getattr(r, part) for r in records)
        assert sum(getattr(turn, figure) for turn in turns) == whole
    assert sum(turn.requests for turn in turns) == sum(t.ttft.count for t in turns) == len(records)
    assert sum(turn.read_bytes for turn in turns) == 16 * sum(reads)
    assert sum(turn.block_read.count for turn in turns) == len(reads)
