"""CMM-H: a CXL memory device whose DRAM is a transparent cache over SSDs (HyMCache §3.3).

The strawman that HyMCache is compared with. Nobody tells the device what comes next: reads that
miss refill granules from the SSDs (``cmm_h_refill.py``), a replacement policy chooses what they
push out (``cmm_h_cache.py``), and written data goes to flash at the priority of reads, so that both
meet (``cmm_h_write_back.py``).

The device knows no commit: received bytes are dirty pages at once. That an object can be read from
its commit on only, and not after its discard, is what all devices of the bench promise. Payload and
trailer lie behind each other in the address space.
Units: bytes, s. Left out: accesses below a page, read-ahead, power loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cxlbench.devices.arena_access import ArenaTarget, trailer_cost
from cxlbench.devices.cmm_h_cache import Cache, CmmHCounters, Line, Piece
from cxlbench.devices.cmm_h_refill import CachedView, Frames, MissEngine
from cxlbench.devices.cmm_h_write_back import WriteBack
from cxlbench.devices.no_staging import NoStaging
from cxlbench.devices.policies import PolicyFactory, ReplacementPolicy, load_policy
from cxlbench.devices.profile_kinds import CmmHProfile
from cxlbench.devices.ssd import SsdArray, make_backing
from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import ObjectExtents, ReadView
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, ArenaMaker, arena_maker, page_ceil
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import DeviceError, Status


@dataclass(eq=False, slots=True)
class _Object:
    """One object, from admission to discard."""

    address: int
    size_bytes: int
    lines: list[Line] | None = None
    """Pinned for a WRITE that is on its way."""
    received: bool = False
    committed: bool = False
    lost: bool = False


class CmmH(ArenaTarget, NoStaging):
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
        policy: str | PolicyFactory | ReplacementPolicy | None = None,
        make_arena: ArenaMaker | None = None,
        keep: bool = False,
    ) -> None:
        self.clock = clock
        self.name = name
        self.profile = profile
        self.trailer_bytes = trailer_bytes
        self.trailer_cost_bytes = trailer_cost(trailer_bytes, profile.scale)
        self.page_bytes = PAGE_BYTES
        self.latency_s = profile.hit_latency
        self.counters = CmmHCounters()
        self.capacity_bytes = (capacity_bytes or profile.capacity) // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes > profile.capacity:
            raise DeviceError(
                Status.BOUNDS,
                f"{name}: {self.capacity_bytes} B asked, its {profile.ssd_count} SSDs have "
                f"{profile.capacity}",
            )
        granule = profile.cache_granule
        granules = profile.dram_capacity // granule
        chosen = profile.policy if policy is None else policy
        self.cache = Cache(
            granules,
            granule_bytes=granule,
            ways=profile.associativity,
            policy=load_policy(chosen) if isinstance(chosen, str) else chosen,
            counters=self.counters,
        )
        self.arena = (make_arena or arena_maker(phantom=phantom))(granules * granule)
        self.port = Pipe(clock, f"{name}.port", profile.port_bandwidth)
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
                keep=keep,
            ),
            stripe_bytes=granule,
            name=name,
            faults=faults,
        )
        self.on_frames_free: Callable[[], None] = lambda: None
        """Never called: nothing is ever staged."""
        self.on_lost: Callable[[int], None] = lambda _: None
        self._closed = False
        self._objects: dict[int, _Object] = {}
        self._layout = lru_cache(maxsize=1024)(self._split)
        self._write_back = WriteBack(
            clock,
            self.cache,
            self.ssds,
            self.arena,
            window_bytes=int(
                profile.ssd.queue_depth * profile.ssd_count * PAGE_BYTES / profile.scale
            ),
            eager=profile.eager_write_back,
            pieces_of=self._pieces_of,
            on_lost=self._lose,
        )
        self._frames = Frames(clock, self.cache, self._write_back, name=name)
        self._engine = MissEngine(
            clock, profile, self.cache, self.ssds, self.arena, on_end=self._frames.wake
        )

    def _split(self, address: int, size_bytes: int) -> tuple[tuple[Piece, ...], int]:
        """Return an object's pieces, and how many of them are payload (the rest is trailer)."""
        payload = self.cache.pieces(address, page_ceil(size_bytes))
        trailer = self.cache.pieces(address + page_ceil(size_bytes), page_ceil(self.trailer_bytes))
        return payload + trailer, len(payload)

    def _pieces_of(self, address: int) -> Sequence[Piece]:
        stored = self._objects.get(address)
        return () if stored is None else self._layout(address, stored.size_bytes)[0]

    # -- reads ----------------------------------------------------------------------------------

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Pin the object's granules, start refills of what is missing, and let bytes stream."""
        stored = self._readable(address, size_bytes)
        pieces, _ = self._layout(address, size_bytes)
        lines = await self._frames.pin(pieces)
        try:
            if self._readable(address, size_bytes) is not stored:
                raise DeviceError(Status.NO_OBJECT, f"{self.name}: {address} was replaced")
        except DeviceError:
            self._frames.unpin(lines)
            raise
        fills = self._engine.refill(
            pieces, lines, wanted=lambda: self._objects.get(address) is stored
        )
        return CachedView(
            self.port, self.arena, self._extents(stored, lines), self._frames, lines, fills
        )

    def _readable(self, address: int, size_bytes: int) -> _Object:
        self._check_open()
        stored = self._objects.get(address)
        if stored is None or not stored.committed or stored.size_bytes != size_bytes:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no {size_bytes} B are at {address}")
        if stored.lost:
            raise DeviceError(Status.IO_ERROR, f"{self.name}: {address} was not written back")
        return stored

    # -- writes ---------------------------------------------------------------------------------

    def admit(self, address: int, size_bytes: int) -> bool:
        """Take the address; a cache refuses no write that can ever be there.

        Raises ``DeviceError`` (BOUNDS) if none can: beyond the SSDs, or larger than the cache.
        """
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
        if address in self._objects:
            raise ValueError(f"{self.name}: address {address} is already taken")
        size = self.cache.granule_bytes
        if (address + extent - 1) // size - address // size >= self.cache.granules:
            raise DeviceError(
                Status.BOUNDS,
                f"{self.name}: an object of {size_bytes} B does not fit its cache of "
                f"{self.cache.granules * size} B",
            )
        self._objects[address] = _Object(address, size_bytes)
        return True

    async def ready_to_receive(self, address: int) -> None:
        """Pin frames for an admitted object; dirty victims go out first."""
        stored = self._reserved(address)
        if stored.lines is not None:
            return
        pieces, _ = self._layout(address, stored.size_bytes)
        lines = await self._frames.pin(pieces)
        try:
            # A refill of what was here before must not land on the new bytes.
            for piece, line in zip(pieces, lines, strict=True):
                while refill := line.moves(piece.pages, refill=True):
                    await refill.ended.wait()
            if self._reserved(address) is not stored:
                raise DeviceError(Status.NO_OBJECT, f"{self.name}: {address} was cancelled")
        except BaseException:
            self._frames.unpin(lines)
            raise
        if stored.lines is not None:
            self._frames.unpin(lines)  # another WRITE has made it ready meanwhile
            return
        stored.lines = lines
        if stored.received:
            stored.received = stored.lost = False
            self.cache.drop(pieces, address)
            self._write_back.forget(address)

    def landing(self, address: int) -> ObjectExtents:
        """Return the cache lines that were made ready for an admitted object."""
        stored = self._reserved(address)
        if stored.lines is None:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: {address} was not made ready")
        return self._extents(stored, stored.lines)

    def landed(self, address: int) -> None:
        """Note that the bytes of a WRITE are in the cache: dirty pages from now on."""
        stored = self._reserved(address)
        if stored.lines is None:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: {address} was not made ready")
        pieces, _ = self._layout(address, stored.size_bytes)
        lines, stored.lines = stored.lines, None
        for piece, line in zip(pieces, lines, strict=True):
            line.valid |= piece.pages
        self._write_back.mark_dirty(address, pieces, lines)
        stored.received = True
        self._frames.unpin(lines)

    def _extents(self, stored: _Object, lines: Sequence[Line]) -> ObjectExtents:
        pieces, payload = self._layout(stored.address, stored.size_bytes)
        extents = [(line.base + p.within, p.length) for p, line in zip(pieces, lines, strict=True)]
        return ObjectExtents(
            extents[:payload], extents[payload:], stored.size_bytes, self.trailer_bytes
        )

    def commit(self, address: int) -> None:
        """Make the object readable."""
        stored = self._objects.get(address)
        if stored is None or not stored.received or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing received at {address}")
        if stored.lost:
            raise DeviceError(Status.IO_ERROR, f"{self.name}: {address} was not written back")
        stored.committed = True

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
            extent = page_ceil(stored.size_bytes) + page_ceil(self.trailer_bytes)
            self.ssds.backing.discard(address, extent)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(Status.FLUSHED, f"{self.name}: the device is closed")

    def _reserved(self, address: int) -> _Object:
        self._check_open()
        stored = self._objects.get(address)
        if stored is None or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        return stored

    def _forget(self, stored: _Object) -> None:
        pieces, _ = self._layout(stored.address, stored.size_bytes)
        del self._objects[stored.address]
        self._write_back.forget(stored.address)
        self.cache.drop(pieces, stored.address)
        if stored.lines is not None:
            self.cache.unpin(stored.lines)
        self._frames.wake()

    def _lose(self, address: int) -> None:
        """Give up an object that the SSDs did not take: its owner must forget it."""
        stored = self._objects.get(address)
        if stored is None:
            return
        self.counters.lost += 1
        stored.lost = True
        self._write_back.forget(address)
        for piece in self._pieces_of(address):
            line = self.cache.line(piece.granule)
            if line is not None:
                line.dirty &= ~piece.pages
        if stored.committed:
            self.on_lost(address)

    # -- housekeeping ---------------------------------------------------------------------------

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody; dirty data is not."""
        return {
            "cache reservations": sum(not s.committed for s in self._objects.values()),
            "cache readers": self._frames.readers,
            "cache pins": self.cache.pins,
            "refills": self._engine.running,
        }

    async def quiesce(self) -> None:
        """Write everything back that is dirty, and let refills end that nobody waits for."""
        await self._write_back.drain()
        await self._engine.idle()

    async def close(self) -> None:
        """Stop write-back (what is dirty is lost) and release memory and files.

        Who waits for a refill or a frame gets a ``DeviceError`` (FLUSHED), as does who asks later.
        """
        self._closed = True
        self._frames.close()
        await self._write_back.close()
        await self._engine.close()
        self.ssds.backing.close()
        self.arena.close()
