"""The store path of a worker (HyMCache §4.1): from computed blocks to objects that can be found.

A store goes in batches of up to 32 blocks: Master names the node → KV Manager grants → RDMA WRITE
of payload and footer, through the staging budget → commit at the node → registration at Master.
Only what is registered can be found. Heads go before tails: the first block that is neither stored
nor there already ends the store, since what follows would be a tail without its head.

A batch chooses the names under which it asks for keys at Master and for grants at the node, because
an answer may never arrive. However the batch ends (done, refused, failed, cancelled), what is still
held under its names then is given back by message.

Units: bytes, s. Left out: writes of several blocks at once; a worker's link is busy with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cxlbench.emu.clock import Clock
from cxlbench.emu.memory import PAGE_BYTES, Buffer
from cxlbench.emu.status import Status
from cxlbench.emu.sync import Budget
from cxlbench.hymcache.control import ControlError
from cxlbench.hymcache.counters import ConnectorCounters
from cxlbench.hymcache.kv_manager import Grant
from cxlbench.hymcache.master import RemoteBlock
from cxlbench.hymcache.node_service import Name
from cxlbench.hymcache.services import MasterClient, NodeClient
from cxlbench.kv.footer import Footer, pack_footer
from cxlbench.kv.payload import checksum_of
from cxlbench.kv.results import KeyResult

STORE_BATCH = 32


@dataclass(eq=False, slots=True)
class Store:
    """One store: what is asked, and what became of it so far."""

    chain: Sequence[bytes]
    """The request's whole chain."""
    keys: Sequence[bytes]
    buffers: Sequence[Buffer]
    results: list[KeyResult]
    near: tuple[int, int] | None
    """Where the chain goes on (node, device); None if it has no block yet."""


@dataclass(eq=False, slots=True)
class Batch:
    """One batch of a store under way, and what is to be given back if it does not end well."""

    chain: Sequence[bytes]
    keys: Sequence[bytes]
    buffers: Sequence[Buffer]
    results: list[KeyResult]
    after: bytes | None
    """The block of the chain before the first one."""
    name: Name
    """Of its ticket at Master and of its grants at the node."""
    node: NodeClient | None = None
    """Whom it has asked for grants."""
    registered: bool = False
    """Whether Master has nothing left under the ticket."""

    @property
    def failure(self) -> KeyResult | None:
        """The first answer that is neither STORED nor EXISTS."""
        good = (KeyResult.STORED, KeyResult.EXISTS)
        return next((result for result in self.results if result not in good), None)


class StorePath:
    """Runs the stores of one connector."""

    def __init__(
        self,
        clock: Clock,
        master: MasterClient,
        nodes: Mapping[int, NodeClient],
        *,
        names: Callable[[], Name],
        staging: Budget,
        counters: ConnectorCounters,
    ) -> None:
        self.clock = clock
        self.master = master
        self.nodes = nodes
        self._names = names
        self.staging = staging
        self.counters = counters

    async def run(self, store: Store) -> None:
        """Store all blocks, or the leading ones that can be; fills ``results`` and ``near``."""
        keys, results = store.keys, store.results
        after = _before(store.chain, keys[0]) if keys else None
        try:
            for begin in range(0, len(keys), STORE_BATCH):
                end = min(begin + STORE_BATCH, len(keys))
                batch = Batch(
                    store.chain,
                    keys[begin:end],
                    store.buffers[begin:end],
                    results[begin:end],
                    after,
                    self._names(),
                )
                try:
                    store.near = await self._store_batch(batch, store.near)
                except ControlError:
                    self.counters.failed += 1
                    batch.results = [
                        KeyResult.ERROR if result is KeyResult.CANCELLED else result
                        for result in batch.results
                    ]
                finally:
                    results[begin:end] = batch.results
                    self._give_up(batch)
                failure = batch.failure
                if failure is not None:
                    # Heads before tails: what follows it waits for a later turn, too.
                    results[end:] = [failure] * (len(keys) - end)
                    break
                after = keys[end - 1]
        finally:
            self.counters.stored += results.count(KeyResult.STORED)
            self.counters.skipped += results.count(KeyResult.NO_SPACE)
            self.counters.exists += results.count(KeyResult.EXISTS)

    def _give_up(self, batch: Batch) -> None:
        """Give back what a batch still holds at its node and at Master."""
        if batch.node is not None:
            batch.node.abort(batch.name)
        if not batch.registered:
            self.master.abort(batch.name)

    async def _store_batch(
        self, batch: Batch, near: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Store a batch; return where the chain goes on. What fails is left to ``_give_up``."""
        size = batch.buffers[0].nbytes
        allocated = await self.master.allocate(
            batch.name, batch.keys, size, near=near, after=batch.after
        )
        for index, refusal in enumerate(allocated.refusals):
            batch.results[index] = refusal or KeyResult.CANCELLED
        if allocated.device is not None:
            near = (allocated.node, allocated.device)
        wanted = [index for index, no in enumerate(allocated.refusals) if no is None]
        if not wanted:
            batch.registered = True
            return near
        node = batch.node = self.nodes.get(allocated.node)
        if node is None:  # Master knows it and we do not yet
            raise ControlError(f"node {allocated.node} is not known here")
        written: list[tuple[int, Grant]] = []
        whole = True
        answers = await node.reserve(
            batch.name, [batch.keys[i] for i in wanted], size, device=allocated.device
        )
        for index, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, KeyResult):
                batch.results[index] = answer
            elif whole and await self._write_block(node, answer, batch.buffers[index]):
                written.append((index, answer))
            else:
                whole = False  # what follows would be a tail without its head
                batch.results[index] = KeyResult.ERROR
        if not written:
            return near
        committed = await node.commit([grant.token for _, grant in written])
        blocks: list[RemoteBlock] = []
        whole = True
        for (index, grant), result in zip(written, committed, strict=True):
            whole = whole and result is KeyResult.STORED
            if not whole:
                batch.results[index] = KeyResult.ERROR if result is KeyResult.STORED else result
            else:
                blocks.append(
                    RemoteBlock(
                        grant.key, node.node, grant.device, grant.address, size, grant.generation
                    )
                )
        if blocks:
            registered = await self.master.register(batch.name, blocks, chain=batch.chain)
            for (index, _), answer in zip(written, registered, strict=False):
                batch.results[index] = answer
            stored = registered.count(KeyResult.STORED)
            batch.registered = stored == len(wanted)
            near = (node.node, blocks[-1].device)
        return near

    async def _write_block(self, node: NodeClient, grant: Grant, payload: Buffer) -> bool:
        """WRITE one block and its footer."""
        await self.clock.breathe()
        footer = Footer(grant.key, grant.generation, payload.nbytes, checksum_of(payload))
        trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
        record = pack_footer(footer)
        trailer[: len(record)] = np.frombuffer(record, dtype=np.uint8)
        await self.staging.take(payload.nbytes)
        try:
            done = await node.queue_pair.write(grant.rkey, grant.address, payload, trailer)
        finally:
            self.staging.give(payload.nbytes)
        return done.status is Status.OK


def _before(chain: Sequence[bytes], key: bytes) -> bytes | None:
    """Return the block before ``key``; one that is not in the chain yet comes after its end."""
    if key in chain:
        place = chain.index(key)
        return chain[place - 1] if place else None
    return chain[-1] if chain else None
