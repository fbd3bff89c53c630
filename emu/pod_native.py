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

from numba.extending import overload, register_jitable

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
from cxlbench.emu.pod_dma import address_of, check_words_type
from cxlbench.emu.pod_kernel import kernel
from cxlbench.emu.pod_local import check_byte, check_run, check_word, handle_class, wait_a_little
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


@kernel
def _flush_run(address: int, n_words: int) -> None:
    for line in range(address & -64, address + 8 * n_words, 64):
        clflush(line)
    mfence()


@kernel
def native_dma_write(mem: NativeFields, off: int, words: Any) -> int:
    """Write the words past the cache, and see them out of the processor."""
    check_run(mem, off, 8 * len(words))
    target = mem.region + off
    source = address_of(words)
    _flush_run(target, len(words))
    for at in range(0, 8 * len(words), 8):
        ntstore(target + at, peek(source + at))
    sfence()
    return 1


@kernel
def native_dma_read(mem: NativeFields, off: int, words: Any) -> int:
    """Read the words from memory, and leave no copies of them behind."""
    check_run(mem, off, 8 * len(words))
    source = mem.region + off
    target = address_of(words)
    _flush_run(source, len(words))
    for at in range(0, 8 * len(words), 8):
        poke(target + at, peek(source + at))
    _flush_run(source, len(words))
    return 1


@overload(pod_ops.load, strict=False)
def _load(mem: Any, off: Any) -> Any:
    return (lambda mem, off: peek(_word(mem, off))) if _is_native(mem) else None


@overload(pod_ops.store, strict=False)
def _store(mem: Any, off: Any, value: Any) -> Any:
    return (lambda mem, off, value: poke(_word(mem, off), value)) if _is_native(mem) else None


@overload(pod_ops.clflush, strict=False)
def _clflush(mem: Any, off: Any) -> Any:
    return (lambda mem, off: clflush(_byte(mem, off))) if _is_native(mem) else None


@overload(pod_ops.clflushopt, strict=False)
def _clflushopt(mem: Any, off: Any) -> Any:
    return (lambda mem, off: clflushopt(_byte(mem, off))) if _is_native(mem) else None


@overload(pod_ops.clwb, strict=False)
def _clwb(mem: Any, off: Any) -> Any:
    return (lambda mem, off: clwb(_byte(mem, off))) if _is_native(mem) else None


@overload(pod_ops.ntstore, strict=False)
def _ntstore(mem: Any, off: Any, value: Any) -> Any:
    return (lambda mem, off, value: ntstore(_word(mem, off), value)) if _is_native(mem) else None


@overload(pod_ops.sfence, strict=False)
def _sfence(mem: Any) -> Any:
    return (lambda mem: sfence()) if _is_native(mem) else None


@overload(pod_ops.mfence, strict=False)
def _mfence(mem: Any) -> Any:
    return (lambda mem: mfence()) if _is_native(mem) else None


@overload(pod_ops.pause, strict=False)
def _pause(mem: Any, off: Any, n_bytes: Any) -> Any:
    return (lambda mem, off, n_bytes: wait_a_little()) if _is_native(mem) else None


@overload(pod_ops.dma_write, strict=False)
def _dma_write(mem: Any, off: Any, words: Any) -> Any:
    if not _is_native(mem):
        return None
    check_words_type(words, written=False)
    return lambda mem, off, words: native_dma_write(mem, off, words)


@overload(pod_ops.dma_read, strict=False)
def _dma_read(mem: Any, off: Any, words: Any) -> Any:
    if not _is_native(mem):
        return None
    check_words_type(words, written=True)
    return lambda mem, off, words: native_dma_read(mem, off, words)


@overload(pod_ops.dma_wait, strict=False)
def _dma_wait(mem: Any, handle: Any) -> Any:
    return (lambda mem, handle: None) if _is_native(mem) else None


@overload(pod_ops.dma_done, strict=False)
def _dma_done(mem: Any, handle: Any) -> Any:
    return (lambda mem, handle: True) if _is_native(mem) else None
