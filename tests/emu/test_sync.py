"""Signals and budgets: set once, served in order, nothing lost on cancellation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.sync import Budget, Signal


@pytest.fixture
def clock():
    with VirtualClock() as made:
        yield made


def test_the_first_value_of_a_signal_stays(clock):
    async def main():
        signal = Signal(clock)
        signal.set("first")
        signal.set("second")
        return signal.peek(), await signal.wait()

    assert clock.run(main()) == ("first", "first")


def test_a_signal_wakes_all_who_wait(clock):
    async def main():
        signal = Signal(clock)
        jobs = [clock.spawn(signal.wait()) for _ in range(5)]
        await clock.sleep(1.0)
        signal.set(7)
        return [await job for job in jobs]

    assert clock.run(main()) == [7] * 5


def test_peeking_at_an_unset_signal_is_an_error(clock):
    with pytest.raises(LookupError):
        Signal(clock).peek()


def test_a_budget_serves_in_order_even_if_a_later_one_would_fit(clock):
    order = []

    async def main():
        budget = Budget(clock, 10, name="b")
        await budget.take(8)

        async def taker(units):
            await budget.take(units)
            order.append(units)
            budget.give(units)

        jobs = [clock.spawn(taker(units)) for units in (5, 1)]
        await clock.sleep(1.0)
        assert order == []
        budget.give(8)
        for job in jobs:
            await job
        return budget.used

    assert clock.run(main()) == 0
    assert order == [5, 1]


def test_more_than_the_capacity_is_refused_at_once(clock):
    async def main():
        await Budget(clock, 10, name="staging buffer").take(11)

    with pytest.raises(ValueError, match="staging buffer: 11 asked, capacity is 10"):
        clock.run(main())


def test_giving_back_more_than_is_out_is_refused(clock):
    with pytest.raises(ValueError, match="given back"):
        Budget(clock, 10, name="b").give(1)


def test_a_cancelled_waiter_makes_way_for_those_behind_it(clock):
    async def main():
        budget = Budget(clock, 10, name="b")
        await budget.take(6)
        large, small = clock.spawn(budget.take(9)), clock.spawn(budget.take(4))
        await clock.sleep(1.0)
        large.cancel()
        await small
        return budget.used

    assert clock.run(main()) == 10


def test_a_grant_to_a_waiter_cancelled_in_that_moment_comes_back(clock):
    async def main():
        budget = Budget(clock, 10, name="b")
        await budget.take(10)
        waiter = clock.spawn(budget.take(10))
        await clock.sleep(1.0)
        budget.give(10)  # granted, but the task has not run yet
        waiter.cancel()
        await waiter.ended()
        return budget.used

    assert clock.run(main()) == 0


@pytest.mark.parametrize("units", [-1, 11])
def test_units_outside_the_capacity_are_never_taken(clock, units):
    budget = Budget(clock, 10, name="b")
    assert not budget.try_take(units)

    async def main():
        await budget.take(units)

    with pytest.raises(ValueError, match=f"b: {units} asked"):
        clock.run(main())
    assert budget.used == 0


def test_a_negative_number_of_units_is_not_given_back(clock):
    with pytest.raises(ValueError, match="b: -3 given back"):
        Budget(clock, 10, name="b").give(-3)


def test_a_capacity_below_zero_is_refused(clock):
    with pytest.raises(ValueError, match="staging: capacity must not be negative"):
        Budget(clock, -1, name="staging")


def test_who_does_not_wait_cannot_pass_those_who_do(clock):
    async def main():
        budget = Budget(clock, 10, name="b")
        await budget.take(8)
        waiter = clock.spawn(budget.take(5))
        await clock.sleep(1.0)
        passed = budget.try_take(1)
        budget.give(8)
        await waiter
        return passed, budget.try_take(1), budget.free, budget.peak

    assert clock.run(main()) == (False, True, 4, 8)


def test_who_waits_for_a_signal_may_give_up_without_harm_to_the_others(clock):
    async def main():
        signal = Signal(clock)
        impatient, patient = clock.spawn(signal.wait()), clock.spawn(signal.wait())
        await clock.sleep(1.0)
        impatient.cancel()
        signal.set("value")
        await impatient.ended()
        return await patient

    assert clock.run(main()) == "value"


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 10), st.integers(0, 6), st.booleans()),
        max_size=12,
    )
)
def test_a_budget_is_never_exceeded_and_empty_at_rest(plan):
    with VirtualClock() as clock:
        budget = Budget(clock, 10, name="b")

        async def user(start, units, hold):
            await clock.sleep_until(float(start))
            await budget.take(units)
            try:
                assert 0 <= budget.used <= budget.capacity
                await clock.sleep(float(hold))
            finally:
                budget.give(units)

        async def main():
            jobs = [clock.spawn(user(start, units, hold)) for start, units, hold, _ in plan]
            await clock.sleep(4.0)
            for job, (*_, cancel) in zip(jobs, plan, strict=True):
                if cancel:
                    job.cancel()
            for job in jobs:
                await job.ended()
            return budget.used

        assert clock.run(main()) == 0
        assert budget.peak <= budget.capacity


def test_units_given_back_while_a_cancellation_is_on_its_way_go_to_the_next(clock):
    async def main():
        budget = Budget(clock, 10, name="b")
        await budget.take(10)
        cancelled, behind = clock.spawn(budget.take(10)), clock.spawn(budget.take(10))
        await clock.sleep(1.0)
        cancelled.cancel()
        budget.give(10)  # the cancelled task has not run yet
        await behind
        await cancelled.ended()
        return budget.used

    assert clock.run(main()) == 10
