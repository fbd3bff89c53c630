"""A CXL-HM small enough to see every frame of, behind a fabric, with objects that have names.

24 staging frames (4 of them kept back for demand misses), 8 frames of write buffer, depth 6. An
object is (slot, version); its bytes or its tag, and its footer, say so. ``run`` runs a test and
then holds the device to its promise: everything that was held has come back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.emu.clock import VirtualClock, WallClock
from cxlbench.emu.fabric import Fabric, QueuePair
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.memory import PAGE_BYTES, PhantomBuffer, page_ceil
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import Status

FRAME = 2 * PAGE_BYTES
STAGING, RESERVE, BUFFER, DEPTH = 24, 4, 8, 6
SIZE = 3 * PAGE_BYTES + 100  # two frames
LARGE = 7 * PAGE_BYTES + 1  # four frames, all of the reserve
STRIDE = page_ceil(LARGE) + PAGE_BYTES
SLOTS = 40
BASE = 1 << 40
FOOTER_BYTES = 16


def profile(**changes: Any) -> CxlHmProfile:
    """Return the small device; ``ssd`` takes a dict of changes."""
    made = load_as(CxlHmProfile, "cxl-hm-prototype")
    ssd = {
        "read_bandwidth": 1e6,
        "write_bandwidth": 5e5,
        "read_latency": 1e-3,
        "program_latency": 2e-3,
        **changes.pop("ssd", {}),
    }
    values = {
        "ssd": dataclasses.replace(made.ssd, **ssd),
        "staging_frame": FRAME,
        "dram_capacity": (STAGING + BUFFER) * FRAME,
        "write_buffer_share": 0.25,
        "demand_reserve": RESERVE * FRAME,
        "demand_outstanding": 1,
        "prefetch_depth": DEPTH,
        "flush_batch": 4 * FRAME,
        "port_bandwidth": 1e8,
        **changes,
    }
    return dataclasses.replace(made, **values)


def at(slot: int) -> int:
    """Return the device's address of a slot."""
    return slot * STRIDE


class HmRig:
    """The device, and a worker that reads and writes it one-sidedly."""

    def __init__(
        self,
        *rules: dict[str, Any],
        phantom: bool = True,
        device_type: type[CxlHm] = CxlHm,
        clock: VirtualClock | WallClock | None = None,
        faults: Any = None,
        folder: Any = None,
        trailer_bytes: int = PAGE_BYTES,
        **changes: Any,
    ) -> None:
        self.clock = clock if clock is not None else VirtualClock()
        self.phantom = phantom
        self.faults = faults or FaultPlan(tuple(FaultRule(**rule) for rule in rules), 5)
        self.device = device_type(
            self.clock,
            profile(**changes),
            phantom=phantom,
            capacity_bytes=SLOTS * STRIDE,
            faults=self.faults,
            folder=folder,
            trailer_bytes=trailer_bytes,
        )
        self.fabric = Fabric(self.clock, seed=1)
        self.region = self.fabric.register(
            self.device, BASE, SLOTS * STRIDE, offset=0, writable=True
        )
        link = Pipe(self.clock, "link", 1e8)
        self.pair = QueuePair(self.fabric, [link], latency_s=1e-5, name="worker")
        self.lost: list[int] = []
        self.device.on_lost = self.lost.append
        self._named: dict[object, tuple[int, int]] = {}

    # -- objects ----------------------------------------------------------------------------------

    def content(self, slot: int, version: int, size: int) -> Any:
        """Return the bytes, or the tag, of an object; ``name_of`` knows it from then on."""
        name = (slot, version)
        if self.phantom:
            self._named["object", slot, version] = name
            return PhantomBuffer(size, ("object", slot, version))
        draw = np.random.default_rng([slot, version, size])
        made = draw.integers(0, 256, size, dtype=np.uint8)
        self._named[made.tobytes()] = name
        return made

    def name_of(self, buffer: Any) -> tuple[int, int] | None:
        """Return (slot, version) of the object that ``buffer`` holds, or None."""
        key = buffer.tag if self.phantom else buffer.tobytes()
        return self._named.get(key)

    def admit(self, slot: int, size: int = SIZE) -> bool:
        return self.device.admit(at(slot), size)

    async def send(self, slot: int, version: int = 0, size: int = SIZE) -> Status:
        """WRITE an object into its reservation."""
        footer = np.array([slot, version], dtype=np.int64).view(np.uint8)
        done = await self.pair.write(
            self.region.rkey, BASE + at(slot), self.content(slot, version, size), footer
        )
        return done.status

    async def put(
        self, slot: int, version: int = 0, size: int = SIZE, *, flush: bool = True
    ) -> None:
        """Store an object, and by default wait until it is flushed."""
        assert self.admit(slot, size)
        assert await self.send(slot, version, size) is Status.OK
        self.device.commit(at(slot))
        if flush:
            await self.device.quiesce()

    async def read(self, slot: int, size: int = SIZE) -> Any:
        """READ a slot: (slot, version), None for what is no whole object, or a bad status."""
        buffer = self.device.arena.buffer(size)
        footer = np.zeros(FOOTER_BYTES, dtype=np.uint8)
        done = await self.pair.read(self.region.rkey, BASE + at(slot), buffer, footer)
        if done.status is not Status.OK:
            return done.status
        name = self.name_of(buffer)
        return name if name == tuple(footer.view(np.int64).tolist()) else None

    def prefetch(self, slot: int, size: int = SIZE) -> Any:
        return self.device.chm_prefetch_object(at(slot), size)

    # -- running ----------------------------------------------------------------------------------

    def run(self, work: Any) -> Any:
        """Run a test's coroutine, let I/O in flight end, and check that nothing is held."""

        async def whole() -> Any:
            result = await work
            await self.settle()
            return result

        return self.clock.run(whole())

    async def settle(self) -> None:
        """Let flushes and reads in flight end; then nothing may be held any more."""
        await self.device.quiesce()
        await self.clock.sleep(1.0 if self.clock.kind == "virtual" else 0.02)
        self.check_rest()
        await self.device.close()

    def check_rest(self) -> None:
        held = {name: count for name, count in self.device.at_rest().items() if count}
        assert not held, f"still held: {held}"
