"""From a model's shape to bytes of KV: HyMCache's 16, 32 and 168 MB blocks follow from here.

A token keeps one key and one value vector per layer and KV head, so it takes
``2 x layers x kv_heads x head_dim x dtype_bytes`` bytes; a block is ``block_tokens`` of them. Under
tensor parallelism each rank holds its share of the KV heads, rounded up (engines replicate heads
when there are fewer than ranks), and sizes are per rank. Sizes are bytes; the papers' MB of KV are
binary (16 MB is 16 MiB).

Left out: latent attention (MLA), sliding windows, quantization scales beside the KV, padding that
an engine adds to a block.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

BF16_BYTES = 2


class GeometryError(ValueError):
    """A model shape, or a size asked of one, that cannot be."""


def _positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(f"{what} is {value!r}, expected a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its KV size, and its parameter count for the engine model.

    ``kv_heads`` are the heads that are stored (fewer than query heads under grouped-query
    attention), ``query_heads`` those that attend (None: as many as are stored); ``dtype_bytes`` is
    of the KV cache; ``parameters`` are all weights; ``source`` says where the shape stands. Raises
    ``GeometryError`` for a shape that is not positive and whole.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: int
    dtype_bytes: int = BF16_BYTES
    query_heads: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise GeometryError("a model shape needs a name")
        for member in fields(self):
            unsaid = member.name == "query_heads" and self.query_heads is None
            if member.name not in ("name", "source") and not unsaid:
                _positive(f"{member.name} of model {self.name!r}", getattr(self, member.name))

    @property
    def attending_heads(self) -> int:
        """Heads that attend: query heads."""
        return self.query_heads or self.kv_heads

    def kv_bytes_per_token(self, *, tp_size: int = 1) -> int:
        """Return the bytes of KV per token on each of ``tp_size`` ranks."""
        _positive("tp_size", tp_size)
        heads = -(-self.kv_heads // tp_size)
        return 2 * self.layers * heads * self.head_dim * self.dtype_bytes

    def block_bytes(self, block_tokens: int, *, tp_size: int = 1) -> int:
        """Return the bytes of one KV block of ``block_tokens`` tokens on each rank."""
        _positive("block_tokens", block_tokens)
        return block_tokens * self.kv_bytes_per_token(tp_size=tp_size)


LLAMA_3_1_8B = ModelShape(
    name="Llama-3.1-8B",
    layers=32,
    kv_heads=8,
    head_dim=128,
    parameters=8_030_261_248,
    query_heads=32,
    source="config.json of meta-llama/Llama-3.1-8B",
)
QWEN_2_5_32B = ModelShape(
    name="Qwen2.5-32B",
    layers=64,
    kv_heads=8,
    head_dim=128,
    parameters=32_763_876_352,
    query_heads=40,
    source="config.json of Qwen/Qwen2.5-32B",
)
OPT_30B = ModelShape(
    name="OPT-30B",
    layers=48,
    kv_heads=56,
    head_dim=128,
    parameters=29_974_540_288,
    query_heads=56,
    source="config.json of facebook/opt-30b",
)
DEEPSEEK_R1_DISTILL_LLAMA_8B = ModelShape(
    name="DeepSeek-R1-Distill-Llama-8B",
    layers=32,
    kv_heads=8,
    head_dim=128,
    parameters=8_030_261_248,
    query_heads=32,
    source="config.json of deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
)

MODEL_SHAPES = (LLAMA_3_1_8B, QWEN_2_5_32B, OPT_30B, DEEPSEEK_R1_DISTILL_LLAMA_8B)
"""The models of both papers; a user's own is another ``ModelShape``."""


def model_shape(name: str) -> ModelShape:
    """Return the built-in shape of that name, in any case; ``GeometryError`` names the nearest."""
    for shape in MODEL_SHAPES:
        if shape.name.lower() == name.lower():
            return shape
    names = [shape.name for shape in MODEL_SHAPES]
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names
    raise GeometryError(f"there is no model shape {name!r}; did you mean {' or '.join(close)}?")
