"""How CMM-H brings dirty pages to its SSDs: eagerly, before an eviction, or at the end of a run.

HyMCache §3.3: dirty data is propagated to flash in the background with nothing that keeps it from
reads, so write-back has the priority of reads (0) here. What is dirty and adjacent is written as
one; an object's dirty pages go together, even where only one granule of it must go, so that an
event stands for many pages. A write that fails is tried again, then its objects are lost.

At most ``window_bytes`` are in flight (the commands that the SSDs queue), but two writes of any
size always may: while one programs the flash, the next is transferred. Small ones are joined up to
a quarter of the window.
Units: bytes, s. Left out: garbage collection, and any order among writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cxlbench.devices.cmm_h_cache import Cache, Line, Piece, Transfer, runs
from cxlbench.devices.ssd import SsdArray
from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import AnyArena
from cxlbench.emu.status import DeviceError
from cxlbench.emu.sync import Budget, Signal

WRITE_BACK_TRIES = 3


@dataclass(eq=False, slots=True)
class _Dirty:
    """What one WRITE of an object left dirty: so many pieces."""

    pieces: int


class _Part(NamedTuple):
    """A piece of an object, dirty in a line since the WRITE that ``since`` stands for."""

    owner: int
    piece: Piece
    line: Line
    since: _Dirty


@dataclass(eq=False, slots=True)
class _Write:
    """Adjacent dirty parts, about to be written or being written."""

    parts: list[_Part]
    units: int
    transfer: Transfer


class WriteBack:
    """Writes the dirty pages of a cache.

    ``pieces_of`` gives the pieces of the object at an address (none if there is no object any
    more); ``on_lost`` is told of an object that cannot be written.
    """

    def __init__(
        self,
        clock: Clock,
        cache: Cache,
        ssds: SsdArray,
        arena: AnyArena,
        *,
        window_bytes: int,
        eager: bool,
        pieces_of: Callable[[int], Sequence[Piece]],
        on_lost: Callable[[int], None],
    ) -> None:
        self.on_clean: Callable[[], None] = lambda: None
        """Called when lines may have become evictable."""
        self._clock = clock
        self._cache = cache
        self._ssds = ssds
        self._arena = arena
        self._counters = cache.counters
        self._pieces_of = pieces_of
        self._on_lost = on_lost
        self._eager = eager
        self._share = max(1, window_bytes // 2)
        self._window = Budget(clock, 2 * self._share, name=f"{ssds.name} write-back")
        self._dirty: dict[int, _Dirty] = {}
        """By address: objects with dirty pages."""
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._flusher: Job[None] | None = None
        self._open: dict[_Write, None] = {}
        self._jobs = JobSet(clock)
        self._closed = False

    def mark_dirty(self, address: int, pieces: Sequence[Piece], lines: Sequence[Line]) -> None:
        """Note that the object at ``address`` was written into ``lines``; if eager, start."""
        for piece, line in zip(pieces, lines, strict=True):
            line.dirty |= piece.pages
            if line.dirty_objects[-1:] != (address,):
                line.dirty_objects += (address,)
        self._dirty[address] = _Dirty(len(pieces))
        if self._eager:
            self._start(address)

    def forget(self, address: int) -> None:
        """Note that the object is gone, or lost: nothing of it needs to be written any more."""
        self._dirty.pop(address, None)

    def _start(self, address: int) -> None:
        """Write an object's dirty pages soon, in the background."""
        self._queue[address] = None
        if self._flusher is None or self._flusher.done():
            self._flusher = self._jobs.spawn(self._flush(), name=f"{self._ssds.name} write-back")

    async def clean(self, line: Line) -> None:
        """Write all objects with dirty pages in ``line``; return when they are written or lost."""
        parts = [part for owner in line.dirty_objects for part in self._dirty_parts(owner)]
        writes = self._begin(parts)
        assert writes, "a dirty line belongs to objects"
        # In a job of its own: who waits may be cancelled, what was begun must end.
        self._jobs.spawn(self._issue(writes))
        for write in writes:
            await write.transfer.ended.wait()

    async def drain(self) -> None:
        """Write everything that is dirty, or return when the device is closed."""
        while self._dirty and not self._closed:
            for address in list(self._dirty):
                self._start(address)
            assert self._flusher is not None
            await self._flusher.ended()
            while self._open:
                await next(iter(self._open)).transfer.ended.wait()

    async def close(self) -> None:
        """Stop; what is still dirty is lost."""
        self._closed = True
        await self._jobs.cancel()
        for write in list(self._open):
            self._end(write)

    async def _flush(self) -> None:
        while self._queue:
            parts: list[_Part] = []
            nbytes = 0
            while self._queue and nbytes < self._share // 2:
                found = self._dirty_parts(self._queue.popitem(last=False)[0])
                nbytes += sum([part.piece.length for part in found])
                parts += found
            await self._issue(self._begin(parts))

    def _dirty_parts(self, owner: int) -> list[_Part]:
        """Return the object's dirty parts that nobody is writing yet."""
        parts: list[_Part] = []
        since = self._dirty.get(owner)
        if since is None:
            return parts
        for piece in self._pieces_of(owner):
            line = self._cache.line(piece.granule)
            if (
                line is not None
                and line.dirty & piece.pages
                and not (line.transfers and line.moves(piece.pages))
            ):
                parts.append(_Part(owner, piece, line, since))
        return parts

    def _begin(self, parts: list[_Part]) -> list[_Write]:
        """Make writes of adjacent parts; from now on these pages are in a transfer."""
        parts.sort(key=lambda part: part.piece.address)
        writes: list[_Write] = []
        end = -1
        for part in parts:
            if part.piece.address != end:
                writes.append(_Write([], 0, Transfer(Signal(self._clock))))
            write = writes[-1]
            write.parts.append(part)
            write.units = min(write.units + part.piece.length, self._share)
            part.line.transfers += ((part.piece.pages, write.transfer),)
            end = part.piece.address + part.piece.length
        self._open.update(dict.fromkeys(writes))
        return writes

    async def _issue(self, writes: Iterable[_Write]) -> None:
        for write in writes:
            await self._window.take(write.units)
            self._jobs.spawn(self._write(write))

    async def _write(self, write: _Write) -> None:
        lost: dict[int, None] = {}
        # What was discarded while it waited for its turn is not dirty any more.
        parts = [part for part in write.parts if self._is_current(part)]
        try:
            for address, extents in runs([(part.piece, part.line) for part in parts]):
                inside = range(address, address + sum([length for _, length in extents]))
                if not await self._try_write(address, extents):
                    lost.update({p.owner: None for p in parts if p.piece.address in inside})
            # New bytes may have come into the pages meanwhile: those are still dirty.
            parts = [part for part in parts if self._is_current(part)]
            lost = {p.owner: None for p in parts if p.owner in lost}
            for owner, piece, line, since in parts:
                line.dirty &= ~piece.pages
                if not line.dirty:
                    line.dirty_objects = ()
                since.pieces -= 1
                if not since.pieces:
                    del self._dirty[owner]
                    self._counters.written_back += owner not in lost
        finally:
            self._window.give(write.units)
            self._end(write)
        for owner in lost:
            self._on_lost(owner)
        if self._eager:
            # New bytes in pages that were in this transfer wait for one of their own.
            for part in write.parts:
                for owner in part.line.dirty_objects:
                    self._start(owner)

    def _is_current(self, part: _Part) -> bool:
        return self._dirty.get(part.owner) is part.since

    async def _try_write(self, address: int, extents: list[tuple[int, int]]) -> bool:
        for _ in range(WRITE_BACK_TRIES):
            try:
                await self._ssds.write(address, self._arena, extents, priority=0)
            except DeviceError:
                self._counters.write_back_failed += 1
            else:
                self._counters.written_back_bytes += sum([length for _, length in extents])
                return True
        return False

    def _end(self, write: _Write) -> None:
        """Take the transfer off its lines, and let go of what became empty meanwhile."""
        del self._open[write]
        for line in dict.fromkeys(part.line for part in write.parts):
            line.end(write.transfer)
            if not line.valid:
                self._cache.release_if_empty(line)
        write.transfer.ended.set(None)
        self.on_clean()
