"""A link: two directions, bytes and messages."""

from __future__ import annotations

import dataclasses

import pytest

from cxlbench.devices.link import Link
from cxlbench.devices.profile import LinkProfile, load_as, scale_profile
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pipe import finished

BLOCK = 16 << 20


@pytest.fixture
def clock():
    with VirtualClock() as clock:
        yield clock


@pytest.fixture
def profile():
    return dataclasses.replace(load_as(LinkProfile, "nic-100g"), message_overhead=1e-6)


def test_a_message_costs_its_bytes_and_the_overhead(clock, profile):
    link = Link(clock, profile, name="nic")
    booking = link.tx.reserve(BLOCK)
    assert booking.end_s == pytest.approx(BLOCK / 12.5e9 + 1e-6)
    assert link.latency_s == profile.latency


def test_small_messages_are_limited_by_the_overhead(clock, profile):
    link = Link(clock, profile, name="nic")

    async def run():
        await finished(clock, *[link.rx.reserve(64) for _ in range(1000)])

    clock.run(run())
    assert clock.now() == pytest.approx(1000 * (64 / 12.5e9 + 1e-6))


def test_the_directions_do_not_share_bandwidth(clock, profile):
    link = Link(clock, profile, name="nic")
    ends = [pipe.reserve(BLOCK).end_s for pipe in (link.tx, link.rx, link.tx)]
    assert ends[0] == ends[1] == pytest.approx(ends[2] / 2)
    assert (link.tx.name, link.rx.name) == ("nic.tx", "nic.rx")


def test_a_cost_of_its_own_replaces_that_of_the_bytes(clock, profile):
    booking = Link(clock, profile, name="nic").tx.reserve(BLOCK, cost_s=2e-6, priority=1)
    assert booking.end_s == pytest.approx(3e-6)
    assert booking.priority == 1


def test_at_a_scale_the_overhead_stays_and_so_do_the_seconds(clock, profile):
    small = Link(clock, scale_profile(profile, 64), name="nic").tx.reserve(BLOCK // 64)
    assert small.end_s == pytest.approx(BLOCK / 12.5e9 + 1e-6)
