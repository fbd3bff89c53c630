"""Where everything lies in the shared region, and the header that says so.

The region of TraCT (§ shared-memory data structures): a header, then the metadata, then the pool of
payload chunks. Everything is reached by offsets in bytes from the region's start, since each node
maps the region at another address; every structure begins on a line, and no line holds words that
two nodes write without a common lock::

    header | epoch | verdicts | control | lock slots | roots | cache | bitmap | LRU | pins | index
    | pool

All-zero metadata is the valid initial state (0 stands for IDLE, EMPTY, free and "no link"), so
formatting zeroed memory writes the header only. The header holds *sizes*; the
offsets follow from them, the same on every node. Its magic word is written last.

Left out: growing or shrinking a region, and other line sizes than 64 B.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from cxlbench.emu.pod_ops import LINE, WORD
from cxlbench.tract.errors import LayoutError, RegionTooSmallError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

PAGE = 4096

ALLOC_LOCK = 0
"""Guards the chunk bitmap."""
CACHE_LOCK = 1
"""Guards index entries (but not the lock-free probe), LRU list and the cache line."""
ROOT_LOCK = 2
"""Guards the table of named roots."""
INTERNAL_LOCKS = 3
"""Lock numbers below this are TraCT's own; no task holds two of them at once."""

MAX_NODES = 64
CHUNKS_PER_WORD = 32
LRU_NODE = 2 * WORD

# Words in node-local DRAM, under the heap's lock.
HEAP_EPOCH = 0
"""The region's epoch when the heap was last filled; chunks of another epoch are not its own."""
HEAP_COUNT = 1
HEAP_HINT = 2
"""The word of the bitmap at which this node searches next."""
HEAP_LIST = 3
"""The first of ``heap_capacity`` words that hold free chunks."""

# Words of the cache line, under CACHE_LOCK.
LIVE = 0
"""Entries that are PENDING or READY."""
HEAD = 8
"""Link to the oldest entry of the LRU list, 0 if there is none."""
TAIL = 16
"""Link to the newest."""


def _lines(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to whole lines."""
    return (n_bytes + LINE - 1) & -LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is chosen when a region is formatted; all of it is in the header.

    ``user_locks`` come after TraCT's own three. ``chunk_bytes`` is the unit of allocation: the
    largest payload of one KV block, a multiple of 64. ``slots`` are index entries.
    ``evict_above`` is how many live entries the index keeps before it evicts (default 0.7 of
    ``slots``). ``heap_batch`` chunks are taken from the bitmap at a time; a node's heap holds at
    most four times as many. ``snooped_payload`` says that DMA looks into the node's own cache (the
    pod's memory model), so that a reader must invalidate a block's lines first.

    Raises:
        LayoutError: a size that cannot be.

    """

    nodes: int
    slots: int
    chunks: int
    chunk_bytes: int
    user_locks: int = 0
    roots: int = 8
    evict_above: int = 0
    heap_batch: int = 8
    snooped_payload: bool = True

    def __post_init__(self) -> None:
        if self.evict_above == 0:
            object.__setattr__(self, "evict_above", max(1, self.slots * 7 // 10))
        bounds = {
            "nodes": (1, MAX_NODES),
            "slots": (1, 1 << 40),
            "chunks": (1, 1 << 40),
            "chunk_bytes": (LINE, 1 << 40),
            "user_locks": (0, 1 << 20),
            "roots": (1, 1 << 10),
            "evict_above": (1, self.slots),
            "heap_batch": (1, CHUNKS_PER_WORD),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise LayoutError(f"{name} is {value!r}; possible are {least} to {most}")
        if self.chunk_bytes % LINE:
            raise LayoutError(
                f"chunk_bytes is {self.chunk_bytes}, which is no multiple of the line of {LINE}:"
                f" take {_lines(self.chunk_bytes)}"
            )


class Layout(NamedTuple):
    """Sizes and offsets (bytes) of one region, in the form that compiled programs take.

    ``*_at`` is where a structure begins. Local locks and words live in each node's own DRAM:
    local lock ``i`` is the first tier of lock ``i``; then come the heap's lock and the lock of what
    only this node writes in the region (``own_lock``: pins and control line). The local words are
    the heap's, then ``stop_word``, which ends the node's manager.
    """

    nodes: int
    locks: int
    roots: int
    slots: int
    chunks: int
    chunk_bytes: int
    evict_above: int
    heap_batch: int
    heap_capacity: int
    snooped_payload: int
    control_bytes: int
    pins_bytes: int
    bitmap_words: int
    epoch_at: int
    verdicts_at: int
    control_at: int
    slots_at: int
    roots_at: int
    cache_at: int
    bitmap_at: int
    lru_at: int
    pins_at: int
    index_at: int
    pool_at: int
    region_bytes: int
    heap_lock: int
    own_lock: int
    local_locks: int
    stop_word: int
    local_words: int


def plan(sizes: Sizes) -> Layout:
    """Return where everything lies for ``sizes``; ``region_bytes`` is what they need."""
    locks = INTERNAL_LOCKS + sizes.user_locks
    control_bytes = _lines((2 + sizes.nodes) * WORD)
    pins_bytes = _lines(sizes.slots * WORD)
    bitmap_words = -(-sizes.chunks // CHUNKS_PER_WORD)
    parts = (
        HEADER_BYTES,
        LINE,
        sizes.nodes * LINE,
        sizes.nodes * control_bytes,
        locks * sizes.nodes * LINE,
        sizes.roots * LINE,
        LINE,
        _lines(bitmap_words * WORD),
        _lines(sizes.slots * LRU_NODE),
        sizes.nodes * pins_bytes,
        sizes.slots * LINE,
    )
    at = [0]
    for part in parts:
        at.append(at[-1] + part)
    pool_at = (at[-1] + PAGE - 1) & -PAGE if sizes.chunk_bytes >= PAGE else at[-1]
    heap_capacity = 4 * sizes.heap_batch
    return Layout(
        nodes=sizes.nodes,
        locks=locks,
        roots=sizes.roots,
        slots=sizes.slots,
        chunks=sizes.chunks,
        chunk_bytes=sizes.chunk_bytes,
        evict_above=sizes.evict_above,
        heap_batch=sizes.heap_batch,
        heap_capacity=heap_capacity,
        snooped_payload=int(sizes.snooped_payload),
        control_bytes=control_bytes,
        pins_bytes=pins_bytes,
        bitmap_words=bitmap_words,
        epoch_at=at[1],
        verdicts_at=at[2],
        control_at=at[3],
        slots_at=at[4],
        roots_at=at[5],
        cache_at=at[6],
        bitmap_at=at[7],
        lru_at=at[8],
        pins_at=at[9],
        index_at=at[10],
        pool_at=pool_at,
        region_bytes=pool_at + sizes.chunks * sizes.chunk_bytes,
        heap_lock=locks,
        own_lock=locks + 1,
        local_locks=locks + 2,
        stop_word=HEAP_LIST + heap_capacity,
        local_words=HEAP_LIST + heap_capacity + 1,
    )


def sizes_for(
    region_bytes: int,
    *,
    nodes: int,
    chunk_bytes: int,
    slots: int | None = None,
    user_locks: int = 0,
    roots: int = 8,
    heap_batch: int = 8,
) -> Sizes:
    """Return sizes that fill a region of ``region_bytes`` with as many chunks as fit.

    Without ``slots`` the index gets two slots per chunk.

    Raises:
        RegionTooSmallError: not even one chunk fits.
        LayoutError: a size that cannot be.

    """

    def sized(chunks: int) -> Sizes:
        return Sizes(
            nodes=nodes,
            slots=slots if slots is not None else 2 * chunks,
            chunks=chunks,
            chunk_bytes=chunk_bytes,
            user_locks=user_locks,
            roots=roots,
            heap_batch=heap_batch,
        )

    least = plan(sized(1)).region_bytes
    if least > region_bytes:
        raise RegionTooSmallError(
            f"a region of {region_bytes} bytes holds no chunk of {chunk_bytes} bytes for {nodes}"
            f" nodes: {least} bytes are needed at least"
        )
    low, high = 1, max(1, region_bytes // chunk_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if plan(sized(middle)).region_bytes <= region_bytes:
            low = middle
        else:
            high = middle - 1
    return sized(low)


# The header's words: magic, version and checksum, then the sizes in the order of ``Sizes``.
MAGIC = 0x3130544361725443
VERSION = 1
HEADER_WORDS = 16
HEADER_BYTES = HEADER_WORDS * WORD
MAGIC_WORD = 0
VERSION_WORD = 1
CHECKSUM_WORD = 2
SIZES_WORD = 3


def sizes_words(sizes: Sizes) -> list[int]:
    """Return the sizes as the header keeps them."""
    return [int(getattr(sizes, field.name)) for field in fields(Sizes)]


def sizes_of_words(words: Sequence[int] | NDArray[np.int64]) -> Sizes:
    """Return the sizes that :func:`sizes_words` gave; ``LayoutError`` for what cannot be."""
    values: dict[str, int] = {field.name: int(words[i]) for i, field in enumerate(fields(Sizes))}
    snooped = bool(values.pop("snooped_payload"))
    return Sizes(**values, snooped_payload=snooped)


@dataclass(frozen=True, slots=True)
class Range:
    """A named range of the region, for reports."""

    off: int
    n_bytes: int
    name: str


def names(layout: Layout) -> list[Range]:
    """Return names for all metadata: "lock 3, slot of node 1", "entry 17", "pins of node 0"."""
    own = ("allocator lock", "cache lock", "root lock")
    found = [
        Range(0, HEADER_BYTES, "header"),
        Range(layout.epoch_at, LINE, "epoch"),
        Range(layout.cache_at, LINE, "cache line (live, LRU head and tail)"),
        Range(layout.bitmap_at, layout.bitmap_words * WORD, "chunk bitmap"),
    ]
    for node in range(layout.nodes):
        found += [
            Range(layout.verdicts_at + node * LINE, LINE, f"verdict on node {node}"),
            Range(
                layout.control_at + node * layout.control_bytes,
                layout.control_bytes,
                f"control of node {node}",
            ),
            Range(
                layout.pins_at + node * layout.pins_bytes,
                layout.pins_bytes,
                f"pins of node {node}",
            ),
        ]
        for lock in range(layout.locks):
            title = own[lock] if lock < INTERNAL_LOCKS else f"lock {lock}"
            at = layout.slots_at + (lock * layout.nodes + node) * LINE
            found.append(Range(at, LINE, f"{title}, slot of node {node}"))
    found += [Range(layout.roots_at + i * LINE, LINE, f"root {i}") for i in range(layout.roots)]
    for slot in range(layout.slots):
        found.append(Range(layout.index_at + slot * LINE, LINE, f"entry {slot}"))
        found.append(Range(layout.lru_at + slot * LRU_NODE, LRU_NODE, f"LRU links of {slot}"))
    found += [
        Range(layout.pool_at + i * layout.chunk_bytes, layout.chunk_bytes, f"chunk {i}")
        for i in range(layout.chunks)
    ]
    return found
