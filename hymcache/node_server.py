"""A node as a process: KV Manager, its devices and their pipes, served to workers and to Master.

Control messages come by sockets (``emu/wire.py``), data goes through shared memory
(``emu/fabric_shared.py``). The node announces itself at Master under a new *epoch* each time it
starts; its memory regions get new rkeys then, so nothing that was handed out before is good any
more. Everything that a client held comes back when its process ends.

Units: bytes, s.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from cxlbench.emu.clock import Job, JobSet, WallClock
from cxlbench.emu.fabric_shared import Done, GiveUp, PostRead, PostWrite
from cxlbench.emu.fabric_shared_owner import SharedCarrier
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.wire import WireClient, WireError
from cxlbench.emu.wire_server import Peer, WireServer
from cxlbench.hymcache import messages as m
from cxlbench.hymcache.kv_manager import Grant, KvManager
from cxlbench.hymcache.members import Members
from cxlbench.hymcache.node_service import NodeService

CATALOG_PART = 4096
VICTIMS = 16
"""Segments that a report of space offers for eviction at most."""
ANNOUNCE_EVERY_S = 0.5

_VERDICT = msgspec.msgpack.Decoder(bool | str)


class RefusedByMasterError(RuntimeError):
    """Master does not want this node."""


class NodeServer:
    """Serves one node until it is closed."""

    def __init__(
        self,
        clock: WallClock,
        manager: KvManager,
        carrier: SharedCarrier,
        *,
        endpoint: str,
        master_endpoint: str,
        epoch: int,
        max_objects: int,
        hold_s: float = math.inf,
        device_figures: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Serve ``manager``; no stream is held for longer than ``hold_s``, whatever is asked."""
        self.clock = clock
        self._hold_s = hold_s
        self._device_figures = device_figures
        self.manager = manager
        self.service = NodeService(manager)
        self.carrier = carrier
        self.epoch = epoch
        self.max_objects = max_objects
        self._jobs = JobSet(clock)
        self._announcing: Job[None] | None = None
        self._members = Members()
        self.server = WireServer(
            clock,
            endpoint,
            m.TO_NODE,
            name=f"node {manager.node}",
            epoch=epoch,
            on_call=self._call,
            on_post=self._post,
            on_gone=self._peer_gone,
        )
        self.master = WireClient(
            clock,
            master_endpoint,
            sends=m.TO_MASTER,
            name=f"node {manager.node}",
            on_epoch=lambda _: self._announce_soon(),
        )
        manager.on_gone = lambda node, key, generation: self.master.post(
            m.Gone(node, key, generation)
        )

    # -- being known ----------------------------------------------------------------------------

    def _announce_soon(self) -> None:
        """Tell the Master that has just welcomed us; an earlier one need not know any more."""
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = self._jobs.spawn(self._announce())

    async def _announce(self) -> None:
        """Tell Master that we are here, until it has heard it."""
        manager = self.manager
        body = m.Announce(
            manager.node, self.server.endpoint, self.epoch, manager.device_count, self.max_objects
        )
        while True:
            try:
                verdict = await self.master.call(body, _VERDICT, timeout_s=10.0)
            except WireError:
                if self.master.refused is not None:
                    raise RefusedByMasterError(self.master.refused) from None
                verdict = False
            if isinstance(verdict, str):
                raise RefusedByMasterError(verdict)
            if verdict:
                return
            await self.clock.sleep_until(self.clock.real() + ANNOUNCE_EVERY_S)

    # -- serving --------------------------------------------------------------------------------

    def _call(self, peer: Peer, body: Any) -> Any:
        return _CALLS[type(body)](self, peer, body)

    def _post(self, peer: Peer, body: Any) -> None:
        handler = _POSTS.get(type(body))
        if handler is not None:
            handler(self, peer, body)

    def _peer_gone(self, peer: Peer) -> None:
        self.carrier.drop_client(peer)
        for member in self._members.end(peer):
            self.service.drop_client(member)

    def _open(self, peer: Peer, body: m.OpenNode) -> m.NodeMemory:
        carrier = self.carrier
        return m.NodeMemory(self.manager.node, self.epoch, carrier.arenas, carrier.table_info)

    def _open_stream(self, peer: Peer, body: m.OpenStream) -> m.StreamAnswer:
        opened = self.service.open_stream(
            self._members.note(peer, body.name),
            body.request_id,
            body.keys,
            until_s=min(body.until_s, self.clock.real() + self._hold_s),
            onto=body.onto,
        )
        return m.StreamAnswer(opened.start, opened.objects, list(opened.rkeys), list(opened.staged))

    async def _token(self, body: m.Token) -> Status:
        try:
            await self.service.token(body.name, body.position)
        except DeviceError as error:
            return error.status
        return Status.OK

    def _reserve(self, peer: Peer, body: m.Reserve) -> list[Any]:
        answers = self.service.reserve(
            self._members.note(peer, body.name), body.keys, body.size_bytes, device=body.device
        )
        return [
            m.GrantAnswer(a.token, a.rkey, a.address, a.generation, a.device)
            if isinstance(a, Grant)
            else a
            for a in answers
        ]

    def _space(self, peer: Peer, body: m.AskSpace) -> list[m.SpaceAnswer]:
        return [
            self._space_of(number, body.size_bytes) for number in range(len(self.manager.devices))
        ]

    def _space_of(self, device: int, size_bytes: int) -> m.SpaceAnswer:
        manager = self.manager
        space = manager.space(device, size_bytes)
        segment = manager.allocators[device].segment_bytes
        victims: list[tuple[int, list[bytes]]] = []
        if space.free_bytes < space.capacity_bytes // 4:
            for keys in manager.emptiest(device, size_bytes):
                victims.append((segment, keys))
                if len(victims) == VICTIMS:
                    break
        return m.SpaceAnswer(
            space.capacity_bytes, space.extent_bytes, space.free_bytes, space.dead_bytes, victims
        )

    def _publish(self, peer: Peer, body: m.Publish) -> list[bool]:
        return [
            self.manager.publish(key, address, generation)
            for key, address, generation in zip(
                body.keys, body.addresses, body.generations, strict=True
            )
        ]

    def _catalog(self, peer: Peer, body: m.AskCatalog) -> m.Catalog:
        rest = [o for o in self.manager.index.values() if o.generation >= body.first]
        rest.sort(key=lambda stored: stored.generation)
        end = min(CATALOG_PART, len(rest))
        while 0 < end < len(rest) and rest[end].generation == rest[end - 1].generation:
            end += 1  # files of several makes may have numbered alike
        part, node = rest[:end], self.manager.node
        return m.Catalog(
            [o.key for o in part],
            [(node, o.device, o.address, o.size_bytes, o.generation) for o in part],
            end < len(rest),
            part[-1].generation + 1 if part else body.first,
        )

    def figures(self) -> dict[str, int | str]:
        """Return what ``status`` shows of this node."""
        manager = self.manager
        held = {name: count for name, count in self.service.at_rest().items() if count}
        return {
            "epoch": self.epoch,
            "clients": len(self.server.peers),
            "objects": len(manager.index),
            "grants": self.carrier.granted,
            "refused peers": self.server.refused,
            "failed messages": self.server.failed,
            "prefetches issued": manager.prefetcher.issued,
            "reservations expired": manager.expired_reservations,
            **self._device_figures(),
            **{f"held: {name}": count for name, count in sorted(held.items())},
        }

    async def close(self) -> None:
        """Stop serving, and close the devices."""
        await self._jobs.cancel()
        await self.server.close()
        await self.master.close()
        self.carrier.close()
        await self.manager.close()


def _free(server: NodeServer, peer: Peer, body: m.Free) -> None:
    server.manager.free(list(zip(body.keys, body.generations, strict=True)))


_CALLS: dict[type, Callable[[NodeServer, Peer, Any], Any | Awaitable[Any]]] = {
    m.OpenNode: NodeServer._open,
    m.OpenStream: NodeServer._open_stream,
    m.Token: lambda server, peer, body: server._token(body),
    m.Reserve: NodeServer._reserve,
    m.Commit: lambda server, peer, body: server.service.commit(body.tokens),
    PostRead: lambda server, peer, body: server.carrier.post_read(peer, body),
    PostWrite: lambda server, peer, body: server.carrier.post_write(peer, body),
    Done: lambda server, peer, body: server.carrier.done(peer, body),
    m.AskSpace: NodeServer._space,
    m.Publish: NodeServer._publish,
    m.AskCatalog: NodeServer._catalog,
    m.AskStatus: lambda server, peer, body: server.figures(),
}

_POSTS: dict[type, Callable[[NodeServer, Peer, Any], object]] = {
    m.Consumed: lambda server, peer, body: server.service.consumed(body.name, body.position),
    m.CloseStream: lambda server, peer, body: server.service.close_stream(body.name),
    m.AbortBatch: lambda server, peer, body: server.service.abort(body.name),
    m.Free: _free,
    Done: lambda server, peer, body: server.carrier.done(peer, body),
    GiveUp: lambda server, peer, body: server.carrier.give_up(peer, body),
}
