"""What counts as a bug without any annotation: a load that goes back behind what its task knows.

Happens-before is kept per *task incarnation* by vector clocks: program order, releases and
acquires of node-local locks, and reads-from: a load that returns a store knows what its writer
knew. Inside a node too: tasks of one node that do not speak to each other are not ordered.

A **violation** is a load that returns store ``s`` although some store ``x`` to the same word has
``s`` before ``x`` before the load, ``x`` not ``s``. Concurrent stores are not older. The initial
value is before everything. A task's own stores count. Stores are compared, never values.

A word of a DMA takes its place when the DMA is issued; who reads it knows what the issuer knew
before, so that the words of one DMA are not ordered among themselves. What a DMA read returns is
judged by what its issuer knew when it was issued.

Cheap by construction: an incarnation's own component counts stores and lies in ``tick``; what it
knows of the others is one tuple, replaced when it learns something and shared by all stores in
between, so that a store costs the same for any number of tasks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cxlbench.emu.pod_model import BY_DMA, CACHED, ZERO, Clock, Store

ALWAYS: Final = sys.maxsize
"""What an incarnation knows of itself, in ``known``: all that it has done so far."""


class Cause(StrEnum):
    """Why a load returned an old store, judged when the reader first knew of the newer one."""

    NEVER_FLUSHED = "never flushed"
    POSTED = "posted"
    DMA_INCOMPLETE = "DMA incomplete"
    OVERWRITTEN = "overwritten"
    NO_INVALIDATE = "no invalidate"


EXPLANATIONS: Final = {
    Cause.NEVER_FLUSHED: "the writer had not flushed its store when the reader came to know of it",
    Cause.POSTED: "the writer's flush was posted and had not arrived in the device when the reader"
    " came to know of the store; a fence does not wait for arrival, clflush does",
    Cause.DMA_INCOMPLETE: "the DMA that stores it was not complete when the reader came to know of"
    " it; wait for completion before publishing",
    Cause.OVERWRITTEN: "the store had arrived, and then a whole-line write-back put an older value"
    " over it: two nodes write to one line",
    Cause.NO_INVALIDATE: "the store had arrived, but the reader's node held an older copy of the"
    " line; flush the line before the load",
}


REGRESS_EXPLANATIONS: Final = {
    Cause.NEVER_FLUSHED: "of the two stores on that line, the first had not been flushed when the"
    " second was made; flush it before it is told of",
    Cause.POSTED: "of the two stores on that line, the flush of the first was posted and had not"
    " arrived when the second was made; a fence does not wait for arrival, clflush does",
    Cause.DMA_INCOMPLETE: "the DMA was not complete when the other store was made; wait for"
    " completion before publishing",
    Cause.NO_INVALIDATE: "the newer store had arrived, but the store that went out was made on an"
    " older copy of the line; flush the line before the store",
    Cause.OVERWRITTEN: "two nodes store to one line, and nothing orders them",
}
"""Why a write-back put an older word in the place of a newer one."""


@dataclass(frozen=True, slots=True)
class StaleLoad:
    """A violation: the load of ``word`` returned ``got`` although its task knew of ``missed``."""

    word: int
    got: Store
    missed: Store


def before(a: Store, b: Store) -> bool:
    """Return whether store ``a`` happens before store ``b``."""
    if a.writer == b.writer:
        return a.tick < b.tick
    return a.writer < len(b.known) and a.tick <= b.known[a.writer]


class History:
    """All stores of a run to each word, in the order in which they were made."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: dict[int, Store] = {}
        """The first store to a word over ``ZERO``."""
        self.last: dict[int, Store] = {}

    def preset(self, word: int, value: int) -> Store:
        """Give ``word`` an initial value that is before everything."""
        stored = Store(value, 0, 0, (0,), CACHED)
        self.last[word] = stored
        return stored

    def add(self, word: int, stored: Store) -> Store | None:
        """Append ``stored``; return the store before it, if there is any."""
        last = self.last.get(word)
        if last is None:
            self.first[word] = stored
        else:
            last.newer = stored
        self.last[word] = stored
        return last

    def missed(self, got: Store, word: int, known: Clock) -> Store | None:
        """Return the newest store after ``got`` that ``known`` covers and that is not concurrent.

        ``None`` says that a load of ``word`` by a task that knows ``known`` may return ``got``.
        """
        newer = self.first.get(word) if got is ZERO else got.newer
        found = None
        while newer is not None:
            writer = newer.writer
            if (
                writer < len(known)
                and newer.tick <= known[writer]
                and got.tick <= newer.known[got.writer]
            ):
                found = newer
            newer = newer.newer
        return found


class Incarnation:
    """The clock of one task from its start to its end; a restarted task is a new incarnation."""

    __slots__ = ("index", "joins", "known", "tick")

    def __init__(self, index: int, known: Clock = ()) -> None:
        self.index = index
        self.tick = 0
        self.known = known + (0,) * (index - len(known)) + (ALWAYS,)
        """Entry ``i`` is how many stores of incarnation ``i`` this one knows of."""
        self.joins: list[tuple[int, Clock]] | None = None
        """If it is a list: what was known from which step on, for the judgement of causes."""

    def room_for(self, index: int) -> None:
        """Widen ``known`` for incarnations up to ``index``."""
        self.known += (0,) * (index + 1 - len(self.known))

    def write(self, value: int, how: int = CACHED) -> Store:
        """Return a new store, made now."""
        self.tick = tick = self.tick + 1
        return Store(value, self.index, tick, self.known, how)

    def dma_writes(self, values: list[int]) -> list[Store]:
        """Return the stores of one DMA, issued now."""
        self.tick = tick = self.tick + 1
        return [Store(value, self.index, tick, self.known, BY_DMA) for value in values]

    def as_of_now(self) -> Clock:
        """Return what it knows at this moment, its own stores counted and not more."""
        return (*self.known[: self.index], self.tick, *self.known[self.index + 1 :])

    def knows(self, stored: Store) -> bool:
        """Return whether ``stored`` is before what this incarnation does next."""
        return stored.tick <= self.known[stored.writer]

    def join(self, stored: Store) -> bool:
        """Learn what the writer of ``stored`` knew when it stored; return whether that was news."""
        mine = self.known
        theirs = stored.known
        merged = [a if a > b else b for a, b in zip(mine, theirs, strict=False)]
        if len(theirs) < len(mine):
            merged += mine[len(theirs) :]
        writer = stored.writer
        gained = stored.tick - 1 if stored.how == BY_DMA else stored.tick
        merged[writer] = gained if gained > mine[writer] else mine[writer]
        merged[self.index] = ALWAYS
        known = tuple(merged)
        if known == mine:
            return False
        self.known = known
        return True

    def first_knew(self, stored: Store) -> int:
        """Return the step at which it came to know of ``stored``; needs ``joins``."""
        for step, known in self.joins or ():
            if stored.writer < len(known) and stored.tick <= known[stored.writer]:
                return step
        return 0
