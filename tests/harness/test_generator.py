"""The generator: prompts that grow by whole histories, shared prefixes, and every knob checked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Mode, WorkloadError

KNOBS = st.builds(
    GeneratorKnobs,
    sessions=st.integers(1, 5),
    turns=st.integers(1, 5),
    shared_system_tokens=st.integers(0, 70),
    first_input_tokens=st.floats(1, 60),
    first_input_stddev=st.floats(0, 40),
    turn_input_tokens=st.floats(1, 30),
    turn_input_stddev=st.floats(0, 30),
    turn_input_growth=st.floats(0.5, 2),
    output_tokens=st.floats(1, 30),
    output_stddev=st.floats(0, 30),
    think_s=st.floats(0, 5),
    think_stddev_s=st.floats(0, 5),
    session_spread_s=st.floats(0, 10),
    service_s=st.floats(0, 1),
    block_tokens=st.integers(1, 20),
    seed=st.integers(-(2**70), 2**70),
)


def session(workload, number=0):
    return workload.sessions()[f"s{number}"]


@given(KNOBS)
def test_a_turns_prompt_is_the_whole_history_and_something_new(knobs):
    for turns in generate(knobs).sessions().values():
        assert [turn.turn for turn in turns] == list(range(1, knobs.turns + 1))
        assert turns[0].input_tokens > knobs.shared_system_tokens
        assert all(turn.output_tokens >= 1 for turn in turns)
        for before, turn in pairwise(turns):
            assert turn.input_tokens > before.input_tokens + before.output_tokens


SHORT_OR_LONG = GeneratorKnobs(
    sessions=50,
    turns=1,
    shared_system_tokens=64,
    first_input_tokens=16,
    first_input_stddev=16,
    block_tokens=16,
)


@example(SHORT_OR_LONG)
@given(KNOBS)
def test_ids_are_equal_exactly_where_prompts_are(knobs):
    """Sessions share the system prompt's whole blocks, turns share all of the turn before."""
    owner: dict[int, tuple[str, int]] = {}
    for request in generate(knobs).requests:
        assert len(request.block_ids) == request.input_tokens // knobs.block_tokens
        for place, block in enumerate(request.block_ids):
            shared = (place + 1) * knobs.block_tokens <= knobs.shared_system_tokens
            identity = ("" if shared else request.session, place)
            assert owner.setdefault(block, identity) == identity
    assert len(owner) == len(set(owner.values()))
    assert sorted(owner) == list(range(len(owner)))


@given(KNOBS)
def test_each_turn_waits_for_the_one_before(knobs):
    workload = generate(knobs)
    assert (workload.mode, workload.has_sessions, workload.has_ids) == (
        Mode.WHOLE_BLOCKS,
        True,
        True,
    )
    for turns in workload.sessions().values():
        assert (turns[0].after, turns[0].think_s) == (None, 0.0)
        for before, turn in pairwise(turns):
            assert turn.after == before.request_id
            assert turn.arrival_s == before.arrival_s + (knobs.service_s + turn.think_s)


def test_without_spread_every_length_is_its_mean():
    workload = generate(
        GeneratorKnobs(
            sessions=1,
            turns=4,
            shared_system_tokens=1000,
            first_input_tokens=500,
            turn_input_tokens=100,
            turn_input_growth=2,
            output_tokens=50,
            think_s=3,
            service_s=2,
        )
    )
    assert [request.input_tokens for request in workload.requests] == [1500, 1650, 1900, 2350]
    assert [request.output_tokens for request in workload.requests] == [50] * 4
    assert [request.think_s for request in workload.requests] == [0, 3, 3, 3]
    assert [request.arrival_s for request in workload.requests] == [0, 5, 10, 15]


def test_lengths_have_the_mean_and_spread_that_were_asked_for():
    workload = generate(
        GeneratorKnobs(
            sessions=2000,
            turns=2,
            shared_system_tokens=0,
            first_input_tokens=1000,
            first_input_stddev=100,
            turn_input_tokens=500,
            turn_input_stddev=50,
            output_tokens=200,
            output_stddev=20,
            think_s=10,
            think_stddev_s=1,
        )
    )
    pairs = list(workload.sessions().values())
    new = [
        second.input_tokens - first.input_tokens - first.output_tokens for first, second in pairs
    ]
    for drawn, centre, spread in (
        ([first.input_tokens for first, _ in pairs], 1000, 100),
        (new, 500, 50),
        ([first.output_tokens for first, _ in pairs], 200, 20),
        ([second.think_s for _, second in pairs], 10, 1),
    ):
        assert mean(drawn) == pytest.approx(centre, rel=0.01)
        assert pstdev(drawn) == pytest.approx(spread, rel=0.06)


def test_sessions_start_at_once_spread_or_at_a_rate():
    def starts(**knobs):
        found = generate(GeneratorKnobs(sessions=2000, turns=1, **knobs)).requests
        return [request.arrival_s for request in found]

    assert set(starts()) == {0.0}
    spread = starts(session_spread_s=50)
    assert 0 <= spread[0] < 1
    assert 49 < spread[-1] <= 50
    assert mean(spread) == pytest.approx(25, rel=0.05)
    assert starts(session_rate_per_s=4)[-1] == pytest.approx(500, rel=0.1)


def test_more_sessions_and_turns_leave_the_earlier_ones_as_they_were():
    knobs = GeneratorKnobs(
        sessions=3, turns=3, first_input_stddev=90, output_stddev=9, session_spread_s=9
    )
    few = generate(knobs)
    many = generate(replace(knobs, sessions=6, turns=5))
    for number in range(3):
        for one, other in zip(session(few, number), session(many, number), strict=False):
            assert (one.input_tokens, one.output_tokens, one.arrival_s) == (
                other.input_tokens,
                other.output_tokens,
                other.arrival_s,
            )


def test_another_seed_is_another_workload():
    knobs = GeneratorKnobs(first_input_stddev=100)
    assert generate(knobs) == generate(knobs)
    assert generate(knobs) != generate(replace(knobs, seed=1))


def test_the_workload_does_not_depend_on_the_hash_seed():
    program = (
        "from cxlbench.harness.generator import *\n"
        "w = generate(GeneratorKnobs(sessions=3, first_input_stddev=99, think_stddev_s=1))\n"
        "print([(r.session, r.input_tokens, r.arrival_s) for r in w.requests])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("sessions", 0),
        ("sessions", 1.5),
        ("turns", -1),
        ("turns", True),
        ("shared_system_tokens", -1),
        ("first_input_tokens", 0),
        ("first_input_stddev", -1),
        ("turn_input_tokens", 0.5),
        ("turn_input_stddev", float("inf")),
        ("turn_input_growth", 0),
        ("output_tokens", float("nan")),
        ("output_stddev", "2"),
        ("think_s", -0.1),
        ("think_stddev_s", -1),
        ("session_spread_s", -1),
        ("session_rate_per_s", 0),
        ("service_s", None),
        ("block_tokens", 0),
        ("seed", 0.5),
    ],
)
def test_a_knob_out_of_range_is_refused_with_its_value(knob, value):
    with pytest.raises(WorkloadError, match=f"^{knob}={value!r}: must be"):
        GeneratorKnobs(**{knob: value})


def test_two_ways_to_start_sessions_are_one_too_many():
    with pytest.raises(WorkloadError, match="choose one way to start sessions"):
        GeneratorKnobs(session_rate_per_s=1, session_spread_s=1)


def test_growth_beyond_all_bounds_is_refused_rather_than_built():
    with pytest.raises(WorkloadError, match="lower the means, turn_input_growth or turns"):
        generate(GeneratorKnobs(turns=500, turn_input_growth=10, block_tokens=4096))
