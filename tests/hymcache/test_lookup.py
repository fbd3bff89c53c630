"""Lookup: batches to Master, the prefetch hint to the node, and what is announced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from cxlbench.emu.faults import FaultRule
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.hymcache.kv_manager import KvManager
from cxlbench.hymcache.master import LookupReply, Master
from cxlbench.hymcache.node_service import NodeService
from cxlbench.hymcache.prefetch_window import ReadStream
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import MIB, Rig, chain, faults

MakeRig = Callable[..., Rig]
HIT, MISS, ERROR = KeyResult.HIT, KeyResult.MISS, KeyResult.ERROR


class WatchedMaster(Master):
    """Notes when it was asked for how many keys."""

    def lookup(
        self, reader: Hashable, keys: Sequence[bytes], *, used: Sequence[bytes] = ()
    ) -> LookupReply:
        self.asked = getattr(self, "asked", [])
        self.asked.append((self.clock.now(), len(keys), len(used)))
        return super().lookup(reader, keys, used=used)


class WatchedNode(KvManager):
    """Notes the hints that it got and the streams that it opened."""

    def open_stream(
        self,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float | None = None,
        onto: ReadStream | None = None,
    ) -> ReadStream:
        stream = super().open_stream(request_id, keys, until_s=until_s, onto=onto)
        self.hints = getattr(self, "hints", [])
        self.hints.append((self.clock.now(), tuple(keys), stream))
        return stream


@pytest.fixture
def make_watched(make_rig: MakeRig) -> MakeRig:
    def make(**options: Any) -> Rig:
        return make_rig(master_type=WatchedMaster, manager_type=WatchedNode, **options)

    return make


def batches(rig: Rig) -> list[int]:
    return [keys for _, keys, _ in rig.master.asked]  # type: ignore[attr-defined]


async def spread(rig: Rig, keys: Sequence[bytes], *places: tuple[int, int, int]) -> None:
    """Store (blocks, node, device) after each other, so that a chain spans them."""
    begin = 0
    for blocks, node, device in places:
        await rig.store_at(keys[begin : begin + blocks], node, device)
        begin += blocks


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(1, [1]), (5, [5]), (32, [32]), (33, [32, 1]), (70, [32, 32, 6])],
)
def test_keys_go_to_master_in_batches_of_at_most_32(
    make_watched: MakeRig, blocks: int, expected: list[int]
) -> None:
    rig = make_watched()

    async def test() -> None:
        keys = chain(blocks)
        await rig.stored(keys)
        rig.master.asked = []  # type: ignore[attr-defined]
        done = await rig.lookup(1, keys)
        assert done.results == (HIT,) * blocks
        assert batches(rig) == expected
        rig.connector.release(1)

    rig.run(test)


def test_a_batch_does_not_wait_to_fill(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        costs = rig.control.costs
        await rig.lookup(1, chain(5))
        sent = costs.control_round_trip / 2 + costs.lookup_call + 5 * costs.lookup_key
        assert rig.master.asked == [(pytest.approx(sent), 5, 0)]  # type: ignore[attr-defined]
        assert rig.clock.now() == pytest.approx(sent + costs.control_round_trip / 2)
        rig.connector.release(1)

    rig.run(test)


def test_requests_do_not_share_or_wait_for_batches(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        works = [rig.lookup(number, chain(3, number)) for number in range(1, 5)]
        await rig.clock.gather(*works)
        assert batches(rig) == [3, 3, 3, 3]
        assert len({at for at, _, _ in rig.master.asked}) == 1  # type: ignore[attr-defined]
        for number in range(1, 5):
            rig.connector.release(number)

    rig.run(test)


def test_after_a_miss_master_is_not_asked_for_the_rest(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        keys = chain(100)
        await rig.stored(keys[:10])
        await rig.stored(keys[11:40])
        rig.master.asked = []  # type: ignore[attr-defined]
        done = await rig.lookup(1, keys)
        assert done.results == (HIT,) * 10 + (MISS,) * 90
        assert batches(rig) == [32]
        rig.connector.release(1)

    rig.run(test)


def test_blocks_that_the_engine_has_are_not_looked_up_but_count_as_used(
    make_watched: MakeRig,
) -> None:
    rig = make_watched()

    async def test() -> None:
        keys, other = chain(10), chain(10, 2)
        await rig.stored(keys)
        await rig.stored(other)
        rig.master.asked = []  # type: ignore[attr-defined]
        done = await rig.lookup(1, keys, matched=4)
        assert done.results == (HIT,) * 6
        assert [(n, used) for _, n, used in rig.master.asked] == [(6, 4)]  # type: ignore[attr-defined]
        assert list(rig.master.table.oldest_first())[10:] == list(reversed(keys))
        rig.connector.release(1)

    rig.run(test)


def test_a_chain_that_the_engine_has_whole_asks_nobody(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        done = await rig.lookup(1, chain(4), matched=4)
        assert done.results == ()
        assert not hasattr(rig.master, "asked")
        rig.connector.release(1)

    rig.run(test)


def test_a_batch_has_at_least_one_key(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            HyMCacheConnector(rig.clock, rig.connector.master, rig.connector.nodes, batch_keys=0)

    rig.run(test)


# -- the hint -------------------------------------------------------------------------------------


def test_prefetch_begins_before_the_suffix_is_looked_up(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        keys = chain(200)
        await rig.stored(keys)
        rig.master.asked = []  # type: ignore[attr-defined]
        await rig.lookup(1, keys)
        ((_, candidates, stream),) = rig.node.hints  # type: ignore[attr-defined]
        assert stream.first_issue_s < rig.master.asked[-1][0]  # type: ignore[attr-defined]
        assert stream.first_issue_s < rig.master.asked[2][0]  # type: ignore[attr-defined]
        assert candidates == tuple(keys)
        rig.connector.release(1)

    rig.run(test)


def test_a_miss_of_everything_hints_nobody(make_watched: MakeRig) -> None:
    rig = make_watched()

    async def test() -> None:
        await rig.lookup(1, chain(40))
        assert not hasattr(rig.node, "hints")
        rig.connector.release(1)

    rig.run(test)


def test_every_node_of_a_chain_gets_the_candidates_from_its_first_hit_on(
    make_watched: MakeRig,
) -> None:
    rig = make_watched(nodes=2)

    async def test() -> None:
        keys = chain(12)
        await spread(rig, keys, (4, 0, 0), (3, 1, 0), (5, 0, 0))
        for node in rig.nodes.values():
            node.hints = []  # type: ignore[attr-defined]
        done = await rig.lookup(1, keys)
        assert done.results == (HIT,) * 12
        first, third = rig.nodes[0].hints  # type: ignore[attr-defined]
        (second,) = rig.nodes[1].hints  # type: ignore[attr-defined]
        assert third[2] is first[2]  # one stream a node, whose windows are those of all its hits
        assert [len(hint[2]) for hint in (first, second)] == [4 + 5, 3]
        assert [hint[1] for hint in (first, second, third)] == [
            tuple(keys),
            tuple(keys[4:]),
            tuple(keys[7:]),
        ]
        assert (await rig.load(1, keys)).leading_hits == 12
        rig.connector.release(1)

    rig.run(test)


def test_a_chain_that_comes_back_to_a_node_has_one_window_there(make_rig: MakeRig) -> None:
    rig = make_rig(nodes=2)

    async def test() -> None:
        keys = chain(34)
        await spread(rig, keys, (5, 0, 0), (2, 1, 0), (20, 0, 0), (2, 1, 0), (5, 0, 0))
        await rig.quiesce()
        assert (await rig.lookup(1, keys)).results == (HIT,) * 34
        await rig.clock.sleep(1)
        assert [d.at_rest()["prefetch requests"] for d in rig.devices] == [8, 4]
        assert (await rig.load(1, keys)).leading_hits == 34
        assert rig.node.prefetcher.unstaged == 0
        rig.connector.release(1)

    rig.run(test)


def test_a_hint_that_is_overtaken_by_a_later_one_of_its_node_is_read_as_well(
    make_rig: MakeRig,
) -> None:
    rule = FaultRule(point="control", kind="delay", where="node0", delay_s=1.0, limit=1)
    rig = make_rig(nodes=2, fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(12)
        await spread(rig, keys, (4, 0, 0), (3, 1, 0), (5, 0, 0))
        assert (await rig.lookup(1, keys)).results == (HIT,) * 12
        assert rig.node.at_rest()["streams"] == 2
        assert (await rig.load(1, keys)).leading_hits == 12
        assert rig.node.prefetcher.unstaged == 0
        rig.connector.release(1)

    rig.run(test)


def test_only_an_open_stream_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    service = NodeService(rig.node)

    async def test() -> None:
        keys = chain(6)
        await rig.stored(keys)
        until_s = rig.clock.now() + 1.0
        first = service.open_stream((9, 1), 1, keys[:2], until_s=until_s)
        second = service.open_stream((9, 2), 1, keys[2:4], until_s=until_s, onto=(9, 1))
        assert (first.start, first.objects, second.start, second.objects) == (0, 2, 2, 2)
        assert rig.node.at_rest()["streams"] == 1
        unknown = service.open_stream((9, 3), 1, keys[4:], until_s=until_s, onto=(9, 7))
        assert (unknown.start, unknown.objects) == (0, 2)
        service.close_stream((9, 1))
        late = service.open_stream((9, 4), 1, keys[4:], until_s=until_s, onto=(9, 2))
        assert (late.start, late.objects) == (0, 2)
        service.drop_client(9)

    rig.run(test)


def test_a_stream_that_goes_on_ends_with_the_later_lease(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(2)
        await rig.stored(keys)
        stream = rig.node.open_stream(1, keys[:1], until_s=rig.clock.now() + 1.0)
        await rig.clock.sleep(0.5)
        rig.node.open_stream(1, keys[1:], until_s=rig.clock.now() + 1.0, onto=stream)
        await rig.clock.sleep(0.9)
        assert (await stream.ready(1)).key == keys[1]
        await rig.clock.sleep(0.2)
        assert stream.closed

    rig.run(test)


def test_a_chain_over_two_devices_of_a_node_has_one_hint_and_a_window_on_each(
    make_watched: MakeRig,
) -> None:
    rig = make_watched(devices=2)

    async def test() -> None:
        keys = chain(40)
        await spread(rig, keys, (20, 0, 0), (20, 0, 1))
        await rig.quiesce()
        rig.node.hints = []  # type: ignore[attr-defined]
        await rig.lookup(1, keys)
        assert len(rig.node.hints) == 1  # type: ignore[attr-defined]
        await rig.clock.sleep(1)
        assert [d.at_rest()["prefetch requests"] for d in rig.devices] == [8, 8]
        assert [d.staged_bytes for d in rig.devices] == [128 * MIB, 128 * MIB]
        assert (await rig.load(1, keys)).leading_hits == 40
        rig.connector.release(1)

    rig.run(test)


# -- what is announced ----------------------------------------------------------------------------


def test_only_what_the_node_has_is_announced(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        keys = chain(6)
        await rig.stored(keys)
        stored = rig.node.index[keys[3]]
        rig.node.free([(stored.key, stored.generation)])  # Master does not know yet
        done = await rig.lookup(1, keys)
        assert done.results == (HIT,) * 3 + (MISS,) * 3
        assert (await rig.load(1, keys)).leading_hits == 3
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        rig.master.evict([keys[3]])

    rig.run(test)


def test_master_down_is_an_error_and_no_miss(make_rig: MakeRig) -> None:
    rule = FaultRule(point="control", kind="down", where="master", skip=3)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(4)
        assert set((await rig.store(keys)).results) == {KeyResult.STORED}
        assert (await rig.lookup(1, keys)).results == (HIT,) * 4
        rig.connector.release(1)
        assert (await rig.lookup(2, keys)).results == (ERROR,) * 4
        assert (await rig.load(2, keys)).results == (MISS,) * 4
        rig.connector.release(2)
        assert rig.connector.counters.failed == 1

    rig.run(test)


def test_what_was_found_before_master_went_down_can_be_used(make_rig: MakeRig) -> None:
    keys = chain(70)
    rule = FaultRule(point="control", kind="down", where="master", skip=2 * 9 + 1)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        await rig.stored(keys)
        done = await rig.lookup(1, keys)
        assert done.results == (HIT,) * 32 + (ERROR,) * 38
        assert (await rig.load(1, keys[:32])).leading_hits == 32
        rig.connector.release(1)

    rig.run(test)


def test_a_node_that_is_down_announces_nothing(make_rig: MakeRig) -> None:
    rule = FaultRule(point="control", kind="down", where="node0", skip=2)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(4)
        await rig.store(keys)
        assert (await rig.lookup(1, keys)).results == (ERROR,) * 4
        assert (await rig.load(1, keys)).results == (MISS,) * 4
        rig.connector.release(1)

    rig.run(test)


def test_a_chain_is_announced_up_to_the_node_that_is_down(make_rig: MakeRig) -> None:
    rule = FaultRule(point="control", kind="down", where="node1")
    rig = make_rig(nodes=2, fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(9)
        await spread(rig, keys, (5, 0, 0), (4, 1, 0))
        assert (await rig.lookup(1, keys)).results == (HIT,) * 5 + (ERROR,) * 4
        assert (await rig.load(1, keys)).leading_hits == 5
        rig.connector.release(1)

    rig.run(test)


def test_a_hint_that_arrives_after_the_release_opens_nothing(make_watched: MakeRig) -> None:
    rule = FaultRule(point="control", kind="delay", where="node0", skip=2, delay_s=3.0)
    rig = make_watched(fault_plan=faults(rule))

    async def test() -> None:
        keys = chain(4)
        await rig.store(keys)
        rig.connector.submit_lookup(1, keys, rig.size)
        await rig.clock.sleep(1)
        rig.connector.release(1)
        await rig.clock.sleep(5)
        assert not hasattr(rig.node, "hints")

    rig.run(test)


def test_requests_of_different_workers_with_one_id_have_leases_of_their_own(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(workers=2)

    async def test() -> None:
        keys = chain(4)
        await rig.stored(keys)
        await rig.lookup(1, keys, worker=0)
        await rig.lookup(1, keys, worker=1)
        rig.connectors[0].release(1)
        await rig.clock.sleep(0.01)
        rig.master.evict(keys)
        assert rig.master.at_rest()["evicting slots"] == 4
        assert (await rig.load(1, keys, worker=1)).leading_hits == 4
        rig.connectors[1].release(1)

    rig.run(test)
