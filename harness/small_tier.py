"""A small HyMCache tier on an emulated CXL-HM, called like a library: for users' tests and scripts.

One worker, real bytes in memory, and a clock that runs only while a call is under way. With the
virtual clock (default) a call takes no real time and is deterministic by seed. The parts are open:
``rig``, ``connector``, ``master``, ``node``, ``device``.

Sizes are those of the full-size system; ``scale`` divides them, and the blocks stored are what
they are: real bytes. Units: bytes, s. Left out: a serving engine (``replay.py`` has one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import Bytes
from cxlbench.harness.held_clock import HeldVirtualClock, HeldWallClock
from cxlbench.harness.rig import Rig, RigSpec
from cxlbench.harness.rig_checks import check_rig
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.hymcache.kv_manager import KvManager
from cxlbench.hymcache.master import Master
from cxlbench.kv.footer import Verify
from cxlbench.kv.identity import KEY_BYTES
from cxlbench.kv.results import KeyResult

T = TypeVar("T")
Key = str | bytes

DRAM = "4 GiB"
CAPACITY_BYTES = 16 << 30
SCALE = 64.0
SETTLE_S = 0.01


class SmallTier:
    """The tier. Close it, or use it as a context.

    Raises (from the constructor):
        ProfileError, ScaleError: the device cannot be made so.
        RigSpecError, BlockTooLargeError: a count or a capacity is none that a tier can have.
        HostLimitError: this host has no such folder or memory.
    """

    def __init__(
        self,
        *,
        scale: float = SCALE,
        wall: bool = False,
        faults: FaultPlan | None = None,
        profile: str | Path = "cxl-hm-prototype",
        overrides: Mapping[str, str] | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
        prefetch: bool = True,
        nodes: int = 1,
        devices_per_node: int = 1,
        verify: Verify = Verify.FULL,
        folder: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        if folder is not None and not wall:
            raise ValueError("files take real time: use wall=True with a folder")
        self.faults = faults or FaultPlan.none()
        device = load_as(
            CxlHmProfile, profile, overrides={"dram_capacity": DRAM, **(overrides or {})}
        )
        spec = RigSpec(
            device=device,
            block_bytes=16 << 20,
            nodes=nodes,
            devices_per_node=devices_per_node,
            device_capacity_bytes=capacity_bytes,
            prefetch=prefetch,
            verify=verify,
            scale=scale,
            seed=seed,
        )
        check_rig(spec)
        self.clock = HeldWallClock() if wall else HeldVirtualClock()
        try:
            self.rig = Rig(
                self.clock,
                spec,
                phantom=False,
                folder=None if folder is None else Path(folder),
                faults=self.faults,
            )
        except BaseException:
            self.clock.close()
            raise
        self._requests = 0
        self._sizes: dict[bytes, int] = {}
        self.closed = False

    # -- the parts ------------------------------------------------------------------------------

    @property
    def connector(self) -> HyMCacheConnector:
        """The worker's side."""
        return self.rig.connectors[0]

    @property
    def master(self) -> Master:
        """The index of all nodes."""
        return self.rig.master

    @property
    def node(self) -> KvManager:
        """The KV Manager of the first node."""
        return self.rig.nodes[0]

    @property
    def device(self) -> CxlHm:
        """The first node's first device."""
        device = self.node.devices[0]
        assert isinstance(device, CxlHm)
        return device

    # -- blocks ---------------------------------------------------------------------------------

    def store(self, key: Key, block: bytes) -> KeyResult:
        """Store one block: STORED, EXISTS, NO_SPACE (refused at once), or ERROR."""
        return self.store_chain([key], [block])[0]

    def store_chain(self, keys: Sequence[Key], blocks: Sequence[bytes]) -> list[KeyResult]:
        """Store the consecutive blocks of one chain, all of one size, heads first."""
        digests = [as_key(key) for key in keys]
        buffers: list[Bytes] = [np.frombuffer(block, dtype=np.uint8) for block in blocks]
        if len(digests) != len(buffers):
            raise ValueError(f"{len(digests)} keys for {len(buffers)} blocks: one each")
        if not digests:
            return []
        results = self.drive(self._store(digests, buffers))
        for digest, buffer, result in zip(digests, buffers, results, strict=True):
            if result is KeyResult.STORED:  # any other leaves what the tier had, and its size
                self._sizes[digest] = buffer.nbytes
        return results

    async def _store(self, keys: list[bytes], buffers: list[Bytes]) -> list[KeyResult]:
        request = self._next()
        try:
            done = await self.connector.submit_store(request, keys, buffers).done.wait()
        finally:
            self.connector.release(request)
            self.connector.poll()
        return list(done.results)

    def load(self, key: Key) -> bytes | None:
        """Return a block, verified; None on a miss, whatever the reason."""
        blocks = self.load_chain([key])
        return blocks[0] if blocks else None

    def load_chain(self, keys: Sequence[Key]) -> list[bytes]:
        """Return the leading blocks of a chain that the tier delivers, each verified."""
        digests = [as_key(key) for key in keys]
        if not digests:
            return []
        return self.drive(self._load(digests, self._sizes.get(digests[0], 1)))

    async def _load(self, keys: list[bytes], size_bytes: int) -> list[bytes]:
        request, connector = self._next(), self.connector
        buffers: list[Bytes] = [np.zeros(size_bytes, dtype=np.uint8) for _ in keys]
        try:
            found = await connector.submit_lookup(request, keys, size_bytes).done.wait()
            hits = found.leading_hits
            if not hits:
                return []
            load = connector.submit_load(request, keys[:hits], buffers[:hits])
            delivered = (await load.done.wait()).leading_hits
        finally:
            connector.release(request)
            connector.poll()
        return [buffer.tobytes() for buffer in buffers[:delivered]]

    def _next(self) -> int:
        self._requests += 1
        return self._requests

    # -- looking after it -----------------------------------------------------------------------

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the tier's clock to its end, and return its result.

        Raises:
            ValueError: the tier is closed.
        """
        if self.closed:
            work.close()
            raise ValueError("the tier is closed; make another one")
        return self.clock.drive(work)

    def settle(self) -> None:
        """Let everything committed reach the backing store, and every message arrive."""
        self.drive(self._settle())

    async def _settle(self) -> None:
        await self.rig.quiesce()
        await self.clock.sleep(SETTLE_S)

    def at_rest(self) -> dict[str, int]:
        """Return what is still held, by name, once all has settled: empty if nothing leaked."""
        self.settle()
        return self.rig.at_rest()

    def close(self) -> None:
        """End the tier and remove its files; a second call does nothing."""
        if self.closed:
            return
        try:
            self.drive(self.rig.close())
        finally:
            self.closed = True
            self.clock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_key(key: Key) -> bytes:
    """Return a block key: 32 bytes as they are, anything else by its SHA-256."""
    raw = key.encode() if isinstance(key, str) else key
    return raw if isinstance(key, bytes) and len(raw) == KEY_BYTES else hashlib.sha256(raw).digest()
