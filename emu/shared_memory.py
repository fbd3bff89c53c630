"""Memory that several processes map: made by one, found by the others by a path.

Where the system has anonymous memory files (``memfd_create``, Linux), a segment has no name and
goes with its last user, however that ends; others open it as ``/proc/PID/fd/N``. Elsewhere it is a
file in a folder that the caller removes. Units: bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlbench.emu.memory import Arena
from cxlbench.emu.status import HostLimitError

HUGE_PAGE_BYTES = 2 << 20
"""The usual huge page, and the usual alignment of a DAX device."""


class SharedSegment:
    """A piece of memory with a path under which other processes can map it.

    ``hugetlb`` takes huge pages (the host must have reserved some); ``device`` is a device DAX file
    (``/dev/dax*``) to use in place of memory of our own.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        name: str,
        folder: Path,
        hugetlb: bool = False,
        device: Path | None = None,
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"{name}: a segment needs at least one byte, got {nbytes}")
        grain = HUGE_PAGE_BYTES if hugetlb or device is not None else 1
        nbytes = -(-nbytes // grain) * grain
        self.name = name
        self.nbytes = nbytes
        self._descriptor = -1
        self._file: Path | None = None
        maker = getattr(os, "memfd_create", None)
        try:
            if device is not None:
                self.path = device
                self._descriptor = os.open(device, os.O_RDWR)
                self._check_room(device)
                return
            if maker is not None and Path("/proc/self/fd").exists():
                huge = getattr(os, "MFD_HUGETLB", 0x4) if hugetlb else 0
                self._descriptor = maker(name, huge)
                self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
            else:
                self.path = self._file = folder / f"{name}.mem"
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(self._descriptor, nbytes)
        except OSError as error:
            self.close()
            raise HostLimitError(f"cannot share {nbytes} B of memory: {error.strerror}") from error

    def _check_room(self, device: Path) -> None:
        """Refuse a file in a device's place that is too short: touching its end would kill us."""
        found = os.fstat(self._descriptor).st_size
        if 0 < found < self.nbytes:  # a device says 0
            self.close()
            raise HostLimitError(f"{device} has {found} B, {self.name} needs {self.nbytes} B")

    def arena(self) -> Arena:
        """Map it here. Raises ``HostLimitError`` if the host has not so much of it."""
        return Arena(self.nbytes, kind="mapped", path=self.path)

    def close(self) -> None:
        """Give it up; it lives on while others have it mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def attach(path: str, nbytes: int) -> Arena:
    """Map a segment of another process. Raises ``HostLimitError`` if it is gone or too short."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            found = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostLimitError(f"cannot map {path}: {error.strerror}") from error
    if 0 < found < nbytes:  # a device says 0
        raise HostLimitError(f"{path} has {found} B, {nbytes} B are needed")
    return Arena(nbytes, kind="mapped", path=Path(path))


class Words:
    """64-bit words in shared memory; a store or load of one aligned word is whole on all hosts."""

    def __init__(self, segment: SharedSegment | None, *, path: str = "", count: int) -> None:
        where = str(segment.path) if segment is not None else path
        descriptor = os.open(where, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, count * 8)
        finally:
            os.close(descriptor)
        self.array: npt.NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)

    def close(self) -> None:
        """Unmap."""
        self.array = np.zeros(0, dtype=np.int64)
        with contextlib.suppress(BufferError):
            self._map.close()
