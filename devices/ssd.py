"""An NVMe SSD: read and write bandwidth, latencies, IOPS, and what mixing them costs.

Model (CXL-HM's back end, HyMCache §3.4 and §5; numbers in ``profiles/``): reads and writes share
the device's time, so ``reads/read_bandwidth + writes/write_bandwidth <= 1``. An operation costs at
least ``1/iops``. A read that is booked while a write is in service or queued before it takes
``1 + mixed_penalty`` times as long: flash channels are busy programming. Reads end
``read_latency`` after their transfer, writes ``program_latency`` after.

``priority`` separates foreground reads (0) from deferrable writes (1): a read overtakes queued
writes and cuts the one in service at a chunk. Units: bytes, s. Left out: garbage collection (the
write bandwidth of a profile is sustained), queue depths that are too small to fill the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cxlbench.devices.profile_kinds import SsdProfile
from cxlbench.emu.backing import Backing, FileBacking, PhantomBacking, RamBacking
from cxlbench.emu.clock import Clock
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, AnyArena, Extent, page_ceil
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.emu.status import DeviceError, Status

READ, WRITE = 0, 1
CHUNK_BYTES = 1 << 20


class Ssd:
    """The timing of one SSD, with counters of what it moved."""

    def __init__(self, clock: Clock, profile: SsdProfile, name: str) -> None:
        self.name = name
        self.profile = profile
        self.read_bytes = 0
        self.written_bytes = 0
        chunk = max(PAGE_BYTES, int(CHUNK_BYTES / profile.scale))
        self.pipe = Pipe(clock, name, profile.read_bandwidth, chunk_bytes=chunk)
        self._read_floor_s = 1 / profile.read_iops
        self._write_floor_s = 1 / profile.write_iops
        self._clock = clock
        self._writes: list[Reservation] = []

    def read(self, nbytes: int) -> Reservation:
        """Book a read."""
        cost = max(nbytes / self.profile.read_bandwidth, self._read_floor_s)
        if self._writes and self._mixed():
            cost *= 1 + self.profile.mixed_penalty
        self.read_bytes += nbytes
        return self.pipe.reserve(nbytes, priority=0, cost_s=cost)

    def write(self, nbytes: int, *, priority: int) -> Reservation:
        """Book a write; ``priority`` 1 lets reads overtake it."""
        cost = max(nbytes / self.profile.write_bandwidth, self._write_floor_s)
        self.written_bytes += nbytes
        booking = self.pipe.reserve(nbytes, priority=priority, cost_s=cost)
        self._writes = [*self._pending_writes(), booking]
        return booking

    def _pending_writes(self) -> list[Reservation]:
        now = self._clock.now()
        return [write for write in self._writes if write.end_s > now]

    def _mixed(self) -> bool:
        """Whether a read booked now meets a write that is in service or goes before it."""
        now = self._clock.now()
        self._writes = self._pending_writes()
        return any(write.priority == 0 or write.start_s <= now for write in self._writes)


class SsdArray:
    """The SSDs behind one device: striped timing, one backing store, injected faults."""

    def __init__(
        self,
        clock: Clock,
        profile: SsdProfile,
        count: int,
        *,
        backing: Backing,
        stripe_bytes: int,
        name: str,
        faults: FaultPlan | None = None,
    ) -> None:
        self.clock = clock
        self.name = name
        self.ssds = [Ssd(clock, profile, f"{name}.ssd{i}") for i in range(count)]
        self.backing = backing
        self.stripe_bytes = stripe_bytes
        self.faults = faults or FaultPlan.none()
        self._profile = profile
        self.reads_in_flight = 0

    def _shares(self, address: int, nbytes: int) -> list[int]:
        """Return how many of the bytes lie on each SSD."""
        stripe, count = self.stripe_bytes, len(self.ssds)
        if count == 1:
            return [nbytes]
        shares = [0] * count
        whole, left = divmod(nbytes, stripe * count)
        for index in range(count):
            shares[index] = whole * stripe
        while left:
            index, within = divmod(address, stripe)
            piece = min(left, stripe - within)
            shares[index % count] += piece
            address, left = address + piece, left - piece
        return shares

    def book_read(self, address: int, nbytes: int) -> tuple[Reservation, ...]:
        """Book the time of a read on every SSD that has a part of it."""
        shares = self._shares(address, nbytes)
        return tuple(ssd.read(share) for ssd, share in zip(self.ssds, shares, strict=True) if share)

    def book_write(self, address: int, nbytes: int, *, priority: int) -> tuple[Reservation, ...]:
        """Book the time of a write on every SSD that gets a part of it."""
        shares = self._shares(address, nbytes)
        return tuple(
            ssd.write(share, priority=priority)
            for ssd, share in zip(self.ssds, shares, strict=True)
            if share
        )

    async def fetch(self, address: int, arena: AnyArena, extents: Sequence[Extent]) -> None:
        """Move the bytes of a read, without its time; raise ``DeviceError`` if injected."""
        fault = self.faults.draw("ssd.read", self.name)
        if fault is not None:
            if fault.kind == "error":
                raise DeviceError(Status.IO_ERROR, f"{self.name}: injected read error")
            if fault.kind == "delay":
                await self.clock.sleep(fault.delay_s)
        await self.backing.read(address, arena, extents)
        if fault is not None and fault.kind == "corrupt":
            probe = arena.buffer(extents[0][1])
            arena.load(extents[:1], probe)
            fault.corrupt(probe)
            arena.store(extents[:1], probe)

    async def read(
        self,
        address: int,
        arena: AnyArena,
        extents: Sequence[Extent],
        *,
        cost_bytes: int | None = None,
    ) -> None:
        """Read with time and bytes; the time is that of ``cost_bytes``, if given."""
        nbytes = sum([length for _, length in extents]) if cost_bytes is None else cost_bytes
        bookings = self.book_read(address, nbytes)
        self.reads_in_flight += 1
        try:
            await self.fetch(address, arena, extents)
            await finished(self.clock, *bookings, latency_s=self._profile.read_latency)
        finally:
            self.reads_in_flight -= 1

    @property
    def program_latency_s(self) -> float:
        """From when the SSDs have the bytes of a write until they are on the flash."""
        return self._profile.program_latency

    async def write(
        self,
        address: int,
        arena: AnyArena,
        extents: Sequence[Extent],
        *,
        priority: int,
        program: bool = True,
        cost_bytes: int | None = None,
    ) -> None:
        """Write with time and bytes; raise ``DeviceError`` if not all of it was written.

        The time is that of ``cost_bytes``, if given.

        Without ``program`` it ends when the SSDs have the bytes, ``program_latency_s`` earlier.
        """
        fault = self.faults.draw("ssd.write", self.name)
        if fault is not None and fault.kind == "delay":
            await self.clock.sleep(fault.delay_s)
        nbytes = sum([length for _, length in extents]) if cost_bytes is None else cost_bytes
        bookings = self.book_write(address, nbytes, priority=priority)
        if fault is not None and fault.kind == "error":
            await finished(self.clock, *bookings)
            raise DeviceError(Status.IO_ERROR, f"{self.name}: injected write error")
        short = fault is not None and fault.kind == "short"
        await self.backing.write(address, arena, extents, short=short)
        await finished(
            self.clock, *bookings, latency_s=self._profile.program_latency if program else 0.0
        )


def make_backing(
    *,
    phantom: bool,
    folder: Path | None,
    size_bytes: int,
    stripe_bytes: int,
    count: int,
    name: str,
    preallocate: bool = False,
    split: bool = False,
    keep: bool = False,
) -> Backing:
    """Return tags if ``phantom``, files in ``folder``, or RAM where there is no folder.

    ``split``: parts of what was written at once will be read alone. ``keep``: the files stay, and
    what an earlier process left in them is there.
    """
    size = page_ceil(size_bytes)
    if phantom:
        return PhantomBacking(size, split=split)
    if folder is None:
        return RamBacking(size)
    files = [folder / f"{name}.ssd{i}" for i in range(count)]
    return FileBacking(files, size, stripe_bytes=stripe_bytes, preallocate=preallocate, keep=keep)
