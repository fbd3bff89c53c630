"""Continuous batching on one GPU: budget, chunks, order of work, and when tokens come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cxlbench.emu.clock import JobSet, VirtualClock
from cxlbench.harness.serve.gpu_pool import GpuPool
from cxlbench.harness.serve.gpu_server import GpuServer, Sequence
from cxlbench.harness.serve.roofline import Roofline, StepWork
from tests.harness.serve.setups import decode_s, prefill_s, roofline


class Watched(GpuServer):
    """Takes note of what each step computes."""

    def __init__(self, clock: VirtualClock, *, budget: int = 8192) -> None:
        self.jobs = JobSet(clock)
        pool = GpuPool(clock, 100, caching=True, name="gpu")
        super().__init__(clock, self.jobs, roofline(budget=budget), pool, name="gpu")
        self.steps: list[tuple[float, int, list[int]]] = []
        chunks = self._chunks

        def watched(left: int) -> list[tuple[Sequence, int]]:
            found = chunks(left)
            self.steps.append((clock.now(), len(self._answers), [n for _, n in found]))
            return found

        self._chunks = watched  # type: ignore[method-assign]

    def ask(self, prompt: int, answer: int = 1, context: int = 0) -> Sequence:
        return self.start(prompt_tokens=prompt, context=context, answer_tokens=answer)


def on_a_gpu(
    test: Callable[[VirtualClock, Watched], Coroutine[Any, Any, None]], *, budget: int = 8192
) -> Watched:
    with VirtualClock() as clock:
        server = Watched(clock, budget=budget)

        async def whole() -> None:
            await test(clock, server)
            await server.jobs.join()

        clock.run(whole())
    assert not server._prompts
    assert not server._answers
    return server


def test_a_prompt_over_the_budget_comes_in_chunks() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        sequence = server.ask(2500)
        await sequence.ended.wait()
        expected = prefill_s(1000) + prefill_s(1000, 1000) + prefill_s(500, 2000)
        assert sequence.first_token_s == pytest.approx(expected, rel=0.01)

    server = on_a_gpu(test, budget=1000)
    assert [chunks for _, _, chunks in server.steps] == [[1000], [1000], [500]]
    assert server.counters.prompt_tokens == 2500


def test_the_budget_is_shared_in_order_of_arrival() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        first, second, third = server.ask(600), server.ask(600), server.ask(100)
        await third.ended.wait()
        assert first.first_token_s < second.first_token_s == third.first_token_s

    server = on_a_gpu(test, budget=1000)
    assert [chunks for _, _, chunks in server.steps] == [[600, 400], [200, 100]]


def test_answers_come_first_and_take_of_the_budget() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        for _ in range(10):
            server.ask(10, answer=5)
        await clock.sleep(1e-6)
        await server.ask(250).ended.wait()

    server = on_a_gpu(test, budget=100)
    assert server.steps[0][1:] == (0, [10] * 10)
    assert [step[1:] for step in server.steps[1:4]] == [(10, [90]), (10, [90]), (10, [70])]


def test_answers_go_on_when_they_take_all_of_the_budget() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        for _ in range(3):
            server.ask(1, answer=4)
        await clock.sleep(1e-6)
        late = server.ask(1)
        await late.ended.wait()
        assert late.started_s > 0

    server = on_a_gpu(test, budget=3)
    assert [step[1] for step in server.steps] == [0, 3, 3, 3, 0]
    assert server.counters.answer_tokens == 3 * 4 + 1


def test_the_first_token_comes_with_the_last_chunk() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        sequence = server.ask(1500, answer=3)
        await sequence.started.wait()
        assert clock.now() == sequence.started_s == 0.0
        await sequence.prefilled.wait()
        assert clock.now() == sequence.first_token_s
        assert sequence.answer_left == 2
        await sequence.ended.wait()
        assert clock.now() == sequence.last_token_s > sequence.first_token_s

    server = on_a_gpu(test, budget=1000)
    assert server.counters.steps == 4


def test_an_answers_tokens_come_a_step_apart() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        await server.ask(1000, answer=101).ended.wait()

    gaps = on_a_gpu(test).counters.token_gaps_s
    assert len(gaps) == 100
    assert gaps[0] == pytest.approx(decode_s([1001]), rel=1e-6)
    assert gaps[99] == pytest.approx(decode_s([1100]), rel=1e-6)


def test_a_prompt_makes_the_answers_of_others_wait() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        answering = server.ask(100, answer=10)
        await answering.prefilled.wait()
        server.ask(4000)
        await answering.ended.wait()

    gaps = sorted(on_a_gpu(test).counters.token_gaps_s)
    assert gaps[-1] > 10 * gaps[-2]
    assert gaps[-1] == pytest.approx(prefill_s(4000), rel=0.01)


def test_a_batch_of_answers_costs_little_more_than_one() -> None:
    def took(count: int) -> float:
        async def test(clock: VirtualClock, server: Watched) -> None:
            for _ in range(count):
                server.ask(10, answer=50)

        return on_a_gpu(test).counters.busy_s

    assert took(32) < 1.1 * took(1)


def test_a_gpu_rests_while_there_is_no_work_and_starts_again() -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        await server.ask(1000).ended.wait()
        await clock.sleep(100)
        await server.ask(1000).ended.wait()

    counters = on_a_gpu(test).counters
    assert counters.steps == 2
    assert counters.busy_s == pytest.approx(2 * prefill_s(1000), rel=0.01)


@pytest.mark.parametrize(("prompt", "answer"), [(0, 1), (1, 0)])
def test_a_sequence_without_work_is_refused(prompt: int, answer: int) -> None:
    async def test(clock: VirtualClock, server: Watched) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            server.ask(prompt, answer)

    on_a_gpu(test)


def test_what_a_step_takes_is_the_rooflines(monkeypatch: pytest.MonkeyPatch) -> None:
    def unit(self: Roofline, work: StepWork) -> float:
        return 1.0

    monkeypatch.setattr(Roofline, "step_s", unit)

    async def test(clock: VirtualClock, server: Watched) -> None:
        await server.ask(2500, answer=4).ended.wait()
        assert clock.now() == 6.0

    on_a_gpu(test, budget=1000)
