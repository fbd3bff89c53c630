# ruff: noqa: D102 - the operations are documented by the functions of their names in pod_ops
"""A coherent memory in one thread, to prepare a region before a run and to look at it after.

It takes the same programs as every node. Before: what it wrote is what the region holds when the
tasks start, known to everybody. After: it reads what the device holds once everything in flight
has landed, as a node that has just started would; lines that are dirty in some cache do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_failure import PodUsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cxlbench.emu.pod_model import Device


class HostMemory:
    """``mem`` for programs that run alone; see ``pod_ops`` for the operations."""

    def __init__(self, size_bytes: int, below: Device | None = None) -> None:
        self.words: dict[int, int] = {}
        """What was stored, by word."""
        self.names: list[tuple[int, int, str]] = []
        self._size_bytes = size_bytes
        self._below = below
        self._local: dict[int, int] = {}
        self._locked: set[int] = set()
        self._dmas = 0
        self._now = 0

    def load(self, off: int) -> int:
        word = self._word(off)
        found = self.words.get(word)
        if found is not None:
            return found
        return 0 if self._below is None else self._below.line(word >> 3)[word & 7].value

    def store(self, off: int, value: int) -> None:
        self.words[self._word(off)] = int(value)

    def clflush(self, off: int) -> None:
        pass

    def clflushopt(self, off: int) -> None:
        pass

    def clwb(self, off: int) -> None:
        pass

    def ntstore(self, off: int, value: int) -> None:
        self.store(off, value)

    def sfence(self) -> None:
        pass

    def mfence(self) -> None:
        pass

    def pause(self, off: int, n_bytes: int) -> None:
        raise PodUsageError("a program that runs alone waits for a change that nobody can make")

    def now(self) -> int:
        self._now += 1
        return self._now

    def dma_write(self, off: int, words: NDArray[np.int64]) -> int:
        for index, value in enumerate(words.tolist()):
            self.store(off + 8 * index, value)
        self._dmas += 1
        return self._dmas

    def dma_read(self, off: int, words: NDArray[np.int64]) -> int:
        words[:] = [self.load(off + 8 * index) for index in range(len(words))]
        self._dmas += 1
        return self._dmas

    def dma_wait(self, handle: int) -> None:
        pass

    def dma_done(self, handle: int) -> bool:
        return True

    def local_lock(self, i: int) -> None:
        if i in self._locked:
            raise PodUsageError(f"local lock {i} is held by this task, and not re-entrant")
        self._locked.add(i)

    def local_unlock(self, i: int) -> None:
        if i not in self._locked:
            raise PodUsageError(f"local_unlock({i}), but nobody holds the lock")
        self._locked.remove(i)

    def local_load(self, i: int) -> int:
        return self._local.get(i, 0)

    def local_store(self, i: int, value: int) -> None:
        self._local[i] = value

    def local_cas(self, i: int, expected: int, new: int) -> int:
        old = self._local.get(i, 0)
        if old == expected:
            self._local[i] = new
        return old

    def local_add(self, i: int, delta: int) -> int:
        old = self._local.get(i, 0)
        self._local[i] = old + delta
        return old

    def node_id(self) -> int:
        return 0

    def optimistic_begin(self) -> None:
        pass

    def optimistic_end(self, valid: bool) -> None:
        pass

    def critical_want(self, lock: int) -> None:
        pass

    def critical_enter(self, lock: int) -> None:
        pass

    def critical_leave(self, lock: int) -> None:
        pass

    def name_range(self, off: int, n_bytes: int, name: str) -> None:
        self.names.append((off, n_bytes, name))

    def _word(self, off: int) -> int:
        if off & 7 or not 0 <= off < self._size_bytes:
            raise PodUsageError(
                f"offset {off}: offsets are multiples of 8 from 0 to {self._size_bytes - 8},"
                f" the region has {self._size_bytes} bytes"
            )
        return off >> 3
