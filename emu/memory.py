"""Memory of the emulated hosts and devices: real bytes, or tags that stand for them.

An ``Arena`` is host memory (anonymous shared, a file, huge pages where the host has them) seen as a
numpy array of bytes. A ``PhantomArena`` holds, for each extent stored, a *tag* that names the
object whose bytes would be there; terabytes then cost kilobytes, and a mixed-up frame still shows.
Both have the same methods, so devices do not know which they use.

Units: bytes. An extent is ``(offset, length)``. Left out: NUMA binding and ``/dev/dax``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cxlbench.emu.status import HostLimitError

PAGE_BYTES = 4096
"""The page: the grain of direct I/O and of the smallest frame. Never scaled."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Extent: TypeAlias = tuple[int, int]
Digest: TypeAlias = Callable[[Any], object]

TORN = "<torn>"
"""What a phantom read finds where pieces of several objects, or nothing, would be."""


@dataclass(slots=True)
class PhantomBuffer:
    """Host memory that holds the tag of an object in place of its bytes."""

    nbytes: int
    tag: Hashable = None


Buffer: TypeAlias = "Bytes | PhantomBuffer"


def page_ceil(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Real memory. ``store`` and ``load`` scatter and gather over extents, with one copy."""

    phantom = False

    def __init__(
        self,
        nbytes: int,
        *,
        kind: Literal["anonymous", "file", "mapped", "hugetlb"] = "anonymous",
        path: Path | None = None,
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"an arena needs at least one byte, got {nbytes}")
        self.nbytes = page_ceil(nbytes)
        self.kind = kind
        self._map = _map(self.nbytes, kind, path)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def buffer(self, nbytes: int) -> Bytes:
        """Return fresh host memory of the kind that this arena exchanges."""
        return np.zeros(nbytes, dtype=np.uint8)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return the bytes of one extent, without a copy."""
        return self.array[offset : offset + nbytes]

    def store(self, extents: Sequence[Extent], source: Buffer) -> None:
        """Copy ``source`` over ``extents``; the last one may be longer than what is left."""
        assert isinstance(source, np.ndarray)
        assert source.dtype == np.uint8, f"bytes are stored, got {source.dtype}"
        at, array = 0, self.array
        for offset, length in extents:
            piece = source[at : at + length]
            array[offset : offset + len(piece)] = piece
            at += length

    def load(self, extents: Sequence[Extent], into: Buffer, digest: Digest | None = None) -> None:
        """Copy ``extents`` into ``into``; ``digest`` is fed each piece while it is in the cache."""
        assert isinstance(into, np.ndarray)
        assert into.dtype == np.uint8, f"bytes are loaded, got {into.dtype}"
        at, array, size = 0, self.array, len(into)
        step = _COPY_CHUNK if digest is not None else size or 1
        for offset, length in extents:
            end = min(at + length, size)
            for begin in range(at, end, step):
                stop = min(begin + step, end)
                piece = into[begin:stop]
                piece[:] = array[offset + begin - at : offset + stop - at]
                if digest is not None:
                    digest(piece)
            at += length

    def close(self) -> None:
        """Unmap, unless views are still alive (then the last of them does)."""
        self.array = np.zeros(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


_COPY_CHUNK = 1 << 18


class PhantomArena:
    """The bookkeeping of an arena without its bytes. Small real buffers are kept as they are."""

    phantom = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cells: dict[int, Hashable] = {}

    def buffer(self, nbytes: int) -> PhantomBuffer:
        """Return an empty phantom buffer."""
        return PhantomBuffer(nbytes)

    def store(self, extents: Sequence[Extent], source: Buffer) -> None:
        """Note that ``extents`` now hold the pieces of ``source``, in order."""
        cells = self._cells
        tag: Hashable = source.tag if isinstance(source, PhantomBuffer) else source.tobytes()
        for index, (offset, _) in enumerate(extents):
            cells[offset] = (tag, index)

    def load(self, extents: Sequence[Extent], into: Buffer, digest: Digest | None = None) -> None:
        """Give ``into`` the tag whose pieces lie in ``extents``, in order and complete."""
        cells = self._cells
        first = cells.get(extents[0][0]) or (TORN, 0)  # None: nothing was ever written there
        tag: Hashable = first[0]  # type: ignore[index]
        for index, (offset, _) in enumerate(extents):
            if cells.get(offset) != (tag, index):
                tag = TORN
                break
        if isinstance(into, PhantomBuffer):
            into.tag = tag
        elif isinstance(tag, bytes) and len(tag) >= len(into):
            into[:] = np.frombuffer(tag, dtype=np.uint8)[: len(into)]
        else:
            into[:] = 0

    def cells(self, extents: Sequence[Extent]) -> tuple[Hashable, ...]:
        """Return what lies in each extent."""
        return tuple(self._cells.get(offset) for offset, _ in extents)

    def set_cells(self, extents: Sequence[Extent], cells: Sequence[Hashable]) -> None:
        """Put back what ``cells`` returned, in other extents."""
        for (offset, _), cell in zip(extents, cells, strict=True):
            self._cells[offset] = cell

    def close(self) -> None:
        """Forget everything."""
        self._cells.clear()


AnyArena: TypeAlias = Arena | PhantomArena
ArenaMaker: TypeAlias = Callable[[int], AnyArena]
"""Makes the memory of a device, of so many bytes."""


def arena_maker(*, phantom: bool) -> ArenaMaker:
    """Return what makes anonymous memory, or the tags in its place."""
    return PhantomArena if phantom else Arena


class FramePool:
    """Frames of one size in an arena, from ``base`` on: taken and given back, scattered."""

    def __init__(self, *, base: int, frame_bytes: int, count: int, name: str) -> None:
        self.name = name
        self.frame_bytes = frame_bytes
        self.count = count
        self.base = base
        self._free = list(range(count - 1, -1, -1))
        self._out = bytearray(count)

    def needed(self, nbytes: int) -> int:
        """Return how many frames hold ``nbytes``."""
        return -(-nbytes // self.frame_bytes)

    @property
    def free(self) -> int:
        """Frames that nobody has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Frames that are out."""
        return self.count - len(self._free)

    def take(self, frames: int) -> list[int] | None:
        """Take ``frames`` frames, or none of them."""
        if frames > len(self._free):
            return None
        if frames == 0:
            return []
        taken = self._free[-frames:]
        del self._free[-frames:]
        for frame in taken:
            self._out[frame] = 1
        return taken

    def give(self, frames: Sequence[int]) -> None:
        """Give frames back; giving one back twice is a bug of the caller and is refused."""
        for frame in frames:
            if not self._out[frame]:
                raise ValueError(f"{self.name}: frame {frame} is given back twice")
            self._out[frame] = 0
        self._free.extend(frames)

    def extents(self, frames: Sequence[int], nbytes: int) -> list[Extent]:
        """Return the extents of ``frames`` that hold ``nbytes``, the last one cut to pages."""
        size, base = self.frame_bytes, self.base
        extents = [(base + frame * size, size) for frame in frames]
        if extents:
            last = nbytes - (len(frames) - 1) * size
            extents[-1] = (extents[-1][0], page_ceil(last))
        return extents


def _map(nbytes: int, kind: str, path: Path | None) -> mmap.mmap:
    if kind in ("file", "mapped"):
        if path is None:
            raise ValueError("a file arena needs a path")
        try:
            made = os.O_CREAT if kind == "file" else 0
            descriptor = os.open(path, os.O_RDWR | made, 0o600)
            try:
                if kind == "file":
                    os.ftruncate(descriptor, nbytes)
                return mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise HostLimitError(f"cannot map {nbytes} B of {path}: {error.strerror}") from error
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    if kind == "hugetlb":
        hugetlb = getattr(mmap, "MAP_HUGETLB", 0x40000)
        try:
            return mmap.mmap(-1, -(-nbytes // (2 << 20)) * (2 << 20), flags=flags | hugetlb)
        except OSError as error:
            raise HostLimitError(
                f"no huge pages for {nbytes} B ({error.strerror}); reserve some "
                "(vm.nr_hugepages) or use an anonymous arena"
            ) from error
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise HostLimitError(f"cannot map {nbytes} B of memory: {error}") from error
