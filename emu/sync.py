"""Waiting for each other under either clock: a one-shot signal, and a counted budget.

Both carry logical time: who waits continues from the moment at which the other side acted, not
from the moment at which Python woke it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar

from cxlbench.emu.clock import Clock

T = TypeVar("T")


class Signal(Generic[T]):
    """A value that is set once and may be awaited by many."""

    __slots__ = ("_at_s", "_clock", "_set", "_value", "_waiters")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._set = False
        self._at_s = 0.0
        self._value: T
        self._waiters: list[asyncio.Future[None]] = []

    def set(self, value: T) -> None:
        """Set the value; the first call wins, later ones do nothing."""
        if self._set:
            return
        self._set, self._value, self._at_s = True, value, self._clock.now()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def is_set(self) -> bool:
        """Whether the value is there."""
        return self._set

    def peek(self) -> T:
        """Return the value of a signal that is set."""
        if not self._set:
            raise LookupError("the signal is not set")
        return self._value

    async def wait(self) -> T:
        """Wait for the value."""
        if not self._set:
            waiter = self._clock.future()
            self._waiters.append(waiter)
            await waiter
        self._clock.advance(self._at_s)
        return self._value


class Budget:
    """A number of units that are taken and given back; waiters are served in order.

    ``take`` of more than ``capacity`` can never succeed and is refused. At rest,
    ``used == 0``.
    """

    def __init__(self, clock: Clock, capacity: int, *, name: str) -> None:
        if capacity < 0:
            raise ValueError(f"{name}: capacity must not be negative, got {capacity}")
        self._clock = clock
        self.name = name
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self._waiting: OrderedDict[asyncio.Future[float], int] = OrderedDict()

    @property
    def free(self) -> int:
        """Units that could be taken now."""
        return self.capacity - self.used

    def try_take(self, units: int) -> bool:
        """Take ``units`` if they are free and nobody waits before us."""
        if self._waiting or not 0 <= units <= self.capacity - self.used:
            return False
        self._grant(units)
        return True

    async def take(self, units: int) -> None:
        """Wait until ``units`` are free, and take them."""
        if not 0 <= units <= self.capacity:
            raise ValueError(f"{self.name}: {units} asked, capacity is {self.capacity}")
        if self.try_take(units):
            return
        turn = self._clock.future()
        self._waiting[turn] = units
        try:
            self._clock.advance(await turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(units)  # granted in the very moment of the cancellation
            else:
                self._waiting.pop(turn, None)
                self._serve()  # who waited behind us may fit
            raise

    def give(self, units: int) -> None:
        """Give ``units`` back and serve those who wait."""
        if not 0 <= units <= self.used:
            raise ValueError(f"{self.name}: {units} given back, only {self.used} are out")
        self.used -= units
        self._serve()

    def _grant(self, units: int) -> None:
        self.used += units
        self.peak = max(self.peak, self.used)

    def _serve(self) -> None:
        while self._waiting:
            turn, units = next(iter(self._waiting.items()))
            if turn.cancelled():  # its task has been cancelled, but has not run yet
                del self._waiting[turn]
                continue
            if units > self.capacity - self.used:
                return
            del self._waiting[turn]
            self._grant(units)
            turn.set_result(self._clock.now())
