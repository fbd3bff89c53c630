"""Words and lines of the shared region: the few idioms that all of TraCT's structures use.

The paper's visibility rule (TraCT, "cache coherence policy"): metadata is read after its line was
invalidated and is written back by a synchronous ``clflush`` before anybody may rely on it;
``clflushopt`` with a fence is not enough, since its write-back may still be on the way. Words are
signed 64-bit integers, offsets are bytes from the region's start.

All of TraCT keeps one rule: a line is flushed before another line is stored to. After a crash the
device then holds a task's stores up to some point and none after it, and nobody can have seen the
effect of a store that is lost.

Checksums here find torn or overwritten words, not an adversary. They use products below 2**63
only, so that Python's unbounded integers and compiled 64-bit ones agree.

Left out: persistence. The device is memory; what survives a node's crash is what reached it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, clflush, load, program, store
from cxlbench.tract.errors import KeyLengthError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

KEY_WORDS = 4
"""Words of a block key (32 bytes, see ``cxlbench.kv.identity``) and of a root's name."""
KEY_BYTES = KEY_WORDS * WORD

MASK_31 = (1 << 31) - 1
MASK_62 = (1 << 62) - 1
CHECKSUM_SEED = 0x1B873593CC9E2D51 & MASK_62
# Odd multipliers below 2**31, so that a product of 31-bit numbers stays below 2**62.
_LOW_FACTOR = 1540483477
_HIGH_FACTOR = 1332534557


@program
def load_fresh(mem: PodMemory, off: int) -> int:
    """Return the word at ``off`` as the device has it: drop this node's copy, then load."""
    clflush(mem, off)
    return load(mem, off)


@program
def publish(mem: PodMemory, off: int, value: int) -> None:
    """Store the word and write its line back; on return every node that invalidates sees it."""
    store(mem, off, value)
    clflush(mem, off)


@program
def flush_range(mem: PodMemory, off: int, n_bytes: int) -> None:
    """Write back and drop every line of ``[off, off + n_bytes)``."""
    at = off & -LINE
    while at < off + n_bytes:
        clflush(mem, at)
        at += LINE


@program
def mix(state: int, word: int) -> int:
    """Return the checksum ``state`` (0 to 2**62 - 1) advanced by one word."""
    low = state & MASK_31
    high = state >> 31
    x = (low ^ (word & MASK_31)) * _LOW_FACTOR + high
    y = (high ^ ((word >> 31) & MASK_31)) * _HIGH_FACTOR + (x >> 31) + ((word >> 62) & 3)
    return ((x ^ (y >> 31)) & MASK_31) | ((y & MASK_31) << 31)


@program
def checksum(words: Words) -> int:
    """Return a checksum (0 to 2**62 - 1) of a 1-d int64 array, its length included."""
    state = mix(CHECKSUM_SEED, len(words))
    for i in range(len(words)):
        state = mix(state, int(words[i]))
    return state


def key_words(key: bytes) -> tuple[int, int, int, int]:
    """Return the four words of a 32-byte block key; ``KeyLengthError`` for any other length."""
    if len(key) != KEY_BYTES:
        raise KeyLengthError(
            f"a block key has {KEY_BYTES} bytes, this one has {len(key)}: keys come from"
            " cxlbench.kv.identity"
        )
    a, b, c, d = struct.unpack("<4q", key)
    return a, b, c, d


def key_of_words(words: tuple[int, int, int, int]) -> bytes:
    """Return the 32-byte key of four words: the inverse of :func:`key_words`."""
    return struct.pack("<4q", *words)
