"""KV sizes follow from model shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.kv.geometry import (
    LLAMA_3_1_8B,
    MODEL_SHAPES,
    OPT_30B,
    QWEN_2_5_32B,
    GeometryError,
    ModelShape,
    model_shape,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Llama-3.1-8B", 16),
        ("DeepSeek-R1-Distill-Llama-8B", 16),
        ("Qwen2.5-32B", 32),
        ("OPT-30B", 168),
    ],
)
def test_the_papers_block_sizes_follow_from_the_shapes(name, mib):
    assert model_shape(name).block_bytes(128) == mib * MIB


def test_the_master_of_ten_terabytes_has_the_papers_number_of_objects():
    assert 10 * 2**40 // LLAMA_3_1_8B.block_bytes(128) == pytest.approx(6.5e5, rel=0.01)


def _decoder_weights(layers, hidden, kv_width, ffn, vocabulary, *, bias):
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    layer = attention + 3 * hidden * ffn + 2 * hidden + (hidden + 2 * kv_width if bias else 0)
    return layers * layer + 2 * vocabulary * hidden + hidden


def test_parameter_counts_of_the_llama_family_follow_from_their_configurations():
    llama = _decoder_weights(32, 4096, 1024, 14336, 128256, bias=False)
    qwen = _decoder_weights(64, 5120, 1024, 27648, 152064, bias=True)
    assert (LLAMA_3_1_8B.parameters, QWEN_2_5_32B.parameters) == (llama, qwen)


def test_the_parameter_count_of_opt_follows_from_its_configuration():
    hidden, ffn, positions = 7168, 28672, 2048 + 2
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    assert OPT_30B.parameters == 48 * layer + (50272 + positions) * hidden + 2 * hidden


def test_each_rank_holds_its_share_of_the_heads():
    assert QWEN_2_5_32B.block_bytes(128, tp_size=4) == 8 * MIB


def test_ranks_beyond_the_heads_hold_one_head_each():
    assert LLAMA_3_1_8B.kv_bytes_per_token(tp_size=16) == LLAMA_3_1_8B.kv_bytes_per_token(tp_size=8)


@given(shape=st.sampled_from(MODEL_SHAPES), tp_size=st.integers(1, 128))
def test_all_ranks_together_hold_every_head_and_none_holds_a_head_too_many(shape, tp_size):
    head = 2 * shape.layers * shape.head_dim * shape.dtype_bytes
    per_rank = shape.kv_bytes_per_token(tp_size=tp_size)
    whole = shape.kv_bytes_per_token()
    assert whole <= per_rank * tp_size < whole + head * tp_size


@given(tokens=st.integers(1, 4096), more=st.integers(1, 4096))
def test_block_bytes_are_linear_in_tokens(tokens, more):
    both = OPT_30B.block_bytes(tokens + more)
    assert both == OPT_30B.block_bytes(tokens) + OPT_30B.block_bytes(more)


def test_an_eight_bit_cache_takes_half():
    half = ModelShape(
        name="fp8", layers=32, kv_heads=8, head_dim=128, parameters=1, dtype_bytes=1
    ).block_bytes(128)
    assert half == 8 * MIB


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "parameters", "dtype_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_an_impossible_shape_is_refused_by_the_name_of_the_field(field, value):
    good = {"layers": 1, "kv_heads": 1, "head_dim": 64, "parameters": 1, "dtype_bytes": 2}
    with pytest.raises(GeometryError, match=f"{field} of model 'm' is {value}"):
        ModelShape(name="m", **{**good, field: value})


def test_an_empty_block_is_refused():
    with pytest.raises(GeometryError, match="block_tokens is 0"):
        LLAMA_3_1_8B.block_bytes(0)


def test_no_ranks_are_refused():
    with pytest.raises(GeometryError, match="tp_size is 0"):
        LLAMA_3_1_8B.block_bytes(128, tp_size=0)


def test_names_are_found_in_any_case():
    assert model_shape("opt-30b") is OPT_30B


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(GeometryError, match=r"'Llama-8B'; did you mean Llama-3\.1-8B"):
        model_shape("Llama-8B")


def test_every_shape_has_a_source():
    assert all(shape.source for shape in MODEL_SHAPES)
