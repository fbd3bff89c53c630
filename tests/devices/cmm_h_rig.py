"""A CMM-H of a few granules, and the calls that a host would make on it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.profile import CmmHProfile, load_as
from cxlbench.emu.memory import Buffer, PhantomBuffer, page_ceil
from cxlbench.emu.pipe import finished
from cxlbench.harness.held_clock import HeldVirtualClock, HeldWallClock

T = TypeVar("T")

KIB = 1 << 10
GRANULE = 8 * KIB


def small_profile(granules: int = 8, **overrides: str) -> CmmHProfile:
    """Return a profile with ``granules`` granules of 8 KiB."""
    given = {
        "dram_capacity": f"{granules * GRANULE} B",
        "cache_granule": f"{GRANULE} B",
        "eager_write_back": "false",
        **overrides,
    }
    return load_as(CmmHProfile, "cmm-h-256g", overrides=given)


class Host:
    """One device on a clock that runs only inside the calls."""

    def __init__(
        self,
        profile: CmmHProfile,
        *,
        phantom: bool = False,
        clock: HeldWallClock | None = None,
        **options: Any,
    ) -> None:
        self.clock: HeldVirtualClock | HeldWallClock = clock or HeldVirtualClock()
        self.phantom = phantom
        options.setdefault("trailer_bytes", 0)
        options.setdefault("capacity_bytes", 256 * profile.cache_granule)
        self.device = CmmH(self.clock, profile, phantom=phantom, **options)
        self.lost: list[int] = []
        self.device.on_lost = self.lost.append

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        return self.clock.drive(work)

    def content(self, tag: int, nbytes: int) -> Buffer:
        if self.phantom:
            return PhantomBuffer(nbytes, f"object {tag}")
        return np.random.default_rng(tag).integers(0, 256, nbytes, dtype=np.uint8)

    async def write(self, address: int, tag: int, nbytes: int = GRANULE) -> None:
        device = self.device
        assert device.admit(address, nbytes)
        await device.ready_to_receive(address)
        await finished(self.clock, device.port.reserve(nbytes))
        device.receive(address, self.content(tag, nbytes), None)
        device.commit(address)

    async def read(self, address: int, nbytes: int = GRANULE) -> Buffer:
        view = await self.device.open_read(address, nbytes)
        try:
            return await self.take(view, nbytes)
        finally:
            view.close()

    async def take(self, view: Any, nbytes: int) -> Buffer:
        into = self.device.arena.buffer(nbytes)
        booking = view.port.reserve(nbytes)
        await view.arrived()
        view.copy_into(into, None, None)
        await finished(self.clock, *view.bookings, booking)
        return into

    def holds(self, buffer: Buffer, tag: int) -> bool:
        wanted = self.content(tag, buffer.nbytes)
        if isinstance(wanted, PhantomBuffer):
            return buffer == wanted
        return bool((np.asarray(buffer) == wanted).all())

    async def evict_all(self) -> None:
        """Push everything else out by objects at the end of the address space."""
        device = self.device
        granule = device.profile.cache_granule
        count = device.cache.granules
        first = device.capacity_bytes // granule - count
        for index in range(first, first + count):
            await self.write(index * granule, 10_000 + index, granule)
        for index in range(first, first + count):
            device.discard(index * granule, granule)

    def cached(self) -> set[int]:
        """Granules that are in the cache, found by asking for each address."""
        count = page_ceil(self.device.capacity_bytes) // self.device.profile.cache_granule
        return {g for g in range(count) if self.device.cache.line(g) is not None}

    def close(self) -> None:
        """End; everything must be at rest."""
        try:
            self.drive(self.device.quiesce())
            assert not any(self.device.at_rest().values()), self.device.at_rest()
        finally:
            self.drive(self.device.close())
            self.clock.close()
