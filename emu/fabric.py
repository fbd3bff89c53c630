"""One-sided access between hosts, in the words of verbs: memory regions, queue pairs, READ, WRITE.

A target (a device) is registered as a *memory region*, which gets an unguessable *rkey*. Whoever
knows the rkey can read or write inside the region's bounds, without the target's software taking
part, until the rkey is revoked. Every operation completes *with a status*: wrong or revoked rkey,
out of bounds, link down, injected fault. This file is the carrier inside one process, for both
clocks; the transfer is cut-through over all pipes of the path, and the slowest decides. An
operation takes the latency of the path and that of the target beside its bytes.

Left out: sends and receives, atomics, partial completion, packet loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cxlbench.emu.clock import Clock
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import Buffer, Bytes, Digest, Extent
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget


@dataclass(frozen=True, slots=True)
class ObjectExtents:
    """Where an object lies in a device's arena: its payload, and the trailer behind it."""

    payload: Sequence[Extent]
    trailer: Sequence[Extent]
    payload_bytes: int
    trailer_bytes: int


class ReadView(Protocol):
    """An object made readable inside a device, pinned until ``close``."""

    port: Pipe
    extents: ObjectExtents
    """Where the bytes are in the target's arena, for another process."""
    bookings: tuple[Reservation, ...]
    """Device work still going on while the bytes stream out (cut-through)."""

    def copy_into(self, payload: Buffer, trailer: Bytes | None, digest: Digest | None) -> None:
        """Copy the object out."""

    async def arrived(self) -> None:
        """Wait for real bytes that are still on their way; no emulated time passes."""

    def close(self) -> None:
        """Unpin."""


class PrefetchRequest(Protocol):
    """The handle of an object being staged inside a device: opaque to who holds it."""

    address: int
    size_bytes: int


class Target(Protocol):
    """Memory that can be registered: a device as the fabric sees it."""

    port: Pipe
    trailer_bytes: int
    latency_s: float
    """What an access takes beside its bytes; 0 where unknown."""
    trailer_cost_bytes: int
    """What a trailer counts for on the pipes: at scale S, 1/S of the page that it takes."""

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Make the object readable; raise ``DeviceError`` if that fails."""

    async def ready_to_receive(self, address: int) -> None:
        """Wait until a WRITE to ``address`` can be taken (a cache may have to evict first)."""

    def receive(self, address: int, payload: Buffer, trailer: Bytes | None) -> None:
        """Take the bytes of a WRITE; raise ``DeviceError`` if nothing was reserved there."""

    def landing(self, address: int) -> ObjectExtents:
        """Return where in the target's arena the bytes of a WRITE go, for another process."""

    def landed(self, address: int) -> None:
        """Note that another process has put all bytes there."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one READ or WRITE."""

    status: Status
    nbytes: int
    due_s: float
    """When the emulated hardware had moved the last byte."""


class MemoryRegion:
    """A registered range of a target's addresses."""

    __slots__ = (
        "_quiet",
        "base",
        "length",
        "offset",
        "revoked",
        "rkey",
        "target",
        "writable",
        "writers",
    )

    def __init__(
        self, target: Target, base: int, length: int, *, offset: int, rkey: int, writable: bool
    ) -> None:
        self.target = target
        self.base = base
        self.offset = offset
        self.length = length
        self.rkey = rkey
        self.writable = writable
        self.revoked = False
        self.writers = 0
        """WRITEs that another process may be doing now, whatever was revoked meanwhile."""
        self._quiet: list[Callable[[], object]] = []

    def begin_write(self) -> None:
        """Note that another process was told where to put bytes."""
        self.writers += 1

    def end_write(self) -> None:
        """Note that it has ended, or died."""
        self.writers -= 1
        if not self.writers:
            waiting, self._quiet = self._quiet, []
            for callback in waiting:
                callback()

    def when_quiet(self, callback: Callable[[], object]) -> None:
        """Call back when no other process can write here any more: now, or later."""
        if self.writers:
            self._quiet.append(callback)
        else:
            callback()


class Fabric:
    """The registry of memory regions that queue pairs reach."""

    def __init__(
        self, clock: Clock, *, seed: int | random.Random, faults: FaultPlan | None = None
    ) -> None:
        """Draw rkeys by ``seed``, or from a generator.

        Whoever has seen some of a seeded generator's rkeys can work out the next ones: where
        clients are to be kept apart, hand in ``random.SystemRandom()``.
        """
        self.clock = clock
        self.faults = faults or FaultPlan.none()
        self._draw = seed if isinstance(seed, random.Random) else random.Random(f"fabric-{seed}")
        self._regions: dict[int, MemoryRegion] = {}

    def register(
        self,
        target: Target,
        base: int,
        length: int,
        *,
        offset: int | None = None,
        writable: bool = False,
    ) -> MemoryRegion:
        """Register ``length`` bytes under the addresses from ``base`` on, and draw an rkey.

        ``offset`` is where ``base`` lies in the target's own addresses (default: the same).
        """
        rkey = self._draw.getrandbits(64)
        while rkey in self._regions:
            rkey = self._draw.getrandbits(64)
        at = base if offset is None else offset
        region = MemoryRegion(target, base, length, offset=at, rkey=rkey, writable=writable)
        self._regions[rkey] = region
        return region

    def revoke(self, region: MemoryRegion) -> None:
        """Make the rkey useless, for operations in flight too."""
        region.revoked = True
        self._regions.pop(region.rkey, None)

    @property
    def registered(self) -> int:
        """Memory regions whose rkey is valid."""
        return len(self._regions)

    def check(self, rkey: int, address: int, nbytes: int, *, write: bool) -> MemoryRegion | Status:
        """Return the region that allows the access, or the status that refuses it."""
        region = self._regions.get(rkey)
        if region is None:
            return Status.BAD_RKEY
        if nbytes < 0 or address < region.base or address + nbytes > region.base + region.length:
            return Status.BOUNDS
        if write and not region.writable:
            return Status.BAD_RKEY
        return region


def transfer_bytes(target: Target, payload: int, trailer: Bytes | None) -> int:
    """Return what a transfer counts for on the pipes."""
    return payload + (0 if trailer is None else min(len(trailer), target.trailer_cost_bytes))


class OneSided(Protocol):
    """READ and WRITE by one initiator, whatever carries them."""

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
        """READ an object into ``payload`` (and ``trailer``); ``digest`` sees the payload.

        It is refused (TIMEOUT) from ``until_s`` on, when something else may be at the address.
        """

    async def write(
        self, rkey: int, address: int, payload: Buffer, trailer: Bytes | None = None
    ) -> Completion:
        """WRITE ``payload`` and ``trailer`` to ``address``."""


class QueuePair:
    """One initiator's connection: its path of pipes, and the latency of an operation.

    At most ``outstanding_reads`` READs are under way at once (None: any number); the others wait in
    the order in which they were posted, before they touch the target. WRITEs have no such limit.
    """

    def __init__(
        self,
        fabric: Fabric,
        path: Sequence[Pipe],
        *,
        latency_s: float,
        name: str,
        write_path: Sequence[Pipe] | None = None,
        outstanding_reads: int | None = None,
    ) -> None:
        if outstanding_reads is not None and outstanding_reads < 1:
            raise ValueError(
                f"{name}: outstanding_reads must be at least 1, or None, got {outstanding_reads}"
            )
        self.fabric = fabric
        self.path = tuple(path)
        self.write_path = self.path if write_path is None else tuple(write_path)
        self.latency_s = latency_s
        self.name = name
        self.reads: Budget | None = None
        """READs under way."""
        if outstanding_reads is not None:
            self.reads = Budget(fabric.clock, outstanding_reads, name=f"{name}: outstanding READs")
        self._up = True
        self._outages = 0

    @property
    def up(self) -> bool:
        """Whether the link is up. What was under way when it went down ends in LINK_DOWN."""
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        self._outages += self._up and not up
        self._up = up

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
        if self.reads is None:
            return await self._read(rkey, address, payload, trailer, digest, until_s)
        await self.reads.take(1)
        try:
            return await self._read(rkey, address, payload, trailer, digest, until_s)
        finally:
            self.reads.give(1)

    async def _read(
        self,
        rkey: int,
        address: int,
        payload: Buffer,
        trailer: Bytes | None,
        digest: Digest | None,
        until_s: float,
    ) -> Completion:
        clock, fabric = self.fabric.clock, self.fabric
        size = payload.nbytes
        extent = size + (len(trailer) if trailer is not None else 0)
        region = fabric.check(rkey, address, extent, write=False)
        if isinstance(region, Status):
            return await self._refused(region)
        fault = fabric.faults.draw("fabric.read", self.name)
        if fault is not None and fault.delay_s:
            await clock.sleep(fault.delay_s)
        if not self.up or (fault is not None and fault.kind == "down"):
            return await self._refused(Status.LINK_DOWN)
        if clock.real() >= until_s:
            return await self._refused(Status.TIMEOUT)
        outages = self._outages
        try:
            view = await region.target.open_read(address - region.base + region.offset, size)
        except DeviceError as error:
            return await self._refused(error.status)
        try:
            cost = transfer_bytes(region.target, size, trailer)
            bookings = [pipe.reserve(cost) for pipe in (view.port, *self.path)]
            await view.arrived()
            if clock.real() >= until_s:
                return await self._refused(Status.TIMEOUT)
            if fault is not None and fault.kind == "corrupt":
                # On the wire, so before the reader sees the bytes: its digest must notice.
                view.copy_into(payload, trailer, None)
                fault.corrupt(payload)
                if digest is not None and isinstance(payload, np.ndarray):
                    digest(payload)
            else:
                view.copy_into(payload, trailer, digest)
            latency_s = self.latency_s + region.target.latency_s
            await finished(clock, *view.bookings, *bookings, latency_s=latency_s)
        except DeviceError as error:
            return await self._refused(error.status)
        finally:
            view.close()
        if region.revoked:
            return Completion(Status.REVOKED, 0, clock.now())
        if self._outages != outages:
            return Completion(Status.LINK_DOWN, 0, clock.now())
        return Completion(Status.OK, extent, clock.now())

    async def write(
        self, rkey: int, address: int, payload: Buffer, trailer: Bytes | None = None
    ) -> Completion:
        """WRITE ``payload`` and ``trailer`` to ``address``.

        The completion says nothing of the target's software: that learns of the bytes from a
        message of the writer.
        """
        clock, fabric = self.fabric.clock, self.fabric
        extent = payload.nbytes + (len(trailer) if trailer is not None else 0)
        region = fabric.check(rkey, address, extent, write=True)
        if isinstance(region, Status):
            return await self._refused(region)
        fault = fabric.faults.draw("fabric.write", self.name)
        if fault is not None and fault.delay_s:
            await clock.sleep(fault.delay_s)
        if not self.up or (fault is not None and fault.kind == "down"):
            return await self._refused(Status.LINK_DOWN)
        outages = self._outages
        local = address - region.base + region.offset
        try:
            await region.target.ready_to_receive(local)
        except DeviceError as error:
            return await self._refused(error.status)
        cost = transfer_bytes(region.target, payload.nbytes, trailer)
        bookings = [pipe.reserve(cost) for pipe in (*self.write_path, region.target.port)]
        latency_s = self.latency_s + region.target.latency_s
        await finished(clock, *bookings, latency_s=latency_s)
        if region.revoked:
            return Completion(Status.REVOKED, 0, clock.now())
        if self._outages != outages:
            return Completion(Status.LINK_DOWN, 0, clock.now())
        try:
            region.target.receive(local, payload, trailer)
        except DeviceError as error:
            return Completion(error.status, 0, clock.now())
        return Completion(Status.OK, extent, clock.now())

    async def _refused(self, status: Status) -> Completion:
        await self.fabric.clock.sleep(self.latency_s)
        return Completion(status, 0, self.fabric.clock.now())
