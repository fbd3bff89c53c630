"""The roofline of a step against arithmetic, and models that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxlbench.harness.serve.roofline import ModelDoesNotFitError, Roofline, StepWork
from cxlbench.kv.geometry import model_shape
from tests.harness.serve.setups import GPU, SHAPE, VLLM, cluster, decode_s, prefill_s, roofline


def step(*chunks: tuple[int, int], model: Roofline | None = None) -> float:
    work = StepWork()
    for tokens, context in chunks:
        work.add_chunk(tokens, context)
    return (model or roofline()).step_s(work)


@pytest.mark.parametrize(("tokens", "context"), [(1024, 0), (8192, 0), (4096, 28_000), (300, 0)])
def test_a_chunk_of_a_prompt_takes_its_flop(tokens: int, context: int) -> None:
    assert step((tokens, context)) == pytest.approx(prefill_s(tokens, context), rel=0.01)


def test_attention_grows_with_the_square_of_the_prompt() -> None:
    quadratic = [step((n, 0)) - 0.002 - n * 2 * SHAPE.parameters / 156e12 for n in (4096, 8192)]
    assert quadratic[1] / quadratic[0] == pytest.approx(4, rel=0.01)
    # 4 x 32 layers x 4096 wide x n²/2 FLOP
    assert quadratic[1] == pytest.approx(4 * 32 * 4096 * 8192**2 / 2 / 156e12, rel=0.01)


def test_a_prompt_in_chunks_takes_the_flop_of_the_whole() -> None:
    whole = step((8192, 0)) - 0.002
    chunks = sum(step((1024, done)) - 0.002 for done in range(0, 8192, 1024))
    assert chunks == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("contexts", [[1000], [1000] * 16, [30_000] * 64])
def test_answers_take_the_weights_and_their_kv_once(contexts: list[int]) -> None:
    found = step(*((1, context) for context in contexts))
    assert found == pytest.approx(decode_s(contexts), rel=0.01)


def test_a_step_takes_the_longer_of_both_and_not_the_sum() -> None:
    prompt, answers = (2048, 0), [(1, 4000)] * 8
    both = step(prompt, *answers)
    assert both < step(prompt) + step(*answers) - 0.002
    assert both == pytest.approx(step(prompt), rel=0.01)


def test_grouped_queries_attend_with_all_heads_and_keep_few() -> None:
    wide = Roofline(replace(SHAPE, query_heads=64), GPU, VLLM)
    narrow = roofline()
    assert step((1, 1000), model=wide) == step((1, 1000), model=narrow)  # bytes: kv heads
    assert step((8192, 8192), model=wide) > step((8192, 8192), model=narrow)


def test_kv_gets_what_weights_and_activations_leave() -> None:
    gib = 1 << 30
    room = int(80 * gib * 0.9) - 2 * SHAPE.parameters - 2 * gib
    assert roofline().kv_space_bytes() == room
    assert cluster().pool_blocks == room // (16 << 20)
    assert cluster(gpu_blocks=7).pool_blocks == 7


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    large = replace(SHAPE, name="huge", parameters=60_000_000_000)
    with pytest.raises(ModelDoesNotFitError, match=r"huge does not fit a100-80g.*111\.8 GiB"):
        Roofline(large, GPU, VLLM).kv_space_bytes()


def test_a_gpu_with_room_for_no_block_is_refused() -> None:
    engine = replace(VLLM, activation_memory=int(roofline().kv_space_bytes()) + (2 << 30) - 1000)
    with pytest.raises(ModelDoesNotFitError, match="no room for one KV block"):
        _ = cluster(roofline=Roofline(SHAPE, GPU, engine)).pool_blocks


def test_the_papers_models_fit_their_gpus() -> None:
    for name in ("Qwen2.5-32B", "OPT-30B", "DeepSeek-R1-Distill-Llama-8B"):
        assert Roofline(model_shape(name), GPU, VLLM).kv_space_bytes() > 0
