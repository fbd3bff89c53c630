"""Latin-hypercube samples: few points that still try every part of every range.

For ``count`` points, a range is cut into ``count`` equal strata; each stratum is used once, at a
random place inside it, and the order is shuffled for each key on its own (McKay, Beckman, Conover,
1979). Choices have no strata: they are cycled, so that each is used equally often (to one), and
shuffled too.

Each key draws from a generator of its own, made of the seed and the key's name. One more key
leaves the values of the others as they are, and the same seed gives the same points everywhere.

Left out: optimizing the design (maximin distance, correlation control).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def strata(key: str, count: int, *, seed: int) -> list[float]:
    """Return ``count`` places in [0, 1), one in each of ``count`` equal strata, shuffled.

    Raises:
        ValueError: ``count`` is below 1.
    """
    random = _generator(key, count, seed)
    places = [min((stratum + random.random()) / count, _BELOW_ONE) for stratum in range(count)]
    random.shuffle(places)
    return places


def cycled(key: str, choices: Sequence[T], count: int, *, seed: int) -> list[T]:
    """Return ``count`` choices, each equally often (to one), shuffled.

    Raises:
        ValueError: ``count`` is below 1, or there is no choice.
    """
    if not choices:
        raise ValueError(f"{key}: there is nothing to choose from")
    random = _generator(key, count, seed)
    chosen = [choices[number % len(choices)] for number in range(count)]
    random.shuffle(chosen)
    return chosen


_BELOW_ONE = 1 - 2**-53


def _generator(key: str, count: int, seed: int) -> Random:
    if count < 1:
        raise ValueError(f"count={count}: a sample has 1 point or more")
    return Random(f"cxlbench/latin-hypercube/{seed}/{key}")


__all__ = ["cycled", "strata"]
