"""Who may be scheduled next: one request at a time, in order, while a step has tokens left.

An engine looks a waiting request up in its caches when it schedules it, and schedules it only while
the next step's token budget is not spent (vLLM's scheduler does both in that order). So a request
that waits behind others finds what they have computed by then. Requests that load KV from a tier
leave their turn when the load begins: a load takes no tokens.

Units: none. Left out: priorities.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cxlbench.emu.clock import Clock


class Admission:
    """A turnstile: ``enter`` waits for the turn, ``leave`` passes it on."""

    def __init__(self, clock: Clock, is_open: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_open = is_open
        self._taken = False
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def enter(self) -> None:
        """Wait for the turn, first come, first served."""
        if not self._taken and not self._waiting and self._is_open():
            self._taken = True
            return
        turn: asyncio.Future[float] = self._clock.future()
        self._waiting.append(turn)
        try:
            self._clock.advance(await turn)
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Give the turn up."""
        self._taken = False
        self.look()

    def look(self) -> None:
        """Let the next one in, if there may be one now."""
        while self._waiting and not self._taken and self._is_open():
            turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._taken = True
            turn.set_result(self._clock.now())


class Turn:
    """One request's turn, which may be given up from several places, once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held = False

    async def take(self) -> None:
        """Wait for it."""
        await self._admission.enter()
        self._held = True

    def give(self) -> None:
        """Give it up; does nothing the second time."""
        if self._held:
            self._held = False
            self._admission.leave()
