"""From a trace's block ids to chained ones, and from its block size to another.

**Chaining.** A trace's id is taken together with the block before it: each pair (chained parent,
trace id) gets one new number, in order of appearance from 0. The result is chained whatever the
trace promises; where the trace's ids are chained already it is a mere renaming.

**Another block size.** Only what follows exactly from the trace is done:

- *larger*, a multiple: the id of the last small block names the whole prefix, so it is the id of
  the large block.
- *smaller*, a divisor: block ``c`` becomes ``c * k + {0 .. k - 1}``, cut to the prompt. No reuse
  is invented, but two blocks that differ late are taken to differ from their first token on. Where
  a trace records full blocks only, the prompt's tail has no id and smaller blocks are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cxlbench.harness.requests import Mode, blocks_of

ROOT = -1


class Chains:
    """Numbers chained blocks: one number for each (parent, trace id) in the scope."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 0

    def new_scope(self) -> None:
        """Forget the trace's ids, not the numbers given out: ids of the next scope are others."""
        self._numbers = {}

    def extend(self, chain: list[int], trace_ids: Iterable[int]) -> None:
        """Append the numbers of ``trace_ids``, which follow ``chain`` in the prompt."""
        numbers = self._numbers
        parent = chain[-1] if chain else ROOT
        for trace_id in trace_ids:
            key = (parent, trace_id)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = self._next
                self._next += 1
            chain.append(number)
            parent = number

    def fresh(self, count: int) -> tuple[int, ...]:
        """Return ``count`` numbers that nothing else has."""
        first = self._next
        self._next += count
        return tuple(range(first, self._next))


@dataclass(frozen=True, slots=True)
class Blocking:
    """How the ids of a trace become those of a workload.

    Attributes:
        native_tokens: block size of the trace.
        block_tokens: block size of the workload.
        mode: which blocks have ids in the workload.
        partial_recorded: whether the trace gives an id to a partial last block.

    Raises:
        ValueError: the block sizes do not divide, or the trace lacks what smaller blocks need.
    """

    native_tokens: int
    block_tokens: int
    mode: Mode
    partial_recorded: bool

    def __post_init__(self) -> None:
        native, asked = self.native_tokens, self.block_tokens
        if asked < 1 or (native % asked and asked % native):
            raise ValueError(
                f"block_tokens={asked}: blocks of {native} tokens can be regrouped exactly only "
                f"to a multiple{' or a divisor' if self.partial_recorded else ''} of {native}"
            )
        if asked < native and not self.partial_recorded:
            raise ValueError(
                f"block_tokens={asked}: the trace records full blocks of {native} tokens only, "
                f"so the tail of a prompt has no ids; ask for {native} or a multiple of it"
            )

    def recorded(self, input_tokens: int) -> int:
        """Return how many ids the trace must record for a prompt of this length."""
        kept = Mode.AS_RECORDED if self.partial_recorded else Mode.WHOLE_BLOCKS
        return blocks_of(input_tokens, self.native_tokens, kept)

    def regroup(self, chain: Sequence[int], input_tokens: int) -> tuple[int, ...]:
        """Return the workload's block ids of a prompt from its chained native ids."""
        kept = self.mode if self.partial_recorded else Mode.WHOLE_BLOCKS
        count = blocks_of(input_tokens, self.block_tokens, kept)
        if self.block_tokens == self.native_tokens:
            return tuple(chain[:count])
        if self.block_tokens < self.native_tokens:
            parts = self.native_tokens // self.block_tokens
            split = [number * parts + part for number in chain for part in range(parts)]
            return tuple(split[:count])
        group = self.block_tokens // self.native_tokens
        merged = list(chain[group - 1 :: group])
        if len(merged) < count:
            merged.append(chain[-1])
        return tuple(merged[:count])
