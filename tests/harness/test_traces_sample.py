"""A seeded sample of a coding-agent trace, cut to what a run can take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cxlbench.harness.requests import Mode, Workload
from cxlbench.harness.traces import read_trace
from cxlbench.harness.traces.lines import TraceError
from cxlbench.harness.traces.sample import sample_sessions

TOKENS = 64


def call(t: float, blocks: list[int]) -> dict[str, Any]:
    length = len(blocks) * TOKENS + 3
    return {"type": "n", "t": t, "in": length, "out": 5, "hash_ids": blocks, "api_time": 0.5}


def session(name: str, entries: list[dict[str, Any]]) -> str:
    return json.dumps(
        {"id": name, "block_size": TOKENS, "hash_id_scope": "local", "requests": entries}
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten sessions of six calls; call n of each has 4 x n blocks."""
    lines = [
        session(f"s{n}", [call(2.0 * turn, list(range(4 * (turn + 1)))) for turn in range(6)])
        for n in range(10)
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def sample(path: Path, **changes: Any) -> Workload:
    asked: dict[str, Any] = {
        "sessions": 3,
        "references": 1000,
        "block_tokens": 256,
        "most_input_tokens": 100_000,
        "seed": 1,
    }
    return sample_sessions(path, **{**asked, **changes})


def test_whole_sessions_are_kept_where_nothing_is_too_long(trace: Path) -> None:
    work = sample(trace)
    assert len(work.sessions()) == 3
    assert [len(requests) for requests in work.sessions().values()] == [6, 6, 6]
    assert work.mode is Mode.WHOLE_BLOCKS
    assert [len(r.block_ids) for r in next(iter(work.sessions().values()))] == [1, 2, 3, 4, 5, 6]


def test_requests_are_those_of_the_trace(trace: Path) -> None:
    whole = read_trace(trace, mode=Mode.WHOLE_BLOCKS, block_tokens=256)
    of_trace = {
        name: [(r.arrival_s, r.input_tokens, r.think_s, len(r.block_ids)) for r in requests]
        for name, requests in whole.sessions().items()
    }
    for name, requests in sample(trace).sessions().items():
        found = [(r.arrival_s, r.input_tokens, r.think_s, len(r.block_ids)) for r in requests]
        assert found == of_trace[name]


def test_what_waits_for_a_request_waits_for_the_same_one(trace: Path) -> None:
    work = sample(trace)
    for requests in work.sessions().values():
        before = None
        for request in requests:
            assert request.after == before
            before = request.request_id


def test_a_session_ends_before_it_exceeds_its_references(trace: Path) -> None:
    work = sample(trace, references=10)
    for requests in work.sessions().values():
        assert [len(r.block_ids) for r in requests] == [1, 2, 3, 4]
    assert sample(trace, references=9).requests[-1].turn == 3


def test_a_session_ends_where_a_prompt_is_too_long(trace: Path) -> None:
    work = sample(trace, most_input_tokens=3 * 256 + 3)
    assert [len(r) for r in work.sessions().values()] == [3, 3, 3]
    work = sample(trace, most_input_tokens=3 * 256 + 2)
    assert [len(r) for r in work.sessions().values()] == [2, 2, 2]


def test_a_session_that_ended_does_not_come_back(tmp_path: Path) -> None:
    """Contexts shrink after a compaction; what came after it hangs on what was left out."""
    path = tmp_path / "t.jsonl"
    sizes = [4, 8, 40, 4]
    calls = [call(2.0 * n, list(range(size))) for n, size in enumerate(sizes)]
    path.write_text(session("a", calls) + "\n")
    work = sample(path, sessions=1, most_input_tokens=1000)
    assert [len(r.block_ids) for r in work.requests] == [1, 2]


def test_a_sub_agent_whose_parents_call_is_left_out_waits_for_nothing(tmp_path: Path) -> None:
    """The parent's second prompt is too long, so that the session ends there."""
    path = tmp_path / "t.jsonl"
    sub = {
        "type": "subagent",
        "t": 9.0,
        "duration_ms": 1000,
        "requests": [call(0, [70, 71, 72, 73])],
    }
    calls = [call(0, [1, 2, 3, 4]), call(4, list(range(100))), sub, call(10, [1, 2, 3, 4, 5])]
    path.write_text(session("a", calls) + "\n")
    work = sample(path, sessions=1, most_input_tokens=1000)
    assert all(r.after is None or r.after < r.request_id for r in work.requests)
    assert work.requests[0].after is None


def test_the_same_seed_chooses_the_same_sessions(trace: Path) -> None:
    assert sample(trace) == sample(trace)
    chosen = {tuple(sample(trace, seed=seed).sessions()) for seed in range(8)}
    assert len(chosen) > 3
    assert len(sample(trace, sessions=10).sessions()) == 10


def test_arrivals_are_in_order(trace: Path) -> None:
    at_s = [request.arrival_s for request in sample(trace, sessions=10).requests]
    assert at_s == sorted(at_s)


def test_too_few_sessions_are_told(trace: Path) -> None:
    with pytest.raises(TraceError, match="11 sessions asked, the file has 10"):
        sample(trace, sessions=11)


def test_only_traces_of_agents_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(TraceError, match="sampled from agents' traces, not mooncake"):
        sample(path)


def test_a_sample_of_the_public_trace(trace_path: Any) -> None:
    path = trace_path("cc_traces_v8_small_verbatim.jsonl.gz")
    work = sample_sessions(
        path,
        sessions=2,
        references=300,
        block_tokens=256,
        most_input_tokens=131_072,
        seed=0,
    )
    assert 1 <= len(work.sessions()) <= 2
    for requests in work.sessions().values():
        assert 0 < sum(len(r.block_ids) for r in requests) <= 300
        assert max(r.input_tokens for r in requests) <= 131_072
