"""Each trace format read from a small sample: what becomes of every field."""

from __future__ import annotations

import gzip
import json

import pytest

from cxlbench.harness.requests import Mode, Request, WorkloadError
from cxlbench.harness.traces import TraceError, detect_format, open_trace, read_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 4]},
    {"timestamp": 1500, "input_length": 0, "output_length": 1, "hash_ids": []},
    {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [77]},
]
LMCACHE = [
    {"timestamp": 0, "session_id": 3, "turn": 1, "input_length": 300, "hash_ids": [0, 1]},
    {"timestamp": 500, "session_id": 4, "turn": 1, "input_length": 130, "hash_ids": [0]},
    {"timestamp": 2000, "session_id": 3, "turn": 2, "input_length": 400, "hash_ids": [0, 1, 2]},
]
for _line in LMCACHE:
    _line["output_length"] = 7

ROUNDED_UP = (0.9, 0.3)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.1805900,128,109\n"
)


def call(t, blocks, **fields):
    """Return a coding-agent call whose input ends 3 tokens into the block after ``blocks``."""
    ids = {"hash_ids": blocks} if isinstance(blocks, list) else {}
    count = len(blocks) if isinstance(blocks, list) else blocks
    return {"t": t, "type": "n", "in": 64 * count + 3, "out": 9, "api_time": 2.0, **ids, **fields}


def session(*requests, name="s1", **fields):
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
        **fields,
    }


def agent(t, *requests, **fields):
    return {"t": t, "type": "subagent", "status": "completed", "requests": list(requests), **fields}


@pytest.fixture
def write(tmp_path):
    def write(content, name="trace.jsonl"):
        if not isinstance(content, str):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


def whole(path, **options):
    return read_trace(path, mode=Mode.WHOLE_BLOCKS, **options)


def recorded(path, **options):
    return read_trace(path, mode=Mode.AS_RECORDED, **options)


def test_a_mooncake_line_becomes_a_request(write):
    read = recorded(write(MOONCAKE[:1], "conversation_trace.jsonl"))
    assert read.requests == (
        Request(
            request_id=0,
            session="0",
            turn=1,
            arrival_s=0.0,
            input_tokens=700,
            output_tokens=5,
            block_ids=(0, 1),
        ),
    )
    assert (read.name, read.block_tokens, read.mode) == (
        "conversation_trace",
        512,
        Mode.AS_RECORDED,
    )
    assert (read.has_sessions, read.has_ids) == (False, True)


def test_whole_blocks_leave_out_the_partial_last_block(write):
    assert [request.block_ids for request in whole(write(MOONCAKE)).requests] == [
        (0,),
        (),
        (),
        (0, 2),
    ]


def test_disorder_is_sorted_and_equal_times_keep_the_files_order(write):
    read = recorded(write(MOONCAKE))
    assert [request.arrival_s for request in read.requests] == [0.0, 1.5, 1.5, 2.5]
    assert [request.input_tokens for request in read.requests] == [700, 0, 1, 1024]
    assert [request.request_id for request in read.requests] == [0, 1, 2, 3]


def test_empty_and_one_token_prompts_are_requests_with_nothing_to_reuse(write):
    _, empty, one, _ = recorded(write(MOONCAKE)).requests
    assert (empty.block_ids, empty.reusable_blocks(512)) == ((), 0)
    assert (len(one.block_ids), one.reusable_blocks(512)) == (1, 0)


def test_mooncake_in_smaller_and_larger_blocks(write):
    path = write(MOONCAKE[:2])
    assert [request.block_ids for request in recorded(path, block_tokens=128).requests] == [
        (0, 1, 2, 3, 4, 5),
        (0, 1, 2, 3, 8, 9, 10, 11),
    ]
    assert [request.block_ids for request in recorded(path, block_tokens=1024).requests] == [
        (1,),
        (2,),
    ]


def test_an_lmcache_session_is_a_chain_of_turns(write):
    read = whole(write(LMCACHE))
    assert (read.block_tokens, read.has_sessions) == (128, True)
    first, other, second = read.requests
    assert (first.session, first.turn, first.after, first.think_s) == ("3", 1, None, 0.0)
    assert (other.session, other.after, other.block_ids) == ("4", None, (0,))
    assert (second.turn, second.after, second.think_s) == (2, 0, 2.0)
    assert second.block_ids == (0, 1, 2)


def test_full_blocks_only_are_the_same_in_both_modes(write):
    path = write(LMCACHE)
    assert recorded(path).requests == whole(path).requests


def test_azure_requests_share_nothing(write):
    read = recorded(write(AZURE, "azure.csv"), block_tokens=128)
    first, second = read.requests
    assert (first.block_ids, second.block_ids) == ((0, 1, 2), (3,))
    assert (first.arrival_s, second.arrival_s, second.output_tokens) == (0.0, 0.5, 109)
    assert (read.has_sessions, read.has_ids) == (False, False)
    with pytest.raises(WorkloadError, match="records lengths only"):
        read.require_ids("a hit rate")


def test_azure_has_fewer_blocks_when_only_whole_ones_count(write):
    read = whole(write(AZURE, "azure.csv"), block_tokens=128)
    assert [len(request.block_ids) for request in read.requests] == [2, 1]


def test_azure_with_a_byte_order_mark_time_zones_and_windows_line_ends_is_read(write):
    rows = AZURE.replace("5900,", "5900+00:00,").replace("\n", "\r\n")
    read = whole(write("\ufeff" + rows, "azure.csv"), block_tokens=128)
    assert [request.arrival_s for request in read.requests] == [0.0, 0.5]


def test_azure_without_a_block_size_says_why_one_is_needed(write):
    with pytest.raises(TraceError, match=r"no block ids.*give one, such as 128"):
        whole(write(AZURE, "azure.csv"))


def test_a_coding_agents_ids_are_its_sessions_own(write):
    path = write([session(call(0, [1, 2])), session(call(0, [1, 2]), name="s2")])
    assert [request.block_ids for request in whole(path).requests] == [(0, 1), (2, 3)]


def test_ids_of_global_scope_are_shared_between_sessions(write):
    path = write(
        [
            session(call(0, [1, 2]), hash_id_scope="global"),
            session(call(0, [1, 3]), hash_id_scope="global", name="s2"),
        ]
    )
    assert [request.block_ids for request in whole(path).requests] == [(0, 1), (0, 2)]


def test_a_call_waits_for_the_one_before_and_thinks_since_its_end(write):
    first, second, third = whole(
        write([session(call(0, [1]), call(5, [1, 2], api_time=None), call(6.5, [1]))])
    ).requests
    assert (first.after, first.think_s, first.turn) == (None, 0.0, 1)
    assert (second.after, second.think_s, second.turn) == (0, 3.0, 2)
    assert (third.after, third.think_s, third.turn) == (1, 1.5, 3)


def test_a_call_that_overlaps_the_one_before_thinks_for_no_time(write):
    _, second = whole(write([session(call(0, [1], api_time=9.0), call(5, [1]))])).requests
    assert second.think_s == 0.0


def test_a_delta_says_the_same_as_the_verbatim_form(write):
    verbatim = session(
        call(0, [1, 2, 3]),
        call(4, [1, 2, 9, 10, 3]),
        agent(20, call(0, [50, 51]), call(3, [50]), duration_ms=8000),
        call(30, [1, 2, 9, 4]),
    )
    delta = session(
        call(0, 3, keep=0, new=[[1, 3]]),
        call(4, 5, keep=2, new=[[9, 2], [3, 1]]),
        agent(20, call(0, 2, keep=0, new=[[50, 2]]), call(3, 1, keep=1, new=[]), duration_ms=8000),
        call(30, 4, keep=3, new=[[4, 1]]),
    )
    as_verbatim = whole(write([verbatim], "x.jsonl"))
    assert detect_format(write([delta], "x.jsonl")).name == "coding-agent-delta"
    assert whole(write([delta], "x.jsonl")) == as_verbatim
    assert [request.block_ids for request in as_verbatim.requests] == [
        (0, 1, 2),
        (0, 1, 3, 4, 5),
        (6, 7),
        (6,),
        (0, 1, 3, 8),
    ]


def test_a_sub_agent_began_before_it_completed_and_its_parent_waits_for_it(write):
    read = whole(
        write(
            [
                session(
                    call(0, [1]),
                    call(10, [1, 2]),
                    agent(30, call(0, [7]), call(5, [7, 8]), duration_ms=15000),
                    call(32, [1, 2, 3]),
                )
            ]
        )
    )
    _, parent, first, last, resumed = read.requests
    # It began at 30 - 15 = 15 s, after the call at 10 s, which had ended at 12 s.
    assert (first.arrival_s, first.after, first.think_s, first.turn) == (15.0, 1, 3.0, 1)
    assert (last.arrival_s, last.after, last.turn) == (20.0, first.request_id, 2)
    assert (resumed.after, resumed.think_s, resumed.turn) == (last.request_id, 10.0, 3)
    assert {request.session for request in read.requests} == {parent.session}


def test_a_parent_waits_for_the_last_of_parallel_sub_agents(write):
    read = whole(
        write(
            [
                session(
                    call(0, [1]),
                    agent(20, call(0, [7], api_time=15.0), duration_ms=17000),
                    agent(21, call(0, [9], api_time=4.0), duration_ms=18000),
                    call(25, [1, 2]),
                )
            ]
        )
    )
    _, slow, quick, resumed = read.requests
    assert (slow.arrival_s, quick.arrival_s) == (3.0, 3.0)
    assert (slow.after, quick.after) == (0, 0)
    assert (resumed.after, resumed.think_s) == (slow.request_id, 7.0)


def test_a_sub_agent_of_unknown_duration_took_as_long_as_its_calls(write):
    read = whole(
        write([session(call(0, [1]), agent(40, call(0, [7]), call(6, [7]), duration_ms=None))])
    )
    assert [request.arrival_s for request in read.requests] == [0.0, 32.0, 38.0]


def test_nobody_waits_for_a_sub_agent_launched_in_the_background(write):
    launched = agent(
        4, call(0, [7]), call(5, [7], api_time=99.0), duration_ms=None, status="async_launched"
    )
    read = whole(write([session(call(0, [1]), launched, call(10, [1, 2]))]))
    _, first, last, resumed = read.requests
    assert (first.arrival_s, first.after, first.think_s) == (4.0, 0, 2.0)
    assert (last.arrival_s, last.after) == (9.0, first.request_id)
    assert (resumed.arrival_s, resumed.after, resumed.think_s) == (10.0, 0, 8.0)


def test_a_sub_agent_waits_for_the_parents_call_before_its_start_not_for_later_ones(write):
    working = agent(30, call(0, [7]), duration_ms=27000)
    read = whole(write([session(call(0, [1]), call(10, [1]), working)]))
    assert [(request.arrival_s, request.after) for request in read.requests] == [
        (0.0, None),
        (3.0, 0),
        (10.0, 0),
    ]


def test_a_sub_agent_ran_at_least_up_to_its_last_call(write):
    hasty = agent(20, call(0, [7]), call(5, [7]), duration_ms=1000)
    read = whole(write([session(call(0, [1]), hasty)]))
    assert [request.arrival_s for request in read.requests] == [0.0, 15.0, 20.0]


def test_rounding_does_not_make_a_parent_wait_for_a_later_call(write):
    t, last_t = ROUNDED_UP
    assert (t - last_t) + last_t > t
    rounded = agent(t, call(0, [7]), call(last_t, [7]), duration_ms=0)
    read = whole(write([session(call(0, [1]), rounded, call(t, [1, 2]))]))
    resumed = next(request for request in read.requests if request.block_ids == (0, 2))
    assert resumed.after == 0


def test_a_sub_agent_whose_recorded_start_lies_before_the_session_starts_with_it(write):
    read = whole(write([session(agent(5, call(0, [7]), duration_ms=9000), call(6, [1]))]))
    assert [(request.arrival_s, request.after) for request in read.requests] == [
        (0.0, None),
        (6.0, 0),
    ]


def test_a_sub_agent_without_calls_changes_nothing(write):
    read = whole(write([session(call(0, [1]), agent(3, duration_ms=None), call(4, [1]))]))
    assert [(request.arrival_s, request.after) for request in read.requests] == [
        (0.0, None),
        (4.0, 0),
    ]


def test_a_coding_agent_trace_in_larger_blocks(write):
    read = whole(write([session(call(0, [1, 2, 3]), call(4, [1, 2, 3, 4]))]), block_tokens=128)
    assert [request.block_ids for request in read.requests] == [(1,), (1, 3)]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (MOONCAKE, "mooncake"),
        (LMCACHE, "lmcache-agent"),
        ([session(call(0, [1]))], "coding-agent"),
        ([session(call(0, 1, keep=0, new=[[1, 1]]))], "coding-agent-delta"),
        (AZURE, "azure"),
    ],
)
def test_the_format_is_told_by_content_whatever_the_name_and_compression(write, content, name):
    path = write(content, "what.ever")
    assert detect_format(path).name == name
    packed = path.with_suffix(".txt")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert detect_format(packed).name == name
    options = {"block_tokens": 128} if name == "azure" else {}
    assert whole(packed, **options).requests == whole(path, **options).requests


def test_blank_lines_are_skipped(write):
    path = write("\n" + "\n\n".join(json.dumps(line) for line in MOONCAKE) + "\n\n")
    assert len(whole(path).requests) == len(MOONCAKE)


def test_a_limit_reads_the_first_requests_of_the_file_only(write):
    path = write("\n".join(json.dumps(line) for line in MOONCAKE[:2]) + "\nnot JSON\n")
    assert [request.input_tokens for request in whole(path, limit=2).requests] == [700, 1024]


def test_sessions_keep_the_first_ones_whole_though_they_interleave(write):
    assert [request.turn for request in whole(write(LMCACHE), sessions=1).requests] == [1, 2]
    assert len(whole(write(LMCACHE), sessions=2).requests) == 3


def test_sessions_stop_reading_where_sessions_do_not_interleave(write):
    lines = [session(call(0, [1]), name=name) for name in ("s1", "s2", "s3")]
    path = write("\n".join(json.dumps(line) for line in lines) + "\nnot JSON\n")
    assert [request.session for request in whole(path, sessions=2).requests] == ["s1", "s2"]


def test_sessions_are_refused_where_none_are_recorded(write):
    with pytest.raises(TraceError, match="mooncake records no sessions, use limit"):
        whole(write(MOONCAKE), sessions=1)


@pytest.mark.parametrize("option", ["limit", "sessions"])
def test_a_part_of_nothing_is_refused(write, option):
    with pytest.raises(TraceError, match=f"{option}=0: ask for 1 or more"):
        whole(write(LMCACHE), **{option: 0})


def test_a_stream_gives_requests_in_the_order_of_the_file(write):
    stream = open_trace(write(MOONCAKE), mode=Mode.WHOLE_BLOCKS)
    assert [request.arrival_s for request in stream.requests] == [0.0, 2.5, 1.5, 1.5]


def test_progress_goes_up_to_the_size_of_the_file_in_few_steps(write):
    path = write(MOONCAKE[:1] * 5000)
    steps: list[tuple[int, int]] = []
    whole(path, progress=lambda done, total: steps.append((done, total)))
    size = path.stat().st_size
    assert {total for _, total in steps} == {size}
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == size
    assert 10 < len(steps) <= 101
