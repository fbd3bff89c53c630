"""DRAM of all servers as one cache, as Mooncake Store is (HyMCache §5: 1 TB over the servers).

Master, transfer buffers and timeouts are those of ``object_store.py``. Objects lie in segments of
the servers' DRAM (``segments.py``) and go by RDMA out through the port of the server that has them
and in through the port of the one that wants them; those of the own segment are copied in memory.

Options beside those of all such tiers: ``segments`` (servers that have one); ``link`` and
``memory`` name profiles.

Units: bytes, s. Left out: the failure of a server.
"""

from __future__ import annotations

from collections.abc import Sequence

from cxlbench.devices.link import Link
from cxlbench.devices.profile import ExpanderProfile, LinkProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.tiers.block_store import Entry
from cxlbench.harness.tiers.object_store import ObjectStoreTier
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.segments import by_place
from cxlbench.harness.tiers.tier import TierSite


class DistributedDramTier(ObjectStoreTier):
    """Mooncake Store over RDMA."""

    name = "mooncake"

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options(self.name, site.options)
        segments = options.count("segments", site.prefill_servers)
        link = site.profile(LinkProfile, options.text("link", "nic-100g"))
        memory = site.profile(ExpanderProfile, options.text("memory", "local-dram"))
        super().__init__(clock, site, options, segments=segments)
        self._links = [
            Link(clock, link, name=f"server{n}.nic")
            for n in range(max(segments, site.prefill_servers))
        ]
        self._memory = [Pipe(clock, f"server{n}.dram", memory.bandwidth) for n in range(segments)]
        for nic in self._links:
            self.has(nic.tx, nic.rx)
        self.has(*self._memory)

    async def read(self, server: int, entries: Sequence[Entry]) -> None:
        """Read objects from their segments."""
        await self._carry(server, entries, inward=True)

    async def write(self, server: int, entries: Sequence[Entry]) -> None:
        """Write objects to their segments."""
        await self._carry(server, entries, inward=False)

    async def _carry(self, server: int, entries: Sequence[Entry], *, inward: bool) -> None:
        mine, through, remote = self._links[server], [], 0
        for place, nbytes in by_place(entries).items():
            if place == server:
                through.append((self._memory[place], nbytes))
                continue
            other = self._links[place]
            through.append((other.tx if inward else other.rx, nbytes))
            remote += nbytes
        through.append((mine.rx if inward else mine.tx, remote))
        await self.move(*through, latency_s=2 * mine.latency_s if remote else 0.0)
