"""What a connector runs on its node: whole steps of a chain's life, in one program each.

``prefix_cache`` has the steps themselves. Here they are put together for a caller that must not
wait inside of them: lookups that also note what the engine has already, and copies of one block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import PodMemory, dma_wait, local_store, program
from cxlbench.tract.codes import NOBODY
from cxlbench.tract.index import confirm, probe
from cxlbench.tract.layout import CACHE_LOCK, Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.lru import touch
from cxlbench.tract.places import GENERATION, SLOT
from cxlbench.tract.prefix_cache import lookup_chain
from cxlbench.tract.transfer import start_read, start_write

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


@program
def look_up(mem: PodMemory, lay: Layout, keys: Words, matched: int, places: Words) -> int:
    """Find and pin the leading blocks of ``keys[matched:]``; return how many.

    The first ``matched`` blocks, which the caller has already, count as used just now, if they are
    there. ``places`` has a row for each key; those of the pinned blocks begin at ``matched``.
    """
    pinned = 0
    if matched < len(keys):
        pinned = lookup_chain(mem, lay, keys[matched:], places[matched:])
    if matched > 0:
        touch_chain(mem, lay, keys[:matched], places[:matched])
    return pinned


@program
def touch_chain(mem: PodMemory, lay: Layout, keys: Words, places: Words) -> None:
    """Make the blocks of ``keys`` that are there the newest, the head the newest of all."""
    present = 0
    for i in range(len(keys)):
        slot, generation, _ = probe(
            mem, lay, int(keys[i, 0]), int(keys[i, 1]), int(keys[i, 2]), int(keys[i, 3])
        )
        places[i, SLOT] = slot
        places[i, GENERATION] = generation
        if slot != NOBODY:
            present += 1
    if present == 0:
        return
    acquire(mem, lay, CACHE_LOCK)
    for back in range(len(keys)):
        i = len(keys) - 1 - back
        slot = int(places[i, SLOT])
        if slot != NOBODY and confirm(
            mem,
            lay,
            slot,
            int(places[i, GENERATION]),
            int(keys[i, 0]),
            int(keys[i, 1]),
            int(keys[i, 2]),
            int(keys[i, 3]),
        ):
            touch(mem, lay, slot)
    release(mem, lay, CACHE_LOCK)


@program
def read_block(mem: PodMemory, lay: Layout, block: int, words: Words) -> None:
    """Copy the pinned block at offset ``block`` to ``words``, and wait until it is there."""
    dma_wait(mem, start_read(mem, lay, block, words))


@program
def write_block(mem: PodMemory, lay: Layout, block: int, words: Words) -> None:
    """Copy ``words`` to the reserved block at offset ``block``, and wait until it is there."""
    dma_wait(mem, start_write(mem, lay, block, words))


@program
def stop_manager(mem: PodMemory, lay: Layout) -> None:
    """End this node's manager: nobody of the node waits for a lock any more."""
    local_store(mem, lay.stop_word, 1)
