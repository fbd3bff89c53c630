"""What a sweep says: how often each claim holds, and which keys its measured value hangs on.

The *share* of a claim is the share of points in which it holds, has the right direction only, or
fails. Which keys matter is told by rank correlation (Spearman): 1 where the measured value always
rises with the key, -1 where it always falls, 0 where knowing the key says nothing. It sees any
monotone relation, whatever its shape, and nothing that goes up and down. A key that is a choice has
no order; for it, ``strength`` is the square root of the share of the ranks' variance that lies
between the choices (the correlation ratio), without a sign.

Of ``n`` points with no relation at all, one correlation in twenty exceeds about ``2 / sqrt(n - 1)``
by chance: only stronger ones are listed, and with few points none is. A choice's strength is
corrected for what chance alone would give.

Units: of the claims.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxlbench.harness.results import Verdict
from cxlbench.harness.sweep_axes import as_number
from cxlbench.harness.sweep_rows import SweepFile

LEAST_POINTS = 5
"""Fewer say nothing about which keys matter."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWeight:
    """How much a claim's value hangs on a key: -1 to 1; of choices 0 to 1."""

    key: str
    strength: float
    choice: bool = False

    def __str__(self) -> str:
        return f"{self.key} {self.strength:{'' if self.choice else '+'}.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimShare:
    """One claim over all points of a sweep. Counts are points."""

    claim: str
    points: int
    holds: int
    direction: int
    fails: int
    undecided: int
    least: float | None
    median: float | None
    greatest: float | None
    keys: tuple[KeyWeight, ...]
    """Those that matter, the strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """What a file says."""

    experiment: str
    points: int
    done: int
    partial: bool
    errors: tuple[tuple[int, str], ...]
    """Point and error of those that raised."""
    broken_checks: tuple[tuple[str, int], ...]
    """Laws that did not hold, and in how many points."""
    threshold: float | None
    """The correlation that chance seldom exceeds; None with too few points."""
    claims: tuple[ClaimShare, ...]


def summarize(file: SweepFile) -> SweepSummary:
    """Return what a sweep's rows say."""
    rows = [row for row in file.rows if row.result.error is None]
    names = dict.fromkeys(claim.name for row in rows for claim in row.result.claims)
    broken = Counter(check.name for row in rows for check in row.result.checks if not check.ok)
    enough = len(rows) >= LEAST_POINTS
    return SweepSummary(
        experiment=file.header.experiment,
        points=file.header.points,
        done=len(file.rows),
        partial=file.partial,
        errors=tuple((r.point, r.result.error) for r in file.rows if r.result.error is not None),
        broken_checks=tuple(sorted(broken.items())),
        threshold=2 / math.sqrt(len(rows) - 1) if enough else None,
        claims=tuple(_share(file, name) for name in names),
    )


def _share(file: SweepFile, name: str) -> ClaimShare:
    found = [
        (row.keys, claim) for row in file.rows for claim in row.result.claims if claim.name == name
    ]
    verdicts = Counter(claim.verdict for _, claim in found)
    measured = [(keys, c.value) for keys, c in found if c.value is not None]
    values = np.array([value for _, value in measured], dtype=np.float64)
    finite = np.isfinite(values)
    shown = values[finite]
    weights = [
        weight
        for key in file.header.keys
        if (weight := key_weight(key, [keys.get(key) for keys, _ in measured], values)) is not None
    ]
    weights.sort(key=lambda weight: (-abs(weight.strength), weight.key))
    return ClaimShare(
        claim=name,
        points=len(found),
        holds=verdicts[Verdict.HOLDS],
        direction=verdicts[Verdict.DIRECTION],
        fails=verdicts[Verdict.FAILS],
        undecided=verdicts[Verdict.OPEN],
        least=float(shown.min()) if len(shown) else None,
        median=float(np.median(shown)) if len(shown) else None,
        greatest=float(shown.max()) if len(shown) else None,
        keys=tuple(weights),
    )


def key_weight(key: str, texts: Sequence[str | None], values: Floats) -> KeyWeight | None:
    """Return how much ``values`` hang on a key, or None where that is no more than chance.

    ``texts`` are the key's value at each point, None where it kept its own.
    """
    there = [n for n, text in enumerate(texts) if text is not None and not math.isnan(values[n])]
    given = [str(texts[n]) for n in there]
    if len(there) < LEAST_POINTS or len(set(given)) < 2:
        return None
    reached = ranks(values[there])
    numbers = [as_number(text) for text in given]
    is_choice = any(number is None for number in numbers)
    if is_choice:
        strength = choice_strength(given, reached)
    else:
        strength = correlation(ranks(np.array(numbers, dtype=np.float64)), reached)
    if abs(strength) <= 2 / math.sqrt(len(there) - 1):
        return None
    return KeyWeight(key=key, strength=strength, choice=is_choice)


def ranks(values: Floats) -> Floats:
    """Return ranks from 1; equal values share the mean of theirs. Shape (n,)."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)


def correlation(one: Floats, other: Floats) -> float:
    """Return Pearson's correlation of two rankings, 0 where one does not vary."""
    one, other = one - one.mean(), other - other.mean()
    scale = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / scale if scale else 0.0


def choice_strength(choices: Sequence[str], reached: Floats) -> float:
    """Return the correlation ratio of ranks and choices, less what chance alone gives."""
    total = float(((reached - reached.mean()) ** 2).sum())
    if not total:
        return 0.0
    groups = [reached[[c == one for c in choices]] for one in dict.fromkeys(choices)]
    between = sum(len(g) * (float(g.mean()) - float(reached.mean())) ** 2 for g in groups)
    count, kinds = len(choices), len(groups)
    if count <= kinds:
        return 0.0
    corrected = 1 - (1 - between / total) * (count - 1) / (count - kinds)
    return math.sqrt(max(0.0, corrected))
