"""Mooncake's open request traces (FAST'25): one JSON object a line, in blocks of 512 tokens.

Fields: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (global prefix ids,
the last one of a partial block). There is no session field, so every request is a session of its
own and only an open loop makes sense. Timestamps need not be ordered: ``read_trace`` sorts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cxlbench.harness.requests import Request
from cxlbench.harness.traces.blocks import Blocking, Chains
from cxlbench.harness.traces.lines import (
    Length,
    Milliseconds,
    TraceError,
    decode_line,
    numbered_lines,
)
from cxlbench.harness.traces.stream import Asked, Format, TraceStream, trace_name

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Length
    output_length: Length
    hash_ids: list[int]


def open_mooncake(asked: Asked) -> TraceStream:
    """Open a Mooncake trace."""
    blocking = asked.blocking(BLOCK_TOKENS, partial_recorded=True)
    return TraceStream(
        name=trace_name(asked.path),
        block_tokens=blocking.block_tokens,
        has_sessions=False,
        sessions_contiguous=True,
        has_ids=True,
        requests=_requests(asked, blocking),
    )


def _requests(asked: Asked, blocking: Blocking) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_Line)
    chains = Chains()
    lines = numbered_lines(asked.path, asked.progress)
    for request_id, (number, text) in enumerate(lines):
        line = decode_line(decoder, asked.path, number, text)
        expected = blocking.recorded(line.input_length)
        if len(line.hash_ids) != expected:
            raise TraceError(
                asked.path,
                number,
                f"{len(line.hash_ids)} hash_ids for input_length {line.input_length}: "
                f"in blocks of {BLOCK_TOKENS} tokens there are {expected}",
            )
        chain: list[int] = []
        chains.extend(chain, line.hash_ids)
        yield Request(
            request_id=request_id,
            session=str(request_id),
            turn=1,
            arrival_s=line.timestamp / 1000,
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            block_ids=blocking.regroup(chain, line.input_length),
        )


FORMAT = Format(
    name="mooncake",
    title="Mooncake: JSON lines with timestamp, input_length, output_length, hash_ids",
    recognises=lambda _, keys: {"timestamp", "hash_ids"} <= keys and "session_id" not in keys,
    open=open_mooncake,
)
