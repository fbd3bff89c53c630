"""The GPU's KV blocks: a pool with prefix caching, as vLLM keeps it.

A request takes all its blocks when it is admitted: those of its prompt that are cached are shared,
the rest come from the free ones, and from cached blocks that nobody uses, least recently freed
first. What a request frees stays cached under its key; tails are freed before heads, so that a
chain loses its tail first. Admission is first come, first served.

Units: blocks. Left out: preemption (a request takes the blocks of its whole answer at once, so it
never runs out), partial blocks under a key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cxlbench.emu.clock import Clock


class PromptTooLongError(ValueError):
    """A request needs more blocks than the pool has."""


@dataclass(slots=True, eq=False)
class _Waiting:
    keys: Sequence[bytes]
    reusable: int
    blocks: int
    turn: asyncio.Future[Holding]


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one request."""

    keys: Sequence[bytes]
    matched: int
    """Leading blocks that were cached."""
    blocks: int
    """In all."""
    keyed: int
    """Leading blocks that are shared under their keys."""


class GpuPool:
    """A fixed number of blocks, some of them cached by key."""

    def __init__(self, clock: Clock, blocks: int, *, caching: bool, name: str) -> None:
        self.name = name
        self.capacity = blocks
        self.caching = caching
        self.evicted = 0
        self.used_peak = 0
        self._clock = clock
        self._free = blocks
        """Blocks without a key that nobody uses."""
        self._users: dict[bytes, int] = {}
        """Of every keyed block in use."""
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        """Keyed blocks that nobody uses, those to go first at the front."""
        self._waiting: deque[_Waiting] = deque()

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.capacity - self._free - len(self._unused)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are cached."""
        users, unused = self._users, self._unused
        for index, key in enumerate(keys):
            if key not in users and key not in unused:
                return index
        return len(keys)

    async def admit(self, keys: Sequence[bytes], reusable: int, blocks: int) -> Holding:
        """Wait for ``blocks`` blocks; up to ``reusable`` leading ones of ``keys`` may be shared.

        Raises:
            PromptTooLongError: the pool is smaller than that.
        """
        if blocks > self.capacity:
            raise PromptTooLongError(
                f"{self.name}: a request needs {blocks} blocks, the GPU has room for "
                f"{self.capacity}; take shorter prompts, or a GPU with more memory"
            )
        if not self._waiting:
            holding = self._take(keys, reusable, blocks)
            if holding is not None:
                return holding
        waiting = _Waiting(keys, reusable, blocks, self._clock.future())
        self._waiting.append(waiting)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve()
            elif waiting.turn.done() and not waiting.turn.cancelled():
                self.free(waiting.turn.result())
            raise

    def publish(self, holding: Holding, upto: int) -> None:
        """Cache the first ``upto`` blocks of a request under their keys: they are computed."""
        if not self.caching:
            return
        users, unused = self._users, self._unused
        for key in holding.keys[holding.keyed : upto]:
            if key in users:
                users[key] += 1  # computed twice: one copy is enough
                self._free += 1
            elif key in unused:
                del unused[key]
                users[key] = 1
                self._free += 1
            else:
                users[key] = 1
        holding.keyed = max(holding.keyed, upto)
        self._serve()

    def free(self, holding: Holding) -> None:
        """Take a request's blocks back; those under a key stay cached, heads the longest."""
        users, unused = self._users, self._unused
        self._free += holding.blocks - holding.keyed
        for key in reversed(holding.keys[: holding.keyed]):
            users[key] -= 1
            if not users[key]:
                del users[key]
                unused[key] = None
        holding.blocks = holding.keyed = 0
        self._serve()

    def _take(self, keys: Sequence[bytes], reusable: int, blocks: int) -> Holding | None:
        matched = self.match(keys[:reusable]) if self.caching else 0
        users, unused = self._users, self._unused
        shared_unused = sum(key in unused for key in keys[:matched])
        if blocks - matched > self._free + len(unused) - shared_unused:
            return None
        for key in keys[:matched]:
            if key in unused:
                del unused[key]
                users[key] = 1
            else:
                users[key] += 1
        while self._free < blocks - matched:
            unused.popitem(last=False)
            self._free += 1
            self.evicted += 1
        self._free -= blocks - matched
        self.used_peak = max(self.used_peak, self.used)
        return Holding(keys, matched, blocks, matched)

    def _serve(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if first.turn.cancelled():
                self._waiting.popleft()
                continue
            holding = self._take(first.keys, first.reusable, first.blocks)
            if holding is None:
                return
            self._waiting.popleft()
            first.turn.set_result(holding)


class Users:
    """Counts who still needs a request's blocks; the last one frees them."""

    def __init__(self, pool: GpuPool, holding: Holding) -> None:
        self.holding = holding
        self._pool = pool
        self._count = 1

    def join(self) -> None:
        """Need them, too."""
        self._count += 1

    def leave(self) -> None:
        """Need them no more."""
        self._count -= 1
        if not self._count:
            self._pool.free(self.holding)
