"""Folders of runs: gone with their run, or with the next one if it was killed; nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.run_folders import MARK, remove_stale, run_folder


def killed_run(place: Path) -> Path:
    """Return the folder that a killed run left."""
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from cxlbench.harness.run_folders import run_folder
        with run_folder(Path({str(place)!r})) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text("left")
            print(folder, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )
    assert ran.returncode == -signal.SIGKILL
    return Path(ran.stdout.strip())


def test_a_folder_is_gone_with_its_run(tmp_path: Path) -> None:
    def run() -> None:
        with run_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_what_a_killed_run_left_is_gone_with_the_next_one(tmp_path: Path) -> None:
    left = killed_run(tmp_path)
    assert (left / "deep" / "file").exists()
    with run_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_that_lives_is_left_alone(tmp_path: Path) -> None:
    with run_folder(tmp_path) as first:
        (first / "file").write_text("mine")
        with run_folder(tmp_path) as second:
            assert second != first
        assert remove_stale(tmp_path) == []
        assert (first / "file").read_text() == "mine"


def test_what_was_not_made_by_a_run_is_left_alone(tmp_path: Path) -> None:
    """A folder without the mark, one with the mark and another name, and a link to one."""
    (tmp_path / "cxlbench-results").mkdir()
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / MARK).touch()
    (tmp_path / "cxlbench-link").symlink_to(other)
    (tmp_path / "cxlbench-file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert remove_stale(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mark_that_is_a_link_is_none(tmp_path: Path) -> None:
    (tmp_path / "cxlbench-x").mkdir()
    (tmp_path / "cxlbench-x" / MARK).symlink_to(tmp_path / "victim")
    (tmp_path / "victim").touch()
    assert remove_stale(tmp_path) == []


def test_where_nothing_can_be_made_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(HostLimitError, match="choose another folder"),
        run_folder(tmp_path / "file"),
    ):
        raise AssertionError("it was made")


def test_without_a_place_it_is_where_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o077 == 0
