"""A CMM-H of a few granules behind a fabric, and the calls that a host would make on it.

Objects are named by a number, their tag: in their bytes, or in the phantom that stands for them,
and in the trailer.
"""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.profile import CmmHProfile, load_as
from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import Completion, Fabric, QueuePair
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.memory import PAGE_BYTES, Buffer, Bytes, PhantomBuffer, page_ceil
from cxlbench.emu.status import Status
from cxlbench.harness.held_clock import HeldVirtualClock, HeldWallClock

T = TypeVar("T")

KIB = 1 << 10
GRANULE = 2 * PAGE_BYTES


def small_profile(granules: int = 8, **overrides: str) -> CmmHProfile:
    """Return a profile with ``granules`` granules of two pages, and lazy write-back."""
    given = {
        "dram_capacity": f"{granules * GRANULE} B",
        "cache_granule": f"{GRANULE} B",
        "eager_write_back": "false",
        **overrides,
    }
    return load_as(CmmHProfile, "cmm-h-256g", overrides=given)


class Host:
    """One device, on a clock that runs only inside the calls."""

    def __init__(
        self,
        profile: CmmHProfile,
        *rules: FaultRule,
        phantom: bool = False,
        wall: bool = False,
        folder: Path | None = None,
        trailer_bytes: int = 0,
        **options: Any,
    ) -> None:
        self.clock: Clock = HeldWallClock() if wall else HeldVirtualClock()
        self.phantom = phantom
        options.setdefault("capacity_bytes", 256 * profile.cache_granule)
        self.device = CmmH(
            self.clock,
            profile,
            phantom=phantom,
            folder=folder,
            trailer_bytes=trailer_bytes,
            faults=FaultPlan(rules),
            **options,
        )
        self.lost: list[int] = []
        self.device.on_lost = self.lost.append
        self.fabric = Fabric(self.clock, seed=1)
        self.region = self.fabric.register(
            self.device, 0, self.device.capacity_bytes, writable=True
        )
        self.pair = QueuePair(self.fabric, (), latency_s=0.0, name="host")

    @property
    def counters(self) -> Any:
        return self.device.counters

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        assert isinstance(self.clock, (HeldVirtualClock, HeldWallClock))
        return self.clock.drive(work)

    def timed(self, work: Coroutine[Any, Any, Any]) -> float:
        """Return how much time of the clock ``work`` takes, s."""

        async def measured() -> float:
            begin = self.clock.now()
            await work
            return self.clock.now() - begin

        return self.drive(measured())

    def content(self, tag: int, nbytes: int) -> Buffer:
        if self.phantom:
            return PhantomBuffer(nbytes, f"object {tag}")
        return np.random.default_rng(tag).integers(0, 256, nbytes, dtype=np.uint8)

    def trailer(self, tag: int) -> Bytes | None:
        size = self.device.trailer_bytes
        return np.full(size, tag % 251, dtype=np.uint8) if size else None

    async def write(self, address: int, tag: int, nbytes: int = GRANULE) -> None:
        """Store one object all the way."""
        assert self.device.admit(address, nbytes)
        done = await self.pair.write(
            self.region.rkey, address, self.content(tag, nbytes), self.trailer(tag)
        )
        assert done.status is Status.OK, done
        self.device.commit(address)

    async def try_read(self, address: int, nbytes: int = GRANULE) -> tuple[Completion, Buffer, Any]:
        into = self.device.arena.buffer(nbytes)
        trailer = None if self.trailer(0) is None else np.zeros_like(self.trailer(0))
        done = await self.pair.read(self.region.rkey, address, into, trailer)
        return done, into, trailer

    async def read(self, address: int, tag: int, nbytes: int = GRANULE) -> None:
        """Read one object and check what it is."""
        done, into, trailer = await self.try_read(address, nbytes)
        assert done.status is Status.OK, done
        assert self.holds(into, tag), f"object {tag} at {address} is something else"
        if trailer is not None:
            assert (trailer == self.trailer(tag)).all(), f"the trailer of {tag} is something else"

    def holds(self, buffer: Buffer, tag: int) -> bool:
        wanted = self.content(tag, buffer.nbytes)
        if isinstance(wanted, PhantomBuffer):
            return buffer == wanted
        return bool(np.array_equal(np.asarray(buffer), wanted))

    def cached(self) -> set[int]:
        """Return the granules that are in the cache."""
        count = page_ceil(self.device.capacity_bytes) // self.device.profile.cache_granule
        return {g for g in range(count) if self.device.cache.line(g) is not None}

    def close(self) -> None:
        """End; everything must be at rest."""
        try:
            self.drive(self.device.quiesce())
            assert not any(self.device.at_rest().values()), self.device.at_rest()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End, whatever is held."""
        self.drive(self.device.close())
        self.clock.close()
