"""The page on the serving model: its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_example_of_the_page_runs_and_the_tier_saves_time(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    times = {line.partition(":")[0]: float(line.split()[2]) for line in lines}
    assert times["hymcache"] < times["gpu-prefix-cache"]
    assert "hit rate 100%" in lines[1]


def test_every_file_that_the_page_names_exists():
    for name in re.findall(r"`(harness/[^`]+\.py)`", PAGE.read_text()):
        assert (PAGE.parents[1] / name).is_file(), name
