"""Lookup: early matching of a request's blocks at Master, and the prefetch hint (HyMCache §4.1).

The unmatched blocks of a request are sent at once in batches of up to 32, without waiting for a
batch to fill. The first hit names the node, and the KV Manager there is told *all* remaining
candidates immediately, so that it stages the suffix while Lookup is still asking Master about it.
A chain that comes back to a node goes on in its stream there: it has one window on each device. The
number of hits reported is what both agree on: announced blocks can be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cxlbench.emu.clock import Job, JobSet
from cxlbench.hymcache.control import ControlError
from cxlbench.hymcache.master import RemoteBlock
from cxlbench.hymcache.node_service import Name
from cxlbench.hymcache.services import MasterClient, NodeClient

BATCH_KEYS = 32


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A run of a request's hits on one node: ``count`` of them from place ``first`` on."""

    node: int
    first: int
    count: int
    start: int
    """Position of the first one in the stream, which has all runs on the node."""
    name: Name
    rkeys: tuple[int, ...]
    staged: tuple[bool, ...]
    until_s: float
    """When the lease ends that the run was found under."""

    def position_of(self, place: int) -> int:
        """Return the position in the stream of the hit at ``place``."""
        return self.start + place - self.first


@dataclass(eq=False, slots=True)
class Found:
    """What Lookup knows of a request: leading hits, and the streams opened for them."""

    blocks: list[RemoteBlock] = field(default_factory=list)
    streams: list[OpenStream] = field(default_factory=list)
    asked: list[tuple[int, Name]] = field(default_factory=list)
    """Node and stream of every hint that was sent, whether or not it was answered."""
    opening: list[Job[None]] = field(default_factory=list)
    failed: bool = False
    """Whether Master or a node did not answer: there may be more hits than these."""
    released: bool = False
    """Whether the request has ended: a stream that is opened now is given back at once."""

    def stream_of(self, place: int) -> OpenStream | None:
        """Return the stream that covers a hit."""
        node = self.blocks[place].node
        for opened in self.streams:
            if opened.node == node and opened.first <= place < opened.first + opened.count:
                return opened
        return None


class Lookup:
    """Runs lookups of one connector."""

    def __init__(
        self,
        master: MasterClient,
        nodes: Mapping[int, NodeClient],
        *,
        names: Callable[[], Name],
        jobs: JobSet,
        batch_keys: int = BATCH_KEYS,
    ) -> None:
        if batch_keys < 1:
            raise ValueError(f"batch_keys must be at least 1, got {batch_keys}")
        self.master = master
        self.nodes = nodes
        self.batch_keys = batch_keys
        self._names = names
        self._jobs = jobs

    async def run(
        self,
        request_id: int,
        reader: Name,
        chain: Sequence[bytes],
        matched: int,
        found: Found,
    ) -> None:
        """Fill ``found`` with the leading hits of ``chain[matched:]``, under a lease of ``reader``.

        ``found`` is handed in so that whoever cancels this can still close what it opened.
        """
        keys = chain[matched:]
        for begin in range(0, len(keys), self.batch_keys):
            batch = keys[begin : begin + self.batch_keys]
            used = chain[: matched + begin]
            try:
                reply = await self.master.lookup(reader, batch, used=used)
            except ControlError:
                found.failed = True
                break
            for block in reply.blocks:
                if block is None:
                    break
                if not found.blocks or found.blocks[-1].node != block.node:
                    candidates = keys[len(found.blocks) :]
                    self._hint(request_id, block.node, candidates, found, reply.lease_until_s)
                found.blocks.append(block)
            if None in reply.blocks:
                break
        for job in found.opening:
            await job
        covered = 0
        while covered < len(found.blocks) and found.stream_of(covered) is not None:
            covered += 1
        del found.blocks[covered:]

    def _hint(
        self,
        request_id: int,
        node: int,
        candidates: Sequence[bytes],
        found: Found,
        until_s: float,
    ) -> None:
        """Tell a node the candidates from its first hit on; its answer is awaited later.

        A chain that comes back to a node goes on with its stream there, within the same window.
        """
        client = self.nodes.get(node)
        if client is None:  # Master knows it and we do not yet
            found.failed = True
            return
        first = len(found.blocks)
        name = self._names()
        onto = next((earlier for at, earlier in reversed(found.asked) if at == node), None)
        found.asked.append((node, name))

        async def hint() -> None:
            try:
                opened = await client.open_stream(
                    name, request_id, candidates, until_s=until_s, onto=onto
                )
            except ControlError:
                found.failed = True
                return
            if found.released:
                client.close_stream(name)
            else:
                found.streams.append(
                    OpenStream(
                        node,
                        first,
                        opened.objects,
                        opened.start,
                        name,
                        opened.rkeys,
                        opened.staged,
                        until_s,
                    )
                )

        found.opening.append(self._jobs.spawn(hint()))
