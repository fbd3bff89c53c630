"""What a program on a node gets as ``mem`` under a clock: every operation, what it does and costs.

The rules of when a task pays are those of ``pod_virtual``, which makes these. A task's *debt* is
what its operations have cost and it has not slept yet. Units: s, bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from cxlbench.emu.pipe import Reservation
from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_ops import WORD
from cxlbench.emu.pod_virtual_device import PhantomWords, PostedWriteBack, Watch

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray

    from cxlbench.emu.pod_virtual import VirtualNode

    Words = NDArray[np.int64] | PhantomWords

LEAST_POLL_S: Final = 1e-6
"""What a poll by a task that looks at the clock takes at least."""
NOW: Final = object()
"""What a program asks its node for to be told the time."""

_TOO_BIG: Final = 1 << 63


class LocalLock:
    """A lock in a node's own memory."""

    __slots__ = ("holder", "waiting")

    def __init__(self) -> None:
        self.holder: VirtualMemory | None = None
        self.waiting: deque[asyncio.Future[float]] = deque()


class Dma:
    """One DMA; it takes place when its time on the pipe is over."""

    __slots__ = ("booking", "done", "off", "reads", "waiting", "words")

    def __init__(self, off: int, words: Words, reads: bool, booking: Reservation) -> None:
        self.off = off
        self.words = words
        self.reads = reads
        self.booking = booking
        self.done = False
        self.waiting: list[asyncio.Future[float]] = []


class VirtualMemory:
    """What a program on a node gets as ``mem``; one for each run of a program."""

    __slots__ = (
        "_costs",
        "_lines",
        "_looked_at",
        "_watched",
        "_watches",
        "cache",
        "debt_s",
        "loop",
        "node",
        "pod",
        "polls_dma",
        "reads_clock",
    )

    def __init__(self, node: VirtualNode) -> None:
        self.node = node
        self.pod = node.pod
        self.cache = node.cache
        self.debt_s = 0.0
        """What its operations have cost and it has not slept yet."""
        self.loop: Any = None
        self.reads_clock = False
        self.polls_dma = False
        self._looked_at: set[int] = set()
        """Words of the node's own memory that it has read since its last pause."""
        self._costs = node.pod.costs
        self._lines = node.cache.lines
        self._watched = node.pod.watches.by_line
        self._watches: dict[tuple[int, int], Watch] = {}

    # Loads, stores and what moves lines

    def load(self, off: int) -> int:
        """See ``pod_ops.load``."""
        line = self._lines.get(off >> 6)
        if line is None:
            self.debt_s += self._costs.fill_s
            line = self.cache.fill(off >> 6)
        else:
            self.debt_s += self._costs.hit_s
        if off & 7:
            self.pod.device.check("load", off)
        return line[off >> 3 & 7]

    def store(self, off: int, value: int) -> None:
        """See ``pod_ops.store``."""
        at = off >> 6
        line = self._lines.get(at)
        if line is None:
            self.debt_s += self._costs.fill_s
            line = self.cache.fill(at)
        else:
            self.debt_s += self._costs.hit_s
        if off & 7:
            self.pod.device.check("store", off)
        if type(line) is not list:
            line = self._lines[at] = list(line)
        line[off >> 3 & 7] = _checked(value)
        if at in self._watched:
            self.pod.watches.copy_changed(at, self.node.number, self)

    def clflush(self, off: int) -> None:
        """See ``pod_ops.clflush``."""
        line = off >> 6
        held = self._lines.get(line)
        if type(held) is list or line in self.cache.posted:
            self.debt_s += self._costs.flush_s
            if line in self.pod.lock_lines:
                self._pay()
            self.cache.write_back(line)
        else:
            self.debt_s += self._costs.invalidate_s
            if held is None:
                if not 0 <= off < self.pod.device.size_bytes:
                    self.pod.device.check("clflush", off & -WORD)
                return
            del self._lines[line]
        if line in self._watched:
            self.pod.watches.copy_changed(line, self.node.number, self)

    def clflushopt(self, off: int) -> None:
        """See ``pod_ops.clflushopt``."""
        self._post_copy(off, keep=False)

    def clwb(self, off: int) -> None:
        """See ``pod_ops.clwb``."""
        self._post_copy(off, keep=True)

    def ntstore(self, off: int, value: int) -> None:
        """See ``pod_ops.ntstore``."""
        self.pod.device.check("ntstore", off)
        self._post_copy(off, keep=False)
        self._post(off >> 6, None, off >> 3 & 7, _checked(value))

    def sfence(self) -> None:
        """See ``pod_ops.sfence``; it waits for arrival if the pod says so."""
        if self.pod.fences_wait and self.cache.posted:
            last_s = max(back.due_s for queue in self.cache.posted.values() for back in queue)
            self.debt_s = max(self.debt_s, last_s - self.pod.clock.now())
            self._pay()
            for line in list(self.cache.posted):
                self.cache.land_posted(line, None)

    def mfence(self) -> None:
        """See ``pod_ops.mfence``."""
        self.sfence()

    # Waiting and time

    def pause(self, off: int, n_bytes: int) -> None:
        """See ``pod_ops.pause``: sleep until something changed, or a poll's time if it asks."""
        watch = self._watches.get((off, n_bytes))
        if watch is None:
            if n_bytes <= 0:
                raise PodUsageError(f"pause on {n_bytes} bytes: name at least one")
            self.pod.device.check("pause", off & -WORD, n_bytes + (off & 7))
            watch = self._watches[off, n_bytes] = Watch(
                self, self.node.number, lines_of(off, n_bytes)
            )
            self.pod.watches.add(watch)
        if self.reads_clock and not watch.changed:
            # Who polls for a time must see it pass, also where memory costs nothing.
            self.debt_s = max(self.debt_s + self._costs.fill_s, LEAST_POLL_S)
        self._pay()
        if not (watch.changed or self.reads_clock):
            watch.waiting = self.pod.clock.future()
            try:
                self.loop.switch(watch.waiting)
            finally:
                watch.waiting = None
        watch.changed = False
        self.reads_clock = self.polls_dma = False
        self._looked_at.clear()

    def now(self) -> int:
        """See ``pod_ops.now``: ns of the clock."""
        self._pay()
        self.reads_clock = True
        return int(self.loop.switch(NOW) * 1e9)

    # DMA

    def dma_write(self, off: int, words: Words) -> int:
        """See ``pod_ops.dma_write``."""
        return self._dma("dma_write", off, words, reads=False)

    def dma_read(self, off: int, words: Words) -> int:
        """See ``pod_ops.dma_read``."""
        return self._dma("dma_read", off, words, reads=True)

    def dma_wait(self, handle: int) -> None:
        """See ``pod_ops.dma_wait``."""
        self._pay()
        dma = self._own(handle)
        if not dma.done:
            waiter = self.pod.clock.future()
            dma.waiting.append(waiter)
            self.loop.switch(waiter)
        del self.node.dmas[handle]

    def dma_done(self, handle: int) -> bool:
        """See ``pod_ops.dma_done``."""
        self._pay()
        dma = self._own(handle)
        self.polls_dma = not dma.done
        if dma.done:
            del self.node.dmas[handle]
        return dma.done

    # Node-local DRAM

    def local_lock(self, i: int) -> None:
        """See ``pod_ops.local_lock``."""
        self.debt_s += self._costs.local_s
        lock = self.node.locks.get(i)
        if lock is None:
            lock = self.node.locks[i] = LocalLock()
        if lock.holder is self:
            raise PodUsageError(f"local lock {i} is held by this task, and not re-entrant")
        if lock.holder is not None:
            self._pay()
        while lock.holder is not None:
            waiter = self.pod.clock.future()
            lock.waiting.append(waiter)
            self.loop.switch(waiter)
        lock.holder = self

    def local_unlock(self, i: int) -> None:
        """See ``pod_ops.local_unlock``."""
        self.debt_s += self._costs.local_s
        lock = self.node.locks.get(i)
        if lock is None or lock.holder is not self:
            raise PodUsageError(f"local_unlock({i}) by a task that does not hold the lock")
        if lock.waiting:
            self._pay()
        lock.holder = None
        while lock.waiting:
            waiter = lock.waiting.popleft()
            if not waiter.done():
                waiter.set_result(self.pod.clock.now())
                break

    def local_load(self, i: int) -> int:
        """See ``pod_ops.local_load``."""
        self.debt_s += self._costs.local_s
        self._looked_at.add(i)
        return self.node.words.get(i, 0)

    def local_store(self, i: int, value: int) -> None:
        """See ``pod_ops.local_store``."""
        self.debt_s += self._costs.local_s
        self.node.words[i] = _checked(value)
        for mem in self.node.tasks:
            if mem is not self and i in mem._looked_at:
                mem.stir()

    def local_cas(self, i: int, expected: int, new: int) -> int:
        """See ``pod_ops.local_cas``."""
        old = self.local_load(i)
        if old == expected:
            self.local_store(i, new)
        return old

    def local_add(self, i: int, delta: int) -> int:
        """See ``pod_ops.local_add``."""
        old = self.local_load(i)
        self.local_store(i, old + delta)
        return old

    def node_id(self) -> int:
        """See ``pod_ops.node_id``."""
        return self.node.number

    # What a program tells a checker

    def optimistic_begin(self) -> None:
        """See ``pod_ops.optimistic_begin``."""

    def optimistic_end(self, valid: bool) -> None:
        """See ``pod_ops.optimistic_end``."""

    def critical_want(self, lock: int) -> None:
        """See ``pod_ops.critical_want``."""

    def critical_enter(self, lock: int) -> None:
        """See ``pod_ops.critical_enter``."""
        self._pay()

    def critical_leave(self, lock: int) -> None:
        """See ``pod_ops.critical_leave``: the section ends when its work is paid for."""
        self._pay()

    # For the node

    def stir(self) -> None:
        """Look again at whatever this task pauses on."""
        for watch in self._watches.values():
            self.pod.watches.stir(watch)

    def end(self) -> None:
        """Drop the watches of a task that has ended."""
        for watch in self._watches.values():
            self.pod.watches.drop(watch)
        self._watches.clear()

    # Inside

    def _pay(self) -> None:
        debt_s = self.debt_s
        if debt_s > 0:
            self.debt_s = 0.0
            self.loop.switch(debt_s)

    def _post_copy(self, off: int, *, keep: bool) -> None:
        """Post the write-back of a dirty copy; drop the copy unless it is to be kept, clean."""
        line = off >> 6
        self.pod.device.check("a flush", off & -WORD)
        held = self._lines.get(line)
        if held is None:
            return
        if type(held) is list:
            self._post(line, tuple(held), 0, 0)
        if keep:
            self._lines[line] = tuple(held)
            return
        del self._lines[line]
        if line in self._watched:
            self.pod.watches.copy_changed(line, self.node.number, self)

    def _post(self, line: int, image: tuple[int, ...] | None, word: int, value: int) -> None:
        clock, cache = self.pod.clock, self.cache
        self.debt_s += self._costs.hit_s
        due_s = clock.now() + self.debt_s + self.pod.draw_arrival_s()
        back = PostedWriteBack(due_s, image, word, value)
        cache.post(line, back)
        clock.call_at(due_s, cache.land_posted, line, back)

    def _dma(self, what: str, off: int, words: Words, *, reads: bool) -> int:
        n_bytes = len(words) * WORD
        if not n_bytes:
            raise PodUsageError(f"{what} of no words: give at least one")
        self.pod.device.check(what, off, n_bytes)
        if isinstance(words, PhantomWords):
            words.ends(off)
        self._pay()
        self.cache.give_up(lines_of(off, n_bytes))
        booking = self.pod.pipe.reserve(n_bytes)
        dma = Dma(off, words, reads, booking)
        handle = self.pod.next_handle()
        self.node.dmas[handle] = dma
        due_s = booking.end_s + self._costs.dma_latency_s
        self.pod.clock.call_at(due_s, self.node.copied, dma)
        return handle

    def _own(self, handle: int) -> Dma:
        dma = self.node.dmas.get(handle)
        if dma is None:
            raise PodUsageError(
                f"no DMA {handle} of node {self.node.number}: was its completion seen before?"
            )
        return dma


def lines_of(off: int, n_bytes: int) -> range:
    """Return the lines that bytes lie in."""
    return range(off >> 6, (off + n_bytes - 1 >> 6) + 1)


def _checked(value: int) -> int:
    if type(value) is not int:
        value = int(value)
    if not -_TOO_BIG <= value < _TOO_BIG:
        raise PodUsageError(f"{value} is not a signed 64-bit integer, as every word is")
    return value
