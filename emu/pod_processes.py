"""Live pods: nodes that are real processes, started, killed with SIGKILL, fenced, started again.

``LivePod`` makes the mappings, forks processes into places of nodes, and is the host: the one that
may fence. Each process runs a ``module:function`` with a ``LiveNode`` as its first argument.

The unit of failure is the node. ``kill`` ends all its processes wherever they are; ``fence`` first
kills what is left, then lets nothing of the node land any more (pod_fence), empties its cache and
its local memory and counts its incarnation up. Only then can the node be started again: recovery of
what programs keep in the region is theirs (suspect, fence, new epoch, repair).

Nothing is left behind: an anonymous pod's memory is ``memfd``, which ends with the last process;
``close`` removes the files of a pod in a folder, except the region; and when the host dies without
``close``, its node processes are killed with it (pod_zygote), and the locks on the folder's files
end, so that the next pod there makes them anew.

Units: timeouts in seconds. Left out: pods on more than one host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cxlbench.emu.numa import node_of_device
from cxlbench.emu.pod_attachment import Attachment, LiveMemory
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_fence import fence_node, settle_node, shut_down_node
from cxlbench.emu.pod_kernel import COUNTER_NAMES
from cxlbench.emu.pod_layout import (
    CLOCK_AT,
    COUNTERS_AT,
    EVICTIONS_AT,
    FILLS_AT,
    NEVER,
    NEXT_DUE_AT,
    NODE_INCARNATION_AT,
    PROCESS_BYTES,
    PROCESS_ID_AT,
    PROCESSES_AT,
    SETTINGS_AT,
    SLOT_BYTES,
    SLOTS_AT,
    Disturbance,
    PodLayoutError,
    PodShape,
)
from cxlbench.emu.pod_mapped import MappedNode
from cxlbench.emu.pod_mappings import HOST, PodClosedError, PodFiles, copy_region
from cxlbench.emu.pod_node_process import NodeForker, NodeProcess, NodeStartError, no_channel
from cxlbench.emu.pod_zygote import ForkRequest


class NodeNotFencedError(RuntimeError):
    """The node has lost a process; it must be fenced before it runs anything again."""


@dataclass(frozen=True, slots=True)
class FenceReport:
    """What became of a fenced node's write-backs; ``completed`` lines were half written."""

    landed: int
    dropped: int
    completed: int


class LivePod:
    """A pod of real processes on this host; use it in a ``with`` block.

    ``folder``: where its files are (``/dev/shm/NAME`` for memory); anonymous memory if none is
    given. ``region``: a file or DAX device to be the shared memory, which keeps what it holds.
    ``forker``: shared with other pods; the pod has one of its own if none is given. ``numa_node``:
    where the region's memory lies; node processes then run on the processors next to it, as they
    do next to a DAX device, if the host tells where that is.

    Raises:
        HostLimitError: the region cannot be bound there.
    """

    def __init__(
        self,
        shape: PodShape,
        *,
        folder: Path | None = None,
        region: Path | None = None,
        forker: NodeForker | None = None,
        numa_node: int | None = None,
    ) -> None:
        self.shape = shape
        self._files = PodFiles(shape, folder=folder, region=region, numa_node=numa_node)
        if numa_node is None and region is not None:
            numa_node = node_of_device(region)
        self.numa_node = numa_node
        """Next to which NUMA node the pod's processes run; None: wherever."""
        self._persistent = folder is not None or region is not None
        self.paths = self._files.paths
        self._hosts: dict[int, Attachment] = {}
        self._processes: dict[int, list[NodeProcess]] = {node: [] for node in range(shape.nodes)}
        self._mapped: dict[int, MappedNode] = {}
        self._forker = forker
        self._own_forker: NodeForker | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    @property
    def device(self) -> NDArray[np.int64]:
        """``D`` itself, as words: what is in the device, whatever any cache holds."""
        return self._host(0).region.array[: self.shape.region_bytes].view(np.int64)

    def memory(self, node: int) -> LiveMemory:
        """Return the host's own handle on a node, as if it were a process of it."""
        if self.shape.mode == "mapped":
            raise PodLayoutError("the nodes of a mapped pod are used through mapped(node)")
        return self._host(node).memory

    def mapped(self, node: int) -> MappedNode:
        """Return the host's own use of a node of a mapped pod."""
        host = self._host(node)
        if node not in self._mapped:
            self._mapped[node] = MappedNode(host, self.paths)
        return self._mapped[node]

    def processes(self, node: int) -> Sequence[NodeProcess]:
        """Return the processes that were started on a node since it was last fenced."""
        return tuple(self._processes[self._checked(node)])

    def incarnation(self, node: int) -> int:
        """Return how often the node has been fenced."""
        return self._host(node).own.words(NODE_INCARNATION_AT, 1)[0]

    def counters(self, node: int) -> dict[str, int]:
        """Return what the node's cache did since the last fence, summed over its processes."""
        own = self._host(node).own
        totals = dict.fromkeys(COUNTER_NAMES, 0)
        for slot in range(self.shape.slots):
            words = own.words(SLOTS_AT + slot * SLOT_BYTES + COUNTERS_AT, len(COUNTER_NAMES))
            for name, value in zip(COUNTER_NAMES, words, strict=True):
                totals[name] += value
        return totals

    # Running

    def start(
        self, node: int, target: str, *arguments: object, processes: int | None = None
    ) -> list[NodeProcess]:
        """Run ``module:function`` in processes of a node (all of them, if no number is given)."""
        self._host(node)
        if any(not one.alive and not one.finished for one in self._processes[node]):
            raise NodeNotFencedError(f"node {node} has lost a process: fence it first")
        number = self.shape.processes if processes is None else processes
        taken = {one.process for one in self._processes[node] if one.alive}
        free = [place for place in range(self.shape.processes) if place not in taken]
        if number > len(free):
            raise NodeStartError(
                f"node {node} has {len(free)} free places of {self.shape.processes}; {number} were"
                " asked for"
            )
        started = [self._fork(node, place, target, arguments) for place in free[:number]]
        self._processes[node].extend(started)
        return started

    def _fork(
        self, node: int, process: int, target: str, arguments: tuple[object, ...]
    ) -> NodeProcess:
        if self._forker is None:
            self._forker = self._own_forker = NodeForker()
        return self._forker.fork(
            ForkRequest(self.paths, node, process, target, arguments, self.numa_node)
        )

    # Failing

    def kill(self, node: int) -> None:
        """SIGKILL all processes of a node. What it has in flight stays so until it is fenced."""
        for one in self._processes[self._checked(node)]:
            one.kill()

    def fence(self, node: int) -> FenceReport:
        """Kill what is left of a node and let nothing of it land any more; empty it."""
        host = self._host(node)
        self.kill(node)
        self._kill_strangers(host)
        first, last = self.shape.token(node, 0), self.shape.token(node, self.shape.processes - 1)
        report = FenceReport(0, 0, 0)
        if isinstance(host.memory, EmulatedMemory):
            report = FenceReport(*fence_node(host.memory, first, last))
        for process in range(self.shape.processes):
            entry = PROCESSES_AT + (self.shape.token(node, process) - 1) * PROCESS_BYTES
            host.control.write_word(entry + PROCESS_ID_AT, 0)
        host.own.array[CLOCK_AT:SLOTS_AT] = 0
        host.own.write_word(NEXT_DUE_AT, NEVER)
        host.own.array[SLOTS_AT : self.shape.node_bytes] = 0
        host.own.write_word(NODE_INCARNATION_AT, self.incarnation(node) + 1)
        self._let_go(node)
        for path in (*self.paths.views[node : node + 1], *self.paths.twins[node : node + 1]):
            copy_region(self.paths, path, self.shape.region_bytes)
        for one in self._processes[node]:
            one.close()
        self._processes[node] = []
        return report

    def restart(self, node: int, target: str, *arguments: object) -> list[NodeProcess]:
        """Fence a node and run ``target`` on it, as its next incarnation."""
        self.fence(node)
        return self.start(node, target, *arguments)

    def _kill_strangers(self, host: Attachment) -> None:
        """Kill processes of the node that attached themselves."""
        for process in range(self.shape.processes):
            entry = PROCESSES_AT + (self.shape.token(host.node, process) - 1) * PROCESS_BYTES
            process_id = host.control.words(entry + PROCESS_ID_AT, 1)[0]
            if process_id in (0, os.getpid()):
                continue
            with contextlib.suppress(ProcessLookupError):
                stranger = NodeProcess(host.node, process, process_id, no_channel())
                stranger.kill()
                stranger.close()

    # Settings and the end

    def settle(self, node: int) -> None:
        """Land everything that a node has in flight."""
        if self.shape.mode == "emulated":
            settle_node(self.memory(node))

    def disturb(self, disturbance: Disturbance) -> None:
        """Set, for all nodes and from now on, how often caches act of their own accord."""
        control = self._host(0).control
        for at, value in zip((EVICTIONS_AT, FILLS_AT), astuple(disturbance), strict=True):
            control.write_word(SETTINGS_AT + at, value)

    def close(self) -> None:
        """Kill all processes; write caches back if the region outlives the pod; remove files."""
        if self._closed:
            return
        with contextlib.ExitStack() as last:
            last.callback(self._end)
            for node in range(self.shape.nodes):
                orderly = all(one.finished for one in self._processes[node])
                self.kill(node)
                if self._persistent and orderly:
                    self._shut_down(node)

    def _end(self) -> None:
        self._closed = True
        for processes in self._processes.values():
            for one in processes:
                one.close()
        if self._own_forker is not None:
            self._own_forker.close()
        for node in list(self._hosts):
            self._let_go(node)
        self._files.close()

    def _shut_down(self, node: int) -> None:
        if self.shape.mode == "emulated":
            shut_down_node(self.memory(node))
        elif self.shape.mode == "mapped":
            self.mapped(node).write_back()

    def _let_go(self, node: int) -> None:
        if node in self._mapped:
            self._mapped.pop(node).close()
        self._hosts.pop(node).close()

    def _checked(self, node: int) -> int:
        if self._closed:
            raise PodClosedError("this pod is closed")
        if node not in self._processes:
            raise PodLayoutError(f"the pod has nodes 0 to {self.shape.nodes - 1}, not {node}")
        return node

    def _host(self, node: int) -> Attachment:
        if self._checked(node) not in self._hosts:
            self._hosts[node] = Attachment(self.paths, node, HOST)
        return self._hosts[node]
