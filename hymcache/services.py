"""Master and nodes as a connector sees them: one protocol, whatever carries the messages.

``LocalMaster`` and ``LocalNode`` call objects of the same process through a ``ControlPlane``, which
charges the profiled costs under either clock. ``remote.py`` has the same for other processes.

Calls are awaited and may raise ``ControlError``. What they hand out has a name, ``(member,
serial)``, of the caller's choice, so it can be given back even if the answer never came. Posts
return at once; they take effect in the order of the calls and posts before them.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cxlbench.emu.fabric import OneSided
from cxlbench.hymcache.control import ControlPlane
from cxlbench.hymcache.kv_manager import Grant
from cxlbench.hymcache.master import AllocateReply, LookupReply, Master, RemoteBlock
from cxlbench.hymcache.node_service import Name, NodeService, StreamOpened
from cxlbench.kv.results import KeyResult


class MasterClient(Protocol):
    """Master, as one client sees it."""

    member: int
    """The client's number: the first part of all names that it chooses."""

    async def lookup(
        self, reader: Name, keys: Sequence[bytes], *, used: Sequence[bytes]
    ) -> LookupReply:
        """Return descriptors of the READY keys, under the lease of ``reader``."""

    async def allocate(
        self,
        ticket: Name,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None,
        after: bytes | None,
    ) -> AllocateReply:
        """Choose the node for new blocks and mark their keys WRITING under ``ticket``."""

    async def register(
        self, ticket: Name, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes]
    ) -> list[KeyResult]:
        """Make committed blocks READY."""

    def abort(self, ticket: Name) -> None:
        """Give up what is still WRITING under a ticket."""

    def release(self, reader: Name) -> None:
        """End a lease."""

    def touch(self, chain: Sequence[bytes]) -> None:
        """Note that a chain is in use."""

    def gone(self, node: int, key: bytes, generation: int) -> None:
        """Tell that an object's bytes are not what they must be."""

    async def delivered(self) -> None:
        """Wait until all posts so far have taken effect, if that can be known."""


class NodeClient(Protocol):
    """A node, as one client sees it."""

    node: int

    @property
    def queue_pair(self) -> OneSided:
        """The one-sided way to the node's devices."""

    async def open_stream(
        self,
        name: Name,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float,
        onto: Name | None = None,
    ) -> StreamOpened:
        """Tell the node what will be read, in this order; with ``onto``, behind what is read there.

        ``onto`` is the name of an earlier stream of the same request.
        """

    async def token(self, name: Name, position: int, *, staged: bool) -> None:
        """Wait for a read token; raise ``DeviceError`` if it will not come."""

    def consumed(self, name: Name, position: int, *, staged: bool) -> None:
        """Give a read token back."""

    def close_stream(self, name: Name) -> None:
        """Give a stream back."""

    async def reserve(
        self, name: Name, keys: Sequence[bytes], size_bytes: int, *, device: int | None
    ) -> list[Grant | KeyResult]:
        """Ask for leave to write a batch."""

    async def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        """Tell that the bytes are in place."""

    def abort(self, name: Name) -> None:
        """Give back what a batch still holds."""

    async def delivered(self) -> None:
        """Wait until all posts so far have taken effect, if that can be known."""


class LocalMaster:
    """A Master in this process."""

    def __init__(self, control: ControlPlane, master: Master) -> None:
        self.control = control
        self.master = master
        self.member = master.join()

    async def lookup(
        self, reader: Name, keys: Sequence[bytes], *, used: Sequence[bytes]
    ) -> LookupReply:
        """Return descriptors of the READY keys, under the lease of ``reader``."""
        costs = self.control.costs
        return await self.control.call(
            "master",
            costs.lookup_call + costs.lookup_key * len(keys),
            lambda: self.master.lookup(reader, keys, used=used),
        )

    async def allocate(
        self,
        ticket: Name,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None,
        after: bytes | None,
    ) -> AllocateReply:
        """Choose the node for new blocks and mark their keys WRITING under ``ticket``."""
        costs = self.control.costs
        return await self.control.call(
            "master",
            costs.lookup_call + costs.lookup_key * len(keys),
            lambda: self.master.allocate(ticket, keys, size_bytes, near=near, after=after),
        )

    async def register(
        self, ticket: Name, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes]
    ) -> list[KeyResult]:
        """Make committed blocks READY."""
        return await self.control.call(
            "master",
            self.control.costs.register * len(blocks),
            lambda: self.master.register(ticket, blocks, chain=chain),
        )

    def abort(self, ticket: Name) -> None:
        """Give up what is still WRITING under a ticket."""
        self.control.post(lambda: self.master.abort(ticket))

    def release(self, reader: Name) -> None:
        """End a lease."""
        self.control.post(lambda: self.master.release(reader), self.control.costs.release)

    def touch(self, chain: Sequence[bytes]) -> None:
        """Note that a chain is in use."""
        self.control.post(lambda: self.master.touch(chain))

    def gone(self, node: int, key: bytes, generation: int) -> None:
        """Tell that an object's bytes are not what they must be."""
        self.control.post(lambda: self.master.gone(node, key, generation))

    async def delivered(self) -> None:
        """Wait until all posts so far have taken effect."""
        await self.control.delivered()


class LocalNode:
    """A node in this process."""

    def __init__(self, control: ControlPlane, service: NodeService, queue_pair: OneSided) -> None:
        self.control = control
        self.service = service
        self.queue_pair = queue_pair
        self.node = service.node
        self._peer = f"node{service.node}"

    async def open_stream(
        self,
        name: Name,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float,
        onto: Name | None = None,
    ) -> StreamOpened:
        """Tell the node what will be read; where it stages, the first prefetch is issued then."""
        stages = self.service.manager.prefetcher.stages()
        return await self.control.call(
            self._peer,
            self.control.costs.prefetch_issue if stages else 0.0,
            lambda: self.service.open_stream(name, request_id, keys, until_s=until_s, onto=onto),
        )

    async def token(self, name: Name, position: int, *, staged: bool) -> None:
        """Wait for a read token, and for its way here where it announces staging."""
        await self.service.token(name, position)
        if staged and self.control.half_s:
            await self.control.clock.sleep(self.control.half_s)

    def consumed(self, name: Name, position: int, *, staged: bool) -> None:
        """Give a read token back; where blocks are staged, the next one takes its place."""
        costs = self.control.costs
        self.control.post(
            lambda: self.service.consumed(name, position),
            costs.release + (costs.prefetch_issue if staged else 0.0),
        )

    def close_stream(self, name: Name) -> None:
        """Give a stream back."""
        self.control.post(lambda: self.service.close_stream(name), self.control.costs.release)

    async def reserve(
        self, name: Name, keys: Sequence[bytes], size_bytes: int, *, device: int | None
    ) -> list[Grant | KeyResult]:
        """Ask for leave to write a batch."""
        return await self.control.call(
            self._peer,
            self.control.costs.reserve * len(keys),
            lambda: self.service.reserve(name, keys, size_bytes, device=device),
        )

    async def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        """Tell that the bytes are in place."""
        return await self.control.call(
            self._peer,
            self.control.costs.commit * len(tokens),
            lambda: self.service.commit(tokens),
        )

    def abort(self, name: Name) -> None:
        """Give back what a batch still holds."""
        self.control.post(lambda: self.service.abort(name))

    async def delivered(self) -> None:
        """Wait until all posts so far have taken effect."""
        await self.control.delivered()
