"""Pipes: order, priority, cutting, and the conservation of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pipe import Pipe, finished


def run(*transfers, chunk_bytes=100, rate=1000.0):
    """Run (start_s, nbytes, priority) transfers; return their end times in the given order."""
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", rate, chunk_bytes=chunk_bytes)
        ends = [0.0] * len(transfers)

        async def one(index, start_s, nbytes, priority):
            await clock.sleep_until(start_s)
            await finished(clock, pipe.reserve(nbytes, priority=priority))
            ends[index] = clock.now()

        async def main():
            await clock.gather(*[one(i, *transfer) for i, transfer in enumerate(transfers)])

        clock.run(main())
        return ends


def test_an_idle_pipe_takes_bytes_over_bandwidth():
    assert run((5.0, 2000, 0)) == [7.0]


def test_same_priority_is_first_come_first_served():
    assert run((0.0, 1000, 0), (0.1, 1000, 0), (0.2, 500, 0)) == [1.0, 2.0, 2.5]


def test_an_uncontended_transfer_of_any_size_costs_one_timer():
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", 1e9, chunk_bytes=4096)

        async def main():
            await finished(clock, pipe.reserve(1 << 40))

        clock.run(main())
        assert clock.timers == 1


def test_a_higher_priority_overtakes_what_waits():
    first, low, high = run((0.0, 1000, 0), (0.1, 1000, 1), (0.2, 1000, 0))
    assert (first, high, low) == (1.0, 2.0, 3.0)


def test_a_transfer_in_service_is_cut_at_the_next_chunk():
    # Chunks of 100 B take 0.1 s: at 0.25 s the third chunk is in service and is finished first.
    low, high = run((0.0, 1000, 1), (0.25, 1000, 0))
    assert high == pytest.approx(1.3)
    assert low == pytest.approx(2.0)


def test_the_last_chunk_is_not_cut():
    low, high = run((0.0, 1000, 1), (0.95, 1000, 0))
    assert (low, high) == (1.0, 2.0)


def test_bookings_on_several_pipes_end_with_the_slowest():
    with VirtualClock() as clock:
        slow, fast = Pipe(clock, "slow", 100.0), Pipe(clock, "fast", 1000.0)

        async def main():
            await finished(clock, slow.reserve(1000), fast.reserve(1000), latency_s=0.5)
            return clock.now(), fast.idle_at_s

        assert clock.run(main()) == (10.5, 1.0)


def test_a_device_may_have_a_law_of_its_own():
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", 1000.0)
        assert pipe.reserve(1000, cost_s=7.0).end_s == 7.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_pipe_without_bandwidth_is_refused_by_name(rate):
    with VirtualClock() as clock, pytest.raises(ValueError, match="pipe uplink"):
        Pipe(clock, "uplink", rate)


TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda tick: tick / 16),
        st.integers(1, 2000),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@given(TRANSFERS)
def test_no_time_is_lost_or_made(transfers):
    """The pipe is busy exactly as long as its transfers cost, and never idle while one waits."""
    ends = run(*transfers)
    arrivals = sorted((start, size / 1000.0) for start, size, _ in transfers)
    at = 0.0
    for start, cost in arrivals:
        at = max(at, start) + cost
    assert max(ends) == pytest.approx(at)
    for (start, size, _), end in zip(transfers, ends, strict=True):
        assert end >= start + size / 1000.0 - 1e-9


@given(TRANSFERS)
def test_the_highest_priority_waits_for_its_equals_and_one_chunk_at_most(transfers):
    ends = run(*transfers)
    mine = sorted(
        (start, index, size) for index, (start, size, prio) in enumerate(transfers) if prio == 0
    )
    at = 0.0
    for start, index, size in mine:
        at = max(at, start + 0.1) + size / 1000.0
        assert ends[index] <= at + 1e-9


@given(TRANSFERS)
def test_equals_keep_their_order(transfers):
    ends = run(*transfers)
    for priority in range(3):
        mine = [
            (start, index) for index, (start, _, prio) in enumerate(transfers) if prio == priority
        ]
        finish = [ends[index] for _, index in sorted(mine)]
        assert finish == sorted(finish)


def test_without_priority_the_order_check_would_fail(monkeypatch):
    """Mutant: a pipe that ignores priority lets a high one wait for a whole low one."""
    original = Pipe.reserve
    monkeypatch.setattr(
        Pipe, "reserve", lambda self, nbytes, **_: original(self, nbytes, priority=0)
    )
    low, high = run((0.0, 1000, 1), (0.25, 1000, 0))
    assert (low, high) == (1.0, 2.0)
