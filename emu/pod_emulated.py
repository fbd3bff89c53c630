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

from cxlbench.emu import pod_dma, pod_ops
from cxlbench.emu.flush_instructions import full_fence, keep_apart, peek, poke
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
from cxlbench.emu.pod_device_lines import charge, wait_charged
from cxlbench.emu.pod_kernel import WHOLE, EmulatedFields, kernel
from cxlbench.emu.pod_layout import (
    BOOKED_UNTIL_AT,
    FENCE_ARRIVES_AT,
    FLUSH_NS_AT,
    LAST_LINE_AT,
    NEVER,
    SCRATCH_AT,
    SETTINGS_AT,
)
from cxlbench.emu.pod_local import check_byte, check_word, handle_class, wait_a_little
from cxlbench.emu.pod_overloads import implement
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
    poke(mem.slot + BOOKED_UNTIL_AT, 0)
    at = lock_set(mem, off >> 6)
    flush_line(mem, at, off >> 6)
    unlock_set(at)
    charge(mem, peek(mem.slot + BOOKED_UNTIL_AT), peek(mem.control + SETTINGS_AT + FLUSH_NS_AT))
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
        poke(mem.slot + BOOKED_UNTIL_AT, 0)
        land_due(mem, NEVER)
        charge(mem, peek(mem.slot + BOOKED_UNTIL_AT), 0)
        wait_charged(mem)


@kernel
def emulated_pause(mem: EmulatedFields, off: int, n_bytes: int) -> None:
    """Look about, spin, and let somebody else run."""
    keep_apart()
    tick(mem)
    look(mem)
    wait_a_little()


for _operation, _function in (
    (pod_ops.load, emulated_load),
    (pod_ops.store, emulated_store),
    (pod_ops.clflush, emulated_clflush),
    (pod_ops.clflushopt, emulated_clflushopt),
    (pod_ops.clwb, emulated_clwb),
    (pod_ops.ntstore, emulated_ntstore),
    (pod_ops.sfence, emulated_fence),
    (pod_ops.mfence, emulated_fence),
    (pod_ops.pause, emulated_pause),
    (pod_ops.dma_wait, pod_dma.wait),
    (pod_ops.dma_done, pod_dma.is_done),
):
    implement(_operation, _is_emulated, _function)
implement(pod_ops.dma_write, _is_emulated, pod_dma.start_write, check=pod_dma.readable_words)
implement(pod_ops.dma_read, _is_emulated, pod_dma.start_read, check=pod_dma.writable_words)
