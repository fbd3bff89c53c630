"""The shared memory under a clock: its bytes, node caches without spontaneous evictions, watches.

What ``pod_virtual`` runs programs on. It keeps the rows of the pod's memory model that a program
can bring about by itself: a line stays in a node's cache, however old, until the node flushes it;
whole lines are written back; posted write-backs land later, in order per line; DMA looks into its
own node's cache only. The device is one sparse mapping, so that a region of 64 GiB costs what is
touched of it. DMA of ``PhantomWords`` moves a few words that stand for many.

Units: bytes, lines (64 B) and words (8 B) from the region's start. Left out: the adversary
(evictions and fills that nobody asked for), and causes of what goes wrong; the explorer has both.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_host import HostMemory
from cxlbench.emu.pod_ops import LINE, WORD
from cxlbench.emu.status import HostLimitError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

_LINE: Final = struct.Struct("<8q")
_WORDS_PER_LINE: Final = LINE // WORD
_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE``, which the module ``mmap`` does not name."""


class PhantomWords:
    """``n_words`` words that are not there, and up to eight that stand for them.

    A DMA charges all of them and moves those that stand for them, to the first and the last line of
    the range: what was partly overwritten reads as no words at all.
    """

    __slots__ = ("n_words", "stand_in")

    def __init__(self, n_words: int, stand_in: tuple[int, ...] = ()) -> None:
        if n_words < _WORDS_PER_LINE or len(stand_in) > _WORDS_PER_LINE:
            raise ValueError(
                f"{len(stand_in)} words stand for {n_words}: at most {_WORDS_PER_LINE} can stand"
                " for at least as many"
            )
        self.n_words = n_words
        self.stand_in = stand_in

    def __len__(self) -> int:
        """Words that are charged."""
        return self.n_words

    def ends(self, off: int) -> tuple[int, int]:
        """Return the first and the last line of the range at ``off``, which begins on a line."""
        if off % LINE:
            raise PodUsageError(
                f"phantom words at offset {off}: they begin on a line of {LINE} bytes"
            )
        return off // LINE, (off + self.n_words * WORD) // LINE - 1


class VirtualDevice:
    """``D``: zeros, until something lands."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % LINE:
            raise PodUsageError(f"a region of {size_bytes} bytes: use a multiple of {LINE}")
        self.size_bytes = size_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, size_bytes, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise HostLimitError(
                f"cannot map a region of {size_bytes} B: {error}; use a larger scale"
            ) from error
        self.words: Words = np.frombuffer(self._map, np.int64)

    def line(self, line: int) -> tuple[int, ...]:
        """Return the eight words of ``line``."""
        return _LINE.unpack_from(self._map, line * LINE)

    def land(self, line: int, words: Iterable[int]) -> None:
        """Replace the eight words of ``line``."""
        _LINE.pack_into(self._map, line * LINE, *words)

    def read(self, off: int, words: Words | PhantomWords) -> None:
        """Fill ``words`` from ``off``."""
        if not isinstance(words, PhantomWords):
            words[:] = self.words[off // WORD : off // WORD + len(words)]
            return
        first, last = words.ends(off)
        found = self.line(first)
        words.stand_in = found if found == self.line(last) else ()

    def write(self, off: int, words: Words | PhantomWords) -> None:
        """Put ``words`` at ``off``."""
        if not isinstance(words, PhantomWords):
            self.words[off // WORD : off // WORD + len(words)] = words
            return
        padded = (*words.stand_in, *(0,) * (_WORDS_PER_LINE - len(words.stand_in)))
        for line in words.ends(off):
            self.land(line, padded)

    def check(self, what: str, off: int, n_bytes: int = WORD) -> None:
        """Raise ``PodUsageError`` unless ``[off, off + n_bytes)`` are words of the region."""
        if off & 7 or not 0 <= off <= self.size_bytes - n_bytes:
            raise PodUsageError(
                f"{what} of {n_bytes} bytes at offset {off}: offsets are multiples of {WORD} from 0"
                f" to {self.size_bytes - n_bytes}, the region has {self.size_bytes} bytes"
            )


class DirectMemory(HostMemory):
    """``mem`` for a program that runs alone on the device itself: to format it, or to check it."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device.size_bytes)
        self._device = device

    def load(self, off: int) -> int:
        """Return the word in the device."""
        return int(self._device.words[self._word(off)])

    def store(self, off: int, value: int) -> None:
        """Put the word into the device."""
        self._device.words[self._word(off)] = value

    def dma_write(self, off: int, words: Words) -> int:
        """Write ``words``, at once."""
        self._device.check("dma_write", off, len(words) * WORD)
        self._device.write(off, words)
        return 1

    def dma_read(self, off: int, words: Words) -> int:
        """Read ``words``, at once."""
        self._device.check("dma_read", off, len(words) * WORD)
        self._device.read(off, words)
        return 1


class Watch:
    """A range that a task pauses on, and whether there may be something new in it."""

    __slots__ = ("changed", "lines", "node", "task", "waiting")

    def __init__(self, task: object, node: int, lines: range) -> None:
        self.task = task
        self.node = node
        self.lines = lines
        self.changed = True
        """The first pause returns at once: something may have happened before it."""
        self.waiting: Any = None
        """The future that the task waits for, if it does."""


class Watches:
    """Who pauses on which lines. ``now`` tells the time at which a sleeper is woken."""

    def __init__(self, now: Any) -> None:
        self.by_line: dict[int, list[Watch]] = {}
        self._now = now

    def add(self, watch: Watch) -> None:
        """Have ``watch`` told of what happens to its lines."""
        for line in watch.lines:
            self.by_line.setdefault(line, []).append(watch)

    def drop(self, watch: Watch) -> None:
        """Forget ``watch``."""
        for line in watch.lines:
            mine = self.by_line[line]
            mine.remove(watch)
            if not mine:
                del self.by_line[line]

    def landed(self, line: int) -> None:
        """Tell that ``line`` changed in the device."""
        for watch in self.by_line.get(line, ()):
            self.stir(watch)

    def copy_changed(self, line: int, node: int, by: object) -> None:
        """Tell that the copy that ``node`` has of ``line`` was stored to or dropped by a task."""
        for watch in self.by_line.get(line, ()):
            if watch.node == node and watch.task is not by:
                self.stir(watch)

    def stir(self, watch: Watch) -> None:
        """Let a task look again."""
        watch.changed = True
        if watch.waiting is not None and not watch.waiting.done():
            watch.waiting.set_result(self._now())


class PostedWriteBack:
    """A line, or one word of it, on its way to the device."""

    __slots__ = ("due_s", "image", "value", "word")

    def __init__(self, due_s: float, image: tuple[int, ...] | None, word: int, value: int) -> None:
        self.due_s = due_s
        self.image = image
        self.word = word
        self.value = value

    def over(self, below: tuple[int, ...]) -> tuple[int, ...]:
        """Return the line ``below`` with what this carries laid over it."""
        if self.image is not None:
            return self.image
        line = list(below)
        line[self.word] = self.value
        return tuple(line)


class VirtualCache:
    """``C_n`` and what node ``n`` has posted: a clean line is a tuple, a dirty one a list."""

    __slots__ = ("device", "lines", "node", "posted", "top", "watches")

    def __init__(self, node: int, device: VirtualDevice, watches: Watches) -> None:
        self.node = node
        self.device = device
        self.watches = watches
        self.lines: dict[int, tuple[int, ...] | list[int]] = {}
        self.posted: dict[int, list[PostedWriteBack]] = {}
        self.top = 0
        """No line from here on was ever in the cache: most DMA has nothing to look for."""

    def fill(self, line: int) -> tuple[int, ...]:
        """Take a copy of ``line``, over which lies what is in flight from here."""
        if not 0 <= line < self.device.size_bytes // LINE:
            raise PodUsageError(
                f"line {line}, of a region of {self.device.size_bytes // LINE} lines"
            )
        found = self.device.line(line)
        for back in self.posted.get(line, ()):
            found = back.over(found)
        self.lines[line] = found
        if line >= self.top:
            self.top = line + 1
        return found

    def write_back(self, line: int) -> None:
        """Land what is in flight of ``line``, then its copy if it is dirty; drop the copy."""
        if line in self.posted:
            self.land_posted(line, None)
        held = self.lines.pop(line, None)
        if type(held) is list:
            self.land(line, held)

    def land(self, line: int, words: Iterable[int]) -> None:
        """Put a line into the device."""
        self.device.land(line, words)
        if line in self.watches.by_line:
            self.watches.landed(line)

    def post(self, line: int, back: PostedWriteBack) -> None:
        """Have ``back`` in flight, behind what is in flight of ``line`` already."""
        self.posted.setdefault(line, []).append(back)

    def land_posted(self, line: int, last: PostedWriteBack | None) -> None:
        """Land what is in flight of ``line`` up to ``last``, or all of it."""
        queue = self.posted.get(line, [])
        if last is not None and last not in queue:
            return
        while queue:
            back = queue.pop(0)
            self.land(line, back.over(self.device.line(line)))
            if back is last:
                break
        if not queue:
            self.posted.pop(line, None)

    def give_up(self, lines: range) -> None:
        """Write back and drop all copies among ``lines``, as DMA by this node does."""
        if lines.start >= self.top:
            return
        found = self.lines.keys() | self.posted.keys()
        if len(lines) < len(found):
            held = [line for line in lines if line in found]
        else:
            held = sorted(line for line in found if line in lines)
        for line in held:
            self.write_back(line)
