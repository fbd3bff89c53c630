"""Folders of one run: made for it, and gone after it, however it ended.

A run holds a lock in its folder. A run that is killed leaves the folder, and the lock is free then:
the next run in the same place removes what it finds so. Nothing else is touched, whatever its name:
a folder without the mark, of another user, or of a run that lives. Units: bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cxlbench.emu.status import HostLimitError

PREFIX = "cxlbench-"
MARK = ".cxlbench-run"


@contextlib.contextmanager
def run_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder of this run in ``parent`` (None: where temporary files go), and remove it.

    Raises ``HostLimitError`` if nothing can be made there.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        remove_stale(place)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        try:
            lock = _mark(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise HostLimitError(
            f"cannot write files in {place}: {error.strerror or error}; choose another folder"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale(place: Path) -> list[Path]:
    """Remove the folders of runs that were killed; return them."""
    removed = []
    for folder in sorted(place.glob(f"{PREFIX}*")):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or another run is removing it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except OSError:
            pass  # its run lives
        finally:
            os.close(lock)
    return removed


def _mark(folder: Path) -> int:
    """Make the mark, which is never there without its lock; return the lock's descriptor."""
    new = folder / f"{MARK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / MARK)
    except BaseException:
        os.close(lock)
        raise
    return lock
