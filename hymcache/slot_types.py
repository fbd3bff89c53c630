"""What goes into Master's slot table and what comes out: the slot, keys, states, results, errors.

The types of `slot_table`, which re-exports those that its callers need, and the conversion of their
arguments to the arrays that the compiled kernels take. Slots are those of HyMCache §4.1, 64 bytes
each; addresses and lengths are bytes. Left out: all behaviour.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cxlbench.kv.identity import KEY_BYTES

ANY_GENERATION = -1
SLOT_BYTES = 64
SLOT_DTYPE = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("address", "<u8"),
        ("length", "<u8"),
        ("generation", "<u4"),
        ("node", "<u2"),
        ("device", "u1"),
        ("state", "u1"),
        ("lru_older", "<u4"),
        ("lru_newer", "<u4"),
    ]
)
"""One slot. An empty one is all zero."""

_ROW = ["node", "device", "address", "length", "generation", "state"]

Keys: TypeAlias = Sequence[bytes] | bytes | NDArray[np.uint8]
"""Keys of 32 bytes: a sequence of them, all of them joined, or an array of shape (n, 32)."""

Column: TypeAlias = int | Sequence[int] | NDArray[Any]
"""A value for each key, or one for all keys."""


class SlotState(enum.IntEnum):
    """What a slot's object is in; EMPTY is no object."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    EVICTING = 3


class InsertResult(enum.IntEnum):
    """What `insert` did with a key."""

    EXISTS = 0
    INSERTED = 1


class UpdateResult(enum.IntEnum):
    """What `set_state` or `update_location` did with a key."""

    ABSENT = -1
    UNCHANGED = 0
    CHANGED = 1


class TableFullError(Exception):
    """A batch has more new keys than the table has room for; nothing was changed."""


class TableCorruptError(AssertionError):
    """An invariant of the table does not hold: a defect of this program."""


@dataclass(frozen=True, slots=True)
class LookupBatch:
    """Copies of the slots of a batch of keys, in the order of the keys; zeros for absent keys."""

    words: NDArray[np.uint64]
    """Shape (n, 8): the slots as they lie in the table."""

    def __len__(self) -> int:
        return len(self.words)

    @property
    def slots(self) -> NDArray[np.void]:
        """The same as records of SLOT_DTYPE, of shape (n,)."""
        return self.words.reshape(-1).view(SLOT_DTYPE)

    def rows(self) -> list[tuple[int, int, int, int, int, int]]:
        """Node, device, address, length, generation and state of each key, as plain numbers."""
        rows: list[tuple[int, int, int, int, int, int]] = self.slots[_ROW].tolist()
        return rows

    @property
    def found(self) -> NDArray[np.bool_]:
        """True for keys that are in the table."""
        found: NDArray[np.bool_] = self.state != SlotState.EMPTY
        return found

    @property
    def state(self) -> NDArray[np.uint8]:
        """`SlotState` of each key, EMPTY for absent keys."""
        return self.slots["state"]

    @property
    def node(self) -> NDArray[np.uint16]:
        """The object's node; 0 for absent keys, as in all that follow."""
        return self.slots["node"]

    @property
    def device(self) -> NDArray[np.uint8]:
        """The device on its node."""
        return self.slots["device"]

    @property
    def address(self) -> NDArray[np.uint64]:
        """Bytes from the start of the node's region."""
        return self.slots["address"]

    @property
    def length(self) -> NDArray[np.uint64]:
        """Bytes of the object, as they were given."""
        return self.slots["length"]

    @property
    def generation(self) -> NDArray[np.uint32]:
        """Which object of this key, as it was given."""
        return self.slots["generation"]


@dataclass(frozen=True, slots=True)
class InsertBatch:
    """The result of `insert`: an `InsertResult` for each key, and the slots as they were found.

    For a key that EXISTS, ``existing`` holds what the table had and still has; for others zeros.
    """

    result: NDArray[np.int64]
    existing: LookupBatch


@dataclass(frozen=True, slots=True)
class ProbeLengths:
    """Slots that the search for a present key looks at, over all keys."""

    mean: float
    longest: int


def pack_keys(keys: Keys) -> NDArray[np.uint8]:
    """Return keys as an array of shape (n, 32).

    Raises:
        ValueError: a key is not of 32 bytes.

    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise ValueError(
                f"an array of keys is of uint8 and shape (n, {KEY_BYTES}), "
                f"not of {keys.dtype} and {keys.shape}"
            )
        return keys
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            raise ValueError(f"joined keys have {KEY_BYTES} bytes each: {len(keys)} do not divide")
        joined = keys
    else:
        joined = b"".join(keys)
        if not {KEY_BYTES}.issuperset(map(len, keys)):
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {sorted(set(map(len, keys)))}")
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)


def key_words(keys: Keys) -> NDArray[np.uint64]:
    """Return keys as a read-only, aligned array of shape (n, 4): one type for the kernels."""
    words = np.ascontiguousarray(pack_keys(keys)).view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    words.flags.writeable = False
    return words


def slot_words(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return a view of slots as the kernels take them: shape (n, 8)."""
    return rows.view(np.uint64).reshape(len(rows), SLOT_BYTES // 8)


def occupied(state: SlotState) -> SlotState:
    """Return the state, or raise ValueError if it is not one of a full slot."""
    if state not in (SlotState.WRITING, SlotState.READY, SlotState.EVICTING):
        raise ValueError(
            f"a slot is WRITING, READY or EVICTING, not {state!r}; remove() empties it"
        )
    return state


def location_rows(
    count: int, node: Column, device: Column, address: Column, length: Column, generation: Column
) -> NDArray[np.void]:
    """Return slots with these values and nothing else; ValueError names a value that is wrong."""
    rows = np.zeros(count, dtype=SLOT_DTYPE)
    rows["node"] = _column("node", node, count, 2**16 - 1)
    rows["device"] = _column("device", device, count, 2**8 - 1)
    rows["address"] = _column("address", address, count, 2**64 - 1)
    rows["length"] = _column("length", length, count, 2**64 - 1)
    rows["generation"] = _column("generation", generation, count, 2**32 - 1)
    return rows


def generations(generation: Column | None, count: int) -> NDArray[np.int64]:
    """Return the generation that each key must have, ANY_GENERATION for all if None."""
    out = np.full(count, ANY_GENERATION, dtype=np.int64)
    if generation is not None:
        out[:] = _column("generation", generation, count, 2**32 - 1)
    return out


def _column(name: str, values: Column, count: int, maximum: int) -> NDArray[Any]:
    column = np.asarray(values)
    if column.shape not in ((), (count,)):
        raise ValueError(f"{name}: {column.shape} values were given for {count} keys")
    try:
        if column.dtype.kind not in "iu" and not isinstance(values, int | np.ndarray):
            # NumPy makes floats of a list with numbers on both sides of 2**63.
            column = np.array([operator.index(value) for value in values], dtype=np.uint64)
        fits = column.dtype.kind in "iu" and (
            not count or (int(column.min()) >= 0 and int(column.max()) <= maximum)
        )
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name} is a whole number from 0 to {maximum}, not {values!r}")
    return column
