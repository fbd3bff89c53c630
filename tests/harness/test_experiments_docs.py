"""``docs/experiments.md``: its commands work in their order, and say what the page says."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

from cxlbench.harness import experiment_catalog
from cxlbench.harness.results import Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_commands_shown_work_in_their_order(cli, monkeypatch, tmp_path):
    """``all`` is the page's own experiment here; the papers' take minutes."""
    (code,) = blocks("python")
    Path("tiers.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("mine", "tiers", experiment_catalog.GROUP)]
    monkeypatch.setattr(experiment_catalog, "entry_points", lambda group: points)
    outputs = {}
    try:
        for line in "".join(blocks("sh")).splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "cxlbench"
            ran = cli(*words)
            assert ran.code == 0, f"{line}: {ran.err}"
            outputs[line] = ran.out
    finally:
        sys.modules.pop("tiers", None)
    assert "blocks_a_gib" in outputs["cxlbench list tiers:EXPERIMENT"]
    assert "not stated for this workload" in outputs["cxlbench list tiers:EXPERIMENT"]
    assert "holds" in outputs["cxlbench run tiers:EXPERIMENT"]
    assert "hit_rate" in outputs["cxlbench compare results second"]
    for name in ("result.json", "run.json", "rows.csv", "hits.png", "hits.svg"):
        assert (Path("results/tiers") / name).is_file()
    assert Path("report.html").is_file()
    assert Path("second.html").is_file()


def test_the_table_has_every_verdict():
    rows = re.findall(r"^\| ([\w ]+) \| ", PAGE, re.MULTILINE)
    assert {verdict.value for verdict in Verdict} <= set(rows)


def test_the_entry_point_shown_is_of_the_group_that_is_read():
    (text,) = blocks("toml")
    assert f'entry-points."{experiment_catalog.GROUP}"' in text
