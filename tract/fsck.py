"""Checking a region: everything follows from index entries and roots, or is told as a problem.

What must hold when no node is inside a locked section: every key is found from its home slot, and
once; every block lies on a chunk of the pool and belongs to one entry or root; the LRU list holds
the READY entries, each once, with links that agree in both directions; the live count is right; the
bitmap covers what is referred to, and free + used + held by heaps is the pool; pins are counts of
READY entries; at most one slot of a lock reads LOCKED; epoch, verdicts and incarnations can be.

The check reads only, and ends for whatever words it finds. ``cxlbench.tract.repair`` puts right
what a crash can leave, and drops entries and roots that no crash can have left (two of them with
one block).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cxlbench.emu.pod_ops import WORD, PodMemory, clflush, load, program
from cxlbench.tract.arbiter import LIVE as LIVE_NODE
from cxlbench.tract.bitmap import count_taken
from cxlbench.tract.codes import EXISTS
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
    tag_owner,
    tag_state,
)
from cxlbench.tract.layout import CHUNKS_PER_WORD, HEAD, LIVE, TAIL, Layout
from cxlbench.tract.lock import IDLE, LOCKED, WAITING, slot_of
from cxlbench.tract.lru import NEXT, NONE, PREVIOUS, link_of, slot_of_link
from cxlbench.tract.membership import (
    ADMITTED,
    INCARNATION,
    MOST_INCARNATIONS,
    REPAIRED,
    arbiter_in,
    control_of,
    state_in,
    survey,
    verdict_of,
)
from cxlbench.tract.object_store import chunks_for, is_placed, root_at
from cxlbench.tract.pins import pin_at
from cxlbench.tract.region import call, open_region
from cxlbench.tract.words import load_fresh

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

# What ``inspect`` counts.
N_READY = 0
N_PENDING = 1
N_TOMBSTONES = 2
N_ROOTS = 3
N_USED = 4
N_TAKEN = 5
N_PINS = 6
N_HELD_LOCKS = 7
BAD_STATE = 8
BAD_BLOCK = 9
SHARED_CHUNK = 10
UNREACHABLE = 11
BAD_LIST = 12
UNLISTED = 13
BAD_LIVE_COUNT = 14
UNMARKED = 15
BAD_PIN = 16
BAD_SLOT = 17
TWO_HOLDERS = 18
ORPHAN = 19
BAD_MEMBER = 20
N_COUNTS = 21

MOST_PINS = 1 << 32
"""More readers of one block than a node can have."""

PROBLEMS = {
    BAD_STATE: "entries or roots in no possible state",
    BAD_BLOCK: "entries or roots whose object lies on no chunk of the pool",
    SHARED_CHUNK: "chunks that two entries or roots refer to",
    UNREACHABLE: "entries that a probe from their home does not find, or finds twice",
    BAD_LIST: "LRU links that lead astray or disagree",
    UNLISTED: "READY entries that are not in the LRU list",
    BAD_LIVE_COUNT: "difference between the live count and the entries",
    UNMARKED: "chunks in use whose bit in the bitmap is not set",
    BAD_PIN: "pins that no count can be, or of entries that are not READY",
    BAD_SLOT: "lock slots in no possible state",
    TWO_HOLDERS: "locks with more than one holder",
    ORPHAN: "PENDING entries or roots of nodes that are not live",
    BAD_MEMBER: "words on epoch, verdicts and incarnations that cannot be",
}
"""What each count of a problem means."""


@program
def note_object(
    mem: PodMemory, lay: Layout, at: int, used: Words, counts: Words, most_chunks: int
) -> None:
    """Check where the object of the entry or root at ``at`` lies, and mark its chunks as used."""
    offset = load(mem, at + BLOCK)
    length = load(mem, at + LENGTH)
    if not is_placed(lay, offset, length, most_chunks):
        counts[BAD_BLOCK] += 1
        return
    first = chunk_of(lay, offset)
    for chunk in range(first, first + chunks_for(lay, length)):
        word, bit = chunk // CHUNKS_PER_WORD, 1 << (chunk % CHUNKS_PER_WORD)
        if int(used[word]) & bit:
            counts[SHARED_CHUNK] += 1
        else:
            used[word] |= bit
            counts[N_USED] += 1


@program
def inspect_entries(
    mem: PodMemory, lay: Layout, standing: Words, used: Words, counts: Words
) -> None:
    """Check every entry: state, owner, block, and that a probe from its home finds it first."""
    for slot in range(lay.slots):
        at = entry_at(lay, slot)
        tag = load_fresh(mem, at)
        state = tag_state(tag)
        if state == TOMBSTONE:
            counts[N_TOMBSTONES] += 1
        elif state in (READY, PENDING):
            counts[N_READY if state == READY else N_PENDING] += 1
            owner = tag_owner(tag)
            if state == PENDING and (owner >= lay.nodes or standing[owner] != LIVE_NODE):
                counts[ORPHAN] += 1
            note_object(mem, lay, at, used, counts, 1)
            k0 = load(mem, at + KEY)
            k1 = load(mem, at + KEY + WORD)
            k2 = load(mem, at + KEY + 2 * WORD)
            k3 = load(mem, at + KEY + 3 * WORD)
            code, found = find_place(mem, lay, k0, k1, k2, k3)
            if code != EXISTS or found != slot:
                counts[UNREACHABLE] += 1
        elif state != EMPTY:
            counts[BAD_STATE] += 1


@program
def inspect_roots(mem: PodMemory, lay: Layout, standing: Words, used: Words, counts: Words) -> None:
    """Check every root: state, owner, and where its object lies."""
    for root in range(lay.roots):
        at = root_at(lay, root)
        tag = load_fresh(mem, at)
        state = tag_state(tag)
        if state in (READY, PENDING):
            counts[N_ROOTS] += 1
            owner = tag_owner(tag)
            if state == PENDING and (owner >= lay.nodes or standing[owner] != LIVE_NODE):
                counts[ORPHAN] += 1
            note_object(mem, lay, at, used, counts, lay.chunks)
        elif state != EMPTY:
            counts[BAD_STATE] += 1


@program
def inspect_list(mem: PodMemory, lay: Layout, counts: Words) -> None:
    """Check that the LRU list holds exactly the READY entries."""
    listed = 0
    previous = NONE
    link = load_fresh(mem, lay.cache_at + HEAD)
    while link != NONE and listed <= lay.slots:
        slot = slot_of_link(lay, link)
        if slot < 0 or slot >= lay.slots or link != link_of(lay, slot):
            counts[BAD_LIST] += 1
            break
        if tag_state(load_fresh(mem, entry_at(lay, slot))) != READY:
            counts[BAD_LIST] += 1
        clflush(mem, link)
        if load(mem, link + PREVIOUS) != previous:
            counts[BAD_LIST] += 1
        listed += 1
        previous = link
        link = load(mem, link + NEXT)
    if load_fresh(mem, lay.cache_at + TAIL) != previous:
        counts[BAD_LIST] += 1
    counts[UNLISTED] = abs(counts[N_READY] - listed)


@program
def inspect_locks(mem: PodMemory, lay: Layout, counts: Words) -> None:
    """Check the slots of every lock."""
    for lock in range(lay.locks):
        holders = 0
        for node in range(lay.nodes):
            state = load_fresh(mem, slot_of(lay, lock, node))
            if state == LOCKED:
                holders += 1
            elif state not in (IDLE, WAITING):
                counts[BAD_SLOT] += 1
        counts[N_HELD_LOCKS] += holders
        if holders > 1:
            counts[TWO_HOLDERS] += 1


@program
def inspect_pins(mem: PodMemory, lay: Layout, counts: Words) -> None:
    """Count all pins, and check that they are of READY entries."""
    for slot in range(lay.slots):
        ready = tag_state(load_fresh(mem, entry_at(lay, slot))) == READY
        for node in range(lay.nodes):
            pins = load_fresh(mem, pin_at(lay, node, slot))
            if pins < 0 or pins > MOST_PINS or (pins > 0 and not ready):
                counts[BAD_PIN] += 1
            else:
                counts[N_PINS] += pins


@program
def inspect_members(mem: PodMemory, lay: Layout, counts: Words) -> None:
    """Check that epoch, verdicts and incarnations are numbers that they can be."""
    epoch = load_fresh(mem, lay.epoch_at)
    if epoch < 0 or arbiter_in(epoch) >= lay.nodes:
        counts[BAD_MEMBER] += 1
    for node in range(lay.nodes):
        verdict = load_fresh(mem, verdict_of(lay, node))
        if verdict < 0 or state_in(verdict) not in (ADMITTED, REPAIRED):
            counts[BAD_MEMBER] += 1
        announced = load_fresh(mem, control_of(lay, node) + INCARNATION)
        if announced < 0 or announced > MOST_INCARNATIONS:
            counts[BAD_MEMBER] += 1


@program
def inspect(mem: PodMemory, lay: Layout, counts: Words) -> None:
    """Fill ``counts`` (``N_COUNTS`` words) with what is there and what is wrong."""
    for i in range(N_COUNTS):
        counts[i] = 0
    used = np.zeros(lay.bitmap_words, np.int64)
    standing = np.zeros(lay.nodes, np.int64)
    survey(mem, lay, standing)
    inspect_entries(mem, lay, standing, used, counts)
    inspect_roots(mem, lay, standing, used, counts)
    inspect_list(mem, lay, counts)
    inspect_locks(mem, lay, counts)
    inspect_pins(mem, lay, counts)
    live = load_fresh(mem, lay.cache_at + LIVE)
    inspect_members(mem, lay, counts)
    if live < 0 or live > lay.slots:
        counts[BAD_LIVE_COUNT] = lay.slots
    else:
        counts[BAD_LIVE_COUNT] = abs(live - counts[N_READY] - counts[N_PENDING])
    counts[N_TAKEN] = count_taken(mem, lay)
    for index in range(lay.bitmap_words):
        missing = int(used[index]) & ~load_fresh(mem, lay.bitmap_at + index * WORD)
        for bit in range(CHUNKS_PER_WORD):
            counts[UNMARKED] += (missing >> bit) & 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckReport:
    """What a region holds and what is wrong with it; ``problems`` is empty for a sound one.

    ``held`` chunks are taken but referred to by nothing: they are in nodes' heaps, or were when
    the nodes went. ``free + used + held`` is ``chunks``.
    """

    chunks: int
    free: int
    used: int
    held: int
    ready: int
    pending: int
    tombstones: int
    roots: int
    pins: int
    held_locks: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def fsck(mem: Any, lay: Layout, *, in_heaps: int | None = None) -> FsckReport:
    """Check a region while nobody changes it.

    ``in_heaps`` is how many chunks the heaps of all live nodes hold, if that is known: then the
    sum must come out exactly.
    """
    counts = np.zeros(N_COUNTS, np.int64)
    call(inspect, mem, lay, counts)
    problems = [f"{counts[i]} {text}" for i, text in PROBLEMS.items() if counts[i]]
    held = int(counts[N_TAKEN] - counts[N_USED] + counts[UNMARKED])
    if in_heaps is not None and held != in_heaps:
        problems.append(f"{held} chunks are taken and unused, the heaps hold {in_heaps}")
    return FsckReport(
        chunks=lay.chunks,
        free=lay.chunks - int(counts[N_USED]) - held,
        used=int(counts[N_USED]),
        held=held,
        ready=int(counts[N_READY]),
        pending=int(counts[N_PENDING]),
        tombstones=int(counts[N_TOMBSTONES]),
        roots=int(counts[N_ROOTS]),
        pins=int(counts[N_PINS]),
        held_locks=int(counts[N_HELD_LOCKS]),
        problems=tuple(problems),
    )


def open_and_check(mem: Any, region_bytes: int) -> tuple[Layout, FsckReport]:
    """Open a region (see ``region.open_region``) and check it."""
    layout = open_region(mem, region_bytes)
    return layout, fsck(mem, layout)
