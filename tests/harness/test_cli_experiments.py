"""``cxlbench list``, ``run`` and ``compare``, with toy experiments of a user."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cxlbench.harness import experiment_catalog, experiment_plot
from cxlbench.harness.experiment_folder import read_record
from cxlbench.harness.results import Verdict
from tests.harness import front_end_toys

ROOT = Path(__file__).parents[2]
TOYS = "tests.harness.front_end_toys"


@pytest.fixture
def toys(monkeypatch):
    """Let the toys be all experiments that are installed; do not draw plots."""

    def install(*names):
        points = [EntryPoint(name, f"{TOYS}:{name}", experiment_catalog.GROUP) for name in names]
        monkeypatch.setattr(experiment_catalog, "entry_points", lambda group: points)

    def stub(plot, folder):
        for ending in ("png", "svg"):
            (folder / f"{plot.name}.{ending}").touch()

    monkeypatch.setattr(experiment_plot, "save_plot", stub)
    install("EXPERIMENT", "OTHER")
    return install


# -- list ------------------------------------------------------------------------------------------


def test_list_shows_name_source_title_claims_and_how_long_saved_runs_took(cli, toys):
    assert cli("run", "toy", "--quick").code == 0
    lines = cli("list").out.splitlines()
    (line,) = [line for line in lines if line.startswith("toy ")]
    assert "no paper" in line
    assert "The toy called toy" in line
    *_, claims, quick, unit, full = line.split()
    assert (claims, unit, full) == ("4", "s", "-")
    assert float(quick) >= 0


def test_list_shows_all_that_can_be_set(cli, toys):
    text = cli("list", "toy").out
    assert "round-robin | prefix-aware" in text
    assert "1.5 1/s" in text
    assert "pm1743-class" in text
    document = cli("list", "toy", "--json").document
    keys = document["experiments"][0]["keys"]
    assert {"turns", "pm1743-class.read_bandwidth"} <= set(keys)


def test_list_names_what_is_broken_and_shows_the_rest(cli, toys):
    toys("EXPERIMENT", "NOT_THERE")
    ran = cli("list")
    assert ran.code == 0
    assert "The toy called toy" in ran.out
    assert "'NOT_THERE'" in ran.out
    assert "AttributeError" in ran.out


# -- run -------------------------------------------------------------------------------------------


def test_run_prints_rows_with_units_then_claims_with_verdicts_then_checks(cli, toys):
    ran = cli("run", "toy")
    assert ran.code == 0
    rows, claims = ran.out.split("claim    ", 1)
    assert "In all rows: routing round-robin." in rows
    assert "1 GiB" in rows
    assert "GB/s" in rows
    assert "direction only" in claims
    assert "more: the link is the limit" in claims
    assert "1 check passed: nothing lost" in claims
    assert "note: a toy" in claims
    assert "results/toy" in claims


def test_a_claim_that_does_not_hold_is_no_error_but_a_failed_check_is(cli, toys):
    ran = cli("run", "toy", "--set", "lossless=false")
    assert ran.code == 1
    assert "CHECK FAILED: nothing lost: 0 lost" in ran.out
    assert not read_record(Path("results/toy")).ok


def test_run_all_ends_with_one_table_of_verdicts(cli, toys):
    ran = cli("run", "all", "--quick", "--results", "out")
    assert ran.code == 0
    table = ran.out[ran.out.rindex("experiment ") :].splitlines()
    numbers = {line.split()[0]: line.split()[1:] for line in table if line[:3] in ("toy", "all")}
    assert numbers["toy"][:5] == ["quick", "1", "1", "1", "1"]
    assert numbers["toy"][5:8] == ["1", "of", "1"]
    assert numbers["all"][:4] == ["2", "2", "2", "2"]
    assert sorted(path.name for path in Path("out").iterdir()) == ["toy-quick", "toy2-quick"]


def test_json_is_one_document(cli, toys):
    document = cli("run", "toy", "toy2", "--json").document
    first, second = document["experiments"]
    assert (first["name"], second["name"]) == ("toy", "toy2")
    assert first["result"]["claims"][0]["verdict"] == "holds"
    assert document["not_begun"] == []


def test_one_of_the_users_own_needs_no_entry_point_and_says_how_to_repeat_it(cli, toys):
    assert cli("run", f"{TOYS}:OTHER", "--quick").code == 0
    command = read_record(Path("results/toy2-quick")).command()
    assert command == f"cxlbench run {TOYS}:OTHER --quick --seed 1"


def test_the_saved_share_of_the_grid_is_shown(cli, toys, monkeypatch):
    monkeypatch.setattr(
        "cxlbench.harness.experiment_tables.shares",
        lambda name, folder, *, setup: {"faster": (24, 32)} if setup else {},
    )
    text = cli("run", "all", "--quick").out
    assert "24 of 32" in text
    assert "75%" in text


def test_a_damaged_file_of_a_sweep_hides_nothing(cli, toys):
    sweeps = Path("results/sweeps")
    sweeps.mkdir(parents=True)
    (sweeps / "toy.jsonl").write_text("nonsense\n")
    ran = cli("run", "toy", "--quick")
    assert ran.code == 0
    assert "toy.jsonl is not the file of a sweep" in ran.err
    assert "direction only" in ran.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["toi"], "there is no experiment 'toi'; did you mean 'toy'"),
        (["toy", "--set", "turn=3"], "did you mean 'turns'"),
        (["toy", "--set", "turns=many"], "turns='many': must be a whole number"),
        (["toy", "--set", "turns=-1"], "must be finite and not negative"),
        (["toy", "--set", "routing=left"], "possible are round-robin, prefix-aware"),
        (["toy", "--set", "pm1743-class.read_bandwidth=7"], "read_bandwidth"),
        (["toy", "--set", "pm1743-class.red_bandwidth=7GB/s"], "read_bandwidth"),
        (["toy", "toy2", "--set", "turn=3"], "none of toy, toy2 has a key 'turn'"),
        (["nowhere_at_all:X"], "is its folder on PYTHONPATH"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(cli, toys, words, says):
    ran = cli("run", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 1
    assert says in ran.err
    assert not Path("results").exists()


def test_a_folder_that_cannot_be_is_refused_before_the_run(cli, toys):
    Path("file").touch()
    ran = cli("run", "toy", "--results", "file/below")
    assert (ran.code, ran.out) == (2, "")
    assert "cannot write results" in ran.err


def test_a_bug_in_one_keeps_its_traceback_and_the_others_run(cli, toys):
    toys("BAD", "EXPERIMENT")
    ran = cli("run", "all", "--quick")
    assert ran.code == 1
    assert "RuntimeError: a slip of the pen" in ran.err
    assert "run_badly" in ran.err
    assert "FAILED" in ran.out
    assert Path("results/toy-quick/result.json").exists()


def test_all_is_not_all_if_a_module_is_broken(cli, toys):
    toys("EXPERIMENT", "NOT_THERE")
    ran = cli("run", "all", "--quick")
    assert ran.code == 2
    assert "'NOT_THERE'" in ran.err
    assert Path("results/toy-quick/result.json").exists()


# -- interrupts ------------------------------------------------------------------------------------


def begin(folder, *words):
    began = folder / "begun"
    began.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "cxlbench.harness.cli", "run", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "MPLCONFIGDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until_s = time.monotonic() + 60
    while not began.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_there_is_marked_partial(tmp_path, number, code):
    with begin(tmp_path, f"{TOYS}:SLOW", f"{TOYS}:OTHER") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "what is there will be kept" in err
    assert "PARTIAL" in out
    assert "not begun" in out
    record = read_record(tmp_path / "results" / "slow")
    assert record.partial
    assert record.rows == ({"step": 0},)
    assert {claim.verdict for claim in record.claims} == {Verdict.OPEN}
    assert json.loads((tmp_path / "results/slow/result.json").read_text())["figures"]["partial"]
    assert not (tmp_path / "results" / "toy2").exists()


def test_a_second_signal_ends_one_that_does_not_listen(tmp_path):
    with begin(tmp_path, f"{TOYS}:DEAF") as process:
        process.send_signal(signal.SIGINT)
        assert "once more ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "deaf: given up; it left nothing" in err
    assert not (tmp_path / "results" / "deaf").exists()


def test_a_partial_run_never_replaces_a_whole_one(cli, toys, monkeypatch):
    assert cli("run", "toy", "--quick").code == 0
    whole = Path("results/toy-quick/result.json").read_bytes()
    run = front_end_toys.EXPERIMENT.run

    def stopped(context):
        signal.raise_signal(signal.SIGINT)
        return run(context)

    monkeypatch.setattr(front_end_toys, "EXPERIMENT", front_end_toys.toy(run=stopped))
    assert cli("run", "toy", "--quick").code == 130
    assert Path("results/toy-quick/result.json").read_bytes() == whole
    assert read_record(Path("results/toy-quick-partial")).partial


# -- compare ---------------------------------------------------------------------------------------


@pytest.fixture
def two(cli, toys):
    """Results of two runs with differences."""
    assert cli("run", "toy", "toy2", "--results", "a").code == 0
    faster = ("--set", "rate=3", "--set", "pm1743-class.read_bandwidth=7 GB/s")
    assert cli("run", "toy", "--results", "b", *faster).code == 0


def test_compare_shows_setup_rows_with_ratio_and_what_is_equal(cli, two):
    text = cli("compare", "a/toy", "b/toy").out
    assert "rate" in text
    assert "1.5 1/s" in text
    assert "pm1743-class.read_bandwidth" in text
    table = text[text.index("ttft_mean_s") :]
    assert "HyMCache" in table
    assert " 0.500" in table
    assert "Equal in all rows: routing, read_GB/s, held, wait_s." in text
    assert "4 claims, each with the same verdict in both" in text


def test_compare_of_a_run_with_itself_finds_no_difference(cli, two):
    text = cli("compare", "a/toy", "a/toy").out
    assert "The set-ups are the same." in text
    assert "B/A" not in text


def test_compare_names_the_claims_whose_verdict_changed(cli, two):
    path = Path("b/toy/result.json")
    result = json.loads(path.read_text())
    result["claims"][0] |= {"verdict": "does not hold", "measured": "0.9 x"}
    path.write_text(json.dumps(result))
    text = cli("compare", "a/toy", "b/toy").out
    changed = text[text.index("Claims whose verdict changed") :]
    assert "faster" in changed
    assert "holds" in changed
    assert "does not hold" in changed
    assert "more" not in changed


def test_two_folders_of_results_are_compared_by_name(cli, two):
    found = cli("compare", "a", "b", "--json").document["comparisons"]
    assert [one["name"] for one in found] == ["toy"]
    assert found[0]["figures"][1]["pairs"][0]["ratio"] == pytest.approx(0.5)
    assert cli("compare", "a", "b", "toy").code == 0


def test_rows_that_only_one_has_are_counted(cli, toys):
    cli("run", "toy", "--results", "a")
    cli("run", "toy", "--results", "b", "--set", "turns=3")
    assert "Rows in A only: 2; in B only: 0." in cli("compare", "a", "b").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a", "b", "toi"], "do not both have a run 'toi'; did you mean 'toy'"),
        (["a", "b", "toy2"], "do not both have a run 'toy2'"),
        (["a", "b/toy"], "name two runs, or two folders of runs"),
        (["a/toy", "a/toy2"], "compare two runs of one experiment"),
        (["a", "nowhere"], "there is no folder nowhere"),
        (["a/toy/result.json", "b"], "is a file"),
    ],
)
def test_what_cannot_be_compared_is_told(cli, two, words, says):
    ran = cli("compare", *words)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
