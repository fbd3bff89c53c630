"""One-sided access between processes: the fabric's carrier over shared memory.

The process that owns the devices owns their pipes, regions and arenas, too. A client *posts* a READ
or WRITE to it and gets a grant: where in the arena the bytes are or go, and when the emulated
hardware will have moved them. The client copies, and waits until then. The owner checks rkey and
bounds of each operation; it can take a grant back at any time (lease over, region revoked, client
dead), and a reader notices by the grant's word in a shared table, *after* it has copied: zero, and
the bytes are nobody's. Frames that a writer was given are not used again before it has said that it
is done, or its process has ended: a writer that was stopped for a minute lands in its own frames.

Units: bytes, s. Left out: protection of an arena against a client that does not keep to its grants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Completion, Fabric, MemoryRegion, ObjectExtents, ReadView
from cxlbench.emu.memory import Arena, Buffer, Bytes, Digest
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.emu.shared_memory import SharedSegment, Words, attach
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.wire import WireError

GRANTS = 4096
"""Grants that can be out at once."""

Spans = list[tuple[int, int]]
Span = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Instant = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class PostRead(msgspec.Struct, tag="post read", array_like=True, frozen=True):
    """READ ``size`` bytes of payload at ``address``, and its trailer."""

    rkey: int
    address: Span
    size: Span
    trailer: Span
    until_s: Instant
    """When the client will not want it any more, or may not have it."""
    ask: int
    """The client's name for what it asks, under which it can give it up without an answer."""


class PostWrite(msgspec.Struct, tag="post write", array_like=True, frozen=True):
    """WRITE ``size`` bytes of payload at ``address``, and its trailer."""

    rkey: int
    address: Span
    size: Span
    trailer: Span
    ask: int


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """The client has copied, or has given up."""

    slot: int
    serial: int
    landed: bool


class GiveUp(msgspec.Struct, tag="give up", array_like=True, frozen=True):
    """The client never saw the answer to ``ask``, and will not use it."""

    ask: int


class GrantReply(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes are or go and what they count for, or the status that refuses it."""

    status: Status
    cost: int = 0
    arena: int = 0
    payload: Spans = []
    trailer: Spans = []
    slot: int = 0
    serial: int = 0
    due_s: float = 0.0


class ArenaInfo(msgspec.Struct, array_like=True, frozen=True):
    """A mapped arena."""

    path: str
    nbytes: int


@dataclass(eq=False, slots=True)
class _Grant:
    client: object
    slot: int
    serial: int
    region: MemoryRegion
    view: ReadView | None
    address: int
    """Of a WRITE, in the target's own addresses."""
    ask: int


class SharedCarrier:
    """The owner's side: answers posts, and takes grants back."""

    def __init__(
        self,
        clock: WallClock,
        fabric: Fabric,
        *,
        arenas: Sequence[SharedSegment],
        grants: SharedSegment,
        arena_of: Callable[[MemoryRegion], int],
        read_path: Sequence[Pipe],
        write_path: Sequence[Pipe],
        latency_s: float,
        first_serial: int = 1,
    ) -> None:
        """Serve ``fabric``'s regions.

        ``first_serial`` is another one at each start, so that what an earlier process granted means
        nothing here.
        """
        self.clock = clock
        self.fabric = fabric
        self.arenas = [ArenaInfo(str(a.path), a.nbytes) for a in arenas]
        self.table = Words(grants, count=GRANTS)
        self.table_info = ArenaInfo(str(grants.path), GRANTS * 8)
        self._arena_of = arena_of
        self._read_path = tuple(read_path)
        self._write_path = tuple(write_path)
        self._latency_s = latency_s
        self._free = list(range(GRANTS - 1, -1, -1))
        self._serials = itertools.count(first_serial)
        self._grants: dict[int, _Grant] = {}
        self._asked: dict[tuple[object, int], _Grant | None] = {}
        """What each client asked for and has not ended: a grant, or None before it is granted."""

    async def post_read(self, client: object, post: PostRead) -> GrantReply:
        """Pin the object, book its way, and grant the copy."""
        return await self._granted(client, post.ask, self._post_read(client, post))

    async def post_write(self, client: object, post: PostWrite) -> GrantReply:
        """Book the way of a WRITE, and grant the copy."""
        return await self._granted(client, post.ask, self._post_write(client, post))

    async def _granted(
        self, client: object, ask: int, work: Coroutine[Any, Any, GrantReply]
    ) -> GrantReply:
        """Remember what is asked while ``work`` waits: who asked may die or give it up."""
        name = client, ask
        if name in self._asked:
            work.close()
            return GrantReply(Status.BUSY)
        self._asked[name] = None
        try:
            reply = await work
        finally:
            if self._asked.get(name, name) is None:
                del self._asked[name]
        return reply

    async def _post_read(self, client: object, post: PostRead) -> GrantReply:
        extent = post.size + post.trailer
        region = self.fabric.check(post.rkey, post.address, extent, write=False)
        if isinstance(region, Status):
            return GrantReply(region)
        if not self._free:
            return GrantReply(Status.BUSY)
        if post.until_s <= self.clock.real():
            return GrantReply(Status.TIMEOUT)
        try:
            view = await region.target.open_read(
                post.address - region.base + region.offset, post.size
            )
        except DeviceError as error:
            return GrantReply(error.status)
        keep = False
        try:
            cost = post.size + min(post.trailer, region.target.trailer_cost_bytes)
            bookings = [pipe.reserve(cost) for pipe in (view.port, *self._read_path)]
            await view.arrived()
            refusal = self._refusal(client, post.ask, region)
            if refusal is not None:
                return refusal
            if post.until_s <= self.clock.real():
                return GrantReply(Status.TIMEOUT)  # what was read may be another object's by now
            keep = True
        except DeviceError as error:
            return GrantReply(error.status)
        finally:
            if not keep:
                view.close()
        grant = self._grant(client, region, view, 0, post.ask)
        self.clock.call_at(post.until_s, self._expire, grant)
        due_s = _due_s([*view.bookings, *bookings]) + self._latency_s + region.target.latency_s
        return self._reply(grant, region, view.extents, cost, due_s)

    def _refusal(self, client: object, ask: int, region: MemoryRegion) -> GrantReply | None:
        """Return why nothing can be granted any more, after a wait; None if it can."""
        if (client, ask) not in self._asked:
            return GrantReply(Status.FLUSHED)
        if region.revoked:
            return GrantReply(Status.REVOKED)
        return None if self._free else GrantReply(Status.BUSY)

    async def _post_write(self, client: object, post: PostWrite) -> GrantReply:
        extent = post.size + post.trailer
        region = self.fabric.check(post.rkey, post.address, extent, write=True)
        if isinstance(region, Status):
            return GrantReply(region)
        local = post.address - region.base + region.offset
        try:
            await region.target.ready_to_receive(local)
            refusal = self._refusal(client, post.ask, region)
            if refusal is not None:
                return refusal
            extents = region.target.landing(local)
        except DeviceError as error:
            return GrantReply(error.status)
        if post.size != extents.payload_bytes or post.trailer > extents.trailer_bytes:
            return GrantReply(Status.BOUNDS)
        cost = post.size + min(post.trailer, region.target.trailer_cost_bytes)
        bookings = [pipe.reserve(cost) for pipe in (*self._write_path, region.target.port)]
        grant = self._grant(client, region, None, local, post.ask)
        region.begin_write()
        due_s = _due_s(bookings) + self._latency_s + region.target.latency_s
        return self._reply(grant, region, extents, cost, due_s)

    def _grant(
        self, client: object, region: MemoryRegion, view: ReadView | None, address: int, ask: int
    ) -> _Grant:
        slot, serial = self._free.pop(), next(self._serials)
        self.table.array[slot] = serial
        grant = _Grant(client, slot, serial, region, view, address, ask)
        self._grants[slot] = self._asked[client, ask] = grant
        return grant

    def _reply(
        self,
        grant: _Grant,
        region: MemoryRegion,
        extents: ObjectExtents,
        cost: int,
        due_s: float,
    ) -> GrantReply:
        return GrantReply(
            Status.OK,
            cost,
            self._arena_of(region),
            list(extents.payload),
            list(extents.trailer),
            grant.slot,
            grant.serial,
            due_s,
        )

    def done(self, client: object, message: Done) -> Status:
        """End a grant; of a WRITE that ``landed``, tell the device."""
        grant = self._grants.get(message.slot)
        if grant is None or grant.serial != message.serial or grant.client is not client:
            return Status.REVOKED
        return self._end(grant, landed=message.landed)

    def give_up(self, client: object, message: GiveUp) -> None:
        """End what was granted for an ask, or is about to be."""
        grant = self._asked.pop((client, message.ask), None)
        if grant is not None:
            self._end(grant, landed=False)

    def _end(self, grant: _Grant, *, landed: bool) -> Status:
        del self._grants[grant.slot]
        self._asked.pop((grant.client, grant.ask), None)
        self.table.array[grant.slot] = 0
        self._free.append(grant.slot)
        if grant.view is not None:
            grant.view.close()
            return Status.OK
        status = Status.REVOKED if grant.region.revoked else Status.OK
        if landed and status is Status.OK:
            try:
                grant.region.target.landed(grant.address)
            except DeviceError as error:
                status = error.status
        grant.region.end_write()
        return status

    def _expire(self, grant: _Grant) -> None:
        if self._grants.get(grant.slot) is grant:
            self._end(grant, landed=False)

    def drop_client(self, client: object) -> None:
        """Take back every grant of a process that has ended."""
        for name in [name for name in self._asked if name[0] is client]:
            self.give_up(client, GiveUp(name[1]))

    @property
    def granted(self) -> int:
        """Grants that are out."""
        return len(self._grants)

    def close(self) -> None:
        """Take every grant back."""
        for grant in list(self._grants.values()):
            self._end(grant, landed=False)
        self.table.close()


def _due_s(bookings: Sequence[Reservation]) -> float:
    return max(booking.end_s for booking in bookings)


class Poster(Protocol):
    """How a client reaches the owner: two calls and a one-way message."""

    async def post_read(self, post: PostRead) -> GrantReply:
        """Ask for a READ; raises ``WireError`` if the owner does not answer."""

    async def post_write(self, post: PostWrite) -> GrantReply:
        """Ask for a WRITE; raises ``WireError`` if the owner does not answer."""

    async def landed(self, done: Done) -> Status:
        """Say that a WRITE has landed, and learn whether it counts."""

    def done(self, done: Done) -> None:
        """Say that an operation is over."""

    def give_up(self, given_up: GiveUp) -> None:
        """Say that an answer that did not come will not be used."""


class SharedQueuePair:
    """The client's side. Satisfies ``OneSided``."""

    def __init__(
        self,
        clock: WallClock,
        poster: Poster,
        *,
        path: Sequence[Pipe] = (),
        write_path: Sequence[Pipe] = (),
        latency_s: float = 0.0,
        read_deadline_s: float = 10.0,
    ) -> None:
        self.clock = clock
        self.poster = poster
        self.path = tuple(path)
        self.write_path = tuple(write_path)
        self.latency_s = latency_s
        self.read_deadline_s = read_deadline_s
        self._arenas: list[Arena] = []
        self._table: Words | None = None
        self._asks = itertools.count(1)

    def attach(self, arenas: Sequence[ArenaInfo], table: ArenaInfo) -> None:
        """Map the owner's memory; called again when the owner has been started anew."""
        self.detach()
        self._arenas = [attach(arena.path, arena.nbytes) for arena in arenas]
        self._table = Words(None, path=table.path, count=table.nbytes // 8)

    def detach(self) -> None:
        """Unmap."""
        for arena in self._arenas:
            arena.close()
        self._arenas = []
        if self._table is not None:
            self._table.close()
            self._table = None

    async def read(
        self,
        rkey: int,
        address: int,
        payload: Buffer,
        trailer: Bytes | None = None,
        *,
        digest: Digest | None = None,
        until_s: float = math.inf,
    ) -> Completion:
        """READ an object into ``payload`` (and ``trailer``); ``digest`` sees the payload."""
        clock = self.clock
        table, arenas = self._table, self._arenas
        if table is None:
            return Completion(Status.LINK_DOWN, 0, clock.now())
        room = 0 if trailer is None else len(trailer)
        until_s = min(until_s, clock.now() + self.read_deadline_s)
        ask = next(self._asks)
        grant = await self._ask(
            ask,
            self.poster.post_read(PostRead(rkey, address, payload.nbytes, room, until_s, ask)),
        )
        if grant.status is not Status.OK:
            return Completion(grant.status, 0, clock.now())
        if self._table is not table:  # the owner has been started anew: its memory is not ours
            return Completion(Status.REVOKED, 0, clock.now())
        try:
            bookings = [pipe.reserve(grant.cost) for pipe in self.path]
            arena = arenas[grant.arena]
            if trailer is not None and grant.trailer:
                arena.load(grant.trailer, trailer)
            arena.load(grant.payload, payload, digest)
            # Only now: what was taken back while it was copied may be anybody's bytes.
            valid = int(table.array[grant.slot]) == grant.serial
            await _wait(clock, bookings, grant.due_s + self.latency_s)
        finally:
            self.poster.done(Done(grant.slot, grant.serial, landed=False))
        if not valid:
            return Completion(Status.REVOKED, 0, clock.now())
        return Completion(Status.OK, payload.nbytes + room, clock.now())

    async def write(
        self, rkey: int, address: int, payload: Buffer, trailer: Bytes | None = None
    ) -> Completion:
        """WRITE ``payload`` and ``trailer`` to ``address``."""
        clock = self.clock
        table, arenas = self._table, self._arenas
        if table is None:
            return Completion(Status.LINK_DOWN, 0, clock.now())
        room = 0 if trailer is None else len(trailer)
        ask = next(self._asks)
        grant = await self._ask(
            ask, self.poster.post_write(PostWrite(rkey, address, payload.nbytes, room, ask))
        )
        if grant.status is not Status.OK:
            return Completion(grant.status, 0, clock.now())
        if self._table is not table:
            return Completion(Status.REVOKED, 0, clock.now())
        landed = False
        try:
            bookings = [pipe.reserve(grant.cost) for pipe in self.write_path]
            arena = arenas[grant.arena]
            arena.store(grant.payload, payload)
            if grant.trailer:
                nbytes = sum(length for _, length in grant.trailer)
                arena.store(
                    grant.trailer, np.zeros(nbytes, dtype=np.uint8) if trailer is None else trailer
                )
            await _wait(clock, bookings, grant.due_s + self.latency_s)
            landed = True
        finally:
            if not landed:
                self.poster.done(Done(grant.slot, grant.serial, landed=False))
        try:
            status = await self.poster.landed(Done(grant.slot, grant.serial, landed=True))
        except WireError:
            status = Status.LINK_DOWN
        return Completion(status, payload.nbytes + room if status is Status.OK else 0, clock.now())

    async def _ask(self, ask: int, call: Awaitable[GrantReply]) -> GrantReply:
        """Await an answer; give up what was asked for if it does not come."""
        try:
            return await call
        except WireError:
            self.poster.give_up(GiveUp(ask))
            return GrantReply(Status.LINK_DOWN)
        except BaseException:
            self.poster.give_up(GiveUp(ask))
            raise


async def _wait(clock: WallClock, bookings: Sequence[Reservation], due_s: float) -> None:
    """Wait for the client's own pipes, and until the owner's have moved the bytes."""
    if bookings:
        await finished(clock, *bookings)
    if due_s > clock.now():
        await clock.sleep_until(due_s)
