"""The prefix cache: looking up chains of blocks, and publishing new ones (TraCT, § prefix cache).

A chain's keys are ``h_i = hash(h_{i-1}, T_i)``; heads come first. A **lookup** is

    probe each block, no lock -> one locked section: confirm, pin, move to the LRU tail
    -> DMA -> unpin

and ends at the first block that is not there. An **insert** is two locked sections around the DMA:

    reserve PENDING (evicting if need be) -> DMA, no lock -> publish READY

Payload is complete in the device before READY is stored; READY is flushed before the lock opens. A
pinned entry is not evicted, and a PENDING one never. Entries are touched from the chain's end to
its head, so that tails are evicted first: a chain without its head is worthless.

``places`` is an int64 array of shape (blocks, ``PLACE_WORDS``) that the functions hand each other:
the columns are the constants below. ``keys`` has shape (blocks, 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import (
    WORD,
    PodMemory,
    dma_wait,
    load,
    local_lock,
    local_unlock,
    node_id,
    program,
)
from cxlbench.tract.codes import BUSY, EXISTS, MISS, NO_SPACE, NOBODY, OK, STALE, TABLE_FULL
from cxlbench.tract.eviction import (
    block_of,
    count_live,
    evict_one,
    put_chunk,
    remove_entry,
    take_chunk,
)
from cxlbench.tract.heap import free_chunk, heap_count, heap_push, held_chunks, refill, trim
from cxlbench.tract.index import (
    BLOCK,
    CHECK,
    LENGTH,
    READY,
    confirm,
    entry_at,
    find_place,
    is_pending,
    mark_ready,
    probe,
    tag_state,
    write_pending,
)
from cxlbench.tract.layout import CACHE_LOCK, Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.lru import append, touch
from cxlbench.tract.membership import read_epoch
from cxlbench.tract.pins import add_pin, is_pinned
from cxlbench.tract.transfer import start_read, start_write
from cxlbench.tract.words import checksum, load_fresh

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

SLOT = 0
GENERATION = 1
BLOCK_AT = 2
LENGTH_BYTES = 3
CHECKSUM = 4
CODE = 5
HANDLE = 6
PLACE_WORDS = 7


# Lookup


@program
def probe_chain(mem: PodMemory, lay: Layout, keys: Words, places: Words) -> int:
    """Probe the blocks of a chain without any lock; return how many leading ones look READY."""
    for i in range(len(keys)):
        slot, generation, _ = probe(
            mem, lay, int(keys[i, 0]), int(keys[i, 1]), int(keys[i, 2]), int(keys[i, 3])
        )
        if slot == NOBODY:
            return i
        places[i, SLOT] = slot
        places[i, GENERATION] = generation
    return len(keys)


@program
def pin_chain(mem: PodMemory, lay: Layout, keys: Words, places: Words, blocks: int) -> int:
    """Confirm and pin the first ``blocks`` of what was probed; return how many are pinned.

    Fills in block, length and checksum. One locked section. Every pinned block must be given back
    by :func:`unpin_chain`.
    """
    pinned = 0
    acquire(mem, lay, CACHE_LOCK)
    for i in range(blocks):
        slot = int(places[i, SLOT])
        if not confirm(
            mem,
            lay,
            slot,
            int(places[i, GENERATION]),
            int(keys[i, 0]),
            int(keys[i, 1]),
            int(keys[i, 2]),
            int(keys[i, 3]),
        ):
            break
        at = entry_at(lay, slot)
        places[i, BLOCK_AT] = load(mem, at + BLOCK)
        places[i, LENGTH_BYTES] = load(mem, at + LENGTH)
        places[i, CHECKSUM] = load(mem, at + CHECK)
        add_pin(mem, lay, slot, 1)
        pinned += 1
    for back in range(pinned):
        touch(mem, lay, int(places[pinned - 1 - back, SLOT]))
    release(mem, lay, CACHE_LOCK)
    return pinned


@program
def lookup_chain(mem: PodMemory, lay: Layout, keys: Words, places: Words) -> int:
    """Find and pin the leading blocks of a chain that are READY; return how many."""
    found = probe_chain(mem, lay, keys, places)
    return pin_chain(mem, lay, keys, places, found) if found > 0 else 0


@program
def unpin_chain(mem: PodMemory, lay: Layout, places: Words, blocks: int) -> None:
    """Give the pins of the first ``blocks`` back; nothing of them may be read any more."""
    for i in range(blocks):
        add_pin(mem, lay, int(places[i, SLOT]), -1)


@program
def fetch_chain(mem: PodMemory, lay: Layout, keys: Words, payload: Words, places: Words) -> int:
    """Look a chain up and read it; return how many leading blocks are in ``payload``, verified.

    ``payload`` has a row per block, all of the length that was stored. A block of another length
    or with a wrong checksum ends the hit.
    """
    pinned = lookup_chain(mem, lay, keys, places)
    for i in range(pinned):
        if places[i, LENGTH_BYTES] == len(payload[i]) * WORD:
            places[i, HANDLE] = start_read(mem, lay, int(places[i, BLOCK_AT]), payload[i])
    for i in range(pinned):
        if places[i, LENGTH_BYTES] == len(payload[i]) * WORD:
            dma_wait(mem, int(places[i, HANDLE]))
    unpin_chain(mem, lay, places, pinned)
    for i in range(pinned):
        if places[i, LENGTH_BYTES] != len(payload[i]) * WORD:
            return i
        if places[i, CHECKSUM] != checksum(payload[i]):
            return i
    return pinned


# Insert


@program
def reserve_block(
    mem: PodMemory,
    lay: Layout,
    epoch: int,
    k0: int,
    k1: int,
    k2: int,
    k3: int,
    length: int,
    place: Words,
) -> int:
    """Reserve one entry and a chunk for it, evicting as needed; return a code.

    Needs CACHE_LOCK. Evictions come before the place is chosen, since they can empty slots that
    lie before it.
    """
    code, slot = find_place(mem, lay, k0, k1, k2, k3)
    if code == EXISTS:
        return EXISTS
    evicted = False
    if code == TABLE_FULL or count_live(mem, lay, 0) >= lay.evict_above:
        evicted = evict_one(mem, lay, epoch)
        if code == TABLE_FULL and not evicted:
            return TABLE_FULL
    chunk = take_chunk(mem, lay, epoch)
    if chunk == NOBODY:
        if not evict_one(mem, lay, epoch):
            return NO_SPACE
        evicted = True
        chunk = take_chunk(mem, lay, epoch)
        if chunk == NOBODY:
            return NO_SPACE
    if evicted:
        code, slot = find_place(mem, lay, k0, k1, k2, k3)
    owner = node_id(mem)
    block = block_of(lay, chunk)
    place[SLOT] = slot
    place[GENERATION] = write_pending(mem, lay, slot, owner, k0, k1, k2, k3, block, length)
    place[BLOCK_AT] = block
    place[LENGTH_BYTES] = length
    count_live(mem, lay, 1)
    return OK


@program
def reserve_chain(mem: PodMemory, lay: Layout, keys: Words, length: int, places: Words) -> int:
    """Reserve entries and chunks for the blocks of a chain; return how many were reserved.

    ``places[:, CODE]`` says per block: OK (reserved: write it, then publish or abandon), EXISTS, or
    why not. After the first block without room the rest is refused too: heads go first. ``length``
    is each block's payload in bytes, at most a chunk. More blocks than the heap can hold evict
    even if the bitmap has free chunks.
    """
    blocks = len(keys)
    if held_chunks(mem, lay) < blocks:
        refill(mem, lay, min(blocks, lay.heap_capacity))
    reserved = 0
    code = OK
    acquire(mem, lay, CACHE_LOCK)
    epoch = read_epoch(mem, lay)
    for i in range(blocks):
        if code in (OK, EXISTS):
            code = reserve_block(
                mem,
                lay,
                epoch,
                int(keys[i, 0]),
                int(keys[i, 1]),
                int(keys[i, 2]),
                int(keys[i, 3]),
                length,
                places[i],
            )
            if code == OK:
                reserved += 1
        places[i, CODE] = code
    release(mem, lay, CACHE_LOCK)
    return reserved


@program
def write_chain(mem: PodMemory, lay: Layout, payload: Words, places: Words) -> None:
    """Copy the rows of ``payload`` that were reserved, and wait until all are in the device."""
    for i in range(len(places)):
        if places[i, CODE] == OK:
            places[i, CHECKSUM] = checksum(payload[i])
            places[i, HANDLE] = start_write(mem, lay, int(places[i, BLOCK_AT]), payload[i])
    for i in range(len(places)):
        if places[i, CODE] == OK:
            dma_wait(mem, int(places[i, HANDLE]))


@program
def publish_chain(mem: PodMemory, lay: Layout, places: Words) -> int:
    """Make the reserved blocks, whose payload is complete, findable; return how many.

    READY goes from head to tail, the list from tail to head. A reservation that is not ours any
    more becomes STALE.
    """
    owner = node_id(mem)
    published = 0
    acquire(mem, lay, CACHE_LOCK)
    for i in range(len(places)):
        if places[i, CODE] == OK:
            slot = int(places[i, SLOT])
            generation = int(places[i, GENERATION])
            if is_pending(mem, lay, slot, owner, generation):
                mark_ready(mem, lay, slot, owner, generation, int(places[i, CHECKSUM]))
                published += 1
            else:
                places[i, CODE] = STALE
    for back in range(len(places)):
        i = len(places) - 1 - back
        if places[i, CODE] == OK:
            append(mem, lay, int(places[i, SLOT]))
    release(mem, lay, CACHE_LOCK)
    return published


@program
def abandon_chain(mem: PodMemory, lay: Layout, places: Words) -> int:
    """Give back the reservations whose payload could not be written; return how many.

    They were never findable. Their DMA must have ended.
    """
    owner = node_id(mem)
    dropped = 0
    acquire(mem, lay, CACHE_LOCK)
    epoch = read_epoch(mem, lay)
    for i in range(len(places)):
        places[i, HANDLE] = NOBODY
        if places[i, CODE] == OK:
            slot = int(places[i, SLOT])
            if is_pending(mem, lay, slot, owner, int(places[i, GENERATION])):
                chunk = remove_entry(mem, lay, slot, False)
                if not put_chunk(mem, lay, epoch, chunk):
                    places[i, HANDLE] = chunk
                dropped += 1
            places[i, CODE] = STALE
    release(mem, lay, CACHE_LOCK)
    for i in range(len(places)):
        if places[i, HANDLE] != NOBODY:
            free_chunk(mem, lay, epoch, int(places[i, HANDLE]))
    return dropped


@program
def insert_chain(mem: PodMemory, lay: Layout, keys: Words, payload: Words, places: Words) -> int:
    """Store a chain: reserve, copy, publish; return how many blocks are newly READY.

    ``payload`` has a row of whole words per block. ``places[:, CODE]`` tells the fate of each. A
    chain of more blocks than the heap can hold is reserved in parts; published it is at once, so
    that a chain does not evict its own head.
    """
    blocks = len(keys)
    reserved = 0
    start = 0
    while start < blocks:
        end = min(start + lay.heap_capacity, blocks)
        n_bytes = payload.shape[1] * WORD
        reserved += reserve_chain(mem, lay, keys[start:end], n_bytes, places[start:end])
        start = end
        last = int(places[end - 1, CODE])
        if last not in (OK, EXISTS):
            places[end:, CODE] = last
            start = blocks
    published = 0
    if reserved > 0:
        write_chain(mem, lay, payload, places)
        published = publish_chain(mem, lay, places)
    if held_chunks(mem, lay) > lay.heap_capacity - lay.heap_batch:
        trim(mem, lay, lay.heap_batch)
    return published


@program
def evict(mem: PodMemory, lay: Layout, blocks: int) -> int:
    """Evict up to ``blocks`` of the oldest unpinned entries; return how many went."""
    evicted = 0
    acquire(mem, lay, CACHE_LOCK)
    epoch = read_epoch(mem, lay)
    for _ in range(blocks):
        if evict_one(mem, lay, epoch):
            evicted += 1
    release(mem, lay, CACHE_LOCK)
    return evicted


@program
def delete(mem: PodMemory, lay: Layout, k0: int, k1: int, k2: int, k3: int) -> int:
    """Remove one READY entry; return OK, MISS, or BUSY if it is pinned or being written.

    BUSY too if this node's heap has no room for the chunk.
    """
    code = MISS
    acquire(mem, lay, CACHE_LOCK)
    epoch = read_epoch(mem, lay)
    found, slot = find_place(mem, lay, k0, k1, k2, k3)
    if found == EXISTS:
        code = BUSY
        ready = tag_state(load_fresh(mem, entry_at(lay, slot))) == READY
        local_lock(mem, lay.heap_lock)
        room = heap_count(mem, epoch) < lay.heap_capacity
        if ready and room and not is_pinned(mem, lay, slot):
            heap_push(mem, lay, epoch, remove_entry(mem, lay, slot, True))
            code = OK
        local_unlock(mem, lay.heap_lock)
    release(mem, lay, CACHE_LOCK)
    return code
