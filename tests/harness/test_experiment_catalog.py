"""Experiments are found by entry point; what is broken is named and hides nothing else."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

from cxlbench.harness.experiment import ExperimentError
from cxlbench.harness.experiment_catalog import GROUP, find_experiments

GOOD = """
from tests.harness.front_end_toys import toy
EXPERIMENT = toy({name!r})
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An installed project with a package of experiments, a module, and things that are wrong."""
    files = {
        "their_pack/__init__.py": "",
        "their_pack/fig2.py": GOOD.format(name="fig2"),
        "their_pack/fig1.py": GOOD.format(name="fig1"),
        "their_pack/helpers.py": "COMMON = 1",
        "their_pack/torn.py": "import nowhere_at_all",
        "their_pack/typo.py": "def broken(:",
        "their_pack/exits.py": "raise SystemExit(3)",
        "their_pack/wrong.py": "EXPERIMENT = 'fig3'",
        "their_pack/twice.py": GOOD.format(name="fig1"),
        "their_pack/path.py": GOOD.format(name="../../etc"),
        "their_module.py": GOOD.format(name="alone"),
        "their_empty.py": "",
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": f"[{GROUP}]\npack = their_pack\n"
        "module = their_module\nempty = their_empty\ngone = their_gone\n",
    }
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in [name for name in sys.modules if name.startswith("their_")]:
        del sys.modules[name]


def test_an_installed_projects_experiments_are_found_without_naming_them(project):
    found = find_experiments().experiments
    assert {"fig1", "fig2", "alone"} <= found.keys()
    assert [name for name in found if name in ("fig1", "fig2")] == ["fig1", "fig2"]


def test_what_is_broken_is_named_with_its_error_and_hides_no_other(project):
    broken = {one.where: one.why for one in find_experiments().broken}
    assert "No module named 'nowhere_at_all'" in broken["their_pack.torn"]
    assert broken["their_pack.typo"].startswith("SyntaxError")
    assert broken["their_pack.exits"].startswith("SystemExit")
    assert "of type str" in broken["their_pack.wrong"]
    assert "that of their_pack.fig1" in broken["their_pack.twice"]
    assert "'../../etc'" in broken["their_pack.path"]
    assert broken["their_empty"] == "it has no EXPERIMENT"
    assert "No module named 'their_gone'" in broken["their_gone"]
    assert "their_pack.helpers" not in broken


def test_asking_for_a_broken_one_says_why(project):
    with pytest.raises(ExperimentError, match=r"'torn'.*No module named 'nowhere_at_all'"):
        find_experiments().get("torn")


def test_an_unknown_name_gets_the_nearest_ones(project):
    with pytest.raises(ExperimentError, match="no experiment 'alon'; did you mean 'alone'"):
        find_experiments().get("alon")


def test_a_name_like_no_other_gets_all_of_them():
    point = EntryPoint("mine", "tests.harness.front_end_toys:OTHER", GROUP)
    with pytest.raises(ExperimentError, match="'xyz'; there are toy2; `cxlbench list`"):
        find_experiments([point]).get("xyz")


def test_one_is_also_named_by_module_and_object():
    catalog = find_experiments([])
    assert catalog.get("tests.harness.front_end_toys:OTHER").name == "toy2"
    assert catalog.get("tests.harness.front_end_toys:").name == "toy"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tests.harness.front_end_toys:NONE", "it has EXPERIMENT, OTHER"),
        ("tests.harness.front_end_toys:KNOBS", "of type tuple"),
        ("nowhere_at_all:X", "is its folder on PYTHONPATH"),
    ],
)
def test_a_module_and_object_that_lead_nowhere(spec, says):
    with pytest.raises(ExperimentError, match=says):
        find_experiments([]).get(spec)


def test_each_is_chosen_once_in_the_order_asked_for():
    points = [
        EntryPoint(name, f"tests.harness.front_end_toys:{name}", GROUP)
        for name in ("EXPERIMENT", "OTHER")
    ]
    catalog = find_experiments(points)
    names = [one.name for one in catalog.choose(["toy2", "toy", "toy2"])]
    assert names == ["toy2", "toy"]
    assert [one.name for one in catalog.choose(["all", "toy"])] == ["toy", "toy2"]


def test_those_of_cxlbench_come_first(project):
    builtin = EntryPoint("builtin", "tests.harness.front_end_toys:OTHER", GROUP)
    theirs = EntryPoint("a", "their_module", GROUP)
    assert list(find_experiments([theirs, builtin]).experiments) == ["toy2", "alone"]
