"""Situations that people met in public KV-cache tiers, at the worker's end of the shared memory.

As ``test_cases``, through the connector: what is promised, told, held and given back.
"""

from __future__ import annotations

import pytest

from cxlbench.kv.connector import held
from cxlbench.kv.identity import Namespace, chain_keys
from cxlbench.kv.results import KeyResult
from tests.tract.rig import KIB, MIB, Desk, chain, memory

HIT, MISS, CANCELLED = KeyResult.HIT, KeyResult.MISS, KeyResult.CANCELLED
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE


def small(**options: object) -> Desk:
    """Return a desk of real bytes with blocks of 64 KiB."""
    return Desk(**{"size": 64 * KIB, "phantom": False, "capacity": 4 * MIB, **options})  # type: ignore[arg-type]


def room_for(blocks: int) -> Desk:
    """Return a desk whose region holds so many blocks of 1 MiB."""
    return Desk(size=MIB, capacity=blocks * MIB + 256 * KIB)


def test_w1_a_load_that_was_promised_and_is_refused_later_says_so_for_each_key() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(4)
        await desk.stored(keys)
        assert (await desk.lookup(1, keys)).leading_hits == 4
        await desk.clock.sleep(12.0)
        done = await desk.load(1, keys)
        assert done.results == (KeyResult.LEASE_EXPIRED,) * 4
        desk.connector.release(1)
        assert await desk.read(keys) == 4

    desk.run(test)


def test_w2_a_store_that_fails_is_never_found_and_its_key_is_free_again() -> None:
    desk = Desk()

    async def test() -> None:
        keys = chain(6)
        connector = desk.connector
        ticket = connector.submit_store(1, keys, [desk.content().make(key) for key in keys])
        await desk.clock.sleep(0.003)
        assert (await desk.lookup(2, keys, worker=1)).leading_hits == 0
        desk.rig.connectors[1].release(2)
        await connector.close()
        assert (await ticket.done.wait()).results == (CANCELLED,) * 6
        assert await desk.read(keys, worker=1) == 0
        await desk.stored(keys, worker=1)

    desk.run(test)


def test_w3_w4_a_reader_under_eviction_and_reuse_of_its_chunks_gets_its_own_bytes_or_none() -> None:
    desk = small(capacity=640 * KIB, window_bytes=64 * KIB)

    async def test() -> None:
        async def churn() -> None:
            for number in range(1, 30):
                await desk.store(chain(3, number), worker=1)

        async def read() -> None:
            for _ in range(10):
                await desk.store(chain(3))
                await desk.read(chain(3))  # which holds every HIT to the bytes of its key

        await desk.clock.gather(churn(), read())
        assert sum(c.counters.mismatched for c in desk.rig.connectors) == 0
        assert desk.connector.counters.loaded > 0

    desk.run(test)


def test_w5_blocks_of_another_length_never_mix() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(4)
        await desk.stored(keys[:2])
        await desk.stored(keys[2:], size=32 * KIB)
        assert await desk.read(keys) == 2
        assert await desk.read(keys, size=32 * KIB) == 0

    desk.run(test)


def test_w6_w7_a_block_that_does_not_arrive_right_is_told_with_the_load() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys)
        at = desk.offset(keys[1])
        assert at is not None
        desk.rig.pod.device.words[at // 8] ^= 1
        await desk.lookup(1, keys)
        done = await desk.load(1, keys)
        assert done.results == (HIT, MISS, HIT)
        assert desk.connector.poll()[-1].results == done.results
        desk.connector.release(1)

    desk.run(test)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", "revision", "fp8", "layout", 128),
        Namespace("model", "other", "bfloat16", "layout", 128),
        Namespace("other", "revision", "bfloat16", "layout", 128),
        Namespace("model", "revision", "bfloat16", "other", 128),
        Namespace("model", "revision", "bfloat16", "layout", 128, salt="another tenant"),
        Namespace("model", "revision", "bfloat16", "layout", 128, tp_rank=1, tp_size=2),
    ],
)
def test_w8_w9_models_and_tenants_that_share_a_pod_never_get_each_others_blocks(
    other: Namespace,
) -> None:
    desk = small()
    own = Namespace("model", "revision", "bfloat16", "layout", 128)

    async def test() -> None:
        tokens = list(range(512))
        await desk.stored(chain_keys(own, tokens))
        assert await desk.read(chain_keys(other, tokens), worker=1) == 0
        assert await desk.read(chain_keys(own, tokens), worker=1) == 4

    desk.run(test)


def test_h1_a_prompt_hits_by_whole_blocks() -> None:
    desk = small()
    space = Namespace("model", "revision", "bfloat16", "layout", 16)

    async def test() -> None:
        await desk.stored(chain_keys(space, list(range(17))))
        assert await desk.read(chain_keys(space, list(range(17)))) == 1

    desk.run(test)


def test_h3_a_stored_tail_never_costs_its_own_head() -> None:
    desk = room_for(6)

    async def test() -> None:
        keys = chain(9)
        await desk.stored(keys[:6])
        done = await desk.store(keys, worker=1)
        assert done.results == (EXISTS,) * 6 + (NO_SPACE,) * 3
        assert await desk.read(keys) == 6

    desk.run(test)


def test_h5_a_block_that_is_listed_and_gone_bad_is_one_miss_and_no_loop() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys)
        at = desk.offset(keys[0])
        assert at is not None
        desk.rig.pod.device.words[at // 8 : at // 8 + 8] = 0
        assert await desk.read(keys, worker=1) == 0
        await desk.settle()
        assert (await desk.lookup(1, keys)).results == (MISS,) * 3
        desk.connector.release(1)
        assert (await desk.store(keys)).results == (STORED, EXISTS, EXISTS)
        assert await desk.read(keys, worker=1) == 3

    desk.run(test)


def test_r1_many_waiting_loads_stay_in_their_window_and_end_with_their_requests() -> None:
    desk = Desk(window_bytes=32 * MIB)

    async def test() -> None:
        keys = chain(8)
        await desk.stored(keys)
        requests = [desk.name() for _ in range(20)]
        for request in requests:
            await desk.lookup(request, keys)
        tickets = [
            desk.connector.submit_load(request, keys, [desk.empty() for _ in keys])
            for request in requests
        ]
        await desk.clock.sleep(0.002)
        for request in requests[:-1]:
            desk.connector.release(request)
        last = await tickets[-1].done.wait()
        assert last.results == (HIT,) * 8
        desk.connector.release(requests[-1])
        assert desk.connector.copier.window.peak <= 32 * MIB
        begun = [t.done.peek().results.count(HIT) for t in tickets[:-1]]
        assert sum(begun) <= 4

    desk.run(test)


def test_r2_pins_are_given_back_whichever_way_a_request_ends() -> None:
    desk = small()

    async def test() -> None:
        keys = chain(4)
        await desk.stored(keys)
        connector = desk.connector
        await desk.lookup(1, keys)  # never loaded
        connector.release(1)
        connector.submit_lookup(2, keys, desk.size)  # released in its lookup
        connector.release(2)
        await desk.lookup(3, keys)
        connector.submit_load(3, keys, [desk.empty() for _ in keys])  # released in its load
        connector.release(3)
        await desk.lookup(4, keys)  # forgotten
        await desk.clock.sleep(12.0)
        assert desk.rig.check().pins == 0
        connector.release(4)
        assert not held(connector)

    desk.run(test)


def test_r3_a_pool_that_nobody_uses_takes_new_blocks() -> None:
    desk = room_for(4)

    async def test() -> None:
        for number in range(6):
            await desk.stored(chain(4, number), worker=number % 2)
            assert await desk.read(chain(4, number), worker=(number + 1) % 2) == 4

    desk.run(test)


def test_r6_close_ends_in_time_whatever_is_open() -> None:
    desk = Desk(memory=memory(bandwidth=20e6), window_bytes=16 * MIB)

    async def test() -> None:
        keys = chain(3)
        await desk.stored(keys)
        await desk.lookup(1, keys)
        load = desk.connector.submit_load(1, keys, [desk.empty() for _ in keys])
        more = chain(30, 1)
        store = desk.connector.submit_store(2, more, [desk.content().make(key) for key in more])
        began = desk.clock.now()
        await desk.connector.close()
        assert desk.clock.now() - began <= desk.connector.deadline_s + 1
        assert load.done.is_set()
        assert store.done.is_set()
        assert not held(desk.connector)

    desk.run(test)
