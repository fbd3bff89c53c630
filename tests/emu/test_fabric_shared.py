"""READ and WRITE through shared memory: what the owner refuses, takes back, keeps for writers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Completion, Fabric, MemoryRegion, ObjectExtents
from cxlbench.emu.fabric_shared import (
    ArenaInfo,
    Done,
    GiveUp,
    GrantReply,
    PostRead,
    PostWrite,
    SharedQueuePair,
)
from cxlbench.emu.fabric_shared_owner import GRANTS, SharedCarrier
from cxlbench.emu.memory import PAGE_BYTES, Arena, page_ceil
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.shared_memory import SharedSegment, Words, attach
from cxlbench.emu.status import DeviceError, HostLimitError, Status
from cxlbench.emu.wire import MessageSet, WireError
from cxlbench.emu.wire_server import WireServer

FRAME = 2 * PAGE_BYTES
FRAMES = 32
TRAILER = PAGE_BYTES
SIZES = [1, 4095, FRAME, FRAME + 1, 5 * FRAME - 3]


def content(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def lasting(size: int) -> np.ndarray:
    return np.zeros(size, dtype=np.uint8)


@dataclass(eq=False)
class View:
    port: Pipe
    extents: ObjectExtents
    shelf: Shelf
    bookings: tuple[Any, ...] = ()
    closed: bool = False

    def copy_into(self, payload: Any, trailer: Any, digest: Any) -> None:
        raise AssertionError("another process copies")

    async def arrived(self) -> None:
        await self.shelf.slow()

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.shelf.pins -= 1


async def at_once() -> None:
    pass


@dataclass(eq=False)
class Shelf:
    """A target: objects at addresses, in frames scattered over an arena."""

    clock: WallClock
    arena: Arena
    port: Pipe
    latency_s: float = 0.0
    trailer_bytes: int = TRAILER
    trailer_cost_bytes: int = 8
    pins: int = 0
    objects: dict[int, ObjectExtents] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    slow: Callable[[], Awaitable[None]] = at_once
    _frame: int = 0

    def admit(self, address: int, size: int) -> None:
        """Make room: every second frame, so that nothing is in one piece."""
        count = -(-size // FRAME)
        frames = [(self._frame + 2 * i) % FRAMES for i in range(count)]
        self._frame += 2 * count
        payload = [(frame * FRAME, FRAME) for frame in frames]
        payload[-1] = (payload[-1][0], page_ceil(size - (count - 1) * FRAME))
        trailer = [(FRAMES * FRAME + len(self.objects) * TRAILER, TRAILER)]
        self.objects[address] = ObjectExtents(payload, trailer, size, TRAILER)

    def put(self, address: int, data: np.ndarray) -> None:
        self.admit(address, len(data))
        self.arena.store(self.objects[address].payload, data)
        self.arena.store(self.objects[address].trailer, np.full(TRAILER, 7, dtype=np.uint8))
        self.whole.add(address)

    async def open_read(self, address: int, size_bytes: int) -> View:
        if address not in self.whole:
            raise DeviceError(Status.NO_OBJECT, "nothing there")
        if self.objects[address].payload_bytes != size_bytes:
            raise DeviceError(Status.BOUNDS, "another size")
        self.pins += 1
        return View(self.port, self.objects[address], self)

    async def ready_to_receive(self, address: int) -> None:
        await self.slow()

    def receive(self, address: int, payload: Any, trailer: Any) -> None:
        raise AssertionError("another process writes")

    def landing(self, address: int) -> ObjectExtents:
        if address not in self.objects:
            raise DeviceError(Status.NO_OBJECT, "nothing admitted")
        return self.objects[address]

    def landed(self, address: int) -> None:
        if address not in self.objects:
            raise DeviceError(Status.NO_OBJECT, "nothing admitted")
        self.whole.add(address)


class Poster:
    """Reaches the owner by calls. ``between`` happens after it has answered, before we know."""

    def __init__(self, carrier: SharedCarrier, client: object) -> None:
        self.carrier = carrier
        self.client = client
        self.between: Callable[[], object] = lambda: None

    async def post_read(self, post: PostRead) -> GrantReply:
        reply = await self.carrier.post_read(self.client, post)
        self.between()
        return reply

    async def post_write(self, post: PostWrite) -> GrantReply:
        reply = await self.carrier.post_write(self.client, post)
        self.between()
        return reply

    async def landed(self, done: Done) -> Status:
        return self.carrier.done(self.client, done)

    def done(self, done: Done) -> None:
        self.carrier.done(self.client, done)

    def give_up(self, given_up: GiveUp) -> None:
        self.carrier.give_up(self.client, given_up)


class Rig:
    def __init__(self, clock: WallClock, folder: Path, first_serial: int = 1) -> None:
        self.clock = clock
        self.segment = SharedSegment(FRAMES * FRAME + 16 * TRAILER, name="arena", folder=folder)
        self.grants = SharedSegment(GRANTS * 8, name="grants", folder=folder)
        self.shelf = Shelf(clock, self.segment.arena(), Pipe(clock, "port", 1e12))
        self.fabric = Fabric(clock, seed=1)
        self.region = self.fabric.register(self.shelf, 1000, 1 << 30, offset=0)
        self.carrier = SharedCarrier(
            clock,
            self.fabric,
            arenas=[self.segment],
            grants=self.grants,
            arena_of=lambda region: 0,
            read_path=[],
            write_path=[],
            latency_s=0.0,
            first_serial=first_serial,
        )
        self.poster = Poster(self.carrier, "client")
        self.pair = SharedQueuePair(clock, self.poster, read_deadline_s=10.0)
        self.attach(self.pair)

    def attach(self, pair: SharedQueuePair) -> None:
        pair.attach(self.carrier.arenas, self.carrier.table_info)

    def other_client(self, name: str) -> tuple[Poster, SharedQueuePair]:
        poster = Poster(self.carrier, name)
        pair = SharedQueuePair(self.clock, poster)
        self.attach(pair)
        return poster, pair

    def read(self, address: int, size: int, **options: Any) -> tuple[Completion, np.ndarray]:
        data = lasting(size)
        rkey = options.pop("rkey", self.region.rkey)
        done = self.clock.run(self.pair.read(rkey, 1000 + address, data, **options))
        return done, data

    def writable(self, address: int, size: int) -> MemoryRegion:
        self.shelf.admit(address, size)
        room = page_ceil(size) + TRAILER
        return self.fabric.register(self.shelf, 5000, room, offset=address, writable=True)

    def write(self, region: MemoryRegion, data: np.ndarray, trailer: Any = None) -> Completion:
        return self.clock.run(self.pair.write(region.rkey, 5000, data, trailer))

    def close(self) -> None:
        self.pair.detach()
        self.carrier.close()
        self.shelf.arena.close()
        self.segment.close()
        self.grants.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with WallClock(shared=True) as clock:
        made = Rig(clock, tmp_path)
        yield made
        assert made.shelf.pins == 0
        assert made.carrier.granted == 0
        assert not made.carrier._asked
        assert not made.carrier.table.array.any()
        made.close()


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_read_gathers_an_object_and_its_trailer(rig: Rig, size: int) -> None:
    data = content(size)
    rig.shelf.put(0, data)
    trailer, seen = lasting(TRAILER), []
    done, got = rig.read(0, size, trailer=trailer, digest=lambda piece: seen.append(bytes(piece)))
    assert done.status is Status.OK
    assert done.nbytes == size + TRAILER
    assert np.array_equal(got, data)
    assert b"".join(seen) == data.tobytes()
    assert (trailer == 7).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_write_scatters_an_object_and_its_trailer(rig: Rig, size: int) -> None:
    region, data = rig.writable(0, size), content(size)
    done = rig.write(region, data, np.full(TRAILER, 9, dtype=np.uint8))
    assert done.status is Status.OK
    trailer = lasting(TRAILER)
    done, got = rig.read(0, size, trailer=trailer)
    assert done.status is Status.OK
    assert np.array_equal(got, data)
    assert (trailer == 9).all()


def test_a_write_without_a_trailer_leaves_none_of_its_predecessor(rig: Rig) -> None:
    region = rig.writable(0, 100)
    rig.shelf.arena.store(rig.shelf.objects[0].trailer, np.full(TRAILER, 3, dtype=np.uint8))
    assert rig.write(region, content(100)).status is Status.OK
    trailer = lasting(TRAILER) + 1
    rig.read(0, 100, trailer=trailer)
    assert not trailer.any()


def test_an_operation_ends_when_the_owners_hardware_has_moved_the_bytes(rig: Rig) -> None:
    rig.shelf.put(0, content(FRAME))
    rig.shelf.port = Pipe(rig.clock, "slow", FRAME / 0.05)
    rig.shelf.latency_s = 0.01
    begin_s = rig.clock.real()
    done, _ = rig.read(0, FRAME)
    assert 0.06 <= done.due_s - begin_s < 0.06 + 0.04


# -- what is refused -------------------------------------------------------------------------------


def test_a_wrong_or_revoked_rkey_is_refused(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    assert rig.read(0, 100, rkey=rig.region.rkey ^ 1)[0].status is Status.BAD_RKEY
    rig.fabric.revoke(rig.region)
    done, got = rig.read(0, 100)
    assert done.status is Status.BAD_RKEY
    assert not got.any()


def test_a_region_for_reading_takes_no_write(rig: Rig) -> None:
    rig.shelf.admit(0, 100)
    done = rig.clock.run(rig.pair.write(rig.region.rkey, 1000, content(100)))
    assert done.status is Status.BAD_RKEY


@pytest.mark.parametrize("address", [-1, (1 << 30) - 99])
def test_outside_of_the_region_is_refused(rig: Rig, address: int) -> None:
    assert rig.read(address, 100)[0].status is Status.BOUNDS


def test_another_size_than_the_objects_is_refused(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    assert rig.read(0, 101)[0].status is Status.BOUNDS
    region = rig.writable(FRAME, 100)
    assert rig.write(region, content(99)).status is Status.BOUNDS
    assert rig.write(region, content(100), lasting(TRAILER + 1)).status is Status.BOUNDS


def test_what_is_not_there_is_refused(rig: Rig) -> None:
    assert rig.read(0, 100)[0].status is Status.NO_OBJECT


def test_a_read_past_the_lease_is_refused_by_the_owner(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    done, got = rig.read(0, 100, until_s=rig.clock.real())
    assert done.status is Status.TIMEOUT
    assert not got.any()


def test_a_read_whose_lease_ends_while_the_object_is_staged_is_refused(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    until_s = rig.clock.real() + 0.02

    async def stage() -> None:
        await rig.clock.sleep_until(until_s)

    rig.shelf.slow = stage
    done, got = rig.read(0, 100, until_s=until_s)
    assert done.status is Status.TIMEOUT
    assert not got.any()


def test_a_client_that_has_mapped_nothing_has_no_link(rig: Rig) -> None:
    rig.pair.detach()
    assert rig.read(0, 100)[0].status is Status.LINK_DOWN
    assert rig.clock.run(rig.pair.write(1, 0, content(1))).status is Status.LINK_DOWN


def test_a_full_table_of_grants_refuses_until_one_comes_back(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    until_s = rig.clock.real() + 10

    def post(ask: int) -> GrantReply:
        post = PostRead(rig.region.rkey, 1000, 100, 0, until_s, ask)
        return rig.clock.run(rig.carrier.post_read("greedy", post))

    replies = [post(ask) for ask in range(GRANTS)]
    assert {reply.status for reply in replies} == {Status.OK}
    assert len({reply.slot for reply in replies}) == GRANTS
    assert post(GRANTS).status is Status.BUSY
    assert rig.read(0, 100)[0].status is Status.BUSY
    region = rig.writable(FRAME, 100)
    assert rig.write(region, content(100)).status is Status.BUSY
    rig.carrier.done("greedy", Done(replies[9].slot, replies[9].serial, landed=False))
    assert rig.read(0, 100)[0].status is Status.OK
    rig.carrier.drop_client("greedy")


def test_one_ask_is_granted_once(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    post = PostRead(rig.region.rkey, 1000, 100, 0, rig.clock.real() + 10, 1)
    first = rig.clock.run(rig.carrier.post_read("twice", post))
    assert first.status is Status.OK
    assert rig.clock.run(rig.carrier.post_read("twice", post)).status is Status.BUSY
    rig.carrier.done("twice", Done(first.slot, first.serial, landed=False))


# -- what is taken back ----------------------------------------------------------------------------


def test_a_grant_that_expired_while_it_was_copied_is_no_hit(rig: Rig) -> None:
    """The reader was stopped: the owner gave its frames away, and other bytes were copied."""
    rig.shelf.put(0, content(100, seed=1))

    def expire() -> None:
        (grant,) = rig.carrier._grants.values()
        rig.carrier._expire(grant)
        rig.shelf.arena.store(rig.shelf.objects[0].payload, content(100, seed=2))

    rig.poster.between = expire
    done, _ = rig.read(0, 100)
    assert done.status is Status.REVOKED
    assert done.nbytes == 0


def test_a_reader_is_not_fooled_by_the_next_grant_in_its_slot(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    replies: list[GrantReply] = []

    async def again() -> None:
        post = PostRead(rig.region.rkey, 1000, 100, 0, rig.clock.real() + 10, 1)
        replies.append(await rig.carrier.post_read("next", post))

    async def both() -> Completion:
        post = rig.poster.post_read

        async def expired(body: PostRead) -> GrantReply:
            reply = await post(body)
            rig.carrier._expire(rig.carrier._grants[reply.slot])
            await again()
            assert replies[0].slot == reply.slot
            return reply

        rig.poster.post_read = expired  # type: ignore[method-assign]
        return await rig.pair.read(rig.region.rkey, 1000, lasting(100))

    assert rig.clock.run(both()).status is Status.REVOKED
    assert rig.carrier.granted == 1  # the late "done" of the first reader has not ended it
    rig.carrier.drop_client("next")


def test_a_grant_ends_by_itself_when_the_reader_may_not_want_it_any_more(rig: Rig) -> None:
    rig.shelf.put(0, content(100))

    async def forgotten() -> None:
        until_s = rig.clock.real() + 0.01
        post = PostRead(rig.region.rkey, 1000, 100, 0, until_s, 1)
        assert (await rig.carrier.post_read("gone", post)).status is Status.OK
        assert rig.carrier.granted == 1
        await rig.clock.sleep_until(until_s)
        await rig.clock.breathe()
        assert rig.carrier.granted == 0

    rig.clock.run(forgotten())


def test_nobody_ends_another_clients_grant(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    post = PostRead(rig.region.rkey, 1000, 100, 0, rig.clock.real() + 10, 1)
    reply = rig.clock.run(rig.carrier.post_read("mine", post))
    done = Done(reply.slot, reply.serial, landed=False)
    assert rig.carrier.done("other", done) is Status.REVOKED
    rig.carrier.give_up("other", GiveUp(1))
    wrong = Done(reply.slot, reply.serial + 1, landed=False)
    assert rig.carrier.done("mine", wrong) is Status.REVOKED
    assert rig.carrier.granted == 1
    assert rig.carrier.done("mine", done) is Status.OK


def test_an_answer_that_is_lost_holds_nothing(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    region = rig.writable(FRAME, 100)

    def lose() -> None:
        raise WireError("does not answer")

    rig.poster.between = lose
    assert rig.read(0, 100)[0].status is Status.LINK_DOWN
    assert rig.write(region, content(100)).status is Status.LINK_DOWN
    assert region.writers == 0


def test_an_operation_that_is_cancelled_while_the_owner_works_holds_nothing(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    region = rig.writable(FRAME, 100)
    release = rig.clock.future()

    async def stage() -> None:
        await release

    async def cancelled() -> None:
        rig.shelf.slow = stage
        until_s = rig.clock.real() + 10
        read = PostRead(rig.region.rkey, 1000, 100, 0, until_s, 901)
        write = PostWrite(region.rkey, 5000, 100, 0, 902)
        jobs = [
            rig.clock.spawn(rig.carrier.post_read("client", read)),
            rig.clock.spawn(rig.carrier.post_write("client", write)),
        ]
        await rig.clock.breathe()
        assert rig.shelf.pins == 1
        rig.carrier.give_up("client", GiveUp(901))
        rig.carrier.drop_client("client")
        release.set_result(None)
        for job in jobs:
            assert (await job).status is Status.FLUSHED
        assert region.writers == 0

    rig.clock.run(cancelled())


def test_a_dead_client_leaves_no_grant(rig: Rig) -> None:
    rig.shelf.put(0, content(100))
    region = rig.writable(FRAME, 100)
    post = PostRead(rig.region.rkey, 1000, 100, 0, rig.clock.real() + 10, 1)
    rig.clock.run(rig.carrier.post_read("dead", post))
    rig.clock.run(rig.carrier.post_write("dead", PostWrite(region.rkey, 5000, 100, 0, 2)))
    assert rig.carrier.granted == 2
    rig.carrier.drop_client("dead")
    assert rig.carrier.granted == 0
    assert region.writers == 0


# -- writers ---------------------------------------------------------------------------------------


def test_a_late_writer_keeps_its_frames_until_it_says_that_it_is_done(rig: Rig) -> None:
    """Its reservation expired while it was stopped: it lands where nobody else is."""
    region = rig.writable(0, 100)
    free: list[str] = []

    def expire() -> None:
        rig.fabric.revoke(region)
        region.when_quiet(lambda: free.append("frames"))
        assert not free

    rig.poster.between = expire
    done = rig.write(region, content(100))
    assert done.status is Status.REVOKED
    assert free == ["frames"]
    assert 0 not in rig.shelf.whole


def test_a_late_writer_keeps_its_frames_until_it_dies(rig: Rig) -> None:
    region = rig.writable(0, 100)
    free: list[str] = []
    reply = rig.clock.run(
        rig.carrier.post_write("stopped", PostWrite(region.rkey, 5000, 100, 0, 1))
    )
    assert reply.status is Status.OK
    rig.fabric.revoke(region)
    region.when_quiet(lambda: free.append("frames"))
    assert not free
    rig.carrier.drop_client("stopped")
    assert free == ["frames"]


def test_two_writers_of_one_reservation_must_both_end(rig: Rig) -> None:
    region = rig.writable(0, 100)
    free: list[str] = []
    for name in ("one", "two"):
        rig.clock.run(rig.carrier.post_write(name, PostWrite(region.rkey, 5000, 100, 0, 1)))
    rig.fabric.revoke(region)
    region.when_quiet(lambda: free.append("frames"))
    rig.carrier.drop_client("one")
    assert not free
    rig.carrier.drop_client("two")
    assert free == ["frames"]


def test_a_write_that_fails_in_the_middle_has_not_landed(rig: Rig) -> None:
    region = rig.writable(0, 100)
    with pytest.raises(AssertionError, match="bytes are stored"):
        rig.write(region, np.zeros(100, dtype=np.int8))
    assert 0 not in rig.shelf.whole
    assert region.writers == 0


# -- an owner that is started anew -----------------------------------------------------------------


def test_grants_of_an_earlier_owner_mean_nothing_to_the_next(tmp_path: Path) -> None:
    with WallClock(shared=True) as clock:
        old, new = Rig(clock, tmp_path / "a", 10), Rig(clock, tmp_path / "b", 5000)
        for rig in (old, new):
            rig.shelf.put(0, content(100))
        post = PostRead(old.region.rkey, 1000, 100, 0, clock.real() + 10, 1)
        reply = clock.run(old.carrier.post_read("client", post))
        own = clock.run(new.carrier.post_read("client", post))
        assert (own.slot, own.status) == (reply.slot, Status.OK)
        done = Done(reply.slot, reply.serial, landed=False)
        assert new.carrier.done("client", done) is Status.REVOKED
        assert new.carrier.granted == 1
        for rig in (old, new):
            rig.close()


def test_an_operation_that_the_owners_successor_interrupts_touches_nothing(rig: Rig) -> None:
    """The answer is of the old owner, the mapping already of the new one."""
    rig.shelf.put(0, content(100))
    region = rig.writable(FRAME, 100)
    rig.poster.between = lambda: rig.attach(rig.pair)
    done, got = rig.read(0, 100)
    assert done.status is Status.REVOKED
    assert not got.any()
    assert rig.write(region, content(100)).status is Status.REVOKED
    rig.carrier.drop_client("client")


def test_memory_of_a_dead_owner_stays_readable_to_who_has_it_mapped(tmp_path: Path) -> None:
    segment = SharedSegment(4 * PAGE_BYTES, name="mine", folder=tmp_path)
    mine, other = segment.arena(), attach(str(segment.path), segment.nbytes)
    mine.array[:3] = [1, 2, 3]
    path = str(segment.path)
    mine.close()
    segment.close()
    assert other.array[:3].tolist() == [1, 2, 3]
    other.close()
    with pytest.raises(HostLimitError, match="cannot map"):
        attach(path, 4 * PAGE_BYTES)


def test_a_segment_that_is_too_short_is_refused(tmp_path: Path) -> None:
    segment = SharedSegment(PAGE_BYTES, name="short", folder=tmp_path)
    with pytest.raises(HostLimitError, match="4096 B, 8192 B are needed"):
        attach(str(segment.path), 2 * PAGE_BYTES)
    segment.close()


def test_words_are_seen_by_all_who_have_them(tmp_path: Path) -> None:
    segment = SharedSegment(64, name="words", folder=tmp_path)
    one, two = Words(segment, count=8), Words(None, path=str(segment.path), count=8)
    one.array[3] = 1 << 62
    assert two.array.tolist() == [0, 0, 0, 1 << 62, 0, 0, 0, 0]
    for words in (one, two):
        words.close()
    segment.close()


# -- two processes ---------------------------------------------------------------------------------


class Open(msgspec.Struct, tag="open", array_like=True):
    pass


MESSAGES: MessageSet[Any] = MessageSet(1, Open | PostRead | PostWrite | Done | GiveUp)

CLIENT = """
    import os, signal, sys
    import msgspec, numpy as np
    from cxlbench.emu.clock import WallClock
    from cxlbench.emu.fabric_shared import *
    from cxlbench.emu.status import Status
    from cxlbench.emu.wire import MessageSet, WireClient
    from tests.emu.test_fabric_shared import MESSAGES, Open, content

    GRANT = msgspec.msgpack.Decoder(GrantReply)
    STATUS = msgspec.msgpack.Decoder(Status)
    MEMORY = msgspec.msgpack.Decoder(list[ArenaInfo])
    endpoint, rkey, address, size, what = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]

    class Wire:
        def __init__(self, clock):
            self.wire = WireClient(clock, endpoint, sends=MESSAGES, name="child", timeout_s=10)
        async def post_read(self, post):
            return await self.wire.call(post, GRANT)
        async def post_write(self, post):
            reply = await self.wire.call(post, GRANT)
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return reply
        async def landed(self, done):
            return await self.wire.call(done, STATUS)
        def done(self, done):
            self.wire.post(done)
        def give_up(self, given_up):
            self.wire.post(given_up)

    async def main():
        poster = Wire(clock)
        pair = SharedQueuePair(clock, poster)
        arena, table = await poster.wire.call(Open(), MEMORY)
        pair.attach([arena], table)
        if what == "read":
            data = np.zeros(size, dtype=np.uint8)
            done = await pair.read(rkey, address, data)
            assert np.array_equal(data, content(size)), "other bytes"
        else:
            done = await pair.write(rkey, address, content(size))
        pair.detach()
        await poster.wire.close()
        assert done.status is Status.OK, done

    with WallClock(shared=True) as clock:
        clock.run(main())
"""


class Owner:
    """Serves a rig to other processes."""

    def __init__(self, rig: Rig, endpoint: str) -> None:
        self.rig = rig
        self.gone = rig.clock.future()
        self.server: WireServer[Any] = WireServer(
            rig.clock,
            endpoint,
            MESSAGES,
            name="owner",
            epoch=1,
            on_call=self.call,
            on_post=self.post,
            on_gone=self.end,
        )

    def call(self, peer: object, body: Any) -> Any:
        carrier = self.rig.carrier
        if isinstance(body, Open):
            return [*carrier.arenas, carrier.table_info]
        if isinstance(body, Done):
            return carrier.done(peer, body)
        return (
            carrier.post_read(peer, body)
            if isinstance(body, PostRead)
            else carrier.post_write(peer, body)
        )

    def post(self, peer: object, body: Any) -> None:
        if isinstance(body, Done):
            self.rig.carrier.done(peer, body)

    def end(self, peer: object) -> None:
        self.rig.carrier.drop_client(peer)
        if not self.gone.done():
            self.gone.set_result(None)


def run_client(rig: Rig, folder: Path, rkey: int, address: int, size: int, what: str) -> int:
    """Run another process against the rig until it has gone; return its exit code."""
    path = folder / "o"
    endpoint = f"ipc://{path if len(str(path)) < 100 else f'/tmp/cxl-owner-{os.getpid()}'}"

    async def serve() -> int:
        owner = Owner(rig, endpoint)
        process = start_client(endpoint, rkey, address, size, what)
        await owner.gone
        await owner.server.close()
        return process.wait(20)

    return rig.clock.run(serve())


def start_client(
    endpoint: str, rkey: int, address: int, size: int, what: str
) -> subprocess.Popen[bytes]:
    arguments = [endpoint, str(rkey), str(address), str(size), what]
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT), *arguments])


@pytest.mark.parametrize("size", [1, FRAME + 1])
def test_another_process_writes_and_a_third_reads(rig: Rig, tmp_path: Path, size: int) -> None:
    region = rig.writable(0, size)
    assert run_client(rig, tmp_path, region.rkey, 5000, size, "write") == 0
    done, got = rig.read(0, size)
    assert done.status is Status.OK
    assert np.array_equal(got, content(size))
    assert run_client(rig, tmp_path, rig.region.rkey, 1000, size, "read") == 0


def test_a_process_that_is_killed_with_a_grant_to_write_gives_it_back(
    rig: Rig, tmp_path: Path
) -> None:
    region = rig.writable(0, 100)
    free: list[str] = []
    assert run_client(rig, tmp_path, region.rkey, 5000, 100, "die") == -9
    rig.fabric.revoke(region)
    region.when_quiet(lambda: free.append("frames"))
    assert free == ["frames"]
    assert 0 not in rig.shelf.whole


def test_an_arena_is_told_by_path_and_size(rig: Rig) -> None:
    (info,) = rig.carrier.arenas
    assert isinstance(info, ArenaInfo)
    assert info.nbytes == rig.segment.nbytes
    assert Path(info.path).exists()
