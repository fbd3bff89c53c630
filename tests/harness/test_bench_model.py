"""The bench of the model: its virtual half is the model's, its real half moves and checks bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.memory import PhantomBuffer
from cxlbench.harness import bench_model as bench
from cxlbench.harness.bench_model import Case, Compared, Half
from cxlbench.harness.fidelity import Fidelity
from cxlbench.harness.generator import generate
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.run import Simulated
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.hymcache.connector import HyMCacheConnector
from tests.harness.serve.setups import run

CASES = {case.name: case for case in bench.cases(sessions=3)}


def modelled(case: Case) -> Simulated:
    """Run a case as experiments do: the tier by its name, at full size."""
    return run(
        generate(case.knobs),
        "hymcache",
        Drive(order=Order.ROUNDS, concurrency=case.concurrency),
        options={"device_capacity_bytes": bench.CAPACITY_BYTES, "prefetch": case.prefetch},
        seed=case.knobs.seed,
        prefix_caching=False,
    )


@pytest.mark.parametrize("name", ["conversations", "long shared prefix"])
@pytest.mark.parametrize("scale", [1, bench.SCALE])
def test_the_virtual_half_is_what_experiments_run_whatever_the_scale(name: str, scale: int) -> None:
    case = CASES[name]
    half, fidelity = bench.serve(case, VirtualClock(), scale=scale)
    expected = modelled(case)
    assert fidelity is None
    assert half.laws_broken == ()
    assert half.requests == len(expected.served)
    assert half.loaded_blocks == sum(record.loaded for record in expected.served) > 0
    assert half.hit_rate == pytest.approx(expected.hit_rate)
    # Pages and rounded sizes do not scale.
    assert half.ttft_mean_s == pytest.approx(expected.ttft.mean_s, rel=1e-9 if scale == 1 else 0.01)


def test_the_three_cases_show_three_things() -> None:
    chat, agents, small = (bench.serve(case, VirtualClock())[0] for case in CASES.values())
    # What a store has not ended yet is computed again; with so few conversations that shows.
    assert min(chat.hit_rate, agents.hit_rate) > 0.6
    assert agents.loaded_blocks / agents.requests > 3 * chat.loaded_blocks / chat.requests
    case = CASES["no prefetch, 2 GiB"]
    assert not case.prefetch
    full = bench.cases(sessions=8)[2]
    assert 0.5 < bench.serve(full, VirtualClock())[0].hit_rate < 1, "the write buffer refuses some"
    assert small.laws_broken == ()


def test_the_command_runs_and_moves_the_same_blocks_in_real_time(cli: Any) -> None:
    """No time is asserted: what a host does on time is what the command is for."""
    ran = cli("bench", "model", "--sessions", "1", "--json")
    assert ran.code == 0
    assert len(ran.document["passed"]) == 9
    for entry in ran.document["measured"]:
        wall, virtual = entry["case"]["wall"], entry["case"]["virtual"]
        assert wall["laws_broken"] == virtual["laws_broken"] == []
        assert wall["requests"] == virtual["requests"]
        assert wall["loaded_blocks"] > 0
        assert wall["ttft_mean_s"] >= 0.99 * virtual["ttft_mean_s"]
        assert entry["ratios"]["hit rate"] > 0


def half(**changes: Any) -> Half:
    made = Half(10, 20, 0.01, 0.2, 0.9, ())
    return dataclasses.replace(made, **changes)


def compared(wall: Half) -> Compared:
    return Compared("made up", wall, half(), Fidelity(0.0, 0.0, 1, ()))


def test_a_missed_bar_is_named_and_strict_makes_it_an_error(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compared(half(ttft_mean_s=0.2 * 1.11, block_read_mean_s=0.01 * 1.09))
    assert found.ratios() == pytest.approx({"block read": 1.09, "TTFT": 1.11, "hit rate": 1.0})
    monkeypatch.setattr(bench, "bench_model", lambda **_: (found,))
    ran = cli("bench", "model")
    assert ran.code == 0
    assert "MISSED 1 of 3 bars: made up: TTFT" in ran.err
    assert cli("bench", "model", "--strict").code == 1


def test_a_broken_law_is_wrong_whatever_the_times(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compared(half(laws_broken=("no wrong block was delivered",)))
    monkeypatch.setattr(bench, "bench_model", lambda **_: (found,))
    ran = cli("bench", "model")
    assert ran.code == 1
    assert "WRONG: made up: this does not hold: no wrong block was delivered" in ran.err


def test_wrong_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = HyMCacheConnector.submit_load

    def elsewhere(self: Any, request_id: int, keys: Any, buffers: Any) -> Any:
        return deliver(self, request_id, keys, [PhantomBuffer(b.nbytes) for b in buffers])

    monkeypatch.setattr(HyMCacheConnector, "submit_load", elsewhere)
    found, _ = bench.serve(CASES["conversations"], VirtualClock())
    assert "no wrong block was delivered" in found.laws_broken


def test_the_tier_of_the_bench_is_hymcache() -> None:
    assert issubclass(bench._RigTier, HyMCacheTier)
