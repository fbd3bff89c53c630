"""A rig for TraCT: nodes of a pod on one shared memory, with workers, on one clock.

``TractRigSpec`` says what is built, at full size; the rig scales it. Programs run on the pod under
the clock (``emu/pod_virtual.py``): every memory operation costs what the shared memory's profile
says. Blocks are real bytes or tags, as the buffers are; the metadata is real either way.

Charged per line: a fill is the profile's ``latency``, a flush its ``flush_latency``, dirty or not,
since no source tells the two apart. Blocks take the device's bandwidth, in both directions
together, and at the same time that of the worker's copy engine. Lines are not scaled.

Units: bytes (full size in the spec, scaled inside), s. Left out: instructions between memory
operations; a network, which TraCT's data path does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.profile import (
    CopyEngineProfile,
    SharedType3Profile,
    load_as,
    scale_profile,
    scaled_bytes,
)
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.pod_ops import LINE
from cxlbench.emu.pod_virtual import VirtualPod
from cxlbench.harness.pod_profile import virtual_costs
from cxlbench.kv.connector import BlockTimes
from cxlbench.tract.chains import stop_manager
from cxlbench.tract.connector import DEADLINE_S, WINDOW_BYTES, TractConnector
from cxlbench.tract.fsck import FsckReport, fsck
from cxlbench.tract.layout import Layout, sizes_for
from cxlbench.tract.manager import manage
from cxlbench.tract.payload import compile_checksum
from cxlbench.tract.region import format_region


@dataclass(frozen=True, slots=True, kw_only=True)
class TractRigSpec:
    """What to build. Sizes are those of the full-size system; ``scale`` divides them."""

    block_bytes: int
    memory: SharedType3Profile = field(
        default_factory=lambda: load_as(SharedType3Profile, "niagara-2.0")
    )
    capacity_bytes: int | None = None
    """Of the region, metadata included; None is the profile's capacity."""
    nodes: int = 2
    workers: int = 2
    """Worker ``w`` runs on node ``w % nodes``."""
    copy_engine: CopyEngineProfile | None = field(
        default_factory=lambda: load_as(CopyEngineProfile, "gpu-copy-gen4x16")
    )
    window_bytes: int = WINDOW_BYTES
    deadline_s: float = DEADLINE_S
    scale: float = 1


class TractRig:
    """The running system. ``start`` it inside the clock's run, and ``close`` it when done."""

    def __init__(
        self,
        clock: Clock,
        spec: TractRigSpec,
        *,
        on_block: Callable[[int, BlockTimes], None] | None = None,
    ) -> None:
        """Format the region and make the connectors.

        Raises:
            ScaleError: the block, or the region, does not exist at this scale.
            RegionTooSmallError: the region has no room for a single block.
            LayoutError: a number of nodes that no region can have.
        """
        self.clock = clock
        self.spec = spec
        if clock.kind == "wall":
            compile_checksum()
        scale = spec.scale
        self.block_bytes = scaled_bytes(spec.block_bytes, scale, what="a KV block") // 8 * 8
        memory = scale_profile(spec.memory, scale)
        region_bytes = memory.capacity
        if spec.capacity_bytes is not None:
            region_bytes = scaled_bytes(spec.capacity_bytes, scale, what="the region")
        sizes = dataclasses.replace(
            sizes_for(
                region_bytes, nodes=spec.nodes, chunk_bytes=-(-self.block_bytes // LINE) * LINE
            ),
            snooped_payload=False,
        )
        region_bytes = region_bytes // LINE * LINE
        self.pod = VirtualPod(
            clock,
            region_bytes,
            virtual_costs(memory),
            nodes=spec.nodes,
            fences_wait_for_arrival=memory.fence_waits,
        )
        formatted = partial(format_region, zeroed=True)
        self.layout: Layout = self.pod.alone(formatted, sizes, region_bytes)
        lay = self.layout
        self.pod.lock_words(lay.epoch_at, lay.roots_at - lay.epoch_at)
        self.pipes: list[Pipe] = [self.pod.pipe]
        """Every pipe whose pacing a fidelity line reports."""
        self.connectors = [self._connector(worker, on_block) for worker in range(spec.workers)]

    def _connector(
        self, worker: int, on_block: Callable[[int, BlockTimes], None] | None
    ) -> TractConnector:
        spec, copy = self.spec, None
        if spec.copy_engine is not None:
            profile = scale_profile(spec.copy_engine, spec.scale)
            copy = CopyEngine(self.clock, profile, name=f"worker{worker}.copy")
            self.pipes.append(copy.pipe)
        return TractConnector(
            self.clock,
            self.pod.nodes[worker % spec.nodes],
            self.layout,
            window_bytes=scaled_bytes(spec.window_bytes, spec.scale, what="the window"),
            deadline_s=spec.deadline_s,
            gpu_copy=copy,
            on_block=None if on_block is None else partial(on_block, worker),
        )

    def start(self) -> None:
        """Start a manager on every node; one of them is the arbiter."""
        for node in range(self.spec.nodes):
            self.pod.start(node, manage, self.layout, name=f"manager of node {node}")

    def check(self) -> FsckReport:
        """Check the region as the device has it. Nobody may be inside a locked section."""
        report: FsckReport = self.pod.alone(fsck, self.layout)
        return report

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name; empty when all came back."""
        held: dict[str, int] = {}
        for connector in self.connectors:
            for name, number in connector.at_rest().items():
                if number:
                    held[name] = held.get(name, 0) + number
        report = self.check()
        counts = {
            "pins in the region": report.pins,
            "reservations in the region": report.pending,
            "held locks": report.held_locks,
            "problems of the region": len(report.problems),
        }
        return held | {name: number for name, number in counts.items() if number}

    async def close(self) -> None:
        """Close the connectors and end the managers."""
        for connector in self.connectors:
            await connector.close()
        for node in range(self.spec.nodes):
            await self.pod.run(node, stop_manager, self.layout)
        await self.pod.joined()
