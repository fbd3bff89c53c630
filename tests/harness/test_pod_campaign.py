"""The campaign: right code is quiet, mutants are found, and both are said truly."""

from __future__ import annotations

import dataclasses

import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_ops import clflush, load, store
from cxlbench.harness import pod_campaign
from cxlbench.harness.pod_campaign import run_campaign
from cxlbench.harness.pod_hunt import Hunt, hunt_mutant, is_right
from cxlbench.harness.pod_quiet import may_lose_nodes, pieces
from cxlbench.tract import mutants, scenarios
from cxlbench.tract.mutant_loader import Mutant

DEADLY = "lock_counter_crash"
PEACEFUL = "lock_counter"


def mutant(name):
    return next(one for one in mutants.ALL if one.name == name)


def number(name):
    return mutants.ALL.index(mutant(name))


@pytest.fixture
def only_counters(monkeypatch):
    """Leave two scenarios and two mutants."""
    chosen = (PEACEFUL, DEADLY)
    monkeypatch.setattr(scenarios, "ALL", {name: scenarios.ALL[name] for name in chosen})
    names = ("flush left out: counter", "arbiter grants two")
    monkeypatch.setattr(mutants, "ALL", tuple(mutant(name) for name in names))


@pytest.mark.usefixtures("only_counters")
def test_right_code_is_quiet_and_wrong_code_is_found():
    found = run_campaign(schedules=40, sample=5, processes=1)
    assert found.passed
    assert [row.mutant for row in found.mutants] == [one.name for one in mutants.ALL]
    first, second = found.mutants
    assert first.causes == ("never flushed",)
    assert second.causes == ("mutual exclusion",)
    assert all(one.schedules >= 5 for row in found.mutants for one in row.searches)
    assert all(0 < one.share <= 1 for row in found.mutants for one in row.searches)


@pytest.mark.usefixtures("only_counters")
def test_schedules_are_divided_and_deaths_counted():
    found = run_campaign(schedules=80, bound=1, sample=1, processes=1)
    by_name = {(row.scenario, row.scheduler): row for row in found.quiet}
    assert {key: row.schedules for key, row in by_name.items()} == {
        (PEACEFUL, "random"): 20,
        (PEACEFUL, "pct"): 20,
        (DEADLY, "random"): 40,
        (DEADLY, "pct"): 40,
    }
    deaths = sum(row.with_deaths for row in found.quiet if row.scenario == DEADLY)
    assert 20 <= deaths <= 60, "about half of 80"
    assert found.with_deaths == deaths
    assert all(row.operations > 100 * row.schedules for row in found.quiet)


@pytest.mark.usefixtures("only_counters")
def test_pieces_add_up_to_the_whole(monkeypatch):
    whole = run_campaign(schedules=40, bound=1, sample=1, processes=1)
    monkeypatch.setattr("cxlbench.harness.pod_quiet.PIECE", 7)
    assert len(list(pieces(list(scenarios.ALL), 40, 1))) > 4
    cut = run_campaign(schedules=40, bound=1, sample=1, processes=1)
    assert [(row.schedules, row.with_deaths) for row in cut.quiet] == [
        (row.schedules, row.with_deaths) for row in whole.quiet
    ]
    assert cut.mutants == whole.mutants


def test_two_processes_find_what_one_finds():
    words = {"only": "counter", "schedules": 20, "bound": 3, "sample": 1}
    told = []
    two = run_campaign(**words, processes=2, progress=lambda *one: told.append(one))
    assert two == run_campaign(**words, processes=1)
    assert told[-1][1] == told[-1][2] == len(told)


def test_scenarios_with_deaths_are_known_by_what_they_build():
    deadly = {name for name in scenarios.ALL if may_lose_nodes(name)}
    assert {"lock_counter_crash", "cache_crash"} <= deadly
    assert "lock_counter" not in deadly
    assert "cache_traffic" not in deadly


def forgetful(pod):
    def write(mem):
        store(mem, 0, 1)
        store(mem, 64, 1)
        clflush(mem, 64)

    def read(mem):
        clflush(mem, 64)
        if load(mem, 64):
            load(mem, 0)

    pod.run(0, write)
    pod.run(1, read)


def test_a_report_on_right_code_fails_the_campaign_and_can_be_found_again(cli, monkeypatch):
    monkeypatch.setattr(scenarios, "ALL", {"forgetful": forgetful})
    monkeypatch.setattr(scenarios, "forgetful", forgetful, raising=False)
    monkeypatch.setattr(mutants, "ALL", ())
    ran = cli("pod", "campaign", "--schedules", "40", "--processes", "1", "--json")
    assert ran.code == 1
    findings = ran.document["findings"]
    assert len(findings) > 1, "it goes on after the first"
    assert not ran.document["passed"]
    program, *words = findings[0]["command"].split()
    again = cli(*words)
    assert (program, again.code) == ("cxlbench", 1)
    assert "never flushed" in again.out


EQUIVALENT = Mutant(
    "flush twice", "lock.py", "    local_unlock(mem, lock)\n", "    clflush(mem, slot)\n"
    "    local_unlock(mem, lock)\n", PEACEFUL, (Kind.CAUSALITY,), (Cause.NEVER_FLUSHED,)
)  # fmt: skip


def test_a_mutant_that_is_not_found_fails_the_campaign(cli, monkeypatch):
    monkeypatch.setattr(mutants, "ALL", (EQUIVALENT,))
    monkeypatch.setattr(scenarios, "ALL", {})
    ran = cli("pod", "campaign", "--bound", "10", "--processes", "1")
    assert ran.code == 1
    assert "0 of 1 mutants found within 10 schedules" in ran.out
    assert "NOT FOUND, or called something else: flush twice" in ran.err


def test_a_mutant_that_is_called_something_else_is_not_found():
    right = mutant("flush left out: counter")
    wrong = Mutant(
        right.name, right.file, right.old, right.new, PEACEFUL, right.kinds, (Cause.POSTED,)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "ALL", (wrong,))
        found = run_campaign(only=wrong.name, bound=20, sample=20, processes=1)
    assert found.missed == (wrong.name,)
    assert found.mutants[0].wrong == ("never flushed",)


def test_a_search_counts_from_one_and_ends_at_its_bound():
    search = hunt_mutant(Hunt(number("flush left out: counter"), "random", 50, 10, 1))
    assert search.first is not None
    assert 1 <= search.first <= search.schedules == 10
    short = hunt_mutant(Hunt(number("READY alone confirmed"), "random", 3, 10, 1))
    assert (short.first, short.schedules, short.failed, short.share) == (None, 3, 0, 0)


def test_a_report_without_both_lines_is_not_right():
    report = explore(forgetful, scheduler="mixed").report
    assert report is not None
    causes = (Cause.NEVER_FLUSHED,)
    wanted = Mutant("it", "", "", "", "", (Kind.CAUSALITY,), causes)
    assert is_right(wanted, report)
    for change in ({"later_site": ()}, {"site": ()}, {"kind": Kind.HANG}, {"cause": Cause.POSTED}):
        assert not is_right(wanted, dataclasses.replace(report, **change))


@pytest.mark.parametrize("kind", [Kind.CAUSALITY, Kind.REGRESS])
def test_a_report_with_another_cause_is_not_right(kind):
    report = explore(forgetful, scheduler="mixed").report
    assert report is not None
    told = dataclasses.replace(report, kind=kind)
    assert is_right(Mutant("it", "", "", "", "", (kind,), (Cause.NEVER_FLUSHED,)), told)
    assert is_right(Mutant("it", "", "", "", "", (kind,)), told)
    assert not is_right(Mutant("it", "", "", "", "", (kind,), (Cause.POSTED,)), told)


@pytest.mark.parametrize("words", [("--schedules", "0"), ("--bound", "0"), ("--only", "xyzzy")])
def test_a_campaign_of_nothing_is_refused(cli, words):
    ran = cli("pod", "campaign", *words)
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.usefixtures("only_counters")
def test_the_table_has_a_row_a_mutant_and_json_says_the_same(cli):
    words = ("pod", "campaign", "--quick", "--schedules", "8", "--processes", "1")
    ran = cli(*words)
    assert ran.code == 0
    for one in mutants.ALL:
        assert any(line.startswith(one.name) for line in ran.out.splitlines())
    assert "0 reports; 2 of 2 mutants found within 2,000 schedules" in ran.out
    document = cli(*words, "--json").document
    assert document["passed"] is True
    assert document["schedules"] == 12
    assert [row["mutant"] for row in document["mutants"]] == [one.name for one in mutants.ALL]


def test_as_many_processes_as_cores():
    assert pod_campaign._cores() >= 1
