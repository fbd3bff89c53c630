"""The KV Manager on emulated devices: space, admission, commit, publication, reads, expiry."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache.kv_manager import Grant, KvManager, Placement
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import GIB, MIB, Rig, chain, faults, profile

SIZE = 16 * MIB
EXTENT = SIZE + PAGE_BYTES
MakeRig = Callable[..., Rig]


def grants(answers: Sequence[Grant | KeyResult]) -> list[Grant]:
    got = [answer for answer in answers if isinstance(answer, Grant)]
    assert len(got) == len(answers), f"not all were granted: {answers}"
    return got


def publish(node: KvManager, grant: Grant) -> bool:
    return node.publish(grant.key, grant.address, grant.generation)


def drop(node: KvManager, grant: Grant) -> None:
    node.free([(grant.key, grant.generation)])


async def write(rig: Rig, grant: Grant, size: int = SIZE) -> Status:
    trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
    pair = rig.queue_pairs[0][rig.node.node]
    done = await pair.write(grant.rkey, grant.address, rig.content(grant.key, size), trailer)
    return done.status


async def put(rig: Rig, keys: Sequence[bytes], size: int = SIZE) -> list[Grant]:
    """Write and publish blocks on the node alone, without Master."""
    got = grants(rig.node.reserve(keys, size))
    for grant in got:
        assert await write(rig, grant, size) is Status.OK
    assert set(rig.node.commit([grant.token for grant in got])) == {KeyResult.STORED}
    assert all(publish(rig.node, grant) for grant in got)
    return got


# -- reserve --------------------------------------------------------------------------------------


def test_a_full_write_buffer_refuses_at_once_and_later_admits(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB))  # a write buffer of 16 blocks

    async def test() -> None:
        keys = chain(20)
        before = rig.clock.now()
        answers = rig.node.reserve(keys, SIZE)
        assert rig.clock.now() == before
        assert [isinstance(answer, Grant) for answer in answers] == [True] * 16 + [False] * 4
        assert answers[16:] == [KeyResult.NO_SPACE] * 4
        rig.node.abort([answer.token for answer in answers if isinstance(answer, Grant)])
        again = grants(rig.node.reserve(keys[16:], SIZE))
        rig.node.abort([grant.token for grant in again])

    rig.run(test)


def test_after_a_refusal_the_rest_of_the_chain_is_refused_too(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB, demand_reserve=256 * MIB))

    async def test() -> None:
        big = grants(rig.node.reserve(chain(1, 1), 240 * MIB))
        keys = chain(3, 2)
        answers = rig.node.reserve(keys, 10 * MIB)
        assert isinstance(answers[0], Grant)
        assert answers[1:] == [KeyResult.NO_SPACE] * 2
        rig.node.abort([big[0].token, answers[0].token])

    rig.run(test)


class Narrow(CxlHm):
    """A device that can never hold a block of 16 MiB, and says so."""

    def admit(self, address: int, size_bytes: int) -> bool:
        if size_bytes >= SIZE:
            raise DeviceError(Status.BOUNDS, "too large an object")
        return super().admit(address, size_bytes)


def test_what_a_device_can_never_hold_is_an_error_with_all_that_follows(make_rig: MakeRig) -> None:
    rig = make_rig(make_device=functools.partial(Narrow, profile=profile()), capacity=40 * EXTENT)

    async def test() -> None:
        (there,) = await put(rig, chain(1), MIB)
        keys = [*chain(1, 2), there.key, *chain(2, 3)]
        free = rig.node.space(0, SIZE).free_bytes
        assert rig.node.reserve(keys, SIZE) == [
            KeyResult.ERROR,
            KeyResult.EXISTS,
            KeyResult.ERROR,
            KeyResult.ERROR,
        ]
        assert rig.node.space(0, SIZE).free_bytes == free
        drop(rig.node, there)
        stored = await rig.store(chain(40, 4))
        assert set(stored.results) == {KeyResult.ERROR}

    rig.run(test)


def test_a_block_that_the_demand_reserve_cannot_hold_is_refused_for_good(make_rig: MakeRig) -> None:
    reserve = 192 * MIB
    rig = make_rig(device=profile(demand_reserve=reserve))

    async def test() -> None:
        too_large = reserve + PAGE_BYTES
        assert rig.node.reserve(chain(2), too_large) == [KeyResult.ERROR] * 2
        assert rig.node.allocators[0].live_extents == 0

    rig.run(test)


def test_refused_writes_cost_no_space(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB), capacity=40 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        held = grants(rig.node.reserve(chain(16), SIZE))
        free = rig.node.space(0, SIZE).free_bytes
        for number in range(100):
            assert rig.node.reserve(chain(3, number + 1), SIZE) == [KeyResult.NO_SPACE] * 3
        assert rig.node.space(0, SIZE).free_bytes == free
        rig.node.abort([grant.token for grant in held])
        assert rig.node.space(0, SIZE).free_bytes == 40 * EXTENT

    rig.run(test)


def test_a_full_device_refuses_though_its_write_buffer_is_empty(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=4 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        answers = rig.node.reserve(chain(5), SIZE)
        assert answers[4] is KeyResult.NO_SPACE
        assert rig.device.at_rest()["write-buffer frames"] == 4 * 8
        rig.node.abort([answer.token for answer in answers if isinstance(answer, Grant)])

    rig.run(test)


def test_a_key_that_is_here_is_not_written_again(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(3)
        (grant,) = await put(rig, keys[1:2])
        answers = rig.node.reserve(keys, SIZE)
        assert answers[1] is KeyResult.EXISTS
        rig.node.abort([answer.token for answer in answers if isinstance(answer, Grant)])
        drop(rig.node, grant)

    rig.run(test)


def test_the_partition_of_the_dram_is_fixed(make_rig: MakeRig) -> None:
    rig = make_rig(device=profile(dram_capacity=2 * GIB, prefetch_depth=1000))

    async def test() -> None:
        # With nothing staged, the write buffer does not grow into the staging frames, ...
        held = [a for a in rig.node.reserve(chain(200), SIZE) if isinstance(a, Grant)]
        assert len(held) == 16
        rig.node.abort([grant.token for grant in held])
        # ... and with nothing buffered, staging does not grow into the write buffer.
        got = await put(rig, chain(16, 1))
        for number in range(2, 9):
            await rig.quiesce()
            got += await put(rig, chain(16, number))
        await rig.quiesce()
        streams = [
            rig.node.open_stream(number, [g.key for g in got[number * 8 : number * 8 + 8]])
            for number in range(16)
        ]
        reserve = rig.device.profile.demand_reserve
        assert rig.device.staged_bytes <= rig.device.staging_bytes - reserve
        assert rig.device.staged_bytes == 100 * SIZE  # (2 GiB - 256 MiB - 192 MiB) / 16 MiB
        for stream in streams:
            stream.close()
        rig.node.free([(grant.key, grant.generation) for grant in got])

    rig.run(test)


# -- placement ------------------------------------------------------------------------------------


def test_round_robin_takes_one_device_per_request(make_rig: MakeRig) -> None:
    rig = make_rig(devices=3)

    async def test() -> None:
        devices = []
        for number in range(6):
            got = grants(rig.node.reserve(chain(3, number), SIZE))
            assert len({grant.device for grant in got}) == 1
            devices.append(got[0].device)
            rig.node.abort([grant.token for grant in got])
        assert devices == [0, 1, 2, 0, 1, 2]

    rig.run(test)


def test_load_aware_takes_the_device_with_the_most_room(make_rig: MakeRig) -> None:
    rig = make_rig(devices=3, placement=Placement.LOAD_AWARE)

    async def test() -> None:
        first = grants(rig.node.reserve(chain(3, 1), SIZE))
        second = grants(rig.node.reserve(chain(1, 2), SIZE))
        third = grants(rig.node.reserve(chain(2, 3), SIZE))
        fourth = grants(rig.node.reserve(chain(1, 4), SIZE))
        assert [got[0].device for got in (first, second, third, fourth)] == [0, 1, 2, 1]
        for got in (first, second, third, fourth):
            rig.node.abort([grant.token for grant in got])

    rig.run(test)


def test_a_device_that_is_named_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(devices=3)

    async def test() -> None:
        got = grants(rig.node.reserve(chain(2), SIZE, device=2))
        assert {grant.device for grant in got} == {2}
        assert {rig.node.device_of(grant.address) for grant in got} == {2}
        rig.node.abort([grant.token for grant in got])

    rig.run(test)


def test_the_devices_of_a_node_are_one_address_space(make_rig: MakeRig) -> None:
    rig = make_rig(devices=2, capacity=100 * EXTENT)

    async def test() -> None:
        first = await put(rig, chain(2, 1))
        second = await put(rig, chain(2, 2))
        assert first[0].address == 0
        assert second[0].address == rig.node.bases[1]
        assert [rig.node.device_of(a) for a in (0, rig.node.bases[1] - 1, rig.node.bases[1])] == [
            0,
            0,
            1,
        ]
        with pytest.raises(ValueError, match="beyond the node"):
            rig.node.device_of(rig.node.bases[2])
        rig.node.free([(grant.key, grant.generation) for grant in first + second])

    rig.run(test)


def test_objects_of_several_sizes_share_a_device_in_segments_of_their_own(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device=profile(dram_capacity=64 * GIB))

    async def test() -> None:
        got: list[tuple[Grant, int]] = []
        for number in range(3):
            for size in (16 * MIB, 32 * MIB, 168 * MIB):
                keys = chain(3, number * 1000 + size)
                got += [(grant, size) for grant in await put(rig, keys, size)]
        spans = sorted((grant.address, grant.address + size + PAGE_BYTES) for grant, size in got)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        for grant, size in got:
            assert grant.address % PAGE_BYTES == 0
            assert rig.node.index[grant.key].size_bytes == size
        rig.node.free([(grant.key, grant.generation) for grant, _ in got])

    rig.run(test)


def test_placement_is_append_only(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=12 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        live: list[Grant] = []
        used: list[int] = []
        for number in range(40):
            (grant,) = await put(rig, chain(1, number))
            await rig.quiesce()
            assert grant.address not in used
            used.append(grant.address)
            live.append(grant)
            if len(live) > 3:
                drop(rig.node, live.pop(0))
            alive = {entry.address // (4 * EXTENT) for entry in live}
            used = [address for address in used if address // (4 * EXTENT) in alive]
        rig.node.free([(grant.key, grant.generation) for grant in live])

    rig.run(test)


# -- commit and publish ---------------------------------------------------------------------------


def test_an_object_is_found_only_once_it_is_published(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))

        def matched() -> int:
            stream = rig.node.open_stream(1, [grant.key])
            stream.close()
            return len(stream)

        assert matched() == 0
        assert not publish(rig.node, grant)
        assert await write(rig, grant) is Status.OK
        assert matched() == 0
        assert rig.node.commit([grant.token]) == [KeyResult.STORED]
        assert matched() == 0
        assert publish(rig.node, grant)
        assert matched() == 1
        assert not publish(rig.node, grant)
        drop(rig.node, grant)
        assert matched() == 0

    rig.run(test)


def test_what_was_not_written_cannot_be_committed(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        written, empty = grants(rig.node.reserve(chain(2), SIZE))
        await write(rig, written)
        tokens = [empty.token, written.token, 999]
        expected = [KeyResult.ERROR, KeyResult.STORED, KeyResult.LEASE_EXPIRED]
        assert rig.node.commit(tokens) == expected
        assert not publish(rig.node, empty)
        rig.node.abort([written.token])

    rig.run(test)


def test_a_commit_that_is_repeated_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))
        await write(rig, grant)
        assert rig.node.commit([grant.token]) == [KeyResult.STORED]
        assert rig.node.commit([grant.token]) == [KeyResult.STORED]
        rig.node.abort([grant.token])

    rig.run(test)


def test_an_object_that_was_committed_can_be_taken_back_until_it_is_published(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))
        await write(rig, grant)
        rig.node.commit([grant.token])
        rig.node.abort([grant.token])
        assert not publish(rig.node, grant)
        (again,) = await put(rig, [grant.key])
        rig.node.abort([again.token])
        assert grant.key in rig.node.index
        drop(rig.node, again)

    rig.run(test)


def test_of_two_writers_of_one_key_one_is_published(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        (first,) = grants(rig.node.reserve(chain(1), SIZE))
        (second,) = grants(rig.node.reserve(chain(1), SIZE))
        for grant in (first, second):
            await write(rig, grant)
        tokens = [first.token, second.token]
        assert rig.node.commit(tokens) == [KeyResult.STORED] * 2
        assert publish(rig.node, second)
        assert not publish(rig.node, first)
        rig.node.abort(tokens)
        assert rig.node.index[second.key].generation == second.generation
        drop(rig.node, second)

    rig.run(test)


def test_freeing_an_older_generation_leaves_the_newer_object(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        (old,) = await put(rig, chain(1))
        drop(rig.node, old)
        (new,) = await put(rig, chain(1))
        drop(rig.node, old)
        assert rig.node.index[new.key].generation == new.generation
        drop(rig.node, new)

    rig.run(test)


# -- the rkey of a reservation --------------------------------------------------------------------


def test_an_rkey_allows_its_extent_and_nothing_else(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        first, second = grants(rig.node.reserve(chain(2), SIZE))
        pair = rig.queue_pairs[0][0]
        wrong = await pair.write(first.rkey, second.address, rig.content(second.key))
        assert wrong.status is Status.BOUNDS
        readable = rig.node.regions[0].rkey
        refused = await pair.write(readable, first.address, rig.content(first.key))
        assert refused.status is Status.BAD_RKEY
        rig.node.abort([first.token, second.token])

    rig.run(test)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_write_after_the_end_of_its_reservation_is_refused(make_rig: MakeRig, end: str) -> None:
    rig = make_rig()

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))
        await write(rig, grant)
        if end == "commit":
            rig.node.commit([grant.token])
        else:
            rig.node.abort([grant.token])
        assert await write(rig, grant) is Status.BAD_RKEY
        rig.node.abort([grant.token])

    rig.run(test)


def test_a_reservation_that_expires_loses_its_rkey_before_its_space_is_reused(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="fabric.write", kind="delay", delay_s=9.9995, limit=1)
    rig = make_rig(fault_plan=faults(rule), capacity=EXTENT, segment=EXTENT)

    async def test() -> None:
        (late,) = grants(rig.node.reserve(chain(1, 1), SIZE))
        writing = rig.clock.spawn(write(rig, late))  # 670 us on the wire, across the deadline
        await rig.clock.sleep(10.0001)
        assert rig.node.expired_reservations == 1
        (reused,) = grants(rig.node.reserve(chain(1, 2), SIZE))
        assert reused.address == late.address
        assert await write(rig, reused) is Status.OK
        assert await writing is Status.REVOKED
        assert await write(rig, late) is Status.BAD_RKEY
        assert rig.node.commit([late.token, reused.token]) == [
            KeyResult.LEASE_EXPIRED,
            KeyResult.STORED,
        ]
        assert publish(rig.node, reused)
        assert await rig.node.open_stream(1, [reused.key]).ready(0)
        rig.node.prefetcher.close()
        drop(rig.node, reused)

    rig.run(test)


def test_what_was_committed_and_never_registered_expires_too(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))
        await write(rig, grant)
        rig.node.commit([grant.token])
        await rig.clock.sleep(10.1)
        assert rig.node.at_rest()["reservations"] == 0
        assert not publish(rig.node, grant)
        assert rig.node.allocators[0].live_extents == 0

    rig.run(test)


# -- reads and space ------------------------------------------------------------------------------


def test_a_stream_matches_the_leading_hits_in_order(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(6)
        got = await put(rig, [*keys[:3], *keys[4:]])
        stream = rig.node.open_stream(1, keys)
        assert [stored.key for stored in stream.objects] == keys[:3]
        stream.close()
        rig.node.free([(grant.key, grant.generation) for grant in got])

    rig.run(test)


def test_the_extent_of_a_freed_object_is_kept_while_a_stream_has_it(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=EXTENT, segment=EXTENT)

    async def test() -> None:
        (grant,) = await put(rig, chain(1))
        await rig.quiesce()
        stream = rig.node.open_stream(1, [grant.key])
        drop(rig.node, grant)
        assert rig.node.reserve(chain(1, 2), SIZE) == [KeyResult.NO_SPACE]
        assert (await stream.ready(0)).address == grant.address
        stream.close()
        (reused,) = grants(rig.node.reserve(chain(1, 2), SIZE))
        assert reused.address == grant.address
        rig.node.abort([reused.token])

    rig.run(test)


def test_a_stream_on_objects_that_were_freed_meanwhile_is_shorter(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        got = await put(rig, chain(4))
        drop(rig.node, got[2])
        stream = rig.node.open_stream(1, [grant.key for grant in got])
        assert len(stream) == 2
        stream.close()
        rig.node.free([(grant.key, grant.generation) for grant in got])

    rig.run(test)


def test_the_emptiest_segments_are_those_that_can_be_freed_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=16 * EXTENT, segment=4 * EXTENT)

    async def test() -> None:
        got = await put(rig, chain(12))
        pinned = rig.node.open_stream(1, [got[8].key])
        drop(rig.node, got[0])
        drop(rig.node, got[5])
        drop(rig.node, got[6])
        keys = [grant.key for grant in got]
        expected = [[keys[4], keys[7]], keys[1:4]]
        assert list(rig.node.emptiest(0, SIZE)) == expected
        pinned.close()
        assert list(rig.node.emptiest(0, SIZE)) == [*expected, keys[8:12]]
        rig.node.free([(grant.key, grant.generation) for grant in got])

    rig.run(test)


def test_a_node_forgets_and_reports_what_its_device_could_not_keep(make_rig: MakeRig) -> None:
    rule = FaultRule(point="ssd.write", kind="error", limit=3)
    rig = make_rig(fault_plan=faults(rule))
    gone: list[Any] = []

    async def test() -> None:
        rig.node.on_gone = lambda *what: gone.append(what)
        first, second = await put(rig, chain(2))
        await rig.quiesce()
        assert gone == [(0, first.key, first.generation)]
        assert list(rig.node.index) == [second.key]
        drop(rig.node, second)

    rig.run(test)


def test_an_object_lost_before_it_was_registered_is_never_published(make_rig: MakeRig) -> None:
    rule = FaultRule(point="ssd.write", kind="error", limit=3)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        (grant,) = grants(rig.node.reserve(chain(1), SIZE))
        await write(rig, grant)
        rig.node.commit([grant.token])
        await rig.quiesce()
        assert not publish(rig.node, grant)
        assert rig.node.allocators[0].live_extents == 0

    rig.run(test)


def test_closing_a_node_revokes_every_rkey(make_rig: MakeRig) -> None:
    rig = make_rig(devices=2)

    async def test() -> None:
        grants(rig.node.reserve(chain(3), SIZE))
        assert rig.fabric.registered == 5
        rig.node.abort([1, 2, 3])
        assert rig.fabric.registered == 2

    rig.run(test)
