"""Each wrong version of TraCT is found, for the right reason, and named by both lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_failure import Kind
from cxlbench.emu.pod_report import Report
from cxlbench.tract.mutant_loader import Mutant, MutantError, load, mutated
from cxlbench.tract.mutants import ALL
from tests.tract.killing_schedules import KILLING

PAIRS = (Kind.CAUSALITY, Kind.WRITE_RACE, Kind.LINE_RACE, Kind.REGRESS)
"""Kinds of failure that are about two lines of source."""


def files(report: Report, folder: Path) -> set[str]:
    """Return the mutant's files that the report names."""
    places = [*report.later_site, *report.site]
    return {Path(place.file).name for place in places if place.file.startswith(str(folder))}


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_with_its_cause(mutant: Mutant, tmp_path: Path) -> None:
    found = explore(
        load(mutant, tmp_path),
        first=KILLING[mutant.name],
        schedules=1,
        scheduler="mixed",
        ignore=mutant.passed_over,
        shrinking=False,
    )
    assert found.report is not None
    assert found.report.kind in mutant.kinds
    if found.report.cause is not None and mutant.causes:
        assert found.report.cause in mutant.causes
    if found.report.kind in PAIRS:
        assert found.report.site
        assert found.report.later_site
        assert files(found.report, tmp_path)


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL) == len(KILLING)


def test_a_mutant_whose_text_is_gone_is_told() -> None:
    wrong = Mutant("m", "lock.py", "no such text", "", "lock_counter", (Kind.HANG,))
    with pytest.raises(MutantError, match="has 0 of"):
        mutated(wrong)


def test_a_mutant_changes_one_file_only() -> None:
    first, second = (mutated(mutant) for mutant in ALL[:2])
    assert {name for name in first if first[name] != second[name]} <= {ALL[0].file, ALL[1].file}


def test_every_cause_that_a_checker_can_name_is_shown_by_some_mutant() -> None:
    shown = {cause for mutant in ALL for cause in mutant.causes}
    assert shown == set(Cause)
