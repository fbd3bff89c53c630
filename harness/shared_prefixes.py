"""A seeded generator of single-turn requests with shared prefixes, like Dynamo's.

Requests belong to groups; all prompts of a group begin with the same tokens and end with tokens of
their own (*unique length*). A longer unique part means fewer hits. Arrivals are Poisson. A group is
drawn uniformly, or by Zipf's law with exponent ``skew``.

Units: tokens, s, requests/s. The workload is in mode *whole blocks*. Left out: prefixes of
prefixes (a tree of depth two and more).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixKnobs:
    """What to generate.

    Attributes:
        requests: number of requests, 1 or more.
        rate_per_s: mean arrivals; gaps are exponential.
        input_tokens: mean length of a prompt.
        input_stddev: its standard deviation, of the unique part.
        unique_tokens: mean length of what only this prompt has, at most ``input_tokens``.
        output_tokens: mean length of an answer.
        output_stddev: its standard deviation.
        groups: prompts of a group share their first ``input_tokens - unique_tokens`` tokens.
        skew: 0 draws groups uniformly, 1 by Zipf's law.
        block_tokens: tokens in a block.
        seed: same knobs and seed, same workload.

    Raises:
        WorkloadError: a knob is out of its range.
    """

    requests: int
    rate_per_s: float
    input_tokens: float
    unique_tokens: float
    output_tokens: float
    groups: int
    input_stddev: float = 0.0
    output_stddev: float = 0.0
    skew: float = 0.0
    block_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("requests", self.requests, 1),
            ("groups", self.groups, 1),
            ("block_tokens", self.block_tokens, 1),
            ("rate_per_s", self.rate_per_s, 1e-9),
            ("input_tokens", self.input_tokens, 1),
            ("unique_tokens", self.unique_tokens, 1),
            ("output_tokens", self.output_tokens, 1),
            ("input_stddev", self.input_stddev, 0),
            ("output_stddev", self.output_stddev, 0),
            ("skew", self.skew, 0),
        ):
            if not least <= value < float("inf"):
                raise WorkloadError(f"{name}={value}: must be finite and {least} or more")
        if self.unique_tokens > self.input_tokens:
            raise WorkloadError(
                f"unique_tokens={self.unique_tokens} is more than input_tokens={self.input_tokens}"
            )


def generate_shared_prefixes(knobs: SharedPrefixKnobs, *, name: str) -> Workload:
    """Return the workload; block ids of the groups come first, then each request's own."""
    random = Random(f"cxlbench/shared-prefixes/{knobs.seed}")
    block = knobs.block_tokens
    shared_tokens = round(knobs.input_tokens - knobs.unique_tokens)
    shared_blocks = shared_tokens // block
    weights = list(accumulate((rank + 1) ** -knobs.skew for rank in range(knobs.groups)))
    next_block = knobs.groups * shared_blocks
    arrival_s = 0.0
    requests = []
    for number in range(knobs.requests):
        arrival_s += random.expovariate(knobs.rate_per_s)
        (group,) = random.choices(range(knobs.groups), cum_weights=weights)
        unique = max(1, round(random.gauss(knobs.unique_tokens, knobs.input_stddev)))
        tokens = shared_tokens + unique
        own = tokens // block - shared_blocks
        first = group * shared_blocks
        requests.append(
            Request(
                request_id=number,
                session=f"r{number}",
                turn=1,
                arrival_s=arrival_s,
                input_tokens=tokens,
                output_tokens=max(1, round(random.gauss(knobs.output_tokens, knobs.output_stddev))),
                block_ids=(
                    *range(first, first + shared_blocks),
                    *range(next_block, next_block + own),
                ),
            )
        )
        next_block += own
    return Workload(name, block, Mode.WHOLE_BLOCKS, tuple(requests), has_sessions=False)
