"""The compiled loops of Master's slot table: an open-addressing hash table with an LRU list in it.

Models the 64-byte metadata slot of HyMCache §4.1. A table is a uint64 array of shape (slots, 8), a
cache line per row, little-endian:

    words 0-3  key            word 4  address (bytes)       word 5  length (bytes)
    word 6     generation: bits 0-31, node: 32-47, device: 48-55, state: 56-63
    word 7     older neighbour in the LRU list: bits 0-31, newer neighbour: bits 32-63

A row whose state is 0 is empty, and then all zero. Links are row numbers, ``NIL`` at the ends. The
header is an int64 array of [objects, oldest row, newest row]. Keys come as a read-only uint64 array
of shape (n, 4). Callers keep at least one row empty: that is what ends a search.

Rows are found by linear probing from ``_home``. A removal shifts the rows behind it back instead of
leaving a tombstone, so searches do not get longer with the age of the table; a row that moves takes
its neighbours' links with it.

Left out: locking (one caller at a time) and all checks of arguments (`slot_table` does them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Ints: TypeAlias = NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., Any])

NIL = 0xFFFFFFFF
COUNT, OLDEST, NEWEST = 0, 1, 2
ANY = -1

_LOW32 = np.uint64(0xFFFFFFFF)
_HIGH32 = np.uint64(0xFFFFFFFF00000000)
_S32 = np.uint64(32)
_S56 = np.uint64(56)
_STATE_MASK = np.uint64(0x00FFFFFFFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)


def _kernel(function: _F) -> _F:
    """Compile a function at its first call; keep the machine code where numba finds a place.

    That is beside this file or in the user's cache folder. Where neither can be written, every
    process compiles anew (about 3 s in all).
    """
    try:
        return cast(_F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(_F, numba.njit(nogil=True)(function))


@_kernel
def _home(rows: Words, row: int, slots: int) -> int:
    """Return the slot where the search for a key starts: uniform over any number of slots.

    Block keys are SHA-256, so any 32 of their bits would do. All four words are folded in for keys
    that are not: equal prefixes or counters do not cluster. The function is fixed and public, so it
    does not stop somebody who can choose whole keys.
    """
    fold = rows[row, 0] * _MIX
    for word in range(1, 4):
        fold = ((fold ^ (fold >> _S32)) + rows[row, word]) * _MIX
    fold ^= fold >> _S32
    return int(np.int64((((fold * _MIX) >> _S32) * np.uint64(slots)) >> _S32))


@_kernel
def _find(table: Words, keys: Words, row: int) -> int:
    """Return the slot of a key, or -1 - (the empty slot where it would go)."""
    slots = table.shape[0]
    at = _home(keys, row, slots)
    while table[at, 6] >> _S56:
        if (
            table[at, 0] == keys[row, 0]
            and table[at, 1] == keys[row, 1]
            and table[at, 2] == keys[row, 2]
            and table[at, 3] == keys[row, 3]
        ):
            return at
        at += 1
        if at == slots:
            at = 0
    return -1 - at


@_kernel
def _set_older(table: Words, header: Ints, slot: int, older: int) -> None:
    """Make ``older`` the older neighbour of ``slot``, or of the list's end if slot is NIL."""
    if slot == NIL:
        header[NEWEST] = older
    else:
        table[slot, 7] = (table[slot, 7] & _HIGH32) | np.uint64(older)


@_kernel
def _set_newer(table: Words, header: Ints, slot: int, newer: int) -> None:
    """Make ``newer`` the newer neighbour of ``slot``, or of the list's start if slot is NIL."""
    if slot == NIL:
        header[OLDEST] = newer
    else:
        table[slot, 7] = (table[slot, 7] & _LOW32) | (np.uint64(newer) << _S32)


@_kernel
def _older(table: Words, slot: int) -> int:
    return int(np.int64(table[slot, 7] & _LOW32))


@_kernel
def _newer(table: Words, slot: int) -> int:
    return int(np.int64(table[slot, 7] >> _S32))


@_kernel
def _unlink(table: Words, header: Ints, slot: int) -> None:
    older, newer = _older(table, slot), _newer(table, slot)
    _set_newer(table, header, older, newer)
    _set_older(table, header, newer, older)


@_kernel
def _link_before(table: Words, header: Ints, slot: int, newer: int) -> None:
    """Link ``slot`` in as the older neighbour of ``newer``; as the newest if that is NIL."""
    older = header[NEWEST] if newer == NIL else _older(table, newer)
    _set_older(table, header, slot, older)
    _set_newer(table, header, slot, newer)
    _set_newer(table, header, older, slot)
    _set_older(table, header, newer, slot)


@_kernel
def _remove_slot(table: Words, header: Ints, slot: int) -> None:
    """Take a slot out of the list and the table, and close the gap in its cluster."""
    slots = table.shape[0]
    _unlink(table, header, slot)
    header[COUNT] -= 1
    gap = slot
    at = slot
    while True:
        at = at + 1 if at + 1 < slots else 0
        if not table[at, 6] >> _S56:
            break
        distance_from_home = at - _home(table, at, slots)
        if distance_from_home < 0:
            distance_from_home += slots
        distance_from_gap = at - gap
        if distance_from_gap < 0:
            distance_from_gap += slots
        if distance_from_home < distance_from_gap:
            continue
        for word in range(8):
            table[gap, word] = table[at, word]
        _set_newer(table, header, _older(table, gap), gap)
        _set_older(table, header, _newer(table, gap), gap)
        gap = at
    for word in range(8):
        table[gap, word] = np.uint64(0)


@_kernel
def find(table: Words, keys: Words, out: Ints) -> None:
    """Write each key's slot to ``out``, -1 for absent keys."""
    for i in range(keys.shape[0]):
        out[i] = max(_find(table, keys, i), -1)


@_kernel
def lookup(table: Words, keys: Words, out: Words) -> None:
    """Copy each key's slot to a row of ``out`` of shape (n, 8); zeros for absent keys."""
    for i in range(keys.shape[0]):
        slot = _find(table, keys, i)
        for word in range(8):
            out[i, word] = table[slot, word] if slot >= 0 else np.uint64(0)


@_kernel
def insert(table: Words, header: Ints, limit: int, keys: Words, rows: Words, new: Ints) -> int:
    """Insert the keys that are absent, with words 4-6 of ``rows``; copy present slots to ``rows``.

    ``new`` becomes 1 for inserted keys, 0 for present ones. The new keys enter at the newest end of
    the list, the first of them newest. Returns -1, or the position of the first key that did not
    fit: then the table and the list are as before.
    """
    newer = NIL
    for i in range(keys.shape[0]):
        slot = _find(table, keys, i)
        if slot >= 0:
            new[i] = 0
            for word in range(8):
                rows[i, word] = table[slot, word]
            continue
        if header[COUNT] >= limit:
            # Newest first, so that each removal finds the cluster as its insertion left it.
            for j in range(i - 1, -1, -1):
                if new[j]:
                    _remove_slot(table, header, _find(table, keys, j))
            return i
        slot = -1 - slot
        new[i] = 1
        for word in range(4):
            table[slot, word] = keys[i, word]
        for word in range(4, 7):
            table[slot, word] = rows[i, word]
        _link_before(table, header, slot, newer)
        header[COUNT] += 1
        newer = slot
    return -1


@_kernel
def set_state(
    table: Words, keys: Words, generations: Ints, expected: int, state: int, found: Ints
) -> None:
    """Set the state of slots in the expected state and generation (ANY: each).

    ``found`` becomes 1 where it was set, 0 where the slot is otherwise, -1 where there is none.
    """
    for i in range(keys.shape[0]):
        slot = _find(table, keys, i)
        found[i] = -1
        if slot < 0:
            continue
        word = table[slot, 6]
        found[i] = 0
        if np.int64(word >> _S56) != expected:
            continue
        if generations[i] != ANY and np.int64(word & _LOW32) != generations[i]:
            continue
        found[i] = 1
        table[slot, 6] = (word & _STATE_MASK) | (np.uint64(state) << _S56)


@_kernel
def update_location(table: Words, keys: Words, rows: Words, found: Ints) -> None:
    """Overwrite words 4-6, but not the state, of each key's slot; ``found`` as in set_state."""
    for i in range(keys.shape[0]):
        slot = _find(table, keys, i)
        found[i] = -1
        if slot >= 0:
            found[i] = 1
            table[slot, 4] = rows[i, 4]
            table[slot, 5] = rows[i, 5]
            table[slot, 6] = (table[slot, 6] & ~_STATE_MASK) | (rows[i, 6] & _STATE_MASK)


@_kernel
def remove(table: Words, header: Ints, keys: Words, generations: Ints) -> int:
    """Remove the keys that are present in the given generation (ANY: each); return how many."""
    removed = 0
    for i in range(keys.shape[0]):
        slot = _find(table, keys, i)
        if slot < 0:
            continue
        if generations[i] != ANY and np.int64(table[slot, 6] & _LOW32) != generations[i]:
            continue
        _remove_slot(table, header, slot)
        removed += 1
    return removed


@_kernel
def touch(table: Words, header: Ints, keys: Words) -> int:
    """Move the keys to the newest end of the list, last key first; return how many were present."""
    touched = 0
    for i in range(keys.shape[0] - 1, -1, -1):
        slot = _find(table, keys, i)
        if slot >= 0:
            _unlink(table, header, slot)
            _link_before(table, header, slot, NIL)
            touched += 1
    return touched


@_kernel
def coldest(table: Words, header: Ints, state: int, out: Words) -> int:
    """Copy up to n keys in a state (ANY: each) to ``out`` (n, 4), oldest first; return how many."""
    filled = 0
    slot = header[OLDEST]
    while slot != NIL and filled < out.shape[0]:
        if state == ANY or np.int64(table[slot, 6] >> _S56) == state:
            for word in range(4):
                out[filled, word] = table[slot, word]
            filled += 1
        slot = _newer(table, slot)
    return filled


@_kernel
def audit(table: Words, header: Ints, limit: int, out: Ints) -> None:
    """Check every invariant; write [code, slot, sum of probe lengths, longest probe length].

    Code 0: all hold. 1: an empty slot is not all zero. 2: a key cannot be reached from its home.
    3: a key is in the table twice. 4: the number of objects is wrong or over the limit. 5: a link
    of the list does not point to a full slot. 6: two neighbours disagree. 7: the list is not all.
    """
    slots = table.shape[0]
    out[:] = 0
    count = 0
    for slot in range(slots):
        out[1] = slot
        if not table[slot, 6] >> _S56:
            for word in range(8):
                if table[slot, word]:
                    out[0] = 1
                    return
            continue
        count += 1
        at = _find(table, table, slot)
        if at != slot:
            out[0] = 2 if at < 0 else 3
            return
        length = slot - _home(table, slot, slots)
        length += 1 if length >= 0 else slots + 1
        out[2] += length
        out[3] = max(out[3], length)
    if count != header[COUNT] or count > limit:
        out[0] = 4
        return
    linked = 0
    older = NIL
    slot = header[OLDEST]
    while slot != NIL:
        out[1] = slot
        if slot >= slots or slot < 0 or not table[slot, 6] >> _S56:
            out[0] = 5
            return
        if _older(table, slot) != older:
            out[0] = 6
            return
        linked += 1
        older = slot
        slot = _newer(table, slot)
    if linked != count or header[NEWEST] != older:
        out[0] = 7
