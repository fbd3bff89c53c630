"""A node's heap: free chunks that it holds in its own DRAM (TraCT, § allocator).

The heap spares the shared bitmap: it takes ``heap_batch`` chunks at a time under ALLOC_LOCK, hands
them out and takes evicted ones back without touching shared memory, and returns what is too much.
The list is shared by the node's processes, under the node's heap lock, which every function here
but ``refill``, ``trim`` and ``slim`` expects to be held.

Chunks in a heap are named nowhere in shared memory, so they die with the node. Recovery therefore
begins a new epoch and rebuilds the bitmap from what index and roots refer to; a heap filled in an
older epoch is empty from then on. That is checked wherever a chunk leaves a heap for the index:
inside a locked section, where the epoch cannot change.

Left out: objects smaller than a chunk. A chunk is the region's unit, one KV block at most.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import (
    PodMemory,
    local_load,
    local_lock,
    local_store,
    local_unlock,
    program,
)
from cxlbench.tract.bitmap import mark_run, take_from_word
from cxlbench.tract.codes import NOBODY
from cxlbench.tract.layout import (
    ALLOC_LOCK,
    CHUNKS_PER_WORD,
    HEAP_COUNT,
    HEAP_EPOCH,
    HEAP_HINT,
    HEAP_LIST,
    Layout,
)
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.membership import read_epoch


@program
def heap_count(mem: PodMemory, epoch: int) -> int:
    """Return how many chunks the heap holds in ``epoch``, which is the region's.

    Forgets the chunks of an older epoch. The caller holds one of TraCT's own locks.
    """
    if local_load(mem, HEAP_EPOCH) != epoch:
        local_store(mem, HEAP_EPOCH, epoch)
        local_store(mem, HEAP_COUNT, 0)
        return 0
    return local_load(mem, HEAP_COUNT)


@program
def heap_pop(mem: PodMemory, epoch: int) -> int:
    """Take a chunk out of the heap; ``NOBODY`` if it has none."""
    count = heap_count(mem, epoch)
    if count == 0:
        return NOBODY
    local_store(mem, HEAP_COUNT, count - 1)
    return local_load(mem, HEAP_LIST + count - 1)


@program
def heap_push(mem: PodMemory, lay: Layout, epoch: int, chunk: int) -> bool:
    """Put a chunk that is taken and that nothing refers to into the heap; False if it is full."""
    count = heap_count(mem, epoch)
    if count == lay.heap_capacity:
        return False
    local_store(mem, HEAP_LIST + count, chunk)
    local_store(mem, HEAP_COUNT, count + 1)
    return True


@program
def refill(mem: PodMemory, lay: Layout, wanted: int) -> int:
    """Have at least ``wanted`` chunks in the heap if there are any to be had; return how many."""
    acquire(mem, lay, ALLOC_LOCK)
    epoch = read_epoch(mem, lay)
    local_lock(mem, lay.heap_lock)
    count = heap_count(mem, epoch)
    if count < wanted:
        goal = min(max(wanted, lay.heap_batch), lay.heap_capacity)
        hint = local_load(mem, HEAP_HINT)
        for step in range(lay.bitmap_words):
            index = (hint + step) % lay.bitmap_words
            if count < goal:
                found = take_from_word(mem, lay, index, goal - count)
                for bit in range(CHUNKS_PER_WORD):
                    if (found >> bit) & 1:
                        heap_push(mem, lay, epoch, index * CHUNKS_PER_WORD + bit)
                        count += 1
                local_store(mem, HEAP_HINT, index)
    local_unlock(mem, lay.heap_lock)
    release(mem, lay, ALLOC_LOCK)
    return count


@program
def trim(mem: PodMemory, lay: Layout, keep: int) -> None:
    """Return all but ``keep`` chunks of the heap to the bitmap."""
    acquire(mem, lay, ALLOC_LOCK)
    epoch = read_epoch(mem, lay)
    local_lock(mem, lay.heap_lock)
    for _ in range(heap_count(mem, epoch) - keep):
        mark_run(mem, lay, heap_pop(mem, epoch), 1, False)
    local_unlock(mem, lay.heap_lock)
    release(mem, lay, ALLOC_LOCK)


@program
def slim(mem: PodMemory, lay: Layout) -> None:
    """Return chunks to the bitmap if the heap holds too many."""
    if held_chunks(mem, lay) > lay.heap_capacity - lay.heap_batch:
        trim(mem, lay, lay.heap_batch)


@program
def free_chunk(mem: PodMemory, lay: Layout, epoch: int, chunk: int) -> None:
    """Return a chunk to the bitmap that was taken in ``epoch`` and that nothing refers to.

    If a new epoch has begun since, the bitmap has it already.
    """
    acquire(mem, lay, ALLOC_LOCK)
    if read_epoch(mem, lay) == epoch:
        mark_run(mem, lay, chunk, 1, False)
    release(mem, lay, ALLOC_LOCK)


@program
def held_chunks(mem: PodMemory, lay: Layout) -> int:
    """Return how many chunks the heap holds; a guess unless one of TraCT's own locks is held."""
    epoch = read_epoch(mem, lay)
    local_lock(mem, lay.heap_lock)
    count = local_load(mem, HEAP_COUNT) if local_load(mem, HEAP_EPOCH) == epoch else 0
    local_unlock(mem, lay.heap_lock)
    return count
