"""Numbered lines of a trace file, plain or gzip, and the error that names the bad one.

Compression is told by the file's first bytes, not by its name. Only one line is held at a time.
Line numbers count from 1, blank lines included. Left out: other compressions, and JSON documents
that span lines (``jq -c . FILE`` makes one line of each).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec

GZIP_MAGIC = b"\x1f\x8b"
PROGRESS_STEPS = 100

MOST_TOKENS = 10**8
"""No prompt is longer: a larger number in a file is damage, and would be expanded into blocks."""

Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes of the file read so far, bytes in all), at most some hundred times."""


class TraceError(Exception):
    """A trace file that cannot be read (or written), with the place and the reason.

    Attributes:
        path: the file.
        line: its line, from 1, or None when the whole file is meant.
        what: what is wrong and what to do.
    """

    def __init__(self, path: Path, line: int | None, what: str) -> None:
        place = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {what}")
        self.path = path
        self.line = line
        self.what = what


def numbered_lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for each line that is not blank.

    Raises:
        TraceError: the file cannot be opened, or its gzip stream is damaged or cut off.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            total_bytes = os.fstat(raw.fileno()).st_size
            step_bytes = max(1, total_bytes // PROGRESS_STEPS)
            reported_bytes = 0
            for line in _decompressed(raw):
                number += 1
                if progress is not None and raw.tell() >= reported_bytes + step_bytes:
                    reported_bytes = raw.tell()
                    progress(reported_bytes, total_bytes)
                if line.strip():
                    yield number, line
            if progress is not None and reported_bytes < total_bytes:
                progress(total_bytes, total_bytes)
    except EOFError:
        what = "the gzip stream ends early: the file is truncated, fetch it again"
        raise TraceError(path, number + 1, what) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        what = f"the gzip stream is damaged ({error}): fetch the file again"
        raise TraceError(path, number + 1, what) from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from error


def _decompressed(raw: BinaryIO) -> Iterator[bytes]:
    magic = raw.read(len(GZIP_MAGIC))
    raw.seek(0)
    if magic == GZIP_MAGIC:
        yield from gzip.GzipFile(fileobj=raw)
    else:
        yield from raw


def decode_line(decoder: msgspec.json.Decoder[T], path: Path, number: int, line: bytes) -> T:
    """Return the typed content of one JSON line, or raise TraceError saying what is wrong."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(path, number, f"{error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        hint = "" if line.endswith(b"\n") else "; the last line may have been cut off"
        raise TraceError(path, number, f"not one JSON object on a line ({error}){hint}") from None
