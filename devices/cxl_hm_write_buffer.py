"""The write buffer of a CXL-HM: admission, and the flush behind it (HyMCache §3.3-3.4).

A write is admitted only while frames of the buffer are free, and refused at once otherwise. Its
life: RESERVED → RECEIVED (the RDMA WRITE came) → COMMITTED (all bytes are in place: readable, and
eligible for flush) → FLUSHING → DONE. Flushing goes in batches of ``flush_batch`` bytes, behind all
reads (priority 1 on the SSDs): within a batch the next object is written while the one before it
is still being programmed; a batch begins when the one before it is on the flash. Objects leave the
buffer in the order of their commits, and the frames of one that is read at that moment stay until
the reader has gone.

Units: bytes, s. Left out: power loss, and coalescing of neighbours.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum

from cxlbench.devices.ssd import SsdArray
from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.fabric import ObjectExtents
from cxlbench.emu.memory import Arena, Extent, FramePool, PhantomArena, page_ceil
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Signal

FLUSH_TRIES = 3


class Phase(Enum):
    """Where a buffered object is in its life."""

    RESERVED = "reserved"
    RECEIVED = "received"
    COMMITTED = "committed"
    FLUSHING = "flushing"
    DONE = "done"


class Buffered:
    """One object in the write buffer. ``pins`` are those of its readers."""

    __slots__ = ("address", "extents", "footer", "frames", "phase", "pins", "size_bytes")

    def __init__(self, address: int, size_bytes: int, frames: list[int], footer: list[int]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.frames = frames
        self.footer = footer
        self.extents: list[Extent] = []
        self.phase = Phase.RESERVED
        self.pins = 0


class WriteBuffer:
    """The buffered objects of a device; ``on_lost`` gets the address of what cannot be flushed."""

    def __init__(
        self,
        clock: Clock,
        *,
        frames: FramePool,
        footers: FramePool,
        trailer_bytes: int,
        trailer_cost_bytes: int,
        batch_bytes: int,
        arena: Arena | PhantomArena,
        ssds: SsdArray,
        name: str,
        on_lost: Callable[[int], None],
    ) -> None:
        self.clock = clock
        self.name = name
        self.frames = frames
        self.footers = footers
        self.trailer_bytes = trailer_bytes
        self.trailer_cost_bytes = trailer_cost_bytes
        self.batch_bytes = batch_bytes
        self.arena = arena
        self.ssds = ssds
        self.entries: OrderedDict[int, Buffered] = OrderedDict()
        """What is here and not discarded, by address."""
        self.flushing = 0
        """Objects on their way to the flash."""
        self.admitted = 0
        self.refused = 0
        self.flushed = 0
        self.batches = 0
        self.failed = 0
        self.lost = 0
        self._on_lost = on_lost
        self._queue: deque[Buffered] = deque()
        self._wake: Signal[None] = Signal(clock)
        self._idle: Signal[None] | None = None
        self._jobs = JobSet(clock)
        self._flusher: Job[None] | None = None
        self._closed = False

    def admit(self, address: int, size_bytes: int) -> bool:
        """Reserve frames for an object, all or none."""
        if address in self.entries:
            raise ValueError(f"{self.name}: address {address} is already being written")
        footer = self.footers.take(1) if self.trailer_bytes else []
        frames = self.frames.take(self.frames.needed(size_bytes)) if footer is not None else None
        if frames is None or footer is None:
            if footer:
                self.footers.give(footer)
            self.refused += 1
            return False
        entry = Buffered(address, size_bytes, frames, footer)
        entry.extents = self.frames.extents(frames, size_bytes)
        if footer:
            entry.extents += self.footers.extents(footer, self.trailer_bytes)
        self.entries[address] = entry
        self.admitted += 1
        return True

    def landing(self, address: int) -> ObjectExtents:
        """Return the frames that the bytes of a reserved object go to."""
        entry = self._open_entry(address)
        if entry is None:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        return self.extents_of(entry)

    def landed(self, address: int) -> None:
        """Note that the bytes of a reserved object are there."""
        entry = self._open_entry(address)
        if entry is None:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        entry.phase = Phase.RECEIVED

    def extents_of(self, entry: Buffered) -> ObjectExtents:
        """Return where an object lies."""
        payload = len(entry.extents) - len(entry.footer)
        return ObjectExtents(
            entry.extents[:payload], entry.extents[payload:], entry.size_bytes, self.trailer_bytes
        )

    def commit(self, address: int) -> None:
        """Make the object readable and eligible for flush."""
        entry = self.entries.get(address)
        if entry is None or entry.phase is not Phase.RECEIVED:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing received at {address}")
        entry.phase = Phase.COMMITTED
        self._queue.append(entry)
        if self._flusher is None:
            self._flusher = self._jobs.spawn(self._flush_forever(), name=f"{self.name} flush")
        self._wake.set(None)

    def cancel(self, address: int) -> None:
        """Free a reservation that was not committed."""
        entry = self._open_entry(address)
        if entry is None:
            raise ValueError(f"{self.name}: no open reservation at {address}")
        self.end(entry)

    def discard(self, address: int) -> None:
        """Forget a committed object: its flush is saved, or goes on for nobody."""
        entry = self.entries.get(address)
        if entry is not None and entry.phase is Phase.COMMITTED:
            self._queue.remove(entry)
            self.end(entry)
        elif entry is not None and entry.phase is Phase.FLUSHING:
            # Its write goes on, and ends before that of whatever is stored here next.
            del self.entries[address]

    def readable(self, address: int) -> Buffered | None:
        """Return the committed object at ``address``, if it is here."""
        entry = self.entries.get(address)
        if entry is None or entry.phase in (Phase.RESERVED, Phase.RECEIVED):
            return None
        return entry

    def unpin(self, entry: Buffered) -> None:
        """Take a reader's pin back."""
        entry.pins -= 1
        if entry.phase is Phase.DONE:
            self.end(entry)

    def _open_entry(self, address: int) -> Buffered | None:
        entry = self.entries.get(address)
        if entry is None or entry.phase not in (Phase.RESERVED, Phase.RECEIVED):
            return None
        return entry

    # -- flush ----------------------------------------------------------------------------------

    async def _flush_forever(self) -> None:
        while not self._closed:
            if self._queue:
                await self._flush_batch()
                continue
            self._wake = Signal(self.clock)
            self._tell_if_idle()
            await self._wake.wait()

    async def _flush_batch(self) -> None:
        self.batches += 1
        room = self.batch_bytes
        while self._queue and room > 0:
            entry = self._queue.popleft()
            room -= entry.size_bytes
            entry.phase = Phase.FLUSHING
            self.flushing += 1
            last = not self._queue or room <= 0
            try:
                written = await self._write(entry, program=last)
            except BaseException:  # cut off: nobody will settle it
                self.flushing -= 1
                self.end(entry)
                raise
            programmed = last and written
            due_s = self.clock.now() + (0.0 if programmed else self.ssds.program_latency_s)
            if last:
                await self.settle(entry, written, due_s)
            else:
                self._jobs.spawn(self.settle(entry, written, due_s))

    async def _write(self, entry: Buffered, *, program: bool) -> bool:
        """Bring an object to the SSDs, and its programming to an end; False if they refuse it."""
        cost = page_ceil(entry.size_bytes) + self.trailer_cost_bytes
        for _ in range(FLUSH_TRIES):
            try:
                await self.ssds.write(
                    entry.address,
                    self.arena,
                    entry.extents,
                    priority=1,
                    program=program,
                    cost_bytes=cost,
                )
            except DeviceError:
                self.failed += 1
            else:
                return True
        return False

    async def settle(self, entry: Buffered, written: bool, due_s: float) -> None:
        """End a flush when the flash is programmed, in the order of the writes."""
        try:
            if due_s > self.clock.now():
                await self.clock.sleep_until(due_s)
            if written:
                self.flushed += 1
                return
            # What lies at the address now is not the object: its owner must forget it first.
            self.lost += 1
            if self.entries.get(entry.address) is entry:
                self._on_lost(entry.address)
        finally:
            self.flushing -= 1
            self.end(entry)
            self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if self._idle is not None and not self._queue and not self.flushing:
            self._idle.set(None)
            self._idle = None

    def end(self, entry: Buffered) -> None:
        """End the buffer's copy, but for those who read it right now."""
        entry.phase = Phase.DONE
        if self.entries.get(entry.address) is entry:
            del self.entries[entry.address]
        if not entry.pins:
            self.frames.give(entry.frames)
            self.footers.give(entry.footer)

    async def quiesce(self) -> None:
        """Wait until everything committed is flushed, or the buffer is closed."""
        while not self._closed and (self._queue or self.flushing):
            if self._idle is None or self._idle.is_set():
                self._idle = Signal(self.clock)
            await self._idle.wait()

    async def close(self) -> None:
        """Stop flushing; what is not flushed is lost."""
        self._closed = True
        if self._idle is not None:
            self._idle.set(None)
        await self._jobs.cancel()
