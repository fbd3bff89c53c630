"""DRAM behind CXL or a NIC: every object is in memory, nothing is behind it.

The all-DRAM tier: reads and writes cost the port's bandwidth, and a capacity that is used up
refuses. Satisfies the same protocol as CXL-HM, with no staging (``prefetch_depth`` is 0).
Units: bytes, s. Left out: NUMA effects, refresh, interleaving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cxlbench.devices.arena_access import ArenaTarget, ArenaView, trailer_cost
from cxlbench.devices.no_staging import NoStaging
from cxlbench.devices.profile_kinds import ExpanderProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import ObjectExtents, ReadView
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, ArenaMaker, arena_maker, page_ceil
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import DeviceError, Status


@dataclass(eq=False, slots=True)
class _Object:
    size_bytes: int
    received: bool = False
    committed: bool = False
    pins: int = 0


class Expander(ArenaTarget, NoStaging):
    """The device."""

    def __init__(
        self,
        clock: Clock,
        profile: ExpanderProfile,
        *,
        name: str = "dram0",
        phantom: bool = False,
        trailer_bytes: int = PAGE_BYTES,
        capacity_bytes: int | None = None,
        faults: FaultPlan | None = None,
        make_arena: ArenaMaker | None = None,
    ) -> None:
        self.clock = clock
        self.name = name
        self.profile = profile
        self.trailer_bytes = trailer_bytes
        self.trailer_cost_bytes = trailer_cost(trailer_bytes, profile.scale)
        self.page_bytes = PAGE_BYTES
        self.latency_s = profile.latency
        self.faults = faults or FaultPlan.none()
        self.capacity_bytes = (capacity_bytes or profile.capacity) // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes > profile.capacity:
            raise DeviceError(
                Status.BOUNDS,
                f"{name}: {self.capacity_bytes} B asked, its DRAM has {profile.capacity}",
            )
        self.arena = (make_arena or arena_maker(phantom=phantom))(self.capacity_bytes)
        self.port = Pipe(clock, f"{name}.port", profile.bandwidth)
        self.on_frames_free: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int], None] = lambda _: None
        self._objects: dict[int, _Object] = {}

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Pin an object."""
        stored = self._objects.get(address)
        if stored is None or not stored.committed or stored.size_bytes != size_bytes:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing committed at {address}")
        stored.pins += 1
        return _View(self, stored, self._extents(address, size_bytes))

    def admit(self, address: int, size_bytes: int) -> bool:
        """Take the address if the object ends inside the capacity."""
        if address in self._objects:
            raise ValueError(f"{self.name}: address {address} is already taken")
        total = page_ceil(size_bytes) + page_ceil(self.trailer_bytes)
        if address + total > self.capacity_bytes:
            return False
        self._objects[address] = _Object(size_bytes)
        return True

    async def ready_to_receive(self, address: int) -> None:
        """Admission has reserved the space already."""

    def landing(self, address: int) -> ObjectExtents:
        """Return where an admitted object goes."""
        return self._extents(address, self._admitted(address).size_bytes)

    def landed(self, address: int) -> None:
        """Note that the bytes of a WRITE are there."""
        self._admitted(address).received = True

    def _admitted(self, address: int) -> _Object:
        stored = self._objects.get(address)
        if stored is None or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: no reservation at {address}")
        return stored

    def commit(self, address: int) -> None:
        """Make the object readable."""
        stored = self._objects.get(address)
        if stored is None or not stored.received or stored.committed:
            raise DeviceError(Status.NO_OBJECT, f"{self.name}: nothing received at {address}")
        stored.committed = True

    def cancel(self, address: int) -> None:
        """Give up a reservation that was not committed."""
        stored = self._objects.get(address)
        if stored is None or stored.committed:
            raise ValueError(f"{self.name}: no open reservation at {address}")
        del self._objects[address]

    def discard(self, address: int, size_bytes: int) -> None:
        """Forget a committed object."""
        self._objects.pop(address, None)

    def _extents(self, address: int, size_bytes: int) -> ObjectExtents:
        payload, trailer = page_ceil(size_bytes), page_ceil(self.trailer_bytes)
        return ObjectExtents(
            [(address, payload)],
            [(address + payload, trailer)] if trailer else [],
            size_bytes,
            self.trailer_bytes,
        )

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody."""
        objects = self._objects.values()
        return {
            "dram reservations": sum(not stored.committed for stored in objects),
            "dram pins": sum(stored.pins for stored in objects),
        }

    async def quiesce(self) -> None:
        """There is nothing to flush."""

    async def close(self) -> None:
        """Release the memory."""
        self.arena.close()


class _View(ArenaView):
    """A pinned object."""

    def __init__(self, device: Expander, stored: _Object, extents: ObjectExtents) -> None:
        super().__init__(device.port, device.arena, extents)
        self._object = stored

    def unpin(self) -> None:
        """Take the pin back."""
        self._object.pins -= 1
