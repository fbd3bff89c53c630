"""Reserving room for a chain: the first locked section of an insert (TraCT, § prefix cache).

Each block gets an entry, PENDING, and a chunk. Chunks come from this node's heap, which is filled
from the bitmap; only if that has none left is an old block evicted. The two have locks of their
own, and nobody holds both: other processes of the node may take the chunks between a refill and
the locked section, and then it is filled again. Somebody got on each time, so this ends.

Heads go first: after a block that got no room the rest of the chain is refused, and what the chain
evicts is never its own head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import PodMemory, load, node_id, program
from cxlbench.tract.codes import EXISTS, HEAP_EMPTY, NO_SPACE, NOBODY, OK, TABLE_FULL
from cxlbench.tract.eviction import block_of, count_live, evict_chunk, take_chunk
from cxlbench.tract.heap import held_chunks, refill
from cxlbench.tract.index import (
    READY,
    entry_at,
    find_place,
    tag_generation,
    tag_state,
    write_pending,
)
from cxlbench.tract.layout import CACHE_LOCK, Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.membership import read_epoch
from cxlbench.tract.pins import add_pin
from cxlbench.tract.places import BLOCK_AT, CODE, GENERATION, HANDLE, LENGTH_BYTES, SLOT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


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
    may_evict: bool,
    place: Words,
) -> int:
    """Reserve one entry and a chunk for it; return a code.

    ``may_evict`` says that there are no free chunks, so that one may be evicted for; for a slot
    one is evicted in any case. ``HEAP_EMPTY`` leaves everything as it is. Needs CACHE_LOCK.
    Evictions come before the place is chosen, since they can empty slots that lie before it.
    """
    code, slot = find_place(mem, lay, k0, k1, k2, k3)
    if code == EXISTS:
        tag = load(mem, entry_at(lay, slot))
        place[SLOT] = slot
        place[GENERATION] = tag_generation(tag) if tag_state(tag) == READY else NOBODY
        return EXISTS
    chunk = NOBODY
    if code == TABLE_FULL or count_live(mem, lay, 0) >= lay.evict_above:
        chunk = evict_chunk(mem, lay)
        if code == TABLE_FULL and chunk == NOBODY:
            return TABLE_FULL
    evicted = chunk != NOBODY
    if not evicted:
        chunk = take_chunk(mem, lay, epoch)
    if chunk == NOBODY and may_evict:
        chunk = evict_chunk(mem, lay)
        if chunk == NOBODY:
            return NO_SPACE
        evicted = True
    if chunk == NOBODY:
        return HEAP_EMPTY
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
def reserve_some(
    mem: PodMemory,
    lay: Layout,
    keys: Words,
    length: int,
    may_evict: bool,
    places: Words,
    begin: int,
) -> int:
    """Reserve blocks from number ``begin`` on in one locked section; return where it ended.

    ``places[:, CODE]`` of that block says why. Blocks that are READY already are pinned, and
    ``places[:, HANDLE]`` says so: the chain's tail must not evict its own head.
    """
    at = begin
    end = min(begin + lay.heap_capacity, len(keys))
    code = OK
    acquire(mem, lay, CACHE_LOCK)
    epoch = read_epoch(mem, lay)
    while at < end and (code in (OK, EXISTS)):
        code = reserve_block(
            mem,
            lay,
            epoch,
            int(keys[at, 0]),
            int(keys[at, 1]),
            int(keys[at, 2]),
            int(keys[at, 3]),
            length,
            may_evict,
            places[at],
        )
        places[at, CODE] = code
        places[at, HANDLE] = NOBODY
        if code == EXISTS and places[at, GENERATION] != NOBODY:
            places[at, HANDLE] = places[at, SLOT]
            add_pin(mem, lay, int(places[at, SLOT]), 1)
        if code in (OK, EXISTS):
            at += 1
    release(mem, lay, CACHE_LOCK)
    return at


@program
def reserve_chain(mem: PodMemory, lay: Layout, keys: Words, length: int, places: Words) -> int:
    """Reserve entries and chunks for the blocks of a chain; return how many were reserved.

    ``places[:, CODE]`` says per block: OK (reserved: write it, then publish or abandon), EXISTS, or
    why not. After the first block without room the rest is refused too: heads go first. ``length``
    is each block's payload in bytes, at most a chunk. A block is refused, and others are evicted
    for its chunk, only if the bitmap had no chunks left: if other processes of the node took what
    the heap was filled with, it is filled again.
    """
    blocks = len(keys)
    at = 0
    while at < blocks:
        wanted = min(blocks - at, lay.heap_capacity)
        held = held_chunks(mem, lay)
        if held < wanted:
            held = refill(mem, lay, wanted)
        at = reserve_some(mem, lay, keys, length, held < wanted, places, at)
        if at < blocks:
            code = int(places[at, CODE])
            if code in (NO_SPACE, TABLE_FULL):
                for i in range(at, blocks):
                    places[i, CODE] = code
                at = blocks
    reserved = 0
    for i in range(blocks):
        if places[i, CODE] == OK:
            reserved += 1
        elif places[i, CODE] == EXISTS and places[i, HANDLE] != NOBODY:
            add_pin(mem, lay, int(places[i, HANDLE]), -1)
    return reserved
