"""The owner's end of ``fabric_shared.py``: checks what clients ask, grants it, and takes it back.

Every operation is checked against rkey and bounds, before the target is touched and again after any
wait for it. Whoever asks names what it asks for, so that an answer that never arrived, or a client
that died while the target worked, leaves nothing behind. Units: bytes, s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Fabric, MemoryRegion, ObjectExtents, ReadView
from cxlbench.emu.fabric_shared import ArenaInfo, Done, GiveUp, GrantReply, PostRead, PostWrite
from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.emu.shared_memory import SharedSegment, Words
from cxlbench.emu.status import DeviceError, Status

GRANTS = 4096
"""Grants that can be out at once."""


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
        hold_s: float = math.inf,
    ) -> None:
        """Serve ``fabric``'s regions; no reader holds a grant longer than ``hold_s``.

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
        self._hold_s = hold_s
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
        until_s = min(post.until_s, self.clock.real() + self._hold_s)
        self.clock.call_at(until_s, self._expire, grant)
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
