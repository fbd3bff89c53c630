"""Where a block's bytes lie in vLLM's KV cache, and how they are moved, whole blocks only.

vLLM keeps one tensor per attention layer, whose first dimension counts blocks: here on the CPU
``[blocks, kv_heads, block_tokens, 2 * head_dim]``, elsewhere with other inner dimensions. Inside a
block the order is the attention backend's business (on the CPU, K is packed in groups of 32 tokens
in a way that depends on the instruction set), so a block is opaque: it is only ever put back as a
whole, under an identity that names the layout (``vllm_identity``).

A block as the tier sees it is the concatenation of its parts over the layers, in the order in which
vLLM registers them. Units: bytes. Left out: layouts whose blocks are not outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cxlbench.emu.memory import Bytes


class LayoutError(ValueError):
    """The engine's KV cache has a form that is not supported."""


class VllmBlocks:
    """The registered KV caches of one worker, as blocks.

    ``kv_caches`` maps layer names to tensors; layers that share one tensor count once. With
    smaller kernel blocks than engine blocks, a tensor has a multiple of ``num_blocks`` rows.

    Raises:
        LayoutError: a tensor's first dimension does not count blocks.
    """

    def __init__(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        if not kv_caches:
            raise LayoutError("the engine registered no KV cache")
        self._parts: list[tuple[Any, int, int]] = []
        seen: set[tuple[int, tuple[int, ...]]] = set()
        offset = 0
        for name, cache in kv_caches.items():
            if not isinstance(cache, torch.Tensor):
                raise LayoutError(f"the KV cache of {name} is a {type(cache).__name__}, no tensor")
            if num_blocks < 1 or cache.shape[0] % num_blocks or not cache.shape[0]:
                raise LayoutError(
                    f"the KV cache of {name} has the shape {tuple(cache.shape)}; the first "
                    f"dimension must count the {num_blocks} blocks"
                )
            place = (cache.data_ptr(), tuple(cache.shape))
            if place in seen:
                continue
            seen.add(place)
            rows = cache.unflatten(0, (num_blocks, cache.shape[0] // num_blocks))
            nbytes = rows[0].numel() * rows.element_size()
            self._parts.append((rows, offset, nbytes))
            offset += nbytes
        self.block_bytes = offset
        self.num_blocks = num_blocks

    def gather(self, block_id: int, buffer: Bytes) -> None:
        """Copy block ``block_id`` into ``buffer``, ``block_bytes`` bytes of host memory."""
        target = torch.from_numpy(buffer)
        for rows, offset, nbytes in self._parts:
            row = rows[block_id]
            target[offset : offset + nbytes].view(row.dtype).view(row.shape).copy_(row)

    def scatter(self, block_id: int, buffer: Bytes) -> None:
        """Copy ``buffer`` into block ``block_id``; ``gather`` of it filled the buffer."""
        source = torch.from_numpy(buffer)
        for rows, offset, nbytes in self._parts:
            row = rows[block_id]
            row.copy_(source[offset : offset + nbytes].view(row.dtype).view(row.shape))
