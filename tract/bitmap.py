"""The global chunk bitmap: which chunks of the payload pool are taken (TraCT, § allocator).

A bit per chunk, ``CHUNKS_PER_WORD`` bits a word; set is taken. All functions need ALLOC_LOCK. One
word is changed by one store and one flush, however many of its chunks change hands: that is why
heaps take chunks in batches.

The bitmap says *that* a chunk is taken, not by whom. What counts as taken is told by index entries
and roots; the rest is in nodes' heaps, and a new epoch takes it back (see ``heap``, ``repair``).
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import WORD, PodMemory, program
from cxlbench.tract.codes import NOBODY
from cxlbench.tract.layout import CHUNKS_PER_WORD, Layout
from cxlbench.tract.words import load_fresh, publish


@program
def word_mask(lay: Layout, index: int) -> int:
    """Return the bits of bitmap word ``index`` that stand for chunks."""
    chunks = min(lay.chunks - index * CHUNKS_PER_WORD, CHUNKS_PER_WORD)
    return (1 << chunks) - 1


@program
def take_from_word(mem: PodMemory, lay: Layout, index: int, wanted: int) -> int:
    """Take up to ``wanted`` free chunks of one word, lowest first; return them as bits."""
    at = lay.bitmap_at + index * WORD
    taken = load_fresh(mem, at)
    free = word_mask(lay, index) & ~taken
    found = 0
    for bit in range(CHUNKS_PER_WORD):
        if wanted > 0 and (free >> bit) & 1:
            found |= 1 << bit
            wanted -= 1
    if found != 0:
        publish(mem, at, taken | found)
    return found


@program
def take_run(mem: PodMemory, lay: Layout, chunks: int) -> int:
    """Take the first ``chunks`` adjacent free chunks; return the first, or ``NOBODY``."""
    length = 0
    word = 0
    for chunk in range(lay.chunks):
        bit = chunk % CHUNKS_PER_WORD
        if bit == 0:
            word = load_fresh(mem, lay.bitmap_at + chunk // CHUNKS_PER_WORD * WORD)
        length = 0 if (word >> bit) & 1 else length + 1
        if length == chunks:
            first = chunk - chunks + 1
            mark_run(mem, lay, first, chunks, True)
            return first
    return NOBODY


@program
def mark_run(mem: PodMemory, lay: Layout, first: int, chunks: int, taken: bool) -> None:
    """Set or clear the bits of a run of chunks, a word at a time."""
    chunk = first
    while chunk < first + chunks:
        index = chunk // CHUNKS_PER_WORD
        end = min(first + chunks, (index + 1) * CHUNKS_PER_WORD)
        bits = ((1 << (end - chunk)) - 1) << (chunk % CHUNKS_PER_WORD)
        at = lay.bitmap_at + index * WORD
        word = load_fresh(mem, at)
        publish(mem, at, word | bits if taken else word & ~bits)
        chunk = end


@program
def is_taken(mem: PodMemory, lay: Layout, chunk: int) -> bool:
    """Return whether ``chunk`` is taken."""
    word = load_fresh(mem, lay.bitmap_at + chunk // CHUNKS_PER_WORD * WORD)
    return (word >> (chunk % CHUNKS_PER_WORD)) & 1 == 1


@program
def count_taken(mem: PodMemory, lay: Layout) -> int:
    """Return how many chunks are taken."""
    total = 0
    for index in range(lay.bitmap_words):
        word = load_fresh(mem, lay.bitmap_at + index * WORD)
        for bit in range(CHUNKS_PER_WORD):
            total += (word >> bit) & 1
    return total
