"""What is true of every experiment: its set-up is whole, and a small run reads all of it.

Each is run at a fraction of its quick form. ``cxlbench run all --quick`` runs the quick forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cxlbench.devices.profile import Profile, load_profile
from cxlbench.devices.profile_schema import schema_of
from cxlbench.harness.experiment import Context, Experiment, ExperimentError, Findings, Scalar
from cxlbench.harness.experiment_catalog import find_experiments
from cxlbench.harness.results import Verdict

P = TypeVar("P", bound=Profile)

CATALOG = find_experiments()
NAMES = tuple(
    name
    for name, experiment in CATALOG.experiments.items()
    if experiment.run.__module__.startswith("cxlbench.experiments.")
)
BED = {"workload.requests": "24"}
SMALL: dict[str, dict[str, str]] = {
    "dram_for_latency": {"workload.sessions": "2"},
    "fig04": {"workload.sessions": "16"},
    "fig05": {"shrink": "32", "requests": "16"},
    "fig10": {"workload.sessions": "8", "shrink": "64"},
    "fig11": {"workload.sessions": "8"},
    "fig12": {"workload.sessions": "8", "shrink": "64"},
    "fig13": {"workload.sessions": "32", "shrink": "16"},
    "fig14": {},
    "fig15": {"workload.sessions": "16", "micro.requests": "16", "gpu.kv_blocks": "64"},
    "flush_cost": {},
    "lock_contention": {},
    "mooncake": {"trace.seconds": "20"},
    "policy_ablation": {"workload.sessions": "2"},
    "prefetch_depth": {},
    "table1": {},
    "tract_fig05": BED,
    "tract_fig06": BED,
    "tract_fig07": BED,
    "tract_fig08": BED,
    "tract_fig09": BED,
    "tract_fig10": BED,
    "tract_fig11": BED,
    "write_buffer": {},
}
TRACES = {"mooncake": "mooncake_fast25_conversation_trace.jsonl.gz"}
TOO_LARGE = {"agents"}
"""Decodes the sessions of a large file three times."""
READ_WITH_OTHERS = {"policy_ablation": {"workload.trace_requests"}}
"""Knobs that are read only where another one has a certain value."""

ALL_KNOBS = [(name, knob) for name in NAMES for knob in CATALOG.experiments[name].knobs]


@dataclass(slots=True)
class Watched(Context):
    """Takes note of what a run reads."""

    knobs_read: set[str] = field(default_factory=set)
    profiles_read: set[str] = field(default_factory=set)

    def knob(self, name: str) -> Scalar:
        self.knobs_read.add(name)
        return Context.knob(self, name)

    def profile(self, kind: type[P], name: str) -> P:
        self.profiles_read.add(name)
        found = Context.profile(self, kind, name)
        for key in schema_of(kind):
            if key.refers_to is not None:
                self.profiles_read.add(getattr(found, key.name).name)
        return found


@dataclass(frozen=True, slots=True)
class Ran:
    experiment: Experiment
    context: Watched
    findings: Findings


MEMO: dict[Any, Any] = {}
SHARING = {"tract_fig07", "tract_fig08", "tract_fig09", "tract_fig10", "tract_fig11"}
READ_BY_SHARING: set[str] = set()
"""What the first of those that share their runs reads, is read for all."""


@cache
def small(name: str, folder: str = "") -> Ran:
    experiment = CATALOG.experiments[name]
    overrides = SMALL[name] | ({"trace.folder": folder} if folder else {})
    context = Watched(experiment, quick=True, seed=1, overrides=overrides, memo=MEMO)
    if name in SHARING:
        context.profiles_read = READ_BY_SHARING
    return Ran(experiment, context, experiment.run(context))


@pytest.fixture(params=[name for name in NAMES if name not in TOO_LARGE])
def ran(request: pytest.FixtureRequest, trace_path: Any) -> Ran:
    """Every experiment's small run."""
    name = request.param
    folder = str(Path(trace_path(TRACES[name])).parent) if name in TRACES else ""
    return small(name, folder)


def test_every_module_is_found_and_none_is_broken() -> None:
    assert [str(broken) for broken in CATALOG.broken] == []
    folder = Path(__file__).parents[2] / "experiments"
    modules = {path.stem for path in folder.glob("*.py") if "\nEXPERIMENT = " in path.read_text()}
    assert modules == set(NAMES)
    assert set(SMALL) | TOO_LARGE == set(NAMES), "every experiment has a small form here"


# -- set-ups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name: str) -> None:
    experiment = CATALOG.experiments[name]
    assert experiment.name == name
    assert experiment.title
    assert experiment.source
    assert len(experiment.about) > 100
    assert "\n\n\n" not in experiment.about


@pytest.mark.parametrize("name", NAMES)
def test_names_of_knobs_claims_and_profiles_are_unique(name: str) -> None:
    experiment = CATALOG.experiments[name]
    for names in (
        [knob.name for knob in experiment.knobs],
        [claim.name for claim in experiment.claims],
        experiment.profiles,
        experiment.keys(),
    ):
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("name", "knob"), ALL_KNOBS, ids=lambda it: getattr(it, "name", it))
def test_a_knob_has_a_source_and_possible_values(name: str, knob: Any) -> None:
    assert knob.source
    for quick in (False, True):
        value = knob.at(quick=quick)
        assert type(value) is type(knob.value)
        if knob.choices:
            assert str(value) in knob.choices
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            assert 0 <= value < float("inf")
            assert knob.low is None or knob.low <= value
            assert knob.high is None or value <= knob.high


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_says_where_it_stands(name: str) -> None:
    for claim in CATALOG.experiments[name].claims:
        assert claim.statement
        assert claim.source
        assert claim.band >= 0
        assert claim.neutral is None or claim.neutral != claim.expected


@pytest.mark.parametrize("name", NAMES)
def test_every_assumption_may_be_moved_to_both_ends(name: str) -> None:
    experiment = CATALOG.experiments[name]
    for ends in ("low", "high"):
        overrides = {one.key: getattr(one, ends) for one in experiment.assumptions()}
        Context(experiment, overrides={key: text for key, text in overrides.items() if text})


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_it_has_not_is_refused(name: str) -> None:
    experiment = CATALOG.experiments[name]
    with pytest.raises(ExperimentError, match=f"{name} has no key 'no.such.key'"):
        Context(experiment, overrides={"no.such.key": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_a_key_with_a_slip_gets_the_nearest_ones(name: str) -> None:
    experiment = CATALOG.experiments[name]
    for key in experiment.keys()[:1]:
        with pytest.raises(ExperimentError, match=f"did you mean .*{key}"):
            Context(experiment, overrides={key + "x": "1"})


# -- small runs ------------------------------------------------------------------------------------


def test_a_run_reads_all_knobs(ran: Ran) -> None:
    declared = {knob.name for knob in ran.experiment.knobs}
    unread = declared - ran.context.knobs_read
    assert unread == READ_WITH_OTHERS.get(ran.experiment.name, set())


def test_a_run_reads_all_profiles_that_it_declares(ran: Ran) -> None:
    assert ran.context.profiles_read == set(ran.experiment.profiles)


def test_every_law_holds(ran: Ran) -> None:
    found = ran.findings
    assert found.checks
    assert [check for check in found.checks if not check.ok] == []
    assert not found.partial


def test_every_claim_is_judged_once(ran: Ran) -> None:
    judged = ran.findings.claims
    assert [claim.name for claim in judged] == [claim.name for claim in ran.experiment.claims]
    for claim in judged:
        if claim.verdict is Verdict.OPEN:
            assert claim.reason, f"{claim.name} is not decided, and does not say why"


def test_rows_are_numbers_texts_or_nothing(ran: Ran) -> None:
    rows = ran.findings.rows
    assert rows
    for row in rows:
        assert all(isinstance(value, (bool, int, float, str, type(None))) for value in row.values())


def test_plots_have_as_many_of_each(ran: Ran) -> None:
    plots = ran.findings.plots
    assert len({plot.name for plot in plots}) == len(plots)
    for plot in plots:
        assert plot.title
        assert plot.y_label
        assert plot.series
        for xs, ys in plot.series.values():
            assert len(xs) == len(ys) or plot.kind == "cdf"
            if plot.kind == "cdf":
                assert all(a <= b for a, b in pairwise(xs))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["fig04", "fig14"])
def test_the_same_point_gives_the_same_findings(name: str) -> None:
    first = small(name).findings
    experiment = CATALOG.experiments[name]
    again = experiment.run(Context(experiment, quick=True, seed=1, overrides=SMALL[name]))
    assert again == first
    other = experiment.run(Context(experiment, quick=True, seed=2, overrides=SMALL[name]))
    if name == "fig04":  # lengths are drawn
        assert other.rows != first.rows


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"table1", *TRACES}])
def test_a_run_that_is_stopped_at_once_is_partial_and_decides_nothing(name: str) -> None:
    if name in TOO_LARGE:
        pytest.skip("needs a large trace")
    experiment = CATALOG.experiments[name]
    found = experiment.run(
        Context(experiment, quick=True, overrides=SMALL[name], stopping=lambda: True)
    )
    assert found.partial
    assert all(claim.verdict is Verdict.OPEN for claim in found.claims)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("agents", "mooncake"):
        experiment = CATALOG.experiments[name]
        context = Context(experiment, quick=True, overrides={"trace.folder": str(tmp_path)})
        with pytest.raises(ExperimentError, match="needs the public trace"):
            experiment.run(context)


def test_a_users_tier_may_read_profiles_that_the_figure_does_not() -> None:
    experiment = CATALOG.experiments["fig13"]
    overrides = {"workload.sessions": "4", "workload.turns": "2", "shrink": "128"}
    found = experiment.run(
        Context(experiment, quick=True, overrides=overrides, tiers=("cmm-h", "mooncake"))
    )
    assert {"cmm-h", "mooncake"} <= {row["system"] for row in found.rows}
    assert all(check.ok for check in found.checks)


def test_every_declared_profile_exists() -> None:
    for name in NAMES:
        for profile in CATALOG.experiments[name].profiles:
            assert load_profile(profile).name == profile
