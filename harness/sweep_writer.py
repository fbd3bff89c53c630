"""Writes the file of a sweep: a row is on the disk before the next, and nobody else writes it.

Opening a file goes on with it: a torn last line is cut off, and another sweep's file is refused
with what differs (``sweep_rows.py`` says what is in it).

No units here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from cxlbench.harness.sweep_axes import SweepError
from cxlbench.harness.sweep_rows import PointRow, SweepHeader, parse_sweep


class SweepWriter:
    """Appends rows to a sweep's file; as a context, holds the file for this process alone."""

    def __init__(self, path: Path, header: SweepHeader) -> None:
        """Open or make the file.

        Raises:
            SweepError: it is another sweep's, damaged, or another process is writing it.
            OSError: it cannot be written.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("a+b")
        try:
            _hold(self._file, path)
            self.rows = {row.point: row for row in self._open(header)}
        except BaseException:
            self._file.close()
            raise

    def _open(self, header: SweepHeader) -> Iterable[PointRow]:
        self._file.seek(0)
        content = self._file.read()
        first = _line(header)
        if first.startswith(content) and content != first:  # new, or killed within its first line
            self._file.truncate(0)
            self._write(first)
            _sync_folder(self.path.parent)
            return ()
        found, whole = parse_sweep(self.path, content)
        _refuse_other(self.path, found.header, header)
        self._file.truncate(whole)
        return found.rows

    def todo(self) -> Iterator[int]:
        """Yield the points that have no row yet, or one whose worker was lost."""
        header = msgspec.json.decode(_first_line(self.path), type=SweepHeader)
        for point in range(header.points):
            if point not in self.rows or self.rows[point].result.lost:
                yield point

    def append(self, row: PointRow) -> None:
        """Write a row; it is on the disk when this returns."""
        self._write(_line(row))
        self.rows[row.point] = row

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SweepError(
                f"cannot write {self.path}: {error.strerror or error}; the rows before are in it, "
                "and the same command goes on with the others"
            ) from error

    def sort(self) -> None:
        """Put the rows into the order of the points; the file is there at every moment."""
        lines = [_first_line(self.path), *(_line(self.rows[point]) for point in sorted(self.rows))]
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)
            _sync_folder(self.path.parent)
        finally:
            unfinished.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> SweepWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_other(path: Path, there: SweepHeader, asked: SweepHeader) -> None:
    said = {
        "experiment": "of the experiment",
        "quick": "with quick",
        "seed": "with the seed",
        "points": "with so many points:",
        "keys": "over the keys",
        "design": "over other values of its keys:",
        "setup": "of another set-up of the experiment (knobs, profiles, claims):",
        "versions": "made by",
    }
    for name, words in said.items():
        old, new = getattr(there, name), getattr(asked, name)
        if old != new:
            raise SweepError(
                f"{path} holds a sweep {words} {_said(old)}, this one has {_said(new)}; choose "
                "another file with -o, or remove that one"
            )


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _line(value: SweepHeader | PointRow) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _hold(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks here
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SweepError(f"another sweep is writing {path}; wait for it, or choose -o") from error


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
