"""Repair: what dead nodes left half done is finished or undone (beyond the paper).

Runs on the arbiter, after the dead were fenced, while no node holds one of TraCT's own locks and
none is granted. The truth is in two places only: index entries and roots, each a line whose tag is
stored last. Everything else (tombstones, list, counts, bitmap, heaps) follows from them and is
rebuilt where it disagrees. Every step may crash and be done again by the next arbiter:

1. a new epoch: what live nodes hold in their heaps is theirs no more, the bitmap will have it;
2. reservations (PENDING entries and roots) of the dead are dropped, their pins cleared; so is
   what no crash can have left: nothing may be written outside of the structures, nor read wrong;
3. needless tombstones, list, live count and bitmap are put right;
4. the slots of the dead become IDLE, so that their locks can be granted again;
5. the verdict: repaired.

Reservations, pins and blocks of live nodes stay as they are: they go on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, clflush, load, program, store
from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.codes import EXISTS, NOBODY
from cxlbench.tract.eviction import chunk_of
from cxlbench.tract.index import (
    BLOCK,
    EMPTY,
    KEY,
    LENGTH,
    PENDING,
    READY,
    TOMBSTONE,
    entry_at,
    find_place,
    home_of,
    make_tag,
    mark_empty,
    mark_removed,
    tag_generation,
    tag_owner,
    tag_state,
)
from cxlbench.tract.layout import (
    CHUNKS_PER_WORD,
    HEAD,
    INTERNAL_LOCKS,
    LRU_NODE,
    TAIL,
    Layout,
)
from cxlbench.tract.layout import LIVE as LIVE_COUNT
from cxlbench.tract.lock import IDLE, LOCKED, slot_of
from cxlbench.tract.lru import NEXT, NONE, PREVIOUS, link_of, slot_of_link
from cxlbench.tract.membership import (
    BACK_UNREPAIRED,
    DEAD,
    REPAIRED,
    next_epoch,
    set_verdict,
    verdict_of,
)
from cxlbench.tract.object_store import chunks_for, is_placed, root_at
from cxlbench.tract.pins import pin_at
from cxlbench.tract.words import load_fresh, publish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

_FAR = 1 << 62


@program
def is_unrepaired(standing: int) -> bool:
    """Return whether a node of that standing left something behind."""
    return standing in (DEAD, BACK_UNREPAIRED)


@program
def is_quiet(mem: PodMemory, lay: Layout, standing: Words) -> bool:
    """Return whether no live node holds one of TraCT's own locks."""
    for lock in range(INTERNAL_LOCKS):
        for node in range(lay.nodes):
            if standing[node] == LIVE and load_fresh(mem, slot_of(lay, lock, node)) == LOCKED:
                return False
    return True


@program
def is_kept(
    mem: PodMemory, lay: Layout, at: int, standing: Words, used: Words, most_chunks: int
) -> bool:
    """Return whether the live entry or root at ``at`` stays; its chunks are marked in ``used``.

    Reservations of the dead do not, nor objects that lie nowhere, or on a chunk of another one,
    which no crash can have left.
    """
    tag = load(mem, at)
    state = tag_state(tag)
    if state not in (PENDING, READY):
        return False
    owner = tag_owner(tag)
    if state == PENDING and (owner >= lay.nodes or is_unrepaired(int(standing[owner]))):
        return False
    offset, length = load(mem, at + BLOCK), load(mem, at + LENGTH)
    if not is_placed(lay, offset, length, most_chunks):
        return False
    first, chunks = chunk_of(lay, offset), chunks_for(lay, length)
    for chunk in range(first, first + chunks):
        if (int(used[chunk // CHUNKS_PER_WORD]) >> (chunk % CHUNKS_PER_WORD)) & 1:
            return False
    for chunk in range(first, first + chunks):
        used[chunk // CHUNKS_PER_WORD] |= 1 << (chunk % CHUNKS_PER_WORD)
    return True


@program
def is_found(mem: PodMemory, lay: Layout, slot: int) -> bool:
    """Return whether who looks for the key in entry ``slot`` finds that entry."""
    at = entry_at(lay, slot)
    k0, k1 = load(mem, at + KEY), load(mem, at + KEY + WORD)
    k2, k3 = load(mem, at + KEY + 2 * WORD), load(mem, at + KEY + 3 * WORD)
    code, found = find_place(mem, lay, k0, k1, k2, k3)
    return code == EXISTS and found == slot


@program
def drop_entries(mem: PodMemory, lay: Layout, standing: Words, used: Words) -> int:
    """Remove the entries and roots that must not stay; return how many there were.

    Fills ``used`` (a word per bitmap word) with the chunks of those that do.
    """
    dropped = 0
    for slot in range(lay.slots):
        tag = load_fresh(mem, entry_at(lay, slot))
        if tag_state(tag) not in (EMPTY, TOMBSTONE) and not (
            is_found(mem, lay, slot) and is_kept(mem, lay, entry_at(lay, slot), standing, used, 1)
        ):
            mark_removed(mem, lay, slot)
            dropped += 1
    for root in range(lay.roots):
        at = root_at(lay, root)
        tag = load_fresh(mem, at)
        if tag_state(tag) != EMPTY and not is_kept(mem, lay, at, standing, used, lay.chunks):
            publish(mem, at, make_tag(EMPTY, 0, tag_generation(tag)))
            dropped += 1
    return dropped


@program
def clear_pins(mem: PodMemory, lay: Layout, node: int) -> int:
    """Zero the pins of a dead node; return how many there were."""
    cleared = 0
    for slot in range(lay.slots):
        at = pin_at(lay, node, slot)
        if at % LINE == 0:
            clflush(mem, at)
        count = load(mem, at)
        if count != 0:
            publish(mem, at, 0)
            cleared += count
    return cleared


@program
def sweep(mem: PodMemory, lay: Layout) -> int:
    """Empty every tombstone that no probe path needs; return how many."""
    start = NOBODY
    for slot in range(lay.slots):
        if start == NOBODY and tag_state(load_fresh(mem, entry_at(lay, slot))) == EMPTY:
            start = slot
    if start == NOBODY:
        return 0
    emptied = 0
    needed_from = _FAR
    for back in range(lay.slots - 1):
        position = lay.slots - 1 - back
        slot = (start + position) % lay.slots
        at = entry_at(lay, slot)
        clflush(mem, at)
        state = tag_state(load(mem, at))
        if state == EMPTY:
            needed_from = _FAR
        elif state == TOMBSTONE:
            if needed_from > position:
                mark_empty(mem, lay, slot)
                emptied += 1
        else:
            travelled = (slot - home_of(lay, load(mem, at + KEY))) % lay.slots
            needed_from = min(needed_from, position - travelled)
    return emptied


@program
def is_listable(mem: PodMemory, lay: Layout, link: int, seen: Words) -> bool:
    """Return whether ``link`` leads to the node of a READY entry that was not seen yet."""
    if link < lay.lru_at or link >= link_of(lay, lay.slots) or (link - lay.lru_at) % LRU_NODE:
        return False
    slot = slot_of_link(lay, link)
    return seen[slot] == 0 and tag_state(load_fresh(mem, entry_at(lay, slot))) == READY


@program
def mend_list(mem: PodMemory, lay: Layout) -> bool:
    """Rebuild the LRU list if it is torn; return whether it was.

    What can be walked from the head keeps its order; READY entries that are missing come last.
    Every change of the list keeps the walk from the head whole, so an entry is missing only if it
    was on its way to the tail.
    """
    order = np.zeros(lay.slots, np.int64)
    seen = np.zeros(lay.slots, np.int64)
    count = 0
    torn = False
    previous = NONE
    link = load_fresh(mem, lay.cache_at + HEAD)
    while link != NONE:
        if not is_listable(mem, lay, link, seen):
            torn = True
            break
        slot = slot_of_link(lay, link)
        seen[slot] = 1
        order[count] = slot
        count += 1
        clflush(mem, link)
        if load(mem, link + PREVIOUS) != previous:
            torn = True
        previous = link
        link = load(mem, link + NEXT)
    if load_fresh(mem, lay.cache_at + TAIL) != previous:
        torn = True
    for slot in range(lay.slots):
        if seen[slot] == 0 and tag_state(load_fresh(mem, entry_at(lay, slot))) == READY:
            order[count] = slot
            count += 1
            torn = True
    if not torn:
        return False
    previous = NONE
    for i in range(count):
        link = link_of(lay, int(order[i]))
        clflush(mem, link)
        store(mem, link + PREVIOUS, previous)
        store(mem, link + NEXT, link_of(lay, int(order[i + 1])) if i + 1 < count else NONE)
        clflush(mem, link)
        previous = link
    clflush(mem, lay.cache_at)
    store(mem, lay.cache_at + HEAD, link_of(lay, int(order[0])) if count > 0 else NONE)
    store(mem, lay.cache_at + TAIL, previous)
    clflush(mem, lay.cache_at)
    return True


@program
def mend_live_count(mem: PodMemory, lay: Layout) -> None:
    """Count PENDING and READY entries anew."""
    live = 0
    for slot in range(lay.slots):
        state = tag_state(load_fresh(mem, entry_at(lay, slot)))
        if state in (PENDING, READY):
            live += 1
    if load_fresh(mem, lay.cache_at + LIVE_COUNT) != live:
        publish(mem, lay.cache_at + LIVE_COUNT, live)


@program
def mend_bitmap(mem: PodMemory, lay: Layout, used: Words) -> int:
    """Make the bitmap say exactly what ``used`` says; return how many words changed."""
    changed = 0
    for index in range(lay.bitmap_words):
        at = lay.bitmap_at + index * WORD
        if load_fresh(mem, at) != used[index]:
            publish(mem, at, int(used[index]))
            changed += 1
    return changed


@program
def reset_slots(mem: PodMemory, lay: Layout, node: int) -> None:
    """Make all lock slots of a dead node IDLE."""
    for lock in range(lay.locks):
        at = slot_of(lay, lock, node)
        if load_fresh(mem, at) != IDLE:
            publish(mem, at, IDLE)


@program
def repair(mem: PodMemory, lay: Layout, standing: Words) -> None:
    """Undo or finish what the dead nodes of ``standing`` left; they become repaired."""
    used = np.zeros(lay.bitmap_words, np.int64)
    next_epoch(mem, lay)
    drop_entries(mem, lay, standing, used)
    for node in range(lay.nodes):
        if is_unrepaired(int(standing[node])):
            clear_pins(mem, lay, node)
    sweep(mem, lay)
    mend_list(mem, lay)
    mend_live_count(mem, lay)
    mend_bitmap(mem, lay, used)
    for node in range(lay.nodes):
        if is_unrepaired(int(standing[node])):
            reset_slots(mem, lay, node)
            judged = load_fresh(mem, verdict_of(lay, node)) >> 8
            set_verdict(mem, lay, node, judged, REPAIRED)
