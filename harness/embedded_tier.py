"""HyMCache on an emulated CXL-HM inside the process of a serving engine, for the vLLM adapter.

``build`` is what the adapter's configuration names as its ``tier``:
``cxlbench.harness.embedded_tier:build``. Keys of its configuration, all optional: ``device`` (a
CXL-HM profile, default ``cxl-hm-prototype``), ``scale`` (default 64: a laptop's memory and disk),
``folder`` (backing files; without one the SSDs are RAM), ``capacity`` (full-size, such as
``"64 GiB"``), ``block_bytes`` (real bytes of the engine's blocks; the vLLM adapter fills it in),
``seed``. The engine's bytes are real: at scale S its blocks stand for blocks S times as large.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.devices.units import Dimension, parse_quantity, to_base
from cxlbench.emu.clock import Clock
from cxlbench.harness.rig import Rig, RigSpec

KNOWN = frozenset({"device", "scale", "folder", "capacity", "block_bytes", "seed"})


class EmbeddedTier:
    """A connector and the rig behind it, closed together. Satisfies the ``Connector`` contract."""

    def __init__(self, rig: Rig) -> None:
        connector = rig.connectors[0]
        self.rig = rig
        self.submit_lookup = connector.submit_lookup
        self.submit_load = connector.submit_load
        self.submit_store = connector.submit_store
        self.release = connector.release
        self.poll = connector.poll

    def at_rest(self) -> dict[str, int]:
        """Count what the whole tier holds, by name."""
        return self.rig.at_rest()

    async def close(self) -> None:
        """Close the connector, the node, its devices and their files."""
        await self.rig.close()


def build(config: Mapping[str, object], clock: Clock) -> EmbeddedTier:
    """Build the tier on ``clock``; unknown keys are refused by name."""
    unknown = set(config) - KNOWN
    if unknown:
        raise ValueError(f"unknown tier keys {sorted(unknown)}; known: {', '.join(sorted(KNOWN))}")
    folder = config.get("folder")
    capacity = str(config.get("capacity", "64 GiB"))
    scale = float(str(config.get("scale", 64)))
    spec = RigSpec(
        device=load_as(CxlHmProfile, str(config.get("device", "cxl-hm-prototype"))),
        block_bytes=int(int(str(config.get("block_bytes", 1 << 18))) * scale),
        device_capacity_bytes=int(
            to_base(*parse_quantity(capacity, Dimension.SIZE), Dimension.SIZE)
        ),
        copy_engine=None,
        scale=scale,
        seed=int(str(config.get("seed", 0))),
    )
    return EmbeddedTier(
        Rig(clock, spec, phantom=False, folder=None if folder is None else Path(str(folder)))
    )
