"""Master's table: key -> node, device, address, length, generation and state, in 64 bytes a slot.

Models HyMCache §4.1 (64 B of metadata an object, so that one small process can map 10 TB of 16 MiB
objects), with what it needs to be filled, read and evicted from: slots in one numpy table at a load
of at most 0.8, the states WRITING -> READY -> EVICTING, and one LRU list over all slots whatever
their state: `coldest` chooses by state, so a slot keeps its age when it changes its state.

Every call takes a batch of keys in the order of their chain, head first, and makes one call of a
compiled kernel (`slot_kernels`, which also says how slots are laid out). Addresses and lengths are
bytes. Left out: leases, policy, and locking; one task owns the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cxlbench.hymcache import slot_kernels as kernels
from cxlbench.hymcache.slot_types import (
    SLOT_BYTES,
    SLOT_DTYPE,
    Column,
    InsertBatch,
    InsertResult,
    Keys,
    LookupBatch,
    ProbeLengths,
    SlotState,
    TableCorruptError,
    TableFullError,
    UpdateResult,
    generations,
    key_words,
    location_rows,
    occupied,
    pack_keys,
    slot_words,
)
from cxlbench.kv.identity import KEY_BYTES

__all__ = [
    "SLOT_BYTES",
    "SLOT_DTYPE",
    "Column",
    "InsertBatch",
    "InsertResult",
    "Keys",
    "LookupBatch",
    "ProbeLengths",
    "SlotState",
    "SlotTable",
    "TableCorruptError",
    "TableFullError",
    "UpdateResult",
    "compile_kernels",
    "pack_keys",
]

_MAX_SLOTS = kernels.NIL - 1
_AUDIT = (
    "",
    "an empty slot is not all zero",
    "a key cannot be reached from its home",
    "a key is in the table twice",
    "the number of objects is wrong or over the limit",
    "a link of the LRU list does not lead to a full slot",
    "two neighbours in the LRU list disagree",
    "the LRU list does not hold all objects",
)


class SlotTable:
    """An open-addressing table of up to ``max_objects`` keys with one LRU list over all of them.

    Takes ceil(max_objects / 0.8) slots of 64 bytes, all allocated (not yet touched) at the start.
    """

    def __init__(self, max_objects: int) -> None:
        n_slots = -(-max_objects * 5 // 4)
        if max_objects < 1 or n_slots > _MAX_SLOTS:
            raise ValueError(
                f"a table holds from 1 to {_MAX_SLOTS * 4 // 5} objects, not {max_objects}"
            )
        self.max_objects = max_objects
        self.n_slots = n_slots
        # Slots start on cache lines: a search that hits at once then touches one line.
        raw = np.zeros(n_slots * SLOT_BYTES + SLOT_BYTES, dtype=np.uint8)
        start = -raw.ctypes.data % SLOT_BYTES
        aligned = raw[start : start + n_slots * SLOT_BYTES]
        self._table = aligned.view(np.uint64).reshape(n_slots, SLOT_BYTES // 8)
        self._header = np.array([0, kernels.NIL, kernels.NIL], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._header[kernels.COUNT])

    @property
    def load(self) -> float:
        """Full slots over all slots."""
        return len(self) / self.n_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.n_slots * SLOT_BYTES

    @property
    def slots(self) -> NDArray[np.void]:
        """All slots as records of SLOT_DTYPE, of shape (n_slots,); read-only."""
        view = self._table.reshape(-1).view(SLOT_DTYPE)
        view.flags.writeable = False
        return view

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Return each key's slot number, -1 if absent; good until the next insert or remove."""
        words = key_words(keys)
        out = np.empty(len(words), dtype=np.int64)
        kernels.find(self._table, words, out)
        return out

    def lookup(self, keys: Keys) -> LookupBatch:
        """Return copies of the keys' slots. Does not touch the LRU list."""
        words = key_words(keys)
        out = np.empty((len(words), SLOT_BYTES // 8), dtype=np.uint64)
        kernels.lookup(self._table, words, out)
        return LookupBatch(out)

    def insert(
        self,
        keys: Keys,
        *,
        node: Column,
        device: Column,
        address: Column,
        length: Column,
        generation: Column,
        state: SlotState = SlotState.WRITING,
    ) -> InsertBatch:
        """Insert the keys that are absent; a present key is left as it is, its age too.

        New keys enter as the newest, the first of them newest of all. Whoever appends to a chain
        touches the whole chain afterwards, or its new tail is younger than its head.

        Raises:
            TableFullError: not all new keys fit; nothing was changed.
            ValueError: a value does not fit its field, or the state is EMPTY.

        """
        words = key_words(keys)
        rows = location_rows(len(words), node, device, address, length, generation)
        rows["state"] = occupied(state)
        new = np.empty(len(words), dtype=np.int64)
        row_words = slot_words(rows)
        at = kernels.insert(self._table, self._header, self.max_objects, words, row_words, new)
        if at >= 0:
            raise TableFullError(
                f"the table has room for {self.max_objects} objects, holds {len(self)}: key {at} "
                f"of a batch of {len(words)} does not fit; remove cold objects or make it larger"
            )
        row_words[new == InsertResult.INSERTED] = 0
        return InsertBatch(new, LookupBatch(row_words))

    def set_state(
        self,
        keys: Keys,
        expected_state: SlotState,
        new_state: SlotState,
        *,
        generation: Column | None = None,
    ) -> NDArray[np.int64]:
        """Move slots from one state to another; return an `UpdateResult` for each key.

        A slot in another state, or of another generation if generations are given, is UNCHANGED.
        """
        words = key_words(keys)
        found = np.empty(len(words), dtype=np.int64)
        kernels.set_state(
            self._table,
            words,
            generations(generation, len(words)),
            int(occupied(expected_state)),
            int(occupied(new_state)),
            found,
        )
        return found

    def update_location(
        self,
        keys: Keys,
        *,
        node: Column,
        device: Column,
        address: Column,
        length: Column,
        generation: Column,
    ) -> NDArray[np.int64]:
        """Overwrite all but key, state and age; return an `UpdateResult` for each key."""
        words = key_words(keys)
        rows = location_rows(len(words), node, device, address, length, generation)
        found = np.empty(len(words), dtype=np.int64)
        kernels.update_location(self._table, words, slot_words(rows), found)
        return found

    def remove(self, keys: Keys, *, generation: Column | None = None) -> int:
        """Remove the keys that are present, in the given generation if any; return how many."""
        words = key_words(keys)
        wanted = generations(generation, len(words))
        return int(kernels.remove(self._table, self._header, words, wanted))

    def touch(self, keys: Keys) -> int:
        """Make the keys the newest, the first (the chain's head) newest of all; return how many."""
        return int(kernels.touch(self._table, self._header, key_words(keys)))

    def coldest(self, n: int, *, state: SlotState | None = SlotState.READY) -> list[bytes]:
        """Return up to n keys in a state (None: in any), oldest first."""
        out = np.empty((min(max(n, 0), len(self)), KEY_BYTES // 8), dtype=np.uint64)
        wanted = kernels.ANY if state is None else int(occupied(state))
        filled = kernels.coldest(self._table, self._header, wanted, out)
        joined = out[:filled].tobytes()
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def oldest_first(self, *, state: SlotState | None = None) -> Iterator[bytes]:
        """Iterate over all keys, oldest first, as they were when this was called."""
        return iter(self.coldest(len(self), state=state))

    def probe_lengths(self) -> ProbeLengths:
        """Measure how far the keys lie from where their search starts. Walks the whole table."""
        _, _, total, longest = self._audit()
        return ProbeLengths(total / max(len(self), 1), longest)

    def check(self) -> None:
        """Verify every invariant: each key reachable and there once, count, list, empty slots.

        Raises:
            TableCorruptError: one does not hold.

        """
        code, slot, _, _ = self._audit()
        if code:
            raise TableCorruptError(f"{_AUDIT[code]} (slot {slot} of {self.n_slots})")

    def _audit(self) -> tuple[int, int, int, int]:
        out = np.empty(4, dtype=np.int64)
        kernels.audit(self._table, self._header, self.max_objects, out)
        code, slot, total, longest = out.tolist()
        return code, slot, total, longest


def compile_kernels() -> None:
    """Run every kernel once, so that no later call waits for the compiler (seconds when cold)."""
    table = SlotTable(4)
    keys = [bytes(KEY_BYTES)]
    table.insert(keys, node=0, device=0, address=0, length=0, generation=0)
    table.update_location(keys, node=0, device=0, address=0, length=1, generation=1)
    table.set_state(keys, SlotState.WRITING, SlotState.READY)
    table.find(keys)
    table.lookup(keys)
    table.touch(keys)
    table.coldest(1)
    table.remove(keys)
