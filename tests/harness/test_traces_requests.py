"""Requests and workloads: what may be reused, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError


def request(request_id=0, **changes) -> Request:
    plain = Request(
        request_id=request_id,
        session="a",
        turn=1,
        arrival_s=0.0,
        input_tokens=40,
        output_tokens=1,
        block_ids=(0, 1),
    )
    return replace(plain, **changes)


def workload(*requests: Request, mode: Mode = Mode.WHOLE_BLOCKS, **changes) -> Workload:
    return replace(Workload("w", 16, mode, requests, has_sessions=True), **changes)


@pytest.mark.parametrize(
    ("tokens", "reusable"),
    [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1000, 2)],
)
def test_an_engine_computes_at_least_the_last_token_of_a_prompt(tokens, reusable):
    assert request(input_tokens=tokens).reusable_blocks(16) == reusable


def test_no_more_blocks_are_reusable_than_have_ids():
    assert request(input_tokens=1000, block_ids=(7,)).reusable_blocks(16) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": -1}, "ids count from 0"),
        ({"turn": 0}, "turn=0, turns count from 1"),
        ({"input_tokens": -1}, "input_tokens=-1"),
        ({"output_tokens": -5}, "output_tokens=-5"),
        ({"arrival_s": -0.5}, "arrival_s=-0.5"),
        ({"arrival_s": float("nan")}, "arrival_s=nan"),
        ({"think_s": float("inf")}, "think_s=inf"),
    ],
)
def test_a_senseless_request_is_refused_with_the_value_shown(changes, message):
    with pytest.raises(WorkloadError, match=message):
        request(**changes)


def test_requests_out_of_order_are_refused():
    with pytest.raises(WorkloadError, match="sorted by arrival"):
        workload(request(arrival_s=2.0), request(1, arrival_s=1.0))


def test_requests_not_numbered_by_position_are_refused():
    with pytest.raises(WorkloadError, match="position 0"):
        workload(request(1))


def test_a_partial_block_counts_as_recorded_and_not_as_a_whole_block():
    partial = request(block_ids=(0, 1, 2))
    assert workload(partial, mode=Mode.AS_RECORDED).requests == (partial,)
    with pytest.raises(WorkloadError, match="at most 2 blocks of 16 in mode whole-blocks"):
        workload(partial)


@pytest.mark.parametrize("after", [1, 7, -1])
def test_a_request_cannot_wait_for_one_that_is_not_before_it(after):
    with pytest.raises(WorkloadError, match=f"waits for request {after}"):
        workload(request(), request(1, after=after))


def test_a_request_cannot_wait_for_another_session():
    with pytest.raises(WorkloadError, match="session 'b'"):
        workload(request(), request(1, session="b", after=0))


def test_sessions_come_in_order_of_their_first_arrival():
    first, second, third = request(), request(1, session="b"), request(2, after=0)
    assert list(workload(first, second, third).sessions().items()) == [
        ("a", (first, third)),
        ("b", (second,)),
    ]


def test_what_was_not_recorded_cannot_be_required():
    lengths_only = workload(has_sessions=False, has_ids=False)
    with pytest.raises(WorkloadError, match="a closed loop needs sessions, and 'w' records none"):
        lengths_only.require_sessions("a closed loop")
    with pytest.raises(WorkloadError, match="a hit rate needs block ids, and 'w' records lengths"):
        lengths_only.require_ids("a hit rate")
    workload().require_sessions("a closed loop")
    workload().require_ids("a hit rate")


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(WorkloadError, match="block_tokens=0"):
        workload(block_tokens=0)
