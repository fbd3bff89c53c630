"""Trace statistics: against their definitions, and on the public traces' known figures."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.policies import LruPolicy, PolicyError, load_policy
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError
from cxlbench.harness.trace_statistics import (
    Order,
    ReferenceCounts,
    count_references,
    larger_to_the_left,
    simulated_hits,
    stack_distances,
    trace_statistics,
)
from cxlbench.harness.traces import open_trace, read_trace

GIB = 2**30
LLAMA_8B_BYTES_PER_TOKEN = 128 * 1024
REFERENCES = st.lists(st.integers(0, 12), max_size=80)


def workload(*prompts: tuple[int, ...]) -> Workload:
    requests = tuple(
        Request(
            request_id=position,
            session="a",
            turn=1,
            arrival_s=0.0,
            input_tokens=16 * len(blocks),
            output_tokens=1,
            block_ids=blocks,
        )
        for position, blocks in enumerate(prompts)
    )
    return Workload("w", 16, Mode.WHOLE_BLOCKS, requests, has_sessions=False)


@given(REFERENCES)
def test_a_stack_distance_is_the_number_of_other_blocks_since_the_last_reference(references):
    expected = []
    for place, block in enumerate(references):
        earlier = references[:place]
        if block in earlier:
            since = len(earlier) - earlier[::-1].index(block)
            expected.append(len(set(earlier[since:])))
        else:
            expected.append(-1)
    assert stack_distances(np.array(references, dtype=np.int64)).tolist() == expected


@given(st.lists(st.integers(0, 1000), unique=True, max_size=60))
def test_larger_values_to_the_left_are_counted(values):
    expected = [sum(left > value for left in values[:place]) for place, value in enumerate(values)]
    assert larger_to_the_left(np.array(values, dtype=np.int64)).tolist() == expected


@given(REFERENCES, st.integers(1, 14))
def test_lru_hits_are_the_distances_below_its_size(references, size):
    distances = stack_distances(np.array(references, dtype=np.int64))
    hits = int(((distances >= 0) & (distances < size)).sum())
    assert hits == simulated_hits(references, LruPolicy, size)


@given(REFERENCES, st.integers(1, 14))
def test_a_simulated_cache_is_an_lru_list(references, size):
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in references:
        hits += block in resident
        resident[block] = None
        resident.move_to_end(block)
        if len(resident) > size:
            resident.popitem(last=False)
    assert hits == simulated_hits(references, LruPolicy, size)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_counting_the_new_tails_counts_all_distinct_blocks(sessions, turns, seed):
    requests = generate(GeneratorKnobs(sessions=sessions, turns=turns, seed=seed)).requests
    ids = [block for request in requests for block in request.block_ids]
    assert count_references(iter(requests)) == ReferenceCounts(
        len(requests), len(ids), len(set(ids))
    )


def test_statistics_of_a_small_workload():
    statistics = trace_statistics(
        workload((0, 1), (0, 2), (0, 1)), [0, 20, 31, 40, 1000], block_bytes=10
    )
    assert statistics.counts == ReferenceCounts(requests=3, references=6, distinct=3)
    assert statistics.counts.hit_share == 0.5
    assert (statistics.block_bytes, statistics.footprint_bytes) == (10, 30)
    assert statistics.max_stack_distance == 2
    assert (statistics.input_tokens_p50, statistics.input_tokens_max) == (32, 32)
    assert [(size.capacity_blocks, size.hit_share) for size in statistics.capacities] == [
        (0, 0.0),
        (2, pytest.approx(2 / 6)),
        (3, 0.5),
        (4, 0.5),
        (100, 0.5),
    ]


def test_the_order_inside_a_request_decides_what_a_small_lru_keeps():
    # In two blocks, 2 1 0 3 0 hits once; 0 1 2 0 3 does not.
    two_turns = workload((0, 1, 2), (0, 3))
    tail, head = (
        trace_statistics(two_turns, [20], block_bytes=10, order=order).capacities[0].hit_share
        for order in (Order.TAIL_FIRST, Order.HEAD_FIRST)
    )
    assert (tail, head) == (0.2, 0.0)


@pytest.mark.parametrize(
    "policy", ["fifo", "clock", "s3fifo", "cxlbench.devices.policies:LruPolicy"]
)
def test_other_policies_are_simulated(policy):
    traffic = generate(GeneratorKnobs(sessions=4, turns=4))
    statistics = trace_statistics(traffic, [500, 10**6], block_bytes=10, policy=policy)
    ids = [block for request in traffic.requests for block in request.block_ids[::-1]]
    small, endless = statistics.capacities
    assert small.hit_share == simulated_hits(ids, load_policy(policy), 50) / len(ids)
    assert endless.hit_share == pytest.approx(statistics.counts.hit_share)


def test_a_users_lru_says_what_the_stack_distances_say():
    traffic = generate(GeneratorKnobs(sessions=6, turns=5))
    sizes = range(10, 3000, 300)
    one_pass, simulated = (
        trace_statistics(traffic, sizes, block_bytes=10, policy=policy).capacities
        for policy in ("lru", "cxlbench.devices.policies:LruPolicy")
    )
    assert one_pass == simulated


def test_no_requests_and_no_reuse_are_no_errors():
    nothing = trace_statistics(workload(), [100], block_bytes=10)
    assert (nothing.counts.hit_share, nothing.max_stack_distance) == (0.0, None)
    assert nothing.capacities[0].hit_share == 0.0
    once = trace_statistics(workload((0, 1), ()), block_bytes=10)
    assert (once.counts.hit_share, once.max_stack_distance, once.capacities) == (0.0, None, ())


@pytest.mark.parametrize(
    "sizes",
    [{}, {"block_bytes": 1, "bytes_per_token": 1}, {"block_bytes": 0}, {"bytes_per_token": -1}],
)
def test_a_block_needs_exactly_one_positive_size(sizes):
    with pytest.raises(WorkloadError, match="block_bytes="):
        trace_statistics(workload((0,)), **sizes)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(WorkloadError, match=r"capacities_bytes=\[-1\]"):
        trace_statistics(workload((0,)), [-1], block_bytes=1)
    with pytest.raises(PolicyError, match="did you mean lru"):
        trace_statistics(workload((0,)), [1], block_bytes=1, policy="lur")


def test_a_trace_without_ids_has_no_reuse_statistics(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    lengths = read_trace(path, mode=Mode.AS_RECORDED, block_tokens=128)
    with pytest.raises(WorkloadError, match=r"a reuse statistic needs block ids"):
        trace_statistics(lengths, block_bytes=1)


def percent(shares):
    return [round(100 * size.hit_share, 1) for size in shares]


def test_mooncake_conversation_as_recorded(trace_path):
    path = trace_path("mooncake_fast25_conversation_trace.jsonl.gz")
    statistics = trace_statistics(
        read_trace(path, mode=Mode.AS_RECORDED),
        [gib * GIB for gib in (16, 64, 256, 1024, 4096)],
        bytes_per_token=LLAMA_8B_BYTES_PER_TOKEN,
    )
    assert statistics.block_bytes == 64 * 2**20
    assert statistics.counts == ReferenceCounts(12_031, 288_500, 182_790)
    assert round(100 * statistics.counts.hit_share, 1) == 36.6
    assert round(statistics.footprint_bytes / GIB) == 11_424
    assert percent(statistics.capacities) == pytest.approx([4.2, 4.5, 8.8, 26.6, 35.9], abs=0.1)
    assert (
        statistics.input_tokens_p50,
        statistics.input_tokens_p90,
        statistics.input_tokens_max,
    ) == (6_909, 27_367, 126_195)


def test_lmcache_agent_miniswe(trace_path):
    path = trace_path("lmcache_agent_miniswe_hash128.jsonl.gz")
    statistics = trace_statistics(
        read_trace(path, mode=Mode.AS_RECORDED),
        [gib * GIB for gib in (1, 4, 16)],
        bytes_per_token=LLAMA_8B_BYTES_PER_TOKEN,
    )
    assert statistics.counts == ReferenceCounts(402, 19_179, 1_245)
    assert round(100 * statistics.counts.hit_share, 1) == 93.5
    assert statistics.max_stack_distance == 655
    assert round(statistics.footprint_bytes / GIB, 1) == 19.5
    assert percent(statistics.capacities) == [46.6, 82.5, 93.5]


def test_coding_agent_small_sessions(trace_path):
    path = trace_path("cc_traces_v8_small_verbatim.jsonl.gz")
    statistics = trace_statistics(
        read_trace(path, mode=Mode.AS_RECORDED), bytes_per_token=LLAMA_8B_BYTES_PER_TOKEN
    )
    assert statistics.counts.requests == 1_051
    assert round(100 * statistics.counts.hit_share, 1) == 93.2
    assert round(statistics.footprint_bytes / GIB) == 354


def test_coding_agent_692_sessions_as_a_stream(trace_path):
    """All 85 million references, one session in memory at a time."""
    path = trace_path("cc_traces_v8_692_delta.jsonl.gz")
    stream = open_trace(path, mode=Mode.AS_RECORDED)
    counts = count_references(stream.requests)
    assert counts.requests == 46_218
    assert round(100 * counts.hit_share, 1) == 96.3
    footprint_bytes = counts.distinct * stream.block_tokens * LLAMA_8B_BYTES_PER_TOKEN
    assert round(footprint_bytes / GIB) == 24_965
