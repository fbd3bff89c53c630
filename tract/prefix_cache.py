"""The prefix cache: looking up chains of blocks, and publishing new ones (TraCT, § prefix cache).

A chain's keys are ``h_i = hash(h_{i-1}, T_i)``; heads come first. A **lookup** is

    probe each block, no lock -> one locked section: confirm, pin, move to the LRU tail
    -> DMA -> unpin

and ends at the first block that is not there. An **insert** is two locked sections around the DMA:

    reserve PENDING (evicting if need be) -> DMA, no lock -> publish READY

Payload is complete in the device before READY is stored; READY is flushed before the lock opens. A
pinned entry is not evicted, and a PENDING one never. Entries are touched from the chain's end to
its head, so that tails are evicted first: a chain without its head is worthless.

``places`` and ``keys`` are the arrays of ``places``; reserving is in ``reserving``.
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
from cxlbench.tract.codes import (
    BUSY,
    EXISTS,
    MISS,
    NOBODY,
    OK,
    STALE,
)
from cxlbench.tract.eviction import (
    evict_one,
    put_chunk,
    remove_entry,
)
from cxlbench.tract.heap import free_chunk, heap_count, heap_push, slim
from cxlbench.tract.index import (
    BLOCK,
    CHECK,
    LENGTH,
    READY,
    confirm,
    entry_at,
    find_place,
    is_pending,
    is_ready,
    mark_ready,
    probe,
    tag_state,
)
from cxlbench.tract.layout import CACHE_LOCK, Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.lru import append, touch
from cxlbench.tract.membership import read_epoch
from cxlbench.tract.pins import add_pin, is_pinned
from cxlbench.tract.places import (
    BLOCK_AT,
    CHECKSUM,
    CODE,
    GENERATION,
    HANDLE,
    LENGTH_BYTES,
    SLOT,
)
from cxlbench.tract.reserving import reserve_chain
from cxlbench.tract.transfer import start_read, start_write
from cxlbench.tract.words import checksum, load_fresh

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

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

    READY goes from head to tail, the list from tail to head; blocks of the chain that were there
    already count as used. A reservation that is not ours any more becomes STALE.
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
        slot = int(places[i, SLOT])
        if places[i, CODE] == OK:
            append(mem, lay, slot)
        elif places[i, CODE] == EXISTS and is_ready(mem, lay, slot, int(places[i, GENERATION])):
            touch(mem, lay, slot)
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

    ``payload`` has a row of whole words per block. ``places[:, CODE]`` tells the fate of each. The
    chain is published at once, so that it does not evict its own head.
    """
    reserved = reserve_chain(mem, lay, keys, payload.shape[1] * WORD, places)
    published = 0
    if reserved > 0:
        write_chain(mem, lay, payload, places)
        published = publish_chain(mem, lay, places)
    slim(mem, lay)
    return published


@program
def evict(mem: PodMemory, lay: Layout, blocks: int) -> int:
    """Evict up to ``blocks`` of the oldest unpinned entries; return how many went.

    In several locked sections, if they are more than this node's heap can hold.
    """
    evicted = 0
    before = NOBODY
    while evicted < blocks and evicted != before:
        before = evicted
        slim(mem, lay)
        acquire(mem, lay, CACHE_LOCK)
        epoch = read_epoch(mem, lay)
        while evicted < blocks and evict_one(mem, lay, epoch):
            evicted += 1
        release(mem, lay, CACHE_LOCK)
    return evicted


@program
def delete(mem: PodMemory, lay: Layout, k0: int, k1: int, k2: int, k3: int) -> int:
    """Remove one READY entry; return OK, MISS, or BUSY if it is pinned or being written.

    BUSY too if other processes of the node filled its heap meanwhile.
    """
    code = MISS
    slim(mem, lay)
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
