"""A one-sided read past the end of its lease is refused, wherever it was when the lease ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cxlbench.emu.status import Status
from tests.emu.test_fabric import BASE, SIZE, Net, View


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net(outstanding_reads=1)
    yield made
    made.clock.close()
    assert made.target.open_views == 0
    assert made.pair.reads.used == 0


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_a_read_that_begins_when_its_lease_is_over_moves_nothing(net: Net, left_s: float) -> None:
    async def late() -> None:
        await net.clock.sleep(2.0)

    net.clock.run(late())
    payload = np.zeros(SIZE, dtype=np.uint8)
    done = net.read(payload=payload, until_s=2.0 + left_s)
    assert done.status is Status.TIMEOUT
    assert not payload.any()
    assert net.link.moved_bytes == 0


def test_a_read_whose_lease_ends_while_the_object_is_staged_moves_nothing(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def staged_late(view: View) -> None:
        await net.clock.sleep(1.0)

    monkeypatch.setattr(View, "arrived", staged_late)
    payload = np.zeros(SIZE, dtype=np.uint8)
    assert net.read(payload=payload, until_s=1.0).status is Status.TIMEOUT
    assert not payload.any()
    done = net.read(payload=payload, until_s=net.clock.now() + 1.1)
    assert done.status is Status.OK
    assert np.array_equal(payload, net.content)


def test_a_read_whose_lease_ends_while_it_waits_for_its_turn_moves_nothing(net: Net) -> None:
    first, second = (np.zeros(SIZE, dtype=np.uint8) for _ in range(2))

    async def both() -> list[Status]:
        jobs = [
            net.clock.spawn(net.pair.read(net.region.rkey, BASE, data, until_s=1.0))
            for data in (first, second)
        ]
        return [(await job).status for job in jobs]

    # The first takes 1.5 s, and had its bytes before the lease ended.
    assert net.clock.run(both()) == [Status.OK, Status.TIMEOUT]
    assert np.array_equal(first, net.content)
    assert not second.any()
