"""The chaos loop: its faults, its judgement, and ten rounds of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cxlbench.harness import chaos
from cxlbench.harness.chaos import Chaos, ChaosReport
from cxlbench.harness.chaos_parts import Fault, Part, Resident, draw_faults
from cxlbench.harness.chaos_spec import chaos_spec
from cxlbench.harness.chaos_worker import operation_limit_s
from cxlbench.harness.cli.chaos import SECONDS
from cxlbench.harness.deployment import DeploymentSpec
from tests.harness.cli_runner import Cli

MIB = 1 << 20


def faults(number: int, **changes: Any) -> list[Fault]:
    given = {"workers": 2, "nodes": 2, "deadline_s": 1.0, **changes}
    return draw_faults(1, number, **given)


def test_the_faults_of_a_round_depend_on_its_number_and_the_seed_only() -> None:
    assert faults(7) == faults(7)
    assert len({str(faults(number)) for number in range(50)}) > 45


def test_every_part_is_killed_and_stopped_but_the_witness_is_only_stopped() -> None:
    drawn = [fault for number in range(300) for fault in faults(number)]
    seen = {(fault.how, str(fault.part)) for fault in drawn}
    parts = {"Master", "node 0", "node 1", "worker 1"}
    assert seen == {(how, part) for how in ("kill", "stop") for part in parts} | {
        ("stop", "worker 0")
    }
    assert all(fault.for_s <= 1.5 for fault in drawn)


def test_a_single_worker_is_no_witness() -> None:
    drawn = [fault for number in range(100) for fault in faults(number, workers=1)]
    assert any(fault.how == "kill" and fault.part.role == "worker" for fault in drawn)


def test_two_faults_of_a_round_hit_two_parts() -> None:
    pairs = [two for number in range(100) if len(two := faults(number)) == 2]
    assert pairs
    assert all(first.part != second.part for first, second in pairs)


@pytest.mark.parametrize(
    ("last_bytes", "last_descriptors", "flat"),
    [(100, 30, True), (107, 34, True), (108, 30, False), (100, 35, False), (10, 3, True)],
)
def test_growth_is_judged_in_memory_and_descriptors(
    last_bytes: int, last_descriptors: int, flat: bool
) -> None:
    grown = Resident("node 0", 100 * MIB, last_bytes * MIB, 30, last_descriptors)
    assert grown.flat is flat


@pytest.fixture
def spec(tmp_path: Path) -> DeploymentSpec:
    return chaos_spec(tmp_path, nodes=2, deadline_s=1.0)


class Stopped:
    number = 1

    def __init__(self, *stopped_s: tuple[float, float]) -> None:
        self.stopped_s = list(stopped_s)


@pytest.mark.parametrize(
    ("stopped", "broken"),
    [([], True), ([(9.0, 10.5)], True), ([(10.5, 12.0)], False), ([(10.1, 11), (11.5, 12)], False)],
)
def test_the_time_that_a_worker_was_stopped_is_not_the_tiers(
    spec: DeploymentSpec, stopped: list[tuple[float, float]], broken: bool
) -> None:
    loop = Chaos(spec, workers=2, seed=1)
    news = {"event": "slow", "work": "load", "begin_s": 10.0, "end_s": 12.2}
    assert operation_limit_s(spec, "load") == 1.5
    loop._judge_slow(Stopped(*stopped), news)  # type: ignore[arg-type]
    assert bool(loop._violations) is broken


def test_nothing_may_take_longer_than_the_deadline_by_more_than_the_hosts_noise(
    spec: DeploymentSpec,
) -> None:
    assert operation_limit_s(spec, "lookup") <= 1.0
    assert operation_limit_s(spec, "load") == 1.5
    assert operation_limit_s(spec, "store") <= 2.0


def test_ten_rounds_break_nothing(spec: DeploymentSpec, tmp_path: Path) -> None:
    steps: list[int] = []
    loop = Chaos(spec, workers=2, seed=3, progress=lambda _, done, total: steps.append(done))
    report = loop.run(10)
    assert report.violations == ()
    assert steps == list(range(1, 11))
    assert sum(report.faults.values()) >= 10
    assert report.hits > 500
    assert report.checked_bytes == report.hits * (128 << 10)
    assert not spec.run_dir.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ssd"]


def test_what_is_held_at_rest_is_a_violation_of_that_round_and_ends_the_loop(
    spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = [Fault("stop", Part("worker", 0), 0.0, 0.02)]
    monkeypatch.setattr(chaos, "draw_faults", lambda *_, **__: harmless)
    monkeypatch.setattr(Chaos, "_held", lambda self: "node 0: held: pins 3" * (self._round == 5))
    monkeypatch.setattr(chaos, "REST_S", 0.1)
    report = Chaos(spec, workers=1, seed=3).run(10, first=4)
    assert report.rounds == 2
    (broken,) = report.violations
    assert broken.round == 5
    assert "held: pins 3" in broken.what
    assert "stop worker 0" in broken.faults
    assert sorted(path.name for path in spec.run_dir.iterdir() if path.suffix == ".log")


def report(*violations: chaos.Violation) -> ChaosReport:
    resident = Resident("Master", 60 * MIB, 61 * MIB, 40, 40)
    return ChaosReport(
        seed=9,
        rounds=3,
        faults={"kill node": 3},
        turns=10,
        hits=20,
        missed=1,
        stored=5,
        checked_bytes=20 * MIB,
        slowest_back_s=1.5,
        slowest_rest_s=0.5,
        residents=(resident,),
        violations=violations,
        elapsed_s=9.0,
    )


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capfd)


Runs = Callable[[ChaosReport], list[dict[str, Any]]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Let the command have this report without any process, and tell how it asked for it."""

    def prepare(found: ChaosReport) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def run(self: Chaos, rounds: int, *, first: int) -> ChaosReport:
            spec = self.spec
            asked.append({"rounds": rounds, "first": first, "deadline": spec.deadline_s})
            return found

        monkeypatch.setattr(Chaos, "run", run)
        return asked

    return prepare


def test_the_command_prints_figures_and_ends_well(cli: Cli, runs: Runs) -> None:
    asked = runs(report())
    ran = cli("chaos", "--rounds", "3", "--seed", "9", "--deadline", "500ms")
    assert ran.code == 0
    assert asked == [{"rounds": 3, "first": 0, "deadline": 0.5}]
    assert "3 in 9 s, seed 9" in ran.out
    assert "Master" in ran.out


def test_a_violation_ends_in_exit_code_1_and_the_command_that_replays_it(
    cli: Cli, runs: Runs
) -> None:
    runs(report(chaos.Violation(31, "wrong bytes", "kill node 0 after 0.10 s for 0.02 s")))
    ran = cli("chaos", "--seed", "9", "--json")
    assert ran.code == 1
    assert ran.document["violations"][0]["round"] == 31
    assert "BROKEN in round 31: wrong bytes (kill node 0" in ran.err
    assert "cxlbench chaos --seed 9 --from-round 31 --rounds 1 --deadline 1s" in ran.err


@pytest.mark.parametrize("deadline", ["5", "5s", "5000ms"])
def test_a_deadline_is_in_seconds_unless_it_says_otherwise(deadline: str) -> None:
    assert SECONDS.convert(deadline, None, None) == 5.0


@pytest.mark.parametrize("deadline", ["0s", "soon", "2h", "1 GiB"])
def test_a_deadline_that_is_none_is_refused(cli: Cli, deadline: str) -> None:
    ran = cli("chaos", "--deadline", deadline)
    assert ran.code == 2
    assert "--deadline" in ran.err
