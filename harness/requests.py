"""What every trace and generator becomes: requests with chained block ids, in one workload.

A block is ``block_tokens`` tokens of a prompt. Its id is *chained*: two equal ids mean that the
whole prompts up to and including that block are equal, so a hit on a block implies hits on all
blocks before it (HyMCache §2 and §4: prefix caching by whole blocks). Ids are integers that are
global to their workload; they say nothing about another workload.

A workload is in one of two named modes. *As recorded* holds every id that the trace records,
partial last blocks included where it records them: the references that trace statistics count.
*Whole blocks* holds only full blocks, as an engine stores and looks them up.

Units: seconds and tokens. ``arrival_s`` serves an open loop, ``after`` and ``think_s`` a closed
one. Left out: token ids and text (no public trace has both), service times, priorities.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class WorkloadError(ValueError):
    """A request or workload that makes no sense, or lacks what its user needs."""


class Mode(enum.StrEnum):
    """Which blocks of a prompt have an id in a workload."""

    AS_RECORDED = "as-recorded"
    WHOLE_BLOCKS = "whole-blocks"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the length of its answer.

    Attributes:
        request_id: position in ``Workload.requests``, from 0.
        session: the conversation it belongs to; sub-agents run in their parent's session.
        turn: from 1, counted within one conversation. A sub-agent is a conversation of its own,
            so (session, turn) need not be unique.
        arrival_s: time of arrival from the trace's start, by the trace's own clock.
        input_tokens: length of the whole prompt, history included. 0 and 1 are valid.
        output_tokens: length of the answer. 0 is valid.
        block_ids: chained ids of the prompt's leading blocks, 8 bytes of memory a reference.
        think_s: pause between the end of ``after`` and the start of this one in a closed loop.
        after: request of the same session which must end before this one starts in a closed
            loop, or None. It has a smaller ``request_id``.

    Raises:
        WorkloadError: a negative or infinite number, or a turn below 1.
    """

    request_id: int
    session: str
    turn: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    think_s: float = 0.0
    after: int | None = None

    def __post_init__(self) -> None:
        if self.request_id < 0:
            raise WorkloadError(f"request_id={self.request_id}: ids count from 0")
        if self.turn < 1:
            raise WorkloadError(f"request {self.request_id}: turn={self.turn}, turns count from 1")
        if self.input_tokens < 0 or self.output_tokens < 0:
            raise WorkloadError(
                f"request {self.request_id}: input_tokens={self.input_tokens}, "
                f"output_tokens={self.output_tokens}; lengths are 0 or more"
            )
        if not (0 <= self.arrival_s < math.inf and 0 <= self.think_s < math.inf):
            raise WorkloadError(
                f"request {self.request_id}: arrival_s={self.arrival_s}, "
                f"think_s={self.think_s}; times are finite, 0 or more"
            )

    def reusable_blocks(self, block_tokens: int) -> int:
        """Return how many leading blocks an engine may take from a cache.

        An engine computes at least the last token of a prompt, so a prompt that ends with a
        block's last token cannot reuse that block: 17 tokens in blocks of 16 reuse one block,
        16 tokens none. Never negative, also for an empty prompt.
        """
        return min(len(self.block_ids), max(0, self.input_tokens - 1) // block_tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, ready to be replayed.

    Attributes:
        name: what reports call it.
        block_tokens: tokens in a full block.
        mode: which blocks have ids.
        requests: sorted by (arrival_s, request_id); ``requests[i].request_id == i``.
        has_sessions: whether ``session``, ``turn``, ``after`` and ``think_s`` were recorded. If
            not, every request is a session of its own.
        has_ids: whether block ids were recorded. If not, no block is ever used twice.

    Raises:
        WorkloadError: requests out of order, a request with more blocks than its prompt has, or
            an ``after`` that does not name an earlier request of the same session.
    """

    name: str
    block_tokens: int
    mode: Mode
    requests: tuple[Request, ...]
    has_sessions: bool
    has_ids: bool = True

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise WorkloadError(f"block_tokens={self.block_tokens}: a block has 1 token or more")
        arrived_s = 0.0
        for position, request in enumerate(self.requests):
            if request.request_id != position or request.arrival_s < arrived_s:
                raise WorkloadError(
                    f"request {request.request_id} (arrival {request.arrival_s} s) stands at "
                    f"position {position} after an arrival at {arrived_s} s: requests are sorted "
                    "by arrival and numbered by position"
                )
            arrived_s = request.arrival_s
            allowed = blocks_of(request.input_tokens, self.block_tokens, self.mode)
            if len(request.block_ids) > allowed:
                raise WorkloadError(
                    f"request {position} has {len(request.block_ids)} block ids, but "
                    f"{request.input_tokens} tokens are at most {allowed} blocks of "
                    f"{self.block_tokens} in mode {self.mode}"
                )
            if request.after is not None and (
                not 0 <= request.after < position
                or self.requests[request.after].session != request.session
            ):
                raise WorkloadError(
                    f"request {position} waits for request {request.after}, which is not an "
                    f"earlier request of session {request.session!r}"
                )

    def sessions(self) -> dict[str, tuple[Request, ...]]:
        """Return each session's requests in order, sessions by their first arrival."""
        found: dict[str, list[Request]] = {}
        for request in self.requests:
            found.setdefault(request.session, []).append(request)
        return {session: tuple(requests) for session, requests in found.items()}

    def require_sessions(self, purpose: str) -> None:
        """Raise WorkloadError unless sessions were recorded; ``purpose`` is what needs them."""
        if not self.has_sessions:
            raise WorkloadError(
                f"{purpose} needs sessions, and {self.name!r} records none: replay it by its "
                "arrival times (open loop), or choose a workload with sessions"
            )

    def require_ids(self, purpose: str) -> None:
        """Raise WorkloadError unless block ids were recorded; ``purpose`` is what needs them."""
        if not self.has_ids:
            raise WorkloadError(
                f"{purpose} needs block ids, and {self.name!r} records lengths only: no block of "
                "it is ever reused; choose a workload with ids, or generate one"
            )


def blocks_of(input_tokens: int, block_tokens: int, mode: Mode) -> int:
    """Return how many blocks of a prompt can have an id: with the partial last one or without."""
    if mode is Mode.WHOLE_BLOCKS:
        return input_tokens // block_tokens
    return -(-input_tokens // block_tokens)
