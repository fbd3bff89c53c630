"""Lookup: early matching of a request's blocks at Master, and the prefetch hint (HyMCache §4.1).

The unmatched blocks of a request are sent at once in batches of up to 32, without waiting for a
batch to fill. The first hit names the node, and the KV Manager there is told *all* remaining
candidates immediately, so that it stages the suffix while Lookup is still asking Master about it.
The number of hits reported is what both agree on: announced blocks can be fetched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cxlbench.emu.clock import Job
from cxlbench.hymcache.control import ControlError, ControlPlane
from cxlbench.hymcache.kv_manager import KvManager
from cxlbench.hymcache.master import LookupReply, Master, RemoteBlock
from cxlbench.hymcache.prefetch_window import ReadStream

BATCH_KEYS = 32


@dataclass(eq=False, slots=True)
class OpenStream:
    """A stream on a node, and the place of its first object among the request's hits."""

    node: int
    first: int
    stream: ReadStream
    rkeys: tuple[int, ...]
    until_s: float
    """When the lease ends that the stream was opened under, and the stream with it."""


@dataclass(eq=False, slots=True)
class Found:
    """What Lookup knows of a request: leading hits, and the streams opened for them."""

    blocks: list[RemoteBlock] = field(default_factory=list)
    streams: list[OpenStream] = field(default_factory=list)
    opening: list[Job[None]] = field(default_factory=list)
    failed: bool = False
    """Whether Master or a node did not answer: there may be more hits than these."""
    released: bool = False
    """Whether the request has ended: a hint that arrives now opens nothing."""

    def stream_of(self, place: int) -> OpenStream | None:
        """Return the stream that covers a hit."""
        node = self.blocks[place].node
        for opened in self.streams:
            if opened.node == node and opened.first <= place < opened.first + len(opened.stream):
                return opened
        return None


class Lookup:
    """Runs lookups of one connector."""

    def __init__(
        self,
        control: ControlPlane,
        master: Master,
        nodes: Mapping[int, KvManager],
        *,
        batch_keys: int = BATCH_KEYS,
    ) -> None:
        if batch_keys < 1:
            raise ValueError(f"batch_keys must be at least 1, got {batch_keys}")
        self.control = control
        self.master = master
        self.nodes = nodes
        self.batch_keys = batch_keys

    async def run(
        self,
        request_id: int,
        reader: Hashable,
        chain: Sequence[bytes],
        matched: int,
        found: Found,
    ) -> None:
        """Fill ``found`` with the leading hits of ``chain[matched:]``, under a lease of ``reader``.

        ``found`` is handed in so that whoever cancels this can still close what it opened.
        """
        costs = self.control.costs
        keys = chain[matched:]
        for begin in range(0, len(keys), self.batch_keys):
            batch = keys[begin : begin + self.batch_keys]
            used = chain[: matched + begin]
            try:
                reply: LookupReply = await self.control.call(
                    "master",
                    costs.lookup_call + costs.lookup_key * len(batch),
                    partial(self.master.lookup, reader, batch, used=used),
                )
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
        """Tell a node the candidates from its first hit on; its answer is awaited later."""
        first = len(found.blocks)
        manager = self.nodes[node]

        def open_here() -> None:
            if not found.released:
                stream = manager.open_stream(request_id, candidates, until_s=until_s)
                rkeys = tuple(region.rkey for region in manager.regions)
                found.streams.append(OpenStream(node, first, stream, rkeys, until_s))

        async def hint() -> None:
            try:
                await self.control.call(f"node{node}", 0.0, open_here)
            except ControlError:
                found.failed = True

        found.opening.append(self.control.clock.spawn(hint()))
