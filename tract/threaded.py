"""A process of a live pod whose programs run in a thread, so that a connector can await them.

A live pod's programs are compiled and block: they spin for locks and wait for DMA. Here they run
one at a time in a thread of their own, without the interpreter lock; one at a time, since a process
has one place in its node, and so one handle. The clock is a wall clock.

Left out: copies that go on while a program waits for a lock (use a process per worker for that).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cxlbench.emu.clock import WallClock
from cxlbench.tract.region import call


class ThreadedNode:
    """Satisfies ``copying.ProgramRunner`` for one process's memory handle; ``close`` it at last."""

    def __init__(self, clock: WallClock, mem: Any) -> None:
        self._clock = clock
        self._mem = mem
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pod programs")

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(mem, *args)`` after those asked for earlier, and return its result."""
        loop = self._clock.loop
        result = await loop.run_in_executor(self._thread, call, function, self._mem, *args)
        self._clock.advance(self._clock.real())
        return result

    def close(self) -> None:
        """Wait for the program that is running, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
