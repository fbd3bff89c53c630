"""HyMCache on an emulated CXL-HM inside the process of a serving engine, for the vLLM adapter.

``build`` is what the adapter's configuration names as its ``tier``:
``cxlbench.harness.embedded_tier:build``. Keys of its configuration, all optional: ``device`` (a
CXL-HM profile, default ``cxl-hm-prototype``), ``scale`` (default 64: a laptop's memory and disk),
``folder`` (backing files; without one the SSDs are RAM), ``capacity`` (full-size, such as
``"64 GiB"``), ``block_bytes`` (real bytes of the engine's blocks; the vLLM adapter fills it in),
``seed``. The engine's bytes are real: at scale S its blocks stand for blocks S times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base
from cxlbench.emu.clock import Clock
from cxlbench.harness.rig import Rig, RigSpec

T = TypeVar("T")

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
    """Build the tier on ``clock``; unknown keys and impossible values are refused by name."""
    unknown = set(config) - KNOWN
    if unknown:
        raise ValueError(f"unknown tier keys {sorted(unknown)}; known: {', '.join(sorted(KNOWN))}")
    folder = config.get("folder")
    scale = _number(config, "scale", 64.0, float)
    spec = RigSpec(
        device=load_as(CxlHmProfile, str(config.get("device", "cxl-hm-prototype"))),
        block_bytes=int(_number(config, "block_bytes", 1 << 18, int) * scale),
        device_capacity_bytes=_size(config, "capacity", "64 GiB"),
        copy_engine=None,
        scale=scale,
        seed=_number(config, "seed", 0, int),
    )
    return EmbeddedTier(
        Rig(clock, spec, phantom=False, folder=None if folder is None else Path(str(folder)))
    )


def _number(config: Mapping[str, object], key: str, default: T, kind: Callable[[str], T]) -> T:
    value = config.get(key, default)
    try:
        return kind(str(value))
    except ValueError:
        raise ValueError(f"tier key {key} is {value!r}, expected such as {default}") from None


def _size(config: Mapping[str, object], key: str, default: str) -> int:
    try:
        value = parse_quantity(str(config.get(key, default)), Dimension.SIZE)
        return int(to_base(*value, Dimension.SIZE))
    except UnitError as error:
        raise ValueError(f"tier key {key} {error}") from error
