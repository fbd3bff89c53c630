"""What a KV-cache tier is to a cluster of servers: a connector for each, and what it counted.

A ``TierMaker`` builds one on a clock for a ``TierSite``: how many servers there are, how large a
block is, which profiles hold. Prefill servers are numbered from 0, decode servers follow. A server
without a connector recomputes. Connectors keep the contract of ``kv/connector.py``, so the real
HyMCache and TraCT stand beside models of other tiers. A user's tier is named ``module:object``.

Units: bytes at full size, tokens, s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cxlbench.devices.profile import Profile, load_as
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.kv.connector import BlockTimes, Connector

P = TypeVar("P", bound=Profile)


class ProfileSource(Protocol):
    """Where profiles come from: ``Context.profile``, or the built-in ones."""

    def __call__(self, kind: type[P], name: str, /) -> P:
        """Return a profile of a kind by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSite:
    """Where a tier is put."""

    prefill_servers: int
    block_bytes: int
    block_tokens: int
    decode_servers: int = 0
    profile: ProfileSource = load_as
    options: Mapping[str, Any] = field(default_factory=dict)
    """A tier's own settings, by name; it refuses those that it does not know."""
    seed: int = 0
    on_block: Callable[[BlockTimes], None] | None = None
    """Called with the times of every block read."""


class Tier(Protocol):
    """A running tier."""

    name: str
    pipes: Sequence[Pipe]
    """Everything that moves bytes, for utilization and conservation."""

    def connector(self, server: int) -> Connector | None:
        """Return the connector of a server; None where it has none."""

    def counters(self) -> Mapping[str, float]:
        """Return what the tier counted, by name with unit."""

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name; empty when all came back."""

    async def start(self) -> None:
        """Start what runs in the background."""

    async def quiesce(self) -> None:
        """Wait until background work has ended."""

    async def close(self) -> None:
        """End, and give everything back."""


TierMaker = Callable[[Clock, TierSite], Tier]
