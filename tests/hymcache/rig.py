"""A small HyMCache in virtual time: devices on nodes, Master, links and connectors, and no engine.

Everything is at full size with tags for bytes (``phantom``), or small with real bytes. ``run`` runs
a test's coroutine and then holds the system to its promise: all that was handed out has come back.

Units: bytes, s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.profile import CxlHmProfile, SoftwareProfile, load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.fabric import Fabric, QueuePair
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.memory import PAGE_BYTES, Buffer, PhantomBuffer
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.sync import Budget
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.hymcache.control import ControlPlane, SoftwareCosts
from cxlbench.hymcache.kv_manager import Grant, KvManager, Placement
from cxlbench.hymcache.master import Master, NodePolicy, RemoteBlock
from cxlbench.hymcache.node_service import NodeService
from cxlbench.hymcache.services import LocalMaster, LocalNode
from cxlbench.kv.connector import BlockTimes, Completion
from cxlbench.kv.device import MemoryDevice
from cxlbench.kv.footer import FOOTER_BYTES, Footer, Verify, pack_footer
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.payload import ObjectTag, checksum_of
from cxlbench.kv.results import KeyResult

MIB = 1 << 20
GIB = 1 << 30
NAMESPACE = Namespace("model", "revision", "bfloat16", "layout", 128)
SETTLE_S = 0.25
"""Long enough for messages on their way, far shorter than any deadline that hides a leak."""


def chain(blocks: int, number: int = 0) -> list[bytes]:
    """Return the keys of a chain; chains of different numbers share nothing."""
    return trace_keys(NAMESPACE, range(number * 100_000, number * 100_000 + blocks))


def faults(*rules: FaultRule, seed: int = 0) -> FaultPlan:
    """Return a plan of these rules."""
    return FaultPlan(rules, seed)


def profile(**changes: Any) -> CxlHmProfile:
    """Return the prototype's profile with some numbers changed; ``ssd`` takes a dict."""
    made = load_as(CxlHmProfile, "cxl-hm-prototype")
    if "ssd" in changes:
        changes["ssd"] = dataclasses.replace(made.ssd, **changes["ssd"])
    return dataclasses.replace(made, **changes)


def small_profile(block_bytes: int, **changes: Any) -> CxlHmProfile:
    """Return a device with room for eight staged, eight buffered and two demanded blocks."""
    share = {
        "staging_frame": block_bytes,
        "dram_capacity": 18 * block_bytes,
        "write_buffer_share": 8 / 18,
        "demand_reserve": 2 * block_bytes,
        "flush_batch": 4 * block_bytes,
    }
    return profile(**{**share, **changes})


class Rig:
    """The system under test."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        devices: int = 1,
        workers: int = 1,
        size: int = 16 * MIB,
        phantom: bool = True,
        device: CxlHmProfile | None = None,
        make_device: Callable[..., MemoryDevice] | None = None,
        capacity: int = 100 * GIB,
        segment: int | None = None,
        fault_plan: FaultPlan | None = None,
        free_software: bool = False,
        software: SoftwareCosts | None = None,
        link_bytes_per_s: float = 25e9,
        staging: int = 5 * GIB,
        window: int = 128 * MIB,
        deadline_s: float = 10.0,
        lease_s: float = 11.0,
        prefetch: bool = True,
        placement: Placement = Placement.ROUND_ROBIN,
        policy: NodePolicy = NodePolicy.ROUND_ROBIN,
        max_objects: int = 100_000,
        low_water: float = 0.04,
        high_water: float = 0.08,
        verify: Verify = Verify.FULL,
        manager_type: type[KvManager] = KvManager,
        master_type: type[Master] = Master,
        connector_type: type[HyMCacheConnector] = HyMCacheConnector,
        segments: int = 256,
    ) -> None:
        self.clock = clock = VirtualClock()
        self.size = size
        self.phantom = phantom
        self.faults = fault_plan or FaultPlan.none()
        self.fabric = Fabric(clock, seed=1, faults=self.faults)
        if software is None and not free_software:
            software = load_as(SoftwareProfile, "software-default")
        self.control = ControlPlane(clock, software, faults=self.faults)
        make = make_device or functools.partial(CxlHm, profile=device or profile())
        self.nodes = {
            node: manager_type(
                clock,
                self.fabric,
                [
                    make(
                        clock,
                        name=f"node{node}.dev{number}",
                        phantom=phantom,
                        capacity_bytes=capacity,
                        faults=self.faults,
                    )
                    for number in range(devices)
                ],
                node=node,
                window_bytes=window,
                prefetch=prefetch,
                placement=placement,
                segment_bytes=segment,
            )
            for node in range(nodes)
        }
        self.master = master_type(
            clock,
            self.nodes,
            max_objects=max_objects,
            policy=policy,
            lease_s=lease_s,
            low_water=low_water,
            high_water=high_water,
        )
        for manager in self.nodes.values():
            manager.on_gone = self.master.gone
        self.blocks: list[BlockTimes] = []
        self.queue_pairs: list[dict[int, QueuePair]] = []
        self.services = {node: NodeService(manager) for node, manager in self.nodes.items()}
        self.connectors: list[HyMCacheConnector] = []
        for worker in range(workers):
            nic = Pipe(clock, f"worker{worker}.nic", link_bytes_per_s)
            pairs = {
                node: QueuePair(self.fabric, [nic], latency_s=3e-6, name=f"worker{worker}-{node}")
                for node in self.nodes
            }
            self.queue_pairs.append(pairs)
            self.connectors.append(
                connector_type(
                    clock,
                    LocalMaster(self.control, self.master),
                    {
                        node: LocalNode(self.control, service, pairs[node])
                        for node, service in self.services.items()
                    },
                    staging_bytes=staging,
                    deadline_s=deadline_s,
                    window_bytes=window,
                    verify=verify,
                    on_block=self.blocks.append,
                )
            )
        self.checked = False
        self._quiet = Budget(clock, 1, name="quiescing")
        self._names = iter(range(1000, 1 << 30))
        self.tickets = iter(range(1, 1 << 30))

    # -- the parts that most tests have one of --------------------------------------------------

    @property
    def connector(self) -> HyMCacheConnector:
        """The first worker's connector."""
        return self.connectors[0]

    @property
    def node(self) -> KvManager:
        """The first node."""
        return self.nodes[0]

    @property
    def device(self) -> CxlHm:
        """The first device of the first node."""
        found = self.node.devices[0]
        assert isinstance(found, CxlHm)
        return found

    @property
    def devices(self) -> list[CxlHm]:
        """All devices."""
        return [d for manager in self.nodes.values() for d in manager.devices]  # type: ignore[misc]

    # -- content --------------------------------------------------------------------------------

    def content(self, key: bytes, size: int | None = None) -> Buffer:
        """Return a buffer with the one right content of the block ``key``."""
        nbytes = size or self.size
        if self.phantom:
            return PhantomBuffer(nbytes, ObjectTag.of(key))
        draw = np.random.default_rng(int.from_bytes(key[:8], "little"))
        return draw.integers(0, 256, nbytes, dtype=np.uint8)

    def empty(self, size: int | None = None) -> Buffer:
        """Return a buffer to load into."""
        nbytes = size or self.size
        return PhantomBuffer(nbytes) if self.phantom else np.zeros(nbytes, dtype=np.uint8)

    def holds(self, buffer: Buffer, key: bytes) -> bool:
        """Whether the buffer has the content of the block ``key``, every byte of it."""
        if isinstance(buffer, PhantomBuffer):
            return buffer.tag == ObjectTag.of(key)
        right = self.content(key, buffer.nbytes)
        return isinstance(right, np.ndarray) and bool(np.array_equal(buffer, right))

    # -- requests -------------------------------------------------------------------------------

    def name(self) -> int:
        """Return a fresh request id."""
        return next(self._names)

    async def lookup(
        self,
        request: int,
        keys: Sequence[bytes],
        *,
        size: int | None = None,
        worker: int = 0,
        matched: int = 0,
    ) -> Completion:
        """Look a chain up."""
        ticket = self.connectors[worker].submit_lookup(
            request, keys, size or self.size, matched=matched
        )
        return await ticket.done.wait()

    async def load(
        self, request: int, keys: Sequence[bytes], *, size: int | None = None, worker: int = 0
    ) -> Completion:
        """Load blocks, and hold the tier to its word: a HIT has the right content."""
        buffers = [self.empty(size) for _ in keys]
        ticket = self.connectors[worker].submit_load(request, keys, buffers)
        done = await ticket.done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if result is KeyResult.HIT:
                assert self.holds(buffer, key), "a HIT has other bytes than were stored"
        return done

    async def store(
        self, keys: Sequence[bytes], *, request: int = 0, size: int | None = None, worker: int = 0
    ) -> Completion:
        """Store blocks; ``request`` 0 is one without a lookup."""
        ticket = self.connectors[worker].submit_store(
            request, keys, [self.content(key, size) for key in keys]
        )
        return await ticket.done.wait()

    async def stored(self, keys: Sequence[bytes], **options: Any) -> None:
        """Store blocks that must all get stored, at the pace of the write buffer."""
        for begin in range(0, len(keys), 8):
            done = await self.store(keys[begin : begin + 8], **options)
            assert set(done.results) == {KeyResult.STORED}
            await self.quiesce()

    async def read(self, keys: Sequence[bytes], *, size: int | None = None, worker: int = 0) -> int:
        """Look up, load and release; return how many leading blocks were delivered."""
        request = self.name()
        found = await self.lookup(request, keys, size=size, worker=worker)
        hits = found.leading_hits
        done = await self.load(request, keys[:hits], size=size, worker=worker)
        self.connectors[worker].release(request)
        return done.leading_hits

    async def turn(
        self, keys: Sequence[bytes], *, size: int | None = None, worker: int = 0
    ) -> tuple[int, Completion]:
        """One turn of a request: read the prefix that is there, store the rest."""
        request = self.name()
        found = await self.lookup(request, keys, size=size, worker=worker)
        hits = found.leading_hits
        loaded = await self.load(request, keys[:hits], size=size, worker=worker)
        done = await self.store(keys[hits:], request=request, size=size, worker=worker)
        self.connectors[worker].release(request)
        return loaded.leading_hits, done

    async def store_at(
        self, keys: Sequence[bytes], node: int, device: int, *, size: int | None = None
    ) -> None:
        """Store blocks on one device by the steps of the protocol, whatever placement says."""
        nbytes, manager = size or self.size, self.nodes[node]
        reply = self.master.allocate(next(self.tickets), keys, nbytes, near=(node, device))
        made = []
        for grant in manager.reserve(keys, nbytes, device=device):
            assert isinstance(grant, Grant)
            payload = self.content(grant.key, nbytes)
            footer = Footer(grant.key, grant.generation, nbytes, checksum_of(payload))
            trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
            trailer[:FOOTER_BYTES] = np.frombuffer(pack_footer(footer), dtype=np.uint8)
            await self.queue_pairs[0][node].write(grant.rkey, grant.address, payload, trailer)
            manager.commit([grant.token])
            made.append(
                RemoteBlock(grant.key, node, device, grant.address, nbytes, grant.generation)
            )
        answers = self.master.register(reply.ticket, made, chain=keys)
        assert set(answers) == {KeyResult.STORED}

    def place(self, key: bytes) -> tuple[int, int] | None:
        """Return (node, device) of a block as Master knows it, None if it is not findable."""
        found = self.master.table.lookup([key])
        return (int(found.node[0]), int(found.device[0])) if int(found.state[0]) == 2 else None

    # -- running --------------------------------------------------------------------------------

    async def quiesce(self) -> None:
        """Wait until everything committed is flushed."""
        await self._quiet.take(1)
        try:
            for manager in self.nodes.values():
                await manager.quiesce()
        finally:
            self._quiet.give(1)

    def at_rest(self) -> dict[str, int]:
        """Return all that somebody holds: empty when everything came back."""
        held: dict[str, int] = {}
        for part in (*self.connectors, self.master, *self.nodes.values()):
            for name, number in part.at_rest().items():
                if number:
                    held[name] = held.get(name, 0) + number
        devices = sum(len(manager.devices) for manager in self.nodes.values())
        regions = self.fabric.registered - devices
        if regions:
            held["memory regions beyond the devices'"] = regions
        extents = sum(a.live_extents for manager in self.nodes.values() for a in manager.allocators)
        objects = sum(len(manager.index) for manager in self.nodes.values())
        if extents != objects or objects != len(self.master.table):
            held["extents without an object"] = extents - objects
            held["objects that Master does not know"] = objects - len(self.master.table)
        return held

    def run(
        self,
        test: Callable[[], Coroutine[Any, Any, Any]],
        *,
        settle_s: float = SETTLE_S,
        check: bool = True,
    ) -> Any:
        """Run a test, let messages and staging under way end, and check that nothing is held."""

        async def whole() -> Any:
            result = await test()
            if check:
                await self.clock.sleep(settle_s)
                await self.quiesce()
                held = self.at_rest()
                assert not held, f"not at rest: {held}"
                self.master.table.check()
            for connector in self.connectors:
                await connector.close()
            for manager in self.nodes.values():
                await manager.close()
            if check:
                assert self.fabric.registered == 0
                left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
                assert not left, f"tasks are left: {left}"
            return result

        try:
            return self.clock.run(whole())
        finally:
            self.checked = check
            self.clock.close()
