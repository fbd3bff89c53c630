"""A replaying worker on a scripted tier: what it asks, computes, stores, checks and releases."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.clock import VirtualClock, WallClock
from cxlbench.harness.content import BlockContent
from cxlbench.harness.requests import Request
from cxlbench.harness.worker import RequestRecord, Worker
from cxlbench.kv.connector import Work
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult
from tests.harness.workbench import BLOCK_TOKENS, ScriptedTier, ask, engine, put, workload

SPACE = Namespace("model", "revision", "bfloat16", "layout", BLOCK_TOKENS)
NBYTES = 8192


def keys_of(request: Request) -> list[bytes]:
    return trace_keys(SPACE, request.block_ids)


def keys(*blocks: int) -> tuple[bytes, ...]:
    return tuple(trace_keys(SPACE, blocks))


class Desk:
    """One worker in front of a scripted tier."""

    def __init__(
        self, *, gpu_blocks: int = 16, max_running: int = 8, wall: bool = False, **tier: Any
    ) -> None:
        self.clock = WallClock() if wall else VirtualClock()
        self.tier = ScriptedTier(self.clock, **tier)
        self.computed: set[int] = set()
        self.worker = self.another(gpu_blocks=gpu_blocks, max_running=max_running)

    def another(self, *, gpu_blocks: int = 16, max_running: int = 8) -> Worker:
        return Worker(
            self.clock,
            self.tier,
            engine(),
            BlockContent(NBYTES, phantom=self.clock.kind == "virtual", seed=1),
            number=0,
            gpu_blocks=gpu_blocks,
            max_running=max_running,
            keys_of=keys_of,
            block_tokens=BLOCK_TOKENS,
            computed=self.computed,
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with self.clock:
            return self.clock.run(work)

    def serve(self, *requests: Request) -> list[RequestRecord]:
        """Serve requests one after the other, each when the stores before it have ended."""

        async def all_of_them() -> list[RequestRecord]:
            records = []
            for request in workload(*requests).requests:
                records.append(await self.worker.serve(request))
                await self.worker.settle()
            return records

        records: list[RequestRecord] = self.run(all_of_them())
        assert not self.tier.opened
        return records


def recomputed(record: RequestRecord, request: Request) -> int:
    """Return the reusable blocks that were computed again."""
    unique_tokens = request.input_tokens - record.reusable * BLOCK_TOKENS
    return (record.computed_tokens - unique_tokens) // BLOCK_TOKENS


# -- what is computed ---------------------------------------------------------------------------


def test_a_cold_request_computes_its_prompt_and_stores_its_whole_blocks_heads_first():
    desk = Desk()
    (record,) = desk.serve(ask([1, 2, 3], tokens=3 * BLOCK_TOKENS + 50))
    assert record.computed_tokens == 3 * BLOCK_TOKENS + 50
    assert (record.reusable, record.seen, record.matched, record.found, record.loaded) == (
        *(3, 0, 0, 0, 0),
    )
    assert desk.tier.called("store") == [(0, keys(1, 2, 3))]
    assert desk.worker.stores.stored == 3


def test_what_the_gpu_has_is_neither_loaded_nor_computed():
    desk = Desk()
    _, again = desk.serve(ask([1, 2, 3]), ask([1, 2, 3]))
    assert (again.matched, again.found, again.loaded, again.computed_tokens) == (3, 0, 0, 1)
    assert desk.tier.called("load") == []


def test_what_the_gpu_lost_comes_from_the_tier():
    desk = Desk(gpu_blocks=2)
    _, again = desk.serve(ask([1, 2, 3, 4]), ask([1, 2, 3, 4]))
    assert (again.matched, again.found, again.loaded, again.computed_tokens) == (2, 2, 2, 1)
    assert desk.tier.called("load") == [(1, keys(3, 4))]


def test_what_the_tier_lost_is_computed_again_from_the_hole_on():
    desk = Desk(
        gpu_blocks=0,
        deliver=lambda key, _: KeyResult.MISS if key == keys(2)[0] else None,
    )
    _, again = desk.serve(ask([1, 2, 3]), ask([1, 2, 3]))
    assert (again.found, again.loaded) == (3, 1)
    assert again.computed_tokens == 2 * BLOCK_TOKENS + 1


@pytest.mark.parametrize("result", [KeyResult.TIMEOUT, KeyResult.ERROR, KeyResult.LEASE_EXPIRED])
def test_a_load_that_fails_is_computed_instead(result):
    desk = Desk(gpu_blocks=0, deliver=lambda *_: result)
    _, again = desk.serve(ask([1, 2]), ask([1, 2]))
    assert (again.loaded, again.computed_tokens) == (0, 2 * BLOCK_TOKENS + 1)
    assert desk.worker.wrong_blocks == 0


def test_an_empty_prompt_is_served():
    desk = Desk()
    (record,) = desk.serve(ask([], tokens=0))
    assert (record.reusable, record.computed_tokens) == (0, 1)
    assert desk.tier.called("store") == []


def test_a_prompt_of_one_token_is_served():
    desk = Desk()
    (record,) = desk.serve(ask([], tokens=1))
    assert (record.reusable, record.computed_tokens) == (0, 1)


def test_a_prompt_of_exactly_one_block_is_stored_and_computed_again():
    """Case H1: an engine computes at least the last token, so that block is never a hit."""
    desk = Desk()
    first, again = desk.serve(*[ask([7], tokens=BLOCK_TOKENS)] * 2)
    assert first.reusable == again.reusable == again.matched == again.found == 0
    assert first.computed_tokens == again.computed_tokens == BLOCK_TOKENS
    assert desk.tier.called("store") == [(0, keys(7)), (1, keys(7))]


def test_the_block_that_ends_a_prompt_is_in_the_gpu_for_a_longer_one():
    desk = Desk()
    _, longer = desk.serve(ask([1, 2], tokens=2 * BLOCK_TOKENS), ask([1, 2, 3]))
    assert (longer.matched, longer.computed_tokens) == (2, BLOCK_TOKENS + 1)


def test_a_prompt_of_whole_blocks_computes_its_last_one():
    desk = Desk(gpu_blocks=0)
    _, again = desk.serve(*[ask([1, 2, 3], tokens=3 * BLOCK_TOKENS)] * 2)
    assert (again.reusable, again.loaded, again.computed_tokens) == (2, 2, BLOCK_TOKENS)


@given(st.data())
def test_every_reusable_block_is_matched_loaded_or_computed(data):
    """Whatever the tier delivers, refuses and loses."""
    answers = [None, KeyResult.NO_SPACE, KeyResult.ERROR]
    kept = data.draw(st.dictionaries(st.integers(0, 20), st.sampled_from(answers)))
    lost = data.draw(st.sets(st.integers(0, 20)))
    by_key = {keys(block)[0]: block for block in range(60)}
    gpu_blocks = data.draw(st.integers(0, 12))
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    extra = data.draw(st.lists(st.integers(0, BLOCK_TOKENS - 1), min_size=8, max_size=8))
    asks = [
        # Two chains: blocks 0-19 and 20-39.
        ask(range(first, first + length), tokens=length * BLOCK_TOKENS + more)
        for first, length, more in zip([0, 20] * 4, lengths, extra, strict=False)
    ]
    desk = Desk(
        gpu_blocks=gpu_blocks,
        answer_store=lambda key: kept.get(by_key[key]),
        deliver=lambda key, _: KeyResult.MISS if by_key[key] in lost else None,
    )
    for record, request in zip(desk.serve(*asks), asks, strict=True):
        assert record.matched + record.found <= record.seen <= record.reusable
        assert record.loaded <= record.found
        parts = record.matched + record.loaded + recomputed(record, request)
        assert parts == record.reusable or request.input_tokens == 0
    stores = desk.worker.stores
    results = stores.stored + stores.skipped + stores.failed
    assert results <= sum(len(offered) for _, offered in desk.tier.called("store"))
    assert stores.stored == len(desk.tier.blocks)


# -- what is asked of the tier ------------------------------------------------------------------


def test_the_tier_is_told_the_chain_that_the_gpu_has():
    """Also when nothing is left to look up: stores go to where the chain is, and it stays warm."""
    desk = Desk()
    desk.serve(ask([1, 2]), ask([1, 2, 3], tokens=2 * BLOCK_TOKENS + 1 + BLOCK_TOKENS - 1))
    assert desk.tier.called("lookup") == [(0, keys(1, 2)), (1, keys(1, 2))]
    assert desk.tier.matched == {0: 0, 1: 2}


def test_a_request_is_open_until_its_store_is_submitted():
    """The tier appends to the device of the request's last hit; a released one has none."""
    desk = Desk()
    desk.serve(ask([1, 2]), ask([1, 2, 3]))
    order = [(name, request) for name, request, _, _ in desk.tier.calls if name != "lookup"]
    assert order == [("store", 0), ("release", 0), ("store", 1), ("release", 1)]


def test_a_request_with_nothing_to_store_is_released():
    desk = Desk()
    desk.serve(ask([1, 2]), ask([1, 2]), ask([], tokens=1))
    assert [request for request, _ in desk.tier.called("release")] == [0, 1, 2]


@pytest.mark.parametrize("at", [Work.LOOKUP, Work.LOAD])
def test_a_request_that_is_cancelled_is_released(at):
    desk = Desk(gpu_blocks=0)

    async def cancel_it() -> None:
        first, second = workload(ask([1, 2]), ask([1, 2])).requests
        await desk.worker.serve(first)
        await desk.worker.settle()
        desk.tier.wait_s[at] = 5.0
        job = desk.clock.spawn(desk.worker.serve(second))
        await desk.clock.sleep(1.0)
        assert desk.tier.opened == {1}
        job.cancel()
        await job.ended()

    desk.run(cancel_it())
    assert desk.tier.opened == set()


def test_a_refused_block_is_offered_again_while_the_gpu_has_it():
    refused = set(keys(2, 3))
    desk = Desk(answer_store=lambda key: KeyResult.NO_SPACE if key in refused else None)

    async def two_turns() -> None:
        first, second, third = workload(*[ask([1, 2, 3])] * 3).requests
        await desk.worker.serve(first)
        await desk.worker.settle()
        assert desk.worker.stores.skipped == 2
        refused.clear()
        await desk.worker.serve(second)
        await desk.worker.settle()
        await desk.worker.serve(third)

    desk.run(two_turns())
    assert desk.tier.called("store") == [(0, keys(1, 2, 3)), (1, keys(2, 3))]
    assert (desk.worker.stores.recovered, desk.worker.stores.stored) == (2, 3)


def test_a_block_that_could_not_be_stored_is_offered_again():
    """Or what is stored behind it would be a tail without its head until the GPU loses it."""
    failing = set(keys(2))
    desk = Desk(answer_store=lambda key: KeyResult.ERROR if key in failing else None)

    async def two_turns() -> None:
        first, second = workload(ask([1, 2]), ask([1, 2, 3])).requests
        await desk.worker.serve(first)
        await desk.worker.settle()
        assert desk.worker.stores.failed == 1
        failing.clear()
        await desk.worker.serve(second)
        await desk.worker.settle()

    desk.run(two_turns())
    assert desk.tier.called("store")[1] == (1, keys(2, 3))
    assert (desk.worker.stores.recovered, desk.worker.stores.skipped) == (1, 0)


def test_a_refused_block_that_the_gpu_lost_is_offered_when_it_was_computed_again():
    refused = set(keys(2))
    desk = Desk(
        gpu_blocks=0, answer_store=lambda key: KeyResult.NO_SPACE if key in refused else None
    )

    async def two_turns() -> None:
        first, second = workload(ask([1, 2]), ask([1, 2])).requests
        await desk.worker.serve(first)
        await desk.worker.settle()
        refused.clear()
        await desk.worker.serve(second)
        await desk.worker.settle()

    desk.run(two_turns())
    assert desk.tier.called("store") == [(0, keys(1, 2)), (1, keys(2))]
    assert desk.worker.stores.recovered == 1


def test_a_block_that_another_worker_stored_is_not_counted_twice():
    desk = Desk()
    other = desk.another()

    async def both() -> None:
        first, second = workload(ask([1, 2]), ask([1, 2], session="t")).requests
        await desk.worker.serve(first)
        await desk.worker.settle()
        desk.tier.blocks.pop(keys(2)[0])
        await other.serve(second)
        await other.settle()

    desk.run(both())
    assert (desk.worker.stores.stored, other.stores.stored) == (2, 1)


def test_hits_never_exceed_what_was_computed_before():
    """Another worker computes and stores the blocks while this one waits for its lookup."""
    desk = Desk(wait_s={Work.LOOKUP: 3.0})
    other = desk.another()

    async def race() -> RequestRecord:
        first, second = workload(ask([1, 2]), ask([1, 2], session="t")).requests
        job = desk.clock.spawn(desk.worker.serve(first))
        await desk.clock.sleep(1.0)
        desk.tier.wait_s[Work.LOOKUP] = 0.0
        await other.serve(second)
        await other.settle()
        return await job

    record = desk.run(race())
    assert (record.seen, record.found) == (2, 2)


# -- right data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wall", [False, True])
def test_another_blocks_bytes_delivered_as_a_hit_are_counted_as_wrong(wall):
    desk = Desk(gpu_blocks=0, wall=wall)

    def swap(key, buffer):
        put(buffer, desk.tier.blocks[keys(1)[0]])
        return KeyResult.HIT

    desk.tier.deliver = swap
    desk.serve(ask([1, 2, 3]), ask([1, 2, 3]))
    assert desk.worker.wrong_blocks == 2


@pytest.mark.parametrize("wall", [False, True])
def test_a_hit_without_any_bytes_is_counted_as_wrong(wall):
    """Each time, although the buffer may have held this very block before."""
    desk = Desk(gpu_blocks=0, wall=wall)
    nothing = [KeyResult.HIT, None, KeyResult.HIT, None, KeyResult.HIT]
    desk.tier.deliver = lambda *_: nothing.pop()
    desk.serve(*[ask([1])] * 6)
    assert desk.worker.wrong_blocks == 3


def test_a_flipped_bit_delivered_as_a_hit_is_counted_as_wrong():
    desk = Desk(gpu_blocks=0, wall=True)

    def flip(key, buffer):
        put(buffer, desk.tier.blocks[key])
        buffer[NBYTES // 2] ^= 1
        return KeyResult.HIT

    desk.tier.deliver = flip
    desk.serve(ask([1, 2]), ask([1, 2]))
    assert desk.worker.wrong_blocks == 2


def test_a_wrong_block_that_was_not_called_a_hit_is_no_wrong_data():
    desk = Desk(gpu_blocks=0)

    def spoil(key, buffer):
        put(buffer, "garbage")
        return KeyResult.MISS

    desk.tier.deliver = spoil
    desk.serve(ask([1, 2]), ask([1, 2]))
    assert desk.worker.wrong_blocks == 0


# -- time ---------------------------------------------------------------------------------------


def test_ttft_is_lookup_load_and_prefill_and_decode_comes_after():
    desk = Desk(gpu_blocks=0, wait_s={Work.LOOKUP: 0.25, Work.LOAD: 0.5})
    first, again = desk.serve(ask([1, 2], out=1), ask([1, 2], out=11))
    assert first.ttft_s == pytest.approx(0.25 + engine().prefill_s(2 * BLOCK_TOKENS + 1))
    assert first.end_s == first.first_token_s
    assert again.ttft_s == pytest.approx(0.75 + engine().prefill_s(1))
    assert again.end_s - again.first_token_s == pytest.approx(engine().decode_s(10))
    assert again.lookup_s - again.arrival_s == pytest.approx(0.25)
    assert again.load_s - again.lookup_s == pytest.approx(0.5)


def test_prompts_are_prefilled_one_at_a_time():
    desk = Desk()

    async def together() -> list[RequestRecord]:
        requests = workload(ask([1], session="a"), ask([2], session="b")).requests
        return await desk.clock.gather(*[desk.worker.serve(request) for request in requests])

    one, two = desk.run(together())
    prefill = engine().prefill_s(BLOCK_TOKENS + 1)
    assert (one.ttft_s, two.ttft_s) == (pytest.approx(prefill), pytest.approx(2 * prefill))


def test_time_to_first_token_counts_the_wait_for_a_running_request():
    desk = Desk(max_running=1)

    async def together() -> list[RequestRecord]:
        requests = workload(ask([1], out=101, session="a"), ask([2], session="b")).requests
        return await desk.clock.gather(*[desk.worker.serve(request) for request in requests])

    one, two = desk.run(together())
    assert two.arrival_s == one.arrival_s
    assert two.first_token_s == pytest.approx(one.end_s + engine().prefill_s(BLOCK_TOKENS + 1))


def test_stores_do_not_delay_the_first_token_or_the_next_request():
    desk = Desk(wait_s={Work.STORE: 100.0})

    async def quick() -> float:
        first, second = workload(ask([1]), ask([2], session="b")).requests
        await desk.worker.serve(first)
        record = await desk.worker.serve(second)
        end_s = desk.clock.now()
        await desk.worker.settle()
        assert desk.clock.now() >= 100
        assert record.end_s == end_s
        return end_s

    assert desk.run(quick()) < 1
