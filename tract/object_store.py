"""The object store: a few named roots, everything else by offsets (TraCT, § object store).

The semantics of the paper's ``cxl_shm_put``, ``cxl_shm_get`` and ``cxl_shm_delete``: a name leads
to a contiguous object in the region, whose inner structure is linked by offsets. A root is one line
like an index entry: tag, name (4 words), offset, length in bytes, checksum.

``put`` is two locked sections around the copy, as an insert into the index is (after a look at the
roots, so that what is refused changes nothing): a root is PENDING
until its object is complete and flushed. Objects are metadata: the CPU writes them and flushes each
line. A chunk run that recovery took back between the sections is noticed by the epoch.

Nothing pins an object: who deletes it must know that nobody uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, clflush, load, node_id, program, store
from cxlbench.tract.bitmap import mark_run, take_run
from cxlbench.tract.codes import EXISTS, MISS, NO_SPACE, NOBODY, OK, STALE, TABLE_FULL
from cxlbench.tract.eviction import block_of, chunk_of
from cxlbench.tract.heap import held_chunks, trim
from cxlbench.tract.index import (
    BLOCK,
    CHECK,
    EMPTY,
    GENERATION_MASK,
    KEY,
    LENGTH,
    PENDING,
    READY,
    TAG,
    has_key,
    make_tag,
    tag_generation,
    tag_state,
)
from cxlbench.tract.layout import ALLOC_LOCK, ROOT_LOCK, Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.membership import read_epoch
from cxlbench.tract.words import checksum, load_fresh, publish

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


@program
def root_at(lay: Layout, root: int) -> int:
    """Return the offset of root number ``root``."""
    return lay.roots_at + root * LINE


@program
def find_root(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int) -> tuple[int, int]:
    """Return the root of that name (or ``NOBODY``) and a free one. Needs ROOT_LOCK."""
    free = NOBODY
    for root in range(lay.roots):
        at = root_at(lay, root)
        clflush(mem, at)
        if tag_state(load(mem, at)) == EMPTY:
            if free == NOBODY:
                free = root
        elif has_key(mem, at, n0, n1, n2, n3):
            return root, free
    return NOBODY, free


@program
def write_root(
    mem: PodMemory,
    lay: Layout,
    root: int,
    state: int,
    n0: int,
    n1: int,
    n2: int,
    n3: int,
    offset: int,
    length: int,
    check: int,
) -> int:
    """Write a free root in ``state``, tag last; return its generation. Needs ROOT_LOCK."""
    at = root_at(lay, root)
    generation = (tag_generation(load_fresh(mem, at)) + 1) & GENERATION_MASK
    store(mem, at + KEY, n0)
    store(mem, at + KEY + WORD, n1)
    store(mem, at + KEY + 2 * WORD, n2)
    store(mem, at + KEY + 3 * WORD, n3)
    store(mem, at + BLOCK, offset)
    store(mem, at + LENGTH, length)
    store(mem, at + CHECK, check)
    store(mem, at + TAG, make_tag(state, node_id(mem), generation))
    clflush(mem, at)
    return generation


@program
def chunks_for(lay: Layout, n_bytes: int) -> int:
    """Return how many chunks an object of ``n_bytes`` takes."""
    return max(1, (n_bytes + lay.chunk_bytes - 1) // lay.chunk_bytes)


@program
def is_placed(lay: Layout, offset: int, length: int, most_chunks: int) -> bool:
    """Return whether an object of ``length`` bytes on ``most_chunks`` chunks may lie at ``offset``.

    Right for any words, also of a damaged region.
    """
    end = lay.pool_at + lay.chunks * lay.chunk_bytes
    if offset < lay.pool_at or offset >= end or length < WORD or length > end - offset:
        return False
    aligned = (offset - lay.pool_at) % lay.chunk_bytes == 0 and length % WORD == 0
    return aligned and chunks_for(lay, length) <= most_chunks


@program
def take_object(mem: PodMemory, lay: Layout, chunks: int) -> tuple[int, int]:
    """Take a run of chunks; return the first (or ``NOBODY``) and the epoch in which it is ours.

    If there is none, this node's heap gives its chunks back first.
    """
    acquire(mem, lay, ALLOC_LOCK)
    epoch = read_epoch(mem, lay)
    first = take_run(mem, lay, chunks)
    release(mem, lay, ALLOC_LOCK)
    if first == NOBODY and held_chunks(mem, lay) > 0:
        trim(mem, lay, 0)
        acquire(mem, lay, ALLOC_LOCK)
        epoch = read_epoch(mem, lay)
        first = take_run(mem, lay, chunks)
        release(mem, lay, ALLOC_LOCK)
    return first, epoch


@program
def free_object(mem: PodMemory, lay: Layout, first: int, chunks: int, epoch: int) -> None:
    """Free a run of chunks that nothing refers to, unless a new epoch has done so."""
    acquire(mem, lay, ALLOC_LOCK)
    if read_epoch(mem, lay) == epoch:
        mark_run(mem, lay, first, chunks, False)
    release(mem, lay, ALLOC_LOCK)


@program
def write_object(mem: PodMemory, offset: int, words: Words) -> None:
    """Store ``words`` at ``offset`` (a line's) by the CPU and flush every line of them."""
    for i in range(len(words)):
        store(mem, offset + i * WORD, int(words[i]))
        if (i + 1) * WORD % LINE == 0 or i + 1 == len(words):
            clflush(mem, offset + i * WORD)


@program
def read_object(mem: PodMemory, offset: int, words: Words) -> None:
    """Load ``words`` from ``offset`` (a line's) as the device has them."""
    for i in range(len(words)):
        if i * WORD % LINE == 0:
            clflush(mem, offset + i * WORD)
        words[i] = load(mem, offset + i * WORD)


@program
def look_for_root(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int) -> int:
    """Return OK if there is no object of that name and a root for one, EXISTS, or TABLE_FULL."""
    acquire(mem, lay, ROOT_LOCK)
    found, root = find_root(mem, lay, n0, n1, n2, n3)
    release(mem, lay, ROOT_LOCK)
    if found != NOBODY:
        return EXISTS
    return TABLE_FULL if root == NOBODY else OK


@program
def put(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int, words: Words) -> int:
    """Store an object under a name; return OK, EXISTS, NO_SPACE, TABLE_FULL, or STALE.

    STALE says that a recovery came between: nothing was stored, ask again.
    """
    code = look_for_root(mem, lay, n0, n1, n2, n3)
    if code != OK:
        return code
    chunks = chunks_for(lay, len(words) * WORD)
    first, epoch = take_object(mem, lay, chunks)
    if first == NOBODY:
        return NO_SPACE
    offset = block_of(lay, first)
    generation = 0
    acquire(mem, lay, ROOT_LOCK)
    found, root = find_root(mem, lay, n0, n1, n2, n3)
    if read_epoch(mem, lay) != epoch:
        code = STALE
    elif found != NOBODY:
        code = EXISTS
    elif root == NOBODY:
        code = TABLE_FULL
    else:
        generation = write_root(
            mem, lay, root, PENDING, n0, n1, n2, n3, offset, len(words) * WORD, checksum(words)
        )
    release(mem, lay, ROOT_LOCK)
    if code != OK:
        free_object(mem, lay, first, chunks, epoch)
        return code
    write_object(mem, offset, words)
    acquire(mem, lay, ROOT_LOCK)
    publish(mem, root_at(lay, root), make_tag(READY, node_id(mem), generation))
    release(mem, lay, ROOT_LOCK)
    return OK


@program
def get(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int) -> tuple[int, int, int]:
    """Return OK, offset and length in bytes of the object of that name, or MISS."""
    acquire(mem, lay, ROOT_LOCK)
    found, _ = find_root(mem, lay, n0, n1, n2, n3)
    code, offset, length = MISS, 0, 0
    if found != NOBODY:
        at = root_at(lay, found)
        if tag_state(load(mem, at)) == READY:
            code, offset, length = OK, load(mem, at + BLOCK), load(mem, at + LENGTH)
    release(mem, lay, ROOT_LOCK)
    return code, offset, length


@program
def read(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int, words: Words) -> int:
    """Copy the object of that name into ``words`` (of its length); return OK, MISS, or STALE.

    STALE says that it has another length now. It cannot be deleted while it is copied.
    """
    code = MISS
    acquire(mem, lay, ROOT_LOCK)
    found, _ = find_root(mem, lay, n0, n1, n2, n3)
    if found != NOBODY:
        at = root_at(lay, found)
        if tag_state(load(mem, at)) == READY:
            code = STALE
            if load(mem, at + LENGTH) == len(words) * WORD:
                read_object(mem, load(mem, at + BLOCK), words)
                code = OK
    release(mem, lay, ROOT_LOCK)
    return code


@program
def delete(mem: PodMemory, lay: Layout, n0: int, n1: int, n2: int, n3: int) -> int:
    """Remove a name and free its chunks; return OK, or MISS (also while it is being put)."""
    code = MISS
    first, chunks = 0, 0
    acquire(mem, lay, ROOT_LOCK)
    epoch = read_epoch(mem, lay)
    found, _ = find_root(mem, lay, n0, n1, n2, n3)
    if found != NOBODY:
        at = root_at(lay, found)
        tag = load(mem, at)
        offset = load(mem, at + BLOCK)
        if tag_state(tag) == READY and offset >= lay.pool_at:
            first = chunk_of(lay, offset)
            chunks = chunks_for(lay, load(mem, at + LENGTH))
            publish(mem, at, make_tag(EMPTY, 0, tag_generation(tag)))
            code = OK
    release(mem, lay, ROOT_LOCK)
    if code == OK:
        free_object(mem, lay, first, chunks, epoch)
    return code
