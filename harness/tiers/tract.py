"""TraCT as a tier: the real index, locks, allocator and connectors on the emulated pod.

Prefill and decode servers all have a connector, since the prompt's KV is handed over through the
shared memory (no central server, no network). What is built is a ``TractRig``
(``harness/tract_rig.py``) in tags: every memory operation and flush of the programs is charged, and
all blocks take the bandwidth of the one device. A block that another server is just writing is
EXISTS for a store and not yet found by a lookup; the cluster's hand-over waits for it
(``harness/serve/cluster.py``).

Options, with TraCT's testbed as default: ``capacity_bytes`` of the region, ``nodes`` (None is one
for each server; server ``s`` is on node ``s % nodes``), ``window_bytes``, ``deadline_s``;
``memory`` and ``copy_engine`` name profiles.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from cxlbench.devices.profile import CopyEngineProfile, SharedType3Profile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.plain import check_capacity
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.harness.tract_rig import TractRig, TractRigSpec
from cxlbench.kv.connector import BlockTimes, Connector
from cxlbench.tract.connector import DEADLINE_S, WINDOW_BYTES
from cxlbench.tract.counters import TractCounters

SETTLE_S = 0.001
"""Between two looks at whether the last programs have ended."""


class TractTier:
    """The running system."""

    name = "tract"

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options(self.name, site.options)
        servers = site.prefill_servers + site.decode_servers
        memory = site.profile(SharedType3Profile, options.text("memory", "niagara-2.0"))
        copy_engine = options.text("copy_engine", "gpu-copy-gen4x16")
        capacity = options.number("capacity_bytes", memory.capacity)
        spec = TractRigSpec(
            block_bytes=site.block_bytes,
            memory=memory,
            capacity_bytes=check_capacity(self.name, "a region", capacity, site.block_bytes),
            nodes=options.optional_count("nodes") or servers,
            workers=servers,
            copy_engine=site.profile(CopyEngineProfile, copy_engine),
            window_bytes=options.count("window_bytes", WINDOW_BYTES),
            deadline_s=options.number("deadline_s", DEADLINE_S),
        )
        options.refuse_others()
        self._clock = clock
        self.rig = TractRig(clock, spec, on_block=partial(_passed_on, site))
        self.pipes: Sequence[Pipe] = self.rig.pipes

    def connector(self, server: int) -> Connector | None:
        """Return the connector of any server."""
        return self.rig.connectors[server]

    def counters(self) -> Mapping[str, float]:
        """Return what the connectors counted, all servers together."""
        found: dict[str, float] = {}
        for name in TractCounters.__slots__:
            total = sum(getattr(connector.counters, name) for connector in self.rig.connectors)
            found[f"{name}_blocks"] = total
        return found

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name."""
        return self.rig.at_rest()

    async def start(self) -> None:
        """Start the managers of all nodes."""
        self.rig.start()

    async def quiesce(self) -> None:
        """Wait until pins have been given back."""
        late_s = self._clock.now() + 2 * self.rig.spec.deadline_s
        while any(any(connector.at_rest().values()) for connector in self.rig.connectors):
            if self._clock.now() > late_s:
                return  # what is still held is a fault, and ``at_rest`` tells
            await self._clock.sleep(SETTLE_S)

    async def close(self) -> None:
        """Close the connectors and end the managers."""
        await self.rig.close()


def _passed_on(site: TierSite, worker: int, times: BlockTimes) -> None:
    if site.on_block is not None:
        site.on_block(times)
