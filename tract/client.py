"""TraCT for Python code: a node's lock, object store and prefix cache, with typed errors.

Thin classes over the programs: they check what was handed in before anything is touched, choose
interpreted or compiled by the memory handle, and turn codes into results and errors. They hold no
state of their own, so that any number of them may stand for one node.

Payload is int64 words (views of byte buffers); lengths are bytes. Calls block like the programs do:
a lock may have to be waited for. Left out: the connector's ``submit`` and ``poll``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cxlbench.emu.pod_ops import WORD, dma_wait
from cxlbench.kv.results import KeyResult
from cxlbench.tract import codes, object_store, prefix_cache
from cxlbench.tract.errors import (
    NameExistsError,
    NameNotFoundError,
    ObjectTooLargeError,
    OutOfSpaceError,
    RootNameError,
)
from cxlbench.tract.layout import Layout
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.places import (
    BLOCK_AT,
    CHECKSUM,
    CODE,
    LENGTH_BYTES,
    numbers_of,
    places_for,
)
from cxlbench.tract.region import call, check_node, check_user_lock
from cxlbench.tract.transfer import start_read
from cxlbench.tract.words import KEY_BYTES, checksum, key_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

_STORE_RESULTS = {
    codes.OK: KeyResult.STORED,
    codes.EXISTS: KeyResult.EXISTS,
    codes.NO_SPACE: KeyResult.NO_SPACE,
    codes.TABLE_FULL: KeyResult.NO_SPACE,
    codes.STALE: KeyResult.ERROR,
}


class PodLock:
    """One of the region's user locks, as a context manager.

    Raises:
        NoSuchLockError: the region has no such lock for users.

    """

    def __init__(self, mem: Any, layout: Layout, lock: int) -> None:
        check_user_lock(layout, lock)
        self._mem = mem
        self._layout = layout
        self._lock = lock

    def __enter__(self) -> Self:
        call(acquire, self._mem, self._layout, self._lock)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        call(release, self._mem, self._layout, self._lock)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where a named object lies: ``offset`` from the region's start and ``length``, in bytes."""

    name: str
    offset: int
    length: int


def name_words(name: str) -> tuple[int, int, int, int]:
    """Return a root's name as words.

    Raises:
        RootNameError: it is empty, has a NUL, or is longer than 32 bytes in UTF-8.

    """
    encoded = name.encode("utf-8", "surrogatepass")
    if not encoded or len(encoded) > KEY_BYTES or b"\0" in encoded:
        raise RootNameError(
            f"the name {name!r} has {len(encoded)} bytes in UTF-8; possible are 1 to {KEY_BYTES},"
            " without NUL"
        )
    return key_words(encoded.ljust(KEY_BYTES, b"\0"))


class ObjectStore:
    """``cxl_shm_put``, ``cxl_shm_get`` and ``cxl_shm_delete`` for one node."""

    def __init__(self, mem: Any, layout: Layout) -> None:
        self._mem = mem
        self._layout = layout

    def put(self, name: str, words: Words) -> StoredObject:
        """Copy ``words`` into the region under ``name``.

        Raises:
            RootNameError: the name cannot be.
            ObjectTooLargeError: the pool is smaller than the object.
            NameExistsError: there is an object of that name.
            OutOfSpaceError: there is no free root, or no run of free chunks.

        """
        numbers = name_words(name)
        pool_bytes = self._layout.chunks * self._layout.chunk_bytes
        if not len(words) or len(words) * WORD > pool_bytes:
            raise ObjectTooLargeError(
                f"an object of {len(words) * WORD} bytes; possible are {WORD} to {pool_bytes}, the"
                " size of the pool"
            )
        code = codes.STALE
        while code == codes.STALE:
            code = call(object_store.put, self._mem, self._layout, *numbers, words)
        if code == codes.EXISTS:
            raise NameExistsError(f"there is an object {name!r} already: delete it first")
        if code == codes.TABLE_FULL:
            raise OutOfSpaceError(
                f"all {self._layout.roots} roots are in use: put related things into one object"
            )
        if code == codes.NO_SPACE:
            raise OutOfSpaceError(
                f"no {len(words) * WORD} adjacent bytes are free in the pool: delete objects, or"
                " evict blocks"
            )
        return self.get(name)

    def get(self, name: str) -> StoredObject:
        """Return where the object lies; ``NameNotFoundError`` if there is none."""
        code, offset, length = call(object_store.get, self._mem, self._layout, *name_words(name))
        if code != codes.OK:
            raise NameNotFoundError(f"there is no object {name!r}")
        return StoredObject(name, int(offset), int(length))

    def read(self, name: str) -> Words:
        """Return a copy of the object's words; ``NameNotFoundError`` if there is none."""
        while True:
            found = np.zeros(self.get(name).length // WORD, np.int64)
            code = call(object_store.read, self._mem, self._layout, *name_words(name), found)
            if code == codes.OK:
                return found

    def delete(self, name: str) -> None:
        """Remove the object and free its chunks; ``NameNotFoundError`` if there is none."""
        if call(object_store.delete, self._mem, self._layout, *name_words(name)) != codes.OK:
            raise NameNotFoundError(f"there is no object {name!r}")


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block that cannot be evicted until its lease is released."""

    key: bytes
    offset: int
    length: int
    checksum: int


class Lease:
    """The leading blocks of a chain that were found, pinned; a context manager that unpins."""

    def __init__(
        self, mem: Any, layout: Layout, blocks: tuple[PinnedBlock, ...], places: Words
    ) -> None:
        self.blocks = blocks
        self._mem = mem
        self._layout = layout
        self._places = places
        self._pinned = len(blocks)

    def read(self, buffers: Sequence[Words]) -> int:
        """Copy the blocks into ``buffers``, in order; return how many are there and verified.

        A block whose checksum or length does not fit ends it: what follows holds garbage.
        """
        handles = [
            call(start_read, self._mem, self._layout, block.offset, buffer)
            for block, buffer in zip(self.blocks, buffers, strict=False)
            if len(buffer) * WORD == block.length
        ]
        for handle in handles:
            call(dma_wait, self._mem, handle)
        good = 0
        for block, buffer in zip(self.blocks, buffers, strict=False):
            if len(buffer) * WORD != block.length or checksum(buffer) != block.checksum:
                break
            good += 1
        return good

    def release(self) -> None:
        """Give the pins back; a second call does nothing."""
        pinned, self._pinned = self._pinned, 0
        if pinned:
            call(prefix_cache.unpin_chain, self._mem, self._layout, self._places, pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class PrefixCache:
    """The prefix cache as one node sees it."""

    def __init__(self, mem: Any, layout: Layout, node: int) -> None:
        """Make a view for ``node``; ``NoSuchNodeError`` if the region has no slots for it."""
        check_node(layout, node)
        self._mem = mem
        self._layout = layout

    def lookup(self, keys: Sequence[bytes]) -> Lease:
        """Find and pin the leading blocks of a chain; the lease must be released.

        Raises ``KeyLengthError`` for a key that is not 32 bytes.
        """
        numbers = numbers_of(keys)
        places = places_for(len(keys))
        hits = 0
        if keys:
            hits = call(prefix_cache.lookup_chain, self._mem, self._layout, numbers, places)
        blocks = tuple(
            PinnedBlock(
                key,
                int(row[BLOCK_AT]),
                int(row[LENGTH_BYTES]),
                int(row[CHECKSUM]),
            )
            for key, row in zip(keys, places[:hits], strict=False)
        )
        return Lease(self._mem, self._layout, blocks, places)

    def insert(self, keys: Sequence[bytes], payload: Words) -> tuple[KeyResult, ...]:
        """Store blocks, heads first: ``payload`` has a row per key; return a result per key.

        Raises:
            KeyLengthError: a key is not 32 bytes long.
            ObjectTooLargeError: a block is larger than a chunk, or empty.

        """
        numbers = numbers_of(keys)
        if payload.ndim != 2 or len(payload) != len(keys):
            raise ValueError(
                f"payload of shape {payload.shape} for {len(keys)} keys: give a row per key"
            )
        if not 0 < payload.shape[1] * WORD <= self._layout.chunk_bytes:
            raise ObjectTooLargeError(
                f"blocks of {payload.shape[1] * WORD} bytes; possible are {WORD} to"
                f" {self._layout.chunk_bytes}, the region's chunk"
            )
        if not keys:
            return ()
        places = places_for(len(keys))
        call(prefix_cache.insert_chain, self._mem, self._layout, numbers, payload, places)
        return tuple(_STORE_RESULTS[int(code)] for code in places[:, CODE])

    def delete(self, key: bytes) -> bool:
        """Remove a block; False if it is in use. ``NameNotFoundError`` if it is not there."""
        code = call(prefix_cache.delete, self._mem, self._layout, *key_words(key))
        if code == codes.MISS:
            raise NameNotFoundError(f"there is no block with the key {key.hex()}")
        return bool(code == codes.OK)

    def evict(self, blocks: int) -> int:
        """Evict up to ``blocks`` of the oldest blocks that nobody pins; return how many went."""
        return int(call(prefix_cache.evict, self._mem, self._layout, blocks))
