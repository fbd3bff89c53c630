"""What became of each key of a batch call: one answer per key, never one for the batch."""

from __future__ import annotations

from enum import Enum


class KeyResult(Enum):
    """The outcome for one KV block."""

    HIT = "hit"
    """The block is there (lookup), or its verified bytes are in the caller's buffer (load)."""
    MISS = "miss"
    """The block is not there, or what was there did not verify."""
    EXISTS = "exists"
    """A store found the block present, or being written by somebody else."""
    STORED = "stored"
    """All bytes are in place and the block is registered."""
    NO_SPACE = "no space"
    """A store was refused at once; a later turn may try again."""
    LEASE_EXPIRED = "lease expired"
    """The time in which the address was promised to stay valid is over."""
    TIMEOUT = "timeout"
    """The deadline came first; the engine recomputes."""
    ERROR = "error"
    """A device, link or node failed; nothing was delivered."""
    CANCELLED = "cancelled"
    """The request was released before this block was done."""

    @property
    def delivered(self) -> bool:
        """Whether the right bytes are in the caller's buffer (for a load)."""
        return self is KeyResult.HIT
