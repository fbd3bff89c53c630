# ruff: noqa: D102 - the methods of the protocol are documented by the functions of their names
"""The pod's operations: the words in which a shared-memory program for the pod is written.

A program is a plain function whose first argument ``mem`` is a node's memory handle and whose body
uses the functions below. The same text runs interpreted under the explorer, where every operation
is a step of a schedule, and compiled on real or emulated memory: there numba picks the
implementation by the type of ``mem``.

The setting is TraCT's: nodes share a CXL memory device, ``D``, that no hardware keeps coherent.
``C_n`` is the private cache of node ``n``: coherent inside the node, **not** between nodes. A line
is ``LINE`` bytes; a word is ``WORD`` bytes: a signed 64-bit integer at an aligned offset. Offsets
count bytes from the region's start; 0 is an ordinary offset. Nothing bigger than a word is atomic,
and no atomic operation works across nodes.

Left out: loads and stores of other sizes, and addresses (they do not mean the same on two nodes).
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

import numba
from numba.extending import overload, register_jitable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

LINE = 64
"""Bytes of a cache line: what moves between a node's cache and the device."""
WORD = 8
"""Bytes of a word: what is loaded and stored, and the largest unit that is atomic."""

F = TypeVar("F", bound="Callable[..., Any]")


class UnfinishedSectionError(RuntimeError):
    """A ``with optimistic(mem)`` block ended without saying whether what it had read was valid."""


@runtime_checkable
class PodMemory(Protocol):
    """What a node's memory handle must offer to be used from interpreted programs.

    Each method is the operation of the same name below. Handles of compiled executors are
    NamedTuples known to numba, and need these methods only where interpreted code uses them.
    """

    def load(self, off: int) -> int: ...
    def store(self, off: int, value: int) -> None: ...
    def clflush(self, off: int) -> None: ...
    def clflushopt(self, off: int) -> None: ...
    def clwb(self, off: int) -> None: ...
    def ntstore(self, off: int, value: int) -> None: ...
    def sfence(self) -> None: ...
    def mfence(self) -> None: ...
    def pause(self, off: int, n_bytes: int) -> None: ...
    def now(self) -> int: ...
    def dma_write(self, off: int, words: Words) -> int: ...
    def dma_read(self, off: int, words: Words) -> int: ...
    def dma_wait(self, handle: int) -> None: ...
    def dma_done(self, handle: int) -> bool: ...
    def local_lock(self, i: int) -> None: ...
    def local_unlock(self, i: int) -> None: ...
    def local_load(self, i: int) -> int: ...
    def local_store(self, i: int, value: int) -> None: ...
    def local_cas(self, i: int, expected: int, new: int) -> int: ...
    def local_add(self, i: int, delta: int) -> int: ...
    def node_id(self) -> int: ...
    def optimistic_begin(self) -> None: ...
    def optimistic_end(self, valid: bool) -> None: ...
    def critical_want(self, lock: int) -> None: ...
    def critical_enter(self, lock: int) -> None: ...
    def critical_leave(self, lock: int) -> None: ...


class NamesRanges(Protocol):
    """A pod or a memory handle that keeps names of address ranges for its reports."""

    def name_range(self, off: int, n_bytes: int, name: str) -> None: ...


def program(function: F) -> F:
    """Mark ``function`` as a pod program: it stays itself, and compiled code may call it."""
    marked: F = register_jitable(function)
    return marked


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a program; it holds no interpreter lock while it runs."""
    dispatcher: Callable[..., Any] = numba.njit(nogil=True, cache=False)(function)
    return dispatcher


@program
def line_of(off: int) -> int:
    """Return the offset of the line that holds byte ``off``."""
    return off & -LINE


# Loads, stores and what moves lines


def load(mem: PodMemory, off: int) -> int:
    """Return the word at ``off``.

    It comes from this node's cache if its line is there, however old; else the line is filled from
    ``D`` overlaid with this node's own write-backs in flight, the newest last.
    """
    return mem.load(off)


def store(mem: PodMemory, off: int, value: int) -> None:
    """Write the word into this node's cache, after filling its line.

    No other node sees it until the line is written back.
    """
    mem.store(off, value)


def clflush(mem: PodMemory, off: int) -> None:
    """Write the whole line back if it is dirty, and drop the copy.

    This node's earlier write-backs of the line land first. On return all of that is in ``D``; the
    next load sees ``D``.
    """
    mem.clflush(off)


def clflushopt(mem: PodMemory, off: int) -> None:
    """Drop the copy; if it was dirty, *post* the write-back of the whole line.

    A posted write-back lands at any later time, in posting order among this node's write-backs of
    that line.
    """
    mem.clflushopt(off)


def clwb(mem: PodMemory, off: int) -> None:
    """Do as ``clflushopt`` does, but keep the copy, clean."""
    mem.clwb(off)


def ntstore(mem: PodMemory, off: int, value: int) -> None:
    """Store past the cache: the word itself is posted.

    The line leaves the cache; if it was dirty, its write-back is posted before the word.
    """
    mem.ntstore(off, value)


def sfence(mem: PodMemory) -> None:
    """Order this node's earlier stores and write-backs before later ones, inside the node.

    Whether posted write-backs have *arrived* in ``D`` on return is a property of the device; by
    default it is not promised (TraCT's finding about ``clflushopt``).
    """
    mem.sfence()


def mfence(mem: PodMemory) -> None:
    """Do as ``sfence`` does, for loads too."""
    mem.mfence()


# Waiting and time


def pause(mem: PodMemory, off: int, n_bytes: int) -> None:
    """Wait a little for a change in the lines of ``[off, off + n_bytes)``.

    Every loop over ``load`` needs one. It drops no copy, so a poll is flush, load, pause; and it
    may return without any change. Explored, the task sleeps until something lands on one of the
    lines in ``D`` or this node's copy of one is dropped.
    """
    mem.pause(off, n_bytes)


def now(mem: PodMemory) -> int:
    """Return the monotonic time in ns."""
    return mem.now()


# DMA between the region and memory that is not shared


def dma_write(mem: PodMemory, off: int, words: Words) -> int:
    """Start writing ``words`` (1-d int64 array) to ``off``; return a handle.

    Coherent with this node's cache only: its write-backs of these lines land first and its copies
    are dropped. The words arrive in any order and are in ``D`` once ``dma_wait`` returned or
    ``dma_done`` said so; until then ``words`` must not be changed.
    """
    return mem.dma_write(off, words)


def dma_read(mem: PodMemory, off: int, words: Words) -> int:
    """Start reading ``len(words)`` words from ``off``; return a handle.

    Coherent with this node's cache only. ``words`` is filled when the completion is seen.
    """
    return mem.dma_read(off, words)


def dma_wait(mem: PodMemory, handle: int) -> None:
    """Wait until that DMA is complete; the handle is then spent."""
    mem.dma_wait(handle)


def dma_done(mem: PodMemory, handle: int) -> bool:
    """Return whether that DMA is complete; once it said True the handle is spent."""
    return mem.dma_done(handle)


# Node-local DRAM: coherent inside the node, lost with it


def local_lock(mem: PodMemory, i: int) -> None:
    """Take lock ``i`` of this node's own memory.

    The node's processes share it. It is not re-entrant.
    """
    mem.local_lock(i)


def local_unlock(mem: PodMemory, i: int) -> None:
    """Release lock ``i`` of this node's own memory."""
    mem.local_unlock(i)


def local_load(mem: PodMemory, i: int) -> int:
    """Return word ``i`` of this node's own memory."""
    return mem.local_load(i)


def local_store(mem: PodMemory, i: int, value: int) -> None:
    """Set word ``i`` of this node's own memory."""
    mem.local_store(i, value)


def local_cas(mem: PodMemory, i: int, expected: int, new: int) -> int:
    """Set word ``i`` of this node's own memory to ``new`` if it is ``expected``, atomically.

    Returns the old value, whether it was replaced or not.
    """
    return mem.local_cas(i, expected, new)


def local_add(mem: PodMemory, i: int, delta: int) -> int:
    """Add ``delta`` to word ``i`` of this node's own memory, atomically; return the old value."""
    return mem.local_add(i, delta)


def node_id(mem: PodMemory) -> int:
    """Return the number of the node that ``mem`` belongs to."""
    return mem.node_id()


# What a program tells the checker: nothing at all in compiled code


def optimistic_begin(mem: PodMemory) -> None:
    """Begin a section whose loads are provisional: the program validates them itself."""
    mem.optimistic_begin()


def optimistic_end(mem: PodMemory, valid: bool) -> None:
    """End the section: its loads were found valid, or they are thrown away.

    What was stale among valid loads is reported; what is thrown away may have been anything.
    """
    mem.optimistic_end(valid)


def critical_want(mem: PodMemory, lock: int) -> None:
    """Say that this task begins to wait for critical section ``lock``."""
    mem.critical_want(lock)


def critical_enter(mem: PodMemory, lock: int) -> None:
    """Say that this task is inside critical section ``lock``, where nobody else may be."""
    mem.critical_enter(lock)


def critical_leave(mem: PodMemory, lock: int) -> None:
    """Say that this task leaves critical section ``lock``."""
    mem.critical_leave(lock)


@overload(optimistic_begin, strict=False)
def _optimistic_begin_compiled(mem: Any) -> Callable[..., None]:
    return lambda mem: None


@overload(optimistic_end, strict=False)
def _optimistic_end_compiled(mem: Any, valid: Any) -> Callable[..., None]:
    return lambda mem, valid: None


@overload(critical_want, strict=False)
@overload(critical_enter, strict=False)
@overload(critical_leave, strict=False)
def _critical_compiled(mem: Any, lock: Any) -> Callable[..., None]:
    return lambda mem, lock: None


# Host side only


class OptimisticSection:
    """The block of ``with optimistic(mem) as section:``, which must set ``section.valid``."""

    def __init__(self, mem: PodMemory) -> None:
        self.valid: bool | None = None
        self._mem = mem

    def __enter__(self) -> Self:
        self._mem.optimistic_begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mem.optimistic_end(bool(self.valid) and kind is None)
        if kind is None and self.valid is None:
            raise UnfinishedSectionError(
                "an optimistic section ended without a verdict: set section.valid to True or"
                " False inside the block"
            )


def optimistic(mem: PodMemory) -> OptimisticSection:
    """Put provisional loads into a ``with`` block, in interpreted code.

    The block sets ``section.valid`` to what its validation found. Left by an exception, its loads
    count as thrown away.
    """
    return OptimisticSection(mem)


def name_range(pod: NamesRanges, off: int, n_bytes: int, name: str) -> None:
    """Name the bytes ``[off, off + n_bytes)`` in reports, for example "lock 3, slot of node 1"."""
    pod.name_range(off, n_bytes, name)
