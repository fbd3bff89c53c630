"""Coding-agent sessions (kv-cache-tester's cc traces): one JSON session a line, 64-token blocks.

A session has ``requests[]``, each a call or a sub-agent. A call has ``t`` (s from the session's
start), ``in`` and ``out`` (tokens), ``api_time`` (s, may be missing) and its full blocks, either
verbatim (``hash_ids``) or as a delta against the call before it in the same list: ``keep`` leading
blocks of that one, then ``new`` runs of [first id, count]. Ids of scope "local" are comparable
only inside their session.

A sub-agent has its own ``requests[]`` with ``t`` from 0. Its own ``t`` is the time at which it
completed, so it began ``duration_ms`` earlier; where that is null, as long as its calls took. A
sub-agent of status "async_launched" has its launch time as ``t``, and nobody waits for it.

Closed loop: a call waits for whichever of these ended last: the call before it in its list, and
the last calls of the sub-agents recorded between the two. The first call of a sub-agent waits for
the parent's last call at the sub-agent's start. A call ends ``api_time`` after its start, at once
where that is missing; the rest of the gap is think time.

Every session starts at 0 by this clock: the trace does not say how sessions lie to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain as joined
from typing import Annotated

import msgspec

from cxlbench.harness.requests import Request
from cxlbench.harness.traces.blocks import Blocking, Chains
from cxlbench.harness.traces.lines import (
    Length,
    Milliseconds,
    Seconds,
    TraceError,
    decode_line,
    numbered_lines,
)
from cxlbench.harness.traces.stream import Asked, Format, TraceStream, trace_name

ASYNC_STATUS = "async_launched"


class _Call(msgspec.Struct, tag_field="type"):
    t: Seconds
    input_tokens: Length = msgspec.field(name="in")
    out: Length
    hash_ids: list[int] | None = None
    keep: Length | None = None
    new: list[tuple[int, Length]] | None = None
    api_time: Seconds | None = None


class _Whole(_Call, tag="n"):
    pass


class _Streamed(_Call, tag="s"):
    pass


class _SubAgent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    requests: list[_Whole | _Streamed | _SubAgent]
    duration_ms: Milliseconds | None = None
    status: str = ""


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    hash_id_scope: str
    requests: list[_Whole | _Streamed | _SubAgent]


@dataclass(frozen=True, slots=True)
class _Done:
    """A call as those that come after it see it."""

    request_id: int
    arrival_s: float
    end_s: float


class _Walk:
    """Turns one session into requests, in the order of the file."""

    def __init__(self, asked: Asked, line: int, blocking: Blocking, chains: Chains) -> None:
        self._asked = asked
        self._line = line
        self._blocking = blocking
        self._chains = chains
        self._session = ""
        self.requests: list[Request] = []
        self.next_id = 0

    def session(self, session: _Session, first_id: int) -> list[Request]:
        self._session = session.id
        self.next_id = first_id
        self._conversation(session.requests, 0.0, None)
        return self.requests

    def _conversation(
        self, entries: list[_Whole | _Streamed | _SubAgent], start_s: float, entered: _Done | None
    ) -> _Done | None:
        """Add the calls of one list that starts at ``start_s``; return the call it ends with."""
        latest = entered
        own: list[_Done] = []
        blocks: list[int] = []
        clock_s = 0.0
        for entry in entries:
            if entry.t < clock_s:
                raise self._error(f"an entry at t={entry.t} follows one at t={clock_s}")
            clock_s = entry.t
            if isinstance(entry, _SubAgent):
                ended = self._sub_agent(entry, start_s, own, entered)
                if ended is None or entry.status == ASYNC_STATUS:
                    continue
                if latest is None or ended.end_s >= latest.end_s:
                    latest = ended
                continue
            arrival_s = start_s + entry.t
            if latest is not None and latest.arrival_s > arrival_s:
                latest = own[-1] if own else entered
            blocks = self._blocks(entry, blocks)
            self.requests.append(
                Request(
                    request_id=self.next_id,
                    session=self._session,
                    turn=len(own) + 1,
                    arrival_s=arrival_s,
                    input_tokens=entry.input_tokens,
                    output_tokens=entry.out,
                    block_ids=self._blocking.regroup(blocks, entry.input_tokens),
                    think_s=0.0 if latest is None else max(0.0, arrival_s - latest.end_s),
                    after=None if latest is None else latest.request_id,
                )
            )
            latest = _Done(self.next_id, arrival_s, arrival_s + (entry.api_time or 0.0))
            own.append(latest)
            self.next_id += 1
        return latest

    def _sub_agent(
        self, agent: _SubAgent, start_s: float, parents: list[_Done], entered: _Done | None
    ) -> _Done | None:
        """Add a sub-agent's calls; return the one it ends with, or None if it made none."""
        if not agent.requests:
            return None
        begin_s = start_s + agent.t
        if agent.status != ASYNC_STATUS:
            begin_s = max(start_s, begin_s - _span_s(agent))
        parent = next((done for done in reversed(parents) if done.arrival_s <= begin_s), entered)
        return self._conversation(agent.requests, begin_s, parent)

    def _blocks(self, call: _Call, before: list[int]) -> list[int]:
        """Return the chained native ids of a call, given those of the call before it."""
        expected = self._blocking.recorded(call.input_tokens)
        if call.hash_ids is not None:
            kept, runs, count = 0, [], len(call.hash_ids)
        elif call.keep is not None and call.new is not None:
            kept, runs = call.keep, call.new
            count = kept + sum(length for _, length in runs)
        else:
            raise self._error(f"the call at t={call.t} has neither hash_ids nor keep and new")
        if kept > len(before):
            raise self._error(
                f"the call at t={call.t} keeps {kept} blocks, but the one before has {len(before)}"
            )
        if count != expected:
            raise self._error(
                f"the call at t={call.t} has {count} block ids for {call.input_tokens} input "
                f"tokens: there are {expected} full blocks of {self._blocking.native_tokens}"
            )
        blocks = before[:kept]
        if call.hash_ids is not None:
            self._chains.extend(blocks, call.hash_ids)
        for first, length in runs:
            self._chains.extend(blocks, range(first, first + length))
        return blocks

    def _error(self, what: str) -> TraceError:
        return TraceError(self._asked.path, self._line, f"session {self._session!r}: {what}")


def _span_s(agent: _SubAgent) -> float:
    """Return how long a sub-agent ran: as recorded, but at least up to its last call."""
    calls = [entry for entry in agent.requests if not isinstance(entry, _SubAgent)]
    if agent.duration_ms is None:
        return max((call.t + (call.api_time or 0.0) for call in calls), default=0.0)
    return max([agent.duration_ms / 1000, *(entry.t for entry in agent.requests)])


def open_coding_agent(asked: Asked) -> TraceStream:
    """Open a file of coding-agent sessions, verbatim or delta. One session is held at a time."""
    decoder = msgspec.json.Decoder(_Session)
    lines = numbered_lines(asked.path, asked.progress)
    number, text = next(lines, (1, b""))
    first = decode_line(decoder, asked.path, number, text)
    blocking = asked.blocking(first.block_size, partial_recorded=False)
    return TraceStream(
        name=trace_name(asked.path),
        block_tokens=blocking.block_tokens,
        has_sessions=True,
        sessions_contiguous=True,
        has_ids=True,
        requests=_requests(asked, blocking, decoder, joined([(number, text)], lines)),
    )


def _requests(
    asked: Asked,
    blocking: Blocking,
    decoder: msgspec.json.Decoder[_Session],
    lines: Iterator[tuple[int, bytes]],
) -> Iterator[Request]:
    chains = Chains()
    seen: set[str] = set()
    next_id = 0
    for number, text in lines:
        if asked.only_lines is not None and number not in asked.only_lines:
            continue
        session = decode_line(decoder, asked.path, number, text)
        if session.id in seen:
            raise TraceError(asked.path, number, f"session {session.id!r} is there twice")
        seen.add(session.id)
        if session.block_size != blocking.native_tokens:
            raise TraceError(
                asked.path,
                number,
                f"block_size {session.block_size} after {blocking.native_tokens} before",
            )
        if session.hash_id_scope == "local":
            chains.new_scope()
        elif session.hash_id_scope != "global":
            what = f"hash_id_scope {session.hash_id_scope!r} is neither 'local' nor 'global'"
            raise TraceError(asked.path, number, what)
        walk = _Walk(asked, number, blocking, chains)
        yield from walk.session(session, next_id)
        next_id = walk.next_id


VERBATIM = Format(
    name="coding-agent",
    title="coding agent: JSON lines, a session each, with id, block_size, requests",
    recognises=lambda line, keys: {"block_size", "requests"} <= keys and b'"keep"' not in line,
    open=open_coding_agent,
)
DELTA = Format(
    name="coding-agent-delta",
    title="coding agent, delta: JSON lines, a session each, with keep and new for hash_ids",
    recognises=lambda line, keys: {"block_size", "requests"} <= keys and b'"keep"' in line,
    open=open_coding_agent,
)
