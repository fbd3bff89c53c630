"""Who sleeps on which lines: ``pause`` explored, without lost wake-ups and without idle polling.

A task that pauses on a range may sleep if a poll could not see anything that its polls since the
last pause on that range have not seen. Something new is to be seen when

* something landed on one of the lines in the device,
* the node's own copy of one was stored to or dropped, by another task or by an eviction,
* the task itself dropped a copy that was old (a poll may flush after it loads),
* a word of the node's own memory changed, or a DMA of the node completed.

The first pause on a range returns at once, so that whatever happened before it is polled for. When
all tasks sleep they are all woken, some times in vain, before they count as hanging (``pod_run``):
a pause outside of a loop ends, and a task that polls without a flush sees its old copy again. A
task that counts its polls, to give up at some time, is not where it was, and hangs only if it never
gives up.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from cxlbench.emu.pod_failure import PodUsageError

if TYPE_CHECKING:
    from cxlbench.emu.pod_task import TaskMemory


_ENGINE: Final = __name__.rpartition(".")[0] + "."
"""What the names of modules begin with whose functions are no program's."""


def where_it_stands(task: TaskMemory) -> tuple[object, ...]:
    """Return where a parked task is: of each function that it is in, the place and the numbers.

    Two equal answers say that a poll came back to the same point with nothing learnt.
    """
    found: list[object] = []
    suspended: FrameType | None = task.greenlet.gr_frame
    frame: FrameType | None = suspended or sys._getframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_ENGINE):
            found.append((frame.f_code, frame.f_lasti))
            found += [_as_it_is(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    return tuple(found)


def _as_it_is(value: Any) -> object:
    """Return what can be compared later: a number or text itself, of a collection its size."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, dict, set, deque)):
        return len(value)
    words = getattr(value, "tobytes", None)
    return None if words is None else words()


class Watch:
    """A range that a task pauses on, and whether there may be something new in it."""

    __slots__ = ("changed", "lines", "task")

    def __init__(self, task: TaskMemory, lines: range) -> None:
        self.task = task
        self.lines = lines
        self.changed = False


class Watches:
    """All ranges that tasks of a run have paused on."""

    __slots__ = ("_of_task", "by_line")

    def __init__(self) -> None:
        self.by_line: dict[int, list[Watch]] = {}
        self._of_task: dict[TaskMemory, dict[tuple[int, int], Watch]] = {}

    def of(self, task: TaskMemory, off: int, n_bytes: int, size_bytes: int) -> Watch:
        """Return the watch of ``task`` on a range; a new one has something new in it."""
        mine = self._of_task.setdefault(task, {})
        watch = mine.get((off, n_bytes))
        if watch is None:
            if n_bytes <= 0 or not 0 <= off <= size_bytes - n_bytes:
                raise PodUsageError(
                    f"pause on [{off}, {off} + {n_bytes}) in a region of {size_bytes} bytes:"
                    " name at least one byte inside the region"
                )
            lines = range(off >> 6, (off + n_bytes - 1 >> 6) + 1)
            watch = mine[off, n_bytes] = Watch(task, lines)
            watch.changed = True
            for line in lines:
                self.by_line.setdefault(line, []).append(watch)
        return watch

    def forget(self, task: TaskMemory) -> None:
        """Drop the watches of a task that is dead."""
        for watch in self._of_task.pop(task, {}).values():
            for line in watch.lines:
                self.by_line[line].remove(watch)

    # Each of these gives the tasks that sleep on what changed

    def landed(self, line: int) -> Iterator[TaskMemory]:
        """Mark ``line`` as changed in the device."""
        for watch in self.by_line.get(line, ()):
            watch.changed = True
            if watch.task.parked is watch:
                yield watch.task

    def copy_changed(
        self, line: int, node: int, by: TaskMemory | None = None
    ) -> Iterator[TaskMemory]:
        """Mark ``line`` as changed in the cache of ``node``, for all tasks but ``by``."""
        for watch in self.by_line.get(line, ()):
            if watch.task.cache.node == node and watch.task is not by:
                watch.changed = True
                if watch.task.parked is watch:
                    yield watch.task

    def old_copy_dropped(self, line: int, by: TaskMemory) -> None:
        """Mark ``line`` as changed for ``by``, which drops a copy that is old."""
        for watch in self.by_line.get(line, ()):
            if watch.task is by:
                watch.changed = True

    def anything(self, task: TaskMemory) -> bool:
        """Mark all that ``task`` watches as changed; return whether it sleeps on some of it."""
        for watch in self._of_task.get(task, {}).values():
            watch.changed = True
        return isinstance(task.parked, Watch)
