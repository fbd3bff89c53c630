"""Our policies count the hits that libCacheSim counts (``tox -e oracles`` has it)."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.harness import oracles
from cxlbench.harness.cache_policies import References
from cxlbench.harness.requests import Mode
from cxlbench.harness.trace_statistics import Order
from cxlbench.harness.traces import read_trace

needs_libcachesim = pytest.mark.skipif(bool(oracles.missing()), reason=oracles.missing() or "-")

TRACES = (
    "mooncake_fast25_conversation_trace.jsonl.gz",
    "lmcache_agent_miniswe_hash128.jsonl.gz",
    "cc_traces_v8_small_verbatim.jsonl.gz",
)
MOST = 300_000
"""References of a trace that are compared: all of the first two, the head of the third."""


def zipf(seed: int) -> References:
    blocks = np.random.default_rng(seed).zipf(1.2, 20_000).astype(np.int64) % 2_000
    return References(blocks, np.arange(len(blocks)), np.zeros(len(blocks), dtype=np.int64))


def head(references: References) -> References:
    return References(references.blocks[:MOST], references.request[:MOST], references.depth[:MOST])


def test_the_file_for_libcachesim_has_the_next_reference_of_each_block(tmp_path):
    blocks = np.array([5, 0, 5, 5], dtype=np.int64)
    oracles.write_oracle_general(References(blocks, np.arange(4), blocks * 0), tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    assert len(raw) == 4 * 24
    records = np.frombuffer(raw, dtype="<u4,<u8,<u4,<i8")
    assert records["f1"].tolist() == [6, 1, 6, 6]
    assert records["f2"].tolist() == [1] * 4
    assert records["f3"].tolist() == [2, -1, 3, -1]


def test_without_libcachesim_the_comparison_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(oracles, "MODULE", "no_such_simulator")
    assert oracles.main(["trace"]) == 2
    assert "pip install" in capsys.readouterr().err


@needs_libcachesim
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", oracles.ORACLES)
def test_hits_are_equal_on_skewed_references(policy, seed):
    for one in oracles.agreements(zipf(seed), [20, 37, 128, 1000], policies=[policy]):
        assert one.ours == one.theirs > 0


@needs_libcachesim
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("name", TRACES)
def test_hits_are_equal_on_the_public_traces(name, order, trace_path):
    found = head(References.of(read_trace(trace_path(name), mode=Mode.AS_RECORDED), order))
    for one in oracles.agreements(found, oracles.capacities_of(found)):
        assert one.equal, one
