"""The bench's own workload format: a header line, then one JSON object a request.

The header says what the file is: ``format`` ("cxlbench-workload"), ``version``, ``name``,
``block_tokens``, ``mode``, ``has_sessions``, ``has_ids``, ``requests`` (how many follow). A
request line has the fields of ``Request`` in seconds and tokens, with ``block_runs`` in place of
the ids: runs of [first id, count], which keeps multi-turn files small.

Reading back gives the workload that was written, block for block. The ids must be chained; a file
in which one id stands behind two different blocks is refused.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.traces.blocks import ROOT, Blocking
from cxlbench.harness.traces.lines import (
    Length,
    Progress,
    Seconds,
    TraceError,
    decode_line,
    numbered_lines,
)
from cxlbench.harness.traces.stream import Asked, Format, TraceStream

FORMAT_NAME = "cxlbench-workload"
VERSION = 1


class _Header(msgspec.Struct):
    format: str
    version: int
    name: str
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    mode: Mode
    has_sessions: bool
    has_ids: bool
    requests: Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    request_id: int
    session: str
    turn: Annotated[int, msgspec.Meta(ge=1)]
    arrival_s: Seconds
    input_tokens: Length
    output_tokens: Length
    think_s: Seconds
    after: Annotated[int, msgspec.Meta(ge=0)] | None
    block_runs: list[tuple[int, Length]]


def write_workload(workload: Workload, path: Path, *, progress: Progress | None = None) -> None:
    """Write a workload to ``path``, gzip if the name ends in ``.gz``; the same bytes every time.

    The file appears complete or not at all; a link stays one, and what is no file (a pipe, a
    device) is written into. ``progress`` is told requests written, and in all.

    Raises:
        TraceError: the file cannot be written.
    """
    if not path.name:
        raise TraceError(path, None, "is no name of a file")
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            _write_file(workload, target, path.suffix, progress)
            return
        unfinished = target.with_name(f"{target.name}.unfinished")
        try:
            _write_file(workload, unfinished, path.suffix, progress)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(path, None, f"cannot be written: {error.strerror or error}") from error


def _write_file(workload: Workload, path: Path, suffix: str, progress: Progress | None) -> None:
    with path.open("wb") as raw:
        if suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                _write_lines(workload, cast("BinaryIO", packed), progress)
        else:
            _write_lines(workload, raw, progress)


def _write_lines(workload: Workload, out: BinaryIO, progress: Progress | None) -> None:
    encoder = msgspec.json.Encoder()
    header = _Header(
        format=FORMAT_NAME,
        version=VERSION,
        name=workload.name,
        block_tokens=workload.block_tokens,
        mode=workload.mode,
        has_sessions=workload.has_sessions,
        has_ids=workload.has_ids,
        requests=len(workload.requests),
    )
    out.write(encoder.encode(header) + b"\n")
    for number, request in enumerate(workload.requests, 1):
        line = _Line(
            request_id=request.request_id,
            session=request.session,
            turn=request.turn,
            arrival_s=request.arrival_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            think_s=request.think_s,
            after=request.after,
            block_runs=_runs(request.block_ids),
        )
        out.write(encoder.encode(line) + b"\n")
        if progress is not None:
            progress(number, len(workload.requests))


def _runs(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        first, count = runs[-1] if runs else (block, 0)
        if runs and block == first + count:
            runs[-1] = (first, count + 1)
        else:
            runs.append((block, 1))
    return runs


def open_own(asked: Asked) -> TraceStream:
    """Open a file that ``write_workload`` wrote."""
    lines = numbered_lines(asked.path, asked.progress)
    number, text = next(lines, (1, b""))
    header = decode_line(msgspec.json.Decoder(_Header), asked.path, number, text)
    if header.format != FORMAT_NAME or header.version != VERSION:
        raise TraceError(
            asked.path,
            number,
            f"format {header.format!r} version {header.version}; this version of cxlbench reads "
            f"{FORMAT_NAME!r} version {VERSION}: generate the file again",
        )
    blocking = asked.blocking(header.block_tokens, partial_recorded=header.mode is Mode.AS_RECORDED)
    return TraceStream(
        name=header.name,
        block_tokens=blocking.block_tokens,
        has_sessions=header.has_sessions,
        sessions_contiguous=False,
        has_ids=header.has_ids,
        requests=_requests(asked, blocking, header, lines),
    )


def _requests(
    asked: Asked, blocking: Blocking, header: _Header, lines: Iterator[tuple[int, bytes]]
) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_Line)
    parents: dict[int, int] = {}
    count = 0
    number = 1
    for number, text in lines:
        line = decode_line(decoder, asked.path, number, text)
        if line.request_id != count:
            what = f"request_id {line.request_id} where {count} is expected"
            raise TraceError(asked.path, number, what)
        if line.after is not None and line.after >= count:
            what = f"after={line.after} is not an earlier request"
            raise TraceError(asked.path, number, what)
        recorded = blocking.recorded(line.input_tokens)
        total = sum(length for _, length in line.block_runs)
        if total > recorded:
            raise TraceError(
                asked.path,
                number,
                f"{total} block ids for {line.input_tokens} tokens: there are at most {recorded}",
            )
        chain = [
            block for first, length in line.block_runs for block in range(first, first + length)
        ]
        _check_chained(chain, parents, asked.path, number)
        yield Request(
            request_id=line.request_id,
            session=line.session,
            turn=line.turn,
            arrival_s=line.arrival_s,
            input_tokens=line.input_tokens,
            output_tokens=line.output_tokens,
            block_ids=blocking.regroup(chain, line.input_tokens),
            think_s=line.think_s,
            after=line.after,
        )
        count += 1
    if count != header.requests:
        raise TraceError(
            asked.path,
            number,
            f"the file ends after {count} requests, its header says {header.requests}: truncated",
        )


def _check_chained(chain: list[int], parents: dict[int, int], path: Path, number: int) -> None:
    parent = ROOT
    for block in chain:
        if parents.setdefault(block, parent) != parent:
            what = f"block id {block} stands behind two different blocks: ids must be chained"
            raise TraceError(path, number, what)
        parent = block


FORMAT = Format(
    name="cxlbench",
    title="cxlbench workload: JSON lines, the first with format and version",
    recognises=lambda line, keys: {"format", "version"} <= keys and FORMAT_NAME.encode() in line,
    open=open_own,
)
