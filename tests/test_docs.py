"""README and docs: links lead somewhere, files exist, and every command they show is one.

Commands of ``docs/cli.md`` are run by ``tests/harness/test_example.py``, those of
``docs/processes.md`` by ``tests/harness/test_processes_docs.py``, those of
``docs/experiments.md`` by ``tests/harness/test_experiments_docs.py``, those of
``docs/sweeps.md`` by ``tests/harness/test_cli_sweep.py``. Of the others, cheap ones
are run, in order, in an empty folder, as a reader would; those of ``PARSED`` are parsed by the
command line itself, options and values, without being run.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cxlbench.harness.cli import main
from cxlbench.harness.cli.group import (
    BAD_INPUT,
    BAR_MISSED,
    INTERRUPTED,
    OUTPUT_CLOSED,
    TERMINATED,
    TIMING_NOT_KEPT,
    WRONG_DATA,
)

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = tuple(
    ROOT / "docs" / name for name in ("cli.md", "experiments.md", "processes.md", "sweeps.md")
)
PARSED = {"demo": "a minute", "bench": "seconds", "calibrate": "seconds", "doctor": "seconds"}
"""Commands that are only parsed here, and how long they take."""

PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.|…")
"""In running text: ``cxlbench COMMAND --help``."""


def shown(page: Path) -> list[str]:
    """Return the commands in a page's shell blocks, without prompt and comment."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(shlex.split(line, comments=True)) and line.split("  #")[0].strip()
            if command:
                found.append(command.removeprefix("$ ").removeprefix(".venv/bin/"))
    return found


def files_shown(page: Path) -> list[tuple[str, str]]:
    """Return the Python files that a page shows: their first line is their name."""
    blocks = re.findall(
        r"^```python\n(# (\w+\.py)\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [(name, text) for text, name in blocks]


def mentioned(page: Path) -> list[str]:
    """Return the commands in a page's running text."""
    spans = re.findall(r"`((?:cxlbench|make) [^`]+)`", page.read_text())
    return [" ".join(span.split()) for span in spans if not PLACEHOLDER.search(span)]


def parse(words: list[str]) -> None:
    """Let the command line read all options and values of a command; raises what it refuses."""
    context = click.Context(main, info_name="cxlbench")
    command: click.Command = main
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        if not isinstance(command, click.Group):
            break
        context = click.Context(command, info_name=name, parent=context)
    command.make_context(command.name, list(words), parent=context)


def make(target: str) -> int:
    """Return whether make knows a target, as an exit code."""
    ran = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, timeout=30, check=False
    )
    return ran.returncode


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    named = set(
        re.findall(
            r"`((?:emu|devices|kv|hymcache|harness|docs|tests)/[\w/]*(?:\.\w+)?)`",
            page.read_text(),
        )
    )
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    if page.name == "walkthrough.md":
        assert len(named) > 10


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text


def test_the_readmes_first_commands_are_demo_and_test():
    assert shown(ROOT / "README.md")[:2] == ["make demo", "make test"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_knows_every_target_shown(page):
    for command in (*shown(page), *mentioned(page)):
        program, *targets = shlex.split(command)
        if program == "make":
            assert [make(target) for target in targets] == [0] * len(targets), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_is_accepted(page):
    for command in shown(page):
        program, *words = shlex.split(command)
        assert program in ("cxlbench", "make"), command
        if program == "cxlbench":
            parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_mentioned_exists_with_its_options(page):
    for command in mentioned(page):
        program, *words = shlex.split(command)
        if program == "cxlbench" and words[-1] != "--help":
            with contextlib.suppress(click.BadOptionUsage):  # `cxlbench demo --trace`
                parse(words)


def test_every_cheap_command_shown_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran = []
    for page in PAGES:
        if page in RUN_ELSEWHERE:
            continue
        for name, text in files_shown(page):
            (tmp_path / name).write_text(text)
        for command in shown(page):
            program, *words = shlex.split(command)
            if program == "cxlbench" and words[0] not in PARSED:
                result = CliRunner().invoke(main, words)
                assert result.exit_code == 0, f"{command}: {result.output}"
                ran.append(command)
    assert len(ran) >= 5


def test_the_readmes_examples_show_what_it_says(tmp_path, monkeypatch):
    """Devices and DRAM that are compared there differ in their answers, as much as is said."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    replays, jobs = [], []
    for command in shown(ROOT / "README.md"):
        program, *words = shlex.split(command)
        if program != "cxlbench" or words[0] not in ("generate", "replay", "io"):
            continue
        ran = CliRunner().invoke(main, [*words, "--json"])
        assert ran.exit_code == 0, f"{command}: {ran.output}"
        document = json.loads(ran.stdout)
        if words[0] == "replay":
            turns = {turn["turn"]: turn for turn in document["figures"]["turns"]}
            replays.append(turns[4]["read_bytes_per_s"] / 1e9)
        elif words[0] == "io":
            jobs.append(document["read"]["bytes_per_s"] / 1e9)
    staged, cached = replays
    assert f"at {staged:.0f} GB/s in turn 4, the second at {cached:.1f}" in text
    assert "{:.1f}, {:.1f} and {:.1f} GB/s".format(*jobs) in text
    assert jobs[1] < 0.25 * jobs[0] < jobs[2]


@pytest.mark.parametrize(
    "wrong",
    [
        "demo --budgit 3",
        "demo --budget soon",
        "replay",
        "profiles show",
        "io --rw sideways",
        "runn",
    ],
)
def test_a_command_that_is_wrong_would_be_noticed(wrong):
    with pytest.raises(click.UsageError):
        parse(shlex.split(wrong))


def test_the_command_lines_page_has_every_exit_code_and_says_what_demo_does():
    """What happens is tested in ``tests/harness/test_cli_json.py`` and ``test_cli_bench.py``."""
    text = " ".join((ROOT / "docs" / "cli.md").read_text().split())
    rows = dict(re.findall(r"\| (\d+)(?:, \d+)? \| ([^|]+) \|", text))
    assert {int(code) for code in rows} == {
        0,
        WRONG_DATA,
        BAD_INPUT,
        TIMING_NOT_KEPT,
        INTERRUPTED,
        TERMINATED,
        OUTPUT_CLOSED,
    }
    assert "`bench --strict`" in rows[str(BAR_MISSED)]
    not_kept = rows[str(TIMING_NOT_KEPT)]
    assert "`replay --wall`, `io --wall` or `worker` did not keep its timing" in not_kept
    assert "it exits 0 also if the timing was not kept" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_ci_script_is_one_and_runs_what_the_readme_shows():
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    text = script.read_text()
    for command in ("make test", "make lint", "make types", "make demo", "bench replay --strict"):
        assert command in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_line_that_activates_the_environment_does(page, tmp_path):
    lines = set(re.findall(r"`(\. \.venv[^`]+)`", page.read_text()))
    if not lines:
        pytest.skip("the page shows none")
    (folder,) = re.findall(r"^VENV := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    venv.create(tmp_path / folder, with_pip=False)
    for line in lines:
        ran = subprocess.run(
            ["bash", "-c", f"{line} && command -v python"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert Path(ran.stdout.strip()) == tmp_path / folder / "bin" / "python", ran.stderr


def test_a_target_that_is_wrong_would_be_noticed():
    assert make("dmeo") != 0
