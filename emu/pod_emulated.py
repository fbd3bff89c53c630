"""The emulated executor: pod programs compiled onto node caches in memory that processes share.

``EmulatedMemory`` is a node's handle as one process (one thread) of the node has it: a NamedTuple
of addresses and sizes, which numba recognises and for which every operation of ``pod_ops`` has an
implementation here. Interpreted code may use the same handle through its methods, at microseconds
an operation. The addresses are those of the attachment that made the handle (pod_attachment); they
are valid until it is closed. Two threads need two handles.

What each operation does is the memory model of the pod; how, in pod_cache_kernels.
Left out: naming the source lines of a stale read. The explorer does that with the same program.
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from cxlbench.emu import pod_dma, pod_ops
from cxlbench.emu.flush_instructions import full_fence, keep_apart, monotonic_ns, peek, poke
from cxlbench.emu.pod_cache_kernels import (
    data_at,
    fill,
    find,
    flush_line,
    give_up,
    lock_set,
    look,
    tag_at,
    tick,
    unlock_set,
)
from cxlbench.emu.pod_device_lines import wait_charged
from cxlbench.emu.pod_kernel import WHOLE, EmulatedFields, kernel
from cxlbench.emu.pod_layout import (
    CHARGED_UNTIL_AT,
    FENCE_ARRIVES_AT,
    FLUSH_NS_AT,
    LAST_LINE_AT,
    NEVER,
    SCRATCH_AT,
    SETTINGS_AT,
)
from cxlbench.emu.pod_local import check_byte, check_word, handle_class, wait_a_little
from cxlbench.emu.pod_perform import PerformedOperations
from cxlbench.emu.pod_posted import land_due, post


class EmulatedMemory(PerformedOperations, EmulatedFields):
    """A node's memory as one of its processes has it; all addresses are of this process."""

    __slots__ = ()


def _is_emulated(mem: Any) -> bool:
    return handle_class(mem) is EmulatedMemory


@kernel
def _load_missing(mem: EmulatedFields, at: int, off: int) -> int:
    keep_apart()
    way = fill(mem, at, off >> 6)
    value = peek(data_at(mem, at, way) + (off & 63))
    unlock_set(at)
    wait_charged(mem)
    return int(value)


@kernel
def _store_missing(mem: EmulatedFields, at: int, off: int, value: int) -> None:
    keep_apart()
    way = fill(mem, at, off >> 6)
    poke(data_at(mem, at, way) + (off & 63), value)
    poke(tag_at(at, way), peek(tag_at(at, way)) | 1)
    unlock_set(at)
    wait_charged(mem)


@kernel
def emulated_load(mem: EmulatedFields, off: int) -> int:
    """Load from the node's copy of the line."""
    check_word(mem, off)
    tick(mem)
    line = off >> 6
    poke(mem.slot + LAST_LINE_AT, line)
    at = lock_set(mem, line)
    way = find(mem, at, line)
    if way < 0:
        return _load_missing(mem, at, off)
    value = peek(data_at(mem, at, way) + (off & 63))
    unlock_set(at)
    return int(value)


@kernel
def emulated_store(mem: EmulatedFields, off: int, value: int) -> None:
    """Store into the node's copy of the line."""
    check_word(mem, off)
    tick(mem)
    line = off >> 6
    poke(mem.slot + LAST_LINE_AT, line)
    at = lock_set(mem, line)
    way = find(mem, at, line)
    if way < 0:
        _store_missing(mem, at, off, value)
        return
    poke(data_at(mem, at, way) + (off & 63), value)
    tag = tag_at(at, way)
    poke(tag, peek(tag) | 1)
    unlock_set(at)


@kernel
def emulated_clflush(mem: EmulatedFields, off: int) -> None:
    """Write back what the node has of the line, and drop the copy."""
    keep_apart()
    check_byte(mem, off)
    tick(mem)
    at = lock_set(mem, off >> 6)
    flush_line(mem, at, off >> 6)
    unlock_set(at)
    flush_ns = peek(mem.control + SETTINGS_AT + FLUSH_NS_AT)
    if flush_ns:
        poke(mem.slot + CHARGED_UNTIL_AT, monotonic_ns() + flush_ns)
        wait_charged(mem)


@kernel
def emulated_clflushopt(mem: EmulatedFields, off: int) -> None:
    """Drop the copy, and post its write-back if it is dirty."""
    keep_apart()
    check_byte(mem, off)
    tick(mem)
    at = lock_set(mem, off >> 6)
    way = find(mem, at, off >> 6)
    if way >= 0:
        give_up(mem, at, way)
    unlock_set(at)


@kernel
def emulated_clwb(mem: EmulatedFields, off: int) -> None:
    """Post the write-back of a dirty copy, and keep the copy."""
    keep_apart()
    check_byte(mem, off)
    tick(mem)
    line = off >> 6
    at = lock_set(mem, line)
    way = find(mem, at, line)
    if way >= 0 and peek(tag_at(at, way)) & 1:
        post(mem, at, line, WHOLE, data_at(mem, at, way))
        poke(tag_at(at, way), (line + 1) << 1)
    unlock_set(at)


@kernel
def emulated_ntstore(mem: EmulatedFields, off: int, value: int) -> None:
    """Give up the copy, then post the word."""
    keep_apart()
    check_word(mem, off)
    tick(mem)
    line = off >> 6
    at = lock_set(mem, line)
    way = find(mem, at, line)
    if way >= 0:
        give_up(mem, at, way)
    poke(mem.slot + SCRATCH_AT + (off & 63), value)
    post(mem, at, line, 1 << ((off & 63) >> 3), mem.slot + SCRATCH_AT)
    unlock_set(at)


@kernel
def emulated_fence(mem: EmulatedFields) -> None:
    """Order; and wait for arrival, if this device promises that."""
    keep_apart()
    tick(mem)
    full_fence()
    if peek(mem.control + SETTINGS_AT + FENCE_ARRIVES_AT):
        land_due(mem, NEVER)


@kernel
def emulated_pause(mem: EmulatedFields) -> None:
    """Look about, spin, and let somebody else run."""
    keep_apart()
    tick(mem)
    look(mem)
    wait_a_little()


@overload(pod_ops.load, strict=False)
def _load(mem: Any, off: Any) -> Any:
    return (lambda mem, off: emulated_load(mem, off)) if _is_emulated(mem) else None


@overload(pod_ops.store, strict=False)
def _store(mem: Any, off: Any, value: Any) -> Any:
    return (lambda mem, off, value: emulated_store(mem, off, value)) if _is_emulated(mem) else None


@overload(pod_ops.clflush, strict=False)
def _clflush(mem: Any, off: Any) -> Any:
    return (lambda mem, off: emulated_clflush(mem, off)) if _is_emulated(mem) else None


@overload(pod_ops.clflushopt, strict=False)
def _clflushopt(mem: Any, off: Any) -> Any:
    return (lambda mem, off: emulated_clflushopt(mem, off)) if _is_emulated(mem) else None


@overload(pod_ops.clwb, strict=False)
def _clwb(mem: Any, off: Any) -> Any:
    return (lambda mem, off: emulated_clwb(mem, off)) if _is_emulated(mem) else None


@overload(pod_ops.ntstore, strict=False)
def _ntstore(mem: Any, off: Any, value: Any) -> Any:
    if not _is_emulated(mem):
        return None
    return lambda mem, off, value: emulated_ntstore(mem, off, value)


@overload(pod_ops.sfence, strict=False)
@overload(pod_ops.mfence, strict=False)
def _fence(mem: Any) -> Any:
    return (lambda mem: emulated_fence(mem)) if _is_emulated(mem) else None


@overload(pod_ops.pause, strict=False)
def _pause(mem: Any, off: Any, n_bytes: Any) -> Any:
    return (lambda mem, off, n_bytes: emulated_pause(mem)) if _is_emulated(mem) else None


@overload(pod_ops.dma_write, strict=False)
def _dma_write(mem: Any, off: Any, words: Any) -> Any:
    if not _is_emulated(mem):
        return None
    pod_dma.check_words_type(words, written=False)
    return lambda mem, off, words: pod_dma.start(mem, pod_dma.WRITE, off, words)


@overload(pod_ops.dma_read, strict=False)
def _dma_read(mem: Any, off: Any, words: Any) -> Any:
    if not _is_emulated(mem):
        return None
    pod_dma.check_words_type(words, written=True)
    return lambda mem, off, words: pod_dma.start(mem, pod_dma.READ, off, words)


@overload(pod_ops.dma_wait, strict=False)
def _dma_wait(mem: Any, handle: Any) -> Any:
    return (lambda mem, handle: pod_dma.wait(mem, handle)) if _is_emulated(mem) else None


@overload(pod_ops.dma_done, strict=False)
def _dma_done(mem: Any, handle: Any) -> Any:
    return (lambda mem, handle: pod_dma.is_done(mem, handle)) if _is_emulated(mem) else None
