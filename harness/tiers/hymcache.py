"""HyMCache as a tier: the real Master, Lookup, KV Manager and connectors on emulated devices.

``device`` chooses what the nodes have: CXL-HM with explicit prefetch, or the transparent CMM-H.
What is built is a ``Rig`` (``rig.py``) at full size, in tags. Options, with HyMCache §5 as default:

- ``device``: profile name; ``device_kind`` ``cxl-hm``, ``cmm-h``, or
  ``dram`` for an expander without SSDs
- ``nodes``, ``devices_per_node``, ``device_capacity_bytes``
- ``prefetch``, ``window_bytes``, ``staging_bytes``, ``deadline_s``
- ``node_link``, ``worker_link``: names of link profiles
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from cxlbench.devices.profile import (
    CmmHProfile,
    CopyEngineProfile,
    CxlHmProfile,
    ExpanderProfile,
    LinkProfile,
    SoftwareProfile,
)
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.io_jobs import counters_of
from cxlbench.harness.rig import DeviceProfile, Rig, RigSpec
from cxlbench.harness.rig_checks import check_rig
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.hymcache.connector import DEADLINE_S, STAGING_BYTES
from cxlbench.kv.connector import BlockTimes, Connector

KINDS: dict[str, tuple[type[DeviceProfile], str, str]] = {
    "cxl-hm": (CxlHmProfile, "cxl-hm-prototype", "hymcache"),
    "cmm-h": (CmmHProfile, "cmm-h-256g", "cmm-h"),
    "dram": (ExpanderProfile, "remote-dram", "remote DRAM"),
}
"""By kind: class and default name of the profile, and what the tier is called."""


class HyMCacheTier:
    """The running system."""

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options("hymcache", site.options)
        kind = options.choice("device_kind", "cxl-hm", tuple(KINDS))
        profile_class, default, self.name = KINDS[kind]
        profile = site.profile
        spec = RigSpec(
            device=profile(profile_class, options.text("device", default)),
            block_bytes=site.block_bytes,
            nodes=options.count("nodes", 1),
            devices_per_node=options.count("devices_per_node", 1),
            device_capacity_bytes=options.optional_count("device_capacity_bytes"),
            workers=site.prefill_servers,
            prefetch=options.flag("prefetch", True),
            window_bytes=options.count("window_bytes", 128 << 20),
            node_link=profile(LinkProfile, options.text("node_link", "nic-200g")),
            worker_link=profile(LinkProfile, options.text("worker_link", "nic-100g")),
            copy_engine=profile(CopyEngineProfile, options.text("copy_engine", "gpu-copy-gen4x16")),
            software=profile(SoftwareProfile, options.text("software", "software-default")),
            staging_bytes=options.count("staging_bytes", STAGING_BYTES),
            deadline_s=options.number("deadline_s", DEADLINE_S),
            seed=site.seed,
        )
        options.refuse_others()
        check_rig(spec)
        self.rig = Rig(clock, spec, phantom=True, on_block=partial(_passed_on, site))
        self.pipes: Sequence[Pipe] = self.rig.pipes

    def connector(self, server: int) -> Connector | None:
        """Return a prefill server's connector; decode servers have none."""
        connectors = self.rig.connectors
        return connectors[server] if server < len(connectors) else None

    def counters(self) -> Mapping[str, float]:
        """Return what Master and devices counted."""
        found: dict[str, float] = {"evicted_blocks": self.rig.master.counters.evicted}
        for node in self.rig.nodes.values():
            for device in node.devices:
                for name, count in counters_of(device).items():
                    found[name] = found.get(name, 0) + count
        for connector in self.rig.connectors:
            for name in ("mismatched", "timed_out", "failed"):
                key = f"{name}_blocks"
                found[key] = found.get(key, 0) + getattr(connector.counters, name)
        return found

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name."""
        return self.rig.at_rest()

    async def start(self) -> None:
        """Do nothing: the rig runs."""

    async def quiesce(self) -> None:
        """Wait until everything stored is on its backing store."""
        await self.rig.quiesce()

    async def close(self) -> None:
        """Close connectors, nodes and devices."""
        await self.rig.close()


def _passed_on(site: TierSite, worker: int, times: BlockTimes) -> None:
    if site.on_block is not None:
        site.on_block(times)
