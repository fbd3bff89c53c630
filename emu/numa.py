"""NUMA nodes of the host: which there are, and how memory and threads are bound to one.

CXL memory that the system has taken in as ordinary memory is a NUMA node without processors. Memory
is bound by ``mbind`` before it is touched (pages that are there already are moved), threads by
their affinity; both need no privilege, but a container may refuse ``mbind``. The system call is
made directly: its number is known for x86-64 and aarch64. Units: bytes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cxlbench.emu.memory import Bytes
from cxlbench.emu.status import HostLimitError

NODES = Path("/sys/devices/system/node")
DAX_DEVICES = Path("/sys/bus/dax/devices")
MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, by architecture."""

_MPOL_BIND = 2
_MPOL_MF_MOVE = 2
_MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A node: its processors, its memory, and how far it is from the others."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int
    distances: tuple[int, ...]
    """To all nodes, in the order of their numbers; 10 is the node itself."""


def numa_nodes(folder: Path = NODES) -> list[NumaNode]:
    """Return the host's nodes in order; none if the system does not tell."""
    found = []
    for path in folder.glob("node[0-9]*"):
        cpus = parse_cpus(_text(path / "cpulist"))
        distances = tuple(int(word) for word in _text(path / "distance").split())
        number = int(path.name.removeprefix("node"))
        found.append(NumaNode(number, cpus, _total(_text(path / "meminfo")), distances))
    return sorted(found, key=lambda node: node.number)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the processors of a list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def find_node(number: int, folder: Path = NODES) -> NumaNode:
    """Return a node; raises ``HostLimitError`` if the host has none of that number."""
    nodes = numa_nodes(folder)
    for node in nodes:
        if node.number == number:
            return node
    there = ", ".join(str(node.number) for node in nodes)
    raise HostLimitError(
        f"this host has no NUMA node {number}: it has {there or 'none that it tells of'}"
    )


def nearest_cpus(number: int, folder: Path = NODES) -> frozenset[int]:
    """Return the processors of a node, or of the nearest one that has any."""
    node, nodes = find_node(number, folder), numa_nodes(folder)
    far = dict(zip((other.number for other in nodes), node.distances, strict=False))
    for other in sorted(nodes, key=lambda other: (other != node, far.get(other.number, 255))):
        if other.cpus:
            return other.cpus
    raise HostLimitError(f"no NUMA node near node {number} has a processor")


def node_of_device(device: Path, folder: Path = DAX_DEVICES) -> int | None:
    """Return the NUMA node next to which a DAX device is; None if nothing tells."""
    number = _text(folder / device.resolve().name / "numa_node")
    return int(number) if number.isdecimal() else None  # "-1": of none


def bind_threads(number: int) -> frozenset[int]:
    """Let this process run on a node's processors, or the nearest ones; return them."""
    cpus = nearest_cpus(number)
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError) as error:
        raise HostLimitError(
            f"cannot run on the processors of NUMA node {number} ({sorted(cpus)}): {error}"
        ) from error
    return cpus


def bind_memory(array: Bytes, number: int) -> None:
    """Bind a mapped array of whole pages to a node.

    Raises:
        HostLimitError: the host has no such node, or refuses to bind.
    """
    find_node(number)
    call = MBIND.get(platform.machine())
    if call is None or platform.system() != "Linux":
        raise HostLimitError(
            f"memory is bound to NUMA nodes on Linux on {', '.join(MBIND)} only, "
            f"this is {platform.system()} on {platform.machine()}"
        )
    mask = np.zeros(_MAX_NODES // 64, dtype=np.uint64)
    mask[number // 64] = np.uint64(1 << number % 64)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    failed = syscall(
        ctypes.c_long(call),
        ctypes.c_void_p(array.ctypes.data),
        ctypes.c_size_t(array.nbytes),
        ctypes.c_long(_MPOL_BIND),
        ctypes.c_void_p(mask.ctypes.data),
        ctypes.c_size_t(_MAX_NODES + 1),
        ctypes.c_long(_MPOL_MF_MOVE),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise HostLimitError(
            f"cannot bind {array.nbytes} B to NUMA node {number}: {reason}; a container needs the "
            "capability SYS_NICE, or a profile that allows mbind; or leave numa_node out"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _total(meminfo: str) -> int:
    for line in meminfo.splitlines():
        words = line.split()
        if "MemTotal:" in words:
            return int(words[words.index("MemTotal:") + 1]) * 1024
    return 0
