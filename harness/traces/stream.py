"""What a reader of one format gives: a stream of requests, and what is true of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cxlbench.harness.requests import Mode, Request
from cxlbench.harness.traces.blocks import Blocking
from cxlbench.harness.traces.lines import Progress, TraceError


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants of a trace: the file, mode, block size (None: its own), progress.

    ``only_lines`` names the lines to read, where a line is a session (None: all).
    """

    path: Path
    mode: Mode
    block_tokens: int | None = None
    progress: Progress | None = None
    only_lines: frozenset[int] | None = None

    def blocking(self, native_tokens: int, *, partial_recorded: bool) -> Blocking:
        """Return how to regroup blocks, or raise TraceError when that cannot be done exactly."""
        asked = native_tokens if self.block_tokens is None else self.block_tokens
        try:
            return Blocking(native_tokens, asked, self.mode, partial_recorded)
        except ValueError as error:
            raise TraceError(self.path, None, str(error)) from None


@dataclass(frozen=True, slots=True)
class TraceStream:
    """A trace that is being read.

    Attributes:
        name: of the workload.
        block_tokens: tokens in a full block.
        has_sessions: whether sessions are recorded.
        sessions_contiguous: whether no session resumes after another has begun.
        has_ids: whether block ids are recorded.
        requests: in the order of the file, numbered in that order; consumed once. Raises
            TraceError at the first bad line.
    """

    name: str
    block_tokens: int
    has_sessions: bool
    sessions_contiguous: bool
    has_ids: bool
    requests: Iterator[Request]


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format: its name, what tells it apart, and its reader.

    ``recognises`` gets the first line that is not blank and the keys of the JSON object on it
    (empty if there is none). ``has_ids`` is False where no file of the format records block ids.
    """

    name: str
    title: str
    recognises: Callable[[bytes, frozenset[str]], bool]
    open: Callable[[Asked], TraceStream]
    has_ids: bool = True


def trace_name(path: Path) -> str:
    """Return a file's name without the endings that say how it is stored."""
    name = path.name
    for ending in (".gz", ".jsonl", ".csv"):
        name = name.removesuffix(ending)
    return name
