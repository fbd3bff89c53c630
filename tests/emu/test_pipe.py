"""Pipes: order, priority, cutting, and the conservation of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.clock import VirtualClock, WallClock
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


RATE = 1024.0  # with chunks of 128 B, all times are exact

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


def chosen_anew_at_each_chunk(transfers, chunk_s):
    """Return the end times of a server that after each chunk goes on with the most urgent one."""
    order = sorted(range(len(transfers)), key=lambda i: (transfers[i][0], i))
    left = [size / RATE for _, size, _ in transfers]
    ends = [0.0] * len(transfers)
    now = 0.0
    while any(left):
        here = [i for i in order if left[i] and transfers[i][0] <= now]
        if not here:
            now = min(transfers[i][0] for i in order if left[i])
            continue
        urgent = min(here, key=lambda i: transfers[i][2])
        step = min(chunk_s, left[urgent])
        now += step
        left[urgent] -= step
        if not left[urgent]:
            ends[urgent] = now
    return ends


@given(TRANSFERS)
def test_a_pipe_is_a_server_that_after_each_chunk_takes_the_most_urgent(transfers):
    """So service intervals never overlap, and no more than one chunk is ever in the way."""
    assert run(*transfers, chunk_bytes=128, rate=RATE) == chosen_anew_at_each_chunk(
        transfers, 128 / RATE
    )


def test_the_reference_server_itself_serves_in_chunks():
    assert chosen_anew_at_each_chunk([(0.0, 1024, 1), (0.25, 512, 0)], 0.125) == [1.5, 0.75]


@given(TRANSFERS)
def test_busy_time_and_bytes_are_those_of_the_transfers(transfers):
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", RATE)
        for _, size, priority in transfers:
            pipe.reserve(size, priority=priority)
        assert pipe.busy_s == sum(size for _, size, _ in transfers) / RATE
        assert pipe.idle_at_s == pipe.busy_s
        assert pipe.moved_bytes == sum(size for _, size, _ in transfers)


def test_pending_counts_what_is_booked_and_not_finished():
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", 1000.0)

        async def main():
            for priority in (0, 0, 1):
                pipe.reserve(1000, priority=priority)
            await clock.sleep(1.5)
            return pipe.pending(0), pipe.pending(1), pipe.pending(2)

        assert clock.run(main()) == (1, 1, 0)


def test_who_is_moved_back_again_and_again_wakes_once_for_each_time_and_at_the_right_one():
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", 1000.0, chunk_bytes=100)

        async def low():
            await finished(clock, pipe.reserve(1000, priority=1))
            return clock.now()

        async def high(start_s):
            await clock.sleep_until(start_s)
            await finished(clock, pipe.reserve(500))

        async def main():
            before = clock.timers
            ended, *_ = await clock.gather(low(), high(0.5), high(1.25))
            return ended, clock.timers - before

        ended, timers = clock.run(main())
        assert ended == pytest.approx(2.0)
        assert timers == 3 + 2 + 2


def test_a_cancelled_transfer_keeps_its_time():
    with VirtualClock() as clock:
        pipe = Pipe(clock, "pipe", 1000.0)

        async def main():
            job = clock.spawn(finished(clock, pipe.reserve(1000)))
            await clock.sleep(0.25)
            job.cancel()
            await job.ended()
            await finished(clock, pipe.reserve(1000))
            return clock.now()

        assert clock.run(main()) == 2.0


def test_an_infinite_pipe_takes_no_time():
    with VirtualClock() as clock:
        assert Pipe(clock, "pipe", math.inf).reserve(1 << 40).end_s == 0.0


def test_a_chunk_of_nothing_is_refused_by_name():
    with VirtualClock() as clock, pytest.raises(ValueError, match="pipe uplink: chunk"):
        Pipe(clock, "uplink", 1.0, chunk_bytes=0)


class LaggingClock(VirtualClock):
    """Virtual time that a test sets, backwards too, as tasks of a wall clock may see it."""

    def __init__(self):
        super().__init__()
        self.time_s = 0.0
        self.now = lambda: self.time_s


def test_who_lags_behind_cannot_book_time_that_is_used_up():
    with LaggingClock() as clock:
        pipe = Pipe(clock, "pipe", 1000.0)
        first, _ = pipe.reserve(1000, priority=1), pipe.reserve(1000, priority=1)
        clock.time_s = first.end_s
        pipe.reserve(1000, priority=1)  # finds the first one finished
        clock.time_s = 0.5
        assert pipe.reserve(1000, priority=0).start_s == 1.0


def test_a_wall_clock_logs_what_was_due_and_when_it_came():
    with WallClock() as clock:
        pipe = Pipe(clock, "pipe", 1e6)

        async def main():
            begin = clock.now()
            await finished(clock, pipe.reserve(1000), latency_s=0.001)
            return begin + 0.001

        due = clock.run(main())
        assert pipe.log is not None
        assert list(pipe.log.due_s) == [due]
        assert list(pipe.log.nbytes) == [1000]
        assert pipe.log.done_s[0] >= due


def test_without_priority_the_order_check_would_fail(monkeypatch):
    """Mutant: a pipe that ignores priority lets a high one wait for a whole low one."""
    original = Pipe.reserve
    monkeypatch.setattr(
        Pipe, "reserve", lambda self, nbytes, **_: original(self, nbytes, priority=0)
    )
    low, high = run((0.0, 1000, 1), (0.25, 1000, 0))
    assert (low, high) == (1.0, 2.0)
