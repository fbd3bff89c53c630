"""CMM-H: a CXL memory device whose DRAM is a transparent cache over SSDs (HyMCache §3.3).

The strawman that HyMCache is compared with. Nobody tells the device what comes next: reads that
miss refill granules from the SSDs, a replacement policy chooses what they push out, and written
data is propagated to flash eagerly, at the same priority as reads, so that both meet.

The cache tracks ``cache_granule`` bytes at a time, with a page bitmap of what is valid and dirty
in each. A miss costs SSD time for the missing pages, and passes a *miss engine* that keeps
``outstanding_misses`` refills of ``refill_unit`` in flight (``miss_bandwidth`` of the profile).
Both run while the bytes already stream out. Units: bytes, s.

Left out: accesses below a page, read-ahead inside the device, the SSDs' own DRAM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cxlbench.devices.cmm_h_cache import Cache, Line, Piece
from cxlbench.devices.policies import load_policy
from cxlbench.devices.profile_kinds import CmmHProfile
from cxlbench.devices.ssd import SsdArray, make_backing
from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.fabric import ReadView
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import (
    PAGE_BYTES,
    Arena,
    Buffer,
    Bytes,
    Digest,
    Extent,
    PhantomArena,
    page_ceil,
)
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget, Signal

WRITE_BACK_TRIES = 3


@dataclass(slots=True)
class CmmHCounters:
    """What the cache did, in granules and bytes."""

    hits: int = 0
    misses: int = 0
    refilled_bytes: int = 0
    written_back: int = 0
    write_back_failed: int = 0
    lost: int = 0


@dataclass(eq=False, slots=True)
class _Object:
    """One object at an address, from admission to discard."""

    address: int
    size_bytes: int
    payload: tuple[Piece, ...]
    trailer: tuple[Piece, ...]
    lines: list[Line] | None = None
    received: bool = False
    committed: bool = False
    readers: int = 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self.payload, *self.trailer)


@dataclass(eq=False, slots=True)
class _Fill:
    """Pages on their way from the SSDs into lines; later readers of them wait for it too."""

    booking: Reservation
    done: Signal[DeviceError | None]


class CmmH:
    """The device. ``prefetch_depth`` is 0: it has no staging that software could use."""

    def __init__(
        self,
        clock: Clock,
        profile: CmmHProfile,
        *,
        name: str = "cmm-h0",
        folder: Path | None = None,
        phantom: bool = False,
        trailer_bytes: int = PAGE_BYTES,
        capacity_bytes: int | None = None,
        faults: FaultPlan | None = None,
        policy: str | None = None,
    ) -> None:
        self.clock = clock
        self.name = name
        self.profile = profile
        self.trailer_bytes = trailer_bytes
        self.page_bytes = PAGE_BYTES
        self.prefetch_depth = 0
        self.counters = CmmHCounters()
        whole = profile.ssd.capacity * profile.ssd_count
        self.capacity_bytes = (capacity_bytes or whole) // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes > whole:
            raise DeviceError(
                Status.BOUNDS,
                f"{name}: {self.capacity_bytes} B asked, its {profile.ssd_count} SSDs have {whole}",
            )
        granule = profile.cache_granule
        granules = profile.dram_capacity // granule
        self.arena: Arena | PhantomArena = (
            PhantomArena(granules * granule) if phantom else Arena(granules * granule)
        )
        self.cache = Cache(
            granules,
            granule_bytes=granule,
            ways=profile.associativity,
            policy=load_policy(policy or profile.policy),
        )
        self.port = Pipe(clock, f"{name}.port", profile.port_bandwidth)
        self.misses = Pipe(clock, f"{name}.misses", profile.miss_bandwidth)
        self.ssds = SsdArray(
            clock,
            profile.ssd,
            profile.ssd_count,
            backing=make_backing(
                phantom=phantom,
                folder=folder,
                size_bytes=self.capacity_bytes,
                stripe_bytes=granule,
                count=profile.ssd_count,
                name=name,
                split=True,
            ),
            stripe_bytes=granule,
            name=name,
            faults=faults,
        )
        self.on_frames_free: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int], None] = lambda _: None
        self._objects: dict[int, _Object] = {}
        self._fills: dict[Line, list[tuple[int, _Fill]]] = {}
        self._allocating = Budget(clock, 1, name=f"{name} allocation")
        self._writing = Budget(clock, 1, name=f"{name} write-back")
        self._unpinned: deque[Signal[None]] = deque()
        self._dirty_queue: deque[_Object] = deque()
        self._flusher: Job[None] | None = None
        self._jobs = JobSet(clock)

    # -- reads ----------------------------------------------------------------------------------

    def chm_prefetch_object(self, address: int, size_bytes: int) -> None:
        """Refuse: a transparent cache has no staging."""

    async def chm_prefetch_wait(self, request: object) -> None:
        """Never called: no prefetch request is ever handed out."""
        raise DeviceError(Status.NO_OBJECT, f"{self.name} has no staging")

    def chm_prefetch_release(self, request: object) -> None:
        """Never called: no prefetch request is ever handed out."""
        raise DeviceError(Status.NO_OBJECT, f"{self.name} has no staging")

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Pin the object's granules; start refills of what is missing, and let bytes stream."""
        stored = self._objects.get(address)
        if stored is None or not stored.committed or stored.size_bytes != size_bytes:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing committed at {address}")
        stored.readers += 1
        lines: list[Line] = []
        try:
            lines = await self._pin(stored.pieces)
            if self._objects.get(address) is not stored:
                raise DeviceError(Status.NO_OBJECT, f"{self.name}: {address} was discarded")
            fills = self._refill(stored, lines)
        except BaseException:
            self._unpin(lines)
            stored.readers -= 1
            raise
        return _View(self, stored, lines, fills)

    def _refill(self, stored: _Object, lines: list[Line]) -> list[_Fill]:
        """Start one refill of all missing pages; return it with those already on their way."""
        fills: list[_Fill] = []
        missing: list[tuple[Piece, Line]] = []
        for piece, line in zip(stored.pieces, lines, strict=True):
            lack = piece.mask & ~line.valid
            if not lack:
                self.counters.hits += 1
                continue
            for mask, fill in self._fills.get(line, ()):
                if mask & lack:
                    lack &= ~mask
                    if fill not in fills:
                        fills.append(fill)
            if lack:
                self.counters.misses += 1
                missing.append((piece, line))
        if missing:
            nbytes = sum(piece.length for piece, _ in missing)
            self.counters.refilled_bytes += nbytes
            runs = self._runs(missing)
            booking = self.misses.reserve(nbytes)
            for address, extents in runs:
                for part in self.ssds.book_read(address, sum(length for _, length in extents)):
                    booking.end_s = max(booking.end_s, part.end_s)
            booking.end_s += self.profile.ssd.read_latency
            fill = _Fill(booking, Signal(self.clock))
            for piece, line in missing:
                self._fills.setdefault(line, []).append((piece.mask, fill))
                line.pins += 1
            self._jobs.spawn(self._fetch(missing, runs, fill))
            fills.append(fill)
        return fills

    async def _fetch(
        self, missing: list[tuple[Piece, Line]], runs: list[tuple[int, list[Extent]]], fill: _Fill
    ) -> None:
        """Bring the bytes of a refill; its pages are valid when its time is over too."""
        error: DeviceError | None = None
        try:
            for address, extents in runs:
                await self.ssds.fetch(address, self.arena, extents)
            fill.done.set(None)
            await finished(self.clock, fill.booking)
            for piece, line in missing:
                line.valid |= piece.mask
        except DeviceError as failed:
            error = failed
        finally:
            for line in {line: None for _, line in missing}:
                left = [entry for entry in self._fills.pop(line) if entry[1] is not fill]
                if left:
                    self._fills[line] = left
            self._unpin([line for _, line in missing])
            fill.done.set(error)

    def _runs(self, parts: Iterable[tuple[Piece, Line]]) -> list[tuple[int, list[Extent]]]:
        """Join pieces that follow each other on the SSDs: (address, arena extents)."""
        runs: list[tuple[int, list[Extent]]] = []
        end = -1
        for piece, line in parts:
            extent = self.cache.extent(piece, line)
            if piece.address == end:
                runs[-1][1].append(extent)
            else:
                runs.append((piece.address, [extent]))
            end = piece.address + piece.length
        return runs

    # -- lines ----------------------------------------------------------------------------------

    async def _pin(self, pieces: tuple[Piece, ...]) -> list[Line]:
        """Return the lines of ``pieces``, pinned; evict others for those that are absent.

        Only one caller allocates at a time, and a caller that has all its lines waits for nothing
        more, so holders of lines cannot dead-lock each other.
        """
        lines = self.cache.pin_present(pieces)
        if lines is not None:
            return lines
        if len({piece.granule for piece in pieces}) > self.cache.granules:
            raise DeviceError(Status.BOUNDS, f"{self.name}: the object is larger than the cache")
        lines = []
        await self._allocating.take(1)
        try:
            for piece in pieces:
                while (line := self.cache.pin(piece.granule)) is None:
                    await self._make_room(piece.granule)
                lines.append(line)
        except BaseException:
            self._unpin(lines)
            raise
        finally:
            self._allocating.give(1)
        return lines

    async def _make_room(self, granule: int) -> None:
        """Write a dirty victim back, or wait until somebody unpins a line."""
        victim = self.cache.dirty_victim(granule)
        if victim is None:
            turn: Signal[None] = Signal(self.clock)
            self._unpinned.append(turn)
            await turn.wait()
            return
        victim.pins += 1
        try:
            for stored in self.cache.owners(victim):
                await self._write_back(self._objects.get(stored))
        finally:
            self._unpin([victim])

    def _unpin(self, lines: Iterable[Line]) -> None:
        free = False
        for line in lines:
            line.pins -= 1
            free = free or not line.pins
        while free and self._unpinned:
            self._unpinned.popleft().set(None)

    # -- writes ---------------------------------------------------------------------------------

    def admit(self, address: int, size_bytes: int) -> bool:
        """Accept: a transparent cache never refuses a write inside its capacity."""
        if address in self._objects:
            raise ValueError(f"{self.name}: address {address} is already taken")
        payload, trailer = page_ceil(size_bytes), page_ceil(self.trailer_bytes)
        if address + payload + trailer > self.capacity_bytes:
            return False
        pieces = self.cache.pieces
        self._objects[address] = _Object(
            address, size_bytes, pieces(address, payload), pieces(address + payload, trailer)
        )
        return True

    async def ready_to_receive(self, address: int) -> None:
        """Allocate and pin the granules of an admitted object; dirty victims go out first."""
        stored = self._objects.get(address)
        if stored is None or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        if stored.lines is None:
            lines = await self._pin(stored.pieces)
            if self._objects.get(address) is not stored or stored.lines is not None:
                self._unpin(lines)  # cancelled, or made ready by another WRITE meanwhile
                return
            stored.lines = lines

    def receive(self, address: int, payload: Buffer, trailer: Bytes | None) -> None:
        """Store the bytes of a WRITE into the cache, as dirty pages."""
        stored = self._objects.get(address)
        if stored is None or stored.committed or stored.lines is None:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        if payload.nbytes != stored.size_bytes:
            raise DeviceError(
                Status.BOUNDS, f"{self.name}: {payload.nbytes} B for {stored.size_bytes} reserved"
            )
        extents = [
            self.cache.extent(piece, line)
            for piece, line in zip(stored.pieces, stored.lines, strict=True)
        ]
        self.arena.store(extents[: len(stored.payload)], payload)
        if trailer is not None and stored.trailer:
            self.arena.store(extents[len(stored.payload) :], trailer)
        for piece, line in zip(stored.pieces, stored.lines, strict=True):
            line.valid |= piece.mask
            line.dirty |= piece.mask
            self.cache.own(line, address)
        stored.received = True

    def commit(self, address: int) -> None:
        """Make the object readable; eager write-back starts."""
        stored = self._objects.get(address)
        if stored is None or not stored.received or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing received at {address}")
        stored.committed = True
        assert stored.lines is not None
        lines, stored.lines = stored.lines, None
        self._unpin(lines)
        if self.profile.eager_write_back:
            self._queue_write_back(stored)

    def cancel(self, address: int) -> None:
        """Give up a reservation that was not committed."""
        stored = self._objects.get(address)
        if stored is None or stored.committed:
            raise ValueError(f"{self.name}: no open reservation at {address}")
        self._forget(stored)

    def discard(self, address: int, size_bytes: int) -> None:
        """Forget a committed object: its pages are dropped without write-back."""
        stored = self._objects.get(address)
        if stored is not None:
            self._forget(stored)
            self.ssds.backing.discard(
                address, page_ceil(size_bytes) + page_ceil(self.trailer_bytes)
            )

    def _forget(self, stored: _Object) -> None:
        del self._objects[stored.address]
        if stored.lines is not None:
            self._unpin(stored.lines)
        for piece in stored.pieces:
            self.cache.drop_pages(piece, stored.address)

    # -- write-back -----------------------------------------------------------------------------

    def _queue_write_back(self, stored: _Object) -> None:
        self._dirty_queue.append(stored)
        if self._flusher is None or self._flusher.done():
            self._flusher = self._jobs.spawn(self._flush(), name=f"{self.name} write-back")

    async def _flush(self) -> None:
        while self._dirty_queue:
            await self._write_back(self._dirty_queue.popleft())

    async def _write_back(self, stored: _Object | None) -> None:
        """Write an object's dirty pages, in order with all other write-backs."""
        if stored is None:
            return
        await self._writing.take(1)
        try:
            dirty = self._dirty_parts(stored)
            if not dirty:
                return
            for _, line in dirty:
                line.pins += 1
            try:
                kept = await self._write_parts(dirty)
            finally:
                self._unpin([line for _, line in dirty])
            if self._objects.get(stored.address) is not stored:
                return  # discarded meanwhile
            for piece, line in dirty:
                line.dirty &= ~piece.mask
            if kept:
                self.counters.written_back += 1
            else:
                self.counters.lost += 1
                self.on_lost(stored.address)
        finally:
            self._writing.give(1)

    def _dirty_parts(self, stored: _Object) -> list[tuple[Piece, Line]]:
        if self._objects.get(stored.address) is not stored or not stored.committed:
            return []
        lines = ((piece, self.cache.line(piece.granule)) for piece in stored.pieces)
        return [(p, line) for p, line in lines if line is not None and line.dirty & p.mask]

    async def _write_parts(self, dirty: list[tuple[Piece, Line]]) -> bool:
        for address, extents in self._runs(dirty):
            for attempt in range(WRITE_BACK_TRIES):
                try:
                    await self.ssds.write(address, self.arena, extents, priority=0)
                    break
                except DeviceError:
                    self.counters.write_back_failed += 1
                    if attempt == WRITE_BACK_TRIES - 1:
                        return False
        return True

    # -- housekeeping ---------------------------------------------------------------------------

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody; dirty data is not."""
        objects = self._objects.values()
        return {
            "cache reservations": sum(not stored.committed for stored in objects),
            "cache readers": sum(stored.readers for stored in objects),
            "cache pins": self.cache.pins,
            "refills": len(self._fills),
        }

    async def quiesce(self) -> None:
        """Write everything back that is dirty."""
        for stored in list(self._objects.values()):
            if stored.committed and self._dirty_parts(stored):
                self._queue_write_back(stored)
        if self._flusher is not None and not self._flusher.done():
            await self._flusher.ended()

    async def close(self) -> None:
        """Stop write-back (what is dirty is lost) and release memory and files."""
        await self._jobs.cancel()
        self.ssds.backing.close()
        self.arena.close()


class _View:
    """A pinned object, and the refills that its bytes may still wait for."""

    __slots__ = ("_device", "_fills", "_lines", "_object", "_open", "bookings", "port")

    def __init__(
        self, device: CmmH, stored: _Object, lines: list[Line], fills: list[_Fill]
    ) -> None:
        self.port = device.port
        self.bookings: tuple[Reservation, ...] = tuple(fill.booking for fill in fills)
        self._device = device
        self._object = stored
        self._lines = lines
        self._fills = fills
        self._open = True

    async def arrived(self) -> None:
        for fill in self._fills:
            error = await fill.done.wait()
            if error is not None:
                raise error

    def copy_into(self, payload: Buffer, trailer: Bytes | None, digest: Digest | None) -> None:
        stored, cache = self._object, self._device.cache
        extents = [
            cache.extent(piece, line)
            for piece, line in zip(stored.pieces, self._lines, strict=True)
        ]
        self._device.arena.load(extents[: len(stored.payload)], payload, digest)
        if trailer is not None and stored.trailer:
            self._device.arena.load(extents[len(stored.payload) :], trailer)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._object.readers -= 1
            self._device._unpin(self._lines)
