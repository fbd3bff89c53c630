"""The pod's memory as a pure state machine: device memory, node caches, posted write-backs, DMA.

It models what TraCT found on CXL memory that several hosts share without coherence in hardware:
every node sees its own cache, and nothing but write-backs and fills moves lines between a cache
and the device. Each row of the table of the memory model is a method here. No tasks, no time and
no chance: *when* a posted write-back lands or a line is evicted is decided by who calls.

A word in memory is a ``Store``, not a number: two stores of equal values stay two stores, which is
what the checker of causality compares. A line is a list of eight stores. Lists are never changed
once they are in the device, in flight or clean in a cache, so that moving a line is moving a
reference; a cache copies a line when it first dirties it.

Units: lines and words are counted from the region's start (a line is 64 B, a word 8 B). Left out:
capacity and associativity of caches (any line may be evicted at any time anyway), and durations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORDS_PER_LINE: Final = 8

CACHED: Final = 0
"""The store went into a cache; it reaches the device with its whole line."""
STREAMED: Final = 1
"""The store went past the cache (``ntstore``); it reaches the device as one word."""
BY_DMA: Final = 2
"""The store is a word of a DMA write."""
LOST: Final = 3
"""The store died with its node before it reached the device."""

Clock = tuple[int, ...]


class Store:
    """One store to one word; what a load returns is one of these.

    ``writer``, ``tick`` and ``known`` are the causal identity (see ``causality``): the incarnation
    that stored, its count of stores, and what it knew of the others. ``newer`` is the next store
    to the same word, in the order in which they were made.
    """

    __slots__ = ("how", "known", "newer", "tick", "value", "writer")

    def __init__(self, value: int, writer: int, tick: int, known: Clock, how: int) -> None:
        self.value = value
        self.writer = writer
        self.tick = tick
        self.known = known
        self.how = how
        self.newer: Store | None = None


Line = list[Store]

ZERO: Final = Store(0, 0, 0, (0,), CACHED)
"""What every word holds before anything was stored there. Shared by all words, it stands as its
own successor: the first real store to a word is found in the history."""
ZERO.newer = ZERO
ZERO_LINE: Final[Line] = [ZERO] * WORDS_PER_LINE


class WriteBack:
    """A line, or one word of it, on its way to the device.

    ``image`` is the whole line, or None if only ``stores[0]`` travels, to word ``word``. ``origin``
    is the line that the node's stores were made on. ``flushed`` says that the program asked for
    it; an eviction did not.
    """

    __slots__ = ("flushed", "image", "line", "origin", "stores", "word")

    def __init__(
        self,
        line: int,
        image: Line | None,
        origin: Line | None,
        stores: list[Store],
        word: int,
        flushed: bool,
    ) -> None:
        self.line = line
        self.image = image
        self.origin = origin
        self.stores = stores
        self.word = word
        self.flushed = flushed

    def over(self, below: Line) -> Line:
        """Return the line ``below`` with what this write-back carries laid over it."""
        if self.image is not None:
            return self.image
        line = below.copy()
        line[self.word] = self.stores[0]
        return line


class Observer(Protocol):
    """Who is told what happens in the memory, at the moment at which it happens."""

    def landed(
        self,
        node: int,
        line: int,
        old: Line,
        new: Line,
        origin: Line | None,
        stores: Sequence[Store],
    ) -> None:
        """See that ``new``, from ``node``, has replaced ``old`` in the device.

        ``stores`` are the stores that it brought, made on top of ``origin``.
        """

    def posted(self, node: int, back: WriteBack) -> None:
        """See that ``node`` posted ``back``, which lands at any later time."""

    def filled(self, node: int, line: int) -> None:
        """See that ``node`` took a copy of ``line``."""


class Device:
    """``D``: the shared memory. Lines that were never written read as zeros."""

    __slots__ = ("lines", "observer")

    def __init__(self, observer: Observer) -> None:
        self.lines: dict[int, Line] = {}
        self.observer = observer

    def line(self, line: int) -> Line:
        """Return what the device holds of ``line``."""
        return self.lines.get(line, ZERO_LINE)

    def land(
        self, node: int, line: int, new: Line, origin: Line | None, stores: Sequence[Store]
    ) -> None:
        """Replace ``line`` by ``new``, which ``node`` wrote back."""
        old = self.lines.get(line, ZERO_LINE)
        self.lines[line] = new
        self.observer.landed(node, line, old, new, origin, stores)


class NodeCache:
    """``C_n`` and the write-backs that node ``n`` has in flight: all that it sees of the device.

    Methods that can drop a copy return whether there was one.
    """

    __slots__ = ("_device", "_device_lines", "_observer", "dirty", "lines", "node", "posted")

    def __init__(self, node: int, device: Device) -> None:
        self.node = node
        self.lines: dict[int, Line] = {}
        self.dirty: dict[int, tuple[Line, list[Store]]] = {}
        """Of each dirty line: the line before the first store, and the stores since."""
        self.posted: dict[int, list[WriteBack]] = {}
        """Write-backs in flight by line, oldest first; lines without any are not in it."""
        self._device = device
        self._device_lines = device.lines
        self._observer = device.observer

    # What programs do

    def load(self, word: int) -> Store:
        """Return the store that ``word`` holds for this node, filling its line if it is absent."""
        line = self.lines.get(word >> 3)
        if line is None:
            line = self.fill(word >> 3)
        return line[word & 7]

    def peek(self, line: int) -> Line:
        """Return what a load would see of ``line``, without filling it."""
        held = self.lines.get(line)
        return self.beneath(line) if held is None else held

    def beneath(self, line: int) -> Line:
        """Return what a fill would take: the device, and over it what is in flight from here."""
        found = self._device_lines.get(line, ZERO_LINE)
        if line in self.posted:
            for back in self.posted[line]:
                found = back.over(found)
        return found

    def store(self, word: int, stored: Store) -> None:
        """Put ``stored`` into the cached line (write-allocate), which is dirty from now on."""
        line = word >> 3
        entry = self.dirty.get(line)
        if entry is None:
            origin = self.lines.get(line)
            if origin is None:
                origin = self.fill(line)
            image = self.lines[line] = origin.copy()
            self.dirty[line] = (origin, [stored])
            image[word & 7] = stored
        else:
            entry[1].append(stored)
            self.lines[line][word & 7] = stored

    def clflush(self, line: int) -> bool:
        """Land this node's write-backs of the line in order, then its dirty copy; drop the copy."""
        if line in self.posted:
            self.drain(line)
        held = self.lines.pop(line, None)
        if held is None:
            return False
        entry = self.dirty.pop(line, None)
        if entry is not None:
            self._device.land(self.node, line, held, entry[0], entry[1])
        return True

    def clflushopt(self, line: int) -> bool:
        """Drop the copy; if it is dirty, post its write-back."""
        return self._give_up(line, flushed=True)

    def clwb(self, line: int) -> None:
        """Post the write-back of a dirty copy, and keep the copy, clean."""
        entry = self.dirty.pop(line, None)
        if entry is not None:
            self._post(WriteBack(line, self.lines[line], entry[0], entry[1], 0, True))

    def ntstore(self, word: int, stored: Store) -> bool:
        """Give up the copy as ``clflushopt`` does, then post the word itself."""
        line = word >> 3
        dropped = self._give_up(line, flushed=True)
        self._post(WriteBack(line, None, None, [stored], word & 7, True))
        return dropped

    def drain(self, line: int | None = None) -> None:
        """Land all write-backs in flight, of one line or of all lines."""
        for at in list(self.posted) if line is None else [line]:
            while at in self.posted:
                self.land(at)

    # What happens to the node at any time

    def fill(self, line: int) -> Line:
        """Take a clean copy of ``line`` if there is none: what is in flight from here counts."""
        held = self.lines.get(line)
        if held is None:
            held = self.lines[line] = self.beneath(line)
            self._observer.filled(self.node, line)
        return held

    def evict(self, line: int) -> bool:
        """Drop the copy; if it is dirty, its write-back queues behind those in flight."""
        return self._give_up(line, flushed=False)

    def land(self, line: int) -> bool:
        """Land the oldest write-back in flight of ``line``; return whether there was one."""
        queue = self.posted.get(line)
        if queue is None:
            return False
        back = queue.pop(0)
        if not queue:
            del self.posted[line]
        new = back.over(self._device.line(line))
        self._device.land(self.node, line, new, back.origin, back.stores)
        return True

    def die(self, survivors: int) -> list[Store]:
        """Lose the cache; return the stores that are lost.

        Bit ``k`` of ``survivors`` says whether the ``k``-th write-back in flight, counted line by
        line, lands after all.
        """
        lost: list[Store] = []
        for line, queue in list(self.posted.items()):
            del self.posted[line]
            for back in queue:
                if survivors & 1:
                    new = back.over(self._device.line(line))
                    self._device.land(self.node, line, new, back.origin, back.stores)
                else:
                    lost.extend(back.stores)
                survivors >>= 1
        for _, stores in self.dirty.values():
            lost.extend(stores)
        self.dirty.clear()
        self.lines.clear()
        for stored in lost:
            stored.how = LOST
        return lost

    # What DMA by this node does to a line

    def dma_write(self, line: int, first_word: int, stores: Sequence[Store]) -> bool:
        """Write ``stores`` to the line's words from ``first_word`` on.

        Coherent with this cache: what it has of the line lands first, and its copy is dropped.
        """
        dropped = self.clflush(line)
        new = self._device.line(line).copy()
        new[first_word : first_word + len(stores)] = stores
        self._device.land(self.node, line, new, None, stores)
        return dropped

    # Inside

    def _give_up(self, line: int, *, flushed: bool) -> bool:
        held = self.lines.pop(line, None)
        if held is None:
            return False
        entry = self.dirty.pop(line, None)
        if entry is not None:
            self._post(WriteBack(line, held, entry[0], entry[1], 0, flushed))
        return True

    def _post(self, back: WriteBack) -> None:
        self.posted.setdefault(back.line, []).append(back)
        self._observer.posted(self.node, back)


class Dma:
    """One DMA of a node: lines that are copied one by one, in any order.

    A write's values are taken from ``words`` when their line lands, a read's are put there when
    its completion is seen: until then they are in ``got``. ``known`` is what the issuer knew.
    """

    __slots__ = ("cache", "got", "handle", "known", "left", "pieces", "stores", "words")

    def __init__(
        self,
        handle: int,
        cache: NodeCache,
        first_word: int,
        words: NDArray[np.int64],
        known: Clock,
        stores: Sequence[Store] | None,
    ) -> None:
        self.handle = handle
        self.cache = cache
        self.words = words
        self.known = known
        self.stores = stores
        """The stores of a write; None for a read."""
        self.got: list[Store] = [ZERO] * (0 if stores else len(words))
        self.pieces = list(_pieces(first_word, len(words)))
        self.left = set(range(len(self.pieces)))
        """Pieces that have not been copied yet."""

    def cut(self) -> None:
        """Lose what has not been copied: the node is dead."""
        for piece in self.left:
            _, _, index, count = self.pieces[piece]
            for stored in (self.stores or ())[index : index + count]:
                stored.how = LOST

    def copy(self, piece: int) -> bool:
        """Copy one piece; return whether that made the node drop its copy of the line."""
        self.left.remove(piece)
        line, at, index, count = self.pieces[piece]
        if self.stores is None:
            self.got[index : index + count] = self.cache.peek(line)[at : at + count]
            return False
        stores = self.stores[index : index + count]
        values = self.words[index : index + count].tolist()
        for stored, value in zip(stores, values, strict=True):
            stored.value = value
        return self.cache.dma_write(line, at, stores)


def _pieces(first_word: int, n_words: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run of words at lines: line, its first word, index of that in the run, count."""
    index = 0
    while index < n_words:
        line, at = divmod(first_word + index, WORDS_PER_LINE)
        count = min(WORDS_PER_LINE - at, n_words - index)
        yield line, at, index, count
        index += count
