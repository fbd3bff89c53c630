"""Mapped nodes: stale caches for programs that were not written for the pod.

A node's *view* is an ordinary file-backed mapping that stands for the shared memory: a program gets
it as a buffer (``MappedNode.map``: use it by mmap, ctypes, numpy) or opens ``MappedNode.path`` and
maps it itself as if it were ``/dev/dax0.0``. It loads and stores there as fast as the machine does.
Nothing that it stores reaches device memory ``D``, and nothing that others store reaches it, before
``flush`` says so, or the adversary happens to evict the line. So a program that initializes a
region and forgets to flush it works on its own node and fails on the second.

The view is a cache that holds every line from the beginning: a legal one, since any line may have
come in at any time, and the worst one for a program that forgets to invalidate. ``flush`` is
``clflush`` over a range: dirty lines go to ``D`` whole, with whatever stale neighbours they hold;
then every line is what ``D`` holds. ``write_back`` and ``refresh`` are its halves.

``handle`` runs the pod's own programs on the view. ``PodMmap`` looks like ``mmap.mmap``;
``FlushFence`` is the usual pair "flush before read, flush after write". Places are offsets,
addresses in any mapping of the view, or buffers on it.

What is seen as a store is a word that changed: storing the value that was there is no store. Left
out: naming source lines, posted flushes, atomics between nodes (there are none on such memory).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cxlbench.emu.pod_attachment import Attachment
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_layout import LINE_BYTES, PodLayoutError
from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_mapped_kernels import disturb, synchronize
from cxlbench.emu.pod_mapped_memory import MappedMemory
from cxlbench.emu.pod_mappings import Mapping, PodClosedError, PodPaths

if TYPE_CHECKING:
    from cxlbench.emu.pod_zygote import LiveNode

Place = Any
"""An offset, an address, or an object with a buffer in a mapping of the view."""


class MappedNode:
    """A node of a mapped pod, as one process has it."""

    def __init__(self, attachment: Attachment, paths: PodPaths) -> None:
        if attachment.shape.mode != "mapped":
            raise PodLayoutError(f"this pod is {attachment.shape.mode}, not mapped")
        assert isinstance(attachment.memory, EmulatedMemory)
        self._attachment = attachment
        self._owns_attachment = False
        self.node = attachment.node
        self.nbytes = attachment.shape.region_bytes
        self.path = Path(paths.views[self.node])
        """What a program opens and maps in the place of the shared memory."""
        self._memory = attachment.memory
        self._view = Mapping(paths.views[self.node], self.nbytes)
        self._twin = Mapping(paths.twins[self.node], self.nbytes)
        status = self.path.stat()
        self._file = (status.st_dev, status.st_ino)

    @classmethod
    def attach(cls, paths: PodPaths, node: int, process: int) -> Self:
        """Take a place in a pod from a process that the pod did not start."""
        mapped = cls(Attachment(paths, node, process), paths)
        mapped._owns_attachment = True
        return mapped

    def map(self) -> PodMmap:
        """Map the view once more: an ``mmap.mmap`` whose ``flush`` is this node's."""
        return PodMmap.of_node(self)

    def handle(self) -> MappedMemory:
        """Return ``mem`` for the pod's own programs on this node."""
        return MappedMemory(self, self._memory)

    def flush(self, place: Place = 0, n_bytes: int | None = None) -> int:
        """Write back and refresh the lines of a range; return how many were dirty.

        The range is that of the buffer, if ``place`` is one, else ``n_bytes`` from the offset or
        address on; without ``n_bytes`` it goes to the end of the region.
        """
        return self._synchronize(place, n_bytes, writing=True, reading=True)

    def write_back(self, place: Place = 0, n_bytes: int | None = None) -> int:
        """Write the dirty lines of a range back; return how many there were."""
        return self._synchronize(place, n_bytes, writing=True, reading=False)

    def refresh(self, place: Place = 0, n_bytes: int | None = None) -> None:
        """Bring the words of a range that this node has not stored to up to date with ``D``."""
        self._synchronize(place, n_bytes, writing=False, reading=True)

    def disturb(self, times: int) -> None:
        """Let the adversary evict and refill ``times`` lines, drawn by the pod's seed."""
        self._check_open()
        disturb(self._memory, self._view.address, self._twin.address, times)

    def offset_of(self, place: Place) -> int:
        """Return the offset in the region that an offset, address or buffer means."""
        self._check_open()
        where = place if isinstance(place, int) else _address(place)
        if isinstance(place, int) and 0 <= place < self.nbytes:
            return place
        for begin, offset, size in self._mapped():
            if begin <= where < begin + size and offset + where - begin < self.nbytes:
                return offset + where - begin
        raise PodAddressError(
            f"{where:#x} is neither an offset in the region of {self.nbytes} B nor an address in a"
            f" mapping of node {self.node}'s view in this process"
        )

    def close(self) -> None:
        """Unmap what this object uses; the program's own mappings stay."""
        self._view.close()
        self._twin.close()
        if self._owns_attachment:
            self._attachment.close()

    def _synchronize(
        self, place: Place, n_bytes: int | None, *, writing: bool, reading: bool
    ) -> int:
        offset = self.offset_of(place)
        if n_bytes is None:
            n_bytes = self.nbytes - offset if isinstance(place, int) else memoryview(place).nbytes
        if n_bytes < 0 or offset + n_bytes > self.nbytes:
            raise PodAddressError(
                f"{n_bytes} B from offset {offset} on are not all in the region of {self.nbytes} B"
            )
        if n_bytes == 0:
            return 0
        first, last = offset // LINE_BYTES, -(-(offset + n_bytes) // LINE_BYTES)
        view, twin = self._view.address, self._twin.address
        return int(synchronize(self._memory, view, twin, first, last, writing, reading))

    def _check_open(self) -> None:
        if not self._view.address:
            raise PodClosedError(f"node {self.node} of the mapped pod is closed")

    def _mapped(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, offset and size of each mapping of the view in this process."""
        yield self._view.address, 0, self.nbytes
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                span, _, offset, device, inode, *_ = line.split(maxsplit=5)
                major, minor = (int(part, 16) for part in device.split(":"))
                if (os.makedev(major, minor), int(inode)) == self._file:
                    begin, end = (int(part, 16) for part in span.split("-"))
                    yield begin, int(offset, 16), end - begin


def _address(buffer: Any) -> int:
    try:
        return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
    except (TypeError, ValueError, BufferError) as error:
        raise PodAddressError(
            f"a place is an offset, an address or a contiguous buffer, not {buffer!r} ({error})"
        ) from error


class PodMmap(mmap.mmap):
    """An ``mmap.mmap`` of a node's view whose ``flush`` is the node's: of lines, both ways.

    All else is that of ``mmap.mmap``, but for ``resize``, which is refused: the view is as long as
    the shared memory.
    """

    _node: MappedNode

    @classmethod
    def of_node(cls, node: MappedNode) -> PodMmap:
        """Map a node's view."""
        descriptor = os.open(node.path, os.O_RDWR)
        try:
            mapped = cls(descriptor, node.nbytes)
        finally:
            os.close(descriptor)
        mapped._node = node
        return mapped

    def __iter__(self) -> Iterator[bytes]:  # type: ignore[override]
        """Yield one byte after another as ``bytes``, as ``mmap.mmap`` does."""
        return (self[at : at + 1] for at in range(len(self)))

    def flush(self, offset: int = 0, size: int | None = None, *_: object) -> None:
        """Write back and refresh the lines of the range (all, if none is given).

        As with ``mmap.mmap``, a range that is not all inside is a ``ValueError``, and so is a map
        that was closed; unlike there, an offset may be any byte's.
        """
        whole = len(self)  # raises ValueError when closed
        if size is None:
            size = whole - offset
        if offset < 0 or size < 0 or offset + size > whole:
            raise ValueError(f"flush of {size} B at {offset}: the map has {whole} B")
        self._node.flush(offset, size)

    def resize(self, newsize: int) -> None:
        """Refuse: the pod's nodes map the same length of the same memory."""
        raise TypeError(
            f"a pod's memory cannot be resized (to {newsize} B): make a pod with a larger region"
        )


class FlushFence:
    """Flush before read, flush after write: the fence of programs for memory like this."""

    def __init__(self, node: MappedNode) -> None:
        self._node = node

    def before_read(self, place: Place, n_bytes: int | None = None) -> None:
        """Drop old copies: what is read afterwards is what ``D`` holds now, or newer."""
        self._node.flush(place, n_bytes)

    def after_write(self, place: Place, n_bytes: int | None = None) -> None:
        """Bring what was written to ``D``."""
        self._node.flush(place, n_bytes)

    @contextlib.contextmanager
    def reading(self, place: Place, n_bytes: int | None = None) -> Iterator[None]:
        """Flush on entering a block that reads."""
        self.before_read(place, n_bytes)
        yield

    @contextlib.contextmanager
    def writing(self, place: Place, n_bytes: int | None = None) -> Iterator[None]:
        """Flush on leaving a block that writes, if it is left without an error."""
        yield
        self.after_write(place, n_bytes)


def disturb_for_ever(live: LiveNode, lines_a_round: int, interval_s: float) -> None:
    """Be the adversary of a node, in a process of its own, until the host sends anything."""
    while not live.channel.poll(interval_s):
        live.memory.disturb(lines_a_round)
