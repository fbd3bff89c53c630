"""Master on nodes that only take note: leases, writes, age, space."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.hymcache.master import AllocateReply, Master, NodePolicy, RemoteBlock
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import MIB, Rig, chain

SIZE = 16 * MIB
MakeRig = Callable[..., Rig]


@dataclass(frozen=True)
class Room:
    capacity_bytes: int
    extent_bytes: int
    free_bytes: int
    dead_bytes: int = 0


@dataclass
class Note:
    """A node that takes note of what Master tells it; its devices have all the room it says."""

    node: int = 0
    device_count: int = 1
    room: dict[int, int] = field(default_factory=dict)
    capacity: int = 1 << 40
    freed: list[tuple[bytes, int]] = field(default_factory=list)
    published: list[tuple[bytes, int, int]] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)
    segments: list[list[bytes]] = field(default_factory=list)

    def space(self, device: int, size_bytes: int) -> Room:
        return Room(self.capacity, size_bytes, self.room.get(device, self.capacity))

    def publish(self, key: bytes, address: int, generation: int) -> bool:
        self.published.append((key, address, generation))
        return key not in self.lost

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        self.freed.extend(objects)
        self.room = {d: room + SIZE * len(objects) for d, room in self.room.items()}

    def emptiest(self, device: int, size_bytes: int) -> Iterator[list[bytes]]:
        yield from self.segments


class Bench:
    """A Master on noting nodes."""

    def __init__(self, *nodes: Note, max_objects: int = 1000, **options: Any) -> None:
        self.clock = VirtualClock()
        self.nodes = {note.node: note for note in nodes or (Note(),)}
        self.master = Master(self.clock, self.nodes, max_objects=max_objects, **options)
        self.generation = 0
        self.tickets = count(1)

    def allocate(self, keys: Sequence[bytes], **options: Any) -> AllocateReply:
        return self.master.allocate(next(self.tickets), keys, SIZE, **options)

    def blocks(self, reply: AllocateReply, keys: Sequence[bytes]) -> list[RemoteBlock]:
        made = []
        for key in keys:
            self.generation += 1
            address = self.generation * SIZE
            made.append(
                RemoteBlock(key, reply.node, reply.device or 0, address, SIZE, self.generation)
            )
        return made

    def put(self, keys: Sequence[bytes], **options: Any) -> list[RemoteBlock]:
        reply = self.allocate(keys, **options)
        made = self.blocks(reply, keys)
        assert self.master.register(reply.ticket, made, chain=keys) == [KeyResult.STORED] * len(
            keys
        )
        return made

    def ready(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys a reader finds (and gives back at once)."""
        reply = self.master.lookup("probe", keys)
        self.master.release("probe")
        return [block is not None for block in reply.blocks]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.clock.run(work)
            assert not any(self.master.at_rest().values()), self.master.at_rest()
            self.master.table.check()
        finally:
            self.clock.close()


# -- reads ----------------------------------------------------------------------------------------


def test_every_key_gets_its_own_answer() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(5)
        made = bench.put([keys[0], keys[2], keys[4]])
        reply = bench.master.lookup("reader", keys)
        assert reply.blocks == (made[0], None, made[1], None, made[2])
        assert reply.lease_until_s == 11.0
        bench.master.release("reader")

    bench.run(test())


def test_a_block_that_is_being_written_or_evicted_is_not_found() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(2)
        reply = bench.allocate(keys[:1])
        assert bench.ready(keys[:1]) == [False]
        bench.master.abort(reply.ticket)
        bench.put(keys[1:])
        bench.master.lookup("reader", keys[1:])
        bench.master.evict(keys[1:])
        assert bench.ready(keys[1:]) == [False]
        bench.master.release("reader")

    bench.run(test())


def test_extents_under_a_lease_come_back_when_the_last_lease_has_ended() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(2)
        made = bench.put(keys)
        bench.master.lookup("first", keys)
        bench.master.lookup("second", keys[:1])
        bench.master.evict(keys)
        assert bench.nodes[0].freed == []
        bench.master.release("first")
        assert bench.nodes[0].freed == [(keys[1], made[1].generation)]
        bench.master.release("second")
        assert bench.nodes[0].freed[1:] == [(keys[0], made[0].generation)]

    bench.run(test())


def test_a_lease_ends_by_itself() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(1)
        bench.put(keys)
        bench.master.lookup("reader", keys)
        bench.master.evict(keys)
        await bench.clock.sleep(10.9)
        assert bench.nodes[0].freed == []
        await bench.clock.sleep(0.2)
        assert len(bench.nodes[0].freed) == 1
        assert bench.master.counters.leases_expired == 1

    bench.run(test())


def test_a_later_lookup_of_the_same_reader_extends_its_lease_also_without_a_hit() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(2)
        bench.put(keys[:1])
        bench.master.lookup("reader", keys[:1])
        await bench.clock.sleep(6)
        reply = bench.master.lookup("reader", keys[1:])
        assert reply.lease_until_s == 17.0
        bench.master.evict(keys[:1])
        await bench.clock.sleep(10.5)
        assert bench.nodes[0].freed == []
        await bench.clock.sleep(1)
        assert len(bench.nodes[0].freed) == 1

    bench.run(test())


def test_a_name_that_is_used_again_gets_a_lease_of_its_own_length() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(1)
        bench.put(keys)
        bench.master.lookup("reader", keys)
        await bench.clock.sleep(6)
        bench.master.release("reader")
        bench.master.lookup("reader", keys)
        await bench.clock.sleep(6)  # the alarm of the first lease has rung
        bench.master.evict(keys)
        assert bench.nodes[0].freed == []
        await bench.clock.sleep(5.1)
        assert len(bench.nodes[0].freed) == 1

    bench.run(test())


def test_clients_get_different_numbers() -> None:
    bench = Bench()
    assert bench.master.join() != bench.master.join()
    bench.clock.close()


# -- writes ---------------------------------------------------------------------------------------


def test_one_of_two_writers_gets_the_key() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(2)
        first = bench.allocate(keys[:1])
        second = bench.allocate(keys)
        assert first.refusals == (None,)
        assert second.refusals == (KeyResult.EXISTS, None)
        bench.master.abort(first.ticket)
        assert bench.allocate(keys[:1]).refusals == (None,)
        bench.master.abort(3)
        bench.master.abort(second.ticket)

    bench.run(test())


def test_a_writer_cannot_abort_or_register_for_another() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(1)
        reply = bench.allocate(keys)
        made = bench.blocks(reply, keys)
        bench.master.abort(reply.ticket + 1)
        assert bench.master.register(reply.ticket + 1, made) == [KeyResult.LEASE_EXPIRED]
        assert bench.nodes[0].published == []
        assert bench.master.register(reply.ticket, made) == [KeyResult.STORED]
        bench.master.abort(reply.ticket)
        assert bench.ready(keys) == [True]

    bench.run(test())


def test_a_write_that_is_not_registered_in_time_frees_its_key() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(2)
        late = bench.allocate(keys)
        await bench.clock.sleep(11.1)
        assert bench.master.counters.writes_expired == 2
        again = bench.allocate(keys)
        assert again.refusals == (None, None)
        made = bench.blocks(late, keys)
        assert bench.master.register(late.ticket, made) == [KeyResult.LEASE_EXPIRED] * 2
        assert bench.nodes[0].published == []
        assert bench.ready(keys) == [False, False]
        assert (
            bench.master.register(again.ticket, bench.blocks(again, keys)) == [KeyResult.STORED] * 2
        )

    bench.run(test())


def test_after_a_block_that_is_gone_the_tail_is_not_registered() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(3)
        bench.nodes[0].lost = {keys[1]}
        reply = bench.allocate(keys)
        answers = bench.master.register(reply.ticket, bench.blocks(reply, keys), chain=keys)
        assert answers == [KeyResult.STORED, KeyResult.LEASE_EXPIRED, KeyResult.LEASE_EXPIRED]
        assert bench.ready(keys) == [True, False, False]
        assert [key for key, *_ in bench.nodes[0].published] == keys[:2]
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_a_key_on_its_way_out_is_refused_with_all_that_follows_it() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(4)
        bench.put(keys[:2])
        bench.master.lookup("reader", keys[1:2])
        bench.master.evict(keys[1:2])
        reply = bench.allocate(keys)
        assert reply.refusals == (KeyResult.EXISTS, *[KeyResult.NO_SPACE] * 3)
        bench.master.release("reader")
        reply = bench.allocate(keys)
        assert reply.refusals == (KeyResult.EXISTS, None, None, None)
        bench.master.abort(reply.ticket)

    bench.run(test())


# -- where a chain goes ---------------------------------------------------------------------------


def test_requests_take_the_nodes_in_turn() -> None:
    bench = Bench(Note(0), Note(3), Note(7))

    async def test() -> None:
        nodes = []
        for number in range(4):
            reply = bench.allocate(chain(2, number))
            nodes.append((reply.node, reply.device))
            bench.master.abort(reply.ticket)
        assert nodes == [(0, None), (3, None), (7, None), (0, None)]

    bench.run(test())


def test_the_node_with_the_most_room_is_taken() -> None:
    nodes = Note(0, room={0: 10 * SIZE}), Note(1, room={0: 30 * SIZE}), Note(2, room={0: 20 * SIZE})
    bench = Bench(*nodes, policy=NodePolicy.MOST_FREE, low_water=0, high_water=0)

    async def test() -> None:
        assert bench.allocate([]).node == 1

    bench.run(test())


def test_a_chain_goes_on_where_its_last_hit_is() -> None:
    bench = Bench(Note(0), Note(1, device_count=4))

    async def test() -> None:
        reply = bench.allocate(chain(2), near=(1, 3))
        assert (reply.node, reply.device) == (1, 3)
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_a_chain_goes_on_where_its_leading_blocks_are_already() -> None:
    bench = Bench(Note(0), Note(1, device_count=4))

    async def test() -> None:
        keys = chain(6)
        bench.put(keys[:3], near=(1, 2))
        bench.put(keys[4:5], near=(0, 0))
        reply = bench.allocate(keys)
        assert (reply.node, reply.device) == (1, 2)
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_a_chain_goes_on_after_a_block_that_the_engine_had_itself() -> None:
    bench = Bench(Note(0), Note(1, device_count=4))

    async def test() -> None:
        keys = chain(6)
        bench.put(keys[:3], near=(1, 2))
        reply = bench.allocate(keys[3:], after=keys[2])
        assert (reply.node, reply.device) == (1, 2)
        bench.master.abort(reply.ticket)

    bench.run(test())


# -- age ------------------------------------------------------------------------------------------


def test_using_a_chain_makes_its_head_the_newest_and_its_tail_the_oldest_of_it() -> None:
    bench = Bench()

    async def test() -> None:
        first, second = chain(4, 1), chain(4, 2)
        bench.put(first)
        bench.put(second)
        bench.master.lookup("reader", first[2:], used=first[:2])
        bench.master.release("reader")
        order = list(bench.master.table.oldest_first())
        assert order == [*reversed(second), *reversed(first)]

    bench.run(test())


def test_a_tail_that_is_stored_later_is_older_than_its_head() -> None:
    bench = Bench()

    async def test() -> None:
        keys = chain(6)
        bench.put(keys[:3])
        reply = bench.allocate(keys[3:])
        bench.master.register(reply.ticket, bench.blocks(reply, keys[3:]), chain=keys)
        assert list(bench.master.table.oldest_first()) == list(reversed(keys))

    bench.run(test())


# -- space ----------------------------------------------------------------------------------------


def test_under_the_low_water_mark_tails_of_the_coldest_chains_go_first() -> None:
    bench = Bench(Note(capacity=100 * SIZE), low_water=0.04, high_water=0.08)

    async def test() -> None:
        cold, warm = chain(10, 1), chain(10, 2)
        bench.put(cold)
        bench.put(warm)
        bench.nodes[0].room = {0: 3 * SIZE}
        reply = bench.allocate(chain(1, 3))
        assert [key for key, _ in bench.nodes[0].freed] == list(reversed(cold))[:5]
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_above_the_low_water_mark_nothing_is_evicted() -> None:
    bench = Bench(Note(capacity=100 * SIZE, room={0: 4 * SIZE}))

    async def test() -> None:
        bench.put(chain(10, 1))
        reply = bench.allocate(chain(4, 2))
        assert reply.refusals == (None,) * 4
        assert bench.nodes[0].freed == []
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_what_is_under_a_lease_is_no_victim() -> None:
    bench = Bench(Note(capacity=100 * SIZE))

    async def test() -> None:
        cold, warm = chain(10, 1), chain(10, 2)
        bench.put(cold)
        bench.put(warm)
        bench.master.lookup("reader", cold)
        bench.master.table.touch(warm)
        bench.nodes[0].room = {0: 0}
        for number in range(5):
            reply = bench.allocate(chain(1, 3 + number))
            bench.master.abort(reply.ticket)
        assert [key for key, _ in bench.nodes[0].freed] == list(reversed(warm))[:8]
        assert bench.master.at_rest()["evicting slots"] == 0
        bench.master.release("reader")

    bench.run(test())


def test_then_whole_segments_go_but_none_with_a_block_that_is_read() -> None:
    bench = Bench(Note(capacity=100 * SIZE), low_water=0.04, high_water=0.04)

    async def test() -> None:
        keys = chain(12)
        bench.put(keys)
        node = bench.nodes[0]
        node.segments = [keys[:4], keys[4:8], keys[8:]]
        bench.master.lookup("reader", keys[:1])

        class Crowded(Note):
            def space(self, device: int, size_bytes: int) -> Room:
                free = 4 * SIZE if len(node.freed) >= 4 else 0
                return Room(100 * SIZE, SIZE, free, 100 * SIZE)

        node.__class__ = Crowded
        reply = bench.allocate(chain(1, 2))
        assert [key for key, _ in node.freed] == keys[4:8]
        assert bench.master.counters.evicted_by_segment == 4
        bench.master.abort(reply.ticket)
        bench.master.release("reader")

    bench.run(test())


def test_an_object_that_fits_no_device_evicts_nothing() -> None:
    bench = Bench(Note(capacity=SIZE - 1, room={0: 0}))

    async def test() -> None:
        bench.put(chain(5, 1))
        reply = bench.allocate(chain(1, 2))
        assert bench.nodes[0].freed == []
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_a_full_table_evicts_its_coldest_entries_and_no_more_than_needed() -> None:
    bench = Bench(max_objects=20)

    async def test() -> None:
        keys = chain(20, 1)
        bench.put(keys)
        reply = bench.allocate(chain(3, 2))
        assert reply.refusals == (None,) * 3
        assert [key for key, _ in bench.nodes[0].freed] == list(reversed(keys))[:3]
        bench.master.abort(reply.ticket)

    bench.run(test())


def test_a_table_full_of_leased_entries_refuses_the_tail_and_evicts_none() -> None:
    bench = Bench(max_objects=20)

    async def test() -> None:
        keys = chain(20, 1)
        bench.put(keys)
        bench.master.lookup("reader", keys[:19])
        reply = bench.allocate(chain(3, 2))
        assert reply.refusals == (None, KeyResult.NO_SPACE, KeyResult.NO_SPACE)
        bench.master.abort(reply.ticket)
        bench.master.release("reader")

    bench.run(test())


def test_a_chain_does_not_evict_itself_from_a_full_table() -> None:
    bench = Bench(max_objects=8)

    async def test() -> None:
        keys = chain(12)
        bench.put(keys[:8])
        reply = bench.allocate(keys)
        assert reply.refusals == (*[KeyResult.EXISTS] * 8, *[KeyResult.NO_SPACE] * 4)

    bench.run(test())


# -- objects that are gone ------------------------------------------------------------------------


def test_what_is_gone_is_not_found_any_more() -> None:
    bench = Bench()

    async def test() -> None:
        (block,) = bench.put(chain(1))
        bench.master.gone(block.node, block.key, block.generation)
        assert bench.ready([block.key]) == [False]
        assert bench.master.counters.dropped == 1

    bench.run(test())


@pytest.mark.parametrize(("node", "generation"), [(0, 2), (1, 1)])
def test_a_late_word_about_another_object_of_the_key_is_ignored(node: int, generation: int) -> None:
    bench = Bench()

    async def test() -> None:
        (block,) = bench.put(chain(1))
        bench.master.gone(node, block.key, generation)
        assert bench.ready([block.key]) == [True]

    bench.run(test())


def test_a_late_word_about_an_old_object_does_not_disturb_the_writer_of_a_new_one() -> None:
    bench = Bench()

    async def test() -> None:
        (old,) = bench.put(chain(1))
        bench.master.evict([old.key])
        reply = bench.allocate([old.key])
        bench.master.gone(old.node, old.key, old.generation)
        answers = bench.master.register(reply.ticket, bench.blocks(reply, [old.key]))
        assert answers == [KeyResult.STORED]

    bench.run(test())


def test_water_marks_are_checked() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"low_water <= high_water < 1, got 0\.5, 0\.2"):
        Master(clock, {}, max_objects=1, low_water=0.5, high_water=0.2)
    clock.close()


# -- on the emulated device -----------------------------------------------------------------------

EXTENT = SIZE + 4096


def test_a_full_device_goes_on_storing_and_keeps_heads(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=100 * EXTENT, segment=5 * EXTENT)

    async def test() -> None:
        chains = [chain(20, number) for number in range(12)]  # 240 blocks for a device of 100
        for keys in chains:
            await rig.stored(keys)
        kept = [[rig.place(key) is not None for key in keys] for keys in chains]
        assert all(kept[-1])
        assert all(kept[-2])
        assert all(kept[-3])
        for blocks in kept:
            # A chain loses its tail: what is left of it is a prefix.
            assert blocks == sorted(blocks, reverse=True)
        assert 80 <= sum(map(sum, kept)) <= 100
        assert rig.master.counters.evicted >= 140

    rig.run(test)


def test_eviction_spares_what_is_read_right_now(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=60 * EXTENT, segment=5 * EXTENT)

    async def test() -> None:
        old = chain(20, 1)
        await rig.stored(old)
        found = await rig.lookup(1, old)
        assert found.leading_hits == 20
        for number in range(2, 8):
            await rig.stored(chain(20, number))
        done = await rig.load(1, old)
        assert done.leading_hits == 20
        rig.connector.release(1)

    rig.run(test)
