"""A task's memory handle in an explored pod: every operation is a step of the schedule.

Between a program and the model lies only this: count the step down, and when the granted steps
are used, hand over to the task that the schedule chooses. Then the operation happens, at once, and
the checker looks at it. ``RecordedMemory`` does the same and writes down which line of source did
what; failing runs are repeated with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cxlbench.emu.causality import Incarnation, StaleLoad
from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_model import STREAMED, WORDS_PER_LINE, Dma, Store
from cxlbench.emu.pod_watch import Watch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cxlbench.emu.pod_nodes import Node
    from cxlbench.emu.pod_run import Run

NS_PER_STEP: Final = 100
"""What ``now()`` says that a step takes; explored time means nothing else."""

_TOO_BIG: Final = 1 << 63


class TaskMemory:
    """What a program on node ``node`` gets as ``mem``."""

    __slots__ = (
        "cache",
        "checks",
        "clock",
        "daemon",
        "dead",
        "greenlet",
        "index",
        "name",
        "node",
        "parked",
        "provisional",
        "reads_clock",
        "run",
    )

    def __init__(
        self, run: Run, node: Node, index: int, name: str, clock: Incarnation, *, daemon: bool
    ) -> None:
        self.run = run
        self.checks = run.checks
        self.node = node
        self.cache = node.cache
        self.index = index
        self.name = name
        self.clock = clock
        self.daemon = daemon
        self.dead = False
        """It ended, or its node died."""
        self.greenlet: Any = None
        self.parked: Watch | Dma | str | None = None
        """What it waits for: a change, a DMA, a local lock."""
        self.provisional: list[StaleLoad] | None = None
        """Stale loads of the optimistic section it is in."""
        self.reads_clock = False

    # Loads, stores and what moves lines

    def load(self, off: int) -> int:
        """See ``pod_ops.load``."""
        run = self.run
        run.left -= 1
        if run.left < 0:
            run.turn(self)
        if off & 7 or not 0 <= off < run.size_bytes:
            raise _bad_offset("load", off, run)
        got = self.cache.load(off >> 3)
        clock = self.clock
        if got.newer is not None:
            missed = self.checks.history.missed(got, off >> 3, clock.known)
            if missed is not None:
                self.checks.stale_load(self, StaleLoad(off >> 3, got, missed))
        if got.tick > clock.known[got.writer]:
            self._learn(got)
        return got.value

    def store(self, off: int, value: int) -> None:
        """See ``pod_ops.store``."""
        run = self.run
        run.left -= 1
        if run.left < 0:
            run.turn(self)
        if off & 7 or not 0 <= off < run.size_bytes:
            raise _bad_offset("store", off, run)
        stored = self.clock.write(_checked(value))
        self._add(off >> 3, stored)
        self.cache.store(off >> 3, stored)
        if off >> 6 in run.watched:
            run.wake(run.watches.copy_changed(off >> 6, self.cache.node, self))

    def clflush(self, off: int) -> None:
        """See ``pod_ops.clflush``."""
        line = self._line_step("clflush", off)
        if line in self.run.watched:
            self._refreshes(line)
        self.cache.clflush(line)
        if self.checks.failure is not None:
            self.run.halt_if_failed()

    def clflushopt(self, off: int) -> None:
        """See ``pod_ops.clflushopt``."""
        line = self._line_step("clflushopt", off)
        if line in self.run.watched:
            self._refreshes(line)
        self.cache.clflushopt(line)

    def clwb(self, off: int) -> None:
        """See ``pod_ops.clwb``."""
        self.cache.clwb(self._line_step("clwb", off))

    def ntstore(self, off: int, value: int) -> None:
        """See ``pod_ops.ntstore``."""
        line = self._line_step("ntstore", off)
        stored = self.clock.write(_checked(value), STREAMED)
        self._add(off >> 3, stored)
        self.cache.ntstore(off >> 3, stored)
        if line in self.run.watched:
            self.run.wake(self.run.watches.copy_changed(line, self.cache.node, self))

    def sfence(self) -> None:
        """See ``pod_ops.sfence``."""
        self._step()
        if self.run.fence_lands:
            self.cache.drain()
            self.run.halt_if_failed()

    def mfence(self) -> None:
        """See ``pod_ops.mfence``."""
        self.sfence()

    # Waiting and time

    def pause(self, off: int, n_bytes: int) -> None:
        """See ``pod_ops.pause`` and ``pod_watch``."""
        self._step()
        watch = self.run.watches.of(self, off, n_bytes, self.run.size_bytes)
        if watch.changed:
            self.run.schedule.yielded(self.run, self)
        else:
            self.parked = watch
            self.run.park(self)
        watch.changed = False
        self.reads_clock = False

    def now(self) -> int:
        """See ``pod_ops.now``."""
        self._step()
        self.reads_clock = True
        return self.run.now_ns()

    # DMA

    def dma_write(self, off: int, words: NDArray[np.int64]) -> int:
        """See ``pod_ops.dma_write``."""
        first = self._dma_step("dma_write", off, words)
        known = self.clock.as_of_now()
        stores = self.clock.dma_writes(words.tolist())
        for word, stored in enumerate(stores, first):
            self._add(word, stored)
        return self.run.start_dma(self, first, words, known, stores)

    def dma_read(self, off: int, words: NDArray[np.int64]) -> int:
        """See ``pod_ops.dma_read``."""
        first = self._dma_step("dma_read", off, words)
        return self.run.start_dma(self, first, words, self.clock.as_of_now(), None)

    def dma_wait(self, handle: int) -> None:
        """See ``pod_ops.dma_wait``."""
        self._step()
        dma = self._dma(handle)
        while dma.left:
            self.parked = dma
            self.run.park(self)
        self._complete(dma)

    def dma_done(self, handle: int) -> bool:
        """See ``pod_ops.dma_done``."""
        self._step()
        dma = self._dma(handle)
        if dma.left:
            return False
        self._complete(dma)
        return True

    # Node-local DRAM

    def local_lock(self, i: int) -> None:
        """See ``pod_ops.local_lock``."""
        self._step()
        lock = self.node.lock(i)
        if lock.holder is self:
            raise PodUsageError(f"local lock {i} is held by this task, and not re-entrant")
        while lock.holder is not None:
            lock.waiting.append(self)
            self.parked = f"local lock {i}"
            self.run.park(self)
        lock.holder = self
        if lock.released is not None:
            self._learn(lock.released)

    def local_unlock(self, i: int) -> None:
        """See ``pod_ops.local_unlock``."""
        self._step()
        lock = self.node.lock(i)
        if lock.holder is not self:
            holder = "nobody" if lock.holder is None else lock.holder.name
            raise PodUsageError(f"local_unlock({i}) by {self.name}, but {holder} holds the lock")
        lock.holder = None
        lock.released = self.clock.write(0)
        waiting, lock.waiting = lock.waiting, []
        self.run.wake(waiting)

    def local_load(self, i: int) -> int:
        """See ``pod_ops.local_load``."""
        self._step()
        return self._local(i)

    def local_store(self, i: int, value: int) -> None:
        """See ``pod_ops.local_store``."""
        self._step()
        self._set_local(i, value)

    def local_cas(self, i: int, expected: int, new: int) -> int:
        """See ``pod_ops.local_cas``."""
        self._step()
        old = self._local(i)
        if old == expected:
            self._set_local(i, new)
        return old

    def local_add(self, i: int, delta: int) -> int:
        """See ``pod_ops.local_add``."""
        self._step()
        old = self._local(i)
        self._set_local(i, old + delta)
        return old

    def node_id(self) -> int:
        """See ``pod_ops.node_id``."""
        return self.node.number

    # For the checker; not steps

    def optimistic_begin(self) -> None:
        """See ``pod_ops.optimistic_begin``."""
        if self.provisional is not None:
            raise PodUsageError("optimistic sections do not nest: end the first one before")
        self.provisional = []

    def optimistic_end(self, valid: bool) -> None:
        """See ``pod_ops.optimistic_end``."""
        stale = self.provisional
        if stale is None:
            raise PodUsageError("optimistic_end without optimistic_begin")
        self.provisional = None
        if valid and stale:
            self.checks.stale_load(self, stale[0])

    def critical_want(self, lock: int) -> None:
        """See ``pod_ops.critical_want``."""
        self.checks.sections.want(lock, self.index)

    def critical_enter(self, lock: int) -> None:
        """See ``pod_ops.critical_enter``."""
        self.checks.entered(self, lock)

    def critical_leave(self, lock: int) -> None:
        """See ``pod_ops.critical_leave``."""
        if not self.checks.sections.leave(lock, self.index):
            raise PodUsageError(f"critical_leave({lock}) by {self.name}, which is not inside")

    def step_of(self, what: str, number: int) -> None:
        """Make a step that is about a node, such as its fence."""
        self._step()

    def name_range(self, off: int, n_bytes: int, name: str) -> None:
        """See ``pod_ops.name_range``."""
        self.run.names.append((off, n_bytes, name))

    # Inside

    def _step(self) -> None:
        run = self.run
        run.left -= 1
        if run.left < 0:
            run.turn(self)

    def _line_step(self, what: str, off: int) -> int:
        run = self.run
        run.left -= 1
        if run.left < 0:
            run.turn(self)
        if not 0 <= off < run.size_bytes or (off & 7 and what == "ntstore"):
            raise _bad_offset(what, off, run)
        return off >> 6

    def _dma_step(self, what: str, off: int, words: NDArray[np.int64]) -> int:
        self._step()
        if words.ndim != 1 or words.dtype.str[1:] != "i8" or not len(words):
            raise PodUsageError(
                f"{what} of an array of shape {words.shape} and type {words.dtype}:"
                " words must be a 1-d array of int64 with at least one element"
            )
        if off & 7 or not 0 <= off <= self.run.size_bytes - 8 * len(words):
            raise _bad_offset(f"{what} of {len(words)} words", off, self.run)
        return off >> 3

    def _refreshes(self, line: int) -> None:
        """See to those who wait for ``line``, which this task is about to drop."""
        held = self.cache.lines.get(line)
        if held is None:
            return
        watches = self.run.watches
        self.run.wake(watches.copy_changed(line, self.cache.node, self))
        fresh = self.cache.beneath(line)
        if held is not fresh and any(a is not b for a, b in zip(held, fresh, strict=True)):
            watches.old_copy_dropped(line, self)

    def _add(self, word: int, stored: Store) -> None:
        self.checks.stored(self, word, stored)

    def _learn(self, got: Store) -> None:
        self.clock.join(got)

    def _dma(self, handle: int) -> Dma:
        dma = self.run.dmas.get(handle)
        if dma is None or dma.cache is not self.cache:
            raise PodUsageError(
                f"no DMA {handle} of node {self.node.number}: was its completion seen before?"
            )
        return dma

    def _complete(self, dma: Dma) -> None:
        del self.run.dmas[dma.handle]
        if dma.stores is not None:
            return
        first = dma.pieces[0][0] * WORDS_PER_LINE + dma.pieces[0][1]
        for word, got in enumerate(dma.got, first):
            missed = self.checks.history.missed(got, word, dma.known)
            if missed is not None:
                self.checks.stale_load(self, StaleLoad(word, got, missed))
        for got in dma.got:
            if not self.clock.knows(got):
                self._learn(got)
        dma.words[:] = [got.value for got in dma.got]

    def _local(self, i: int) -> int:
        got = self.node.words.get(i)
        if got is None:
            return 0
        if not self.clock.knows(got):
            self._learn(got)
        return got.value

    def _set_local(self, i: int, value: int) -> None:
        self.node.words[i] = self.clock.write(_checked(value))
        if len(self.node.tasks) > 1:
            self.run.stir(task for task in self.node.tasks if task is not self)


def _bad_offset(what: str, off: int, run: Run) -> PodUsageError:
    return PodUsageError(
        f"{what} at offset {off}: offsets are multiples of 8 from 0 to {run.size_bytes - 8},"
        f" the region has {run.size_bytes} bytes"
    )


def _checked(value: int) -> int:
    if type(value) is not int:
        value = int(value)
    if not -_TOO_BIG <= value < _TOO_BIG:
        raise PodUsageError(f"{value} is not a signed 64-bit integer, as every word is")
    return value
