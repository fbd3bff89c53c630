"""Moving a block between memory that is not shared (a GPU's) and its chunk (TraCT, § GPU DMA).

The CPU never loads or stores payload: it moves by DMA, past the caches, and needs no flush to be
visible once the DMA is complete; READY is the barrier. One thing is left to the reader: a DMA looks
into its own node's cache, where a clean old copy of a reused chunk's line may lie (a prefetcher put
it there), so the block's lines are invalidated first. Regions for hardware whose DMA does not look
there say so (``Sizes.snooped_payload``).

Where a GPU is, its own copy engine moves blocks: ``pinned_region``. Pacing is ``copying``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import WORD, PodMemory, dma_read, dma_write, program
from cxlbench.tract.layout import Layout
from cxlbench.tract.words import flush_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


@program
def start_write(mem: PodMemory, lay: Layout, block: int, words: Words) -> int:
    """Start copying ``words`` to the block at offset ``block``; return the DMA's handle."""
    return dma_write(mem, block, words)


@program
def start_read(mem: PodMemory, lay: Layout, block: int, words: Words) -> int:
    """Start copying a pinned block to ``words``; return the DMA's handle."""
    if lay.snooped_payload != 0:
        flush_range(mem, block, len(words) * WORD)
    return dma_read(mem, block, words)
