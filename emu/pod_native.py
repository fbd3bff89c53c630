"""The native executor: pod programs compiled onto a mapping, with the processor's own flushes.

The mapping is of a file, of ``/dev/shm``, or of a DAX device: memory that several hosts share when
it is CXL memory, and that one host's processes share on a laptop, where hardware keeps it coherent
and a missing flush goes unseen. What the operations do is what the machine does; flushes that the
processor lacks raise ``FlushUnsupportedError`` (see flush_instructions).

Node-local locks and words lie in a second mapping, shared by the processes of the node.

``dma_write`` and ``dma_read`` stand in for a copy engine where there is none: the words pass the
cache by non-temporal stores, with the lines flushed before and, when read, before the copy. They
are complete when they return; their handles may be waited for any number of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.extending import register_jitable

from cxlbench.emu import pod_ops
from cxlbench.emu.flush_instructions import (
    clflush,
    clflushopt,
    clwb,
    mfence,
    ntstore,
    peek,
    poke,
    sfence,
)
from cxlbench.emu.pod_dma import address_of, readable_words, writable_words
from cxlbench.emu.pod_kernel import kernel
from cxlbench.emu.pod_local import check_byte, check_run, check_word, handle_class, wait_a_little
from cxlbench.emu.pod_overloads import implement
from cxlbench.emu.pod_perform import PerformedOperations


class NativeFields(NamedTuple):
    """Addresses of this process, sizes, and who it is."""

    region: int
    region_bytes: int
    locks: int
    locks_n: int
    words: int
    words_n: int
    node: int
    token: int


class NativeMemory(PerformedOperations, NativeFields):
    """A node's memory as one of its processes has it; all addresses are of this process."""

    __slots__ = ()


def _is_native(mem: Any) -> bool:
    return handle_class(mem) is NativeMemory


@register_jitable
def _word(mem: NativeFields, off: int) -> int:
    check_word(mem, off)
    return mem.region + off


@register_jitable
def _byte(mem: NativeFields, off: int) -> int:
    check_byte(mem, off)
    return mem.region + off


@register_jitable
def _load(mem: NativeFields, off: int) -> int:
    return peek(_word(mem, off))  # type: ignore[no-any-return]


@register_jitable
def _store(mem: NativeFields, off: int, value: int) -> None:
    poke(_word(mem, off), value)


@register_jitable
def _ntstore(mem: NativeFields, off: int, value: int) -> None:
    ntstore(_word(mem, off), value)


@register_jitable
def _clflush(mem: NativeFields, off: int) -> None:
    clflush(_byte(mem, off))


@register_jitable
def _clflushopt(mem: NativeFields, off: int) -> None:
    clflushopt(_byte(mem, off))


@register_jitable
def _clwb(mem: NativeFields, off: int) -> None:
    clwb(_byte(mem, off))


@register_jitable
def _sfence(mem: NativeFields) -> None:
    sfence()


@register_jitable
def _mfence(mem: NativeFields) -> None:
    mfence()


@register_jitable
def _pause(mem: NativeFields, off: int, n_bytes: int) -> None:
    wait_a_little()


@kernel
def _flush_run(address: int, n_words: int) -> None:
    for line in range(address & -64, address + 8 * n_words, 64):
        clflush(line)
    mfence()


@kernel
def _dma_write(mem: NativeFields, off: int, words: Any) -> int:
    check_run(mem, off, 8 * len(words))
    target = mem.region + off
    source = address_of(words)
    _flush_run(target, len(words))
    for at in range(0, 8 * len(words), 8):
        ntstore(target + at, peek(source + at))
    sfence()
    return 1


@kernel
def _dma_read(mem: NativeFields, off: int, words: Any) -> int:
    check_run(mem, off, 8 * len(words))
    source = mem.region + off
    target = address_of(words)
    _flush_run(source, len(words))
    for at in range(0, 8 * len(words), 8):
        poke(target + at, peek(source + at))
    _flush_run(source, len(words))
    return 1


@register_jitable
def _dma_wait(mem: NativeFields, handle: int) -> None:
    pass


@register_jitable
def _dma_done(mem: NativeFields, handle: int) -> bool:
    return True


for _operation, _function in (
    (pod_ops.load, _load),
    (pod_ops.store, _store),
    (pod_ops.ntstore, _ntstore),
    (pod_ops.clflush, _clflush),
    (pod_ops.clflushopt, _clflushopt),
    (pod_ops.clwb, _clwb),
    (pod_ops.sfence, _sfence),
    (pod_ops.mfence, _mfence),
    (pod_ops.pause, _pause),
    (pod_ops.dma_wait, _dma_wait),
    (pod_ops.dma_done, _dma_done),
):
    implement(_operation, _is_native, _function)
implement(pod_ops.dma_write, _is_native, _dma_write, check=readable_words)
implement(pod_ops.dma_read, _is_native, _dma_read, check=writable_words)
