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
from collections.abc import Awaitable, Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Completion
from cxlbench.emu.memory import Arena, Buffer, Bytes, Digest
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.emu.shared_memory import Words, attach
from cxlbench.emu.status import Status
from cxlbench.emu.wire import WireError

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
