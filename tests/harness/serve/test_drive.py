"""How requests come: by their times, in rounds, or session by session; and how a run is stopped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload, WorkloadError
from cxlbench.harness.serve.drive import Drive, Order, in_rounds
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.serve.served import Served
from cxlbench.harness.tiers.recompute import NoTier
from tests.harness.serve.setups import OPEN, cluster, run
from tests.harness.workbench import ask, workload


def chats(sessions: int = 6, turns: int = 4, think_s: float = 0.0) -> Workload:
    return generate(
        GeneratorKnobs(
            sessions=sessions,
            turns=turns,
            shared_system_tokens=0,
            first_input_tokens=300,
            turn_input_tokens=300,
            output_tokens=1,
            think_s=think_s,
        )
    )


def most_at_once(served: tuple[Served, ...]) -> int:
    events = sorted(
        [(one.arrival_s, 1) for one in served] + [(one.end_s, -1) for one in served],
    )
    inside = most = 0
    for _, change in events:
        inside += change
        most = max(most, inside)
    return most


def by_session(result: Simulated) -> dict[str, list[Served]]:
    found: dict[str, list[Served]] = {}
    for one in result.served:
        found.setdefault(one.session, []).append(one)
    return {session: sorted(mine, key=lambda one: one.turn) for session, mine in found.items()}


def test_an_open_loop_waits_for_nobody() -> None:
    work = workload(*(ask([], tokens=8000, at=0.1 * n) for n in range(20)), sessions=False)
    result = run(work)
    assert [one.arrival_s for one in result.served] == pytest.approx([0.1 * n for n in range(20)])
    assert most_at_once(result.served) > 10


def test_speed_divides_arrivals_and_pauses() -> None:
    work = workload(ask([], tokens=10), ask([], tokens=10, at=8.0), sessions=False)
    result = run(work, how=Drive(order=Order.OPEN, speed=4))
    assert result.served[1].arrival_s == pytest.approx(2.0)
    fast = run(chats(think_s=8.0), how=Drive(order=Order.SESSIONS, concurrency=6, speed=4))
    for mine in by_session(fast).values():
        assert mine[1].arrival_s == pytest.approx(mine[0].end_s + 2.0)


def test_rounds_take_all_first_turns_then_all_second_ones() -> None:
    result = run(chats(), how=Drive(order=Order.ROUNDS, concurrency=2))
    arrived = sorted(result.served, key=lambda one: (one.arrival_s, one.turn))
    assert [one.turn for one in arrived] == sorted(one.turn for one in arrived)
    assert most_at_once(result.served) == 2


def test_a_turn_never_starts_before_the_one_it_follows_has_ended() -> None:
    for concurrency in (1, 5, 50):
        result = run(chats(), how=Drive(order=Order.ROUNDS, concurrency=concurrency))
        for mine in by_session(result).values():
            for before, after in pairwise(mine):
                assert after.arrival_s >= before.end_s


def test_a_sub_agent_that_waits_for_a_later_turn_comes_in_a_later_round() -> None:
    """Its own first turn waits for its parent's third: turns alone would never get there."""
    parent = [ask([], tokens=10, turn=1), ask([], tokens=10, turn=2, after=0)]
    parent.append(ask([], tokens=10, turn=3, after=1))
    work = workload(*parent, ask([], tokens=10, turn=1, after=2))
    assert [one.request_id for one in in_rounds(work.requests)] == [0, 1, 2, 3]
    result = run(work, how=Drive(order=Order.ROUNDS, concurrency=1))
    assert [one.request_id for one in result.served] == [0, 1, 2, 3]


def test_sessions_go_to_their_ends_a_few_at_a_time() -> None:
    result = run(chats(think_s=1.0), how=Drive(order=Order.SESSIONS, concurrency=2))
    sessions = by_session(result)
    spans = sorted((mine[0].arrival_s, mine[-1].end_s) for mine in sessions.values())
    assert spans[2][0] >= min(end for _, end in spans[:2])
    for mine in sessions.values():
        for before, after in pairwise(mine):
            assert after.arrival_s == pytest.approx(before.end_s + 1.0)


def stopped_after(work: Workload, how: Drive, asked: int) -> Simulated:
    """Stop when so many requests were about to start."""
    seen = iter(range(1, 1 << 30))
    stopping: Callable[[], bool] = lambda: next(seen) > asked  # noqa: E731
    return simulate(work, cluster(), NoTier, how, stopping=stopping)


@pytest.mark.parametrize(
    "how",
    [OPEN, Drive(order=Order.ROUNDS, concurrency=3), Drive(order=Order.SESSIONS, concurrency=3)],
    ids=lambda how: how.order.value,
)
def test_who_stops_a_run_gets_what_was_begun(how: Drive) -> None:
    result = stopped_after(chats(), how, 7)
    assert not result.complete
    assert len(result.served) == 7
    assert [law for law in result.laws if not law.ok] == []
    assert stopped_after(chats(), how, 24).complete
    assert not stopped_after(chats(), how, 23).complete


def test_a_run_that_is_stopped_at_once_is_empty_and_in_order() -> None:
    result = stopped_after(chats(), OPEN, 0)
    assert result.served == ()
    assert result.turns == ()
    assert result.requests_per_s == 0
    assert all(law.ok for law in result.laws)


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    simulate(chats(), cluster(), NoTier, OPEN, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(n, 24) for n in range(1, 25)]


def test_turns_are_added_up() -> None:
    result = run(chats(), "gpu-prefix-cache", Drive(order=Order.ROUNDS, concurrency=3))
    assert [(turn.turn, turn.requests) for turn in result.turns] == [(n, 6) for n in (1, 2, 3, 4)]
    assert sum(turn.gpu_blocks for turn in result.turns) == sum(r.matched for r in result.served)
    assert result.turns[0].hit_rate == 0
    assert result.turns[3].hit_rate == 1
    for turn in result.turns:
        mine = [one for one in result.served if one.turn == turn.turn]
        first, last = min(r.arrival_s for r in mine), max(r.end_s for r in mine)
        assert turn.requests_per_s == pytest.approx(6 / (last - first))


@pytest.mark.parametrize("order", [Order.ROUNDS, Order.SESSIONS])
def test_a_closed_loop_needs_a_concurrency(order: Order) -> None:
    with pytest.raises(ValueError, match="concurrency of at least 1"):
        Drive(order=order)


@pytest.mark.parametrize("speed", [0, -1, float("inf"), float("nan")])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed must be positive"):
        Drive(order=Order.OPEN, speed=speed)


def test_sessions_and_ids_are_needed_where_they_are_used() -> None:
    lengths = workload(ask([], tokens=10), sessions=False)
    with pytest.raises(WorkloadError, match="needs sessions"):
        run(lengths, how=Drive(order=Order.SESSIONS, concurrency=1))
    no_ids = Workload("x", 128, lengths.mode, lengths.requests, False, has_ids=False)
    with pytest.raises(WorkloadError, match="needs block ids"):
        run(no_ids)
