"""Claims of the papers, and verdicts on them from measured numbers only.

A claim states a number and how it is meant: *about* that much, *at least*, *at most*; for ratios
and differences there is a neutral value (1 or 0) at which nothing would be gained. The verdict is
``holds`` within a band around the number, ``direction only`` when the measured value lies outside
the band but on the same side of the neutral value, by at least a tenth of what the claim gains, and
``does not hold`` otherwise. Bands are
relative to the number, and the same for all claims unless a claim says why not.

Units: none here; the claim's text carries them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from cxlbench.harness.results import Verdict

BAND = 0.2
"""How far from the paper's number, relatively, a measured one may lie and the claim still holds."""


LEAST_GAIN = 0.1
"""The share of the claimed gain below which a measured one is no direction, but noise."""


class Sense(enum.StrEnum):
    """How a claim's number is meant."""

    ABOUT = "about"
    AT_LEAST = "at least"
    AT_MOST = "at most"
    TRUE = "true"
    """The claim is a statement that is true (1) or not (0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """One statement of a paper with its number.

    Attributes:
        name: short, unique within its experiment.
        statement: in our words.
        source: section or figure.
        expected: the paper's number.
        sense: how the number is meant.
        neutral: the value at which there is neither gain nor loss; None where there is none.
        unit: of the number: ``x`` for ratios, ``%``, ``GB/s``.
        band: relative width of *about*.
    """

    name: str
    statement: str
    source: str
    expected: float = 1.0
    sense: Sense = Sense.ABOUT
    neutral: float | None = None
    unit: str = ""
    band: float = BAND

    def judge(self, measured: float | None, *, reason: str = "", at: str = "") -> JudgedClaim:
        """Return the claim with its verdict; None or NaN is *not decided*.

        ``reason`` is what an ablation found; ``at`` names the load at which it was measured.
        """
        return JudgedClaim(
            name=self.name,
            statement=self.statement,
            source=self.source,
            expected=self._written(self.expected, sense=True),
            measured="-" if measured is None else self._written(measured),
            value=measured,
            verdict=self.verdict(measured),
            reason=reason,
            at=at,
        )

    def verdict(self, measured: float | None) -> Verdict:
        """Return what ``measured`` says about this claim."""
        if measured is None or math.isnan(measured):
            return Verdict.OPEN
        if self._holds(measured):
            return Verdict.HOLDS
        if self.neutral is not None and self.sense is not Sense.TRUE:
            claimed = self.expected - self.neutral
            if claimed and (measured - self.neutral) / claimed >= LEAST_GAIN:
                return Verdict.DIRECTION
        return Verdict.FAILS

    def _holds(self, measured: float) -> bool:
        slack = abs(self.expected) * self.band
        if self.sense is Sense.TRUE:
            return measured >= 1
        if self.sense is Sense.AT_LEAST:
            return measured >= self.expected
        if self.sense is Sense.AT_MOST:
            return measured <= self.expected
        return abs(measured - self.expected) <= slack

    def _written(self, value: float, *, sense: bool = False) -> str:
        if self.sense is Sense.TRUE:
            return "yes" if value >= 1 else "no"
        words = {Sense.AT_LEAST: "at least ", Sense.AT_MOST: "at most "}.get(self.sense, "")
        unit = f" {self.unit}" if self.unit else ""
        return f"{words if sense else ''}{value:.3g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A claim with what was measured for it."""

    name: str
    statement: str
    source: str
    expected: str
    measured: str
    value: float | None
    verdict: Verdict
    reason: str = ""
    at: str = ""
