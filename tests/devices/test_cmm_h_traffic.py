"""CMM-H under readers, writers, discards and cut-off tasks all at once, with and without faults.

Every read gives the object's newest content or a status other than OK; nothing is held at the end.
"""

from __future__ import annotations

import random

import pytest

from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import DeviceError, Status
from tests.devices.cmm_h_rig import Host, small_profile

SLOTS = 24
STRIDE = 7
FAULTS = (
    FaultRule(point="ssd.read", kind="error", probability=0.05),
    FaultRule(point="ssd.read", kind="delay", probability=0.05, delay_s=5e-3),
    FaultRule(point="ssd.write", kind="error", probability=0.1),
    FaultRule(point="ssd.write", kind="delay", probability=0.1, delay_s=5e-3),
)


class Traffic:
    """Clients of one device; a slot has one owner at a time, but any number of readers."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host = host
        self.draw = random.Random(seed)
        self.live: dict[int, tuple[int, int]] = {}
        self.busy: dict[int, int] = {}
        """Slots in use: readers, or -1 for an owner that writes or discards."""
        self.next_tag = 0
        self.reads = 0
        self.refused = 0

    async def client(self, steps: int) -> None:
        clock = self.host.clock
        for _ in range(steps):
            work = clock.spawn(self.step())
            if self.draw.random() < 0.2:
                await clock.sleep(self.draw.random() * 1e-3)
                work.cancel()
            await work.ended()
            if not work.task.cancelled():
                await work
            await clock.sleep(self.draw.random() * 1e-4)

    async def step(self) -> None:
        slot = self.draw.randrange(SLOTS)
        use = self.busy.get(slot, 0)
        if slot in self.live and use >= 0 and self.draw.random() < 0.75:
            self.busy[slot] = use + 1
            try:
                await self.read(slot)
            finally:
                self.busy[slot] -= 1
        elif not use:
            self.busy[slot] = -1
            try:
                await self.replace(slot)
            finally:
                self.busy[slot] = 0

    async def read(self, slot: int) -> None:
        tag, nbytes = self.live[slot]
        done, into, trailer = await self.host.try_read(slot * STRIDE * PAGE_BYTES, nbytes)
        if done.status is Status.OK:
            assert self.host.holds(into, tag)
            assert (trailer == self.host.trailer(tag)).all()
            self.reads += 1
        else:
            assert done.status is Status.IO_ERROR
            self.refused += 1

    async def replace(self, slot: int) -> None:
        device, address = self.host.device, slot * STRIDE * PAGE_BYTES
        if slot in self.live:
            device.discard(address, self.live.pop(slot)[1])
        self.next_tag += 1
        tag, nbytes = self.next_tag, self.draw.randint(1, STRIDE - 2) * PAGE_BYTES
        assert device.admit(address, nbytes)
        try:
            content = self.host.content(tag, nbytes)
            for _ in range(self.draw.choice((1, 1, 2))):
                done = await self.host.pair.write(
                    self.host.region.rkey, address, content, self.host.trailer(tag)
                )
                assert done.status is Status.OK
                await self.host.clock.sleep(self.draw.random() * 1e-3)
            device.commit(address)
            self.live[slot] = (tag, nbytes)
        except DeviceError:
            self.refused += 1
        finally:
            if slot not in self.live:
                device.cancel(address)


@pytest.mark.parametrize("eager", ["true", "false"])
@pytest.mark.parametrize("phantom", [True, False])
@pytest.mark.parametrize(("ways", "policy"), [("0", "lru"), ("8", "s3fifo"), ("6", "clock")])
@pytest.mark.parametrize("rules", [(), FAULTS], ids=["sound", "faults"])
def test_reads_are_right_or_refused_and_nothing_is_held(eager, phantom, ways, policy, rules):
    profile = small_profile(24, eager_write_back=eager, associativity=ways, policy=policy)
    host = Host(profile, *rules, phantom=phantom, trailer_bytes=PAGE_BYTES)
    traffic = Traffic(host, seed=1)
    host.drive(host.clock.gather(*[traffic.client(60) for _ in range(6)]))
    assert traffic.reads > 100
    assert bool(traffic.refused) == bool(rules)
    assert min(host.counters.hits, host.counters.misses, host.counters.evictions) > 50
    host.close()
