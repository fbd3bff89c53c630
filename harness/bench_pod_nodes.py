"""What the node processes of ``bench_pod`` run, and the programs that are measured.

Compiled once for native and emulated memory (``warm_up``), before node processes are forked.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from cxlbench.emu.pod_compile import compiled_once, prepare
from cxlbench.emu.pod_ops import PodMemory, load, program, store
from cxlbench.tract.eviction import block_of, count_live
from cxlbench.tract.index import find_place, mark_ready, probe, write_pending
from cxlbench.tract.layout import INTERNAL_LOCKS, Layout, Sizes, plan
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.lru import append
from cxlbench.tract.manager import manage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.emu.pod_zygote import LiveNode

    Words = NDArray[np.int64]

STRIDE = 9 * 8
"""Bytes from one access to the next: another line each time, and another word of it."""
LOCK = INTERNAL_LOCKS
"""The first lock that is the users' own."""


@program
def load_words(mem: PodMemory, times: int, mask: int) -> int:
    """Load ``times`` words, spread over ``mask + 1`` bytes; return their sum."""
    total = 0
    for i in range(times):
        total += load(mem, (i * STRIDE) & mask & -8)
    return total


@program
def store_words(mem: PodMemory, times: int, mask: int) -> None:
    """Store ``times`` words, spread over ``mask + 1`` bytes."""
    for i in range(times):
        store(mem, (i * STRIDE) & mask & -8, i)


@numba.njit(nogil=True)
def load_plain(words: Words, times: int, mask: int) -> int:
    """Do as ``load_words`` does, on an array."""
    total = 0
    for i in range(times):
        total += words[((i * STRIDE) & mask) >> 3]
    return total


@numba.njit(nogil=True)
def store_plain(words: Words, times: int, mask: int) -> None:
    """Do as ``store_words`` does, on an array."""
    for i in range(times):
        words[((i * STRIDE) & mask) >> 3] = i


@program
def lock_rounds(mem: PodMemory, lay: Layout, times: int) -> None:
    """Take and release one lock ``times`` times."""
    for _ in range(times):
        acquire(mem, lay, LOCK)
        release(mem, lay, LOCK)


@program
def fill_index(mem: PodMemory, lay: Layout, keys: Words) -> int:
    """Make every key findable, with a block of one word each; nobody else is there yet."""
    stored = 0
    for i in range(len(keys)):
        k0, k1, k2, k3 = int(keys[i, 0]), int(keys[i, 1]), int(keys[i, 2]), int(keys[i, 3])
        _, slot = find_place(mem, lay, k0, k1, k2, k3)
        generation = write_pending(mem, lay, slot, 0, k0, k1, k2, k3, block_of(lay, i), 8)
        mark_ready(mem, lay, slot, 0, generation, 0)
        append(mem, lay, slot)
        count_live(mem, lay, 1)
        stored += 1
    return stored


@program
def probe_each(mem: PodMemory, lay: Layout, keys: Words) -> int:
    """Probe every key by itself; return how many were found."""
    found = 0
    for i in range(len(keys)):
        slot, _, _ = probe(
            mem, lay, int(keys[i, 0]), int(keys[i, 1]), int(keys[i, 2]), int(keys[i, 3])
        )
        if slot >= 0:
            found += 1
    return found


@functools.cache
def compiled_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form, the same in the host and in its forks."""
    return compiled_once(function)


def warm_up() -> None:
    """Compile or load what node processes run."""
    from cxlbench.emu.pod_emulated import EmulatedMemory
    from cxlbench.emu.pod_native import NativeMemory

    layout = plan(Sizes(nodes=1, slots=1, chunks=1, chunk_bytes=64))
    for kind in (NativeMemory, EmulatedMemory):
        memory = kind(*[0] * len(kind._fields))
        prepare(compiled_program(manage), memory, layout)
        prepare(compiled_program(lock_rounds), memory, layout, 1)


def run_manager(live: LiveNode, layout: Layout) -> None:
    """Be the manager of a node, until killed."""
    compiled_program(manage)(live.memory, layout)


def run_lock_rounds(live: LiveNode, layout: Layout, times: int) -> tuple[int, int]:
    """Take one lock so often, once the host says go; return begin and end, ns."""
    rounds = compiled_program(lock_rounds)
    rounds(live.memory, layout, 1)
    live.send("ready")
    live.receive()
    begin = time.perf_counter_ns()
    rounds(live.memory, layout, times)
    return begin, time.perf_counter_ns()
