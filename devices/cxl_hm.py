"""CXL-HM: a CXL memory device with a small DRAM that software manages, in front of SSDs.

HyMCache §3.3-3.4. The internal DRAM is split *at start*, and stays split, into staging frames (for
reads) and a write buffer. Reads are served from a staged object, from the write buffer, or by a
*demand miss*, which copies the whole object from the SSDs into frames before it is returned.
Software stages ahead of the reads by three calls: ``chm_prefetch_object``, ``chm_prefetch_wait``,
``chm_prefetch_release``. A prefetch takes all its frames or none, and is refused at once when the
depth or the frames are exhausted. Some frames are kept back for demand misses, or holders of
prefetches could dead-lock them. Writes are admitted only while buffer space is free, and flushed
later, in batches, behind all reads.

Each object may have a *trailer* (a footer page after the payload) with small slots of its own.
Units: bytes, s. Left out: sub-object staging, wear levelling, DRAM refresh, power loss (a node that
starts again makes a new device on the old files).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cxlbench.devices.profile_kinds import CxlHmProfile
from cxlbench.devices.ssd import SsdArray, make_backing
from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.fabric import PrefetchRequest, ReadView
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import (
    PAGE_BYTES,
    Arena,
    Buffer,
    Bytes,
    Digest,
    Extent,
    FramePool,
    PhantomArena,
    page_ceil,
)
from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget, Signal

FLUSH_TRIES = 3


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class Counters:
    """What the device did since it was made."""

    staged: int = 0
    prefetch_refused: int = 0
    reads_staged: int = 0
    reads_buffered: int = 0
    reads_demand: int = 0
    admitted: int = 0
    write_refused: int = 0
    flushed: int = 0
    flush_batches: int = 0
    flush_failed: int = 0
    lost: int = 0


class Staging:
    """One object in staging frames, shared by all who prefetched or demanded it."""

    __slots__ = (
        "address",
        "demand",
        "extents",
        "footer",
        "frames",
        "holders",
        "prefetches",
        "ready",
        "size_bytes",
    )

    def __init__(
        self, clock: Clock, address: int, size_bytes: int, frames: list[int], footer: int | None
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.frames = frames
        self.footer = footer
        self.extents: list[Extent] = []
        self.holders = 1
        self.demand = False
        self.prefetches = 0
        self.ready: Signal[DeviceError | None] = Signal(clock)


@dataclass(eq=False, slots=True)
class Prefetch:
    """The handle of one prefetch request."""

    address: int
    size_bytes: int
    staging: Staging | None


class _Phase(Enum):
    RESERVED = "reserved"
    RECEIVED = "received"
    COMMITTED = "committed"
    FLUSHING = "flushing"
    DONE = "done"


class _Buffered:
    """One object in the write buffer."""

    __slots__ = ("address", "extents", "footer", "frames", "phase", "pins", "size_bytes")

    def __init__(self, address: int, size_bytes: int, frames: list[int]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.frames = frames
        self.footer: int | None = None
        self.extents: list[Extent] = []
        self.phase = _Phase.RESERVED
        self.pins = 0


class CxlHm:
    """The device. Satisfies ``MemoryDevice`` of the KV layer without knowing it."""

    def __init__(
        self,
        clock: Clock,
        profile: CxlHmProfile,
        *,
        name: str = "cxl-hm0",
        folder: Path | None = None,
        phantom: bool = False,
        trailer_bytes: int = PAGE_BYTES,
        capacity_bytes: int | None = None,
        faults: FaultPlan | None = None,
        arena: Arena | PhantomArena | None = None,
    ) -> None:
        self.clock = clock
        self.name = name
        self.profile = profile
        self.trailer_bytes = trailer_bytes
        self.page_bytes = PAGE_BYTES
        self.prefetch_depth = profile.prefetch_depth
        self.counters = Counters()
        ssd = profile.ssd
        whole = ssd.capacity * profile.ssd_count
        self.capacity_bytes = (capacity_bytes or whole) // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes > whole:
            raise DeviceError(
                Status.BOUNDS,
                f"{name}: {self.capacity_bytes} B asked, its {profile.ssd_count} SSDs have {whole}",
            )
        frame = profile.staging_frame
        buffer_frames = int(profile.dram_capacity * profile.write_buffer_share) // frame
        staging_frames = profile.dram_capacity // frame - buffer_frames
        self._reserve_frames = -(-profile.demand_reserve // frame)
        slots = page_ceil(trailer_bytes)
        # Trailers have page-sized slots beside the frames: one for each object that can be held.
        footers = 2 * (staging_frames + buffer_frames) if trailer_bytes else 0
        total = (staging_frames + buffer_frames) * frame + footers * slots
        self.arena: Arena | PhantomArena = arena or (
            PhantomArena(total) if phantom else Arena(total)
        )
        self._staging = FramePool(
            base=0, frame_bytes=frame, count=staging_frames, name=f"{name} staging"
        )
        self._write_buffer = FramePool(
            base=staging_frames * frame,
            frame_bytes=frame,
            count=buffer_frames,
            name=f"{name} write buffer",
        )
        self._footers = FramePool(
            base=(staging_frames + buffer_frames) * frame,
            frame_bytes=slots or PAGE_BYTES,
            count=footers,
            name=f"{name} footer slots",
        )
        self.port = Pipe(clock, f"{name}.port", profile.port_bandwidth)
        self.ssds = SsdArray(
            clock,
            ssd,
            profile.ssd_count,
            backing=make_backing(
                phantom=phantom,
                folder=folder,
                size_bytes=self.capacity_bytes,
                stripe_bytes=frame,
                count=profile.ssd_count,
                name=name,
            ),
            stripe_bytes=frame,
            name=name,
            faults=faults,
        )
        self._staged: dict[int, Staging] = {}
        self._held = 0
        self._demand = Budget(clock, profile.demand_outstanding, name=f"{name} demand misses")
        self._prefetched_frames = 0
        self._frames_free: Signal[None] = Signal(clock)
        self._buffered: OrderedDict[int, _Buffered] = OrderedDict()
        self._flush_queue: deque[_Buffered] = deque()
        self._flushing = 0
        self._flush_wake: Signal[None] = Signal(clock)
        self._idle: Signal[None] | None = None
        self._filling: dict[Staging, None] = {}
        self._jobs = JobSet(clock)
        self._flusher: Job[None] | None = None
        self._closed = False
        self.on_frames_free: Callable[[], None] = _ignore
        """Called when staging frames went free: a refused prefetch may fit now."""
        self.on_lost: Callable[[int], None] = _ignore
        """Called with the address of an object that could not be flushed."""

    def _check_open(self) -> None:
        if self._closed:
            raise self._cut_off("the device is closed")

    def _cut_off(self, detail: str) -> DeviceError:
        return DeviceError(Status.FLUSHED, f"{self.name}: {detail}")

    def _check(self, address: int, size_bytes: int) -> None:
        """Refuse what is no object: empty, off the page grid, or beyond the SSDs; or if closed."""
        self._check_open()
        extent = page_ceil(size_bytes) + page_ceil(self.trailer_bytes)
        if size_bytes < 1 or address < 0 or address + extent > self.capacity_bytes:
            raise DeviceError(
                Status.BOUNDS,
                f"{self.name}: {size_bytes} B at {address}, capacity is {self.capacity_bytes} B",
            )
        if address % PAGE_BYTES:
            raise DeviceError(
                Status.BOUNDS, f"{self.name}: address {address} is not on a {PAGE_BYTES} B page"
            )

    # -- read side: issue, wait, release ------------------------------------------------------

    def chm_prefetch_object(self, address: int, size_bytes: int) -> Prefetch | None:
        """Start staging; None if the depth or the frames before the reserve are used up.

        Raises ``DeviceError`` (BOUNDS) if no object can be there.
        """
        self._check(address, size_bytes)
        if self._held >= self.prefetch_depth:
            self.counters.prefetch_refused += 1
            return None
        if address in self._buffered:
            # Unflushed objects are read from the write buffer; there is nothing to stage.
            self._held += 1
            return Prefetch(address, size_bytes, None)
        staging = self._find_staged(address, size_bytes)
        if staging is not None:
            if not staging.prefetches and not self._may_hold(len(staging.frames)):
                self.counters.prefetch_refused += 1
                return None
            staging.holders += 1
        else:
            staging = self._stage(address, size_bytes, keep_back=self._reserve_frames)
            if staging is None:
                self.counters.prefetch_refused += 1
                return None
        if not staging.prefetches:
            self._prefetched_frames += len(staging.frames)
        staging.prefetches += 1
        self._held += 1
        return Prefetch(address, size_bytes, staging)

    def _may_hold(self, frames: int) -> bool:
        """Whether prefetches may hold so many frames more, the demand reserve left free."""
        limit = self._staging.count - self._reserve_frames
        return self._prefetched_frames + frames <= limit

    async def chm_prefetch_wait(self, request: PrefetchRequest) -> None:
        """Wait until the object is staged; raise ``DeviceError`` if the SSDs failed."""
        assert isinstance(request, Prefetch)
        if request.staging is not None:
            error = await request.staging.ready.wait()
            if error is not None:
                raise error

    def chm_prefetch_release(self, request: PrefetchRequest) -> None:
        """Give the region back; frames go free when holders and staging I/O are done."""
        assert isinstance(request, Prefetch)
        if request.address < 0:
            raise ValueError(f"{self.name}: a prefetch request is released twice")
        request.address = -1
        self._held -= 1
        staging = request.staging
        if staging is not None:
            staging.prefetches -= 1
            if not staging.prefetches:
                self._prefetched_frames -= len(staging.frames)
            self._drop(staging)

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Pin the object where it is readable: buffered, staged, or staged now (demand miss)."""
        self._check_open()
        buffered = self._buffered.get(address)
        if buffered is not None and buffered.phase not in (_Phase.RESERVED, _Phase.RECEIVED):
            if size_bytes != buffered.size_bytes:
                raise DeviceError(
                    Status.BOUNDS,
                    f"{self.name}: {size_bytes} B asked, {buffered.size_bytes} B are at {address}",
                )
            self.counters.reads_buffered += 1
            buffered.pins += 1
            return _View(self, buffered.extents, size_bytes, buffered=buffered)
        self._check(address, size_bytes)
        staging = self._find_staged(address, size_bytes)
        if staging is not None:
            staging.holders += 1
            self.counters.reads_staged += 1
        else:
            staging = await self._demand_miss(address, size_bytes)
        try:
            error = await staging.ready.wait()
        except BaseException:
            self._drop(staging)
            raise
        if error is not None:
            self._drop(staging)
            raise error
        return _View(self, staging.extents, size_bytes, staging=staging)

    async def _demand_miss(self, address: int, size_bytes: int) -> Staging:
        """Stage on demand: one of ``demand_outstanding``, from any free frame."""
        needed = self._staging.needed(size_bytes)
        if needed > self._staging.count:
            raise DeviceError(
                Status.BOUNDS, f"{self.name}: {size_bytes} B do not fit the staging frames"
            )
        self.counters.reads_demand += 1
        await self._demand.take(1)
        try:
            while True:
                self._check_open()
                staging = self._find_staged(address, size_bytes)
                if staging is not None:
                    staging.holders += 1
                    self._demand.give(1)
                    return staging
                staging = self._stage(address, size_bytes, keep_back=0)
                if staging is not None:
                    staging.demand = True
                    return staging
                await self._frames_free.wait()
        except BaseException:
            self._demand.give(1)
            raise

    def _stage(self, address: int, size_bytes: int, *, keep_back: int) -> Staging | None:
        pool = self._staging
        needed = pool.needed(size_bytes)
        if pool.free - needed < keep_back:
            return None
        footer = self._footers.take(1) if self.trailer_bytes else []
        frames = pool.take(needed) if footer is not None else None
        if frames is None or footer is None:
            if footer:
                self._footers.give(footer)
            return None
        staging = Staging(self.clock, address, size_bytes, frames, footer[0] if footer else None)
        staging.extents = pool.extents(frames, size_bytes)
        if footer:
            staging.extents += self._footers.extents(footer, self.trailer_bytes)
        # A second holder, until the staging I/O has ended: frames in use by it cannot go free.
        staging.holders += 1
        # Who asks for another size than what is staged there (outdated) gets frames of its own.
        self._staged.setdefault(address, staging)
        self.counters.staged += 1
        self._filling[staging] = None
        self._jobs.spawn(self._fill(staging))
        return staging

    async def _fill(self, staging: Staging) -> None:
        error: DeviceError | None = self._cut_off(f"staging of {staging.address} was cut off")
        try:
            await self.ssds.read(staging.address, self.arena, staging.extents)
            error = None
        except DeviceError as failed:
            error = failed
        finally:
            self._filled(staging, error)

    def _filled(self, staging: Staging, error: DeviceError | None) -> None:
        """End the staging I/O: tell who waits for it, and let its hold on the frames go."""
        del self._filling[staging]
        if error is not None and self._staged.get(staging.address) is staging:
            # Nobody may find the broken staging; a later read tries the SSDs again.
            del self._staged[staging.address]
        if staging.demand:
            staging.demand = False
            self._demand.give(1)
        staging.ready.set(error)
        self._drop(staging)

    def _drop(self, staging: Staging) -> None:
        staging.holders -= 1
        if staging.holders:
            return
        if self._staged.get(staging.address) is staging:
            del self._staged[staging.address]
        self._staging.give(staging.frames)
        if staging.footer is not None:
            self._footers.give([staging.footer])
        self._wake_for_frames()

    def _wake_for_frames(self) -> None:
        """Let demand misses look for frames again, in their order; then prefetches."""
        waited, self._frames_free = self._frames_free, Signal(self.clock)
        waited.set(None)
        if not self._closed:
            self.on_frames_free()

    def _find_staged(self, address: int, size_bytes: int) -> Staging | None:
        staging = self._staged.get(address)
        return staging if staging is not None and staging.size_bytes == size_bytes else None

    def _forget_staged(self, address: int) -> None:
        """Let nobody find what was staged of an object that is gone; its holders keep it."""
        self._staged.pop(address, None)

    # -- write side: check-and-reserve, receive, commit, flush ----------------------------------

    def admit(self, address: int, size_bytes: int) -> bool:
        """Reserve write-buffer space, or refuse at once.

        Raises ``DeviceError`` (BOUNDS) if no object can be there.
        """
        self._check(address, size_bytes)
        pool = self._write_buffer
        if address in self._buffered:
            raise ValueError(f"{self.name}: address {address} is already being written")
        footer = self._footers.take(1) if self.trailer_bytes else []
        frames = pool.take(pool.needed(size_bytes)) if footer is not None else None
        if frames is None or footer is None:
            if footer:
                self._footers.give(footer)
            self.counters.write_refused += 1
            return False
        entry = _Buffered(address, size_bytes, frames)
        entry.extents = pool.extents(frames, size_bytes)
        if footer:
            entry.footer = footer[0]
            entry.extents += self._footers.extents(footer, self.trailer_bytes)
        self._buffered[address] = entry
        self.counters.admitted += 1
        return True

    async def ready_to_receive(self, address: int) -> None:
        """Admission has reserved the space already."""

    def receive(self, address: int, payload: Buffer, trailer: Bytes | None) -> None:
        """Take the bytes of an RDMA WRITE into the reserved frames."""
        entry = self._buffered.get(address)
        if entry is None or entry.phase not in (_Phase.RESERVED, _Phase.RECEIVED):
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        if payload.nbytes != entry.size_bytes:
            raise DeviceError(
                Status.BOUNDS, f"{self.name}: {payload.nbytes} B for {entry.size_bytes} reserved"
            )
        if trailer is not None and len(trailer) > self.trailer_bytes:
            raise DeviceError(
                Status.BOUNDS,
                f"{self.name}: a trailer of {len(trailer)} B, room for {self.trailer_bytes}",
            )
        payload_extents = entry.extents[:-1] if entry.footer is not None else entry.extents
        self.arena.store(payload_extents, payload)
        if entry.footer is not None and trailer is not None:
            self.arena.store(entry.extents[-1:], trailer)
        entry.phase = _Phase.RECEIVED

    def commit(self, address: int) -> None:
        """Make the object readable and eligible for flush."""
        entry = self._buffered.get(address)
        if entry is None or entry.phase is not _Phase.RECEIVED:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing received at {address}")
        entry.phase = _Phase.COMMITTED
        self._forget_staged(address)
        self._flush_queue.append(entry)
        if self._flusher is None:
            self._flusher = self._jobs.spawn(self._flush_forever(), name=f"{self.name} flush")
        self._flush_wake.set(None)

    def cancel(self, address: int) -> None:
        """Free a reservation that was not committed."""
        entry = self._buffered.get(address)
        if entry is None or entry.phase not in (_Phase.RESERVED, _Phase.RECEIVED):
            raise ValueError(f"{self.name}: no open reservation at {address}")
        self._end_buffered(entry)

    def discard(self, address: int, size_bytes: int) -> None:
        """Forget a committed object, flushed or not."""
        entry = self._buffered.get(address)
        if entry is not None and entry.phase is _Phase.COMMITTED:
            self._flush_queue.remove(entry)
            self._end_buffered(entry)
        elif entry is not None and entry.phase is _Phase.FLUSHING:
            # Its write goes on, and ends before that of whatever is stored here next.
            del self._buffered[address]
        self._forget_staged(address)
        self.ssds.backing.discard(address, page_ceil(size_bytes) + page_ceil(self.trailer_bytes))

    async def _flush_forever(self) -> None:
        """Flush in batches, one object in flight, behind all reads (priority 1 on the SSDs)."""
        while not self._closed:
            if not self._flush_queue:
                self._flush_wake = Signal(self.clock)
                if self._idle is not None:
                    self._idle.set(None)
                    self._idle = None
                await self._flush_wake.wait()
                continue
            self.counters.flush_batches += 1
            room = self.profile.flush_batch
            while self._flush_queue and room > 0:
                entry = self._flush_queue.popleft()
                room -= entry.size_bytes
                self._flushing += 1
                try:
                    await self._flush(entry)
                finally:
                    self._flushing -= 1

    async def _flush(self, entry: _Buffered) -> None:
        entry.phase = _Phase.FLUSHING
        try:
            for _ in range(FLUSH_TRIES):
                try:
                    await self.ssds.write(entry.address, self.arena, entry.extents, priority=1)
                except DeviceError:
                    self.counters.flush_failed += 1
                else:
                    self.counters.flushed += 1
                    return
            # What lies at the address now is not the object: its owner must forget it first.
            self.counters.lost += 1
            if self._buffered.get(entry.address) is entry:
                self.on_lost(entry.address)
        finally:
            self._end_buffered(entry)

    def _end_buffered(self, entry: _Buffered) -> None:
        """End the buffer's copy, but for those who read it right now."""
        entry.phase = _Phase.DONE
        if self._buffered.get(entry.address) is entry:
            del self._buffered[entry.address]
        if not entry.pins:
            self._write_buffer.give(entry.frames)
            if entry.footer is not None:
                self._footers.give([entry.footer])

    # -- housekeeping ---------------------------------------------------------------------------

    @property
    def write_buffer_bytes(self) -> int:
        """Capacity of the write buffer."""
        return self._write_buffer.count * self._write_buffer.frame_bytes

    @property
    def staging_bytes(self) -> int:
        """Capacity of the staging frames, the demand reserve included."""
        return self._staging.count * self._staging.frame_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging frames in use."""
        return self._staging.used * self._staging.frame_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the write buffer in use."""
        return self._write_buffer.used * self._write_buffer.frame_bytes

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody: zero when all is released and flushed."""
        return {
            "prefetch requests": self._held,
            "staging frames": self._staging.used,
            "footer slots": self._footers.used,
            "write-buffer frames": self._write_buffer.used,
            "demand misses": self._demand.used,
        }

    async def quiesce(self) -> None:
        """Wait until everything committed is flushed, or the device is closed."""
        while not self._closed and (self._flush_queue or self._flushing):
            if self._idle is None or self._idle.is_set():
                self._idle = Signal(self.clock)
            await self._idle.wait()

    async def close(self) -> None:
        """Stop flushing (what is not flushed is lost) and release memory and files.

        Who waits for staging gets a ``DeviceError`` (FLUSHED), as does who asks afterwards.
        """
        self._closed = True
        if self._idle is not None:
            self._idle.set(None)
        self._wake_for_frames()
        await self._jobs.cancel()
        for staging in list(self._filling):  # a task cancelled before its first step never ran
            self._filled(staging, self._cut_off(f"staging of {staging.address} was cut off"))
        self.ssds.backing.close()
        self.arena.close()


class _View:
    """A pinned object in staging frames or in the write buffer."""

    __slots__ = (
        "_buffered",
        "_device",
        "_extents",
        "_open",
        "_size",
        "_staging",
        "bookings",
        "port",
    )

    def __init__(
        self,
        device: CxlHm,
        extents: list[Extent],
        size_bytes: int,
        *,
        staging: Staging | None = None,
        buffered: _Buffered | None = None,
    ) -> None:
        self.port = device.port
        self.bookings: tuple[Reservation, ...] = ()
        self._device = device
        self._extents = extents
        self._size = size_bytes
        self._staging = staging
        self._buffered = buffered
        self._open = True

    def copy_into(self, payload: Buffer, trailer: Bytes | None, digest: Digest | None) -> None:
        arena, extents = self._device.arena, self._extents
        if self._device.trailer_bytes:
            if trailer is not None:
                arena.load(extents[-1:], trailer)
            extents = extents[:-1]
        arena.load(extents, payload, digest)

    async def arrived(self) -> None:
        """Staged and buffered bytes are in place before a view exists."""

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._staging is not None:
            self._device._drop(self._staging)
        if self._buffered is not None:
            self._buffered.pins -= 1
            if self._buffered.phase is _Phase.DONE:
                self._device._end_buffered(self._buffered)
