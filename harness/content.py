"""The bytes of a block, made from its key and checked against it.

In real runs a block's content is a fixed random page-set, drawn from the run's seed, XORed with
eight bytes of the key: cheap to make, different for every block, and every byte is checked. In
phantom runs the content is the block's tag.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlbench.emu.memory import PAGE_BYTES, Buffer, PhantomBuffer
from cxlbench.kv.payload import ObjectTag


class BlockContent:
    """Makes and checks the content of blocks of one size."""

    def __init__(self, nbytes: int, *, phantom: bool, seed: int) -> None:
        if nbytes < 8 or nbytes % 8:
            raise ValueError(f"blocks must be whole multiples of 8 B, got {nbytes} B")
        self.nbytes = nbytes
        self.phantom = phantom
        self._free: list[npt.NDArray[np.uint8]] = []
        if not phantom:
            draw = np.random.default_rng(seed)
            self._base = draw.integers(0, 1 << 63, nbytes // 8, dtype=np.uint64)
            self._scratch = np.empty_like(self._base)

    def empty(self) -> Buffer:
        """Return a buffer to read into; ``recycle`` it when it is not needed any more.

        A used one is spoiled in every page first: what a read leaves out must not look right.
        """
        if self.phantom:
            return PhantomBuffer(self.nbytes)
        if not self._free:
            return np.zeros(self.nbytes, dtype=np.uint8)
        buffer = self._free.pop()
        np.invert(buffer[::PAGE_BYTES], out=buffer[::PAGE_BYTES])
        return buffer

    def make(self, key: bytes) -> Buffer:
        """Return a buffer with the content of the block ``key``."""
        if self.phantom:
            return PhantomBuffer(self.nbytes, ObjectTag.of(key))
        buffer = self._free.pop() if self._free else np.empty(self.nbytes, dtype=np.uint8)
        np.bitwise_xor(self._base, _word(key), out=buffer.view(np.uint64))
        return buffer

    def holds(self, buffer: Buffer, key: bytes) -> bool:
        """Whether every byte of ``buffer`` is the content of ``key``."""
        if isinstance(buffer, PhantomBuffer):
            return buffer.tag == ObjectTag.of(key)
        np.bitwise_xor(self._base, buffer.view(np.uint64), out=self._scratch)
        return bool((self._scratch == _word(key)).all())

    def recycle(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        if isinstance(buffer, np.ndarray):
            self._free.append(buffer)


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[8:16], "little"))
