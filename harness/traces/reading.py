"""Opening a trace of whatever known format: detection by content, streaming, or all at once.

``open_trace`` gives requests one by one in the order of the file, in little memory; ``read_trace``
gives a whole ``Workload``, sorted by arrival: a stable sort, so requests that arrive together keep
the order of the file. A trace out of order is thus no error, unless the turns of one session are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError
from cxlbench.harness.traces import azure, coding_agent, lmcache_agent, mooncake, own_format
from cxlbench.harness.traces.lines import Progress, TraceError, numbered_lines
from cxlbench.harness.traces.stream import Asked, Format, TraceStream

FORMATS: tuple[Format, ...] = (
    own_format.FORMAT,
    mooncake.FORMAT,
    lmcache_agent.FORMAT,
    coding_agent.DELTA,
    coding_agent.VERBATIM,
    azure.FORMAT,
)
SHOWN_CHARACTERS = 60


def detect_format(path: Path) -> Format:
    """Return the format of a trace file, judged by its first line that is not blank.

    Raises:
        TraceError: the file cannot be read, is empty, or is of no known format.
    """
    number, line = next(numbered_lines(path), (0, b""))
    if not number:
        raise TraceError(path, None, "the file is empty")
    keys: frozenset[str] = frozenset()
    shape = "text"
    if line.lstrip()[:1] in (b"{", b"["):
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            what = (
                f"unknown format: the line begins like JSON but is not one whole document ({error})"
                "; if a document spans lines, put it on one with: jq -c . FILE"
            )
            raise TraceError(path, number, what) from None
        shape = "JSON, but not an object"
        if isinstance(content, dict):
            keys = frozenset(content)
            shape = f"JSON with the keys {', '.join(sorted(keys)) or '(none)'}"
    for known in FORMATS:
        if known.recognises(line, keys):
            return known
    known_formats = "\n".join(
        f"  {known.name}: {known.title.partition(': ')[2]}" for known in FORMATS
    )
    what = f"unknown format: {shape}{_beginning(line)}. Known formats:\n{known_formats}"
    raise TraceError(path, number, what)


def _beginning(line: bytes) -> str:
    """Say how a line begins, if it is text."""
    try:
        text = line.decode()[:SHOWN_CHARACTERS].strip()
    except UnicodeDecodeError:
        return " that is not UTF-8 (a binary file?)"
    if not text.replace("\t", " ").isprintable():
        return " with control characters (a binary file?)"
    return f", beginning with {text!r}"


def require_format_with_ids(path: Path) -> None:
    """Raise unless the format of a trace records block ids: without them nothing is ever reused.

    Raises:
        TraceError: it does not; or as ``detect_format``.
    """
    found = detect_format(path)
    if not found.has_ids:
        what = (
            f"the format {found.name} records lengths only, no block ids: no block is ever reused, "
            "and there is nothing to replay or to count; choose a trace with ids (docs/traces.md), "
            "or generate one"
        )
        raise TraceError(path, None, what)


def open_trace(
    path: Path,
    *,
    mode: Mode,
    block_tokens: int | None = None,
    limit: int | None = None,
    sessions: int | None = None,
    progress: Progress | None = None,
) -> TraceStream:
    """Open a trace for reading request by request, in the order of the file.

    Args:
        path: the file, plain or gzip.
        mode: which blocks get ids.
        block_tokens: block size of the result, None for the trace's own. Refused where the trace
            does not determine the result exactly; needed where it has no block size.
        limit: read the first so many requests of the file only.
        sessions: read the first so many sessions of the file only.
        progress: called now and then with (bytes read, bytes in all).

    Raises:
        TraceError: also later, while requests are read, at the first bad line.
    """
    for option, value in (("limit", limit), ("sessions", sessions)):
        if value is not None and value < 1:
            raise TraceError(path, None, f"{option}={value}: ask for 1 or more, or leave it out")
    found = detect_format(path)
    stream = found.open(Asked(path, mode, block_tokens, progress))
    requests = stream.requests
    if sessions is not None:
        if not stream.has_sessions:
            what = f"sessions={sessions}: {found.name} records no sessions, use limit"
            raise TraceError(path, None, what)
        requests = _first_sessions(requests, sessions, contiguous=stream.sessions_contiguous)
    if limit is not None:
        requests = _first(requests, limit)
    return dataclasses.replace(stream, requests=requests)


def read_trace(
    path: Path,
    *,
    mode: Mode,
    block_tokens: int | None = None,
    limit: int | None = None,
    sessions: int | None = None,
    progress: Progress | None = None,
) -> Workload:
    """Return a trace as a workload, sorted by arrival. Arguments and errors as ``open_trace``.

    Memory is about 8 bytes a block reference: 0.7 GiB for 85 million.
    """
    stream = open_trace(
        path,
        mode=mode,
        block_tokens=block_tokens,
        limit=limit,
        sessions=sessions,
        progress=progress,
    )
    try:
        return Workload(
            name=stream.name,
            block_tokens=stream.block_tokens,
            mode=mode,
            requests=_by_arrival(list(stream.requests)),
            has_sessions=stream.has_sessions,
            has_ids=stream.has_ids,
        )
    except WorkloadError as error:
        raise TraceError(path, None, str(error)) from error


def _by_arrival(requests: list[Request]) -> tuple[Request, ...]:
    """Sort by arrival, keeping the file's order among equals, and number by position."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    position = {request.request_id: place for place, request in enumerate(ordered)}
    return tuple(
        request
        if request.request_id == place
        and (request.after is None or position[request.after] == request.after)
        else dataclasses.replace(
            request,
            request_id=place,
            after=None if request.after is None else position[request.after],
        )
        for place, request in enumerate(ordered)
    )


def _first(requests: Iterator[Request], limit: int) -> Iterator[Request]:
    for count, request in enumerate(requests, 1):
        yield request
        if count == limit:
            return


def _first_sessions(
    requests: Iterator[Request], sessions: int, *, contiguous: bool
) -> Iterator[Request]:
    seen: set[str] = set()
    for request in requests:
        if request.session not in seen:
            if len(seen) == sessions:
                if contiguous:
                    return
                continue
            seen.add(request.session)
        yield request
