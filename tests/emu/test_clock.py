"""The two clocks: what they promise to everything that runs on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.emu import clock as clock_module
from cxlbench.emu.clock import Clock, DeadlockError, JobSet, VirtualClock, WallClock
from cxlbench.emu.pipe import Pipe, finished
from cxlbench.emu.sync import Budget, Signal


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


def test_who_waits_for_a_task_goes_on_from_its_end(clock):
    async def child():
        await clock.sleep(0.003)

    async def main():
        begin = clock.now()
        await clock.spawn(child())
        awaited = clock.now() - begin
        await clock.spawn(child()).ended()
        ended = clock.now() - begin
        await clock.gather(child(), child())
        return awaited, ended, clock.now() - begin

    assert clock.run(main()) == pytest.approx((0.003, 0.006, 0.009), abs=1e-12)


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


def scenario(clock: Clock) -> list[tuple[str, float]]:
    """Readers and a flusher contend for an SSD, a link and a budget; every step with its time."""
    ssd, link = Pipe(clock, "ssd", 2e8, chunk_bytes=1 << 14), Pipe(clock, "link", 4e8)
    budget = Budget(clock, 2, name="staging")
    ends: list[tuple[str, float]] = []

    async def reader(number: int) -> None:
        await clock.sleep_until(START_S + 1e-4 * number)
        for step in range(4):
            await budget.take(1)
            await finished(clock, ssd.reserve(1 << 17), latency_s=51e-6)
            await finished(clock, link.reserve(1 << 17), latency_s=3e-6)
            budget.give(1)
            ends.append((f"reader {number} step {step}", clock.now()))

    async def flusher() -> None:
        await clock.sleep_until(START_S)
        for step in range(5):
            await finished(clock, ssd.reserve(1 << 18, priority=1))
            ends.append((f"flush {step}", clock.now()))

    async def main() -> None:
        await clock.gather(flusher(), *[reader(number) for number in range(4)])

    clock.run(main())
    return sorted(ends)


START_S = 0.1


def test_one_text_gives_exactly_the_same_times_on_both_clocks():
    with VirtualClock() as virtual, WallClock() as wall:
        assert scenario(wall) == scenario(virtual)


def test_a_virtual_run_does_not_depend_on_the_hash_seed():
    program = (
        "from tests.emu.test_clock import scenario; from cxlbench.emu.clock import VirtualClock; "
        "print(scenario(VirtualClock()))"
    )

    def output(hash_seed: str) -> str:
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=env,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    assert output("1") == output("2") != ""


def test_what_a_budget_hands_over_carries_the_time_of_the_giver(clock):
    async def holder(budget):
        await budget.take(1)
        await clock.sleep(0.003)
        budget.give(1)
        return clock.now()

    async def waiter(budget):
        await budget.take(1)
        return clock.now()

    async def main():
        budget = Budget(clock, 1, name="b")
        return await clock.gather(holder(budget), waiter(budget))

    given, taken = clock.run(main())
    assert given == taken


def test_a_deadline_in_the_past_is_no_step_back(clock):
    async def main():
        await clock.sleep(0.002)
        before = clock.now()
        await clock.sleep_until(before - 0.001)
        return clock.now() - before

    assert clock.run(main()) == 0.0


def test_a_late_callback_still_runs_at_its_logical_time():
    with WallClock() as clock:
        seen = []

        async def main():
            due = clock.now() + 0.001
            clock.call_at(due, lambda: seen.append(clock.now() - due))
            while clock.real() < due + 0.003:
                pass
            await clock.sleep(0.004)

        clock.run(main())
        assert seen == [0.0]


def test_many_waiting_tasks_are_named_in_a_stable_order():
    with VirtualClock() as clock:

        async def main():
            never = Signal(clock)
            jobs = [clock.spawn(never.wait(), name=f"task {n}") for n in range(8)]
            await jobs[0]

        with pytest.raises(DeadlockError, match="9 tasks wait") as caught:
            clock.run(main())
        named = re.findall(r"task \d", str(caught.value))
        assert named == ["task 0", "task 1", "task 2", "task 3"]
        assert str(caught.value).endswith("and 4 more")


def test_the_crash_is_reported_even_if_cleaning_up_fails_too(clock):
    async def crashes():
        raise ZeroDivisionError("the cause")

    async def main():
        JobSet(clock).spawn(crashes())
        try:
            await clock.sleep(60.0)
        finally:
            raise KeyError("a consequence")

    with pytest.raises(ZeroDivisionError, match="the cause"):
        clock.run(main())


def test_a_crash_cannot_be_swallowed_by_work_that_ignores_its_cancellation(clock):
    async def crashes():
        raise ZeroDivisionError("the cause")

    async def main():
        JobSet(clock).spawn(crashes())
        with contextlib.suppress(asyncio.CancelledError):
            await clock.sleep(60.0)
        return "all is well"

    with pytest.raises(ZeroDivisionError, match="the cause"):
        clock.run(main())


def test_a_job_set_joins_what_its_tasks_start_and_cancels_what_is_left(clock):
    async def child():
        await clock.sleep(0.001)

    async def parent(jobs):
        jobs.spawn(child())

    async def forever():
        await clock.sleep(1e6)

    async def main():
        jobs = JobSet(clock)
        jobs.spawn(parent(jobs))
        await jobs.join()
        joined = len(jobs)
        jobs.spawn(forever())
        await jobs.cancel()
        return joined, len(jobs)

    assert clock.run(main()) == (0, 0)


def test_the_results_of_a_gather_are_in_the_order_of_its_works(clock):
    async def after(delay_s):
        await clock.sleep(delay_s)
        return delay_s

    async def main():
        return await clock.gather(after(0.003), after(0.001)), await clock.gather()

    assert clock.run(main()) == ([0.003, 0.001], [])


def test_timers_and_callbacks_are_counted():
    with VirtualClock() as clock:

        async def main():
            for _ in range(10):
                await clock.sleep(1.0)

        clock.run(main())
        assert clock.timers == 10
        assert 10 <= clock.callbacks <= 14


def test_a_wall_clock_works_in_a_process_with_very_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this host lets a process open only {hard} files")
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.dup(0))
        with WallClock() as clock:
            clock.run(clock.sleep(0.002))
            assert len(clock.late_s) == 1
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_clock_that_runs_for_long_remembers_the_last_latenesses_only(monkeypatch):
    monkeypatch.setattr(clock_module, "LATE_KEPT", 10)

    async def wake_often():
        for _ in range(1000):
            await wall.sleep_until(wall.real())

    with WallClock() as wall:
        wall.run(wake_often())
        assert 5 <= len(wall.late_s) <= 10
