"""What a step of the engine costs: the roofline of a model on an accelerator.

A step computes chunks of prompts and one token of every decoding sequence together. It takes the
longer of two times, and the engine's fixed share beside it:

- compute: ``2 * parameters`` FLOP a token, and attention's ``4 * layers * query heads * head_dim``
  FLOP for every pair of a token and one that it attends to (the part that grows with the square of
  the prompt), at the share of the peak that prefill reaches;
- memory: the weights once, and the KV of everything attended to once, at the share of the memory's
  bandwidth that decode reaches.

Units: tokens, FLOP, bytes, s. Left out: tensor parallelism, kernels that are slower at small
batches, the cost of sampling by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from cxlbench.devices.profile import AcceleratorProfile, ServingEngineProfile
from cxlbench.kv.geometry import ModelShape


class ModelDoesNotFitError(ValueError):
    """The GPU has no room for a model's weights, or none for KV beside them."""


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    tokens: int = 0
    """Of prompts and of answers."""
    pairs: float = 0.0
    """Token and attended token, over all tokens of the step."""
    attended_tokens: int = 0
    """Whose KV is read once, over all sequences of the step."""

    def add_chunk(self, tokens: int, context: int) -> None:
        """Add ``tokens`` of one sequence that has ``context`` tokens before them."""
        self.tokens += tokens
        self.pairs += tokens * (context + (tokens + 1) / 2)
        self.attended_tokens += context + tokens


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on an accelerator under an engine."""

    shape: ModelShape
    accelerator: AcceleratorProfile
    engine: ServingEngineProfile

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.shape.parameters * self.shape.dtype_bytes

    def step_s(self, work: StepWork) -> float:
        """Return how long a step takes, s."""
        shape, gpu = self.shape, self.accelerator
        flop = 2.0 * shape.parameters * work.tokens
        flop += 4.0 * shape.layers * shape.attending_heads * shape.head_dim * work.pairs
        compute_s = flop / (gpu.peak_compute * gpu.prefill_share)
        nbytes = self.weight_bytes + work.attended_tokens * shape.kv_bytes_per_token()
        share = 1.0 if gpu.bandwidth_share is None else gpu.bandwidth_share
        memory_s = nbytes / (gpu.memory_bandwidth * share)
        return max(compute_s, memory_s) + self.engine.step_overhead

    def kv_space_bytes(self) -> int:
        """Return the GPU memory that is left for KV, bytes.

        Raises:
            ModelDoesNotFitError: nothing is left, or the weights alone are too large.
        """
        usable = int(self.accelerator.memory_capacity * self.engine.memory_share)
        room = usable - self.weight_bytes - self.engine.activation_memory
        if room <= 0:
            gib = 1 << 30
            raise ModelDoesNotFitError(
                f"{self.shape.name} does not fit {self.accelerator.name}: its weights take "
                f"{self.weight_bytes / gib:.1f} GiB and activations "
                f"{self.engine.activation_memory / gib:.1f} GiB of {usable / gib:.1f} GiB usable; "
                "take a larger GPU or a smaller model"
            )
        return room
