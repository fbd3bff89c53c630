"""The owner of shared memory bounds for how long a reader may hold what it asked for."""

from __future__ import annotations

from pathlib import Path

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric_shared import PostRead
from cxlbench.emu.status import Status
from tests.emu.test_fabric_shared import Rig, content


def test_a_read_that_is_asked_for_when_its_lease_is_over_does_not_touch_the_target(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        rig.shelf.put(0, content(100))
        post = PostRead(rig.region.rkey, 1000, 100, 0, clock.real(), 1)
        assert (await rig.carrier.post_read("late", post)).status is Status.TIMEOUT
        assert rig.shelf.port.moved_bytes == 0
        post = PostRead(rig.region.rkey, 1000, 100, 0, clock.real() + 10, 2)
        assert (await rig.carrier.post_read("late", post)).status is Status.OK
        assert rig.shelf.port.moved_bytes > 0
        rig.carrier.drop_client("late")

    with WallClock(shared=True) as clock:
        rig = Rig(clock, tmp_path)
        clock.run(work())
        rig.close()


def test_a_grant_ends_though_its_reader_asked_for_more_time_than_any_lease_lasts(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        rig.shelf.put(0, content(100))
        rig.carrier._hold_s = 0.05
        post = PostRead(rig.region.rkey, 1000, 100, 0, 1e12, 1)
        assert (await rig.carrier.post_read("greedy", post)).status is Status.OK
        assert rig.carrier.granted == 1
        begin_s = clock.real()
        while rig.carrier.granted:
            assert clock.real() < begin_s + 5
            await clock.sleep(1e-3)

    with WallClock(shared=True) as clock:
        rig = Rig(clock, tmp_path)
        clock.run(work())
        rig.close()
