"""A real vLLM on this CPU over a tier: its tokens are those that it computes without one.

A tiny seeded Llama is made locally; nothing is downloaded. Needs vLLM (tox factor ``vllm``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: run `tox -e vllm`", allow_module_level=True)

from cxlbench.kv.connector import Work
from cxlbench.kv.embedded import EmbeddedTier
from cxlbench.kv.shared_tiers import attach, attached, detach
from tests.kv.fake_tier import FakeTier, build

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
OUTPUT = 20
LENGTHS = (33, 64, 65, 100, 200, 32, 31, 1)
FAKE = "tests.kv.fake_tier:build"
TIER_ID = "engine-test"
WAIT_S = 20.0

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids, and the log probability of each."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(1000 * seed + length)
    return [generator.randrange(3, 512) for _ in range(length)]


PROMPTS = [prompt(length) for length in LENGTHS]


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """Set before torch and vLLM are imported, which is why no test imports them at the top."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        _let_vllm_look_at_llvmlite(patch)
        yield


def _let_vllm_look_at_llvmlite(patch: pytest.MonkeyPatch) -> None:
    """Let an engine start after numba was imported.

    vLLM 0.32 on a CPU looks at the ``__dict__`` of every value of every module, and llvmlite's
    library object answers any name, this one too, with a foreign function.
    """
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def careful(self: object, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    patch.setattr(ffi._lib_wrapper, "__getattr__", careful)


@pytest.fixture(scope="module")
def model(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,  # large enough that tokens depend on the whole context
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Engine:
    """An engine in this process, with or without a tier."""

    def __init__(
        self, model: Path, extra: dict[str, Any] | None = None, *, blocks: int = 512
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import kv_transfer_state

        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector="HyMCacheConnector",
                kv_connector_module_path="cxlbench.hymcache.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        assert not kv_transfer_state.has_kv_transfer_group(), "vLLM keeps one worker per process"
        try:
            self.llm = LLM(
                str(model),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                block_size=BLOCK,
                kv_cache_memory_bytes=blocks * BLOCK * 1024,
                max_model_len=512,
                max_num_batched_tokens=512,
                enforce_eager=True,
                enable_prefix_caching=True,
                disable_log_stats=False,
                kv_transfer_config=transfer,
                seed=0,
            )
        except BaseException:
            kv_transfer_state.ensure_kv_transfer_shutdown()
            raise
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    def generate(
        self,
        prompts: Sequence[list[int]] = PROMPTS,
        *,
        salt: str | None = None,
        max_tokens: int = OUTPUT,
    ) -> tuple[list[Answer], list[int]]:
        """Return answers, and for each prompt how many tokens came from a cache."""
        from vllm import SamplingParams

        inputs: list[Any] = [{"prompt_token_ids": tokens} for tokens in prompts]
        if salt is not None:
            inputs = [{**entry, "cache_salt": salt} for entry in inputs]
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        answers, cached = [], []
        for output in self.llm.generate(inputs, parameters, use_tqdm=False):
            (one,) = output.outputs
            chosen = zip(one.token_ids, one.logprobs, strict=True)
            answers.append((tuple(one.token_ids), tuple(at[token].logprob for token, at in chosen)))
            cached.append(output.num_cached_tokens)
        return answers, cached

    def forget_locally(self) -> None:
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> int:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def start(self, name: str, tokens: list[int], max_tokens: int = OUTPUT) -> str:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        (request_id,) = self.core.scheduler.requests
        return str(request_id)

    def step_until(self, reached: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < end, "the engine does not get there"
            self.engine.step()

    def shutdown(self) -> None:
        self.core.shutdown()


@contextlib.contextmanager
def running(model: Path, extra: dict[str, Any] | None, *, blocks: int = 512) -> Iterator[Engine]:
    engine = Engine(model, extra, blocks=blocks)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def without(model: Path) -> list[Answer]:
    """What the engine says without any connector."""
    with running(model, None) as engine:
        answers, cached = engine.generate()
        assert cached == [0] * len(PROMPTS)
        return answers


@pytest.fixture(scope="module")
def tier() -> Iterator[EmbeddedTier]:
    """A tier that outlives engines, because this test is attached to it, too."""
    tier = attach(TIER_ID, {"tier": FAKE}, lambda clock: build({}, clock))
    yield tier
    detach(TIER_ID)
    assert attached() == {}


@pytest.fixture(scope="module")
def cold(model: Path, without: list[Answer], tier: EmbeddedTier) -> list[Answer]:
    """What a first engine said over the empty tier; it is gone, the tier is not."""
    with running(model, {"tier": FAKE, "tier_id": TIER_ID}) as engine:
        answers, cached = engine.generate()
        assert cached == [0] * len(PROMPTS)
        assert tier.settle(WAIT_S) == {}
        assert engine.worker.counters.stored == tier.ask(lambda fake: len(fake.blocks)) > 0
    assert attached() == {TIER_ID: 1}
    return answers


@pytest.fixture(scope="module")
def engine(model: Path, cold: list[Answer], tier: EmbeddedTier) -> Iterator[Engine]:
    """A second engine over the tier that the first one filled."""
    with running(model, {"tier": FAKE, "tier_id": TIER_ID}) as engine:
        yield engine


@pytest.fixture
def warm(engine: Engine, tier: EmbeddedTier) -> Iterator[Engine]:
    """The second engine with an empty cache of its own; everything is at rest afterwards."""
    engine.forget_locally()
    blocks = tier.ask(lambda fake: dict(fake.blocks))
    yield engine
    assert tier.settle(WAIT_S) == {}
    assert {name: count for name, count in engine.connector.at_rest().items() if count} == {}
    assert engine.worker.open_transfers() == 0
    assert tier.refused_calls == 0
    assert engine.core.scheduler.kv_cache_manager.usage == 0
    switches(tier, fail_loads_from=None, swap_blocks=False, capacity=None, hang=set(), delay_s=0)
    switches(tier, blocks=blocks)


def switches(tier: EmbeddedTier, **values: object) -> None:
    def turn(fake: FakeTier) -> None:
        for name, value in values.items():
            setattr(fake, name, value)

    tier.ask(turn)


# -- the same answers -----------------------------------------------------------------------------


def test_cold_the_answers_are_those_without_a_connector(
    cold: list[Answer], without: list[Answer]
) -> None:
    assert cold == without


def test_over_an_emulated_cxl_hm_the_answers_are_those_without_a_connector(
    model: Path, without: list[Answer]
) -> None:
    with running(model, {"scale": 64, "capacity": "8 GiB"}) as engine:
        tier = engine.connector.tier
        cold, cached = engine.generate()
        assert cold == without
        assert cached == [0] * len(PROMPTS)
        assert tier.settle(WAIT_S) == {}
        engine.forget_locally()
        warm, cached = engine.generate()
        assert warm == without
        assert cached == [32, 32, 64, 96, 192, 0, 0, 0]
        assert engine.worker.counters.loaded == sum(cached) // BLOCK
        assert tier.settle(WAIT_S) == {}
        assert tier.refused_calls == 0
    assert attached().keys() <= {TIER_ID}


def test_warm_from_another_engines_blocks_the_answers_are_those_without_a_connector(
    warm: Engine, without: list[Answer]
) -> None:
    external = "vllm:external_prefix_cache_hits"
    hits, loaded = warm.metric(external), warm.worker.counters.loaded
    answers, cached = warm.generate()
    assert answers == without
    assert cached == [32, 32, 64, 96, 192, 0, 0, 0]
    assert warm.metric(external) - hits == sum(cached)
    assert warm.worker.counters.loaded - loaded == sum(cached) // BLOCK


def test_a_conversation_goes_on_from_the_blocks_of_its_first_turn(
    warm: Engine, without: list[Answer]
) -> None:
    longer = [PROMPTS[3] + list(without[3][0]) + prompt(40, seed=1)]
    from_the_tier, cached = warm.generate(longer)
    assert cached == [96]
    warm.connector.tier.ask(lambda fake: fake.blocks.clear())
    warm.forget_locally()
    computed, cached = warm.generate(longer)
    assert cached == [0]
    assert from_the_tier == computed


def test_a_slow_tier_changes_nothing(
    warm: Engine, tier: EmbeddedTier, without: list[Answer]
) -> None:
    switches(tier, delay_s=0.02)
    answers, cached = warm.generate()
    assert answers == without
    assert sum(cached) > 0


def test_wrong_bytes_would_be_seen(warm: Engine, tier: EmbeddedTier, without: list[Answer]) -> None:
    """The control of this file: a tier that breaks its promise does change the answers."""
    switches(tier, swap_blocks=True)
    answers, _ = warm.generate()
    assert warm.worker.counters.loaded > 0
    assert [tokens for tokens, _ in answers] != [tokens for tokens, _ in without]


def test_swapped_kv_heads_would_be_seen(
    warm: Engine, tier: EmbeddedTier, without: list[Answer]
) -> None:
    """A block put back with the two KV heads of its first layer exchanged changes the answers."""

    def swap(fake: FakeTier) -> None:
        for key, value in fake.blocks.items():
            head = len(value) // 4 // 2
            fake.blocks[key] = value[head : 2 * head] + value[:head] + value[2 * head :]

    tier.ask(swap)
    answers, _ = warm.generate()
    assert [tokens for tokens, _ in answers] != [tokens for tokens, _ in without]


def test_short_of_blocks_requests_are_preempted_and_say_the_same(warm: Engine) -> None:
    prompts = [prompt(65 + n, seed=3) for n in range(4)]
    with_room, _ = warm.generate(prompts, max_tokens=150)
    assert warm.connector.tier.settle(WAIT_S) == {}
    pool = warm.core.scheduler.kv_cache_manager.block_pool
    for known in (False, True):
        if not known:
            warm.connector.tier.ask(lambda fake: fake.blocks.clear())
        warm.forget_locally()
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 22)  # each needs 7 in the end
        before = warm.metric("vllm:num_preemptions")
        answers, _ = warm.generate(prompts, max_tokens=150)
        pool.free_blocks(taken)
        assert answers == with_room
        assert warm.metric("vllm:num_preemptions") > before


# -- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first_lost", [0, 1])
def test_a_load_that_fails_after_it_was_promised_is_recomputed(
    warm: Engine, tier: EmbeddedTier, without: list[Answer], first_lost: int
) -> None:
    switches(tier, fail_loads_from=first_lost)
    failed = warm.worker.counters.load_failed
    answers, _ = warm.generate()
    assert answers == without
    assert warm.worker.counters.load_failed > failed


def test_blocks_that_were_listed_and_then_lost_cost_one_failed_load_and_no_loop(
    warm: Engine, tier: EmbeddedTier, without: list[Answer]
) -> None:
    switches(tier, fail_loads_from=0)
    before = tier.ask(lambda fake: (len(fake.lookups), len(fake.loads)))
    answers, _ = warm.generate([PROMPTS[4]])
    after = tier.ask(lambda fake: (len(fake.lookups), len(fake.loads)))
    assert answers == [without[4]]
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_a_full_tier_is_offered_its_refused_blocks_again_by_a_later_turn(
    warm: Engine, tier: EmbeddedTier
) -> None:
    switches(tier, blocks={}, capacity=1)
    first, _ = warm.generate([PROMPTS[4]])
    assert tier.settle(WAIT_S) == {}
    assert tier.ask(lambda fake: len(fake.blocks)) == 1
    switches(tier, capacity=None)
    again, cached = warm.generate([PROMPTS[4]])
    assert tier.settle(WAIT_S) == {}
    assert tier.ask(lambda fake: len(fake.blocks)) == 6
    assert cached == [192]
    assert again == first


@pytest.mark.parametrize("work", [Work.LOOKUP, Work.LOAD])
def test_a_request_aborted_while_the_tier_works_for_it_leaves_nothing_behind(
    warm: Engine, tier: EmbeddedTier, work: Work
) -> None:
    switches(tier, hang={work})
    name = warm.start("aborted", PROMPTS[4])

    def working(fake: FakeTier) -> bool:
        return [ticket.work for ticket in fake.open_tickets()] == [work]

    warm.step_until(lambda: tier.ask(working))
    warm.engine.abort_request([name], internal=True)
    warm.step_until(lambda: not warm.core.scheduler.requests)


def test_a_request_aborted_while_it_runs_leaves_nothing_behind(warm: Engine) -> None:
    name = warm.start("aborted", PROMPTS[4], max_tokens=200)
    warm.step_until(lambda: warm.core.scheduler.requests[name].num_output_tokens > 3)
    warm.engine.abort_request([name], internal=True)
    warm.step_until(lambda: not warm.core.scheduler.requests)


# -- what is reused -------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "reused"), [(33, 32), (32, 0), (1, 0), (64, 32), (65, 64)])
def test_whole_blocks_are_reused_and_one_token_is_computed(
    warm: Engine, length: int, reused: int
) -> None:
    tokens = prompt(length, seed=2)
    warm.generate([tokens])
    assert warm.connector.tier.settle(WAIT_S) == {}
    warm.forget_locally()
    _, cached = warm.generate([tokens])
    assert cached == [reused]


def test_a_salt_separates_and_the_same_salt_shares(warm: Engine, without: list[Answer]) -> None:
    one = [PROMPTS[3]]
    assert warm.generate(one, salt="a") == ([without[3]], [0])
    assert warm.connector.tier.settle(WAIT_S) == {}
    for salt, reused in (("a", 96), ("b", 0), (None, 96)):
        warm.forget_locally()
        assert warm.generate(one, salt=salt) == ([without[3]], [reused])


def test_a_request_that_needs_its_prompt_computed_reuses_nothing(warm: Engine) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    before = warm.worker.counters.loaded
    (output,) = warm.llm.generate({"prompt_token_ids": PROMPTS[3]}, parameters, use_tqdm=False)
    assert len(output.prompt_logprobs) == len(PROMPTS[3])
    assert warm.worker.counters.loaded == before


def test_after_a_reset_of_the_connector_nothing_is_reused(warm: Engine) -> None:
    namespace = warm.connector.scheduler_side.namespace
    assert warm.llm.reset_prefix_cache(reset_connector=True)
    try:
        _, cached = warm.generate([PROMPTS[4]])
        assert cached == [0]
    finally:
        warm.connector.scheduler_side.namespace = namespace


def test_other_weights_in_the_same_folder_have_another_identity(warm: Engine, model: Path) -> None:
    from cxlbench.kv.vllm_identity import namespace_of

    connector = warm.connector
    config, cache = connector._vllm_config, connector._kv_cache_config
    before = namespace_of(config, cache, {})
    assert before == connector.scheduler_side.namespace
    weights = next(model.glob("*.safetensors"))
    weights.touch()
    assert namespace_of(config, cache, {}) != before
    fixed = namespace_of(config, cache, {"weights_revision": "r1"})
    assert fixed.weights_revision == "r1"
    assert namespace_of(config, cache, {"weights_revision": "r1", "salt": "s"}) != fixed


@pytest.mark.parametrize(
    ("section", "field", "value", "said"),
    [
        ("parallel_config", "distributed_executor_backend", "mp", "distributed-executor-backend"),
        ("parallel_config", "world_size", 2, "parallel sizes of 1"),
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "recompute"),
    ],
)
def test_an_engine_that_the_tier_cannot_serve_is_refused_with_what_to_do(
    warm: Engine, section: str, field: str, value: object, said: str
) -> None:
    from cxlbench.kv.vllm_adapter import UnsupportedEngineError, _check_supported

    config = warm.connector._vllm_config
    part = getattr(config, section)
    before = getattr(part, field)
    setattr(part, field, value)
    try:
        with pytest.raises(UnsupportedEngineError, match=said):
            _check_supported(config, warm.connector._kv_cache_config)
    finally:
        setattr(part, field, before)


def test_nothing_is_stored_by_a_step_that_failed(warm: Engine) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from cxlbench.kv.vllm_adapter import TierMetadata
    from cxlbench.kv.vllm_scheduler import BlockOrder, TierOrders

    order = BlockOrder("r", 10**6, 0, (b"k" * 32,), (1,))
    group = get_kv_transfer_group()
    group.bind_connector_metadata(TierMetadata(TierOrders(stores=(order,))))
    with contextlib.suppress(RuntimeError):
        try:
            raise RuntimeError("the forward pass failed")
        finally:
            group.wait_for_save()
    group.clear_connector_metadata()
    assert warm.connector.tier.settle(WAIT_S) == {}
    assert not warm.connector.tier.ask(lambda fake: b"k" * 32 in fake.blocks)


# -- parts that need torch or vLLM, but no engine -------------------------------------------------


def test_blocks_of_any_strides_come_back_whole_and_alone(environment: None) -> None:
    import numpy as np
    import torch

    from cxlbench.kv.vllm_layout import VllmBlocks

    def caches() -> dict[str, Any]:
        packed = torch.zeros(6, 2, 3, 4, dtype=torch.bfloat16)
        return {
            "plain": torch.zeros(6, 5, dtype=torch.float32),
            "permuted": packed.permute(0, 2, 1, 3),
            "half-size kernel blocks": torch.zeros(12, 7, dtype=torch.uint8),
            "the same again": packed.permute(0, 2, 1, 3),
        }

    source, target = caches(), caches()
    for number, cache in enumerate(source.values()):
        cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) % 100 + number)
    out, back = VllmBlocks(source, 6), VllmBlocks(target, 6)
    assert out.block_bytes == 5 * 4 + 24 * 2 + 14
    buffer = np.zeros(out.block_bytes, dtype=np.uint8)
    out.gather(3, buffer)
    back.scatter(3, buffer)
    for name in ("plain", "permuted", "half-size kernel blocks"):
        rows = source[name].shape[0] // 6
        mine = slice(3 * rows, 4 * rows)
        assert torch.equal(target[name][mine], source[name][mine])
        target[name][mine] = 0
        assert not target[name].any()


def test_a_cache_whose_blocks_are_not_outermost_is_refused(environment: None) -> None:
    import torch

    from cxlbench.kv.vllm_layout import LayoutError, VllmBlocks

    with pytest.raises(LayoutError, match="must count the 6 blocks"):
        VllmBlocks({"layer": torch.zeros(2, 6, 5)}, 6)


@pytest.mark.parametrize("name", ["nothing", "no.such.module:build", "cxlbench.kv:nothing", ":"])
def test_a_tier_that_does_not_exist_is_named_in_the_error(environment: None, name: str) -> None:
    from cxlbench.hymcache.vllm import TierNotFoundError, find_builder

    with pytest.raises(TierNotFoundError, match=r"module:function|there is no tier"):
        find_builder(name)
