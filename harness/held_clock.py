"""Clocks that are driven a piece at a time, from code that is not on them.

``Clock.run`` ends everything when its work ends. A test or a benchmark that calls a tier like a
library wants the tier's background work (flushes, leases) to stay alive between two calls, and to
stand still meanwhile: ``drive`` runs the loop just until its work has ended. A crash in the
background ends the current or the next ``drive`` with that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from cxlbench.emu.clock import Clock, DeadlockError, VirtualClock, WallClock

T = TypeVar("T")


class _Held(Clock):
    """What both clocks add."""

    _driven: asyncio.Task[Any] | None = None
    _background_error: BaseException | None = None

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop until ``work`` has ended, and return its result."""
        loop = self.loop
        self._driven = task = loop.create_task(work)
        try:
            result = loop.run_until_complete(task)
        except (asyncio.CancelledError, DeadlockError):
            self._raise_background_error()
            raise
        finally:
            self._driven = None
            if not task.done():
                task.cancel()
        self._raise_background_error()
        return result

    def fail(self, error: BaseException) -> None:
        """Note that a background task has crashed, and end what is driven."""
        self._background_error = self._background_error or error
        if self._driven is not None:
            self._driven.cancel()

    def _raise_background_error(self) -> None:
        error, self._background_error = self._background_error, None
        if error is not None:
            raise error


class HeldVirtualClock(_Held, VirtualClock):
    """Virtual time that stands still between two calls of ``drive``."""


class HeldWallClock(_Held, WallClock):
    """Real time. Deadlines that pass between two calls are found late by the next one."""
