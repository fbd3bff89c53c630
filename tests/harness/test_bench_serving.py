"""The bench of the serving model: what it counts, and its bars."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cxlbench.harness import bench_serving as bench
from cxlbench.harness.bench_serving import ServingCost, bench_serving, growth

COST = ServingCost("mooncake", 1, 10, 100, 2.0, 50, 200, 10**8, ())


def test_costs_are_for_each_block_and_each_event() -> None:
    assert COST.cpu_per_block_s == 0.02
    assert COST.cpu_per_event_s == 0.01
    assert COST.timers_per_block == 0.5


def test_growth_is_from_the_smallest_size_to_the_largest() -> None:
    large = dataclasses.replace(COST, factor=16, blocks=1600, cpu_s=64.0, callbacks=6400)
    middle = dataclasses.replace(COST, factor=4, blocks=400, cpu_s=100.0)
    other = dataclasses.replace(COST, tier="redis", factor=64, cpu_s=1e9)
    assert growth((large, middle, COST, other), "mooncake") == (2.0, 1.0)


def test_every_tier_serves_every_size_and_events_follow_the_blocks() -> None:
    seen: list[tuple[int, int]] = []
    found = bench_serving(
        sessions=2, factors=(4, 1), progress=lambda _, done, of: seen.append((done, of))
    )
    assert [(cost.tier, cost.factor) for cost in found] == [
        (name, factor) for factor in (1, 4) for name in bench.TIERS
    ]
    assert seen[-1] == (8, 8)
    for cost in found:
        assert cost.requests == cost.factor * 2 * bench.TURNS
        assert cost.laws_broken == ()
        assert cost.cpu_s > 0
    recompute = [cost for cost in found if cost.tier == "recompute"]
    assert recompute[1].blocks == pytest.approx(4 * recompute[0].blocks, rel=0.1)
    assert recompute[1].callbacks < 4.5 * recompute[0].callbacks


def test_the_largest_size_is_the_papers() -> None:
    assert bench.PAPER_SESSIONS == 512
    assert bench.FACTORS[-1] * 32 == 512
    work = bench._workload(512, 1)
    blocks = len({block for request in work.requests for block in request.block_ids})
    assert blocks * 32 * 2**20 == pytest.approx(1.5 * 2**40, rel=0.02)


def made_up(*costs: ServingCost) -> Any:
    return lambda **_: costs


def test_the_command_prints_a_verdict_on_every_tier(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = dataclasses.replace(COST, factor=16, blocks=1600, cpu_s=64.0, callbacks=6400)
    monkeypatch.setattr(bench, "bench_serving", made_up(COST, large))
    ran = cli("bench", "serving")
    assert ran.code == 0
    assert "MISSED 1 of 3 bars: mooncake: CPU time for each block" in ran.err
    assert cli("bench", "serving", "--strict").code == 1
    fat = dataclasses.replace(COST, peak_resident_bytes=3 * 10**9)
    monkeypatch.setattr(bench, "bench_serving", made_up(fat))
    assert "peak resident memory" in cli("bench", "serving").err


def test_a_broken_law_is_wrong(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(COST, laws_broken=("Little's law",))
    monkeypatch.setattr(bench, "bench_serving", made_up(broken))
    ran = cli("bench", "serving", "--json")
    assert ran.code == 1
    assert "mooncake, 1 x: Little's law" in ran.err
