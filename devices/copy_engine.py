"""A copy engine: host memory to and from a GPU, one copy after another (PCIe).

The time is charged; the bytes stay where they are, since the hosts of the bench have no GPU memory
of their own. Units: bytes, s. Left out: both directions at once, pinning costs.
"""

from __future__ import annotations

from cxlbench.devices.profile_kinds import CopyEngineProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, finished


class CopyEngine:
    """One engine with its bandwidth and its latency per copy."""

    def __init__(self, clock: Clock, profile: CopyEngineProfile, *, name: str = "copy") -> None:
        self.clock = clock
        self.profile = profile
        self.pipe = Pipe(clock, name, profile.bandwidth)

    async def copy(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are copied, after all copies asked for earlier."""
        await finished(self.clock, self.pipe.reserve(nbytes), latency_s=self.profile.latency)
