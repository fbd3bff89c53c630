"""Master as a process: the metadata server of ``master.py``, served to workers and nodes.

Master knows a node by what the node reported last. Before it allocates there it asks for the
node's space, and before it registers blocks it lets the node publish them; a node that does not
answer in time gets no new blocks for a while, and is never waited for longer. A node that starts
anew announces itself under a new epoch: what was known of the old one is forgotten, and the new
one's *catalog* (what it rebuilt from its files) is taken in. So is Master rebuilt when it starts
anew itself: all nodes announce themselves again. Leases that an earlier Master gave are not known;
their readers are protected by the pins of their streams on the node, which no eviction takes away.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from cxlbench.emu.clock import JobSet, WallClock
from cxlbench.emu.wire import WireClient, WireError
from cxlbench.emu.wire_server import Peer, WireServer
from cxlbench.hymcache import messages as m
from cxlbench.hymcache.kv_manager import DeviceSpace
from cxlbench.hymcache.master import Master, RemoteBlock
from cxlbench.hymcache.members import Members
from cxlbench.kv.results import KeyResult

AVOID_S = 1.0
"""How long a node that did not answer gets no new blocks."""
NODE_TIMEOUT_S = 0.3
CATALOG_TIMEOUT_S = 5.0

_SPACES = msgspec.msgpack.Decoder(list[m.SpaceAnswer])
_FLAGS = msgspec.msgpack.Decoder(list[bool])
_CATALOG = msgspec.msgpack.Decoder(m.Catalog)


class NodeMirror:
    """A node as Master's plain calls see it: what it reported last, and what was sent since."""

    def __init__(
        self, clock: WallClock, peer: Peer, announced: m.Announce, *, timeout_s: float
    ) -> None:
        self.clock = clock
        self.peer = peer
        self.node = announced.node
        self.endpoint = announced.endpoint
        self.epoch = announced.epoch
        self.device_count = announced.device_count
        self.avoid_until_s = 0.0
        self.taken_in = False
        """Whether all that it has is known here. Until then nobody is told of it."""
        self.wire = WireClient(
            clock, announced.endpoint, sends=m.TO_NODE, name="Master", timeout_s=timeout_s
        )
        self._reports: dict[int, list[m.SpaceAnswer]] = {}
        self._gained: dict[tuple[int, int], int] = {}
        self._published: set[tuple[bytes, int, int]] = set()
        self._freed: set[bytes] | None = None
        """What the segment that is being evicted has let go at once."""

    async def ask(self, body: Any, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        """Ask the node; raises ``WireError``, and avoids the node for a while."""
        try:
            return await self.wire.call(body, decoder)
        except WireError:
            self.avoid_until_s = self.clock.real() + AVOID_S
            raise

    async def refresh(self, size_bytes: int) -> None:
        """Learn the node's space for objects of ``size_bytes``."""
        self._reports[size_bytes] = await self.ask(m.AskSpace(size_bytes), _SPACES)
        for device in range(self.device_count):
            self._gained[device, size_bytes] = 0

    async def announce_published(
        self, blocks: Sequence[RemoteBlock]
    ) -> list[tuple[bytes, int, int]]:
        """Let the node publish ``blocks``; return those that it did."""
        flags = await self.ask(
            m.Publish(
                [b.key for b in blocks], [b.address for b in blocks], [b.generation for b in blocks]
            ),
            _FLAGS,
        )
        done = [
            (b.key, b.address, b.generation) for b, flag in zip(blocks, flags, strict=True) if flag
        ]
        self._published.update(done)
        return done

    # What Master's plain calls ask of a node.

    def space(self, device: int, size_bytes: int) -> DeviceSpace:
        """Return what was reported, and what evicted segments have given since."""
        report = self._reports[size_bytes][device]
        gained = self._gained[device, size_bytes]
        return DeviceSpace(
            report.capacity_bytes,
            report.extent_bytes,
            report.free_bytes + gained,
            report.dead_bytes,
        )

    def emptiest(self, device: int, size_bytes: int) -> Iterator[list[bytes]]:
        """Yield the segments that the report offers; each counts as free once it was evicted."""
        for nbytes, keys in self._reports[size_bytes][device].victims:
            freed = self._freed = set[bytes]()
            yield keys
            self._freed = None
            if freed.issuperset(keys):
                self._gained[device, size_bytes] += nbytes

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """Tell the node to drop objects."""
        if self._freed is not None:
            self._freed.update(key for key, _ in objects)
        self.wire.post(m.Free([key for key, _ in objects], [gen for _, gen in objects]))

    def publish(self, key: bytes, address: int, generation: int) -> bool:
        """Say whether the node has published the object; it is asked once."""
        place = (key, address, generation)
        if place in self._published:
            self._published.discard(place)
            return True
        return False


class MasterServer:
    """Serves Master until it is closed."""

    def __init__(
        self,
        clock: WallClock,
        endpoint: str,
        *,
        epoch: int,
        make_master: Callable[[int], Master],
        node_timeout_s: float = NODE_TIMEOUT_S,
    ) -> None:
        self.clock = clock
        self.epoch = epoch
        self.node_timeout_s = node_timeout_s
        self.catalog_timeout_s = CATALOG_TIMEOUT_S
        self._make_master = make_master
        self.master: Master | None = None
        """Made when the first node tells how many objects it may hold."""
        self.mirrors: dict[int, NodeMirror] = {}
        self._members = Members()
        self._jobs = JobSet(clock)
        self.server = WireServer(
            clock,
            endpoint,
            m.TO_MASTER,
            name="Master",
            epoch=epoch,
            on_call=self._call,
            on_post=self._post,
            on_gone=self._peer_gone,
        )

    # -- serving --------------------------------------------------------------------------------

    def _call(self, peer: Peer, body: Any) -> Any:
        return _CALLS[type(body)](self, peer, body)

    def _post(self, peer: Peer, body: Any) -> None:
        handler = _POSTS.get(type(body))
        if handler is not None and self.master is not None:
            handler(self.master, body)

    def _peer_gone(self, peer: Peer) -> None:
        for member in self._members.end(peer):
            if self.master is not None:
                self.master.drop_client(member)
        for mirror in list(self.mirrors.values()):
            if mirror.peer is peer:
                self._forget(mirror)

    def _lookup(self, peer: Peer, body: m.Lookup) -> m.LookupAnswer:
        if self.master is None:
            return m.LookupAnswer([None] * len(body.keys), self.clock.now())
        reply = self.master.lookup(self._members.note(peer, body.reader), body.keys, used=body.used)
        places = [None if block is None else block.place for block in reply.blocks]
        return m.LookupAnswer(places, reply.lease_until_s)

    async def _allocate(self, peer: Peer, body: m.Allocate) -> m.AllocateAnswer:
        master = self.master
        now = self.clock.real()
        avoid = {n.node for n in self.mirrors.values() if n.avoid_until_s > now or not n.taken_in}
        nothing = m.AllocateAnswer(-1, None, [KeyResult.NO_SPACE] * len(body.keys))
        if master is None:
            return nothing
        near = body.near
        if near is not None and near[0] in self.mirrors:
            near = near if near[1] < self.mirrors[near[0]].device_count else None
        place = master.place(body.keys, body.size_bytes, near=near, after=body.after, avoid=avoid)
        mirror = None if place is None else self.mirrors.get(place[0])
        if place is None or mirror is None:
            return nothing
        try:
            await mirror.refresh(body.size_bytes)
        except WireError:
            return nothing
        if self.mirrors.get(mirror.node) is not mirror or peer.address not in self.server.peers:
            return nothing
        reply = master.allocate_at(
            self._members.note(peer, body.ticket), body.keys, body.size_bytes, place
        )
        return m.AllocateAnswer(reply.node, reply.device, list(reply.refusals))

    async def _register(self, peer: Peer, body: m.Register) -> list[KeyResult]:
        blocks = [
            RemoteBlock(key, *place) for key, place in zip(body.keys, body.places, strict=True)
        ]
        lost = [KeyResult.LEASE_EXPIRED] * len(blocks)
        mirror = self.mirrors.get(blocks[0].node) if blocks else None
        if self.master is None or mirror is None or any(b.node != mirror.node for b in blocks):
            return lost
        try:
            published = await mirror.announce_published(blocks)
        except WireError:
            # It may have published them all the same: nobody would ever free them.
            mirror.free([(b.key, b.generation) for b in blocks])
            return lost
        if self.mirrors.get(mirror.node) is not mirror:
            return lost
        results = self.master.register(body.ticket, blocks, chain=body.chain)
        registered = {b.key for b, r in zip(blocks, results, strict=True) if r is KeyResult.STORED}
        orphans = [(key, gen) for key, _, gen in published if key not in registered]
        for place in published:
            mirror.publish(*place)
        if orphans:
            mirror.free(orphans)
        return results

    # -- nodes ----------------------------------------------------------------------------------

    async def _announce(self, peer: Peer, body: m.Announce) -> bool | str:
        """Take a node in, with what it has."""
        known = self.mirrors.get(body.node)
        if known is not None:
            if known.peer is not peer and self.server.lives(known.peer):
                return f"node {body.node} is there already, at {known.endpoint}"
            self._forget(known)
        if self.master is None:
            self.master = self._make_master(body.max_objects)
        try:
            mirror = NodeMirror(self.clock, peer, body, timeout_s=self.node_timeout_s)
        except OSError as error:
            return str(error)
        self.mirrors[body.node] = mirror
        self.master.add_node(mirror)
        try:
            first, more = 0, True
            while more:
                part = await mirror.wire.call(
                    m.AskCatalog(first), _CATALOG, timeout_s=self.catalog_timeout_s
                )
                if self.mirrors.get(body.node) is not mirror:
                    return True
                refused = self.master.adopt(
                    [RemoteBlock(k, *p) for k, p in zip(part.keys, part.places, strict=True)]
                )
                if refused:
                    mirror.free([(block.key, block.generation) for block in refused])
                first, more = part.next, part.more
        except WireError:
            self._forget(mirror)  # it does not tell what it has: it is to try again
            return False
        mirror.taken_in = True
        return True

    def _forget(self, mirror: NodeMirror) -> None:
        if self.mirrors.get(mirror.node) is mirror:
            del self.mirrors[mirror.node]
            if self.master is not None:
                self.master.forget_node(mirror.node)
        self._jobs.spawn(mirror.wire.close())

    def _directory(self, peer: Peer, body: m.Directory) -> list[m.NodeEntry]:
        return [
            m.NodeEntry(n.node, n.endpoint, n.epoch)
            for n in sorted(self.mirrors.values(), key=lambda n: n.node)
            if n.taken_in
        ]

    def figures(self) -> dict[str, int | float | str]:
        """Return what ``status`` shows of Master."""
        figures: dict[str, int | float | str] = {
            "epoch": self.epoch,
            "clients": len(self.server.peers),
            "nodes": sum(mirror.taken_in for mirror in self.mirrors.values()),
            "refused peers": self.server.refused,
            "failed messages": self.server.failed,
        }
        if self.master is not None:
            counters = self.master.counters
            figures |= {
                "objects": len(self.master.table),
                "lookups": counters.lookups,
                "registered": counters.registered,
                "evicted": counters.evicted,
                **{f"held: {k}": v for k, v in self.master.at_rest().items() if v},
            }
        return figures

    async def close(self) -> None:
        """Stop serving."""
        await self.server.close()
        for mirror in list(self.mirrors.values()):
            await mirror.wire.close()
        await self._jobs.join()


_CALLS: dict[type, Callable[[MasterServer, Peer, Any], Any]] = {
    m.Lookup: MasterServer._lookup,
    m.Allocate: MasterServer._allocate,
    m.Register: MasterServer._register,
    m.Announce: MasterServer._announce,
    m.Directory: MasterServer._directory,
    m.AskStatus: lambda server, peer, body: server.figures(),
}

_POSTS: dict[type, Callable[[Master, Any], object]] = {
    m.AbortTicket: lambda master, body: master.abort(body.ticket),
    m.Release: lambda master, body: master.release(body.reader),
    m.Touch: lambda master, body: master.touch(body.chain),
    m.Gone: lambda master, body: master.gone(body.node, body.key, body.generation),
}
