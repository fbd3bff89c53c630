"""A small CXL-HM and objects for it, of real bytes or tags."""

from __future__ import annotations

import dataclasses

import numpy as np

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.profile import CxlHmProfile, SsdProfile, load_as
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, PhantomBuffer

MIB = 1 << 20
FRAME = 4 * PAGE_BYTES
SLOT = 32 * PAGE_BYTES
"""Distance of two objects in the tests; no object with its trailer is longer."""

SSD = dataclasses.replace(
    load_as(SsdProfile, "pm1743-class"),
    read_bandwidth=16.0 * MIB,
    write_bandwidth=8.0 * MIB,
    read_iops=1e6,
    write_iops=1e6,
    read_latency=0.001,
    program_latency=0.002,
    mixed_penalty=0.5,
)

PROFILE = dataclasses.replace(
    load_as(CxlHmProfile, "cxl-hm-prototype"),
    ssd=SSD,
    ssd_count=2,
    dram_capacity=32 * FRAME,
    staging_frame=FRAME,
    write_buffer_share=0.25,
    demand_reserve=4 * FRAME,
    demand_outstanding=2,
    prefetch_depth=12,
    flush_batch=4 * FRAME,
    port_bandwidth=1e12,
)
"""24 staging frames, of which 4 are kept back for demand misses, and 8 write-buffer frames."""


def object_bytes(number: int, size_bytes: int) -> np.ndarray:
    """Return the bytes of object ``number``."""
    return np.random.default_rng(number).integers(0, 256, size_bytes, dtype=np.uint8)


class Rig:
    """A device on a clock. Objects are named by a number."""

    def __init__(self, clock, *, device_class=CxlHm, profile=PROFILE, rules=(), **options):
        self.clock = clock
        self.faults = FaultPlan(tuple(rules), 5)
        self.device = device_class(
            clock, profile, capacity_bytes=256 * SLOT, faults=self.faults, **options
        )
        self.phantom = options.get("phantom", False)

    def run(self, work):
        return self.clock.run(work)

    def payload(self, number, size_bytes):
        """Return object ``number`` as the device takes it."""
        if self.phantom:
            return PhantomBuffer(size_bytes, ("object", number))
        return object_bytes(number, size_bytes)

    def trailer(self, number):
        """Return the footer of object ``number``."""
        return np.full(self.device.trailer_bytes, number % 251, dtype=np.uint8)

    def receive(self, address, number, size_bytes):
        self.device.receive(address, self.payload(number, size_bytes), self.trailer(number))

    def write(self, address, number, size_bytes=FRAME):
        """Admit, receive and commit an object; False if it was not admitted."""
        if not self.device.admit(address, size_bytes):
            return False
        self.receive(address, number, size_bytes)
        self.device.commit(address)
        return True

    async def store(self, address, number, size_bytes=FRAME):
        """Write an object and wait until it is on the SSDs."""
        assert self.write(address, number, size_bytes)
        await self.device.quiesce()

    def take(self, view, size_bytes):
        """Return what a view shows: payload and trailer."""
        payload = self.device.arena.buffer(size_bytes)
        trailer = np.zeros(self.device.trailer_bytes, dtype=np.uint8)
        view.copy_into(payload, trailer, None)
        return payload, trailer

    def is_object(self, shown, number):
        """Whether ``shown`` is exactly object ``number``, footer and all."""
        payload, trailer = shown
        if not np.array_equal(trailer, self.trailer(number)):
            return False
        if isinstance(payload, PhantomBuffer):
            return payload.tag == ("object", number)
        return np.array_equal(payload, object_bytes(number, len(payload)))

    async def read(self, address, size_bytes=FRAME):
        """Read what lies at an address, as a READ of the fabric does."""
        view = await self.device.open_read(address, size_bytes)
        try:
            await view.arrived()
            return self.take(view, size_bytes)
        finally:
            view.close()

    async def holds(self, address, number, size_bytes=FRAME):
        """Whether a read at ``address`` returns object ``number``."""
        return self.is_object(await self.read(address, size_bytes), number)

    def close(self):
        self.run(self.device.close())
