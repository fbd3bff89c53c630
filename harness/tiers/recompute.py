"""No tier: what the GPU does not hold is computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.connector import Connector


class NoTier:
    """A tier that no server has."""

    name = "recompute"
    pipes: Sequence[Pipe] = ()

    def __init__(self, clock: Clock, site: TierSite) -> None:
        """Hold nothing."""

    def connector(self, server: int) -> Connector | None:
        """Return None: there is none."""
        return None

    def counters(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def at_rest(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    async def start(self) -> None:
        """Do nothing."""

    async def quiesce(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
