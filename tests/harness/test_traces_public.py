"""The public traces: what their readers must keep, on the real files."""

from __future__ import annotations

import gzip
import json
from itertools import islice, pairwise

import pytest

from cxlbench.harness.requests import Mode
from cxlbench.harness.traces import detect_format, open_trace, read_trace

MOONCAKE = "mooncake_fast25_conversation_trace.jsonl.gz"
LMCACHE = "lmcache_agent_miniswe_hash128.jsonl.gz"
SMALL = "cc_traces_v8_small_verbatim.jsonl.gz"
DELTA = "cc_traces_v8_692_delta.jsonl.gz"
AZURE = "AzureLLMInferenceTrace_conv.csv.gz"


def unchained(requests):
    """Return the first block id found behind two different blocks, or None."""
    parents: dict[int, int] = {}
    for request in requests:
        for parent, block in pairwise((-1, *request.block_ids)):
            if parents.setdefault(block, parent) != parent:
                return block
    return None


@pytest.mark.parametrize(
    ("name", "trace_format"),
    [
        (MOONCAKE, "mooncake"),
        (LMCACHE, "lmcache-agent"),
        (SMALL, "coding-agent"),
        (DELTA, "coding-agent-delta"),
        (AZURE, "azure"),
    ],
)
def test_each_public_trace_is_recognised(trace_path, name, trace_format):
    assert detect_format(trace_path(name)).name == trace_format


@pytest.mark.parametrize("name", [MOONCAKE, LMCACHE])
def test_global_ids_are_renamed_one_to_one(trace_path, name):
    path = trace_path(name)
    renamed: dict[int, int] = {}
    with gzip.open(path) as lines:
        stream = open_trace(path, mode=Mode.AS_RECORDED)
        for line, request in zip(lines, stream.requests, strict=True):
            for old, new in zip(json.loads(line)["hash_ids"], request.block_ids, strict=True):
                assert renamed.setdefault(old, new) == new
    assert len(set(renamed.values())) == len(renamed)


@pytest.mark.parametrize(
    ("name", "block_tokens"), [(MOONCAKE, 128), (MOONCAKE, 1024), (SMALL, 256)]
)
def test_regrouped_traces_are_chained(trace_path, name, block_tokens):
    for mode in Mode:
        read = read_trace(trace_path(name), mode=mode, block_tokens=block_tokens, limit=2000)
        assert unchained(read.requests) is None
        for request in read.requests:
            whole = request.input_tokens // block_tokens
            assert whole <= len(request.block_ids) <= whole + (mode is Mode.AS_RECORDED)


def test_sub_agents_and_parents_wait_for_each_other(trace_path):
    read = read_trace(trace_path(DELTA), mode=Mode.WHOLE_BLOCKS, sessions=20)
    sessions = read.sessions()
    assert len(sessions) == 20
    assert sum(request.after is None for request in read.requests) == 20
    # trace_0003 begins with a call of 7.27 s, then a sub-agent of ten calls that completed at
    # 134.227 s after 126.015 s, then the parent's next call at 153 s.
    first, *agents, resumed = sessions["trace_0003"][:12]
    assert [agent.turn for agent in agents] == list(range(1, 11))
    assert agents[0].arrival_s == pytest.approx(134.227 - 126.015)
    assert agents[0].after == first.request_id
    assert (resumed.turn, resumed.arrival_s) == (2, 153.0)
    assert resumed.after == agents[-1].request_id


def test_a_part_of_the_large_trace_is_read_without_the_rest(trace_path):
    """The first requests of the delta file are the same in a stream and in a short reading."""
    path = trace_path(DELTA)
    stream = open_trace(path, mode=Mode.WHOLE_BLOCKS)
    first = list(islice(stream.requests, 30))
    short = list(open_trace(path, mode=Mode.WHOLE_BLOCKS, limit=30).requests)
    assert first == short


def test_azure_has_every_row_and_nothing_in_common(trace_path):
    read = read_trace(trace_path(AZURE), mode=Mode.WHOLE_BLOCKS, block_tokens=128)
    ids = [block for request in read.requests for block in request.block_ids]
    assert len(read.requests) == 19_366
    assert len(ids) == len(set(ids))
