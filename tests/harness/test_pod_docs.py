"""What docs/pod.md shows is what happens: its files, its commands, their output."""

from __future__ import annotations

import importlib
import linecache
import mmap
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.emu import pod_compile
from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_processes import LivePod

PAGE = Path(__file__).parents[2] / "docs" / "pod.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOME = "/home/ann/queue"
MODULES = ("my_queue", "live_queue", "mapped", "region", "test_my_queue", "test_live_queue")


def forget():
    for name in MODULES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()


@pytest.fixture(autouse=True)
def own_modules():
    yield
    forget()


@pytest.fixture
def shell(cli, tmp_path, monkeypatch):
    """Run a command as a reader would, in the folder with the page's files."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(pod_compile.CACHE_VARIABLE, str(pod_compile.kernel_folder().parent))
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "-p no:cxlbench-pod -p cxlbench.harness.pytest_pod -p no:cacheprovider"
    )

    def run(command):
        program, *words = shlex.split(command)
        if program == "cxlbench":
            forget()  # each command is a process of its own
            ran = cli(*words)
            assert ran.code in (0, 1), ran.err
            out = ran.out
        else:
            assert program == "python"
            out = subprocess.run(
                [sys.executable, *words],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            ).stdout
        return comparable(out.replace(str(tmp_path), HOME))

    return run


def comparable(text: str) -> str:
    """Leave out what differs from run to run: how long pytest took."""
    lines = [re.sub(r" in \d+\.\d+s", "", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def patched(text: str, diff: str) -> str:
    """Apply a block of ``diff``: its lines that stay must be in the text, once."""
    old = "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] in " +")
    assert text.count(old) == 1
    return text.replace(old, new)


def transcript(block: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its output."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return [(c, comparable(o)) for c, o in zip(parts[::2], parts[1::2], strict=True)]


def test_every_command_of_the_page_prints_what_is_shown(shell, tmp_path):
    ran = []
    for kind, block in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            name = block.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block)
        elif kind == "diff":
            path = tmp_path / "my_queue.py"
            path.write_text(patched(path.read_text(), block))
        elif kind == "console":
            for command, shown in transcript(block):
                assert shell(command) == shown, command
                ran.append(command)
    assert len(ran) >= 8
    assert "causality violation: never flushed" in PAGE.read_text()


def test_the_queue_without_its_flush_prints_what_the_page_says(shell, tmp_path):
    for kind, block in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    printed = shell("python live_queue.py")
    assert f"prints `{printed}`" in PAGE.read_text()
    assert printed == "[0, 0, 0, 0, 0, 0]"


def test_a_posted_flush_in_the_queue_is_called_posted(shell, tmp_path):
    blocks = BLOCK.findall(PAGE.read_text())
    code = next(block for kind, block in blocks if kind == "python")
    diff = next(block for kind, block in blocks if kind == "diff")
    posted = diff.replace("clflush(", "clflushopt(")
    (tmp_path / "my_queue.py").write_text(
        patched(code, posted).replace("import LINE, clflush,", "import LINE, clflush, clflushopt,")
    )
    assert "causality violation: posted\n" in shell("cxlbench pod explore my_queue:scenario")


def test_what_a_program_flushes_by_itself_moves_nothing_as_the_page_says():
    assert "`msync` move nothing here" in " ".join(PAGE.read_text().split())
    with LivePod(PodShape(1 << 16, nodes=2, mode="mapped")) as pod:
        maps = []
        for node in range(2):
            with pod.mapped(node).path.open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), 1 << 16))
        ours, theirs = maps
        ours[0:5] = b"hello"
        ours.flush()  # msync
        assert theirs[0:5] == bytes(5)
        for node in range(2):
            pod.mapped(node).flush(0, 5)
        assert theirs[0:5] == b"hello"
        for one in maps:
            one.close()


def test_the_queue_has_thirty_lines():
    code = next(block for kind, block in BLOCK.findall(PAGE.read_text()) if kind == "python")
    queue = code.partition("def produce")[0]
    assert 20 <= len([line for line in queue.splitlines() if line.strip()]) <= 30


def test_every_kind_and_cause_is_explained():
    from cxlbench.emu.causality import Cause
    from cxlbench.emu.pod_failure import Kind

    table = PAGE.read_text().partition("## What is reported")[2]
    assert [str(one) for one in (*Kind, *Cause) if str(one) not in table] == []
