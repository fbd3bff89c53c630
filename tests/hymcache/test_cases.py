"""Situations that people met in public KV-cache tiers (CASES: W, H, R, T), and what is right.

Each test is named for its kind of failure, and for the behaviour that rules out the whole kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES, Buffer
from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache.kv_manager import Grant
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import GIB, MIB, Rig, chain, faults, profile, small_profile

MakeRig = Callable[..., Rig]
HIT, MISS, ERROR = KeyResult.HIT, KeyResult.MISS, KeyResult.ERROR
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE
SMALL = 64 << 10
EXTENT = 16 * MIB + PAGE_BYTES


def real(make_rig: MakeRig, **options: Any) -> Rig:
    """Return a rig of real bytes."""
    extent = SMALL + PAGE_BYTES
    defaults = {
        "size": SMALL,
        "phantom": False,
        "device": small_profile(SMALL),
        "capacity": 200 * extent,
        "segment": 10 * extent,
        "window": 8 * SMALL,
    }
    return make_rig(**{**defaults, **options})


# -- wrong data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_W1_what_is_refused_is_recomputed_and_the_output_is_as_without_a_tier(
    make_rig: MakeRig, seed: int
) -> None:
    rules = [
        FaultRule(point=point, kind=kind, probability=0.08, delay_s=delay_s)
        for point, kind, delay_s in (
            ("ssd.read", "error", 0.0),
            ("ssd.read", "corrupt", 0.0),
            ("ssd.read", "delay", 4.0),
            ("ssd.write", "error", 0.0),
            ("ssd.write", "short", 0.0),
            ("fabric.read", "down", 0.0),
            ("fabric.read", "corrupt", 0.0),
            ("fabric.write", "down", 0.0),
            ("control", "down", 0.0),
            ("control", "delay", 0.5),
        )
    ]
    plan = faults(*rules, seed=seed)
    rig = real(make_rig, fault_plan=plan, workers=2, nodes=2)
    delivered = 0

    async def prefill(keys: list[bytes], worker: int) -> list[Buffer]:
        """Load what the tier delivers and compute the rest."""
        nonlocal delivered
        request = rig.name()
        connector = rig.connectors[worker]
        buffers: list[Buffer] = [rig.empty() for _ in keys]
        found = (await rig.lookup(request, keys, worker=worker)).leading_hits
        ticket = connector.submit_load(request, keys[:found], buffers[:found])
        have = (await ticket.done.wait()).leading_hits
        delivered += have
        for index in range(have, len(keys)):
            buffers[index] = rig.content(keys[index])
        await rig.store(keys[have:], request=request, worker=worker)
        connector.release(request)
        return buffers

    async def test() -> None:
        chains = [chain(12, number) for number in range(4)]
        for turn in range(1, 9):
            works = [prefill(keys[: turn * 3], turn % 2) for keys in chains]
            for keys, output in zip(chains, await rig.clock.gather(*works), strict=True):
                for key, buffer in zip(keys, output, strict=False):
                    assert rig.holds(buffer, key)
        assert delivered > 10
        assert len(plan.injected) >= 8

    rig.run(test, settle_s=15)


def test_W2_nothing_is_findable_before_all_its_bytes_are_in_place(make_rig: MakeRig) -> None:
    rig = make_rig(workers=2)

    async def test() -> None:
        keys = chain(8)
        writing = rig.clock.spawn(rig.store(keys))
        seen = []
        while not writing.done():
            hits = await rig.read(keys, worker=1)
            seen.append(hits)
            # Whatever was announced was read whole and right, or `read` would have failed.
            assert hits in (0, 8)
        assert seen[0] == 0
        assert rig.connectors[1].counters.mismatched == 0
        assert await rig.read(keys, worker=1) == 8

    rig.run(test)


@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(point="fabric.write", kind="down"),
        FaultRule(point="control", kind="down", where="node0", skip=1, limit=1),
        FaultRule(point="control", kind="down", where="master", skip=1, limit=1),
    ],
    ids=["write", "commit", "register"],
)
def test_W2_a_failed_store_is_never_findable(make_rig: MakeRig, rule: FaultRule) -> None:
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(4)
        assert (await rig.store(keys)).results == (ERROR,) * 4
        assert await rig.read(keys) == 0
        assert not rig.node.index

    rig.run(test)


def test_W3_a_block_that_its_owner_frees_too_early_is_never_read_as_another(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(capacity=4 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        keys, others = chain(4), chain(4, 2)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        # The owner breaks its word: the extents are given to others under the reader's lease.
        for stored in list(rig.node.index.values()):
            stored.pins = 0
            rig.node.free([(stored.key, stored.generation)])
        rig.node.prefetcher._node = _NoPins(rig)  # type: ignore[assignment]
        await rig.store_at(others, 0, 0)
        done = await rig.load(1, keys)
        assert done.leading_hits == 0
        assert rig.connector.counters.mismatched > 0
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        rig.node.prefetcher._node = rig.node
        rig.master.evict(keys)
        assert await rig.read(others) == 4

    rig.run(test)


class _NoPins:
    """The node of a stream whose pins were thrown away."""

    def __init__(self, rig: Rig) -> None:
        self.devices, self.bases = rig.node.devices, rig.node.bases

    def unpin(self, stored: Any) -> None:
        """There is none."""


def test_W4_a_block_that_comes_back_from_disk_as_another_is_a_miss(make_rig: MakeRig) -> None:
    rig = real(make_rig)

    async def test() -> None:
        keys = chain(4)
        await rig.stored(keys)
        memory = rig.device.ssds.backing._arena.array  # type: ignore[attr-defined]
        first, second = (rig.node.index[key].address for key in keys[1:3])
        extent = SMALL + PAGE_BYTES
        swapped = memory[first : first + extent].copy()
        memory[first : first + extent] = memory[second : second + extent]
        memory[second : second + extent] = swapped
        assert await rig.read(keys) == 1
        await rig.clock.sleep(0.01)
        assert rig.place(keys[1]) is None

    rig.run(test)


def test_W5_a_part_of_a_block_is_never_taken_for_the_block(make_rig: MakeRig) -> None:
    rig = real(make_rig)

    async def test() -> None:
        keys = chain(3)
        await rig.stored(keys, size=SMALL)
        await rig.lookup(1, keys, size=SMALL // 2)
        assert (await rig.load(1, keys, size=SMALL // 2)).results == (MISS,) * 3
        rig.connector.release(1)
        assert await rig.read(keys) == 3

    rig.run(test)


@pytest.mark.parametrize("point", ["fabric.read", "ssd.read"])
def test_W6_W7_what_failed_is_reported_with_the_completion_and_is_not_counted_as_loaded(
    make_rig: MakeRig, point: str
) -> None:
    kind: Any = "down" if point == "fabric.read" else "error"
    rig = make_rig(fault_plan=faults(FaultRule(point=point, kind=kind, skip=5, limit=1)))

    async def test() -> None:
        keys = chain(8)
        await rig.stored(keys)
        rig.connector.poll()
        await rig.lookup(1, keys)
        rig.connector.poll()
        ticket = rig.connector.submit_load(1, keys, [rig.empty() for _ in keys])
        while not ticket.done.is_set():
            assert rig.connector.poll() == []  # no part of it is "received" before its status
            await rig.clock.sleep(1e-4)
        (done,) = rig.connector.poll()
        assert done.results[5] is ERROR
        assert rig.connector.counters.loaded == done.results.count(HIT)
        rig.connector.release(1)

    rig.run(test)


def test_W8_models_that_differ_in_dtype_or_revision_share_no_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    namespaces = [
        Namespace("m", "r1", "bfloat16", "layout", 128),
        Namespace("m", "r1", "float16", "layout", 128),
        Namespace("m", "r2", "bfloat16", "layout", 128),
        Namespace("m", "r1", "bfloat16", "other", 128),
        Namespace("m", "r1", "bfloat16", "layout", 128, salt="tenant"),
    ]

    async def test() -> None:
        first, *others = [trace_keys(namespace, range(6)) for namespace in namespaces]
        await rig.stored(first)
        for keys in others:
            assert await rig.read(keys) == 0
        assert await rig.read(first) == 6

    rig.run(test)


def test_W10_concurrent_writers_never_get_overlapping_space(make_rig: MakeRig) -> None:
    rig = make_rig(workers=4, devices=2, capacity=60 * EXTENT, segment=6 * EXTENT)
    live: dict[int, int] = {}

    async def test() -> None:
        reserve = rig.node.reserve

        def watched(keys: Any, size: int, **options: Any) -> list[Grant | KeyResult]:
            answers = reserve(keys, size, **options)
            spans = [
                (a.address, a.address + a.size_bytes + PAGE_BYTES)
                for a in rig.node._by_address.values()
            ]
            spans += [
                (r.grant.address, r.grant.address + r.size_bytes + PAGE_BYTES)
                for r in rig.node._reservations.values()
                if r.stored is None
            ]
            spans.sort()
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            live[len(live)] = len(spans)
            return answers

        rig.node.reserve = watched  # type: ignore[method-assign]
        works = [
            rig.store(chain(12, number), worker=number % 4, size=size)
            for number in range(24)
            for size in ((16 << number % 2) * MIB,)
        ]
        await rig.clock.gather(*works)
        assert max(live.values()) > 60

    rig.run(test)


# -- hits that should be, or should not be --------------------------------------------------------


def test_H3_heads_are_written_first_and_kept_longest(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB), capacity=160 * EXTENT, segment=8 * EXTENT)

    async def test() -> None:
        chains = [chain(64, number) for number in range(4)]  # 256 blocks for a device of 160
        for blocks in (16, 32, 48, 64, 64, 64, 64):
            for keys in chains:
                await rig.turn(keys[:blocks])
                await rig.quiesce()
        for keys in chains:
            there = [rig.place(key) is not None for key in keys]
            assert there == sorted(there, reverse=True)
            # What is stored can be used: its head is there.
            assert await rig.read(keys) == sum(there)
        assert sum(1 for keys in chains if rig.place(keys[0]) is not None) >= 3

    rig.run(test)


def test_H4_what_is_announced_can_be_fetched(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=60 * EXTENT, segment=4 * EXTENT, workers=2, nodes=2)

    async def test() -> None:
        async def serve(number: int) -> None:
            for turn in range(6):
                keys = chain(6 + turn * 6, number % 5)
                request = rig.name()
                found = await rig.lookup(request, keys, worker=number % 2)
                # Others store, and evict, before it reads.
                await rig.clock.sleep(0.003 * number)
                hits = found.leading_hits
                done = await rig.load(request, keys[:hits], worker=number % 2)
                assert done.leading_hits == hits
                await rig.store(keys[hits:], request=request, worker=number % 2)
                rig.connectors[number % 2].release(request)

        await rig.clock.gather(*[serve(number) for number in range(8)])
        assert rig.master.counters.evicted > 30

    rig.run(test)


def test_H5_what_is_listed_but_gone_is_one_miss_and_no_loop(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(4)
        await rig.stored(keys)
        local = rig.node.index[keys[2]].address
        rig.device.ssds.backing.discard(local, rig.size + PAGE_BYTES)
        assert await rig.read(keys) == 2
        await rig.clock.sleep(0.01)
        assert rig.connector.counters.mismatched == 1
        assert await rig.read(keys) == 2
        assert rig.connector.counters.mismatched == 1  # it is not found again
        assert (await rig.store(keys)).results == (EXISTS, EXISTS, STORED, EXISTS)
        assert await rig.read(keys) == 4

    rig.run(test)


# -- resources ------------------------------------------------------------------------------------


def test_R1_windows_are_bounded_and_end_with_their_request(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(prefetch_depth=64))

    async def test() -> None:
        chains = [chain(30, number) for number in range(50)]
        for keys in chains:
            await rig.stored(keys)
        for number, keys in enumerate(chains):
            await rig.lookup(number, keys)
        await rig.clock.sleep(0.1)
        assert rig.device.at_rest()["prefetch requests"] == 64
        for number in range(0, 50, 2):
            rig.connector.release(number)
        await rig.clock.sleep(0.1)
        held = [lane.held for s in rig.node.prefetcher._streams for lane in s.lanes.values()]
        assert len(held) == 25
        assert sum(held) == 64
        assert max(held) <= 8
        for number in range(1, 50, 2):
            rig.connector.release(number)

    rig.run(test)


@pytest.mark.parametrize("path", ["success", "miss", "error", "timeout", "abort", "expiry"])
def test_R2_pins_and_tokens_come_back_on_every_path(make_rig: MakeRig, path: str) -> None:
    rules = {
        "error": FaultRule(point="fabric.read", kind="down"),
        "miss": FaultRule(point="fabric.read", kind="corrupt"),
        "timeout": FaultRule(point="ssd.read", kind="delay", delay_s=30.0),
    }
    rig = make_rig(fault_plan=faults(*[rules[path]] if path in rules else []))

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys)
        for number in range(1, 4):
            await rig.lookup(number, keys)
            ticket = rig.connector.submit_load(number, keys, [rig.empty() for _ in keys])
            if path == "abort":
                await rig.clock.sleep(number * 1e-3)
            elif path == "expiry":
                await rig.clock.sleep(12)
                assert rig.node.at_rest()["pins"] == 0
            else:
                await ticket.done.wait()
            rig.connector.release(number)
            await rig.clock.sleep(0.001)
            assert rig.node.at_rest()["pins"] == 0
            assert rig.node.at_rest()["read tokens"] == 0
            assert not any(rig.master.at_rest().values())

    rig.run(test, settle_s=65 if path == "timeout" else 1)


def test_R3_what_nobody_uses_can_be_evicted(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=40 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        keys = chain(32)
        await rig.stored(keys)
        for number in range(6):
            await rig.lookup(number, keys)
            rig.connector.submit_load(number, keys, [rig.empty() for _ in keys])
            await rig.clock.sleep(number * 1e-3)
            rig.connector.release(number)
        await rig.clock.sleep(0.1)
        for number in range(1, 6):
            await rig.stored(chain(32, number))
        assert not any(rig.place(key) for key in keys)

    rig.run(test)


def test_R4_a_put_whose_client_is_killed_is_reclaimed_and_its_key_is_free_again(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(workers=2)

    async def test() -> None:
        keys = chain(3)
        reply = rig.master.allocate(next(rig.tickets), keys, rig.size)
        answers = rig.node.reserve(keys, rig.size)
        first, second, _ = [a for a in answers if isinstance(a, Grant)]
        pair = rig.queue_pairs[0][0]
        trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
        await pair.write(first.rkey, first.address, rig.content(first.key), trailer)
        rig.node.commit([first.token])
        # The client is killed here. Until the deadline nobody else gets the keys, ...
        assert (await rig.store(keys, worker=1)).results == (EXISTS,) * 3
        await rig.clock.sleep(11.1)
        # ... then its rkeys are dead, its space and its keys are free.
        assert not any(rig.master.at_rest().values())
        assert rig.node.at_rest()["reservations"] == 0
        late = await pair.write(second.rkey, second.address, rig.content(second.key), trailer)
        assert late.status in (Status.BAD_RKEY, Status.REVOKED)
        assert (await rig.store(keys, worker=1)).results == (STORED,) * 3
        assert rig.master.register(reply.ticket, []) == []

    rig.run(test)


def test_R5_what_a_node_was_being_given_when_it_stopped_answering_is_reclaimed(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="control", kind="down", where="node0", skip=1)
    rig = make_rig(nodes=2, fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(6)
        assert (await rig.store(keys)).results == (ERROR,) * 6
        await rig.clock.sleep(0.01)
        assert rig.master.at_rest()["writing slots"] == 0
        assert (await rig.store(keys)).results == (STORED,) * 6  # on the other node
        assert {rig.place(key) for key in keys} == {(1, 0)}
        assert await rig.read(keys) == 6

    rig.run(test)


def test_R6_close_ends_at_once_though_the_device_hangs(make_rig: MakeRig) -> None:
    rule = FaultRule(point="ssd.read", kind="delay", delay_s=600.0)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(8)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        ticket = rig.connector.submit_load(1, keys, [rig.empty() for _ in keys])
        await rig.clock.sleep(0.1)
        began = rig.clock.now()
        await rig.connector.close()
        assert rig.clock.now() - began < 0.01
        assert set(ticket.done.peek().results) <= {KeyResult.CANCELLED, MISS}

    rig.run(test, settle_s=700)


def test_R7_a_short_write_is_noticed_and_nothing_of_it_stays_findable(make_rig: MakeRig) -> None:
    rig = real(make_rig, fault_plan=faults(FaultRule(point="ssd.write", kind="short")))

    async def test() -> None:
        keys = chain(4)
        await rig.store(keys)
        await rig.quiesce()
        assert await rig.read(keys) == 0
        assert len(rig.master.table) == 0
        assert rig.node.allocators[0].live_extents == 0

    rig.run(test)


def test_R8_a_deadline_ends_who_waits_for_the_device_and_waits_for_nobody(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="ssd.read", kind="delay", delay_s=30.0)
    rig = make_rig(fault_plan=faults(rule), lease_s=5.0)

    async def test() -> None:
        keys = chain(20)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        began = rig.clock.now()
        done = await rig.load(1, keys)
        assert rig.clock.now() - began <= 10.0
        assert done.leading_hits == 0
        assert rig.node.at_rest()["pins"] == 0  # while the SSD still hangs
        rig.connector.release(1)

    rig.run(test, settle_s=40)


# -- clients --------------------------------------------------------------------------------------


def test_T1_a_client_that_stops_reading_holds_up_nobody(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(prefetch_depth=16), workers=2)

    async def test() -> None:
        stalled, lively = chain(40, 1), chain(40, 2)
        await rig.stored(stalled)
        await rig.stored(lively)
        for number in range(4):
            await rig.lookup(number, stalled, worker=0)  # and never loads
        began = rig.clock.now()
        assert await rig.read(lively, worker=1) == 40
        assert rig.clock.now() - began < 0.5
        await rig.clock.sleep(12)
        assert rig.node.at_rest()["streams"] == 0  # cleared away, released or not
        for number in range(4):
            rig.connector.release(number)

    rig.run(test)


def test_H5_H8_a_block_that_stays_unreadable_is_one_miss_and_is_stored_again(
    make_rig: MakeRig,
) -> None:
    """Its file is cut off: the device fails each time. No turn after the first announces it."""
    rig = make_rig()

    async def test() -> None:
        keys = chain(8)
        await rig.stored(keys)
        bad = rig.node.index[keys[2]].address
        read = rig.device.ssds.read

        async def broken(address: int, *args: Any, **options: Any) -> None:
            if address == bad:
                raise DeviceError(Status.IO_ERROR, "the file is cut off")
            await read(address, *args, **options)

        rig.device.ssds.read = broken  # type: ignore[method-assign]
        assert (await rig.lookup(1, keys)).leading_hits == 8
        assert (await rig.load(1, keys)).leading_hits == 2
        rig.connector.release(1)
        await rig.clock.sleep(0.1)
        assert (await rig.lookup(2, keys)).leading_hits == 2
        assert (await rig.store(keys[2:], request=2)).results[0] is KeyResult.STORED
        rig.connector.release(2)
        assert rig.node.index[keys[2]].address != bad
        assert await rig.read(keys) == 8

    rig.run(test)
