"""``mem`` on a mapped node: the pod's own programs over nothing but a buffer and a flush.

What a program that we did not write has is a mapping of the node's view and ``flush``; here the
operations of ``pod_ops`` are done with no more than that, interpreted. So the text that runs
explored, emulated and native runs on a mapped node too, and what it forgets to flush is not there
on the next node.

A flush is complete when it returns, whichever it is: what is *posted* lands at once, which such
memory may do. DMA goes through the view, with the lines flushed before and written back after, and
is complete when it is started. Local words and locks are those of the node's other processes.

Left out: late arrival of posted flushes (use the emulated pod), compiled programs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_ops import LINE, WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.emu.pod_emulated import EmulatedMemory
    from cxlbench.emu.pod_mapped import MappedNode

    Words = NDArray[np.int64]


class MappedMemory:
    """What a program on a mapped node gets as ``mem``; ``close`` it before the node."""

    def __init__(self, node: MappedNode, own: EmulatedMemory) -> None:
        self._node = node
        self._own = own
        self._view: Any = node.map()
        self._words: Words = np.frombuffer(self._view, dtype=np.int64)

    def close(self) -> None:
        """Unmap."""
        self._words = np.zeros(0, dtype=np.int64)
        self._view.close()

    # Loads, stores, flushes

    def load(self, off: int) -> int:
        """See ``pod_ops.load``."""
        return int(self._words[self._word(off)])

    def store(self, off: int, value: int) -> None:
        """See ``pod_ops.store``."""
        self._words[self._word(off)] = value

    def clflush(self, off: int) -> None:
        """See ``pod_ops.clflush``."""
        self._node.flush(self._line(off), LINE)

    def clflushopt(self, off: int) -> None:
        """See ``pod_ops.clflushopt``; it lands at once."""
        self.clflush(off)

    def clwb(self, off: int) -> None:
        """See ``pod_ops.clwb``; it lands at once."""
        self._node.write_back(self._line(off), LINE)

    def ntstore(self, off: int, value: int) -> None:
        """See ``pod_ops.ntstore``; it lands at once, with the line as it was in the device."""
        at = self._word(off)
        self.clflush(off)
        self._words[at] = value
        self.clwb(off)

    def sfence(self) -> None:
        """See ``pod_ops.sfence``: nothing is on its way."""

    def mfence(self) -> None:
        """See ``pod_ops.mfence``: nothing is on its way."""

    # Waiting and time

    def pause(self, off: int, n_bytes: int) -> None:
        """See ``pod_ops.pause``: let somebody else run."""
        self._check(off & -WORD, n_bytes + (off & 7))
        os.sched_yield()

    def now(self) -> int:
        """See ``pod_ops.now``."""
        return self._own.now()

    # DMA

    def dma_write(self, off: int, words: Words) -> int:
        """See ``pod_ops.dma_write``."""
        self._check(off, len(words) * WORD)
        if len(words):
            self._node.flush(off, len(words) * WORD)
            self._words[off // WORD : off // WORD + len(words)] = words
            self._node.write_back(off, len(words) * WORD)
        return 1

    def dma_read(self, off: int, words: Words) -> int:
        """See ``pod_ops.dma_read``."""
        self._check(off, len(words) * WORD)
        if len(words):
            self._node.flush(off, len(words) * WORD)
            words[:] = self._words[off // WORD : off // WORD + len(words)]
        return 1

    def dma_wait(self, handle: int) -> None:
        """See ``pod_ops.dma_wait``: it is complete."""

    def dma_done(self, handle: int) -> bool:
        """See ``pod_ops.dma_done``: it is."""
        return True

    # Node-local DRAM

    def local_lock(self, i: int) -> None:
        """See ``pod_ops.local_lock``."""
        self._own.local_lock(i)

    def local_unlock(self, i: int) -> None:
        """See ``pod_ops.local_unlock``."""
        self._own.local_unlock(i)

    def local_load(self, i: int) -> int:
        """See ``pod_ops.local_load``."""
        return self._own.local_load(i)

    def local_store(self, i: int, value: int) -> None:
        """See ``pod_ops.local_store``."""
        self._own.local_store(i, value)

    def local_cas(self, i: int, expected: int, new: int) -> int:
        """See ``pod_ops.local_cas``."""
        return self._own.local_cas(i, expected, new)

    def local_add(self, i: int, delta: int) -> int:
        """See ``pod_ops.local_add``."""
        return self._own.local_add(i, delta)

    def node_id(self) -> int:
        """See ``pod_ops.node_id``."""
        return self._node.node

    # What a program tells a checker: nobody checks here

    def optimistic_begin(self) -> None:
        """See ``pod_ops.optimistic_begin``."""

    def optimistic_end(self, valid: bool) -> None:
        """See ``pod_ops.optimistic_end``."""

    def critical_want(self, lock: int) -> None:
        """See ``pod_ops.critical_want``."""

    def critical_enter(self, lock: int) -> None:
        """See ``pod_ops.critical_enter``."""

    def critical_leave(self, lock: int) -> None:
        """See ``pod_ops.critical_leave``."""

    # Inside

    def _check(self, off: int, n_bytes: int) -> None:
        if off & 7 or n_bytes < 0 or not 0 <= off <= self._node.nbytes - n_bytes:
            raise PodAddressError(
                f"{n_bytes} B at offset {off}: words lie at multiples of {WORD} inside the region"
                f" of {self._node.nbytes} B"
            )

    def _word(self, off: int) -> int:
        if off & 7 or not 0 <= off < self._node.nbytes:
            self._check(off, WORD)
        return off // WORD

    def _line(self, off: int) -> int:
        if not 0 <= off < self._node.nbytes:
            self._check(off & -WORD, WORD)
        return off & -LINE
