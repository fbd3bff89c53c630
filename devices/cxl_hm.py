"""CXL-HM: a CXL memory device with a small DRAM that software manages, in front of SSDs.

HyMCache §3.3-3.4. The internal DRAM is split *at start*, and stays split, into staging frames (for
reads, ``cxl_hm_staging.py``) and a write buffer (``cxl_hm_write_buffer.py``). Reads are served from
a staged object, from the write buffer, or by a *demand miss*, which copies the whole object from
the SSDs into frames before it is returned. Software stages ahead of the reads by three calls:
``chm_prefetch_object``, ``chm_prefetch_wait``, ``chm_prefetch_release``. A prefetch takes all its
frames or none, and is refused at once when the depth or the frames are exhausted. Some frames are
kept back for demand misses, or holders of prefetches could dead-lock them; so no object may be
larger than what is kept back for each of them. Writes are admitted only while buffer space is free,
and flushed later, in batches, behind all reads.

A prefetch of an object that is still in the write buffer takes no frames, and keeps none: if it is
flushed before it is read, the read is a demand miss.

Units: bytes, s. Left out: sub-object staging, wear levelling, DRAM refresh, power loss (a node that
starts again makes a new device on the old files).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cxlbench.devices.arena_access import ArenaTarget, ArenaView, trailer_cost
from cxlbench.devices.cxl_hm_staging import Staging, StagingArea
from cxlbench.devices.cxl_hm_write_buffer import Buffered, WriteBuffer
from cxlbench.devices.profile_kinds import CxlHmProfile
from cxlbench.devices.ssd import SsdArray, make_backing
from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import ObjectExtents, PrefetchRequest, ReadView
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import (
    PAGE_BYTES,
    ArenaMaker,
    FramePool,
    arena_maker,
    page_ceil,
)
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import DeviceError, Status


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Counters:
    """What the device did since it was made."""

    staged: int
    prefetch_refused: int
    reads_staged: int
    reads_buffered: int
    reads_demand: int
    admitted: int
    write_refused: int
    flushed: int
    flush_batches: int
    flush_failed: int
    lost: int


@dataclass(eq=False, slots=True)
class Prefetch:
    """The handle of one prefetch request."""

    address: int
    size_bytes: int
    staging: Staging | None


class CxlHm(ArenaTarget):
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
        make_arena: ArenaMaker | None = None,
        keep: bool = False,
    ) -> None:
        self.clock = clock
        self.name = name
        self.profile = profile
        self.trailer_bytes = trailer_bytes
        self.trailer_cost_bytes = trailer_cost(trailer_bytes, profile.scale)
        self.page_bytes = PAGE_BYTES
        self.prefetch_depth = profile.prefetch_depth
        self.latency_s = profile.load_latency
        whole = profile.capacity
        self.capacity_bytes = (capacity_bytes or whole) // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes > whole:
            raise DeviceError(
                Status.BOUNDS,
                f"{name}: {self.capacity_bytes} B asked, its {profile.ssd_count} SSDs have {whole}",
            )
        frame = profile.staging_frame
        buffer_frames = int(profile.dram_capacity * profile.write_buffer_share) // frame
        staging_frames = profile.dram_capacity // frame - buffer_frames
        reserve_frames = -(-profile.demand_reserve // frame)
        slots = page_ceil(trailer_bytes)
        # Trailers have page-sized slots beside the frames: one for each object that can be held.
        footers = 2 * (staging_frames + buffer_frames) if trailer_bytes else 0
        total = (staging_frames + buffer_frames) * frame + footers * slots
        self.arena = (make_arena or arena_maker(phantom=phantom))(total)
        self.largest_object_bytes = frame * min(
            reserve_frames // profile.demand_outstanding, buffer_frames
        )
        """What a demand miss is sure to find frames for, and a write to be admitted at all."""
        self.port = Pipe(clock, f"{name}.port", profile.port_bandwidth)
        self.ssds = SsdArray(
            clock,
            profile.ssd,
            profile.ssd_count,
            backing=make_backing(
                phantom=phantom,
                folder=folder,
                size_bytes=self.capacity_bytes,
                stripe_bytes=frame,
                count=profile.ssd_count,
                name=name,
                keep=keep,
            ),
            stripe_bytes=frame,
            name=name,
            faults=faults,
        )
        footer_slots = FramePool(
            base=(staging_frames + buffer_frames) * frame,
            frame_bytes=slots or PAGE_BYTES,
            count=footers,
            name=f"{name} footer slots",
        )
        self.staging = StagingArea(
            clock,
            frames=FramePool(
                base=0, frame_bytes=frame, count=staging_frames, name=f"{name} staging"
            ),
            footers=footer_slots,
            trailer_bytes=trailer_bytes,
            trailer_cost_bytes=self.trailer_cost_bytes,
            reserve_frames=reserve_frames,
            demand_outstanding=profile.demand_outstanding,
            arena=self.arena,
            ssds=self.ssds,
            name=name,
            on_free=lambda: self.on_frames_free(),
        )
        self.write_buffer = WriteBuffer(
            clock,
            frames=FramePool(
                base=staging_frames * frame,
                frame_bytes=frame,
                count=buffer_frames,
                name=f"{name} write buffer",
            ),
            footers=footer_slots,
            trailer_bytes=trailer_bytes,
            trailer_cost_bytes=self.trailer_cost_bytes,
            batch_bytes=profile.flush_batch,
            arena=self.arena,
            ssds=self.ssds,
            name=name,
            on_lost=lambda address: self.on_lost(address),
        )
        self._footers = footer_slots
        self._held = 0
        self._prefetch_refused = 0
        self._reads_staged = 0
        self._reads_buffered = 0
        self._reads_demand = 0
        self._closed = False
        self.on_frames_free: Callable[[], None] = _ignore
        """Called when staging frames went free: a refused prefetch may fit now."""
        self.on_lost: Callable[[int], None] = _ignore
        """Called with the address of an object that could not be flushed."""

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(Status.FLUSHED, f"{self.name}: the device is closed")

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
        if size_bytes > self.largest_object_bytes:
            raise DeviceError(
                Status.BOUNDS,
                f"{self.name}: an object of {size_bytes} B, the largest is "
                f"{self.largest_object_bytes} B: demand_reserve must hold one for each of "
                "demand_outstanding, and the write buffer must hold it",
            )

    # -- read side: issue, wait, release ------------------------------------------------------

    def chm_prefetch_object(self, address: int, size_bytes: int) -> Prefetch | None:
        """Start staging; None if the depth or the frames before the reserve are used up.

        Raises ``DeviceError`` (BOUNDS) if no object can be there.
        """
        self._check(address, size_bytes)
        if self._held >= self.prefetch_depth:
            self._prefetch_refused += 1
            return None
        staging = None
        if address not in self.write_buffer.entries:
            staging = self.staging.prefetch(address, size_bytes)
            if staging is None:
                self._prefetch_refused += 1
                return None
        self._held += 1
        return Prefetch(address, size_bytes, staging)

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
        if request.staging is not None:
            self.staging.release_prefetch(request.staging)

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Pin the object where it is readable: buffered, staged, or staged now (demand miss)."""
        self._check_open()
        buffered = self.write_buffer.readable(address)
        if buffered is not None:
            if size_bytes != buffered.size_bytes:
                raise DeviceError(
                    Status.BOUNDS,
                    f"{self.name}: {size_bytes} B asked, {buffered.size_bytes} B are at {address}",
                )
            self._reads_buffered += 1
            buffered.pins += 1
            return View(self, buffered)
        self._check(address, size_bytes)
        staging = self.staging.find(address, size_bytes)
        if staging is not None:
            staging.holders += 1
            self._reads_staged += 1
        else:
            self._reads_demand += 1
            staging = await self.staging.demand_miss(address, size_bytes)
        try:
            error = await staging.ready.wait()
        except BaseException:
            self.staging.drop(staging)
            raise
        if error is not None:
            self.staging.drop(staging)
            raise error
        return View(self, staging)

    # -- write side: check-and-reserve, receive, commit, flush ----------------------------------

    def admit(self, address: int, size_bytes: int) -> bool:
        """Reserve write-buffer space, or refuse at once.

        Raises ``DeviceError`` (BOUNDS) if no object of this size can ever be there.
        """
        self._check(address, size_bytes)
        return self.write_buffer.admit(address, size_bytes)

    async def ready_to_receive(self, address: int) -> None:
        """Admission has reserved the space already."""

    def landing(self, address: int) -> ObjectExtents:
        """Return the frames that were reserved at ``address``."""
        return self.write_buffer.landing(address)

    def landed(self, address: int) -> None:
        """Note that the bytes of a WRITE are in the reserved frames."""
        self.write_buffer.landed(address)

    def commit(self, address: int) -> None:
        """Make the object readable and eligible for flush."""
        self.write_buffer.commit(address)
        self.staging.forget(address)

    def cancel(self, address: int) -> None:
        """Free a reservation that was not committed."""
        self.write_buffer.cancel(address)

    def discard(self, address: int, size_bytes: int) -> None:
        """Forget a committed object, flushed or not."""
        self.write_buffer.discard(address)
        self.staging.forget(address)
        self.ssds.backing.discard(address, page_ceil(size_bytes) + page_ceil(self.trailer_bytes))

    # -- housekeeping ---------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        writes = self.write_buffer
        return Counters(
            staged=self.staging.started,
            prefetch_refused=self._prefetch_refused,
            reads_staged=self._reads_staged,
            reads_buffered=self._reads_buffered,
            reads_demand=self._reads_demand,
            admitted=writes.admitted,
            write_refused=writes.refused,
            flushed=writes.flushed,
            flush_batches=writes.batches,
            flush_failed=writes.failed,
            lost=writes.lost,
        )

    @property
    def write_buffer_bytes(self) -> int:
        """Capacity of the write buffer."""
        pool = self.write_buffer.frames
        return pool.count * pool.frame_bytes

    @property
    def staging_bytes(self) -> int:
        """Capacity of the staging frames, the demand reserve included."""
        pool = self.staging.frames
        return pool.count * pool.frame_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging frames in use."""
        pool = self.staging.frames
        return pool.used * pool.frame_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the write buffer in use."""
        pool = self.write_buffer.frames
        return pool.used * pool.frame_bytes

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody: zero when all is released and flushed."""
        return {
            "prefetch requests": self._held,
            "staging frames": self.staging.frames.used,
            "footer slots": self._footers.used,
            "write-buffer frames": self.write_buffer.frames.used,
            "demand misses": self.staging.demand.used,
        }

    async def quiesce(self) -> None:
        """Wait until everything committed is flushed, or the device is closed."""
        await self.write_buffer.quiesce()

    async def close(self) -> None:
        """Stop flushing (what is not flushed is lost) and release memory and files.

        Who waits for staging gets a ``DeviceError`` (FLUSHED), as does who asks afterwards.
        """
        self._closed = True
        await self.write_buffer.close()
        await self.staging.close()
        self.ssds.backing.close()
        self.arena.close()


class View(ArenaView):
    """A pinned object in staging frames or in the write buffer."""

    def __init__(self, device: CxlHm, held: Staging | Buffered) -> None:
        extents = (
            device.staging.extents_of(held)
            if isinstance(held, Staging)
            else device.write_buffer.extents_of(held)
        )
        super().__init__(device.port, device.arena, extents)
        self._device = device
        self._held = held

    def unpin(self) -> None:
        """Let the staging, or the buffered object, go."""
        if isinstance(self._held, Staging):
            self._device.staging.drop(self._held)
        else:
            self._device.write_buffer.unpin(self._held)
