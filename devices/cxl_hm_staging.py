"""The staging frames of a CXL-HM: objects copied from the SSDs, to be read (HyMCache §3.4).

A *staging* is one object in frames, shared by all who prefetched or demanded it. It is made by a
prefetch, which takes all its frames or none and leaves the demand reserve free, or by a demand
miss, which may take any frame and of which ``demand_outstanding`` are served at a time. Frames go
free when the last holder has gone *and* the copy from the SSDs has ended, so that no late byte
lands in frames of somebody else.

Each object may have a trailer (a footer page) with small slots of its own. Units: bytes, s. Left
out: parts of objects, and frames that move from staging to the write buffer.
"""

from __future__ import annotations

from collections.abc import Callable

from cxlbench.devices.ssd import SsdArray
from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.fabric import ObjectExtents
from cxlbench.emu.memory import Arena, Extent, FramePool, PhantomArena, page_ceil
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget, Signal


class Staging:
    """One object in staging frames."""

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
        self, clock: Clock, address: int, size_bytes: int, frames: list[int], footer: list[int]
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


class StagingArea:
    """All stagings of one device. ``on_free`` is called when frames went free."""

    def __init__(
        self,
        clock: Clock,
        *,
        frames: FramePool,
        footers: FramePool,
        trailer_bytes: int,
        trailer_cost_bytes: int,
        reserve_frames: int,
        demand_outstanding: int,
        arena: Arena | PhantomArena,
        ssds: SsdArray,
        name: str,
        on_free: Callable[[], None],
    ) -> None:
        self.clock = clock
        self.name = name
        self.frames = frames
        self.footers = footers
        self.trailer_bytes = trailer_bytes
        self.trailer_cost_bytes = trailer_cost_bytes
        self.reserve_frames = reserve_frames
        self.arena = arena
        self.ssds = ssds
        self.demand = Budget(clock, demand_outstanding, name=f"{name} demand misses")
        self.staged: dict[int, Staging] = {}
        """What a read may find, by address."""
        self.started = 0
        self.closed = False
        self._on_free = on_free
        self._prefetched_frames = 0
        self._went_free: Signal[None] = Signal(clock)
        self._filling: dict[Staging, None] = {}
        self._jobs = JobSet(clock)

    def find(self, address: int, size_bytes: int) -> Staging | None:
        """Return what is staged of the object, or None; who reads it then must ``hold`` it."""
        staging = self.staged.get(address)
        return staging if staging is not None and staging.size_bytes == size_bytes else None

    def prefetch(self, address: int, size_bytes: int) -> Staging | None:
        """Hold the object's staging for a prefetch, made now if need be; None without frames."""
        staging = self.find(address, size_bytes)
        if staging is None:
            staging = self.stage(address, size_bytes, keep_back=self.reserve_frames)
            if staging is None:
                return None
        elif staging.prefetches or self.may_hold(len(staging.frames)):
            staging.holders += 1
        else:
            return None
        if not staging.prefetches:
            self._prefetched_frames += len(staging.frames)
        staging.prefetches += 1
        return staging

    def may_hold(self, frames: int) -> bool:
        """Whether prefetches may hold so many frames more, the demand reserve left free."""
        return self._prefetched_frames + frames <= self.frames.count - self.reserve_frames

    def release_prefetch(self, staging: Staging) -> None:
        """Take the hold of one prefetch back."""
        staging.prefetches -= 1
        if not staging.prefetches:
            self._prefetched_frames -= len(staging.frames)
        self.drop(staging)

    async def demand_miss(self, address: int, size_bytes: int) -> Staging:
        """Hold the object's staging for a read that nobody prefetched."""
        await self.demand.take(1)
        try:
            while True:
                if self.closed:
                    raise self._cut_off("the device is closed")
                staging = self.find(address, size_bytes)
                if staging is not None:
                    staging.holders += 1
                    self.demand.give(1)
                    return staging
                staging = self.stage(address, size_bytes, keep_back=0)
                if staging is not None:
                    staging.demand = True
                    return staging
                await self._went_free.wait()
        except BaseException:
            self.demand.give(1)
            raise

    def stage(self, address: int, size_bytes: int, *, keep_back: int) -> Staging | None:
        """Take frames, all but the last ``keep_back``, and start the copy; None if they lack."""
        pool = self.frames
        needed = pool.needed(size_bytes)
        if pool.free - needed < keep_back:
            return None
        footer = self.footers.take(1) if self.trailer_bytes else []
        if footer is None:
            return None
        frames = pool.take(needed)
        if frames is None:
            self.footers.give(footer)
            return None
        staging = Staging(self.clock, address, size_bytes, frames, footer)
        staging.extents = pool.extents(frames, size_bytes)
        if footer:
            staging.extents += self.footers.extents(footer, self.trailer_bytes)
        # A second holder, until the staging I/O has ended: frames in use by it cannot go free.
        staging.holders += 1
        # Who asks for another size than what is staged there (outdated) gets frames of its own.
        self.staged.setdefault(address, staging)
        self.started += 1
        self._filling[staging] = None
        self._jobs.spawn(self.fill(staging))
        return staging

    async def fill(self, staging: Staging) -> None:
        """Copy the object from the SSDs; whoever waits for ``ready`` learns how it ended."""
        error: DeviceError | None = self._cut_off(f"staging of {staging.address} was cut off")
        try:
            cost = page_ceil(staging.size_bytes) + self.trailer_cost_bytes
            await self.ssds.read(staging.address, self.arena, staging.extents, cost_bytes=cost)
            error = None
        except DeviceError as failed:
            error = failed
        finally:
            self._filled(staging, error)

    def _filled(self, staging: Staging, error: DeviceError | None) -> None:
        """End the staging I/O: tell who waits for it, and let its hold on the frames go."""
        del self._filling[staging]
        if error is not None and self.staged.get(staging.address) is staging:
            # Nobody may find the broken staging; a later read tries the SSDs again.
            del self.staged[staging.address]
        if staging.demand:
            staging.demand = False
            self.demand.give(1)
        staging.ready.set(error)
        self.drop(staging)

    def drop(self, staging: Staging) -> None:
        """Take one hold back; the last one frees the frames."""
        staging.holders -= 1
        if staging.holders:
            return
        if self.staged.get(staging.address) is staging:
            del self.staged[staging.address]
        self.frames.give(staging.frames)
        self.footers.give(staging.footer)
        self._wake()

    def extents_of(self, staging: Staging) -> ObjectExtents:
        """Return where a staged object lies."""
        payload = len(staging.extents) - len(staging.footer)
        return ObjectExtents(
            staging.extents[:payload],
            staging.extents[payload:],
            staging.size_bytes,
            self.trailer_bytes,
        )

    def forget(self, address: int) -> None:
        """Let nobody find what was staged of an object that is gone; its holders keep it."""
        self.staged.pop(address, None)

    def _wake(self) -> None:
        """Let demand misses look for frames again, in their order; then prefetches."""
        waited, self._went_free = self._went_free, Signal(self.clock)
        waited.set(None)
        if not self.closed:
            self._on_free()

    def _cut_off(self, detail: str) -> DeviceError:
        return DeviceError(Status.FLUSHED, f"{self.name}: {detail}")

    async def close(self) -> None:
        """End all staging I/O; who waits for it, or for frames, gets a ``DeviceError``."""
        self.closed = True
        self._wake()
        await self._jobs.cancel()
        for staging in list(self._filling):  # a task cancelled before its first step never ran
            self._filled(staging, self._cut_off(f"staging of {staging.address} was cut off"))
