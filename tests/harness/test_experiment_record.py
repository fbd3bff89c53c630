"""A run leaves a folder that says all, reads back as it was, and is the same for the same seed."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import pytest

from cxlbench.emu.status import HostLimitError
from cxlbench.harness import experiment_plot
from cxlbench.harness.experiment import Context, ExperimentError, Findings, Plot
from cxlbench.harness.experiment_folder import best_records, read_record, records_in, write_record
from cxlbench.harness.experiment_record import MAX_SAMPLES, make_record
from cxlbench.harness.experiment_run import make_contexts, run_all
from cxlbench.harness.results import Verdict, write_run
from tests.harness.front_end_toys import BAD, EXPERIMENT, OTHER, toy


@pytest.fixture(autouse=True)
def quick_plots(request, monkeypatch):
    """Drawing takes most of the time, and is not what most tests here are about."""

    def stub(plot, folder):
        for ending in ("png", "svg"):
            (folder / f"{plot.name}.{ending}").touch()

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(experiment_plot, "save_plot", stub)


@pytest.fixture
def drawn():
    """For a test that looks at the plots' files."""


def run_into(folder, *experiments, **options):
    runs = run_all(make_contexts(experiments or [EXPERIMENT], **options), folder)
    assert [one.error for one in runs.outcomes] == [None] * len(runs.outcomes)
    return runs.outcomes[-1]


def test_a_folder_reads_back_as_the_run_was(tmp_path):
    ran = run_into(
        tmp_path, seed=3, overrides={"turns": "3", "pm1743-class.read_bandwidth": "7 GB/s"}
    )
    read = read_record(ran.folder)
    assert read.host is not None
    assert read.written
    assert dataclasses.replace(read, host=None, written="") == ran.record


def test_the_same_seed_writes_the_same_bytes(tmp_path, drawn):
    one, same = (run_into(tmp_path / name, seed=3, quick=True).folder for name in ("a", "b"))
    for name in ("result.json", "rows.csv", "ttft.svg", "ttft.png"):
        assert (one / name).read_bytes() == (same / name).read_bytes()
    assert b"duration" not in (one / "result.json").read_bytes()


def test_another_seed_gives_other_rows(tmp_path):
    assert run_into(tmp_path, seed=3).record.rows != run_into(tmp_path, seed=4).record.rows


def test_it_says_setup_assumptions_claims_checks_and_profiles(tmp_path):
    record = run_into(tmp_path, overrides={"rate": "2"}).record
    lines = {line.name: line for line in record.setup}
    assert (lines["turns"].value, lines["turns"].changed) == (4, False)
    assert (lines["rate"].value, lines["rate"].changed, lines["rate"].unit) == (2.0, True, "1/s")
    assert {"rate", "routing"} <= {one.key for one in record.assumptions}
    assert any(one.key.startswith("cxl-hm-prototype.") for one in record.assumptions)
    numbers = {line.name: line.value for line in record.profiles["pm1743-class"]}
    assert "GB/s" in numbers["read_bandwidth"]
    assert not any(line.name.startswith("ssd.") for line in record.profiles["cxl-hm-prototype"])
    assert [check.name for check in record.checks] == ["nothing lost"]
    assert [claim.verdict for claim in record.claims] == [
        Verdict.HOLDS,
        Verdict.DIRECTION,
        Verdict.FAILS,
        Verdict.OPEN,
    ]


def test_rows_keep_the_order_of_their_columns(tmp_path):
    folder = run_into(tmp_path).folder
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:4] == ["system", "routing", "turn", "ttft_mean_s"]
    assert len(rows) == 1 + 8
    assert rows[1][-1] == ""


def test_the_quick_form_never_replaces_the_full_one(tmp_path):
    run_into(tmp_path)
    quick = run_into(tmp_path, quick=True)
    assert quick.folder.name == "toy-quick"
    assert list(records_in(tmp_path)) == ["toy", "toy-quick"]
    assert [record.quick for record in best_records(tmp_path)] == [False]


def test_a_later_run_takes_the_plots_of_the_one_before_away(tmp_path):
    folder = run_into(tmp_path).folder
    (folder / "mine.png").touch()

    def plotless(context):
        return dataclasses.replace(EXPERIMENT.run(context), plots=())

    run_into(tmp_path, toy(run=plotless))
    assert {path.name for path in folder.iterdir()} == {
        "mine.png",
        "result.json",
        "rows.csv",
        "run.json",
    }


def test_values_that_are_no_numbers_are_none(tmp_path, drawn):
    def odd(context):
        plots = [
            Plot(
                name="odd/../name",
                title="t",
                x_label="x",
                y_label="y",
                kind="line",
                series={"a": ([1, 2, 3], [1.0, math.nan, math.inf])},
            )
        ]
        claims = [context.experiment.claims[0].judge(math.nan)]
        return Findings(rows=[{"a": math.inf, "b": math.nan}], claims=claims, plots=plots)

    ran = run_into(tmp_path, toy(run=odd))
    assert ran.record.rows == ({"a": None, "b": None},)
    assert ran.record.claims[0].value is None
    assert ran.record.plots[0].series[0].y == (1.0, None, None)
    assert (ran.folder / f"{ran.record.plots[0].name}.png").is_file()
    assert read_record(ran.folder).plots == ran.record.plots


def test_a_long_distribution_is_kept_as_quantiles(tmp_path):
    record = run_into(tmp_path).record
    series = record.plots[1].series[0]
    assert len(series.x) == MAX_SAMPLES
    assert list(series.x) == sorted(series.x)


def test_numpys_scalars_are_plain(tmp_path):
    numpy = pytest.importorskip("numpy")

    def scalars(context):
        return Findings(rows=[{"n": numpy.int64(3), "x": numpy.float64(0.5), "ok": numpy.True_}])

    assert run_into(tmp_path, toy(run=scalars)).record.rows == ({"n": 3, "x": 0.5, "ok": True},)


@pytest.mark.parametrize(
    ("kind", "series", "says"),
    [
        ("pie", {}, "of kind 'pie': possible are line, bar and cdf"),
        ("line", {"a": ([1, 2], [1.0])}, "'a' has 2 x and 1 y"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_told(kind, series, says):
    plot = Plot(name="p", title="t", x_label="x", y_label="y", kind=kind, series=series)
    with pytest.raises(ExperimentError, match=says):
        make_record(Context(EXPERIMENT), Findings(rows=[], plots=[plot]))


def test_folders_of_other_commands_are_passed_over(tmp_path):
    write_run(tmp_path / "demo", name="demo", inputs={}, figures={})
    run_into(tmp_path)
    assert list(records_in(tmp_path)) == ["toy"]
    with pytest.raises(ExperimentError, match="not of an experiment"):
        read_record(tmp_path / "demo")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"figures": 3}'])
def test_a_damaged_folder_is_told(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ExperimentError, match=r"result\.json"):
        read_record(tmp_path)


def test_a_result_with_a_missing_key_is_told(tmp_path):
    folder = run_into(tmp_path).folder
    result = json.loads((folder / "result.json").read_text())
    del result["figures"]["columns"]
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(ExperimentError, match=r"damaged: .*columns.*run the experiment again"):
        read_record(folder)


def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "toy").touch()
    record = make_record(Context(EXPERIMENT), EXPERIMENT.run(Context(EXPERIMENT)))
    with pytest.raises(HostLimitError, match="cannot write results"):
        write_record(record, tmp_path / "toy")


def test_one_that_fails_does_not_take_the_others_with_it(tmp_path):
    runs = run_all(make_contexts([BAD, EXPERIMENT]), tmp_path)
    assert [type(one.error) for one in runs.outcomes] == [RuntimeError, type(None)]
    assert list(records_in(tmp_path)) == ["toy"]


def test_of_several_each_takes_the_keys_it_has():
    first, second = make_contexts([EXPERIMENT, OTHER], overrides={"only_here": "2", "turns": "3"})
    assert first.overrides == {"turns": "3"}
    assert second.overrides == {"turns": "3", "only_here": "2"}


def test_a_key_that_none_of_several_has_is_refused():
    with pytest.raises(
        ExperimentError, match=r"none of toy, toy2 has a key 'onlyhere'.*'only_here'"
    ):
        make_contexts([EXPERIMENT, OTHER], overrides={"onlyhere": "2"})


def test_the_command_repeats_the_run(tmp_path):
    record = run_into(tmp_path, quick=True, seed=5, overrides={"rate": "2"}).record
    assert record.command() == "cxlbench run toy --quick --seed 5 --set rate=2"


def test_one_damaged_run_is_told_and_hides_no_other(tmp_path):
    for toy_experiment in (EXPERIMENT, OTHER, toy("torn")):
        run_into(tmp_path, toy_experiment)
    damaged = tmp_path / "toy" / "result.json"
    damaged.write_text(damaged.read_text().replace('"rows"', '"raws"'))
    torn = tmp_path / "torn" / "result.json"
    torn.write_text(torn.read_text()[:100])
    told = []
    assert [record.name for record in best_records(tmp_path, told.append)] == ["toy2"]
    assert [str(path) in text for path, text in zip((damaged, torn), told, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_a_damaged_run_json_hides_no_figures(tmp_path, text):
    ran = run_into(tmp_path)
    (ran.folder / "run.json").write_text(text)
    read = read_record(ran.folder)
    assert read.rows == ran.record.rows
    assert read.duration_s is None


def test_tiers_of_the_user_are_in_the_record_and_in_its_command(tmp_path):
    compares = dataclasses.replace(EXPERIMENT, compares_tiers=True)
    ran = run_into(tmp_path, compares, tiers=["mooncake"])
    read = read_record(ran.folder)
    assert read.tiers == ("mooncake",)
    assert read.command().endswith("--tier mooncake")
    assert "more tiers" in read.form


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        (None, "returned NoneType; it must return Findings"),
        (Findings(rows=[3]), "3 is no row"),
        (Findings(rows=[{1: 2}]), "is no row"),
        (Findings(rows=[], claims=["yes"]), "'yes' is among its claims"),
        (
            Findings(
                rows=[],
                plots=[Plot(name="p", title="", x_label="", y_label="", kind="bar", series={})] * 2,
            ),
            "2 plots are called 'p'",
        ),
    ],
)
def test_what_are_no_findings_is_refused(findings, says):
    with pytest.raises(ExperimentError, match=says):
        make_record(Context(EXPERIMENT), findings)


def test_a_whole_number_that_no_float_can_hold_is_none():
    record = make_record(Context(EXPERIMENT), Findings(rows=[{"held_bytes": 10**400}]))
    assert record.rows == ({"held_bytes": None},)


def test_two_knobs_or_claims_of_one_name_are_refused():
    with pytest.raises(ExperimentError, match="2 knobs are 'turns'"):
        toy(knobs=(EXPERIMENT.knobs[0], EXPERIMENT.knobs[0]))


def test_a_value_that_cannot_be_computed_with_is_named(tmp_path):
    def divide(context):
        return Findings(rows=[{"share": 1 / context.count("turns")}])

    contexts = make_contexts([toy("divides", run=divide)], overrides={"turns": "0"})
    (outcome,) = run_all(contexts, tmp_path).outcomes
    with pytest.raises(ExperimentError, match="cannot be computed with turns=0"):
        raise outcome.error


def test_an_experiment_that_exits_does_not_take_the_others_with_it(tmp_path):
    def leave(context):
        raise SystemExit(3)

    runs = run_all(make_contexts([toy("leaves", run=leave), OTHER]), tmp_path)
    assert [type(one.error).__name__ for one in runs.outcomes] == ["SystemExit", "NoneType"]
