"""TraCT under load: what each process of a stressed pod runs, compiled or interpreted.

Payload and keys follow from a block's number, and a process's choices from its seed, so that every
word that is read can be checked, and a run can be repeated (up to the machine's own timing). Prompt
lengths and popularity are of no concern here: chains are short and all equally likely, which keeps
insert, lookup and eviction about even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_ops import PodMemory, clflush, dma_wait, load, program, store
from cxlbench.tract.layout import Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.places import BLOCK_AT, HANDLE, PLACE_WORDS
from cxlbench.tract.prefix_cache import insert_chain, lookup_chain, unpin_chain
from cxlbench.tract.transfer import start_read
from cxlbench.tract.words import CHECKSUM_SEED, KEY_WORDS, MASK_62, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

# What ``work`` counts.
LOOKUPS = 0
HITS = 1
INSERTED = 2
REFUSED = 3
WRONG = 4
"""Words that were not what was stored: must be zero."""
N_TOTALS = 5


@program
def count_up(mem: PodMemory, lay: Layout, lock: int, at: int, times: int) -> None:
    """Increment the word at ``at`` under ``lock`` so many times."""
    for _ in range(times):
        acquire(mem, lay, lock)
        clflush(mem, at)
        store(mem, at, load(mem, at) + 1)
        clflush(mem, at)
        release(mem, lay, lock)


@program
def fill_key(number: int, key: Words) -> None:
    """Write the key of block ``number`` into ``key``."""
    state = mix(CHECKSUM_SEED, number)
    for i in range(KEY_WORDS):
        state = mix(state, i)
        key[i] = state


@program
def word_of(number: int, i: int) -> int:
    """Return word ``i`` of the payload of block ``number``."""
    return number * 1_000_003 + i


@program
def work(
    mem: PodMemory, lay: Layout, seed: int, rounds: int, numbers: int, words: int, totals: Words
) -> None:
    """Look up ``rounds`` chains of 1 to 4 blocks out of ``numbers`` blocks; insert what misses.

    Payload is ``words`` words a block. Adds to ``totals`` (``N_TOTALS`` words).
    """
    keys = np.zeros((4, KEY_WORDS), np.int64)
    payload = np.zeros((4, words), np.int64)
    places = np.zeros((4, PLACE_WORDS), np.int64)
    state = mix(CHECKSUM_SEED, seed)
    for _ in range(rounds):
        state = mix(state, 1)
        first = (state & MASK_62) % numbers
        state = mix(state, 2)
        blocks = 1 + (state & MASK_62) % 4
        for i in range(blocks):
            fill_key(first + i, keys[i])
        hits = lookup_chain(mem, lay, keys[:blocks], places[:blocks])
        for i in range(hits):
            places[i, HANDLE] = start_read(mem, lay, int(places[i, BLOCK_AT]), payload[i])
        for i in range(hits):
            dma_wait(mem, int(places[i, HANDLE]))
        unpin_chain(mem, lay, places[:blocks], hits)
        for i in range(hits):
            for j in range(words):
                if payload[i, j] != word_of(first + i, j):
                    totals[WRONG] += 1
        totals[LOOKUPS] += blocks
        totals[HITS] += hits
        missing = blocks - hits
        if missing > 0:
            for i in range(hits, blocks):
                for j in range(words):
                    payload[i, j] = word_of(first + i, j)
            stored = insert_chain(
                mem, lay, keys[hits:blocks], payload[hits:blocks], places[hits:blocks]
            )
            totals[INSERTED] += stored
            totals[REFUSED] += missing - stored
