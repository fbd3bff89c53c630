# ruff: noqa: D102 - the operations are documented by the functions of their names in pod_ops
"""The record of one run: which line of source did what at which step, and what memory did.

A run that failed is repeated under the same choices with a ``Trace``, so that the many runs that
do not fail pay nothing for it. From the record come the causes, the report, and the exact list of
choices with which the run can be replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cxlbench.emu.causality import Cause, before
from cxlbench.emu.pod_failure import Failure, Kind
from cxlbench.emu.pod_model import BY_DMA, Dma, Line, Store, WriteBack
from cxlbench.emu.pod_task import TaskMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cxlbench.emu.causality import Incarnation
    from cxlbench.emu.pod_nodes import Node
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_schedule import Choice

_INSIDE: Final = frozenset(
    f"cxlbench.emu.{name}" for name in ("pod_ops", "pod_task", "pod_trace", "pod_run")
)
_DEEPEST: Final = 8
"""Calls of the program that are kept for a step."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of source that was being executed."""

    file: str
    line: int
    function: str


Site = tuple[Place, ...]
"""A step of a program: the line of the operation, then the lines that called it."""


@dataclass(slots=True)
class Row:
    """One thing that happened: a step of a task, or of memory if ``task`` is -1."""

    step: int
    node: int
    task: int
    what: str
    off: int
    value: int | None
    site: Site
    notes: str = ""
    """What memory did as part of it."""


def call_site(depth: int) -> Site:
    """Return the program's own frames, the innermost first, seen from ``depth`` calls up."""
    places: list[Place] = []
    frame = sys._getframe(depth)
    while frame is not None and len(places) < _DEEPEST:
        code = frame.f_code
        if frame.f_globals.get("__name__") not in _INSIDE:
            places.append(Place(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(places)


class Trace:
    """What is written down of a run."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.draws: list[int] = []
        self.rows: list[Row] = []
        self.site_of: dict[Store, Site] = {}
        self.made_at: dict[Store, int] = {}
        self.made_by: dict[Store, TaskMemory] = {}
        self.by_dma: set[Store] = set()
        self.posted_at: dict[Store, int] = {}
        self.landed_at: dict[Store, int] = {}
        self.filled_at: dict[tuple[int, int], int] = {}
        """When each node took its last copy of each line."""
        self._replaced: dict[int, list[tuple[int, Store]]] = {}
        """By word: when something landed on it, and what."""
        self._run: Run
        self._from = 0

    # What the run tells

    def begin(self, run: Run) -> None:
        """Take note of the run that is recorded."""
        self._run = run

    def stretch(self, current: TaskMemory | None, step: int) -> None:
        """Write down how many steps the last task made, the one that failed included."""
        steps = step - self._from + (self._run.failure is not None)
        self._from = step
        if current is not None and steps > 0:
            self.choices.append(("run", current.index, steps))

    def happened(self, what: str, node: int, line: int) -> None:
        """Write down something that no task did."""
        self.rows.append(Row(self._run.step, node, -1, what, line << 6, None, ()))

    def _noted(self, what: str, node: int, line: int) -> bool:
        """Add ``what`` to the row of the operation that caused it; return whether one did."""
        last = self.rows[-1] if self.rows else None
        if last is None or last.task < 0 or last.node != node or last.off >> 6 != line:
            return False
        if last.step != self._run.step:
            return False
        last.notes += f", {what}"
        return True

    def made(self, task: TaskMemory, stored: Store, site: Site) -> None:
        """Write down who makes a store, and where."""
        self.site_of[stored] = site
        self.made_at[stored] = self._run.step
        self.made_by[stored] = task
        if stored.how == BY_DMA:
            self.by_dma.add(stored)

    def landed(self, node: int, line: int, old: Line, new: Line, stores: Sequence[Store]) -> None:
        """Write down what arrived in the device, and what it replaced."""
        step = self._run.step
        if not self._noted("lands", node, line):
            self.happened(f"lands in the device, from node {node}", node, line)
        for stored in stores:
            self.landed_at.setdefault(stored, step)
        for index, stored in enumerate(new):
            if stored is not old[index]:
                self._replaced.setdefault(line * 8 + index, []).append((step, stored))

    def posted(self, node: int, back: WriteBack) -> None:
        """Write down that a program posted stores; an eviction is no flush."""
        if back.flushed:
            for stored in back.stores:
                self.posted_at.setdefault(stored, self._run.step)

    def filled(self, node: int, line: int) -> None:
        """Write down that a copy was taken."""
        self.filled_at[node, line] = self._run.step
        if not self._noted("filled", node, line):
            self.happened("fills its cache with", node, line)

    def judged(self, failure: Failure) -> Failure:
        """Return the failure that has just been noted with its cause."""
        if failure.kind is Kind.REGRESS:
            return replace(failure, cause=self._cause_of_regress(failure))
        if failure.kind is Kind.CAUSALITY:
            return replace(failure, cause=self._cause(failure))
        return failure

    def known_since(self, failure: Failure) -> int:
        """Return the step at which the reader came to know of the store that it missed."""
        missed = failure.later
        assert missed is not None
        reader = self._run.tasks[failure.task]
        if self.made_by[missed].node is reader.node:
            return failure.step
        return reader.clock.first_knew(missed)

    def _cause_of_regress(self, failure: Failure) -> Cause:
        undone, carried = failure.later, failure.carrier
        assert undone is not None
        if carried is None or not (before(carried, undone) or before(undone, carried)):
            return Cause.OVERWRITTEN
        if before(undone, carried):
            cause = self._not_landed(undone, self.made_at[carried])
            return cause or Cause.NO_INVALIDATE
        return self._not_landed(carried, self.made_at.get(undone, -1)) or Cause.NEVER_FLUSHED

    def _not_landed(self, stored: Store, step: int) -> Cause | None:
        """Return why ``stored`` was not in the device at ``step``; None if it was."""
        landed = self.landed_at.get(stored)
        if landed is not None and landed <= step:
            return None
        if stored in self.by_dma:
            return Cause.DMA_INCOMPLETE
        posted = self.posted_at.get(stored)
        return Cause.NEVER_FLUSHED if posted is None or posted > step else Cause.POSTED

    def _cause(self, failure: Failure) -> Cause:
        missed = failure.later
        assert missed is not None
        known = self.known_since(failure)
        cause = self._not_landed(missed, known)
        if cause is not None:
            return cause
        landed = self.landed_at[missed]
        cache = self._run.tasks[failure.task].cache
        line = failure.word >> 3
        held = self.filled_at.get((cache.node, line)) if line in cache.lines else failure.step
        for step, stored in self._replaced.get(failure.word, ()):
            undone = step > landed and before(stored, missed)
            if undone and (held is None or held >= step):
                return Cause.OVERWRITTEN
        return Cause.NO_INVALIDATE


class RecordedMemory(TaskMemory):
    """A task's memory handle that writes down every step."""

    __slots__ = ("site",)

    def __init__(
        self, run: Run, node: Node, index: int, name: str, clock: Incarnation, *, daemon: bool
    ) -> None:
        super().__init__(run, node, index, name, clock, daemon=daemon)
        self.site: Site = ()
        """Where the task is, or was last."""

    def _enter(self, what: str, off: int, value: int | None = None) -> Row:
        """Reach the step as the operation itself would, and write it down before it happens."""
        run = self.run
        self.site = call_site(2)
        run.left -= 1
        if run.left < 0:
            run.turn(self)
        trace = run.trace
        assert trace is not None
        if self.clock.joins is None:
            self.clock.joins = [(run.step, self.clock.known)]
        row = Row(run.step, self.node.number, self.index, what, off, value, self.site)
        trace.rows.append(row)
        run.left += 1  # the operation counts its step
        return row

    def _learn(self, got: Store) -> None:
        clock = self.clock
        if clock.join(got) and clock.joins is not None:
            clock.joins.append((self.run.step, clock.known))

    def _add(self, word: int, stored: Store) -> None:
        trace = self.run.trace
        assert trace is not None
        trace.made(self, stored, self.site)
        super()._add(word, stored)

    def step_of(self, what: str, number: int) -> None:
        self._enter(f"{what} of node {number}", -1)
        super().step_of(what, number)

    def load(self, off: int) -> int:
        row = self._enter("load", off)
        if 0 <= off < self.run.size_bytes:
            row.value = self.cache.peek(off >> 6)[off >> 3 & 7].value
        return super().load(off)

    def store(self, off: int, value: int) -> None:
        self._enter("store", off, value)
        super().store(off, value)

    def clflush(self, off: int) -> None:
        self._enter("clflush", off)
        super().clflush(off)

    def clflushopt(self, off: int) -> None:
        self._enter("clflushopt", off)
        super().clflushopt(off)

    def clwb(self, off: int) -> None:
        self._enter("clwb", off)
        super().clwb(off)

    def ntstore(self, off: int, value: int) -> None:
        self._enter("ntstore", off, value)
        super().ntstore(off, value)

    def sfence(self) -> None:
        self._enter("fence", -1)
        super().sfence()

    def pause(self, off: int, n_bytes: int) -> None:
        self._enter("pause", off)
        super().pause(off, n_bytes)

    def now(self) -> int:
        self._enter("now", -1)
        return super().now()

    def dma_write(self, off: int, words: NDArray[np.int64]) -> int:
        self._enter(f"dma_write of {len(words)} words", off)
        return super().dma_write(off, words)

    def dma_read(self, off: int, words: NDArray[np.int64]) -> int:
        self._enter(f"dma_read of {len(words)} words", off)
        return super().dma_read(off, words)

    def dma_wait(self, handle: int) -> None:
        self._enter(f"dma_wait for {handle}", -1)
        super().dma_wait(handle)

    def dma_done(self, handle: int) -> bool:
        self._enter(f"dma_done of {handle}", -1)
        return super().dma_done(handle)

    def local_lock(self, i: int) -> None:
        self._enter(f"local_lock {i}", -1)
        super().local_lock(i)

    def local_unlock(self, i: int) -> None:
        self._enter(f"local_unlock {i}", -1)
        super().local_unlock(i)

    def local_load(self, i: int) -> int:
        self._enter(f"local_load {i}", -1)
        return super().local_load(i)

    def local_store(self, i: int, value: int) -> None:
        self._enter(f"local_store {i}", -1, value)
        super().local_store(i, value)

    def local_cas(self, i: int, expected: int, new: int) -> int:
        self._enter(f"local_cas {i}", -1, new)
        return super().local_cas(i, expected, new)

    def local_add(self, i: int, delta: int) -> int:
        self._enter(f"local_add {i}", -1, delta)
        return super().local_add(i, delta)

    def optimistic_end(self, valid: bool) -> None:
        self.site = call_site(1)
        super().optimistic_end(valid)

    def critical_leave(self, lock: int) -> None:
        self.site = call_site(1)
        super().critical_leave(lock)

    def critical_enter(self, lock: int) -> None:
        self.site = call_site(1)
        super().critical_enter(lock)


class LintedMemory(TaskMemory):
    """A task's memory handle that tells the lint which line of source flushes what."""

    __slots__ = ()

    def _flushes(self, off: int) -> None:
        self.run.left -= 1
        if self.run.left < 0:
            self.run.turn(self)
        self.run.left += 1  # the operation counts its step
        place = call_site(2)[0]
        site = f"{place.file}:{place.line} in {place.function}"
        self.run.flushes(self, off >> 6, site)

    def clflush(self, off: int) -> None:
        self._flushes(off)
        super().clflush(off)

    def clflushopt(self, off: int) -> None:
        self._flushes(off)
        super().clflushopt(off)

    def clwb(self, off: int) -> None:
        self._flushes(off)
        super().clwb(off)


def parked_on(task: TaskMemory) -> str:
    """Say what a parked task waits for."""
    if isinstance(task.parked, Dma):
        return f"DMA {task.parked.handle}"
    return task.parked if isinstance(task.parked, str) else "a change in memory"
