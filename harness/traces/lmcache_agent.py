"""The lmcache-agent trace as 128-token prefix ids: one JSON object a line.

Fields: ``timestamp`` (ms), ``session_id``, ``turn``, ``input_length``, ``output_length``,
``hash_ids`` (full blocks only, global). Service times are not recorded: in a closed loop the
whole time since the arrival of the turn before counts as think time, an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

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

BLOCK_TOKENS = 128


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    session_id: int | str
    turn: Annotated[int, msgspec.Meta(ge=1)]
    input_length: Length
    output_length: Length
    hash_ids: list[int]


def open_lmcache_agent(asked: Asked) -> TraceStream:
    """Open an lmcache-agent trace."""
    blocking = asked.blocking(BLOCK_TOKENS, partial_recorded=False)
    return TraceStream(
        name=trace_name(asked.path),
        block_tokens=blocking.block_tokens,
        has_sessions=True,
        sessions_contiguous=False,
        has_ids=True,
        requests=_requests(asked, blocking),
    )


def _requests(asked: Asked, blocking: Blocking) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_Line)
    chains = Chains()
    previous: dict[str, Request] = {}
    lines = numbered_lines(asked.path, asked.progress)
    for request_id, (number, text) in enumerate(lines):
        line = decode_line(decoder, asked.path, number, text)
        expected = blocking.recorded(line.input_length)
        if len(line.hash_ids) != expected:
            raise TraceError(
                asked.path,
                number,
                f"{len(line.hash_ids)} hash_ids for input_length {line.input_length}: "
                f"there are {expected} full blocks of {BLOCK_TOKENS} tokens",
            )
        session = str(line.session_id)
        arrival_s = line.timestamp / 1000
        before = previous.get(session)
        if before is not None and (line.turn <= before.turn or arrival_s < before.arrival_s):
            raise TraceError(
                asked.path,
                number,
                f"session {session}: turn {line.turn} at {arrival_s} s follows turn "
                f"{before.turn} at {before.arrival_s} s; turns and times of a session go up",
            )
        chain: list[int] = []
        chains.extend(chain, line.hash_ids)
        request = Request(
            request_id=request_id,
            session=session,
            turn=line.turn,
            arrival_s=arrival_s,
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            block_ids=blocking.regroup(chain, line.input_length),
            think_s=0.0 if before is None else arrival_s - before.arrival_s,
            after=None if before is None else before.request_id,
        )
        previous[session] = request
        yield request


FORMAT = Format(
    name="lmcache-agent",
    title="lmcache-agent: JSON lines as Mooncake's with session_id and turn",
    recognises=lambda _, keys: {"timestamp", "hash_ids", "session_id", "turn"} <= keys,
    open=open_lmcache_agent,
)
