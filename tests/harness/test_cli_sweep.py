"""``cxlbench sweep`` and its page: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cxlbench.harness.sweep_rows import read_sweep, shares

TOY = "tests.harness.toy_experiment:EXPERIMENT"
PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"


def test_a_grid_prints_shares_and_keys(cli):
    ran = cli("sweep", TOY, "--set", "sessions=8..160:8", "--jobs", "1")
    assert ran.code == 0
    assert ran.out.startswith("toy, 8 of 8 points over 1 keys\n")
    (line,) = [line for line in ran.out.splitlines() if line.startswith("faster")]
    assert line.split()[:5] == ["faster", "5/8", "1/8", "2/8", "0/8"]
    assert line.endswith("sessions +1.00")
    assert "rows: results/sweeps/toy.jsonl" in ran.out
    assert len(read_sweep(Path("results/sweeps/toy.jsonl")).rows) == 8
    assert shares("toy", Path("results/sweeps"))["faster"] == (5, 8)


def test_assumptions_are_varied_and_what_is_not_is_said(cli):
    ran = cli("sweep", TOY, "--assumptions", "6", "--jobs", "1", "--quick")
    assert ran.code == 0
    assert "6 of 6 points" in ran.out
    assert "not varied: cmm-h-256g.associativity (" in ran.out


def test_with_json_one_document_is_on_standard_output(cli):
    ran = cli("sweep", TOY, "--set", "sessions=8..160:8", "--jobs", "1", "--json")
    document = ran.document
    assert document["file"] == "results/sweeps/toy.jsonl"
    (claim, _) = document["summary"]["claims"]
    assert (claim["claim"], claim["holds"], claim["points"]) == ("faster", 5, 8)
    assert claim["keys"] == [{"key": "sessions", "strength": pytest.approx(1), "choice": False}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep toyy:X --set a=1", "cannot import 'toyy'"),
        ("sweep no_such --set a=1", "there is no experiment 'no_such'"),
        (f"sweep {TOY}", "nothing to sweep"),
        (f"sweep {TOY} --set session=3", "did you mean 'sessions'"),
        (f"sweep {TOY} --set sessions=many", "must be a whole number"),
        (f"sweep {TOY} --assumptions 0", "0 is not in the range"),
        (f"sweep {TOY} --set sessions=1,2 --jobs 0", "0 is not in the range"),
    ],
)
def test_what_cannot_be_is_refused_before_a_file_is_made(cli, words, said):
    ran = cli(*words.split())
    assert ran.code == 2
    assert said in ran.err
    assert not Path("results").exists()


def test_the_file_of_another_sweep_is_refused(cli):
    assert cli("sweep", TOY, "--set", "sessions=8,16", "--jobs", "1", "-o", "a.jsonl").code == 0
    ran = cli("sweep", TOY, "--set", "sessions=8,32", "--jobs", "1", "-o", "a.jsonl")
    assert ran.code == 2
    assert "a.jsonl holds a sweep over other values of its keys" in ran.err
    assert "-o" in ran.err


def test_points_that_raise_are_told_and_are_no_failure(cli):
    words = ("--set", "sessions=8,64,65,66,67", "--set", "trouble=raise", "--jobs", "1")
    ran = cli("sweep", TOY, *words)
    assert ran.code == 0
    assert "point 1 raised: ValueError: 64 sessions are too many" in ran.out
    assert "and 1 more points raised" in ran.out


def test_a_sweep_in_which_every_point_raises_fails(cli):
    words = ("--set", "sessions=64,65", "--set", "trouble=raise", "--jobs", "1")
    ran = cli("sweep", TOY, *words)
    assert ran.code == 2
    assert "every point raised" in ran.err


def test_a_broken_law_is_told_and_fails(cli):
    ran = cli("sweep", TOY, "--set", "trouble=none,break", "--jobs", "1")
    assert ran.code == 1
    assert "LAW BROKEN at 1 points: positive" in ran.out


def test_the_pages_commands_work_in_their_order(cli):
    """Those on an experiment of the reader's own, which the page shows whole, and on `size`."""
    text = PAGE.read_text()
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```", text, re.S | re.M):
        Path(name).write_text(code)
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert {words[0] for words in commands} == {"generate", "profiles", "size", "sweep"}
    for words in commands:
        ran = cli(*words)
        assert ran.code == 0, (words, ran.err)
