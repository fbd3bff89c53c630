"""The two clocks: what they promise to everything that runs on them."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cxlbench.emu.clock import Clock, DeadlockError, JobSet, VirtualClock, WallClock
from cxlbench.emu.pipe import Pipe, finished
from cxlbench.emu.sync import Signal


@pytest.fixture(params=[VirtualClock, WallClock])
def clock(request):
    with request.param() as made:
        yield made


def test_virtual_time_is_the_deadline_and_nothing_else():
    with VirtualClock() as clock:

        async def main():
            await clock.sleep(3600.0)
            return clock.now()

        assert clock.run(main()) == 3600.0


def test_timers_of_one_moment_fire_in_the_order_in_which_they_were_set():
    with VirtualClock() as clock:
        order = []

        async def sleeper(name):
            await clock.sleep_until(1.0)
            order.append(name)

        async def main():
            await clock.gather(*[sleeper(name) for name in range(200)])

        clock.run(main())
        assert order == list(range(200))


def test_a_virtual_run_is_the_same_twice():
    def trace():
        with VirtualClock() as clock:
            events = []
            pipe = Pipe(clock, "p", 1000.0)

            async def one(name):
                for step in range(20):
                    await finished(clock, pipe.reserve(10 + name * 7 % 13), latency_s=0.001)
                    events.append((name, step, clock.now()))

            async def main():
                await clock.gather(*[one(name) for name in range(9)])

            clock.run(main())
            return events

    assert trace() == trace()


def test_virtual_time_names_the_tasks_that_wait_for_each_other():
    with VirtualClock() as clock:

        async def waits_for_ever():
            await Signal(clock).wait()

        with pytest.raises(DeadlockError, match="waits_for_ever"):
            clock.run(waits_for_ever())


def test_virtual_time_refuses_threads():
    with VirtualClock() as clock:

        async def main():
            await asyncio.get_running_loop().run_in_executor(None, sys.exit)

        with pytest.raises(RuntimeError, match="thread"):
            clock.run(main())


def test_steps_of_a_chain_are_booked_from_deadlines_and_do_not_drift(clock):
    async def main():
        start = clock.now()
        for _ in range(5):
            await clock.sleep(0.002)
        return clock.now() - start

    assert clock.run(main()) == pytest.approx(0.010, abs=1e-12)


def test_a_wall_clock_does_not_wake_before_the_deadline_and_records_lateness():
    with WallClock() as clock:

        async def main():
            for _ in range(10):
                await clock.sleep(0.001)
                assert clock.real() >= clock.now()

        clock.run(main())
        assert len(clock.late_s) == 10
        assert all(late >= 0 for late in clock.late_s)


def test_overdue_deadlines_are_served_in_their_order():
    with WallClock() as clock:
        order = []

        async def sleeper(delay_s):
            await clock.sleep(delay_s)
            order.append(delay_s)

        async def main():
            jobs = [clock.spawn(sleeper(d)) for d in (0.003, 0.001, 0.002)]
            await clock.sleep(0)  # all three have set their timers
            target = clock.real() + 0.006
            while clock.real() < target:
                pass  # the host is busy until all are late
            for job in jobs:
                await job

        clock.run(main())
        assert order == [0.001, 0.002, 0.003]


def test_a_spawned_task_begins_at_its_parents_logical_time(clock):
    async def child():
        return clock.now()

    async def main():
        await clock.sleep(0.002)
        parent = clock.now()
        return parent, await clock.spawn(child())

    parent, began = clock.run(main())
    assert began == parent


def test_waiting_for_a_task_or_a_signal_joins_its_logical_time(clock):
    async def later(signal):
        await clock.sleep(0.003)
        signal.set(clock.now())

    async def main():
        signal = Signal(clock)
        job = clock.spawn(later(signal))
        at = await signal.wait()
        through_signal = clock.now() - at
        await job
        return through_signal, clock.now() - at

    assert clock.run(main()) == (0.0, 0.0)


def test_the_end_of_a_cancelled_task_can_be_awaited(clock):
    async def forever():
        await clock.sleep(1e6)

    async def main():
        job = clock.spawn(forever())
        await clock.sleep(0.001)
        job.cancel()
        await job.ended()
        return job.done()

    assert clock.run(main())


def test_a_callback_runs_at_its_time_and_can_be_cancelled(clock):
    seen = []

    async def main():
        start = clock.now()
        clock.call_at(start + 0.002, lambda: seen.append(clock.now() - start))
        clock.call_at(start + 0.001, seen.append, "cancelled").cancel()
        await clock.sleep(0.004)

    clock.run(main())
    assert seen == [pytest.approx(0.002, abs=1e-9)]


def test_breathing_lets_due_tasks_go_first_and_takes_no_logical_time():
    with WallClock() as clock:
        order = []

        async def due():
            await clock.sleep(0.001)
            order.append("due")

        async def main():
            job = clock.spawn(due())
            await clock.sleep(0)
            before = clock.now()
            while clock.real() < before + 0.003:
                pass
            await clock.breathe()
            order.append("work")
            assert clock.now() == before
            await job

        clock.run(main())
        assert order == ["due", "work"]


def test_a_crash_in_a_background_task_ends_the_run_with_its_error(clock):
    async def crashes():
        await clock.sleep(0.001)
        raise ZeroDivisionError("in the background")

    async def main():
        JobSet(clock).spawn(crashes())
        await clock.sleep(60.0)

    with pytest.raises(ZeroDivisionError, match="background"):
        clock.run(main())


def test_a_failing_member_of_a_gather_cancels_the_others(clock):
    ended = []

    async def fails():
        await clock.sleep(0.001)
        raise KeyError("one")

    async def goes_on():
        try:
            await clock.sleep(60.0)
        finally:
            ended.append(True)

    async def main():
        await clock.gather(goes_on(), fails())

    with pytest.raises(KeyError):
        clock.run(main())
    assert ended == [True]


def scenario(clock: Clock) -> list[float]:
    """Four readers contend for an SSD and a link; returns logical times of every step."""
    ssd, link = Pipe(clock, "ssd", 2e8), Pipe(clock, "link", 4e8)
    ends: list[float] = []

    async def reader(number: int) -> None:
        await clock.sleep_until(start + 1e-4 * number)
        for _ in range(4):
            await finished(clock, ssd.reserve(1 << 17), latency_s=51e-6)
            await finished(clock, link.reserve(1 << 17), latency_s=3e-6)
            ends.append(clock.now() - start)

    async def main() -> None:
        await clock.gather(*[reader(number) for number in range(4)])

    start = 0.05
    clock.run(main())
    return sorted(ends)


def test_one_text_gives_the_same_times_on_both_clocks():
    with VirtualClock() as virtual, WallClock() as wall:
        assert scenario(wall) == pytest.approx(scenario(virtual), abs=1e-9)
