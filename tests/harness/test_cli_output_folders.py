"""Results that cannot be written: one clear line, before the work if possible, and no harm."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
TIER = ("--workers", "2", "--gpu-blocks", "2", "--capacity", "4GiB")
FULL = Path("/dev/full")

COMMANDS = {
    "replay": ("replay", "small.jsonl", *TIER, "--out"),
    "statistics": ("replay", "small.jsonl", "--statistics", "--out"),
    "demo": ("demo", "--trace", "small.jsonl", "--budget", "0.3", "--scale", "512", "--out"),
}


@contextlib.contextmanager
def as_nobody():
    """Give up root, which may write everywhere, for a while."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_home(small_trace, monkeypatch):
    """Work in a folder that everybody may read: pytest's own are closed to others."""
    home = Path(tempfile.mkdtemp(prefix="cxlbench-"))
    home.chmod(0o755)
    shutil.copy(small_trace, home / "small.jsonl")
    (home / "locked").mkdir()
    (home / "locked").chmod(0o555)
    monkeypatch.chdir(home)
    yield home
    shutil.rmtree(home)


@pytest.mark.parametrize("below", ["", "/new/deep"], ids=["there", "to be made"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_folder_for_results_is_refused(cli, open_home, monkeypatch, name, below):
    monkeypatch.chdir(open_home)
    command = (*COMMANDS[name], f"locked{below}")
    assert cli(*command[:-1], "fine").code == 0  # as the user, so that everything is imported
    try:
        with as_nobody():
            ran = cli(*command)
    except PermissionError:
        pytest.skip("this Python's own files cannot be read without root")
    assert (ran.code, ran.out if name == "replay" else "") == (2, "")
    assert f"cannot write results in locked{below}: Permission denied; choose another" in ran.err
    assert "Traceback" not in ran.err
    assert list((open_home / "locked").iterdir()) == []


def test_a_folder_is_refused_before_the_work_and_not_after_it(cli, open_home, monkeypatch):
    monkeypatch.chdir(open_home)
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    (open_home / "file").write_text("in the way")
    for name in ("replay", "demo"):
        ran = cli(*COMMANDS[name], "file/below")
        assert ran.code == 2
        assert "cannot write results in file/below" in ran.err
        assert "replaying" not in ran.err
        assert "virtual time" not in ran.err


def test_a_trace_cannot_be_generated_into_a_read_only_folder(cli, open_home, monkeypatch):
    monkeypatch.chdir(open_home)
    assert cli("generate", "--sessions", "1", "fine.jsonl").code == 0
    with as_nobody():
        ran = cli("generate", "--sessions", "1", "locked/x.jsonl")
    assert ran.code == 2
    assert "locked/x.jsonl: cannot be written: Permission denied" in ran.err
    assert list((open_home / "locked").iterdir()) == []


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_when_results_are_written_loses_no_old_ones(
    cli, small_trace, tmp_path, name
):
    out = tmp_path / "out"
    assert cli(*COMMANDS[name], "out").code == 0
    before = (out / "result.json").read_bytes()
    (out / "result.json.unfinished").symlink_to(FULL)
    ran = cli(*COMMANDS[name], "out")
    assert ran.code == 2
    assert "cannot write results in out: No space left on device; choose another folder" in ran.err
    assert "Traceback" not in ran.err
    assert (out / "result.json").read_bytes() == before
    assert not (out / "result.json.unfinished").is_symlink()
    assert list(out.glob("**/cxlbench-*")) == []


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_when_the_plot_is_drawn_keeps_the_result(cli, small_trace, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "replay.png").symlink_to(FULL)
    ran = cli(*COMMANDS["replay"], "out")
    assert ran.code == 2
    assert "cannot write the plot out/replay.png: No space left on device" in ran.err
    assert (out / "result.json").stat().st_size > 100
    assert not (out / "replay.png").is_symlink()
