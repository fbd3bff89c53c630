"""Formatting a region, opening one, and refusing what is not TraCT's.

Formatting takes the magic word away first and writes it last, each time flushed: a region whose
formatting was cut short is foreign, not half valid. Opening reads sizes only and derives all
offsets (see :mod:`cxlbench.tract.layout`). Both run interpreted or compiled, by the type of the
node's memory handle.

Left out: whether two pods use one file at the same time is the executor's to prevent (a file lock);
what stands in the region tells only that it was formatted.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cxlbench.emu.pod_compile import compiled_once
from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, clflush, load, program, store
from cxlbench.tract.errors import (
    CorruptedHeaderError,
    ForeignRegionError,
    LayoutError,
    NoSuchLockError,
    NoSuchNodeError,
    OtherVersionError,
    RegionInUseError,
    RegionTooSmallError,
)
from cxlbench.tract.layout import (
    CHECKSUM_WORD,
    HEADER_BYTES,
    HEADER_WORDS,
    INTERNAL_LOCKS,
    MAGIC,
    MAGIC_WORD,
    SIZES_WORD,
    VERSION,
    VERSION_WORD,
    Layout,
    Sizes,
    plan,
    sizes_of_words,
    sizes_words,
)
from cxlbench.tract.words import checksum, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Words = NDArray[np.int64]


@cache
def compiled_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a program that :func:`call` uses in this process."""
    return compiled_once(function)


def call(function: Callable[..., Any], mem: Any, *args: Any) -> Any:
    """Run a program on ``mem``: compiled if it is a compiled executor's handle (a NamedTuple)."""
    if isinstance(mem, tuple):
        return compiled_program(function)(mem, *args)
    return function(mem, *args)


@program
def read_header(mem: PodMemory, words: Words) -> None:
    """Fill ``words`` (``HEADER_WORDS`` of int64) with the region's header, as the device has it."""
    for i in range(HEADER_WORDS):
        if i * WORD % LINE == 0:
            clflush(mem, i * WORD)
        words[i] = load(mem, i * WORD)


@program
def write_header(mem: PodMemory, words: Words) -> None:
    """Write the header; its first line, which holds the magic, last."""
    for i in range(LINE // WORD, HEADER_WORDS):
        store(mem, i * WORD, int(words[i]))
    clflush(mem, LINE)
    for i in range(1, LINE // WORD):
        store(mem, i * WORD, int(words[i]))
    publish(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))


@program
def erase(mem: PodMemory, start: int, end: int) -> None:
    """Zero the lines of ``[start, end)`` and write them back."""
    at = start
    while at < end:
        for i in range(0, LINE, WORD):
            store(mem, at + i, 0)
        clflush(mem, at)
        at += LINE


def header_words(sizes: Sizes) -> Words:
    """Return the header of a region of these sizes."""
    words = np.zeros(HEADER_WORDS, np.int64)
    words[MAGIC_WORD] = MAGIC
    words[VERSION_WORD] = VERSION
    values = sizes_words(sizes)
    words[SIZES_WORD : SIZES_WORD + len(values)] = values
    words[CHECKSUM_WORD] = _header_checksum(words)
    return words


def _header_checksum(words: Words) -> int:
    without = words.copy()
    without[CHECKSUM_WORD] = 0
    return checksum(without)


def format_region(
    mem: Any, sizes: Sizes, region_bytes: int, *, overwrite: bool = False, zeroed: bool = False
) -> Layout:
    """Make an empty region for ``sizes`` in memory of ``region_bytes`` bytes; return its layout.

    ``zeroed`` promises that the memory holds zeros (a new file), so that only the header is
    written. Nobody else may use the region meanwhile. The payload pool is left as it is.

    Raises:
        RegionTooSmallError: the sizes need more bytes. Nothing was written.
        RegionInUseError: a pod is there already and ``overwrite`` is not set. Nothing was written.

    """
    layout = plan(sizes)
    if layout.region_bytes > region_bytes:
        raise RegionTooSmallError(
            f"the region has {region_bytes} bytes, these sizes need {layout.region_bytes}: take"
            f" fewer than {sizes.chunks} chunks or a larger region (sizes_for() fits them)"
        )
    found = np.zeros(HEADER_WORDS, np.int64)
    call(read_header, mem, found)
    if int(found[MAGIC_WORD]) == MAGIC and not overwrite:
        raise RegionInUseError(
            "the region holds a TraCT pod already: open it, or format with overwrite=True"
        )
    call(publish, mem, MAGIC_WORD * WORD, 0)
    if not zeroed:
        call(erase, mem, HEADER_BYTES, layout.pool_at)
    call(write_header, mem, header_words(sizes))
    return layout


def open_region(mem: Any, region_bytes: int) -> Layout:
    """Read and check the header; return the layout. Writes nothing.

    Raises:
        ForeignRegionError: the region was not formatted by TraCT, or its formatting was cut short.
        OtherVersionError: it was formatted by another version.
        CorruptedHeaderError: its words do not fit its checksum.
        RegionTooSmallError: the memory at hand is smaller than the region was.

    """
    words = np.zeros(HEADER_WORDS, np.int64)
    if region_bytes < HEADER_BYTES:
        raise RegionTooSmallError(f"{region_bytes} bytes cannot hold a header of {HEADER_BYTES}")
    call(read_header, mem, words)
    if int(words[MAGIC_WORD]) != MAGIC:
        raise ForeignRegionError(
            f"the region begins with {int(words[MAGIC_WORD]):#x}, TraCT's with {MAGIC:#x}: format"
            " it first, or see whether its first node has flushed the header"
        )
    if int(words[VERSION_WORD]) != VERSION:
        raise OtherVersionError(
            f"the region has layout version {int(words[VERSION_WORD])}, this is version {VERSION}:"
            " open it with that version, or format it anew"
        )
    if int(words[CHECKSUM_WORD]) != _header_checksum(words):
        raise CorruptedHeaderError(
            f"the header's checksum is {int(words[CHECKSUM_WORD]):#x} and should be"
            f" {_header_checksum(words):#x}: its words were changed, or never fully written"
        )
    try:
        layout = plan(sizes_of_words(words[SIZES_WORD:]))
    except LayoutError as error:
        raise CorruptedHeaderError(f"the header names sizes that cannot be: {error}") from error
    if layout.region_bytes > region_bytes:
        raise RegionTooSmallError(
            f"the region was formatted for {layout.region_bytes} bytes, here are {region_bytes}"
        )
    return layout


def check_node(layout: Layout, node: int) -> None:
    """Raise ``NoSuchNodeError`` unless the region has slots for ``node``."""
    if not 0 <= node < layout.nodes:
        raise NoSuchNodeError(
            f"node {node} has no slots: the region was formatted for nodes 0 to {layout.nodes - 1}"
        )


def check_user_lock(layout: Layout, lock: int) -> None:
    """Raise ``NoSuchLockError`` unless ``lock`` is a lock for users of the region."""
    if not INTERNAL_LOCKS <= lock < layout.locks:
        raise NoSuchLockError(
            f"lock {lock} is not for users: the region has {layout.locks - INTERNAL_LOCKS} of them,"
            f" from {INTERNAL_LOCKS} on"
        )
