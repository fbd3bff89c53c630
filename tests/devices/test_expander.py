"""DRAM at a distance: the port's bandwidth, a capacity that refuses, no staging."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.devices.expander import Expander
from cxlbench.devices.profile import ExpanderProfile, load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.memory import PhantomBuffer
from cxlbench.emu.pipe import finished
from cxlbench.emu.status import DeviceError
from cxlbench.kv.device import MemoryDevice

PAGE = 4096
SIZE = 3 * PAGE
STRIDE = SIZE + PAGE


@pytest.fixture
def clock():
    with VirtualClock() as made:
        yield made


@pytest.fixture(params=[False, True], ids=["ram", "phantom"])
def phantom(request):
    return request.param


@pytest.fixture
def device(clock, phantom):
    profile = load_as(ExpanderProfile, "remote-dram")
    made = Expander(clock, profile, phantom=phantom, capacity_bytes=4 * STRIDE)
    yield made
    assert not any(made.at_rest().values())
    clock.run(made.close())


def content(device, tag):
    if device.arena.phantom:
        return PhantomBuffer(SIZE, tag)
    return np.random.default_rng(tag).integers(0, 256, SIZE, dtype=np.uint8)


def footer(tag):
    return np.full(PAGE, tag, dtype=np.uint8)


async def write(device, address, tag):
    assert device.admit(address, SIZE)
    await device.ready_to_receive(address)
    await finished(device.clock, device.port.reserve(STRIDE))
    device.receive(address, content(device, tag), footer(tag))
    device.commit(address)


async def read(device, address):
    view = await device.open_read(address, SIZE)
    into, trailer = device.arena.buffer(SIZE), np.zeros(PAGE, dtype=np.uint8)
    booking = view.port.reserve(STRIDE)
    await view.arrived()
    view.copy_into(into, trailer, None)
    await finished(device.clock, *view.bookings, booking)
    view.close()
    view.close()  # a second time does nothing
    return into, trailer


def test_objects_come_back_with_their_trailers(clock, device):
    async def main():
        for tag in range(4):
            await write(device, tag * STRIDE, tag)
        device.discard(2 * STRIDE, SIZE)
        await write(device, 2 * STRIDE, 9)
        await device.quiesce()
        return [await read(device, index * STRIDE) for index in range(4)]

    for (into, trailer), tag in zip(clock.run(main()), (0, 1, 9, 3), strict=True):
        wanted = content(device, tag)
        assert into == wanted if device.arena.phantom else (into == wanted).all()
        assert (trailer == tag).all()


def test_readers_share_the_bandwidth_of_the_port(clock, device):
    async def main():
        await write(device, 0, 1)
        begin = clock.now()
        await clock.gather(*[read(device, 0) for _ in range(10)])
        return clock.now() - begin

    assert clock.run(main()) == pytest.approx(10 * STRIDE / device.profile.bandwidth)


def test_a_full_device_refuses(clock, device):
    assert device.admit(3 * STRIDE, SIZE)
    assert not device.admit(4 * STRIDE, SIZE)
    assert not device.admit(3 * STRIDE + PAGE, SIZE), "its trailer would lie outside"
    device.cancel(3 * STRIDE)


def test_it_is_a_memory_device_without_staging(clock, device):
    assert isinstance(device, MemoryDevice)
    assert device.prefetch_depth == 0
    assert device.chm_prefetch_object(0, SIZE) is None
    with pytest.raises(DeviceError, match="no staging"):
        clock.run(device.chm_prefetch_wait(object()))
    with pytest.raises(DeviceError, match="no staging"):
        device.chm_prefetch_release(object())


def test_misuse_is_refused(clock, device):
    with pytest.raises(DeviceError, match="nothing committed"):
        clock.run(device.open_read(0, SIZE))
    with pytest.raises(DeviceError, match="no reservation"):
        device.receive(0, content(device, 1), None)
    assert device.admit(0, SIZE)
    with pytest.raises(ValueError, match="already taken"):
        device.admit(0, SIZE)
    with pytest.raises(DeviceError, match="nothing received"):
        device.commit(0)
    with pytest.raises(DeviceError, match="reserved"):
        device.receive(0, PhantomBuffer(PAGE), None)
    with pytest.raises(DeviceError, match="nothing committed"):
        clock.run(device.open_read(0, SIZE))
    device.cancel(0)
    with pytest.raises(ValueError, match="no open reservation"):
        device.cancel(0)
    device.discard(0, SIZE)  # nothing is there: nothing to do


def test_what_is_held_is_counted(clock, device):
    device.admit(STRIDE, SIZE)
    clock.run(write(device, 0, 1))
    view = clock.run(device.open_read(0, SIZE))
    assert device.at_rest() == {"dram reservations": 1, "dram pins": 1}
    view.close()
    device.cancel(STRIDE)


def test_a_trailer_for_a_device_without_trailers_is_refused(clock, phantom):
    profile = load_as(ExpanderProfile, "remote-dram")
    device = Expander(clock, profile, phantom=phantom, capacity_bytes=SIZE, trailer_bytes=0)

    async def main():
        with pytest.raises(DeviceError, match="room for 0"):
            await write(device, 0, 5)
        device.cancel(0)

    clock.run(main())
    clock.run(device.close())


def test_more_capacity_than_the_profile_has_is_refused(clock):
    profile = load_as(ExpanderProfile, "remote-dram")
    with pytest.raises(DeviceError, match="its DRAM has"):
        Expander(clock, profile, phantom=True, capacity_bytes=profile.capacity + PAGE)
