"""A coherent memory for one thread: TraCT's structures as such, with no cache between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cxlbench.tract.arbiter import grant_round
from cxlbench.tract.layout import Layout, Sizes, plan
from cxlbench.tract.region import format_region

Words = NDArray[np.int64]


class PlainMemory:
    """The operations of ``pod_ops`` on an array of words; ``pause`` lets an arbiter work."""

    def __init__(self, words: Words, node: int = 0) -> None:
        self.words = words
        self.node = node
        self.locals: dict[int, int] = defaultdict(int)
        self.locks: set[int] = set()
        self.on_pause: Callable[[], object] | None = None
        self.flushes = 0
        self.stored: list[int] = []

    def load(self, off: int) -> int:
        assert off % 8 == 0
        return int(self.words[off // 8])

    def store(self, off: int, value: int) -> None:
        assert off % 8 == 0
        self.words[off // 8] = value
        self.stored.append(off)

    def clflush(self, off: int) -> None:
        self.flushes += 1

    clflushopt = clwb = clflush

    def ntstore(self, off: int, value: int) -> None:
        self.store(off, value)

    def sfence(self) -> None: ...

    mfence = sfence

    def pause(self, off: int, n_bytes: int) -> None:
        assert self.on_pause is not None, "waits for ever"
        self.on_pause()

    def now(self) -> int:
        return 0

    def dma_write(self, off: int, words: Words) -> int:
        self.words[off // 8 : off // 8 + len(words)] = words
        return 1

    def dma_read(self, off: int, words: Words) -> int:
        words[:] = self.words[off // 8 : off // 8 + len(words)]
        return 1

    def dma_wait(self, handle: int) -> None: ...

    def dma_done(self, handle: int) -> bool:
        return True

    def local_lock(self, i: int) -> None:
        assert i not in self.locks, f"local lock {i} is taken"
        self.locks.add(i)

    def local_unlock(self, i: int) -> None:
        self.locks.remove(i)

    def local_load(self, i: int) -> int:
        return self.locals[i]

    def local_store(self, i: int, value: int) -> None:
        self.locals[i] = value

    def local_cas(self, i: int, expected: int, new: int) -> int:
        old = self.locals[i]
        if old == expected:
            self.locals[i] = new
        return old

    def local_add(self, i: int, delta: int) -> int:
        self.locals[i] += delta
        return self.locals[i] - delta

    def node_id(self) -> int:
        return self.node

    def optimistic_begin(self) -> None: ...

    def optimistic_end(self, valid: bool) -> None: ...

    def critical_want(self, lock: int) -> None: ...

    critical_enter = critical_leave = critical_want


class PlainPod:
    """Nodes on one coherent memory, with an arbiter that works whenever somebody pauses."""

    def __init__(self, sizes: Sizes, *, region_bytes: int | None = None) -> None:
        n_bytes = region_bytes or plan(sizes).region_bytes
        self._begin(np.zeros(n_bytes // 8, np.int64), sizes)

    @classmethod
    def on(cls, words: Words, sizes: Sizes) -> PlainPod:
        """Return a pod on memory that is there, such as a file's."""
        pod = cls.__new__(cls)
        pod._begin(words, sizes)
        return pod

    def _begin(self, words: Words, sizes: Sizes) -> None:
        self.sizes = sizes
        self.layout: Layout = plan(sizes)
        self.words = words
        self.nodes = [PlainMemory(self.words, n) for n in range(sizes.nodes)]
        self.last = np.zeros(self.layout.locks, np.int64)
        self.standing = np.zeros(sizes.nodes, np.int64)
        for mem in self.nodes:
            mem.on_pause = self.arbitrate
        format_region(self.nodes[0], sizes, words.nbytes)

    def arbitrate(self) -> None:
        granted = grant_round(self.nodes[0], self.layout, self.last, self.standing, 0)
        assert granted, "nobody can be granted: a deadlock"

    def lock_free(self) -> bool:
        at, end = self.layout.slots_at // 8, self.layout.roots_at // 8
        return not self.words[at:end].any()
