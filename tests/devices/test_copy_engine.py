"""The copy engine: one copy after another, each with its latency."""

from __future__ import annotations

import pytest

from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.profile import CopyEngineProfile, load_as
from cxlbench.emu.clock import VirtualClock

MIB = 1 << 20


@pytest.fixture
def engine():
    with VirtualClock() as clock:
        yield CopyEngine(clock, load_as(CopyEngineProfile, "gpu-copy-gen4x16"))


def ends(engine: CopyEngine, *sizes: int, apart_s: float = 0.0) -> list[float]:
    clock = engine.clock

    async def one(number: int, nbytes: int) -> float:
        await clock.sleep(number * apart_s)
        await engine.copy(nbytes)
        return clock.now()

    async def main() -> list[float]:
        return await clock.gather(*[one(number, size) for number, size in enumerate(sizes)])

    return clock.run(main())


def test_a_copy_takes_its_bytes_and_the_latency(engine):
    profile = engine.profile
    assert ends(engine, 16 * MIB) == [pytest.approx(16 * MIB / profile.bandwidth + profile.latency)]


def test_copies_queue_in_the_order_asked_and_overlap_their_latencies(engine):
    each = 16 * MIB / engine.profile.bandwidth
    found = ends(engine, *[16 * MIB] * 4)
    expected = [number * each + engine.profile.latency for number in range(1, 5)]
    assert found == pytest.approx(expected)


def test_an_idle_engine_starts_at_once(engine):
    alone = 16 * MIB / engine.profile.bandwidth + engine.profile.latency
    first, second = ends(engine, 16 * MIB, 16 * MIB, apart_s=1.0)
    assert (first, second) == (pytest.approx(alone), pytest.approx(1.0 + alone))
