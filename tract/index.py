"""The prefix index: a fixed-size hash table with linear probing (TraCT, § prefix cache).

An entry is one line, so that one flush publishes it whole::

    tag | key (4 words) | offset of the block | length in bytes | checksum of the payload

The **tag** packs state, owner and generation into one word, and is always stored last: a line that
shows a tag shows all that was stored before it. States::

    EMPTY -> PENDING (reserved by its owner, payload on its way) -> READY
    PENDING, READY -> TOMBSTONE (probes go on) -> PENDING again, or EMPTY when no probe needs it

The probe takes no lock and changes nothing; it invalidates each line before it reads it. What it
returns is a guess, torn across refills of a line, that must be confirmed under CACHE_LOCK: state,
key *and* generation, since the slot may have been given to another key or to the same one again.

A removal keeps the table free of needless tombstones: those behind which no live entry's probe path
runs become EMPTY. That walks the removed entry's cluster, at most ``TIDY_LIMIT`` slots.

PENDING, tombstones and generations are not in the paper, which leaves them open.
"""

from __future__ import annotations

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, clflush, load, program, store
from cxlbench.tract.codes import EXISTS, NOBODY, OK, TABLE_FULL
from cxlbench.tract.layout import Layout
from cxlbench.tract.words import MASK_62, load_fresh, publish

EMPTY = 0
PENDING = 1
READY = 2
TOMBSTONE = 3

# Offsets in an entry, and in a root.
TAG = 0
KEY = WORD
BLOCK = 5 * WORD
LENGTH = 6 * WORD
CHECK = 7 * WORD

GENERATION_BITS = 32
GENERATION_MASK = (1 << GENERATION_BITS) - 1
TIDY_LIMIT = 256
"""How many slots a removal looks at to find needless tombstones."""


@program
def make_tag(state: int, owner: int, generation: int) -> int:
    """Pack state, owner (a node, 0 to 255) and generation (32 bits)."""
    return state | owner << 8 | generation << 16


@program
def tag_state(tag: int) -> int:
    """Return the state in a tag."""
    return tag & 255


@program
def tag_owner(tag: int) -> int:
    """Return the node that reserved the entry."""
    return (tag >> 8) & 255


@program
def tag_generation(tag: int) -> int:
    """Return the generation: how often the slot was reserved, modulo 2**32."""
    return tag >> 16


@program
def entry_at(lay: Layout, slot: int) -> int:
    """Return the offset of entry ``slot``."""
    return lay.index_at + slot * LINE


@program
def home_of(lay: Layout, k0: int) -> int:
    """Return the slot at which probes for a key with first word ``k0`` begin."""
    return (k0 & MASK_62) % lay.slots


@program
def has_key(mem: PodMemory, at: int, k0: int, k1: int, k2: int, k3: int) -> bool:
    """Return whether the entry or root at ``at`` (its line just invalidated) has that key."""
    return (
        load(mem, at + KEY) == k0
        and load(mem, at + KEY + WORD) == k1
        and load(mem, at + KEY + 2 * WORD) == k2
        and load(mem, at + KEY + 3 * WORD) == k3
    )


@program
def probe(mem: PodMemory, lay: Layout, k0: int, k1: int, k2: int, k3: int) -> tuple[int, int, int]:
    """Find a READY entry without any lock; return slot, generation, and slots looked at.

    The slot is ``NOBODY`` if there is none. It ends after one round even if no slot is EMPTY.
    """
    slot = home_of(lay, k0)
    for looked in range(lay.slots):
        at = entry_at(lay, slot)
        clflush(mem, at)
        tag = load(mem, at)
        state = tag_state(tag)
        if state == EMPTY:
            return NOBODY, 0, looked + 1
        if state == READY and has_key(mem, at, k0, k1, k2, k3):
            return slot, tag_generation(tag), looked + 1
        slot += 1
        if slot == lay.slots:
            slot = 0
    return NOBODY, 0, lay.slots


@program
def confirm(
    mem: PodMemory, lay: Layout, slot: int, generation: int, k0: int, k1: int, k2: int, k3: int
) -> bool:
    """Return whether ``slot`` is READY with that generation and key. Needs CACHE_LOCK."""
    return is_ready(mem, lay, slot, generation) and has_key(
        mem, entry_at(lay, slot), k0, k1, k2, k3
    )


@program
def find_place(mem: PodMemory, lay: Layout, k0: int, k1: int, k2: int, k3: int) -> tuple[int, int]:
    """Return a code and a slot: where the key is (EXISTS), or could go (OK). Needs CACHE_LOCK.

    The code is ``TABLE_FULL`` if the key is absent and every slot is taken.
    """
    slot = home_of(lay, k0)
    place = NOBODY
    for _ in range(lay.slots):
        at = entry_at(lay, slot)
        clflush(mem, at)
        state = tag_state(load(mem, at))
        if state == EMPTY:
            return OK, slot if place == NOBODY else place
        if state == TOMBSTONE:
            if place == NOBODY:
                place = slot
        elif has_key(mem, at, k0, k1, k2, k3):
            return EXISTS, slot
        slot += 1
        if slot == lay.slots:
            slot = 0
    return TABLE_FULL if place == NOBODY else OK, place


@program
def write_pending(
    mem: PodMemory,
    lay: Layout,
    slot: int,
    owner: int,
    k0: int,
    k1: int,
    k2: int,
    k3: int,
    block: int,
    length: int,
) -> int:
    """Reserve ``slot``, which is free, for a key and its block; return the new generation.

    Needs CACHE_LOCK. The key becomes findable by :func:`mark_ready` only.
    """
    at = entry_at(lay, slot)
    generation = (tag_generation(load_fresh(mem, at)) + 1) & GENERATION_MASK
    store(mem, at + KEY, k0)
    store(mem, at + KEY + WORD, k1)
    store(mem, at + KEY + 2 * WORD, k2)
    store(mem, at + KEY + 3 * WORD, k3)
    store(mem, at + BLOCK, block)
    store(mem, at + LENGTH, length)
    store(mem, at + CHECK, 0)
    store(mem, at + TAG, make_tag(PENDING, owner, generation))
    clflush(mem, at)
    return generation


@program
def is_pending(mem: PodMemory, lay: Layout, slot: int, owner: int, generation: int) -> bool:
    """Return whether ``slot`` is still the reservation that :func:`write_pending` made."""
    return load_fresh(mem, entry_at(lay, slot)) == make_tag(PENDING, owner, generation)


@program
def is_ready(mem: PodMemory, lay: Layout, slot: int, generation: int) -> bool:
    """Return whether ``slot`` is READY with that generation. Needs CACHE_LOCK."""
    tag = load_fresh(mem, entry_at(lay, slot))
    return tag_state(tag) == READY and tag_generation(tag) == generation


@program
def mark_ready(
    mem: PodMemory, lay: Layout, slot: int, owner: int, generation: int, check: int
) -> None:
    """Publish a PENDING entry whose payload is complete in the device. Needs CACHE_LOCK."""
    at = entry_at(lay, slot)
    store(mem, at + CHECK, check)
    store(mem, at + TAG, make_tag(READY, owner, generation))
    clflush(mem, at)


@program
def mark_removed(mem: PodMemory, lay: Layout, slot: int) -> None:
    """Make a PENDING or READY entry a tombstone. Needs CACHE_LOCK."""
    at = entry_at(lay, slot)
    tag = load_fresh(mem, at)
    publish(mem, at, make_tag(TOMBSTONE, 0, tag_generation(tag)))


@program
def mark_empty(mem: PodMemory, lay: Layout, slot: int) -> None:
    """Make a tombstone EMPTY; it keeps its generation."""
    at = entry_at(lay, slot)
    tag = load_fresh(mem, at)
    publish(mem, at, make_tag(EMPTY, 0, tag_generation(tag)))


@program
def tidy(mem: PodMemory, lay: Layout, slot: int) -> int:
    """Empty the tombstones that nobody needs once the entry at ``slot`` was removed.

    Those lie between its home and itself, for only there did its own probe path run. Positions
    are counted from its home on. Needs CACHE_LOCK, under which the removed entry was just read;
    returns how many slots became EMPTY.
    """
    home = home_of(lay, load(mem, entry_at(lay, slot) + KEY))
    removed = (slot - home) % lay.slots
    limit = min(lay.slots, TIDY_LIMIT)
    end = removed + 1
    while True:
        if end >= limit:
            return 0
        if tag_state(load_fresh(mem, entry_at(lay, (home + end) % lay.slots))) == EMPTY:
            break
        end += 1
    needed_from = end
    emptied = 0
    for back in range(end):
        position = end - 1 - back
        current = (home + position) % lay.slots
        at = entry_at(lay, current)
        if position < removed:
            clflush(mem, at)
        state = tag_state(load(mem, at))
        if state == TOMBSTONE:
            if position <= removed and needed_from > position:
                mark_empty(mem, lay, current)
                emptied += 1
        elif state != EMPTY:
            travelled = (current - home_of(lay, load(mem, at + KEY))) % lay.slots
            needed_from = min(needed_from, position - travelled)
    return emptied
