"""The contract between a serving engine and a KV-cache tier.

Who calls: the engine's scheduler and worker, from one thread (an adapter brings calls from other
threads to it). Nothing here blocks: ``submit_*`` only takes note and returns a ticket, work goes
on in the tier's own tasks, ``poll`` hands out what has ended. That fits a scheduler's loop, the
virtual clock and a tier without a server (TraCT) alike.

The life of one request (HyMCache §4.3):

1. ``submit_lookup``, once for a request id, with the keys of its *whole* prefix chain, heads first,
   and how many of them the engine has already. Ends with the number of further leading blocks that
   the tier will try to deliver. It may start prefetching.
2. ``submit_load`` with buffers for some or all of those blocks, in order, when the lookup has ended
   (earlier, or after ``release``, it raises ``ValueError``). Ends with one result per key; a buffer
   whose result is not HIT holds garbage and must not be used.
3. ``submit_store`` with blocks that the engine computed; any number of times, also without lookup,
   also after ``release``: it holds nothing under the request's id once its ticket has ended.
4. ``release`` in every case (finished, aborted, failed): gives back all that the lookup and the
   loads of the request hold in the tier. Their tickets still open end, with CANCELLED for what was
   not done; stores go on.

A ticket's ``done`` tells which piece of work has ended; ``poll`` names only request and kind.

Buffers belong to the tier from submit to completion, and to the engine otherwise. After ``release``
the tier may still write into a load's buffer until that load's ticket has ended.

A result is never wrong data: whatever fails, a key's result is a miss of some kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Signal
from cxlbench.kv.results import KeyResult


class Work(Enum):
    """What a ticket stands for."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one ticket: a result for each key, in the order submitted."""

    request_id: int
    work: Work
    results: tuple[KeyResult, ...]

    @property
    def leading_hits(self) -> int:
        """How many blocks from the first on are HIT: what a prefix cache can use."""
        for index, result in enumerate(self.results):
            if result is not KeyResult.HIT:
                return index
        return len(self.results)


@dataclass(eq=False, slots=True)
class Ticket:
    """A submitted piece of work. ``done`` can be awaited by code that lives on the clock."""

    request_id: int
    work: Work
    done: Signal[Completion]


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """When a block's read was asked for, and when its verified bytes were in place, s.

    ``due_s`` is when the emulated hardware would have had them; the rest is the host's lateness.
    """

    request_id: int
    asked_s: float
    due_s: float
    done_s: float
    nbytes: int


class Connector(Protocol):
    """A KV-cache tier as an engine sees it."""

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        """Ask how many blocks from ``matched`` on (of ``size_bytes`` each) can be delivered.

        ``keys`` is the whole chain; its first ``matched`` blocks are already in the engine's own
        cache. They are not looked up, but count as used, so that a chain does not lose its head.
        The completion has results for ``keys[matched:]``.
        """

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Deliver ``keys`` into ``buffers``, in order; needs this request's lookup to have ended.

        Keys that the lookup did not find are MISS.
        """

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        """Store blocks, heads first. ``keys`` are consecutive blocks of one chain.

        After a lookup of the same request they go to the device of its last hit block.
        """

    def release(self, request_id: int) -> None:
        """Give back all that the request holds. Unknown or released ids are no error."""

    def poll(self) -> list[Completion]:
        """Return what has ended since the last call.

        The end of every ticket is kept until it was returned here, also if its ``done`` was
        awaited: whoever only awaits tickets must call this now and then and drop the answer.
        """

    def at_rest(self) -> dict[str, int]:
        """Count what is held, by name; all zero when no request is open."""

    async def close(self) -> None:
        """End all work within a deadline and give everything back."""


def held(connector: Any) -> dict[str, int]:
    """Return what ``connector`` still holds: the counts of ``at_rest`` that are not zero."""
    return {name: count for name, count in connector.at_rest().items() if count}
