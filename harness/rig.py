"""A rig: emulated devices on nodes, Master, links, and one connector per worker, on one clock.

``RigSpec`` says what is built, at full size; the rig scales it. With ``phantom`` the bytes are
tags. The links are full duplex: each worker and each node has one of its own.

Units: bytes (full size in the spec, scaled inside), s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.expander import Expander
from cxlbench.devices.link import Link
from cxlbench.devices.profile import (
    CmmHProfile,
    CopyEngineProfile,
    CxlHmProfile,
    ExpanderProfile,
    LinkProfile,
    SoftwareProfile,
    load_as,
    scale_profile,
    scaled_bytes,
)
from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import Fabric, QueuePair
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, ArenaMaker
from cxlbench.emu.pipe import Pipe
from cxlbench.harness.run_folders import run_folder
from cxlbench.hymcache.connector import DEADLINE_S, STAGING_BYTES, HyMCacheConnector
from cxlbench.hymcache.control import ControlPlane
from cxlbench.hymcache.kv_manager import SEGMENTS_PER_DEVICE, KvManager, Placement
from cxlbench.hymcache.master import Master, NodePolicy
from cxlbench.hymcache.node_service import NodeService
from cxlbench.hymcache.services import LocalMaster, LocalNode
from cxlbench.hymcache.slot_table import compile_kernels
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.device import MemoryDevice
from cxlbench.kv.footer import Verify, object_extent_bytes

DeviceProfile = CxlHmProfile | CmmHProfile | ExpanderProfile


@dataclass(frozen=True, slots=True)
class DeviceSite:
    """Where a device is put: what a maker of one needs. Bytes are scaled already."""

    name: str
    phantom: bool
    scale: float
    capacity_bytes: int | None
    folder: Path | None
    faults: FaultPlan
    trailer_bytes: int = PAGE_BYTES
    make_arena: ArenaMaker | None = None
    """Of the memory that objects lie in, where other processes are to map it."""
    keep: bool = False
    """Whether the backing files stay, with what is in them."""


DeviceMaker = Callable[[Clock, DeviceSite], MemoryDevice]


class BlockTooLargeError(ValueError):
    """No device of this profile can ever hold a block of this size."""


def _nic(name: str) -> LinkProfile:
    return load_as(LinkProfile, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RigSpec:
    """What to build. Sizes are those of the full-size system; ``scale`` divides them."""

    device: DeviceProfile | DeviceMaker
    """A profile of a built-in kind, or a function that makes a device of the user's own."""
    block_bytes: int
    nodes: int = 1
    devices_per_node: int = 1
    device_capacity_bytes: int | None = None
    workers: int = 1
    prefetch: bool = True
    window_bytes: int = 128 << 20
    node_link: LinkProfile = field(default_factory=lambda: _nic("nic-200g"))
    worker_link: LinkProfile = field(default_factory=lambda: _nic("nic-100g"))
    copy_engine: CopyEngineProfile | None = field(
        default_factory=lambda: load_as(CopyEngineProfile, "gpu-copy-gen4x16")
    )
    software: SoftwareProfile = field(
        default_factory=lambda: load_as(SoftwareProfile, "software-default")
    )
    staging_bytes: int = STAGING_BYTES
    deadline_s: float = DEADLINE_S
    verify: Verify = Verify.FULL
    placement: Placement = Placement.ROUND_ROBIN
    node_policy: NodePolicy = NodePolicy.ROUND_ROBIN
    scale: float = 1
    seed: int = 0


def scaled_block_bytes(spec: RigSpec) -> int:
    """Return the bytes of a block at the spec's scale, in whole words of 8 B."""
    return scaled_bytes(spec.block_bytes, spec.scale, what="a KV block") // 8 * 8


class Rig:
    """The running system. ``close`` it when done."""

    def __init__(
        self,
        clock: Clock,
        spec: RigSpec,
        *,
        phantom: bool,
        folder: Path | None = None,
        faults: FaultPlan | None = None,
        on_block: Callable[[int, BlockTimes], None] | None = None,
    ) -> None:
        self.clock = clock
        self.spec = spec
        self.faults = faults or FaultPlan.none()
        self.block_bytes = scaled_block_bytes(spec)
        self.fabric = Fabric(clock, seed=spec.seed, faults=self.faults)
        self.control = ControlPlane(clock, spec.software, faults=self.faults)
        self.pipes: list[Pipe] = []
        """Every pipe whose pacing the fidelity line reports."""
        self._stack = ExitStack()
        compile_kernels()
        self.folder: Path | None = None
        if folder is not None and not phantom:
            self.folder = self._stack.enter_context(run_folder(folder))
        try:
            self._build(phantom, on_block)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, phantom: bool, on_block: Callable[[int, BlockTimes], None] | None) -> None:
        spec, clock, scale = self.spec, self.clock, self.spec.scale
        window = scaled_bytes(spec.window_bytes, scale, what="the prefetch window")
        self.nodes: dict[int, KvManager] = {}
        node_links: dict[int, Link] = {}
        for node in range(spec.nodes):
            devices = [
                self._device(f"node{node}.dev{index}", phantom)
                for index in range(spec.devices_per_node)
            ]
            self.nodes[node] = KvManager(
                clock,
                self.fabric,
                devices,
                node=node,
                window_bytes=window,
                prefetch=spec.prefetch,
                placement=spec.placement,
                segment_bytes=segment_bytes(devices[0].capacity_bytes, self.block_bytes),
                reserve_deadline_s=spec.deadline_s,
            )
            node_links[node] = self._duplex(f"node{node}.nic", scale_profile(spec.node_link, scale))
        objects = sum(
            device.capacity_bytes // object_extent_bytes(self.block_bytes)
            for manager in self.nodes.values()
            for device in manager.devices
        )
        self.master = Master(
            clock,
            self.nodes,
            max_objects=objects + 1024,
            policy=spec.node_policy,
            lease_s=spec.deadline_s + 1,
            write_deadline_s=spec.deadline_s + 1,
        )
        for manager in self.nodes.values():
            manager.on_gone = self.master.gone
        self.services = {node: NodeService(manager) for node, manager in self.nodes.items()}
        self.connectors: list[HyMCacheConnector] = []
        for worker in range(spec.workers):
            mine = self._duplex(f"worker{worker}.nic", scale_profile(spec.worker_link, scale))
            pairs = {
                node: QueuePair(
                    self.fabric,
                    (link.tx, mine.rx),
                    write_path=(mine.tx, link.rx),
                    latency_s=mine.latency_s + link.latency_s,
                    name=f"worker{worker}-node{node}",
                    outstanding_reads=min(mine.outstanding_reads, link.outstanding_reads),
                )
                for node, link in node_links.items()
            }
            copy = None
            if spec.copy_engine is not None:
                copy = CopyEngine(
                    clock, scale_profile(spec.copy_engine, scale), name=f"worker{worker}.copy"
                )
            self.connectors.append(
                HyMCacheConnector(
                    clock,
                    LocalMaster(self.control, self.master),
                    {
                        node: LocalNode(self.control, service, pairs[node])
                        for node, service in self.services.items()
                    },
                    staging_bytes=scaled_bytes(
                        spec.staging_bytes, scale, what="the staging buffer"
                    ),
                    deadline_s=spec.deadline_s,
                    window_bytes=window,
                    verify=spec.verify,
                    gpu_copy=copy,
                    on_block=None if on_block is None else partial(on_block, worker),
                )
            )

    def _duplex(self, name: str, profile: LinkProfile) -> Link:
        link = Link(self.clock, profile, name=name)
        self.pipes.extend((link.tx, link.rx))
        return link

    def _device(self, name: str, phantom: bool) -> MemoryDevice:
        spec = self.spec
        capacity = spec.device_capacity_bytes
        scaled = None if capacity is None else scaled_bytes(capacity, spec.scale, what="the device")
        site = DeviceSite(name, phantom, spec.scale, scaled, self.folder, self.faults)
        device = make_device(self.clock, spec.device, site)
        if isinstance(device, (CxlHm, CmmH)):
            self._stack.callback(device.ssds.backing.close)  # if the rest cannot be built
        if isinstance(device, CxlHm) and self.block_bytes > device.largest_object_bytes:
            raise BlockTooLargeError(
                f"{device.name}: a block of {spec.block_bytes} B at scale {spec.scale:g} is larger "
                "than a demand miss is sure to find frames for, or than the write buffer; raise "
                "demand_reserve or write_buffer_share, lower demand_outstanding, or take smaller "
                "blocks"
            )
        self.pipes.append(device.port)
        return device

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name; empty when all came back."""
        held: dict[str, int] = {}
        counts = [self.master.at_rest()]
        counts += [service.at_rest() for service in self.services.values()]
        counts += [connector.at_rest() for connector in self.connectors]
        for count in counts:
            for name, number in count.items():
                if number:
                    held[name] = held.get(name, 0) + number
        devices = sum(len(manager.devices) for manager in self.nodes.values())
        if self.fabric.registered != devices:
            held["memory regions"] = self.fabric.registered - devices
        return held

    async def quiesce(self) -> None:
        """Wait until everything stored is on its backing store."""
        for manager in self.nodes.values():
            await manager.quiesce()

    async def close(self) -> None:
        """Close connectors, nodes and devices, and remove the run's files."""
        try:
            for connector in self.connectors:
                await connector.close()
            for manager in self.nodes.values():
                await manager.close()
        finally:
            self._stack.close()


def make_device(
    clock: Clock, device: DeviceProfile | DeviceMaker, site: DeviceSite
) -> MemoryDevice:
    """Make a device from a full-size profile, or by a user's function."""
    if isinstance(device, DeviceProfile):
        return _built_in(clock, scale_profile(device, site.scale), site)
    return device(clock, site)


def _built_in(clock: Clock, profile: DeviceProfile, site: DeviceSite) -> MemoryDevice:
    given: dict[str, Any] = {
        "name": site.name,
        "phantom": site.phantom,
        "capacity_bytes": site.capacity_bytes,
        "faults": site.faults,
        "trailer_bytes": site.trailer_bytes,
        "make_arena": site.make_arena,
    }
    if isinstance(profile, ExpanderProfile):
        return Expander(clock, profile, **given)
    given |= {"folder": site.folder, "keep": site.keep}
    if isinstance(profile, CxlHmProfile):
        return CxlHm(clock, profile, **given)
    return CmmH(clock, profile, **given)


def segment_bytes(capacity_bytes: int, block_bytes: int) -> int:
    """Return whole extents of a block near the usual size of a segment: none ends in waste."""
    extent = object_extent_bytes(block_bytes)
    return extent * max(1, round(capacity_bytes / SEGMENTS_PER_DEVICE / extent))
