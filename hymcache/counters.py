"""What the parts of the tier counted, for the result tables. Every count only grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConnectorCounters:
    """What one connector saw, in blocks; ``failed`` also counts control calls without an answer."""

    loaded: int = 0
    stored: int = 0
    skipped: int = 0
    exists: int = 0
    mismatched: int = 0
    timed_out: int = 0
    failed: int = 0


@dataclass(slots=True)
class MasterCounters:
    """What Master did."""

    lookups: int = 0
    looked_up_keys: int = 0
    registered: int = 0
    evicted: int = 0
    evicted_by_segment: int = 0
    leases_expired: int = 0
    writes_expired: int = 0
    dropped: int = 0
