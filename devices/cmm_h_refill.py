"""How CMM-H gets missing pages from its SSDs, and frames to put them in.

A refill books the SSDs for the missing bytes, in whole refill units, and the *miss engine*: a pipe
as fast as ``outstanding_misses`` refills of ``refill_unit`` in flight allow (``miss_bandwidth`` of
the profile). Where the SSDs are slowed down by writes, each of these refills takes longer, so the
engine slows down with them. The pages are valid when the time of the refill is over and the real
bytes are there; who misses them meanwhile shares the refill.

Units: bytes, s. Left out: what a refill unit brings along beyond the object that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cxlbench.devices.arena_access import ArenaView
from cxlbench.devices.cmm_h_cache import Cache, Line, Piece, Transfer, runs
from cxlbench.devices.cmm_h_write_back import WriteBack
from cxlbench.devices.profile_kinds import CmmHProfile
from cxlbench.devices.ssd import SsdArray
from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.fabric import ObjectExtents
from cxlbench.emu.memory import PAGE_BYTES, AnyArena, Extent
from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget, Signal


class Frames:
    """Pins lines for readers and writers, and waits for frames where there are none."""

    def __init__(self, clock: Clock, cache: Cache, write_back: WriteBack, *, name: str) -> None:
        self.readers = 0
        """Views that are open."""
        self._clock = clock
        self._cache = cache
        self._write_back = write_back
        self._name = name
        self._allocating = Budget(clock, 1, name=f"{name} allocation")
        self._room: Signal[None] | None = None
        self._closed = False
        write_back.on_clean = self.wake

    async def pin(self, pieces: Sequence[Piece]) -> list[Line]:
        """Return the lines of ``pieces``, pinned; others are evicted for those that are absent.

        Only one caller allocates at a time, and a caller that has all its lines waits for nobody's
        lines any more, so that holders of lines cannot dead-lock each other.
        """
        lines = self._cache.pin_present(pieces)
        if lines is not None:
            return lines
        lines = []
        await self._allocating.take(1)
        try:
            while (granule := self._cache.pin(pieces, lines)) is not None:
                if self._closed:
                    raise DeviceError(Status.FLUSHED, f"{self._name}: the device is closed")
                await self._make_room(granule)
        except BaseException:
            self.unpin(lines)
            raise
        finally:
            self._allocating.give(1)
        return lines

    async def _make_room(self, granule: int) -> None:
        """Wait until the victim can go: it is written back first, or its transfers end."""
        victim = self._cache.condemned(granule)
        if victim is None:
            if self._room is None:
                self._room = Signal(self._clock)
            await self._room.wait()
        elif victim.transfers:
            await victim.transfers[0][1].ended.wait()
        else:
            self._cache.counters.dirty_evictions += 1
            await self._write_back.clean(victim)

    def unpin(self, lines: Iterable[Line]) -> None:
        """Take pins back."""
        if self._cache.unpin(lines):
            self.wake()

    def wake(self) -> None:
        """Let who waits for a frame look again."""
        if self._room is not None:
            waited, self._room = self._room, None
            waited.set(None)

    def close(self) -> None:
        """Refuse who waits for a frame."""
        self._closed = True
        self.wake()


class MissEngine:
    """Refills missing pages of pinned lines."""

    def __init__(
        self,
        clock: Clock,
        profile: CmmHProfile,
        cache: Cache,
        ssds: SsdArray,
        arena: AnyArena,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._profile = profile
        self._cache = cache
        self._ssds = ssds
        self._arena = arena
        self._on_end = on_end
        self._pipe = Pipe(clock, f"{ssds.name}.misses", profile.miss_bandwidth)
        unit = int(profile.refill_unit / profile.scale)
        self._unit = unit if unit > PAGE_BYTES else 1
        self._jobs = JobSet(clock)
        self._running: dict[Transfer, list[Line]] = {}

    @property
    def running(self) -> int:
        """Refills that have not ended."""
        return len(self._running)

    def refill(
        self, pieces: Sequence[Piece], lines: Sequence[Line], *, wanted: Callable[[], bool]
    ) -> list[Transfer]:
        """Start one refill of all missing pages; return it with those already on their way.

        ``wanted`` says at the end whether the object is still there.
        """
        counters = self._cache.counters
        fills: list[Transfer] = []
        missing: list[tuple[Piece, Line]] = []
        last = -1
        for piece, line in zip(pieces, lines, strict=True):
            granule, last = int(piece.granule != last), piece.granule
            lack = piece.pages & ~line.valid
            if not lack:
                counters.hits += granule
                counters.hit_bytes += piece.length
                continue
            counters.misses += granule
            counters.missed_bytes += piece.length
            fill = line.moves(lack)
            if fill is None:
                missing.append((piece, line))
            elif fill not in fills:
                fills.append(fill)
        if missing:
            fills.append(self._start(missing, wanted))
        return fills

    def _start(self, missing: list[tuple[Piece, Line]], wanted: Callable[[], bool]) -> Transfer:
        reads = runs(missing)
        booking = self._book(
            [(address, sum([length for _, length in extents])) for address, extents in reads]
        )
        fill = Transfer(Signal(self._clock), booking, Signal(self._clock))
        for piece, line in missing:
            line.transfers += ((piece.pages, fill),)
        self._running[fill] = [line for _, line in missing]
        self._jobs.spawn(self._fetch(reads, missing, fill, wanted))
        return fill

    def _book(self, spans: list[tuple[int, int]]) -> Reservation:
        """Book SSDs and engine, and return when all is there."""
        whole = [self._whole_units(address, nbytes) for address, nbytes in spans]
        nbytes = sum([length for _, length in whole])
        reads = [read for span in whole for read in self._ssds.book_read(*span)]
        ssd = self._profile.ssd
        fastest = [max(r.nbytes / ssd.read_bandwidth, 1 / ssd.read_iops) for r in reads]
        stretch = max(r.cost_s / best for r, best in zip(reads, fastest, strict=True))
        cost_s = nbytes / self._profile.miss_bandwidth * stretch
        engine = self._pipe.reserve(nbytes, cost_s=cost_s)
        booking = Reservation(self._pipe, nbytes, cost_s, 0)
        booking.start_s = engine.start_s
        booking.end_s = max(engine.end_s, *[r.end_s for r in reads]) + ssd.read_latency * stretch
        self._cache.counters.refills += 1
        self._cache.counters.refilled_bytes += nbytes
        return booking

    def _whole_units(self, address: int, nbytes: int) -> tuple[int, int]:
        """Widen a range to refill units; at a scale they are smaller, as objects are."""
        unit = self._unit
        begin = address // unit * unit
        return begin, -(-(address + nbytes) // unit) * unit - begin

    async def _fetch(
        self,
        reads: list[tuple[int, list[Extent]]],
        missing: list[tuple[Piece, Line]],
        fill: Transfer,
        wanted: Callable[[], bool],
    ) -> None:
        assert fill.arrived is not None
        assert fill.booking is not None
        error = self._cut_off()
        try:
            for address, extents in reads:
                await self._ssds.fetch(address, self._arena, extents)
            fill.arrived.set(None)
            await self._clock.sleep_until(fill.booking.end_s)
            if wanted():
                for piece, line in missing:
                    line.valid |= piece.pages
        except DeviceError as failed:
            error = failed
        finally:
            self._end(fill, error)

    def _end(self, fill: Transfer, error: DeviceError) -> None:
        """End a refill: ``error`` is for those whose bytes have not arrived yet."""
        assert fill.arrived is not None
        fill.arrived.set(error)
        for line in self._running.pop(fill):
            line.end(fill)
            if not line.valid:
                self._cache.release_if_empty(line)
        fill.ended.set(None)
        self._on_end()

    def _cut_off(self) -> DeviceError:
        return DeviceError(Status.FLUSHED, f"{self._ssds.name}: a refill was cut off")

    async def idle(self) -> None:
        """Wait until no refill is running."""
        while self._running:
            await next(iter(self._running)).ended.wait()

    async def close(self) -> None:
        """Stop all refills; who waits for one gets a ``DeviceError`` (FLUSHED)."""
        await self._jobs.cancel()
        for fill in list(self._running):  # a task cancelled before its first step never ran
            self._end(fill, self._cut_off())


class CachedView(ArenaView):
    """A pinned object, and the refills that its bytes may still wait for."""

    def __init__(
        self,
        port: Pipe,
        arena: AnyArena,
        extents: ObjectExtents,
        frames: Frames,
        lines: list[Line],
        fills: list[Transfer],
    ) -> None:
        bookings = [fill.booking for fill in fills if fill.booking is not None]
        super().__init__(port, arena, extents, bookings)
        self._frames = frames
        self._lines = lines
        self._fills = fills
        frames.readers += 1

    async def arrived(self) -> None:
        """Wait for the bytes of refills; raise ``DeviceError`` if they could not be had."""
        for fill in self._fills:
            assert fill.arrived is not None
            error = await fill.arrived.wait()
            if error is not None:
                raise error

    def unpin(self) -> None:
        """Take the pins back."""
        self._frames.readers -= 1
        self._frames.unpin(self._lines)
