"""Comparing a node's view of the region with its twin and with device memory, line by line.

The view is memory that a program loads and stores as it likes; the twin is what the view held when
it was last brought together with ``D``. A word in which they differ was stored by the node since:
its line is dirty. Words of the view are replaced by compare-and-swap against the twin only, so that
a store of the program, made at any moment and of any size, is never lost.

One line at a time, under the node's lock. Transfers to and from ``D`` are those of
pod_cache_kernels: whole lines, one event each, completed if their process is killed. A store of
the value that the word already held cannot be told from no store.

Left out: write-backs that are posted.
"""

from __future__ import annotations

from cxlbench.emu.flush_instructions import compare_and_swap, peek, poke, store_release
from cxlbench.emu.pod_compile import compiled_once
from cxlbench.emu.pod_device_lines import (
    book,
    charge,
    read_line,
    wait_charged,
    write_line,
)
from cxlbench.emu.pod_kernel import (
    COUNT_DISTURBED,
    COUNT_FILLS,
    WHOLE,
    EmulatedFields,
    count,
    draw,
    kernel,
)
from cxlbench.emu.pod_layout import (
    BOOKED_UNTIL_AT,
    FILL_NS_AT,
    FLUSH_NS_AT,
    SCRATCH_AT,
    SETTINGS_AT,
)
from cxlbench.emu.pod_posted import lock_queue, unlock_queue


@kernel
def write_back(mem: EmulatedFields, view: int, twin: int, line: int) -> bool:
    """Write the whole line to ``D`` if the node has stored to it; return whether it had."""
    image = mem.slot + SCRATCH_AT
    dirty = False
    for at in range(0, 64, 8):
        word = peek(view + 64 * line + at)
        dirty |= word != peek(twin + 64 * line + at)
        poke(image + at, word)
    if dirty:
        write_line(mem, line, WHOLE, image)
        for at in range(0, 64, 8):
            poke(twin + 64 * line + at, peek(image + at))
    return dirty


@kernel
def refresh(mem: EmulatedFields, view: int, twin: int, line: int) -> None:
    """Let every word that the node has not stored to be what ``D`` holds."""
    image = mem.slot + SCRATCH_AT
    read_line(mem, line, image)
    count(mem, COUNT_FILLS)
    for at in range(0, 64, 8):
        new = peek(image + at)
        old = peek(twin + 64 * line + at)
        if new != old and compare_and_swap(view + 64 * line + at, old, new) == old:
            store_release(twin + 64 * line + at, new)


def synchronize_lines(
    mem: EmulatedFields, view: int, twin: int, first: int, last: int, writing: bool, reading: bool
) -> int:
    """Write back (``writing``) and refresh (``reading``) lines; return how many were dirty."""
    dirty = 0
    settings = mem.control + SETTINGS_AT
    latency = peek(settings + FLUSH_NS_AT) if writing else 0
    latency += peek(settings + FILL_NS_AT) if reading else 0
    for line in range(first, last):
        poke(mem.slot + BOOKED_UNTIL_AT, 0)
        lock_queue(mem)
        if writing and write_back(mem, view, twin, line):
            dirty += 1
        if reading:
            refresh(mem, view, twin, line)
            poke(mem.slot + BOOKED_UNTIL_AT, book(mem, 1))
        unlock_queue(mem)
        charge(mem, peek(mem.slot + BOOKED_UNTIL_AT), latency)
        wait_charged(mem)
    return dirty


def disturb_lines(mem: EmulatedFields, view: int, twin: int, times: int) -> None:
    """Evict lines drawn at random, and fill them again."""
    for _ in range(times):
        line = draw(mem, mem.region_bytes >> 6)
        lock_queue(mem)
        write_back(mem, view, twin, line)
        refresh(mem, view, twin, line)
        unlock_queue(mem)
        count(mem, COUNT_DISTURBED)


synchronize = compiled_once(synchronize_lines)
disturb = compiled_once(disturb_lines)
