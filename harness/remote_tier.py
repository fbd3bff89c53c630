"""One worker's connector to a deployment: Master and nodes in other processes.

``RemoteTier`` finds Master by the deployment's run directory, asks it where the nodes are, and puts
a ``HyMCacheConnector`` on top, the same that runs inside one process. Nodes that come later are
joined when Master names them. Units: bytes, s.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.link import Link
from cxlbench.devices.profile import CopyEngineProfile, load_as, scale_profile, scaled_bytes
from cxlbench.emu.clock import JobSet, WallClock
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.hymcache.connector import STAGING_BYTES, HyMCacheConnector
from cxlbench.hymcache.control import ControlError
from cxlbench.hymcache.remote import RemoteMaster, RemoteNode
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.footer import Verify

LOOK_EVERY_S = 0.25
"""How often Master is asked for nodes that are not known yet."""


class RemoteTier:
    """A worker's way into a deployment. ``close`` it when done."""

    def __init__(
        self,
        clock: WallClock,
        spec: DeploymentSpec,
        *,
        worker: int = 0,
        verify: Verify = Verify.FULL,
        copies: bool = True,
        on_block: Callable[[BlockTimes], None] | None = None,
    ) -> None:
        self.clock = clock
        self.spec = spec
        self.name = f"worker {worker}"
        self.pipes: list[Pipe] = []
        scale = spec.scale
        self._link = Link(
            clock,
            scale_profile(spec.load_link(spec.worker_link), scale),
            name=f"worker{worker}.nic",
        )
        self.pipes.extend((self._link.tx, self._link.rx))
        self._costs = spec.load_software()
        self.master = RemoteMaster(
            clock,
            spec.endpoint("master"),
            self._costs,
            member=secrets.randbits(46) << 16 | worker,
            name=self.name,
            timeout_s=spec.call_timeout_s,
        )
        self.nodes: dict[int, RemoteNode] = {}
        engine = None
        if copies and spec.throttled:
            profile = scale_profile(load_as(CopyEngineProfile, "gpu-copy-gen4x16"), scale)
            engine = CopyEngine(clock, profile, name=f"worker{worker}.copy")
        self.connector = HyMCacheConnector(
            clock,
            self.master,
            self.nodes,
            staging_bytes=scaled_bytes(STAGING_BYTES, scale, what="the staging buffer"),
            deadline_s=spec.deadline_s,
            window_bytes=scaled_bytes(spec.window_bytes, scale, what="the prefetch window"),
            verify=verify,
            gpu_copy=engine,
            on_block=on_block,
        )
        self._jobs = JobSet(clock)

    async def join(self, *, patience_s: float = 10.0) -> None:
        """Wait until all nodes of the deployment are known, and for ``patience_s`` at most.

        Nodes that are down then are missed by nobody: the tier works with the others, and takes
        each in when Master names it. Raises ``HostLimitError`` if none is there.
        """
        give_up_s = self.clock.real() + patience_s
        while not await self._look():
            if self.clock.real() >= give_up_s:
                break
            await self.clock.sleep_until(self.clock.real() + LOOK_EVERY_S)
        if not self.nodes:
            raise HostLimitError(
                f"no node is there after {patience_s:g} s; is `cxlbench up` running in "
                f"{self.spec.run_dir}?"
            )
        if len(self.nodes) < self.spec.nodes:
            self._jobs.spawn(self._look_on())

    async def _look_on(self) -> None:
        """Look for the nodes that are not known yet, until all are."""
        while not await self._look():
            await self.clock.sleep_until(self.clock.real() + LOOK_EVERY_S)

    async def _look(self) -> bool:
        """Ask Master for nodes; whether all are known."""
        try:
            entries = await self.master.directory()
        except ControlError:
            return False
        for entry in entries:
            if entry.node not in self.nodes:
                node = RemoteNode(
                    self.clock,
                    entry.node,
                    entry.endpoint,
                    self._costs,
                    name=self.name,
                    path=[self._link.rx],
                    write_path=[self._link.tx],
                    latency_s=self._link.latency_s,
                    timeout_s=self.spec.call_timeout_s,
                    deadline_s=self.spec.deadline_s,
                )
                self.nodes[entry.node] = node
                await node.attached()
        return len(self.nodes) == self.spec.nodes

    async def close(self) -> None:
        """Release everything, and close the connections."""
        await self._jobs.cancel()
        await self.connector.close()
        for node in self.nodes.values():
            await node.close()
        await self.master.close()
