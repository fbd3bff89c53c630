"""What is refused before a rig is built: specs that no tier can be made of.

Units: bytes at full size, as in ``RigSpec``. Left out: what only the device knows (its largest
object, see ``rig.py``), and whether this host has the memory.
"""

from __future__ import annotations

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, scaled_bytes
from cxlbench.harness.requests import WorkloadError
from cxlbench.harness.rig import BlockTooLargeError, RigSpec, scaled_block_bytes
from cxlbench.harness.tables import size
from cxlbench.kv.footer import PAGE_BYTES, object_extent_bytes

MOST_DEVICES = 256
"""On one node: Master's slots have a byte for the number of a device."""

MOST_NODES = 1 << 16
"""Likewise two bytes for the number of a node."""

MOST_DRIFT = 0.05
"""How much longer than at full size a scale may make a block's transfers before a run says so."""


class RigSpecError(WorkloadError):
    """A number of nodes, devices or workers that no rig can have."""


def check_rig(spec: RigSpec) -> None:
    """Refuse a spec that cannot be built, or whose devices hold not a single block.

    Raises:
        RigSpecError: a count is out of its range.
        BlockTooLargeError: a block fits neither a device nor the workers' staging buffer.
        ScaleError: the block, or a device, is below a page at this scale.
    """
    for name, count, most in (
        ("nodes", spec.nodes, MOST_NODES),
        ("devices_per_node", spec.devices_per_node, MOST_DEVICES),
        ("workers", spec.workers, None),
    ):
        if count < 1 or (most is not None and count > most):
            raise RigSpecError(
                f"{name}={count}: must be {'at least 1' if most is None else f'1 to {most}'}"
            )
    block_bytes = scaled_block_bytes(spec)
    if spec.block_bytes > spec.staging_bytes:
        raise BlockTooLargeError(
            f"a block of {size(spec.block_bytes)} does not fit the staging buffer of a worker "
            f"({size(spec.staging_bytes)}); take smaller blocks"
        )
    if spec.device_capacity_bytes is None:
        return
    if spec.device_capacity_bytes < 1:
        raise RigSpecError(
            f"device_capacity_bytes={spec.device_capacity_bytes}: must be at least 1"
        )
    capacity = scaled_bytes(spec.device_capacity_bytes, spec.scale, what="the capacity of a device")
    needed = object_extent_bytes(block_bytes)
    if capacity < needed:
        at_scale = f" at scale {spec.scale:g}" if spec.scale != 1 else ""
        raise BlockTooLargeError(
            f"a device of {size(spec.device_capacity_bytes)} holds no block of "
            f"{size(spec.block_bytes)}: with its footer that takes {size(needed * spec.scale)}"
            f"{at_scale}; use a larger capacity"
        )


def scale_drift(spec: RigSpec) -> str | None:
    """Return what makes full-size figures depend on the scale of ``spec``; None if little does.

    Pages do not scale. A CMM-H caches and refills the footer of a block as a page of its own,
    beside a payload that is divided by the scale. A CXL-HM's block that has fewer pages than the
    device has SSDs is read from a part of them.
    """
    block_bytes = scaled_block_bytes(spec)
    pages = -(-block_bytes // PAGE_BYTES)
    longer = PAGE_BYTES / block_bytes - PAGE_BYTES / spec.block_bytes
    if isinstance(spec.device, CmmHProfile) and longer > MOST_DRIFT:
        return (
            f"the footer of a block, a page of its own in the cache, makes misses up to "
            f"{longer:.0%} longer"
        )
    if isinstance(spec.device, CxlHmProfile) and spec.scale > 1 and pages < spec.device.ssd_count:
        return (
            f"a block is {pages} page(s) and lies on so many of the {spec.device.ssd_count} SSDs: "
            "they read at a part of their bandwidth"
        )
    return None
