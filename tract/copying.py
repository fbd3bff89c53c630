"""Copies of blocks between a worker's GPU and the shared memory, so many bytes at once.

TraCT, § GPU DMA: the GPU's copy engine works on the pinned mapping of the shared memory, so a copy
occupies both, and the slower one decides. The shared memory's side is the pod's own DMA, made by a
program on the worker's node; the GPU's side is handed in, where there is anything to pace.

Units: bytes, s. Left out: which engine of several, and the order in which they serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cxlbench.emu.clock import Clock
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Budget
from cxlbench.kv.tickets import GpuCopy
from cxlbench.tract import payload
from cxlbench.tract.chains import read_block, write_block
from cxlbench.tract.layout import Layout


class ProgramRunner(Protocol):
    """A node of a pod on which programs run beside each other, without blocking the caller."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(mem, *args)`` on the node to its end and return its result."""


class Copier:
    """One worker's copies, at most ``window_bytes`` of them at once.

    ``take`` comes before a copy, which gives its share of the window back. A block larger than the
    window goes alone.
    """

    def __init__(
        self,
        clock: Clock,
        node: ProgramRunner,
        layout: Layout,
        *,
        window_bytes: int,
        gpu_copy: GpuCopy | None,
    ) -> None:
        self.window = Budget(clock, window_bytes, name="bytes being copied")
        self._clock = clock
        self._node = node
        self._layout = layout
        self._gpu_copy = gpu_copy

    async def take(self, nbytes: int) -> None:
        """Wait for a share of the window for one block."""
        await self.window.take(self._share(nbytes))

    def give(self, nbytes: int) -> None:
        """Give the share of a block back that is not copied after all."""
        self.window.give(self._share(nbytes))

    async def read(self, block: int, buffer: Buffer, key: bytes, check: int) -> tuple[bool, float]:
        """Copy the pinned block at offset ``block`` to ``buffer``.

        Returns whether it is the block ``key`` with the checksum ``check``, and when its bytes were
        there, before they were verified.
        """
        words = payload.words_of(buffer)
        await self._move(read_block, block, words, buffer.nbytes)
        due_s = self._clock.now()
        return payload.arrived(buffer, words, key, check), due_s

    async def write(self, block: int, buffer: Buffer) -> int:
        """Copy ``buffer`` to the reserved block at offset ``block``; return its checksum."""
        check = payload.checksum_of(buffer)
        await self._move(write_block, block, payload.words_of(buffer), buffer.nbytes)
        return check

    async def _move(
        self, program: Callable[..., Any], block: int, words: object, nbytes: int
    ) -> None:
        try:
            dma = self._node.run(program, self._layout, block, words)
            if self._gpu_copy is None:
                await dma
            else:
                await self._clock.gather(dma, self._gpu_copy.copy(nbytes))
        finally:
            self.give(nbytes)

    def _share(self, nbytes: int) -> int:
        return min(nbytes, self.window.capacity)
