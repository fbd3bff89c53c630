# ruff: noqa: D102 - the methods are documented by the operations of their names
"""Using the handle of a live pod from interpreted code, one operation a call.

Every method is the operation of the same name. All of them go through two compiled functions, so
that an interactive use compiles little; a call costs a few microseconds. Programs that care compile
themselves (``pod_ops.compiled`` or ``pod_compile.compiled_once``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cxlbench.emu import pod_ops
from cxlbench.emu.pod_compile import compiled_once, prepare

Words = NDArray[np.int64]

_LOAD = 0
_STORE = 1
_CLFLUSH = 2
_CLFLUSHOPT = 3
_CLWB = 4
_NTSTORE = 5
_SFENCE = 6
_MFENCE = 7
_PAUSE = 8
_NOW = 9
_LOCAL_LOCK = 10
_LOCAL_UNLOCK = 11
_LOCAL_LOAD = 12
_LOCAL_STORE = 13
_LOCAL_CAS = 14
_LOCAL_ADD = 15
_DMA_WAIT = 16
_DMA_DONE = 17


def perform_one(mem: Any, operation: int, a: int, b: int, c: int) -> int:
    """Perform one operation by number; what has no result gives 0."""
    result = 0
    if operation == _LOAD:
        result = pod_ops.load(mem, a)
    elif operation == _STORE:
        pod_ops.store(mem, a, b)
    elif operation == _CLFLUSH:
        pod_ops.clflush(mem, a)
    elif operation == _CLFLUSHOPT:
        pod_ops.clflushopt(mem, a)
    elif operation == _CLWB:
        pod_ops.clwb(mem, a)
    elif operation == _NTSTORE:
        pod_ops.ntstore(mem, a, b)
    elif operation == _SFENCE:
        pod_ops.sfence(mem)
    elif operation == _MFENCE:
        pod_ops.mfence(mem)
    elif operation == _PAUSE:
        pod_ops.pause(mem, a, b)
    elif operation == _NOW:
        result = pod_ops.now(mem)
    elif operation == _LOCAL_LOCK:
        pod_ops.local_lock(mem, a)
    elif operation == _LOCAL_UNLOCK:
        pod_ops.local_unlock(mem, a)
    elif operation == _LOCAL_LOAD:
        result = pod_ops.local_load(mem, a)
    elif operation == _LOCAL_STORE:
        pod_ops.local_store(mem, a, b)
    elif operation == _LOCAL_CAS:
        result = pod_ops.local_cas(mem, a, b, c)
    elif operation == _LOCAL_ADD:
        result = pod_ops.local_add(mem, a, b)
    elif operation == _DMA_WAIT:
        pod_ops.dma_wait(mem, a)
    elif operation == _DMA_DONE and pod_ops.dma_done(mem, a):
        result = 1
    return result


def start_dma(mem: Any, writing: bool, off: int, words: Words) -> int:
    """Start a DMA."""
    if writing:
        return pod_ops.dma_write(mem, off, words)
    return pod_ops.dma_read(mem, off, words)


_perform: Any = compiled_once(perform_one)
_start_dma: Any = compiled_once(start_dma)


def prepare_for(memory: Any) -> None:
    """Compile both, or load them from disk, for handles of this type."""
    prepare(_perform, memory, _LOAD, 0, 0, 0)
    prepare(_start_dma, memory, True, 0, np.zeros(1, dtype=np.int64))


class PerformedOperations:
    """The operations as methods, for the NamedTuple classes of live pods."""

    __slots__ = ()

    node: int

    def load(self, off: int) -> int:
        return int(_perform(self, _LOAD, off, 0, 0))

    def store(self, off: int, value: int) -> None:
        _perform(self, _STORE, off, value, 0)

    def clflush(self, off: int) -> None:
        _perform(self, _CLFLUSH, off, 0, 0)

    def clflushopt(self, off: int) -> None:
        _perform(self, _CLFLUSHOPT, off, 0, 0)

    def clwb(self, off: int) -> None:
        _perform(self, _CLWB, off, 0, 0)

    def ntstore(self, off: int, value: int) -> None:
        _perform(self, _NTSTORE, off, value, 0)

    def sfence(self) -> None:
        _perform(self, _SFENCE, 0, 0, 0)

    def mfence(self) -> None:
        _perform(self, _MFENCE, 0, 0, 0)

    def pause(self, off: int, n_bytes: int) -> None:
        _perform(self, _PAUSE, off, n_bytes, 0)

    def now(self) -> int:
        return int(_perform(self, _NOW, 0, 0, 0))

    def dma_write(self, off: int, words: Words) -> int:
        return int(_start_dma(self, True, off, words))

    def dma_read(self, off: int, words: Words) -> int:
        return int(_start_dma(self, False, off, words))

    def dma_wait(self, handle: int) -> None:
        _perform(self, _DMA_WAIT, handle, 0, 0)

    def dma_done(self, handle: int) -> bool:
        return bool(_perform(self, _DMA_DONE, handle, 0, 0))

    def local_lock(self, i: int) -> None:
        _perform(self, _LOCAL_LOCK, i, 0, 0)

    def local_unlock(self, i: int) -> None:
        _perform(self, _LOCAL_UNLOCK, i, 0, 0)

    def local_load(self, i: int) -> int:
        return int(_perform(self, _LOCAL_LOAD, i, 0, 0))

    def local_store(self, i: int, value: int) -> None:
        _perform(self, _LOCAL_STORE, i, value, 0)

    def local_cas(self, i: int, expected: int, new: int) -> int:
        return int(_perform(self, _LOCAL_CAS, i, expected, new))

    def local_add(self, i: int, delta: int) -> int:
        return int(_perform(self, _LOCAL_ADD, i, delta, 0))

    def node_id(self) -> int:
        return self.node

    def optimistic_begin(self) -> None:
        """Do nothing: nobody checks here."""

    def optimistic_end(self, valid: bool) -> None:
        """Do nothing: nobody checks here."""

    def critical_want(self, lock: int) -> None:
        """Do nothing: nobody checks here."""

    def critical_enter(self, lock: int) -> None:
        """Do nothing: nobody checks here."""

    def critical_leave(self, lock: int) -> None:
        """Do nothing: nobody checks here."""
