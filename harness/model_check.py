"""A run on real bytes beside the same work in virtual time: block reads, real against model.

The bar is 10 % at p50 and at p90 of block reads, compute time excluded. What is left over has two
parts. *The host*: bytes that were in place later than the emulated hardware had them (wake-ups,
copies, checksums, file I/O); it is known block by block. *The order*: requests that overlap
differently in the two runs, partly since the host's lateness of one block moves what comes after
it; it is what remains when each block's own lateness is taken away. Units: s; errors are shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cxlbench.harness.metrics import Spread
from cxlbench.harness.replay import ReplayResult
from cxlbench.harness.results import Claim, Verdict

MAX_MODEL_ERROR = 0.10
"""How far the wall-clock run's block reads may be from the model's, at p50 and p90."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """How far real block reads are from the model's: (real - model) / model."""

    p50: float
    p90: float
    p50_order: float
    """The same without the lateness of each block: other order and overlap, not a late host."""
    p90_order: float
    late: Spread
    """How long after the emulated hardware the real bytes were in place."""
    real_blocks: int
    model_blocks: int
    timing_kept: bool

    @property
    def within(self) -> bool:
        """Whether both percentiles are within the bar."""
        return max(abs(self.p50), abs(self.p90)) <= MAX_MODEL_ERROR

    @property
    def mark(self) -> str:
        """What a table says of it."""
        if not self.real_blocks and not self.model_blocks:
            return "no reads"
        return "yes" if self.within else "NO"

    def explanation(self) -> str:
        """Say what the difference consists of."""
        late = self.late
        parts = [
            f"p50 {self.p50:+.1%}, p90 {self.p90:+.1%}",
            f"the host was late by p50 {late.p50_s * 1e3:.2f} ms, p90 {late.p90_s * 1e3:.2f} ms; "
            f"without that p50 {self.p50_order:+.1%}, p90 {self.p90_order:+.1%}, from requests "
            "that overlap differently",
        ]
        if self.real_blocks != self.model_blocks:
            parts.append(f"blocks read: real {self.real_blocks:,}, model {self.model_blocks:,}")
        if not self.timing_kept:
            parts.append("this host did not keep the timing: take the model's figures")
        return "; ".join(parts)

    def claim(self, tier: str) -> Claim:
        """Return the row of a result file; nothing is decided by a run that was not in time."""
        missed = Verdict.FAILS if self.timing_kept else Verdict.OPEN
        return Claim(
            statement=f"{tier}: block reads on real bytes are where the model has them",
            source="harness/model_check.py",
            expected=f"p50 and p90 within {MAX_MODEL_ERROR:.0%}",
            measured=self.explanation(),
            verdict=Verdict.HOLDS if self.within else missed,
        )


def compare(wall: ReplayResult, virtual: ReplayResult) -> ModelCheck:
    """Compare the block reads of two runs of the same work."""
    real, model = wall.figures.block_read, virtual.figures.block_read
    due = wall.figures.block_due
    return ModelCheck(
        p50=_relative(real.p50_s, model.p50_s),
        p90=_relative(real.p90_s, model.p90_s),
        p50_order=_relative(due.p50_s, model.p50_s),
        p90_order=_relative(due.p90_s, model.p90_s),
        late=wall.figures.block_late,
        real_blocks=real.count,
        model_blocks=model.count,
        timing_kept=wall.fidelity is not None and wall.fidelity.trusted,
    )


def _relative(real_s: float, model_s: float) -> float:
    if not model_s:
        return math.inf if real_s else 0.0
    return real_s / model_s - 1
