"""Where the bytes of an emulated SSD really are: files, RAM, or tags.

``FileBacking`` stripes one address space over files, one per SSD, with direct I/O where the file
system allows it; reads and writes run in a few threads and scatter straight into arena frames.
``RamBacking`` is a sparse anonymous mapping. ``PhantomBacking`` keeps the tags of a phantom arena.
None of them knows what time is: pacing is the SSD model's business.

Units: bytes. Left out: persistence barriers (``fdatasync``); a node that restarts re-verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from cxlbench.emu.backing_layout import Layout
from cxlbench.emu.memory import PAGE_BYTES, AnyArena, Arena, Extent, PhantomArena
from cxlbench.emu.status import DeviceError, HostLimitError, Status

IO_THREADS = 4


class Backing(Protocol):
    """A flat address space that keeps what is written to it."""

    size_bytes: int

    async def read(self, address: int, arena: AnyArena, extents: Sequence[Extent]) -> None:
        """Fill ``extents`` of ``arena`` with the bytes from ``address`` on."""

    async def write(
        self, address: int, arena: AnyArena, extents: Sequence[Extent], *, short: bool = False
    ) -> None:
        """Write ``extents`` to ``address`` on. ``short`` leaves out the last page (a fault)."""

    def discard(self, address: int, nbytes: int) -> None:
        """Forget a range (TRIM)."""

    def close(self) -> None:
        """Release files, threads and memory."""


class FileBacking:
    """Files on NVMe, striped. The files are made sparse, or preallocated if asked.

    Files that are to ``keep`` have a record of their layout beside them, and are opened only as
    they were made, or longer.
    """

    def __init__(
        self,
        files: Sequence[Path],
        size_bytes: int,
        *,
        stripe_bytes: int,
        preallocate: bool = False,
        keep: bool = False,
    ) -> None:
        if stripe_bytes % PAGE_BYTES:
            raise ValueError(f"stripe must be whole pages of {PAGE_BYTES} B, got {stripe_bytes}")
        self.size_bytes = size_bytes
        self.stripe_bytes = stripe_bytes
        self.direct = True
        self._files = [Path(file) for file in files]
        self._keep = keep
        self._descriptors: list[int] = []
        self._mine: list[Path] = []
        rows = -(-size_bytes // (stripe_bytes * len(self._files)))
        layout = Layout(len(self._files), stripe_bytes, rows * stripe_bytes)
        record = self._files[0].with_suffix(".layout")
        if keep:
            layout.check(record, self._files)
        try:
            for file in self._files:
                self._open(file, layout.file_bytes, preallocate)
            if keep:
                layout.save(record)
        except BaseException:
            self.close()
            raise
        self._pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="cxlbench-io")

    def _open(self, file: Path, length: int, preallocate: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o600)
                self.direct = self.direct and hasattr(os, "O_DIRECT")
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                descriptor = os.open(file, flags, 0o600)  # tmpfs knows no direct I/O
                self.direct = False
            self._descriptors.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mine.append(file)
            if preallocate:
                os.posix_fallocate(descriptor, 0, length)
            else:
                os.ftruncate(descriptor, length)
        except BlockingIOError as error:
            raise HostLimitError(
                f"the backing file {file} belongs to another device that is running; give each "
                "device a name or a folder of its own"
            ) from error
        except OSError as error:
            raise HostLimitError(
                f"cannot make the backing file {file} of {length / 2**20:.1f} MiB: "
                f"{error.strerror}; choose another folder or a larger scale"
            ) from error

    def _plan(
        self, address: int, arena: Arena, extents: Sequence[Extent]
    ) -> dict[tuple[int, int], list[memoryview]]:
        """Split into runs that are contiguous in one file: (file, offset) → memory pieces."""
        stripe, count = self.stripe_bytes, len(self._descriptors)
        runs: dict[int, tuple[tuple[int, int], int]] = {}
        plan: dict[tuple[int, int], list[memoryview]] = {}
        whole = memoryview(arena.array.data)
        for offset, length in extents:
            while length:
                index, within = divmod(address, stripe)
                piece = min(length, stripe - within)
                row, file = divmod(index, count)
                at = row * stripe + within
                view = whole[offset : offset + piece]
                start, end = runs.get(file, ((file, at), -1))
                if end != at:
                    start = (file, at)
                    plan[start] = []
                plan[start].append(view)
                runs[file] = (start, at + piece)
                address, offset, length = address + piece, offset + piece, length - piece
        return plan

    async def read(self, address: int, arena: AnyArena, extents: Sequence[Extent]) -> None:
        """Read with one ``preadv`` per file and run, in a thread."""
        assert isinstance(arena, Arena)
        plan = self._plan(address, arena, extents)
        await asyncio.get_running_loop().run_in_executor(self._pool, self._read, plan)

    def _read(self, plan: dict[tuple[int, int], list[memoryview]]) -> None:
        for (file, offset), views in plan.items():
            wanted = sum(map(len, views))
            got = 0
            while got < wanted:
                try:
                    step = os.preadv(self._descriptors[file], _rest(views, got), offset + got)
                except OSError as error:
                    raise DeviceError(
                        Status.IO_ERROR, f"{self._files[file]} at {offset}: {error.strerror}"
                    ) from error
                if step == 0:
                    raise DeviceError(
                        Status.IO_ERROR,
                        f"{self._files[file]} ends at {offset + got}, {wanted - got} B are missing",
                    )
                got += step

    def unwritten(self, address: int, nbytes: int) -> bool:
        """Whether a range is known to have never been written: the files have holes there."""
        row_bytes = self.stripe_bytes * len(self._descriptors)
        begin = address // row_bytes * self.stripe_bytes
        end = -(-(address + nbytes) // row_bytes) * self.stripe_bytes
        return all(_is_hole(descriptor, begin, end) for descriptor in self._descriptors)

    async def write(
        self, address: int, arena: AnyArena, extents: Sequence[Extent], *, short: bool = False
    ) -> None:
        """Write with one ``pwritev`` per file and run, in a thread; verify the length."""
        assert isinstance(arena, Arena)
        plan = self._plan(address, arena, extents)
        await asyncio.get_running_loop().run_in_executor(self._pool, self._write, plan, short)

    def _write(self, plan: dict[tuple[int, int], list[memoryview]], short: bool) -> None:
        for number, ((file, offset), views) in enumerate(plan.items(), 1):
            wanted = sum(map(len, views))
            limit = wanted - PAGE_BYTES if short and number == len(plan) else wanted
            done = 0
            while done < limit:
                pieces = _rest(views, done)
                if limit < wanted and done + sum(map(len, pieces)) > limit:
                    pieces = _cut(pieces, limit - done)
                try:
                    step = os.pwritev(self._descriptors[file], pieces, offset + done)
                except OSError as error:
                    raise DeviceError(
                        Status.IO_ERROR, f"{self._files[file]} at {offset}: {error.strerror}"
                    ) from error
                done += step
                if step == 0:
                    break
            if done < wanted:
                raise DeviceError(
                    Status.IO_ERROR,
                    f"{self._files[file]}: {done} of {wanted} B written at {offset}",
                )

    def discard(self, address: int, nbytes: int) -> None:
        """Keep the old bytes: an SSD does not erase on TRIM at once, and readers must not mind."""

    def close(self) -> None:
        """End the threads, close the files and, unless ``keep``, remove them."""
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=True)
        while self._descriptors:
            os.close(self._descriptors.pop())
        if not self._keep:
            for file in self._mine:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)


def _is_hole(descriptor: int, begin: int, end: int) -> bool:
    """Whether a file holds no data from ``begin`` to ``end``, as far as its file system tells."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    try:
        return os.lseek(descriptor, begin, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO  # nothing but a hole up to the end


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """Return ``views`` without their first ``done`` bytes; the kernel takes at most 1024."""
    if done == 0:
        return views[:1024]
    rest = []
    for view in views:
        if done >= len(view):
            done -= len(view)
        else:
            rest.append(view[done:])
            done = 0
    return rest[:1024]


def _cut(views: list[memoryview], length: int) -> list[memoryview]:
    kept = []
    for view in views:
        if length <= 0:
            break
        kept.append(view[:length])
        length -= len(view)
    return kept


class RamBacking:
    """An anonymous mapping, for runs that measure software and not a disk."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._arena = Arena(size_bytes)

    async def read(self, address: int, arena: AnyArena, extents: Sequence[Extent]) -> None:
        """Copy from the mapping."""
        assert isinstance(arena, Arena)
        for offset, length in extents:
            arena.array[offset : offset + length] = self._arena.view(address, length)
            address += length

    async def write(
        self, address: int, arena: AnyArena, extents: Sequence[Extent], *, short: bool = False
    ) -> None:
        """Copy into the mapping."""
        assert isinstance(arena, Arena)
        wanted = sum(length for _, length in extents)
        left = wanted - PAGE_BYTES if short else wanted
        for offset, length in extents:
            step = min(length, left)
            self._arena.view(address, step)[:] = arena.array[offset : offset + step]
            address, left = address + step, left - step
        if short:
            raise DeviceError(Status.IO_ERROR, f"{wanted - PAGE_BYTES} of {wanted} B written")

    def discard(self, address: int, nbytes: int) -> None:
        """Keep the old bytes."""

    def close(self) -> None:
        """Release the mapping."""
        self._arena.close()


_BUCKET_BYTES = 1 << 30


class PhantomBacking:
    """Tags by address. A write drops whatever it overlaps, as bytes would be overwritten.

    What was written at once can be read at once, with the same extents. With ``split`` each extent
    stands for itself and can be read alone, as a cache that evicts parts of objects needs it.
    """

    def __init__(self, size_bytes: int, *, split: bool = False) -> None:
        self.size_bytes = size_bytes
        self.split = split
        self._objects: dict[int, tuple[int, tuple[int, ...], tuple[Hashable, ...]]] = {}
        self._starts: dict[int, list[int]] = {}

    async def read(self, address: int, arena: AnyArena, extents: Sequence[Extent]) -> None:
        """Give back the tags of an object written with the same address and extents."""
        assert isinstance(arena, PhantomArena)
        if self.split and len(extents) > 1:
            for extent in extents:
                await self.read(address, arena, (extent,))
                address += extent[1]
            return
        stored = self._objects.get(address)
        lengths = tuple([length for _, length in extents])
        if stored is None or stored[1] != lengths:
            arena.set_cells(extents, (None,) * len(extents))
        else:
            arena.set_cells(extents, stored[2])

    async def write(
        self, address: int, arena: AnyArena, extents: Sequence[Extent], *, short: bool = False
    ) -> None:
        """Keep the tags of ``extents``."""
        assert isinstance(arena, PhantomArena)
        if self.split and len(extents) > 1:
            for extent in extents[:-1]:
                await self.write(address, arena, (extent,))
                address += extent[1]
            await self.write(address, arena, extents[-1:], short=short)
            return
        lengths = tuple([length for _, length in extents])
        total = sum(lengths)
        self.discard(address, total)
        if short:
            raise DeviceError(Status.IO_ERROR, f"{total - PAGE_BYTES} of {total} B written")
        self._objects[address] = (total, lengths, arena.cells(extents))
        insort(self._starts.setdefault(address // _BUCKET_BYTES, []), address)

    def discard(self, address: int, nbytes: int) -> None:
        """Drop every object that overlaps the range."""
        end = address + nbytes
        for bucket in range(max(0, address // _BUCKET_BYTES - 1), (end - 1) // _BUCKET_BYTES + 1):
            starts = self._starts.get(bucket)
            if not starts:
                continue
            at = bisect_left(starts, address)
            # At most one object can begin before the range and reach into it.
            first = at - 1 if at else at
            while first < len(starts) and starts[first] < end:
                start = starts[first]
                if start + self._objects[start][0] > address:
                    del self._objects[start]
                    del starts[first]
                else:
                    first += 1

    def close(self) -> None:
        """Forget everything."""
        self._objects.clear()
        self._starts.clear()
