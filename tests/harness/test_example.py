"""What the documents show does what they say."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from pathlib import Path

import pytest

from cxlbench.harness import disk_probe

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name):
    return FENCE.findall((DOCS / name).read_text())


def shell_commands():
    lines = [line for kind, text in blocks("cli.md") if kind == "sh" for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def printed(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "docs/python.md", "exec"), {"__name__": "example"})
    return out.getvalue()


def test_the_examples_in_python_print_what_is_shown():
    found = blocks("python.md")
    shown = [
        (code, text)
        for (kind, code), (after, text) in itertools.pairwise(found)
        if (kind, after) == ("python", "text")
    ]
    assert len(shown) == 2
    for code, text in shown:
        assert printed(code) == text


def test_the_first_example_has_ten_lines():
    code = blocks("python.md")[0][1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_example_of_a_users_test_passes(pytester):
    (code,) = [text for kind, text in blocks("python.md") if text.startswith("def test_")]
    pytester.makepyfile(code)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_every_command_of_the_document_runs(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_probe, "find_fio", lambda: None)  # takes a second a pattern at least
    (plan,) = [text for kind, text in blocks("cli.md") if kind == "toml"]
    (tmp_path / "plan.toml").write_text(plan)
    ran = {}
    for line in shell_commands():
        program, *words = shlex.split(line)
        assert program == "cxlbench"
        ran[line] = cli(*words)
    for line, result in ran.items():
        allowed = (0, 3) if "--wall" in line else (0,)
        assert result.code in allowed, (line, result.err)


@pytest.mark.parametrize(
    "command", ["demo", "generate", "replay", "profiles", "calibrate", "doctor", "bench", "io"]
)
def test_every_command_is_in_a_document(command):
    text = "".join(path.read_text() for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"])
    assert f"cxlbench {command}" in text
