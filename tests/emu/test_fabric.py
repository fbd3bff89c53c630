"""One-sided operations: they reach what the rkey allows, and end with a status, never otherwise."""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

import numpy as np
import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.fabric import Fabric, QueuePair
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.memory import TORN, PhantomBuffer
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import DeviceError, Status

BASE = 1 << 40
LENGTH = 1 << 20
SIZE = 1000
LATENCY_S = 0.5


class View:
    """A readable object of the target below."""

    bookings = ()

    def __init__(self, target, content):
        self.port = target.port
        self.target = target
        self.content = content
        target.open_views += 1

    def copy_into(self, payload, trailer, digest):
        if isinstance(payload, PhantomBuffer):
            payload.tag = self.content
        else:
            payload[:] = self.content
        if trailer is not None:
            trailer[:] = 7
        if digest is not None:
            digest(payload)

    async def arrived(self):
        if self.target.fails_late:
            raise DeviceError(Status.IO_ERROR, "the refill failed")

    def close(self):
        self.target.open_views -= 1


class Target:
    """Memory that keeps objects in a dictionary."""

    trailer_bytes = 64
    latency_s = 0.0
    trailer_cost_bytes = 4096

    def __init__(self, clock):
        self.port = Pipe(clock, "port", 4000.0)
        self.objects = {}
        self.closed = set()
        self.open_views = 0
        self.fails_late = False

    async def open_read(self, address, size_bytes):
        if address not in self.objects:
            raise DeviceError(Status.NO_OBJECT, "nothing")
        return View(self, self.objects[address])

    async def ready_to_receive(self, address):
        if address in self.closed:
            raise DeviceError(Status.NO_OBJECT, "no reservation")

    def receive(self, address, payload, trailer):
        if address < 4096:
            raise DeviceError(Status.IO_ERROR, "reserved page")
        self.objects[address] = payload.copy()


class Net:
    """A target behind a link of 1000 B/s, registered from BASE on, at its own address 4096."""

    def __init__(self, *rules, writable=True, **pair):
        self.clock = VirtualClock()
        self.faults = FaultPlan(tuple(FaultRule(**rule) for rule in rules), 3)
        self.fabric = Fabric(self.clock, seed=1, faults=self.faults)
        self.target = Target(self.clock)
        self.link = Pipe(self.clock, "link", 1000.0)
        self.pair = QueuePair(self.fabric, [self.link], latency_s=LATENCY_S, name="worker0", **pair)
        self.region = self.fabric.register(
            self.target, BASE, LENGTH, offset=4096, writable=writable
        )
        self.target.objects[4096] = self.content = noise(SIZE)

    def read(self, *, rkey=None, address=BASE, payload=None, **options):
        payload = np.zeros(SIZE, dtype=np.uint8) if payload is None else payload
        rkey = self.region.rkey if rkey is None else rkey
        return self.clock.run(self.pair.read(rkey, address, payload, **options))

    def write(self, *, rkey=None, address=BASE, payload=None, trailer=None):
        payload = noise(SIZE, 9) if payload is None else payload
        rkey = self.region.rkey if rkey is None else rkey
        return self.clock.run(self.pair.write(rkey, address, payload, trailer))


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def make_net():
    nets = []

    def make(*rules, **options):
        nets.append(Net(*rules, **options))
        return nets[-1]

    yield make
    for made in nets:
        made.clock.close()
        assert made.target.open_views == 0


@pytest.fixture
def net(make_net):
    return make_net()


def test_a_read_brings_the_bytes_and_takes_the_slowest_pipe_and_the_latency(net):
    payload, trailer = np.zeros(SIZE, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    done = net.read(payload=payload, trailer=trailer)
    assert done.status is Status.OK
    assert (done.nbytes, done.due_s) == (SIZE + 64, 1.064 + LATENCY_S)
    assert np.array_equal(payload, net.content)
    assert (trailer == 7).all()


def test_a_write_lands_at_the_targets_own_address(net):
    done = net.write(address=BASE + 8192)
    assert done.status is Status.OK
    assert (done.nbytes, done.due_s) == (SIZE, 1.0 + LATENCY_S)
    assert np.array_equal(net.target.objects[4096 + 8192], noise(SIZE, 9))


def test_reads_and_writes_may_take_different_paths():
    with VirtualClock() as clock:
        fabric = Fabric(clock, seed=1)
        back = Pipe(clock, "back", 500.0)
        pair = QueuePair(
            fabric, [Pipe(clock, "to", 1000.0)], write_path=[back], latency_s=0.0, name="w"
        )
        target = Target(clock)
        region = fabric.register(target, 4096, LENGTH, writable=True)
        done = clock.run(pair.write(region.rkey, 4096, noise(SIZE)))
        assert done.due_s == 2.0
        assert back.moved_bytes == SIZE


def test_two_reads_share_the_link(net):
    async def both():
        buffers = [np.zeros(SIZE, dtype=np.uint8) for _ in range(2)]
        return await net.clock.gather(
            *[net.pair.read(net.region.rkey, BASE, buffer) for buffer in buffers]
        )

    assert [done.due_s for done in net.clock.run(both())] == [1.5, 2.5]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_latency_of_the_target_is_added_to_that_of_the_path(net, operation):
    net.target.latency_s = 0.25
    assert getattr(net, operation)().due_s == 1.0 + LATENCY_S + 0.25


# -- reads under way ------------------------------------------------------------------------------


def in_parallel(net, *works):
    async def all_of_them():
        return await net.clock.gather(*works)

    return net.clock.run(all_of_them())


def a_read(net, **options):
    payload = np.zeros(SIZE, dtype=np.uint8)
    return net.pair.read(
        options.get("rkey", net.region.rkey), options.get("address", BASE), payload
    )


def test_reads_beyond_the_limit_wait_for_one_to_end_in_the_order_of_posting(make_net):
    net = make_net(outstanding_reads=2)
    done = in_parallel(net, *[a_read(net) for _ in range(5)])
    # Two share the link and end at 1.5 and 2.5; each of the others begins when one has ended.
    assert [each.due_s for each in done] == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert net.pair.reads.peak == 2
    assert net.pair.reads.used == 0


def test_one_read_at_a_time_pays_every_latency(make_net):
    net = make_net(outstanding_reads=1)
    done = in_parallel(net, *[a_read(net) for _ in range(3)])
    assert [each.due_s for each in done] == [1.5, 3.0, 4.5]


def test_a_read_that_waits_for_its_turn_holds_nothing_of_the_target(make_net):
    net = make_net(outstanding_reads=1)
    seen = []
    net.clock.call_at(0.5, lambda: seen.append(net.target.open_views))
    in_parallel(net, *[a_read(net) for _ in range(4)])
    assert seen == [1]
    assert net.link.moved_bytes == 4 * SIZE


def test_writes_have_no_part_in_the_limit_of_reads(make_net):
    net = make_net(outstanding_reads=1)
    writes = [net.pair.write(net.region.rkey, BASE + 4096, noise(SIZE)) for _ in range(2)]
    done = in_parallel(net, a_read(net), *writes)
    assert [each.due_s for each in done] == [1.5, 2.5, 3.5]


def test_every_read_gives_its_place_back_however_it_ends(make_net):
    fault = {"point": "fabric.read", "kind": "down", "limit": 1}
    net = make_net(fault, outstanding_reads=1)
    assert net.read().status is Status.LINK_DOWN
    assert net.read(rkey=1).status is Status.BAD_RKEY
    assert net.read(address=BASE + 4096).status is Status.NO_OBJECT
    net.target.fails_late = True
    assert net.read().status is Status.IO_ERROR
    net.target.fails_late = False
    net.pair.up = False
    assert net.read().status is Status.LINK_DOWN
    net.pair.up = True

    async def cancelled():
        jobs = [net.clock.spawn(a_read(net)) for _ in range(3)]
        await net.clock.sleep(0.5)
        for job in jobs[:2]:  # one under way, and one that waits
            job.cancel()
        return await jobs[2]

    assert net.clock.run(cancelled()).status is Status.OK
    assert net.pair.reads.used == 0


def test_a_read_whose_rkey_is_revoked_while_it_waits_is_refused(make_net):
    net = make_net(outstanding_reads=1)
    other = net.fabric.register(net.target, BASE + LENGTH, LENGTH, offset=4096)
    net.clock.call_at(0.5, net.fabric.revoke, other)
    done = in_parallel(net, a_read(net), a_read(net, rkey=other.rkey, address=BASE + LENGTH))
    assert [each.status for each in done] == [Status.OK, Status.BAD_RKEY]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_read_is_refused(net, limit):
    with pytest.raises(ValueError, match=f"w1: outstanding_reads must be .*got {limit}"):
        QueuePair(net.fabric, [], latency_s=0, name="w1", outstanding_reads=limit)


# -- rkeys ----------------------------------------------------------------------------------------


def test_rkeys_are_64_random_bits():
    with VirtualClock() as clock:
        fabric, target = Fabric(clock, seed=1), Target(clock)
        keys = {fabric.register(target, 0, 4096).rkey for _ in range(512)}
        assert len(keys) == 512 == fabric.registered
        for bit in range(64):
            assert 150 < sum(key >> bit & 1 for key in keys) < 362
        steps = np.diff(np.array(sorted(keys), dtype=object))
        assert min(steps) > 1 << 20


def test_rkeys_depend_on_the_seed_and_on_nothing_else():
    def first(seed):
        with VirtualClock() as clock:
            return Fabric(clock, seed=seed).register(Target(clock), 0, 4096).rkey

    assert first(1) == first(1) != first(2)


def test_rkeys_of_a_generator_that_is_handed_in_are_of_it_alone():
    class Counted(random.SystemRandom):
        drawn: ClassVar[list[int]] = []

        def getrandbits(self, bits):
            self.drawn.append(bits)
            return super().getrandbits(bits)

    with VirtualClock() as clock:
        fabric = Fabric(clock, seed=Counted())
        keys = {fabric.register(Target(clock), 0, 4096).rkey for _ in range(3)}
    assert Counted.drawn == [64] * 3
    assert len(keys) == 3


@pytest.mark.parametrize("wrong", [0, 1, -1, 1 << 64])
def test_a_wrong_rkey_is_a_status(net, wrong):
    payload = np.zeros(SIZE, dtype=np.uint8)
    assert net.read(rkey=wrong, payload=payload).status is Status.BAD_RKEY
    assert net.write(rkey=wrong).status is Status.BAD_RKEY
    assert not payload.any()
    assert np.array_equal(net.target.objects[4096], net.content)


def test_the_rkey_of_a_neighbour_does_not_do(net):
    other = net.fabric.register(Target(net.clock), BASE + LENGTH, LENGTH)
    assert net.read(rkey=other.rkey).status is Status.BOUNDS


def test_a_region_that_may_only_be_read_takes_no_write(make_net):
    net = make_net(writable=False)
    assert net.write().status is Status.BAD_RKEY
    assert net.read().status is Status.OK


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        (BASE - 1, False),
        (BASE, True),
        (BASE + LENGTH - SIZE, True),
        (BASE + LENGTH - SIZE + 1, False),
        (BASE + LENGTH, False),
        (0, False),
    ],
)
def test_an_access_must_lie_inside_the_region(net, address, allowed):
    net.target.objects[address - BASE + 4096] = net.content
    wanted = Status.OK if allowed else Status.BOUNDS
    assert net.read(address=address).status is wanted
    assert net.write(address=address).status is wanted


def test_the_trailer_must_lie_inside_the_region_too(net):
    net.target.objects[4096 + LENGTH - SIZE] = net.content
    trailer = np.zeros(1, dtype=np.uint8)
    assert net.read(address=BASE + LENGTH - SIZE, trailer=trailer).status is Status.BOUNDS


def test_a_revoked_rkey_is_unknown(net):
    net.fabric.revoke(net.region)
    net.fabric.revoke(net.region)
    assert net.read().status is Status.BAD_RKEY
    assert net.fabric.registered == 0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_rkey_revoked_in_flight_ends_the_operation(net, operation):
    net.clock.call_at(0.5, net.fabric.revoke, net.region)
    done = getattr(net, operation)()
    assert (done.status, done.nbytes) == (Status.REVOKED, 0)
    assert np.array_equal(net.target.objects[4096], net.content)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_link_that_is_down_is_a_status(net, operation):
    net.pair.up = False
    done = getattr(net, operation)()
    assert (done.status, done.nbytes, done.due_s) == (Status.LINK_DOWN, 0, LATENCY_S)
    assert net.link.moved_bytes == 0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_link_that_goes_down_in_flight_is_a_status(net, operation):
    net.clock.call_at(0.5, setattr, net.pair, "up", False)
    done = getattr(net, operation)()
    assert (done.status, done.nbytes) == (Status.LINK_DOWN, 0)
    assert np.array_equal(net.target.objects[4096], net.content)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_link_that_goes_down_and_up_again_in_flight_has_lost_the_operation(net, operation):
    net.clock.call_at(0.5, setattr, net.pair, "up", False)
    net.clock.call_at(0.6, setattr, net.pair, "up", True)
    done = getattr(net, operation)()
    assert (done.status, done.nbytes) == (Status.LINK_DOWN, 0)
    assert np.array_equal(net.target.objects[4096], net.content)
    assert net.pair.up
    assert getattr(net, operation)().status is Status.OK


def test_a_link_that_is_said_to_be_up_again_and_again_has_no_outage(net):
    net.clock.call_at(0.5, setattr, net.pair, "up", True)
    assert net.read().status is Status.OK


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_injected_link_fault_holds_for_one_operation(make_net, operation):
    net = make_net({"point": f"fabric.{operation}", "kind": "down", "limit": 1})
    assert getattr(net, operation)().status is Status.LINK_DOWN
    assert getattr(net, operation)().status is Status.OK


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_injected_delay_comes_before_the_transfer(make_net, operation):
    net = make_net({"point": f"fabric.{operation}", "kind": "delay", "delay_s": 3.0})
    assert getattr(net, operation)().due_s == 3.0 + 1.0 + LATENCY_S


def test_what_the_device_says_no_to_is_a_status(net):
    assert net.read(address=BASE + 4096).status is Status.NO_OBJECT
    net.target.closed.add(4096)
    assert net.write().status is Status.NO_OBJECT


def test_a_device_that_fails_while_the_bytes_stream_is_a_status(net):
    net.target.fails_late = True
    done = net.read()
    assert (done.status, done.nbytes) == (Status.IO_ERROR, 0)


def test_a_device_that_does_not_take_the_bytes_is_a_status(net):
    low = net.fabric.register(net.target, 0, 4096, writable=True)
    done = net.write(rkey=low.rkey, address=0)
    assert (done.status, done.nbytes) == (Status.IO_ERROR, 0)


def test_a_cancelled_read_leaves_nothing_pinned(net):
    async def main():
        job = net.clock.spawn(net.pair.read(net.region.rkey, BASE, np.zeros(SIZE, np.uint8)))
        await net.clock.sleep(0.5)
        pinned = net.target.open_views
        job.cancel()
        await job.ended()
        return pinned

    assert net.clock.run(main()) == 1


def test_the_digest_is_of_the_bytes_that_arrive(make_net):
    """Corruption on the wire must not hide behind a checksum of what was sent."""
    net = make_net({"point": "fabric.read", "kind": "corrupt", "limit": 1})

    def read():
        seen, payload = [], np.zeros(SIZE, dtype=np.uint8)
        done = net.read(payload=payload, digest=lambda piece: seen.append(piece.tobytes()))
        assert done.status is Status.OK
        assert b"".join(seen) == payload.tobytes()
        return payload

    assert np.unpackbits(read() ^ net.content).sum() == 1
    assert np.array_equal(read(), net.content)


def test_a_corrupted_tag_is_no_object_any_more(make_net):
    net = make_net({"point": "fabric.read", "kind": "corrupt"})
    buffer = PhantomBuffer(SIZE)
    assert net.read(payload=buffer).status is Status.OK
    assert buffer.tag == TORN


def test_a_completion_cannot_be_changed(make_net):
    done = make_net().read()
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.status = Status.OK


def test_an_uncontended_operation_costs_one_timer(net):
    before = net.clock.timers
    net.read()
    net.write(address=BASE + 4096)
    assert net.clock.timers - before == 2
