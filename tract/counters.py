"""What a TraCT connector counts. Units: blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TractCounters:
    """What the work of a connector came to."""

    hits: int = 0
    """Found and pinned by lookups."""
    loaded: int = 0
    mismatched: int = 0
    """Read, and not what their entry says."""
    timed_out: int = 0
    stored: int = 0
    exists: int = 0
    skipped: int = 0
    """Refused for want of space."""
    failed: int = 0
    """Reservations that a recovery took back."""
