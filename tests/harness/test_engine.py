"""The engine model: what prefill and decode cost, and which blocks a GPU keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.engine import GpuPrefixCache
from tests.harness.workbench import engine


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_prefill_costs_two_flop_per_parameter_and_token_at_the_profiled_share():
    # 2 x 8.03e9 parameters x 1000 tokens, on half of 312 TFLOP/s.
    assert engine().prefill_s(1000) == pytest.approx(2 * 8_030_261_248 * 1000 / 156e12)


def test_decode_reads_the_weights_once_a_token():
    # 8.03e9 parameters x 2 B at 2039 GB/s.
    assert engine().decode_s(10) == pytest.approx(10 * 2 * 8_030_261_248 / 2039e9)


def test_no_tokens_cost_nothing():
    assert engine().prefill_s(0) == engine().decode_s(0) == 0


def test_a_faster_accelerator_prefills_faster_by_as_much():
    fast = engine(peak_compute="3120 TFLOP/s")
    assert fast.prefill_s(512) == pytest.approx(engine().prefill_s(512) / 10)


def test_a_chain_matches_up_to_its_first_absent_block():
    cache = GpuPrefixCache(8)
    cache.use(keys(1, 2, 3))
    assert cache.match(keys(1, 2, 3, 4)) == 3
    assert cache.match(keys(1, 9, 3)) == 1
    assert cache.match(keys(9)) == cache.match([]) == 0


def test_a_full_cache_loses_tails_of_the_coldest_chain_first():
    cache = GpuPrefixCache(6)
    cache.use(keys(1, 2, 3))
    cache.use(keys(4, 5, 6))
    cache.use(keys(7, 8))
    assert cache.match(keys(1, 2, 3)) == 1
    assert cache.match(keys(4, 5, 6)) == 3
    assert cache.match(keys(7, 8)) == 2


def test_use_makes_a_chain_newest():
    cache = GpuPrefixCache(4)
    cache.use(keys(1, 2))
    cache.use(keys(3, 4))
    cache.use(keys(1, 2))
    cache.use(keys(5))
    assert cache.match(keys(1, 2)) == 2
    assert cache.match(keys(3, 4)) == 1


def test_a_chain_longer_than_the_cache_keeps_its_head():
    cache = GpuPrefixCache(3)
    cache.use(keys(1, 2, 3, 4, 5))
    assert cache.match(keys(1, 2, 3, 4, 5)) == 3


def test_a_cache_of_no_blocks_keeps_nothing():
    cache = GpuPrefixCache(0)
    cache.use(keys(1, 2))
    assert len(cache) == 0
    assert cache.match(keys(1)) == 0


def test_a_negative_capacity_is_refused_with_its_value():
    with pytest.raises(ValueError, match="-3 blocks"):
        GpuPrefixCache(-3)


@given(st.integers(1, 12), st.lists(st.integers(1, 8), min_size=1, max_size=30), st.data())
def test_what_is_kept_of_a_chain_is_always_its_head(capacity, lengths, data):
    """Chains that share nothing: whatever the order of use, no tail outlives its head."""
    cache = GpuPrefixCache(capacity)
    chains = [keys(*(8 * n + i for i in range(length))) for n, length in enumerate(lengths)]
    for chain in data.draw(st.lists(st.sampled_from(chains), max_size=20)):
        cache.use(chain)
        assert len(cache) <= capacity
    for chain in chains:
        held = [cache.match([key]) for key in chain]
        assert held == sorted(held, reverse=True)
