"""README and docs: links lead somewhere, and every command they show is one that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from cxlbench.harness.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Return every cxlbench command of README and docs; those of cli.md have a test of theirs."""
    found = []
    for page in PAGES:
        if page.name == "cli.md":
            continue
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                match = re.match(r"(?:\.venv/bin/)?cxlbench (.*)", line.split("  #")[0].strip())
                if match:
                    found.append(match[1])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_walkthrough_names_files_that_exist():
    text = (ROOT / "docs/walkthrough.md").read_text()
    named = set(re.findall(r"`((?:emu|devices|kv|hymcache|harness)/[\w/]+\.py)`", text))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_readmes_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert shown == {"demo", "test"}
    assert shown <= targets


def test_every_command_shown_works(tmp_path, monkeypatch):
    """Run them in order in an empty folder, as a reader would; what needs a trace is parsed."""
    monkeypatch.chdir(tmp_path)
    shown = commands()
    assert len(shown) >= 5
    for line in shown:
        words = shlex.split(line)
        needs_trace = any(".jsonl" in word and not Path(word).exists() for word in words[1:])
        if words[0] in ("demo", "bench", "calibrate", "doctor") or (
            words[0] == "replay" and needs_trace
        ):
            words = [*words, "--help"]
        ran = CliRunner().invoke(main, words)
        assert ran.exit_code in (0, 3), f"cxlbench {line}: {ran.output}"
