"""Programs of the pod under a clock: every operation charged, the loop entered only where it must.

The same program text as everywhere, interpreted, as tasks of ``emu/clock.py``. A program is a plain
function; here it runs on a greenlet of its own, so that it can wait in the middle of an operation.
Loads, stores and flushes take effect at once and add what they cost to the task's *debt*. The task
pays (sleeps) where others could see the difference:

* ``pause``: it sleeps until something changed in the range, then goes on with its poll, which is
  charged as the program makes it: one poll, however long the wait was;
* DMA: booked on the device's pipe, which all nodes share;
* lock words: the flush of a line given to ``lock_words`` lands when it is paid for, and a critical
  section ends when its work is;
* ``now``, contended local locks, the end of the program.

In between a task runs ahead of the clock by its debt. That moves what it does by microseconds and
never makes an interleaving that could not be. Deterministic under the virtual clock. Under the wall
clock the same text runs in real time, in one process.

Costs are plain numbers, in s and bytes/s: whoever knows a device's profile hands them in. Left out:
contention of single lines for bandwidth, capacity of caches, crashes (the explorer has them).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent, greenlet

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_ops import LINE, WORD
from cxlbench.emu.pod_virtual_device import (
    DirectMemory,
    VirtualCache,
    VirtualDevice,
    Watches,
)
from cxlbench.emu.pod_virtual_memory import NOW, Dma, LocalLock, VirtualMemory, lines_of

ARRIVAL_GRAIN_S = 1e-9
"""Arrival times spread log-uniformly above this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCosts:
    """What operations take, s; ``bytes_per_s`` is the bandwidth of the shared device for DMA.

    ``fill_s`` is a load or store whose line is not in the node's cache, ``hit_s`` one whose line
    is; ``flush_s`` the flush of a dirty line, ``invalidate_s`` of any other; ``local_s`` an
    operation on node-local DRAM; ``dma_latency_s`` comes on top of a DMA's bytes. What is posted
    lands between ``arrival_shortest_s`` and ``arrival_longest_s`` later, log-uniformly: by what is
    drawn from the pod's seed, and after ``flush_s`` if neither is given.
    """

    fill_s: float
    flush_s: float
    invalidate_s: float
    bytes_per_s: float
    dma_latency_s: float
    hit_s: float = 0.0
    local_s: float = 0.0
    arrival_shortest_s: float | None = None
    arrival_longest_s: float | None = None

    def arrival_s(self, part: float) -> float:
        """Return how long a write-back is on its way that was drawn at ``part`` of 0 to 1."""
        shortest = self.flush_s if self.arrival_shortest_s is None else self.arrival_shortest_s
        longest = shortest if self.arrival_longest_s is None else self.arrival_longest_s
        least, most = (math.log1p(end_s / ARRIVAL_GRAIN_S) for end_s in (shortest, longest))
        return math.expm1(least + (most - least) * part) * ARRIVAL_GRAIN_S


class VirtualPod:
    """Nodes on one shared device, under one clock, in one process."""

    def __init__(
        self,
        clock: Clock,
        size_bytes: int,
        costs: PodCosts,
        *,
        nodes: int,
        fences_wait_for_arrival: bool = False,
        seed: int = 0,
    ) -> None:
        if nodes < 1:
            raise PodUsageError(f"a pod of {nodes} nodes: it has at least one")
        self.clock = clock
        self.costs = costs
        self.device = VirtualDevice(size_bytes)
        self.watches = Watches(clock.now)
        self.nodes = [VirtualNode(self, number) for number in range(nodes)]
        self.pipe = Pipe(clock, "shared memory", costs.bytes_per_s)
        """All DMA goes through it, in both directions."""
        self.fences_wait = fences_wait_for_arrival
        self.lock_lines: set[int] = set()
        self._jobs = JobSet(clock)
        self._handles = 0
        self._arrivals = random.Random(seed)

    def lock_words(self, off: int, n_bytes: int) -> None:
        """Name words by which tasks let each other go on: their flushes land when paid for."""
        self.lock_lines.update(range(off // LINE, (off + n_bytes - 1) // LINE + 1))

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(mem, *args)`` on the device itself, past all caches and in no time.

        For what happens before a pod is used, or when nobody uses it any more.
        """
        return function(DirectMemory(self.device), *args)

    async def run(self, node: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(mem, *args)`` on ``node`` to its end and return its result.

        A task that is cancelled ends its program where it is, as a process that is killed would.
        """
        return await self._node(node).run(function, *args)

    def start(
        self, node: int, function: Callable[..., Any], *args: Any, name: str | None = None
    ) -> Job[Any]:
        """Start a program beside the caller; an error in it ends the clock's run."""
        return self._jobs.spawn(self.run(node, function, *args), name=name)

    async def joined(self) -> None:
        """Wait until all that was started has ended."""
        await self._jobs.join()

    def _node(self, number: int) -> VirtualNode:
        if not 0 <= number < len(self.nodes):
            raise PodUsageError(f"node {number}: this pod has nodes 0 to {len(self.nodes) - 1}")
        return self.nodes[number]

    def draw_arrival_s(self) -> float:
        """Return how long the write-back that is posted next is on its way."""
        return self.costs.arrival_s(self._arrivals.random())

    def next_handle(self) -> int:
        """Return a fresh number for a DMA."""
        self._handles += 1
        return self._handles


class VirtualNode:
    """A node: its cache, its own memory, its tasks."""

    def __init__(self, pod: VirtualPod, number: int) -> None:
        self.pod = pod
        self.number = number
        self.cache = VirtualCache(number, pod.device, pod.watches)
        self.tasks: dict[VirtualMemory, None] = {}
        self.locks: dict[int, LocalLock] = {}
        self.words: dict[int, int] = {}
        self.dmas: dict[int, Dma] = {}

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a program on this node; see ``VirtualPod.run``."""
        clock = self.pod.clock
        mem = VirtualMemory(self)
        task = greenlet(function)
        mem.loop = getcurrent()
        self.tasks[mem] = None
        try:
            asked = task.switch(mem, *args)
            while not task.dead:
                try:
                    if asked is NOW:
                        answer = clock.now()
                    elif type(asked) is float:
                        answer = None
                        await clock.sleep(asked)
                    else:
                        answer = await asked
                        clock.advance(answer)
                except BaseException as error:  # cancelled: the program ends where it waits
                    asked = task.throw(error)
                else:
                    asked = task.switch(answer)
            if mem.debt_s:
                await clock.sleep(mem.debt_s)
            return asked
        finally:
            del self.tasks[mem]
            mem.end()

    def copied(self, dma: Dma) -> None:
        """Let a DMA take place, unless its booking was moved back."""
        clock, pod = self.pod.clock, self.pod
        due_s = dma.booking.end_s + pod.costs.dma_latency_s
        if due_s > clock.now():
            clock.call_at(due_s, self.copied, dma)
            return
        lines = lines_of(dma.off, len(dma.words) * WORD)
        self.cache.give_up(lines)
        if dma.reads:
            pod.device.read(dma.off, dma.words)
        else:
            pod.device.write(dma.off, dma.words)
            for line in [line for line in pod.watches.by_line if line in lines]:
                pod.watches.landed(line)
        dma.done = True
        for waiter in dma.waiting:
            if not waiter.done():
                waiter.set_result(clock.now())
        for mem in self.tasks:
            if mem.polls_dma:
                mem.stir()
