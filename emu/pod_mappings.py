"""The files of a live pod: made, locked, checked, mapped, removed.

A pod is a folder with the files ``control``, ``region`` and ``node-0``, ``node-1``, … (what is in
them: pod_layout). ``region`` may be a symbolic link to the memory to use: a file elsewhere,
``/dev/dax0.0``. Or a pod is anonymous: the files are then ``memfd`` of the process that made it,
which others reach by ``/proc/PID/fd/N`` while it lives, so that nothing is left behind whatever
dies. A region that has been there before keeps its bytes; everything else is made anew.

One pod at a time has a folder, and a region: whoever makes it holds a lock (``flock``) on both.

Left out: places in a node and handles (pod_attachment).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cxlbench.emu.flush_instructions import SUPPORT
from cxlbench.emu.numa import bind_memory
from cxlbench.emu.pod_layout import (
    HEADER_WORDS,
    NEVER,
    NEXT_DUE_AT,
    NODE_MAGIC,
    NODE_NUMBER_AT,
    PROCESS_BYTES,
    PROCESSES_AT,
    SETTINGS_AT,
    VERSION,
    PodLayoutError,
    PodShape,
)
from cxlbench.emu.status import HostLimitError

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
"""File systems whose files are memory that follows a NUMA binding."""
HOST = -1
"""The process number of the host in every node: whoever made the pod."""


class PodInUseError(RuntimeError):
    """Another pod has these files, or another process has this place in the pod."""


class PodClosedError(RuntimeError):
    """The mappings that this needs have been closed."""


class Mapping:
    """Memory at an address of this process, of a file or private, until it is closed.

    Only ``close`` unmaps: handles are bare addresses and must not outlive their memory because the
    object that made them was collected.
    """

    def __init__(self, path: str | os.PathLike[str] | None, nbytes: int) -> None:
        self.nbytes = nbytes
        if path is None:
            self._map = mmap.mmap(-1, nbytes)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                have = file_bytes(descriptor)
                if have < nbytes:
                    raise PodLayoutError(f"{path} has {have} B; the pod needs {nbytes} B of it")
                self._map = mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        self.array = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)

    def words(self, at: int, n_words: int) -> list[int]:
        """Return words from byte ``at`` on."""
        return [int(word) for word in self.array[at : at + 8 * n_words].view("<i8")]

    def write(self, at: int, raw: bytes) -> None:
        """Write bytes at byte ``at``."""
        self.array[at : at + len(raw)] = np.frombuffer(raw, dtype=np.uint8)

    def write_word(self, at: int, value: int) -> None:
        """Write one word at byte ``at``."""
        self.array[at : at + 8].view("<i8")[0] = value

    def close(self) -> None:
        """Unmap. Handles made from it must not be used again."""
        if not self.address:
            return
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._map))
        self.array = np.zeros(0, dtype=np.uint8)
        self.address = 0
        with contextlib.suppress(BufferError):  # somebody has a view: unmapped with the last one
            self._map.close()


def file_bytes(descriptor: int) -> int:
    """Return the size of an open file, or of a DAX device."""
    status = os.fstat(descriptor)
    if not stat.S_ISCHR(status.st_mode):
        return status.st_size
    device = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    size = Path(f"/sys/dev/char/{device}/size")
    if not size.exists():
        raise PodLayoutError(f"character device {device} tells no size: it is not a DAX device")
    return int(size.read_text())


@dataclass(frozen=True, slots=True)
class PodPaths:
    """Where the files of a pod are, as any process of this user can open them."""

    control: str
    region: str
    nodes: tuple[str, ...]
    views: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    @classmethod
    def of_folder(cls, folder: Path) -> PodPaths:
        """Return the paths of a pod in a folder; nodes are those that have a file."""

        def numbered(kind: str) -> tuple[str, ...]:
            found = (
                (int(match[1]), str(path))
                for path in folder.glob(f"{kind}-*")
                if (match := re.fullmatch(kind + r"-(\d+)", path.name))
            )
            return tuple(path for _, path in sorted(found))

        if not (folder / "control").exists():
            raise PodLayoutError(f"{folder} has no pod in it: there is no file named control")
        return cls(
            str(folder / "control"),
            str(folder / "region"),
            numbered("node"),
            numbered("view"),
            numbered("twin"),
        )


class PodFiles:
    """The files of a pod, made and owned by this process until they are closed.

    ``folder``: where; anonymous if none is given. ``region``: the memory to use instead of a new
    file: a file of at least ``region_bytes`` (made if it is not there) or a DAX device.
    ``numa_node``: where the region's memory lies, which is anonymous or a file in memory then.

    Raises:
        HostLimitError: the region cannot be bound to that node.
    """

    def __init__(
        self,
        shape: PodShape,
        *,
        folder: Path | None = None,
        region: Path | None = None,
        numa_node: int | None = None,
    ) -> None:
        self._descriptors: list[int] = []
        self._made: list[Path] = []
        self._closed = False
        if shape.mode == "native":
            SUPPORT.require("clflush")
        try:
            self.paths = self._make(shape, folder, region)
            if numa_node is not None:
                bind_region(self.paths.region, shape.region_bytes, numa_node)
            self._initialize(shape)
        except BaseException:
            self.close()
            raise

    def _make(self, shape: PodShape, folder: Path | None, region: Path | None) -> PodPaths:
        sizes = [("control", shape.control_bytes)]
        sizes += [(f"node-{node}", shape.node_bytes) for node in range(shape.nodes)]
        if shape.mode == "mapped":
            kinds = [(kind, node) for kind in ("view", "twin") for node in range(shape.nodes)]
            sizes += [(f"{kind}-{node}", shape.region_bytes) for kind, node in kinds]
        if folder is None:
            files = {name: self._anonymous(name, nbytes) for name, nbytes in sizes}
            if region is None:
                at = self._anonymous("region", shape.region_bytes)
            else:
                at = str(region.absolute())
                self._named(region, shape.region_bytes, keep=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            files = {}
            for name, nbytes in sizes:
                self._named(folder / name, nbytes, keep=False)
                files[name] = str((folder / name).absolute())
            at = str((folder / "region").absolute())
            if region is not None:
                self._link(folder / "region", region)
            self._named(folder / "region", shape.region_bytes, keep=True)
        views, twins = (
            tuple(files[f"{kind}-{node}"] for node in range(shape.nodes))
            if shape.mode == "mapped"
            else ()
            for kind in ("view", "twin")
        )
        nodes = tuple(files[f"node-{node}"] for node in range(shape.nodes))
        return PodPaths(files["control"], at, nodes, views, twins)

    def _anonymous(self, name: str, nbytes: int) -> str:
        if not hasattr(os, "memfd_create"):
            raise PodLayoutError("this system has no anonymous shared files: give the pod a folder")
        descriptor = os.memfd_create(f"cxlbench-{name}", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def _named(self, path: Path, nbytes: int, *, keep: bool) -> None:
        there = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PodInUseError(f"another pod has {path}: close it, or use another file") from None
        if keep and there and (have := file_bytes(descriptor)):
            if have < nbytes:
                raise PodLayoutError(
                    f"{path} has {have} B, the pod's region needs {nbytes} B; nothing was changed"
                )
            return
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, nbytes)
        if not keep:
            self._made.append(path)

    def _link(self, link: Path, region: Path) -> None:
        target = region.absolute()
        if link.is_symlink() and link.readlink() == target:
            return
        if link.exists() or link.is_symlink():
            raise PodLayoutError(f"{link} exists and is not a link to {target}: remove it first")
        link.symlink_to(target)

    def _initialize(self, shape: PodShape) -> None:
        control = Mapping(self.paths.control, shape.control_bytes)
        control.write(SETTINGS_AT, shape.settings())
        control.write_word(PROCESSES_AT + (shape.token(0, HOST) - 1) * PROCESS_BYTES, os.getpid())
        for number, path in enumerate(self.paths.nodes):
            node = Mapping(path, shape.node_bytes)
            node.write_word(NODE_NUMBER_AT, number)
            node.write_word(NEXT_DUE_AT, NEVER)
            node.write(0, struct.pack("<qq", NODE_MAGIC, VERSION))
            node.close()
        control.write(0, shape.header())
        control.close()
        for path in (*self.paths.views, *self.paths.twins):
            copy_region(self.paths, path, shape.region_bytes)

    def close(self) -> None:
        """Remove what was made, except the region, and let others have the files."""
        if self._closed:
            return
        self._closed = True
        for path in self._made:
            path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)


def bind_region(path: str, nbytes: int, numa_node: int) -> None:
    """Let a region's memory lie on a NUMA node; all processes that map it find it there.

    Raises:
        HostLimitError: it is a device, or a file on a disk, or the host cannot bind.
    """
    if stat.S_ISCHR(Path(path).stat().st_mode):
        raise HostLimitError(f"{path} lies where it lies: bind no region that is a device")
    if not _is_in_memory(path):
        raise HostLimitError(
            f"{path} is a file on a disk, whose pages no NUMA binding moves: use anonymous memory "
            "or a file in /dev/shm"
        )
    region = Mapping(path, nbytes)
    try:
        bind_memory(region.array, numa_node)
    finally:
        region.close()


def _is_in_memory(path: str) -> bool:
    """Whether a file is anonymous memory or in a file system that lies in memory."""
    if path.startswith("/proc/"):  # a memfd of this process
        return True
    device = Path(path).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0] in IN_MEMORY
    return False


def copy_region(paths: PodPaths, path: str, nbytes: int) -> None:
    """Make a view, or a twin, what ``D`` holds."""
    region, copy = Mapping(paths.region, nbytes), Mapping(path, nbytes)
    if region.array[:nbytes].any() or copy.array[:nbytes].any():
        copy.array[:nbytes] = region.array[:nbytes]
    region.close()
    copy.close()


def remove_left_behind(folder: Path) -> list[str]:
    """Remove what a pod whose host was killed left in a folder, its region too; return the names.

    A pod that is in use is refused. Links are removed, not what they lead to.
    """
    with contextlib.ExitStack() as held:
        names = [path.name for path in folder.glob("*-*")]
        names = [name for name in names if re.fullmatch(r"(node|view|twin)-\d+", name)]
        names += ["control", "region"]
        names = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
        for name in names:
            if (folder / name).is_symlink():
                continue
            file = held.enter_context((folder / name).open("rb+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PodInUseError(f"the pod in {folder} is in use: close it first") from None
        for name in names:
            (folder / name).unlink()
    return names


def read_shape(control: str | os.PathLike[str]) -> PodShape:
    """Return the shape of the pod whose control file this is."""
    with Path(control).open("rb") as file:
        return PodShape.from_header(file.read(24 + 8 * HEADER_WORDS))
