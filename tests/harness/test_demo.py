"""The demo, from its options to its report: small runs on real files, and what is planned for."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from cxlbench.harness.demo import DemoOptions, demo_tiers, make_plan, replay_spec, run_demo
from cxlbench.harness.demo_report import report_text
from cxlbench.harness.fidelity import Fidelity
from cxlbench.harness.metrics import Figures
from cxlbench.harness.replay import TraceHasNoIdsError, replay
from cxlbench.harness.requests import Workload
from cxlbench.harness.results import Verdict
from cxlbench.harness.traces import TraceError, write_workload
from tests.harness.workbench import ask, chat, workload

TIERS = ["CMM-H (LRU)", "CXL-HM, no prefetch", "CXL-HM + HyMCache", "all-DRAM"]


def save(folder, work: Workload):
    path = folder / "trace.jsonl"
    write_workload(work, path)
    return path


# -- the whole of it ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    seen: list[tuple[str, int, int] | str] = []
    options = DemoOptions(quick=True, out=out, seed=1)
    return run_demo(options, lambda *args: seen.append(args), seen.append), seen


def test_the_quick_demo_is_right_in_every_run(quick):
    result, _ = quick
    assert result.ok
    assert [tier.name for tier in result.tiers] == TIERS
    for tier in result.tiers:
        assert tier.wall.figures.requests == tier.virtual.figures.requests == 36
        assert tier.wall.figures.tier_blocks > 0
        assert tier.wall.fidelity is not None
        assert tier.whole is None


def test_the_quick_demo_shows_what_the_demo_is_for(quick):
    """In virtual time, where no host disturbs: beyond its DRAM, CMM-H falls below half."""
    result, _ = quick
    last = {tier.name: tier.virtual.figures.turns[-1] for tier in result.tiers}
    assert all(turn.read_bytes > 0 for turn in last.values())
    cmm, staged = last["CMM-H (LRU)"], last["CXL-HM + HyMCache"]
    assert cmm.read_bytes_per_s < staged.read_bytes_per_s / 2
    assert last["all-DRAM"].hit_rate < staged.hit_rate - 0.2


def test_the_report_has_tables_fidelity_and_model(quick):
    result, _ = quick
    text = result.text()
    for name in TIERS:
        lines = [line for line in text.splitlines() if line.startswith(name)]
        assert len(lines) == 3  # figures, model, fidelity
        assert f"{name}: fidelity: " in text
    for part in ("Real bytes, real time", "Emulator against model", "TTFT", "p99", "skipped"):
        assert part in text
    assert "The whole trace" not in text
    assert "compared byte by byte, 0 wrong; nothing held at rest" in text
    assert str(result.plot) in text


def test_the_plot_is_a_picture(quick):
    result, _ = quick
    assert result.plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert result.plot.stat().st_size > 10_000


def test_no_backing_file_is_left(quick):
    result, _ = quick
    left = [path for path in result.options.out.rglob("*") if path.is_file()]
    assert left == [result.plot]


def test_the_json_is_plain_and_has_the_figures_of_the_table(quick):
    result, _ = quick
    document = result.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["ok"] is True
    assert [tier["name"] for tier in document["tiers"]] == TIERS
    for tier, run in zip(document["tiers"], result.tiers, strict=True):
        assert tier["wall"]["hit_rate"] == run.wall.figures.hit_rate
        assert tier["wall"]["turns"][2]["read_bytes_per_s"] > 0
        against = tier["emulator_against_model"]
        assert against["within"] is run.against_model.within
        assert (against["p50"], against["p90"]) == (run.against_model.p50, run.against_model.p90)
        assert tier["timing_kept"] is run.wall.fidelity.trusted


def test_progress_names_every_run_and_reaches_its_end(quick):
    _, seen = quick
    for name in TIERS:
        for part in ("virtual time", "real bytes"):
            assert (f"{name}, {part}", 36, 36) in seen


def test_the_expected_time_is_said_before_the_first_real_byte(quick):
    """T3: nobody should have to find out how long a run takes by waiting for it."""
    result, seen = quick
    (said,) = [entry for entry in seen if isinstance(entry, str)]
    before, after = seen[: seen.index(said)], seen[seen.index(said) + 1 :]
    assert not any("real bytes" in what for what, *_ in before)
    assert all("real bytes" in what for what, *_ in after)
    expected_s = float(re.search(r"takes about (\d+) s", said)[1])
    modelled_s = sum(tier.virtual.figures.duration_s for tier in result.tiers)
    assert modelled_s <= expected_s + 0.5 <= modelled_s + 5
    assert "36 requests on each of 4 tiers" in said


# -- traces -------------------------------------------------------------------------------------


def test_a_trace_over_budget_is_whole_in_virtual_time_and_cut_on_real_bytes(tmp_path):
    trace = save(tmp_path, chat(sessions=4, turns=5, think_s=0.4))
    options = DemoOptions(trace=trace, budget_s=0.3, out=tmp_path / "out", folder=tmp_path / "nvme")
    result = run_demo(options)
    assert result.ok
    kept = {tier.wall.figures.requests for tier in result.tiers}
    assert len(kept) == 1
    assert 0 < kept.pop() < 20
    for tier in result.tiers:
        assert tier.whole is not None
        assert tier.whole.figures.requests == 20
        assert tier.virtual.figures.requests == tier.wall.figures.requests
        assert tier.wall.figures.duration_s < 1.0
    text = result.text()
    assert "The whole trace, in virtual time" in text
    assert f"20 requests, of which {tier.wall.figures.requests} on real bytes" in text
    assert json.loads(json.dumps(result.to_json()))["tiers"][0]["whole_trace"]["requests"] == 20
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_trace_without_a_single_whole_block_is_reported(tmp_path):
    trace = save(tmp_path, workload(ask([], tokens=1), ask([], tokens=0, turn=2, after=0)))
    result = run_demo(DemoOptions(trace=trace, budget_s=60, out=tmp_path / "out"))
    assert result.ok
    for tier in result.tiers:
        check = tier.against_model
        assert (check.p50, check.p90, check.within, check.mark) == (0, 0, True, "no reads")
    assert "0 blocks read back" in result.text()
    assert result.plot.exists()


def test_a_trace_without_block_ids_is_refused(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    own = save(tmp_path, dataclasses.replace(workload(ask([1])), has_ids=False))
    for trace, error in ((azure, TraceError), (own, TraceHasNoIdsError)):
        with pytest.raises(error, match=rf"{trace.name}.*no block ids"):
            run_demo(DemoOptions(trace=trace, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# -- plans --------------------------------------------------------------------------------------


def test_all_tiers_have_the_same_dram():
    for quick_run in (False, True):
        plan = make_plan(DemoOptions(quick=quick_run))
        tiers = demo_tiers(plan)
        assert [name for name, *_ in tiers] == TIERS
        sizes = [getattr(d, "dram_capacity", None) or d.capacity for _, d, _, _ in tiers]
        assert sizes == [plan.dram_bytes] * 4
        assert [prefetch for _, _, prefetch, _ in tiers] == [False, False, True, False]
        assert [capacity for *_, capacity in tiers] == [plan.capacity_bytes] * 3 + [plan.dram_bytes]


def test_the_generated_footprint_is_far_over_the_dram_and_fits_the_device():
    for quick_run in (False, True):
        plan = make_plan(DemoOptions(quick=quick_run))
        assert 2 * plan.dram_bytes < plan.footprint_bytes < plan.capacity_bytes


def test_a_trace_gets_an_eighth_of_its_footprint_as_dram(tmp_path):
    work = workload(*[ask(range(100 * n, 100 * n + 100), session=f"s{n}") for n in range(30)])
    plan = make_plan(DemoOptions(trace=save(tmp_path, work)))
    assert plan.footprint_bytes == 3000 * plan.block_bytes
    assert plan.footprint_bytes / 8 <= plan.dram_bytes < plan.footprint_bytes / 4
    assert plan.capacity_bytes >= 2 * plan.footprint_bytes


def test_a_long_trace_is_played_faster_up_to_a_limit(tmp_path):
    def speed(span_s: float, budget_s: float) -> float:
        work = workload(ask([1], session="a"), ask([2], session="b", at=span_s))
        return make_plan(DemoOptions(trace=save(tmp_path, work), budget_s=budget_s)).speed

    assert speed(30, 60) == 1
    assert speed(120, 60) == 2
    assert speed(86400, 60) == 16


def test_scale_and_seed_are_taken_from_the_options():
    options = DemoOptions(quick=True, scale=256, seed=9)
    plan = make_plan(options)
    _, device, prefetch, capacity = demo_tiers(plan)[0]
    chosen = replay_spec(plan, device, prefetch=prefetch, capacity_bytes=capacity, seed=9)
    assert (plan.scale, chosen.rig.scale, chosen.rig.seed) == (256, 256, 9)
    other = make_plan(DemoOptions(quick=True, seed=8))
    assert other.workload != plan.workload


@pytest.fixture(scope="module")
def full():
    """The full demo as the model says it."""
    plan = make_plan(DemoOptions())
    results = {}
    for name, device, prefetch, capacity in demo_tiers(plan):
        chosen = replay_spec(plan, device, prefetch=prefetch, capacity_bytes=capacity, seed=1)
        results[name] = replay(plan.workload, chosen, wall=False)
    return results


def test_the_real_runs_of_the_full_demo_are_planned_for_seventy_seconds(full):
    """Real runs take as long as the virtual clock says; CI measures what comes on top."""
    assert all(result.correct for result in full.values())
    assert sum(result.figures.duration_s for result in full.values()) < 70


def test_the_full_demo_shows_what_it_is_for(full):
    cmm, plain, staged, dram = [full[name].figures for name in TIERS]
    assert min(cmm.hit_rate, plain.hit_rate, staged.hit_rate) > 0.95
    assert dram.hit_rate < 0.5
    for late in (4, 5):
        rates = [figures.turns[late].read_bytes_per_s for figures in (cmm, plain, staged)]
        assert rates[0] < rates[2] / 2
        assert rates[1] < rates[2]
    assert cmm.turns[1].read_bytes_per_s > 2 * cmm.turns[5].read_bytes_per_s


# -- verdict ------------------------------------------------------------------------------------


def changed(result, place: int, run: str, **figures) -> object:
    """Return a demo's result with some figures of one run changed."""
    tiers = list(result.tiers)
    replaced = getattr(tiers[place], run)
    made: Figures = dataclasses.replace(replaced.figures, **figures)
    tiers[place] = dataclasses.replace(
        tiers[place], **{run: dataclasses.replace(replaced, figures=made)}
    )
    return dataclasses.replace(result, tiers=tuple(tiers))


@pytest.mark.parametrize("run", ["wall", "virtual"])
def test_a_wrong_block_in_any_run_is_not_ok_and_in_the_report(quick, run):
    bad = changed(quick[0], 2, run, wrong_blocks=1)
    assert not bad.ok
    assert bad.to_json()["ok"] is False
    assert "byte by byte, 1 wrong" in report_text(bad)


@pytest.mark.parametrize("run", ["wall", "virtual"])
def test_anything_held_in_any_run_is_not_ok_and_in_the_report(quick, run):
    bad = changed(quick[0], 1, run, held_at_rest={"leases": 3})
    assert not bad.ok
    assert "still held: {'leases': 3}" in report_text(bad)


# -- emulator against model -----------------------------------------------------------------------


def moved(result, place: int, *, p50=1.0, p90=1.0, late_s=0.0, kept=True, blocks=None) -> object:
    """Return a demo's result in which one tier's real reads are so far from the model's."""
    tiers = [
        dataclasses.replace(tier, wall=dataclasses.replace(tier.virtual, fidelity=KEPT))
        for tier in result.tiers
    ]
    model = tiers[place].virtual.figures.block_read
    due = dataclasses.replace(model, p50_s=model.p50_s * p50, p90_s=model.p90_s * p90)
    real = dataclasses.replace(
        due, p50_s=due.p50_s + late_s, p90_s=due.p90_s + late_s, count=blocks or model.count
    )
    late = dataclasses.replace(real, p50_s=late_s, p90_s=late_s)
    result = dataclasses.replace(result, tiers=tuple(tiers))
    result = changed(result, place, "wall", block_read=real, block_due=due, block_late=late)
    tiers = list(result.tiers)
    fidelity = KEPT if kept else dataclasses.replace(KEPT, late_p99_s=0.02)
    wall = dataclasses.replace(tiers[place].wall, fidelity=fidelity)
    tiers[place] = dataclasses.replace(tiers[place], wall=wall)
    return dataclasses.replace(result, tiers=tuple(tiers))


KEPT = Fidelity(late_p50_s=5e-6, late_p99_s=2e-4, deadlines=1000, pipes=())


def rows_of_the_comparison(text: str) -> dict[str, str]:
    part = text.partition("Emulator against model")[2]
    return {name: next(r for r in part.splitlines() if r.startswith(name)) for name in TIERS}


def test_a_tier_within_ten_percent_is_said_to_be(quick):
    text = report_text(moved(quick[0], 1, p50=1.09, p90=0.91))
    assert "Every tier is within 10% of the model at p50 and p90." in text
    assert "NOT WITHIN" not in text
    assert all(
        " yes " in row and " NO " not in row for row in rows_of_the_comparison(text).values()
    )


@pytest.mark.parametrize("off", [{"p50": 1.11}, {"p90": 1.11}, {"p50": 0.89}, {"p90": 0.89}])
def test_a_tier_beyond_ten_percent_is_marked_and_the_others_are_not(quick, off):
    result = moved(quick[0], 1, **off)
    text = report_text(result)
    assert [name for name, row in rows_of_the_comparison(text).items() if " NO " in row] == TIERS[
        1:2
    ]
    assert text.count("NOT WITHIN 10% OF THE MODEL") == 1
    assert f"NOT WITHIN 10% OF THE MODEL: {TIERS[1]}: " in text
    assert "Every tier is within" not in text
    within = [tier["emulator_against_model"]["within"] for tier in result.to_json()["tiers"]]
    assert within == [True, False, True, True]
    assert result.ok, "a mark says something of the host, not of the data"


def test_what_remains_is_the_hosts_lateness_and_the_order_of_requests(quick):
    model = quick[0].tiers[2].virtual.figures.block_read
    late_s = model.p50_s / 4
    bad = moved(quick[0], 2, p50=1.05, late_s=late_s, kept=False, blocks=model.count + 7)
    (line,) = [row for row in report_text(bad).splitlines() if row.startswith("NOT WITHIN")]
    assert "p50 +30.0%" in line
    assert f"the host was late by p50 {late_s * 1e3:.2f} ms" in line
    assert "without that p50 +5.0%" in line
    assert f"blocks read: real {model.count + 7:,}, model {model.count:,}" in line
    assert "this host did not keep the timing" in line


def test_a_miss_is_a_claim_that_fails_or_that_a_late_host_cannot_decide(quick):
    for kept, verdict in ((True, Verdict.FAILS), (False, Verdict.OPEN)):
        claims = moved(quick[0], 3, p90=1.5, kept=kept).claims
        assert [claim.verdict for claim in claims] == [Verdict.HOLDS] * 3 + [verdict]
        assert "p90 +50.0%" in claims[3].measured


def test_reads_that_the_model_does_not_have_are_no_small_difference(quick):
    tier = quick[0].tiers[0]
    nothing = dataclasses.replace(tier.virtual.figures.block_read, count=0, p50_s=0.0, p90_s=0.0)
    bad = changed(quick[0], 0, "virtual", block_read=nothing)
    check = bad.tiers[0].against_model
    assert check.p50 == math.inf
    assert (check.within, check.mark) == (False, "NO")


def test_the_hosts_share_of_a_read_is_what_came_after_the_emulated_hardware(quick):
    for tier in quick[0].tiers:
        figures = tier.wall.figures
        late = tier.wall.blocks.latencies_s() - tier.wall.blocks.due_latencies_s()
        assert len(late) == figures.block_late.count == figures.block_read.count > 0
        assert figures.block_late.p99_s > 0, "real bytes are never there at the very moment"
        model = tier.virtual.figures
        assert model.block_due == model.block_read
        assert model.block_late.p99_s == pytest.approx(0, abs=1e-9)
