"""DMA of an emulated pod: a copy engine beside the caches, asynchronous and cut at lines.

A DMA moves words between the region and memory that no other node sees (a GPU's, in TraCT, whose
payload never passes a CPU cache). It is coherent with the cache of its own node only: for each line
that it writes, what the node has of the line lands first and the copy is dropped; each line that it
reads is what the node's loads would see.

Nothing runs in the background of a live process: lines move when the DMA is started, when its
completion is asked for, and at the latest when it is waited for, in an order and at a pace drawn
from the process's generator. A process that is killed leaves a DMA cut between two lines.

Where the device charges (DeviceCosts), all lines of a DMA are booked on the device's pipe when it
is started, and it is complete when the last has passed and the device's latency after it; what its
process does meanwhile does not delay it.

A handle is spent once its completion was seen; using it again is refused. The array is kept alive
until then. Left out: several engines, and DMA between two regions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as _untyped_cgutils
from numba.core.errors import TypingError

from cxlbench.emu.flush_instructions import (
    intrinsic,
    keep_apart,
    monotonic_ns,
    peek,
    poke,
)
from cxlbench.emu.pod_cache_kernels import (
    data_at,
    find,
    flush_line,
    lock_set,
    unlock_set,
    view_line,
)
from cxlbench.emu.pod_device_lines import book, put_line, wait_until
from cxlbench.emu.pod_kernel import WHOLE, EmulatedFields, copy_masked, draw, kernel
from cxlbench.emu.pod_layout import FILL_NS_AT, SCRATCH_AT, SETTINGS_AT
from cxlbench.emu.pod_local import check_run

cgutils: Any = _untyped_cgutils
_types: Any = types

DMA_SLOTS = 256
"""DMA that one process can have in flight."""
DMA_TABLE_BYTES = 64 + 128 * DMA_SLOTS

READ = 0
WRITE = 1

# A slot of the table, bytes from its beginning; the table begins with the next generation

_HANDLE = 0
_KIND = 8
_OFFSET = 16
_WORDS = 24
_N_WORDS = 32
_PIECES = 40
_MOVED = 48
_START = 56
_HELD = 64
_READY_NS = 72


class PodDmaError(RuntimeError):
    """A DMA that cannot be started, or a handle that is not that of one in flight."""


def readable_words(words: Any) -> None:
    """Refuse, when a program is compiled, what is not a one-dimensional array of int64."""
    if not _is_words(words):
        raise TypingError(f"a DMA moves words of a contiguous {_ARRAY}, not {words}")


def writable_words(words: Any) -> None:
    """Refuse the same, and arrays that may not be written."""
    if not (_is_words(words) and words.mutable):
        raise TypingError(f"a DMA moves words of a writable, contiguous {_ARRAY}, not {words}")


_ARRAY = "one-dimensional int64 array"


def _is_words(words: Any) -> bool:
    right = isinstance(words, types.Array) and words.dtype == types.int64
    return bool(right and words.ndim == 1 and words.layout == "C")


@intrinsic
def address_of(typing_context: Any, words: Any) -> Any:
    """Return the address of an array's first word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.int64(words), generate


@intrinsic
def _hold(typing_context: Any, words: Any) -> Any:
    """Keep an array alive; return what ``_let_go`` needs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.nrt.incref(builder, signature.args[0], args[0])
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(array.meminfo, ir.IntType(64))

    return types.int64(words), generate


@intrinsic
def _let_go(typing_context: Any, held: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        context.nrt.decref(builder, _types.MemInfoPointer(types.voidptr), pointer)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@kernel
def _slot_of(mem: EmulatedFields, handle: int) -> int:
    at = mem.dma + 64 + (handle % DMA_SLOTS) * 128
    if handle <= 0 or peek(at + _HANDLE) != handle:
        raise PodDmaError("no DMA in flight has this handle: a handle is spent once it is complete")
    return at


@kernel
def start(mem: EmulatedFields, kind: int, off: int, words: Any) -> int:
    """Start a DMA; return its handle."""
    check_run(mem, off, 8 * len(words))
    at = 0
    index = 0
    for number in range(DMA_SLOTS):
        if peek(mem.dma + 64 + number * 128 + _HANDLE) == 0:
            at = mem.dma + 64 + number * 128
            index = number
            break
    if at == 0:
        raise PodDmaError("256 DMA of this process are in flight: wait for one before the next")
    generation = peek(mem.dma) + 1
    poke(mem.dma, generation)
    pieces = (((off & 63) + 8 * len(words) + 63) >> 6) if len(words) else 0
    poke(at + _KIND, kind)
    poke(at + _OFFSET, off)
    poke(at + _WORDS, address_of(words))
    poke(at + _N_WORDS, len(words))
    poke(at + _PIECES, pieces)
    poke(at + _MOVED, 0)
    poke(at + _START, draw(mem, 1 << 30))
    poke(at + _HELD, _hold(words))
    poke(at + _READY_NS, _ready_ns(mem, pieces))
    handle = generation * DMA_SLOTS + index
    poke(at + _HANDLE, handle)
    if draw(mem, 2):
        _move(mem, at, draw(mem, pieces + 1))
    return int(handle)


@kernel
def start_write(mem: EmulatedFields, off: int, words: Any) -> int:
    """Start a DMA to the region."""
    return start(mem, WRITE, off, words)


@kernel
def start_read(mem: EmulatedFields, off: int, words: Any) -> int:
    """Start a DMA from the region."""
    return start(mem, READ, off, words)


@kernel
def _ready_ns(mem: EmulatedFields, lines: int) -> int:
    """Book all lines of a DMA; return when the last has passed, or 0 if that takes no time."""
    keep_apart()
    booked = book(mem, lines)
    latency = peek(mem.control + SETTINGS_AT + FILL_NS_AT)
    if booked == 0 and latency == 0:
        return 0
    return int(max(booked, monotonic_ns()) + latency)


@kernel
def _move(mem: EmulatedFields, at: int, most: int) -> None:
    """Move up to ``most`` more lines."""
    pieces = peek(at + _PIECES)
    first = peek(at + _START)
    moved = peek(at + _MOVED)
    until = min(pieces, moved + most)
    while moved < until:
        turn = (first + moved) % pieces
        _move_piece(mem, at, turn if first & 1 else pieces - 1 - turn)
        moved += 1
        poke(at + _MOVED, moved)


@kernel
def _move_piece(mem: EmulatedFields, at: int, piece: int) -> None:
    keep_apart()
    off = peek(at + _OFFSET)
    words = peek(at + _WORDS)
    n_words = peek(at + _N_WORDS)
    line = (off >> 6) + piece
    begin = max(line * 64, off)
    end = min(line * 64 + 64, off + 8 * n_words)
    mask = ((1 << ((end - begin) >> 3)) - 1) << ((begin & 63) >> 3)
    image = words + line * 64 - off  # where the line's first word would be
    in_set = lock_set(mem, line)
    if peek(at + _KIND) == WRITE:
        flush_line(mem, in_set, line)
        put_line(mem, line, mask, image)
    else:
        way = find(mem, in_set, line)
        if way >= 0:
            copy_masked(data_at(mem, in_set, way), image, mask)
        elif mask == WHOLE:
            view_line(mem, in_set, line, image)
        else:
            view_line(mem, in_set, line, mem.slot + SCRATCH_AT)
            copy_masked(mem.slot + SCRATCH_AT, image, mask)
    unlock_set(in_set)


@kernel
def _finish(mem: EmulatedFields, at: int) -> bool:
    """Say whether a DMA whose lines have all moved is complete, and forget it if so."""
    keep_apart()
    ready_ns = peek(at + _READY_NS)
    if ready_ns and monotonic_ns() < ready_ns:
        return False
    _let_go(peek(at + _HELD))
    poke(at + _HANDLE, 0)
    return True


@kernel
def is_done(mem: EmulatedFields, handle: int) -> bool:
    """Let some lines move; return whether the DMA is complete, its handle then being spent."""
    at = _slot_of(mem, handle)
    left = peek(at + _PIECES) - peek(at + _MOVED)
    if left:
        _move(mem, at, 1 + draw(mem, left))
        return False
    return _finish(mem, at)


@kernel
def wait(mem: EmulatedFields, handle: int) -> None:
    """Return once the DMA is complete."""
    at = _slot_of(mem, handle)
    _move(mem, at, peek(at + _PIECES))
    wait_until(peek(at + _READY_NS))
    _finish(mem, at)
