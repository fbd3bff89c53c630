"""A small serving engine: a GPU that prefills one request at a time, and its prefix cache.

Prefill is compute-bound: ``2 * parameters`` FLOP a token at the share of the peak that the
accelerator profile states. Decode is bound by reading the weights once a token. The GPU's KV
space is a prefix cache of whole blocks, LRU with chains losing their tails first.

Units: tokens, s, blocks. Left out: attention's quadratic part, batching, chunked prefill,
preemption (the serving model of the papers' figures is a different one).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cxlbench.devices.profile import AcceleratorProfile
from cxlbench.kv.geometry import ModelShape


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What a model costs on an accelerator."""

    shape: ModelShape
    accelerator: AcceleratorProfile

    def prefill_s(self, tokens: int) -> float:
        """Return the time to prefill ``tokens``, s."""
        flop = 2.0 * self.shape.parameters * tokens
        return flop / (self.accelerator.peak_compute * self.accelerator.prefill_share)

    def decode_s(self, tokens: int) -> float:
        """Return the time to decode ``tokens`` one after the other, s."""
        weights = self.shape.parameters * self.shape.dtype_bytes
        return tokens * weights / self.accelerator.memory_bandwidth


GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that engines use by default; what the weights leave is KV space."""


def kv_blocks(shape: ModelShape, accelerator: AcceleratorProfile, block_bytes: int) -> int:
    """Return how many blocks of ``block_bytes`` a GPU has room for beside the weights."""
    weights = shape.parameters * shape.dtype_bytes
    room = int(accelerator.memory_capacity * GPU_MEMORY_SHARE) - weights
    return max(0, room) // block_bytes


class GpuPrefixCache:
    """Blocks in the GPU's KV space, found by key."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"capacity must not be negative, got {capacity_blocks} blocks")
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def match(self, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of ``chain`` are here."""
        blocks = self._blocks
        for index, key in enumerate(chain):
            if key not in blocks:
                return index
        return len(chain)

    def use(self, chain: Sequence[bytes]) -> None:
        """Note that a request has ``chain`` in the GPU now; the head becomes the newest."""
        if not self.capacity_blocks:
            return
        blocks = self._blocks
        for key in reversed(chain):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self.capacity_blocks:
            blocks.popitem(last=False)
