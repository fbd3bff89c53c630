"""What the kernels of an emulated node are made of: the handle, the decorator, small helpers.

Kernels are compiled functions over addresses in mappings that processes share (pod_layout says
what lies where). Their first argument is a process's handle. A mask has a bit for each of the
eight words of a line. The generator of a process is xorshift with 64 bits of state, in its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np

from cxlbench.emu.flush_instructions import peek, poke
from cxlbench.emu.pod_layout import COUNTERS_AT, RANDOM_AT

WHOLE = 255
"""The mask of a whole line."""
COUNT_FILLS = COUNTERS_AT
COUNT_WRITE_BACKS = COUNTERS_AT + 8
COUNT_POSTED = COUNTERS_AT + 16
COUNT_EVICTIONS = COUNTERS_AT + 24
COUNT_DISTURBED = COUNTERS_AT + 32
COUNT_RESCUED = COUNTERS_AT + 40
COUNTER_NAMES = ("fills", "write_backs", "posted", "evictions", "disturbed", "rescued")
"""Their names, in this order."""

F = TypeVar("F", bound="Callable[..., Any]")


class EmulatedFields(NamedTuple):
    """A node as one of its processes reaches it: addresses of that process, sizes, numbers."""

    region: int
    region_bytes: int
    control: int
    node_at: int
    """The node's mapping."""
    slot: int
    """This process's slot in it."""
    queue: int
    posted_mask: int
    cache: int
    set_mask: int
    set_bytes: int
    set_header_bytes: int
    ways: int
    locks: int
    locks_n: int
    words: int
    words_n: int
    dma: int
    """This process's table of DMA in flight, in its own memory."""
    node: int
    token: int


def kernel(function: F) -> F:
    """Compile for use by other compiled code only: without the wrappers that Python needs."""
    njit: Any = numba.njit
    compile_it: Callable[[F], F] = njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
    return compile_it(function)


@kernel
def count(mem: EmulatedFields, counter: int) -> None:
    """Add one to a counter of this process."""
    poke(mem.slot + counter, peek(mem.slot + counter) + 1)


@kernel
def draw(mem: EmulatedFields, below: int) -> int:
    """Return a number in ``[0, below)`` from this process's generator (xorshift, 64 bits)."""
    word = np.uint64(peek(mem.slot + RANDOM_AT))
    word ^= word << np.uint64(13)
    word ^= word >> np.uint64(7)
    word ^= word << np.uint64(17)
    poke(mem.slot + RANDOM_AT, np.int64(word))
    return int(np.int64(word >> np.uint64(2))) % below


@kernel
def copy_line(source: int, target: int) -> None:
    """Copy eight words."""
    for at in range(0, 64, 8):
        poke(target + at, peek(source + at))


@kernel
def copy_masked(source: int, target: int, mask: int) -> None:
    """Copy the words that ``mask`` names."""
    for word in range(8):
        if mask >> word & 1:
            poke(target + 8 * word, peek(source + 8 * word))
