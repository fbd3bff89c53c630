"""``cxlbench pod explore``, ``replay`` and ``lint``: what they print, save, and exit with."""

from __future__ import annotations

import importlib
import json
import linecache
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.emu.pod_explorer import SavedSchedule
from cxlbench.emu.pod_failure import Kind
from cxlbench.harness.cli.pod import KINDS
from tests.harness.pod_users import RIGHT, WASTEFUL, WRONG

ROOT = Path(__file__).parents[2]
TRACT = "cxlbench.tract.scenarios:lock_counter"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a user's module; it is imported anew after every writing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(text, name="users_message"):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        forget(name)
        return f"{name}:scenario"

    yield write
    for name in names:
        forget(name)


def forget(name):
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()


def test_a_quiet_scenario_exits_0(cli, written):
    ran = cli("pod", "explore", written(RIGHT), "--schedules", "50")
    assert ran.code == 0
    assert "no failure in 50 schedules (mixed, seed 1)" in ran.out
    assert ran.err == ""


def test_a_failure_is_explained_saved_and_exits_1(cli, written, tmp_path):
    ran = cli("pod", "explore", written(WRONG))
    assert ran.code == 1
    assert "causality violation: never flushed" in ran.out
    assert "users_message.py:15 in receive: got.append(load(mem, 0))" in ran.out
    assert "users_message.py:4 in send: store(mem, 0, 7)" in ran.out
    assert "the data" in ran.out
    (saved,) = tmp_path.glob("*.pod.json")
    assert ran.out.splitlines()[-1] == f"replay: cxlbench pod replay {saved.name}"
    assert SavedSchedule.load(saved).target == "users_message:scenario"


def test_the_printed_command_shows_the_same_again(cli, written):
    first = cli("pod", "explore", written(WRONG))
    command = first.out.splitlines()[-1].removeprefix("replay: cxlbench ")
    again = cli(*shlex.split(command))
    assert again.code == 1
    told = first.out.partition("causality violation")[2].splitlines()[:-1]
    assert again.out.partition("causality violation")[2].splitlines() == told


def test_a_path_with_spaces_is_quoted_in_the_command(cli, written, tmp_path):
    path = tmp_path / "my failures.json"
    ran = cli("pod", "explore", written(WRONG), "--save", path)
    command = ran.out.splitlines()[-1].removeprefix("replay: cxlbench ")
    assert cli(*shlex.split(command)).code == 1


def test_after_a_repair_a_replay_exits_0(cli, written):
    cli("pod", "explore", written(WRONG), "--save", "failed.json")
    written(RIGHT)
    ran = cli("pod", "replay", "failed.json")
    assert ran.code == 0
    assert "does not fail any more" in ran.out


def test_a_replay_that_fails_otherwise_says_so(cli, written):
    cli("pod", "explore", written(WRONG), "--save", "failed.json")
    written(WRONG.replace("got.append(load(mem, 0))", "raise RuntimeError('other')"))
    ran = cli("pod", "replay", "failed.json")
    assert ran.code == 1
    assert "fails otherwise than when saved: causality violation: never flushed" in ran.err
    assert "RuntimeError: other" in ran.out


def test_the_same_seed_finds_the_same_schedule(cli, written):
    target = written(WRONG)
    found = [
        cli("pod", "explore", target, "--seed", "4", "--save", "f.json", "--json").document
        for _ in range(2)
    ]
    assert found[0] == found[1]


def test_a_schedule_can_be_found_again_by_its_number(cli, written):
    target = written(WRONG)
    words = ("--scheduler", "pct", "--seed", "3", "--json")
    first = cli("pod", "explore", target, *words, "--save", "a.json").document
    index = SavedSchedule.load(Path("a.json")).index
    assert index == first["first"] + first["schedules"] - 1
    again = cli("pod", "explore", target, *words, "--first", str(index), "--schedules", "1")
    assert again.code == 1
    assert again.document["failure"] == first["failure"]


def test_json_is_alone_on_standard_output_and_says_all(cli, written):
    ran = cli("pod", "explore", written(WRONG), "--json")
    assert ran.code == 1
    document = ran.document
    assert document["target"] == "users_message:scenario"
    assert document["failure"]["kind"] == "causality violation"
    assert document["failure"]["cause"] == "never flushed"
    assert document["failure"]["found"][0]["function"] == "receive"
    assert document["failure"]["later"][0]["function"] == "send"
    assert document["replay"] == f"cxlbench pod replay {document['schedule_file']}"
    replayed = cli("pod", "replay", document["schedule_file"], "--json")
    assert (replayed.code, replayed.document["as_saved"]) == (1, True)
    quiet = cli("pod", "explore", written(RIGHT), "--schedules", "5", "--json").document
    assert quiet["failure"] is None
    assert quiet["schedules"] == 5


def test_a_depth_first_search_says_that_it_saw_all(cli, written):
    ran = cli("pod", "explore", written(RIGHT), "--scheduler", "dfs", "--bound", "1")
    assert ran.code == 0
    assert "all that there are within the bound" in ran.out


def test_kinds_that_are_ignored_are_passed_over(cli, written):
    target = written(WRONG)
    ran = cli("pod", "explore", target, "--ignore", "causality", "--schedules", "300")
    assert ran.code == 1
    assert "invariant" in ran.out
    words = ("--ignore", "causality", "--ignore", "invariant", "--schedules", "20")
    assert cli("pod", "explore", target, *words).code == 0


def test_every_kind_can_be_ignored():
    assert [name.upper().replace("-", "_") for name in KINDS] == [kind.name for kind in Kind]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_module:scenario", "cannot import 'no_such_module'"),
        ("users_message:scenari", "did you mean scenario"),
        ("users_message:send.x", "has no object"),
        ("users_message", "say which object of the module, as users_message:NAME"),
        ("users_message:number", "not a class or function"),
        ("users_message:send", "building scenario 'users_message:send' raised"),
        ("users_message:receive", "a scenario takes one argument, the pod"),
        ("users_message:nothing", "started no task"),
        ("users_message:raises", "KeyError: 'gone'"),
        ("users_message:small", "a region of 7 bytes"),
        ("users_broken:scenario", "SyntaxError"),
        ("users_raising:scenario", "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("command", ["explore", "lint"])
def test_a_target_that_is_none_exits_2_with_one_line(cli, written, command, target, told):
    written("def scenario(pod:\n", "users_broken")
    written("1 / 0\n", "users_raising")
    written(
        RIGHT + "\nnumber = 3\n"
        "def nothing(pod): pass\n"
        "def raises(pod): {}['gone']\n"
        "def small(pod): pod.region(7)\n"
    )
    ran = cli("pod", command, target)
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err


def test_a_scenario_that_depends_on_chance_exits_2(cli, written):
    text = RIGHT.replace("got == [7]", "len(runs) != 3") + "    runs.append(1)\nruns = []\n"
    ran = cli("pod", "explore", written(text))
    assert ran.code == 2
    assert "depends on something that the schedule does not decide" in ran.err


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "another"}', "\x00"])
def test_a_file_that_is_no_schedule_exits_2(cli, tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    ran = cli("pod", "replay", "x.json")
    assert (ran.code, ran.out) == (2, "")
    assert "x.json" in ran.err


def test_a_schedule_of_another_version_exits_2(cli, written, tmp_path):
    cli("pod", "explore", written(WRONG), "--save", "a.json")
    saved = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(saved | {"format": "cxlbench pod schedule 0"}))
    ran = cli("pod", "replay", "a.json")
    assert ran.code == 2
    assert "cxlbench pod schedule 0" in ran.err


def test_a_schedule_that_is_not_there_exits_2(cli):
    ran = cli("pod", "replay", "absent.json")
    assert ran.code == 2
    assert "absent.json" in ran.err


def test_a_folder_that_is_not_there_is_refused_before_the_work(cli, written, tmp_path):
    (tmp_path / "file").write_text("")
    ran = cli("pod", "explore", written(WRONG), "--save", "file/x.json")
    assert ran.code == 2
    assert "file" in ran.err


@pytest.mark.parametrize(
    "words",
    [("--schedules", "0"), ("--scheduler", "luck"), ("--ignore", "luck"), ("--first", "-1")],
)
def test_options_that_cannot_be_are_usage_errors(cli, words):
    assert cli("pod", "explore", TRACT, *words).code == 2


def test_an_interrupt_exits_130(cli, written):
    target = written(RIGHT.replace("    got.append", "    raise KeyboardInterrupt\n    got.append"))
    assert cli("pod", "explore", target).code == 130


def test_long_work_shows_progress(cli, written, monkeypatch):
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli("pod", "explore", written(RIGHT), "--schedules", "30")
    assert "schedules: 30 of 30" in ran.err


def test_a_flush_without_effect_is_told_with_its_cost(cli, written):
    ran = cli("pod", "lint", written(WASTEFUL), "--schedules", "50")
    assert ran.code == 0
    (line,) = ran.out.splitlines()
    assert "users_message.py:6 in send" in line
    assert "1.0 a run x 1410 ns = 1410 ns a run" in line


def test_costs_are_those_of_the_profile(cli, written, tmp_path):
    profile = ROOT / "devices" / "profiles" / "niagara-2.0.toml"
    text = profile.read_text()
    assert text.count("1.41") == 1
    own = text.replace("1.41", "0.5").replace('"niagara-2.0"', '"own"')
    (tmp_path / "own.toml").write_text(own)
    words = ("--profile", "own.toml", "--schedules", "20", "--json")
    document = cli("pod", "lint", written(WASTEFUL), *words).document
    assert document["flush_ns"] == pytest.approx(500)
    (needless,) = document["needless"]
    assert needless["flushes_a_run"] == 1
    assert needless["ns_a_run"] == pytest.approx(500)


@pytest.mark.parametrize("profile", ["niagara-3.0", "pm1743-class"])
def test_a_profile_of_no_shared_memory_exits_2(cli, written, profile):
    ran = cli("pod", "lint", written(RIGHT), "--profile", profile)
    assert (ran.code, ran.out) == (2, "")
    assert profile in ran.err


def test_a_program_without_needless_flushes_is_told_so(cli, written):
    ran = cli("pod", "lint", written(RIGHT))
    assert ran.out == "every flush had an effect in some of 200 schedules\n"


def test_the_lint_of_a_program_that_fails_exits_1_and_says_so(cli, written):
    ran = cli("pod", "lint", written(WRONG), "--json")
    assert ran.code == 1
    assert 0 < ran.document["failed_schedules"] <= 200
    assert (
        "schedules failed (the first: causality violation" in cli("pod", "lint", written(WRONG)).out
    )


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom cxlbench.harness.cli import pod\n"
        "from cxlbench.harness.cli import pod_bench, pod_long\n"
        "print([m for m in ('numpy', 'numba', 'greenlet', 'msgspec') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "[]\n"


def test_tracts_scenarios_are_targets(cli):
    assert cli("pod", "explore", TRACT, "--schedules", "5").code == 0
