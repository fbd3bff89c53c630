"""What the vLLM adapter looks up, loads and stores, and when: the scheduler's half, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.kv.connector import Completion, Work
from cxlbench.kv.embedded import Submission
from cxlbench.kv.identity import Namespace, chain_keys
from cxlbench.kv.results import KeyResult
from cxlbench.kv.vllm_identity import extra_keys_of
from cxlbench.kv.vllm_scheduler import BlockOrder, NotStored, SchedulerSide, TierOrders

BLOCK = 16
NAMESPACE = Namespace(
    model="m", weights_revision="r", dtype="bf16", kv_layout="l", block_tokens=BLOCK
)


class StubTier:
    """Notes calls; lookups end when the test says so."""

    def __init__(self) -> None:
        self.ids = 0
        self.lookups: list[tuple[Submission, tuple[bytes, ...], int]] = []
        self.released: list[int] = []
        self.released_later: list[int] = []

    def new_request_id(self) -> int:
        self.ids += 1
        return self.ids

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Submission:
        submission = Submission(request_id, Work.LOOKUP, len(keys) - matched)
        self.lookups.append((submission, tuple(keys), matched))
        return submission

    def release(self, request_id: int) -> None:
        self.released.append(request_id)

    def release_after_stores(self, request_id: int) -> None:
        self.released_later.append(request_id)

    def answer(self, hits: int, *, lookup: int = -1) -> None:
        submission, keys, matched = self.lookups[lookup]
        wanted = len(keys) - matched
        results = [KeyResult.HIT] * hits + [KeyResult.MISS] * (wanted - hits)
        submission._end(Completion(submission.request_id, Work.LOOKUP, tuple(results)))


@dataclass
class StubRequest:
    all_token_ids: list[int]
    request_id: str = "r"
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list[object] = field(default_factory=list)
    prompt_embeds: object = None
    prompt_is_token_ids: object = None
    resumable: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Bench:
    """One request at one scheduler's half."""

    def __init__(self, tokens: int, *, tier: StubTier | None = None, name: str = "r") -> None:
        self.tier = tier or StubTier()
        self.side = SchedulerSide(self.tier, NAMESPACE, block_bytes=4096)
        self.request = StubRequest(list(range(tokens)), name)

    @property
    def keys(self) -> list[bytes]:
        extra = extra_keys_of(self.request)
        assert extra is not None
        return chain_keys(NAMESPACE, self.request.all_token_ids, extra_keys=extra)

    def matched(self, computed: int = 0) -> int | None:
        extra = extra_keys_of(self.request)
        assert extra is not None
        return self.side.matched(self.request, extra, computed)

    def allocated(self, external: int) -> None:
        self.side.allocated(self.request.request_id, self.blocks, external)

    def step(self, computed: int, tokens: int) -> TierOrders:
        self.side.set_blocks(self.request.request_id, self.blocks)
        return self.side.orders({self.request.request_id: (computed, tokens)})

    @property
    def blocks(self) -> list[int]:
        return [100 + i for i in range(-(-self.request.num_tokens // BLOCK))]

    def cold(self) -> None:
        """Bring the request to where it runs, without a hit."""
        self.matched()
        if self.tier.lookups:
            self.tier.answer(0)
        assert self.matched() == 0
        self.allocated(0)


# -- how much is matched --------------------------------------------------------------------------


def test_the_answer_is_not_yet_while_the_lookup_goes_on_and_it_is_submitted_once() -> None:
    bench = Bench(100)
    assert [bench.matched() for _ in range(300)] == [None] * 300
    assert len(bench.tier.lookups) == 1
    bench.tier.answer(2)
    assert [bench.matched() for _ in range(300)] == [2 * BLOCK] * 300
    assert len(bench.tier.lookups) == 1


def test_seventeen_tokens_with_blocks_of_sixteen_hit_sixteen() -> None:
    bench = Bench(17)
    bench.matched()
    bench.tier.answer(1)
    assert bench.matched() == 16


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_prompt_of_at_most_one_block_asks_for_nothing(tokens: int) -> None:
    bench = Bench(tokens)
    assert bench.matched() == 0
    assert bench.tier.lookups == []


@given(tokens=st.integers(0, 80), local=st.integers(0, 5), hits=st.integers(0, 5))
def test_what_is_matched_is_whole_blocks_and_leaves_a_token(
    tokens: int, local: int, hits: int
) -> None:
    bench = Bench(tokens)
    computed = min(local, max(0, tokens - 1) // BLOCK) * BLOCK
    if bench.matched(computed) is None:
        wanted = bench.tier.lookups[-1][0].keys
        bench.tier.answer(min(hits, wanted))
    got = bench.matched(computed)
    assert got is not None
    assert got % BLOCK == 0
    assert got >= 0
    assert got == 0 or computed + got < tokens


def test_the_whole_chain_is_named_and_what_is_matched_locally_is_not_looked_up() -> None:
    bench = Bench(100)
    bench.matched(2 * BLOCK)
    _, keys, matched = bench.tier.lookups[0]
    assert list(keys) == bench.keys[:6]
    assert matched == 2
    bench.tier.answer(3)
    assert bench.matched(2 * BLOCK) == 3 * BLOCK


def test_a_chain_that_is_matched_locally_is_named_to_the_tier_but_not_waited_for() -> None:
    bench = Bench(2 * BLOCK + 1)
    assert bench.matched(2 * BLOCK) == 0
    _, keys, matched = bench.tier.lookups[0]
    assert (list(keys), matched) == (bench.keys, 2)


def test_a_local_hit_that_ends_inside_a_block_gets_nothing() -> None:
    bench = Bench(100)
    assert bench.matched(BLOCK + 3) == 0


def test_a_request_that_must_compute_its_prompt_gets_nothing() -> None:
    bench = Bench(100)
    bench.request.skip_reading_prefix_cache = True
    assert bench.matched() == 0
    assert bench.tier.lookups == []


def test_hits_that_the_engine_has_found_locally_meanwhile_are_not_loaded_again() -> None:
    bench = Bench(100)
    bench.matched(0)
    bench.tier.answer(4)
    assert bench.matched(0) == 4 * BLOCK
    assert bench.matched(3 * BLOCK) == BLOCK
    assert bench.matched(5 * BLOCK) == 0
    assert len(bench.tier.lookups) == 1


def test_local_blocks_that_have_gone_meanwhile_are_looked_up_under_a_new_id() -> None:
    bench = Bench(100)
    bench.matched(3 * BLOCK)
    bench.tier.answer(2)
    assert bench.matched(3 * BLOCK) == 2 * BLOCK
    assert bench.matched(BLOCK) is None
    assert bench.tier.released_later == [1]
    first, _, matched = bench.tier.lookups[1]
    assert (first.request_id, matched) == (2, 1)


# -- loads ----------------------------------------------------------------------------------------


def loading(hits: int = 3, computed: int = 0) -> tuple[Bench, BlockOrder]:
    bench = Bench(100)
    bench.matched(computed)
    bench.tier.answer(hits)
    tokens = bench.matched(computed)
    assert tokens == hits * BLOCK
    bench.allocated(tokens)
    (order,) = bench.side.orders({}).loads
    return bench, order


def test_the_blocks_found_are_loaded_into_the_blocks_after_the_local_ones() -> None:
    bench, order = loading(hits=3, computed=2 * BLOCK)
    assert order == BlockOrder("r", 1, 2, tuple(bench.keys[2:5]), (102, 103, 104))


def test_a_load_is_ordered_once_though_the_engine_allocates_twice() -> None:
    bench, _ = loading()
    bench.allocated(0)
    assert bench.side.orders({}).loads == ()
    assert bench.tier.released_later == []


def test_hits_that_the_engine_does_not_want_are_given_back() -> None:
    bench = Bench(100)
    bench.matched()
    bench.tier.answer(3)
    bench.matched()
    bench.allocated(0)
    assert bench.tier.released_later == [1]


def test_after_a_failed_load_the_request_gets_nothing_more() -> None:
    bench, order = loading()
    bench.side.loads_ended(["r"], frozenset(order.block_ids[1:]))
    assert bench.matched() == 0
    assert bench.tier.released_later == [order.tier_request]
    assert len(bench.tier.lookups) == 1


def test_blocks_that_failed_in_another_request_do_not_matter() -> None:
    bench, _ = loading()
    bench.side.loads_ended(["r"], frozenset({7}))
    assert bench.tier.released_later == []


def test_a_preempted_request_looks_up_again_under_a_new_id() -> None:
    bench, order = loading()
    bench.side.loads_ended(["r"], frozenset())
    bench.step(3 * BLOCK, 100 - 3 * BLOCK)
    assert bench.matched() is None
    submission, _, _ = bench.tier.lookups[1]
    assert submission.request_id == 2
    assert bench.tier.released_later == [order.tier_request]


# -- stores ---------------------------------------------------------------------------------------


def stored(orders: TierOrders) -> list[tuple[int, int]]:
    return [(order.first_block, len(order.keys)) for order in orders.stores]


def test_only_blocks_that_the_step_completes_are_stored() -> None:
    bench = Bench(100)
    bench.cold()
    assert stored(bench.step(0, BLOCK - 1)) == []
    assert stored(bench.step(BLOCK - 1, 1)) == [(0, 1)]
    assert stored(bench.step(BLOCK, 3 * BLOCK + 2)) == [(1, 3)]
    assert stored(bench.step(4 * BLOCK + 2, 1)) == []


def test_a_stored_block_has_the_key_that_a_later_request_asks_for() -> None:
    bench = Bench(3 * BLOCK)
    bench.cold()
    (order,) = bench.step(0, 3 * BLOCK).stores
    assert list(order.keys) == bench.keys
    assert order.block_ids == (100, 101, 102)


def test_a_block_whose_tokens_are_not_known_yet_is_not_stored() -> None:
    bench = Bench(BLOCK - 2)
    bench.cold()
    bench.side.set_blocks("r", [100, 101])
    speculative = bench.side.orders({"r": (0, BLOCK + 2)})
    assert speculative.stores == ()
    bench.request.all_token_ids += [7, 8]
    assert stored(bench.side.orders({"r": (BLOCK - 2, 2)})) == [(0, 1)]


def test_blocks_of_output_are_stored_too() -> None:
    bench = Bench(BLOCK)
    bench.cold()
    assert stored(bench.step(0, BLOCK)) == [(0, 1)]
    bench.request.all_token_ids += list(range(BLOCK + 1))
    assert stored(bench.step(2 * BLOCK - 1, 1)) == [(1, 1)]


def test_blocks_that_were_loaded_or_matched_locally_are_not_stored() -> None:
    bench, _ = loading(hits=3, computed=BLOCK)
    bench.side.loads_ended(["r"], frozenset())
    assert stored(bench.step(4 * BLOCK, 100 - 4 * BLOCK)) == [(4, 2)]


def test_blocks_that_failed_to_load_are_stored_when_they_are_recomputed() -> None:
    bench, order = loading(hits=4)
    bench.side.loads_ended(["r"], frozenset(order.block_ids[1:]))
    (again,) = bench.step(BLOCK, 100 - BLOCK).stores
    assert (again.first_block, len(again.keys)) == (1, 5)
    assert again.tier_request != order.tier_request


def test_a_refused_block_is_offered_again_when_the_next_block_fills_not_before() -> None:
    bench = Bench(3 * BLOCK)
    bench.cold()
    bench.step(0, 2 * BLOCK)
    bench.side.not_stored([NotStored("r", 0, bench.keys[0]), NotStored("r", 1, bench.keys[1])])
    assert stored(bench.step(2 * BLOCK, BLOCK - 1)) == []
    assert stored(bench.step(3 * BLOCK - 1, 1)) == [(0, 3)]


def test_a_refused_block_is_offered_again_by_a_later_request_that_has_it_locally() -> None:
    bench = Bench(2 * BLOCK + 1)
    bench.cold()
    bench.step(0, 2 * BLOCK + 1)
    bench.side.not_stored([NotStored("r", 1, bench.keys[1])])
    bench.side.finished("r")
    bench.request.request_id = "later"
    assert bench.matched(2 * BLOCK) == 0
    bench.allocated(0)
    assert stored(bench.step(2 * BLOCK, 1)) == [(1, 1)]
    bench.side.finished("later")
    bench.request.request_id = "last"
    bench.matched(2 * BLOCK)
    bench.allocated(0)
    assert stored(bench.step(2 * BLOCK, 1)) == []


def test_a_preempted_request_does_not_store_its_blocks_twice() -> None:
    bench = Bench(100)
    bench.cold()
    assert stored(bench.step(0, 100)) == [(0, 6)]
    bench.cold()
    assert stored(bench.step(0, 100)) == []


# -- ends -----------------------------------------------------------------------------------------


def test_a_finished_request_is_released_when_its_stores_have_ended() -> None:
    bench = Bench(100)
    bench.cold()
    bench.step(0, 100)
    bench.side.finished("r")
    assert (bench.tier.released, bench.tier.released_later) == ([], [1])
    assert bench.side.open_requests() == 0


def test_a_request_that_is_aborted_during_its_lookup_is_released() -> None:
    bench = Bench(100)
    bench.matched()
    bench.side.finished("r")
    assert bench.tier.released_later == [1]
    assert bench.side.open_requests() == 0


def test_a_request_that_is_aborted_during_its_load_is_released_now_and_when_the_load_ended() -> (
    None
):
    bench, order = loading()
    bench.side.finished("r")
    assert bench.tier.released == [order.tier_request]
    assert bench.side.open_requests() == 1
    bench.side.loads_ended(["r"], frozenset(order.block_ids))
    assert bench.tier.released == [order.tier_request] * 2
    assert bench.side.open_requests() == 0


def test_a_request_that_the_tier_never_heard_of_ends_quietly() -> None:
    bench = Bench(5)
    bench.matched()
    bench.side.finished("r")
    bench.side.finished("never seen")
    assert (bench.tier.released, bench.tier.released_later) == ([], [])


def test_after_a_reset_nothing_stored_before_is_found_and_nothing_found_before_is_loaded() -> None:
    bench = Bench(100)
    bench.matched()
    bench.tier.answer(3)
    bench.side.forget("again")
    assert bench.matched() == 0
    bench.request.request_id = "new"
    assert bench.matched() is None
    assert not set(bench.tier.lookups[-1][1]) & set(bench.keys)


# -- identity of a request ------------------------------------------------------------------------


def test_salt_and_lora_separate_requests() -> None:
    @dataclass
    class Lora:
        lora_name: str
        lora_path: str

    keys = {
        tuple(chain_keys(NAMESPACE, range(BLOCK), extra_keys=extra_keys_of(request) or ()))
        for request in (
            StubRequest([]),
            StubRequest([], cache_salt="a"),
            StubRequest([], cache_salt="b"),
            StubRequest([], lora_request=Lora("a", "/a")),
            StubRequest([], lora_request=Lora("a", "/b")),
            StubRequest([], lora_request=Lora("a", "/a"), cache_salt="a"),
        )
    }
    assert len(keys) == 6


@pytest.mark.parametrize(
    "what",
    [
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True]},
        {"resumable": True},
    ],
)
def test_inputs_that_are_not_all_tokens_are_not_cached(what: dict[str, object]) -> None:
    assert extra_keys_of(StubRequest([1], **what)) is None  # type: ignore[arg-type]
