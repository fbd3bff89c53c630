"""A process's place in a node of a live pod, and the handle that it gets there.

A pod has a fixed number of places; a process takes one by writing its id into the process table and
gets a handle of the executor that the pod's mode asks for: addresses in mappings of this process,
valid until the attachment is closed. Left out: the files (pod_mappings), who starts processes
(pod_processes).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator

from cxlbench.emu.pod_dma import DMA_TABLE_BYTES
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_layout import (
    INCARNATION_AT,
    NODE_INCARNATION_AT,
    NODE_MAGIC,
    PROCESS_BYTES,
    PROCESS_ID_AT,
    PROCESSES_AT,
    RANDOM_AT,
    SLOT_BYTES,
    SLOTS_AT,
    VERSION,
    PodLayoutError,
)
from cxlbench.emu.pod_mappings import HOST, Mapping, PodInUseError, PodPaths, read_shape
from cxlbench.emu.pod_native import NativeMemory

LiveMemory = NativeMemory | EmulatedMemory


class Attachment:
    """A place in a node, taken by this process: ``memory`` is its handle.

    ``HOST`` as ``process`` is the place of the pod's maker, in any node.
    """

    def __init__(self, paths: PodPaths, node: int, process: int) -> None:
        shape = self.shape = read_shape(paths.control)
        if not 0 <= node < shape.nodes or not HOST <= process < shape.processes:
            raise PodLayoutError(
                f"the pod has {shape.nodes} nodes of {shape.processes} processes, counted from 0;"
                f" there is no process {process} of node {node}"
            )
        self.node, self.process = node, process
        self._mappings: list[Mapping] = []
        try:
            self.control = self._map(paths.control, shape.control_bytes)
            self.region = self._map(paths.region, shape.region_bytes)
            self.own = self._map(paths.nodes[node], shape.node_bytes)
            self._check_node(paths.nodes[node])
            self.incarnation = self.own.words(NODE_INCARNATION_AT, 1)[0]
            self._take_place()
            self._dma = self._map(None, DMA_TABLE_BYTES)
            self._seed_slot()
            self.memory = self._handle()
        except BaseException:
            self._unmap()
            raise

    def _map(self, path: str | None, nbytes: int) -> Mapping:
        mapping = Mapping(path, nbytes)
        self._mappings.append(mapping)
        return mapping

    def _check_node(self, path: str) -> None:
        magic, version, number = self.own.words(0, 3)
        if (magic, version, number) != (NODE_MAGIC, VERSION, self.node):
            raise PodLayoutError(f"{path} is not the file of node {self.node} of this pod")

    @property
    def _entry_at(self) -> int:
        return PROCESSES_AT + (self.shape.token(self.node, self.process) - 1) * PROCESS_BYTES

    @property
    def _slot_at(self) -> int:
        place = self.shape.processes if self.process == HOST else self.process
        return SLOTS_AT + place * SLOT_BYTES

    def _take_place(self) -> None:
        holder = self.control.words(self._entry_at + PROCESS_ID_AT, 1)[0]
        mine = os.getpid()
        if holder not in (0, mine) and _exists(holder):
            raise PodInUseError(
                f"process {self.process} of node {self.node} is {holder}, which is alive; take"
                " another place, or fence the node first"
            )
        self.control.write_word(self._entry_at + INCARNATION_AT, self.incarnation)
        self.control.write_word(self._entry_at + PROCESS_ID_AT, mine)

    def _seed_slot(self) -> None:
        self.own.write(self._slot_at, bytes(SLOT_BYTES))
        words = (self.shape.seed, self.node, self.process, self.incarnation)
        digest = hashlib.blake2b(struct.pack("<4q", *words), digest_size=8).digest()
        self.own.write_word(self._slot_at + RANDOM_AT, int.from_bytes(digest, "little") >> 2 | 1)

    def _handle(self) -> LiveMemory:
        shape, own = self.shape, self.own.address
        cached = shape.mode == "emulated"
        if shape.mode == "native":
            return NativeMemory(
                region=self.region.address,
                region_bytes=shape.region_bytes,
                locks=own + shape.local_locks_at,
                locks_n=shape.local_locks,
                words=own + shape.local_words_at,
                words_n=shape.local_words,
                node=self.node,
                token=shape.token(self.node, self.process),
            )
        return EmulatedMemory(
            region=self.region.address,
            region_bytes=shape.region_bytes,
            control=self.control.address,
            node_at=own,
            slot=own + self._slot_at,
            queue=own + shape.queue_at if cached else 0,
            posted_mask=shape.cache.posted - 1,
            cache=own + shape.cache_at if cached else 0,
            set_mask=shape.cache.sets - 1,
            set_bytes=shape.cache.set_bytes,
            set_header_bytes=shape.cache.set_header_bytes,
            ways=shape.cache.ways,
            locks=own + shape.local_locks_at,
            locks_n=shape.local_locks,
            words=own + shape.local_words_at,
            words_n=shape.local_words,
            dma=self._dma.address,
            node=self.node,
            token=shape.token(self.node, self.process),
        )

    def close(self) -> None:
        """Give the place up and unmap; the handle must not be used again."""
        if not self._mappings:
            return
        if self.process != HOST:
            self.control.write_word(self._entry_at + PROCESS_ID_AT, 0)
        self._unmap()

    def _unmap(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def attached(paths: PodPaths, node: int, process: int) -> Iterator[Attachment]:
    """Attach for the length of a ``with`` block."""
    attachment = Attachment(paths, node, process)
    try:
        yield attachment
    finally:
        attachment.close()
