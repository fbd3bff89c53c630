"""A cluster of GPU servers on a KV-cache tier: aggregated, or with prefill and decode apart (PD).

One request: a router gives it to a prefill server; it waits for GPU blocks there, shares what the
GPU has of its prefix, looks the rest up in the tier and loads it, computes what is missing, and
gets its first token. New blocks are offered to the tier beside that; those that the tier refused
are offered again in a later turn. Apart, the prompt's KV then goes to a decode server
(``handover.py``), which computes the first token's step and answers. Handed over through the tier,
it also waits for blocks of the prompt that another request is just storing.

GPU blocks are held until the answer has ended, or the KV has been handed over, and the stores are
over: the buffers of a store belong to the tier meanwhile. Every block that a tier delivers is
checked against what it must be.

Units: s, tokens, blocks. Left out: failures of servers, requests that are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.sync import Signal
from cxlbench.harness.content import BlockContent
from cxlbench.harness.requests import Request
from cxlbench.harness.serve.admission import Turn
from cxlbench.harness.serve.gpu_pool import GpuPool, Holding, Users
from cxlbench.harness.serve.gpu_server import GpuServer
from cxlbench.harness.serve.gpu_server import Sequence as GpuSequence
from cxlbench.harness.serve.handover import LinkHandover, LinkHandoverSpec
from cxlbench.harness.serve.roofline import ModelDoesNotFitError, Roofline
from cxlbench.harness.serve.routing import Router, Routing
from cxlbench.harness.serve.served import Population, Served
from cxlbench.harness.tiers.tier import Tier
from cxlbench.harness.worker import StoreCounters
from cxlbench.kv.connector import Connector
from cxlbench.kv.results import KeyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What a cluster is made of."""

    roofline: Roofline
    block_tokens: int
    prefill_servers: int = 1
    decode_servers: int = 0
    """0: the servers that prefill also answer."""
    handover: LinkHandoverSpec | None = None
    """None with decode servers: through the tier."""
    routing: Routing = Routing.ROUND_ROBIN
    prefix_caching: bool = True
    gpu_blocks: int | None = None
    """None: as many as fit beside the model."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.roofline.shape.block_bytes(self.block_tokens)

    @property
    def pool_blocks(self) -> int:
        """Blocks of a GPU's pool."""
        if self.gpu_blocks is not None:
            return self.gpu_blocks
        blocks = self.roofline.kv_space_bytes() // self.block_bytes
        if not blocks:
            raise ModelDoesNotFitError(
                f"{self.roofline.accelerator.name} has no room for one KV block of "
                f"{self.roofline.shape.name} ({self.block_bytes} B)"
            )
        return blocks


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """A prompt whose KV has come to a decode server."""

    server: GpuServer
    holding: Holding
    tokens: int
    """Of the prompt, that are still to be computed."""


class Cluster:
    """The running servers. ``serve`` each request; ``settle`` before the end."""

    def __init__(
        self,
        clock: Clock,
        spec: ClusterSpec,
        tier: Tier,
        content: BlockContent,
        keys_of: Callable[[Request], Sequence[bytes]],
    ) -> None:
        self.clock = clock
        self.spec = spec
        self.tier = tier
        self.stores = StoreCounters()
        self.wrong_blocks = 0
        self.served: list[Served] = []
        self.population = Population()
        self._content = content
        self._keys_of = keys_of
        self._jobs = JobSet(clock)
        self._router = Router(spec.prefill_servers, spec.routing)
        self._computed: set[int] = set()
        self._refused: list[set[bytes]] = [set() for _ in range(spec.prefill_servers)]
        """Blocks that the tier did not take, by the server that offered them."""
        self._storing: dict[bytes, Signal[None]] = {}
        """Blocks that are just being stored, with what tells the end of the first such store."""
        self._next_decoder = 0
        self.prefill = [self._server(f"prefill{n}") for n in range(spec.prefill_servers)]
        self.decode = [self._server(f"decode{n}") for n in range(spec.decode_servers)]
        self.handover: LinkHandover | None = None
        if spec.decode_servers and spec.handover is not None:
            self.handover = LinkHandover(
                clock, spec.handover, prefill=spec.prefill_servers, decode=spec.decode_servers
            )

    def _server(self, name: str) -> GpuServer:
        spec = self.spec
        pool = GpuPool(self.clock, spec.pool_blocks, caching=spec.prefix_caching, name=name)
        return GpuServer(self.clock, self._jobs, spec.roofline, pool, name=name)

    @property
    def content_bytes(self) -> int:
        """Bytes of a block as the tier has it: scaled, where its rig is."""
        return self._content.nbytes

    async def serve(self, request: Request) -> Served:
        """Serve one request to its last token."""
        spec, clock = self.spec, self.clock
        keys = self._keys_of(request)
        number = self._router.choose(keys)
        server = self.prefill[number]
        apart = bool(self.decode)
        answer = 1 if apart else max(request.output_tokens, 1)
        reusable = request.reusable_blocks(spec.block_tokens)
        record = Served(
            request_id=request.request_id,
            session=request.session,
            turn=request.turn,
            server=number,
            decoder=-1,
            input_tokens=request.input_tokens,
            output_tokens=max(request.output_tokens, 1),
            reusable=reusable,
            seen=0,
            matched=0,
            arrival_s=clock.now(),
        )
        self.population.change(clock.now(), 1)
        try:
            blocks = self._blocks(request.input_tokens + answer)
            turn = Turn(server.admission)
            try:
                await turn.take()
                users = Users(server.pool, await server.pool.admit(keys, reusable, blocks))
                try:
                    handed_over = await self._prefill(
                        request, keys, record, server, users, turn, answer
                    )
                finally:
                    users.leave()
            finally:
                turn.give()
        finally:
            self._router.done(number)
        if handed_over is not None:
            await self._decode(request, record, handed_over)
        self.population.change(clock.now(), -1)
        self.served.append(record)
        return record

    def _blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.spec.block_tokens)

    async def _prefill(
        self,
        request: Request,
        keys: Sequence[bytes],
        record: Served,
        server: GpuServer,
        users: Users,
        turn: Turn,
        answer: int,
    ) -> _HandedOver | None:
        """Compute what is missing; answer, or hand the KV over to who answers."""
        clock, block_tokens = self.clock, self.spec.block_tokens
        connector = self.tier.connector(record.server)
        record.schedule_s = clock.now() - record.arrival_s
        record.matched = users.holding.matched
        released = connector is None
        try:
            if connector is not None:
                await self._load(request, keys[: record.reusable], record, connector, turn)
            record.seen = self._seen(request.block_ids[: record.reusable])
            have = record.matched + record.loaded
            tokens = max(1, request.input_tokens - have * block_tokens)
            begin_s = clock.now()
            sequence = server.start(
                prompt_tokens=tokens, context=request.input_tokens - tokens, answer_tokens=answer
            )
            # Who comes next may share these blocks: it is computed in the same step, or later.
            server.pool.publish(users.holding, len(keys))
            self._computed.update(request.block_ids)
            turn.give()
            early = self._send_early(request, record, sequence)
            await sequence.prefilled.wait()
            record.schedule_s += sequence.started_s - begin_s
            record.compute_s = sequence.first_token_s - sequence.started_s
            record.computed_tokens = tokens
            store = None
            if connector is not None:
                store = self._offer(request, keys, have, record, connector, users)
                if store is None:
                    connector.release(request.request_id)
                released = True  # or the store does it
            if self.decode:
                return await self._hand_over(request, keys, record, early, store)
            record.first_token_s = sequence.first_token_s
            record.late_s = clock.real() - clock.now()
            await sequence.ended.wait()
            record.end_s = sequence.last_token_s
        finally:
            if connector is not None and not released:
                connector.release(request.request_id)
        return None

    def _seen(self, block_ids: Sequence[int]) -> int:
        computed = self._computed
        for index, block in enumerate(block_ids):
            if block not in computed:
                return index
        return len(block_ids)

    async def _load(
        self,
        request: Request,
        keys: Sequence[bytes],
        record: Served,
        connector: Connector,
        turn: Turn,
    ) -> None:
        """Look the chain up behind what the GPU has, and load what the tier announces."""
        clock, content = self.clock, self._content
        begin_s = clock.now()
        ticket = connector.submit_lookup(
            request.request_id, keys, content.nbytes, matched=record.matched
        )
        record.found = (await ticket.done.wait()).leading_hits
        looked_up_s = clock.now()
        record.lookup_s = looked_up_s - begin_s
        if record.found:
            turn.give()  # a load takes no tokens of a step
            wanted = keys[record.matched : record.matched + record.found]
            record.loaded = await self._read(request.request_id, wanted, connector)
            record.read_s = clock.now() - looked_up_s
        connector.poll()

    async def _read(self, request_id: int, keys: Sequence[bytes], connector: Connector) -> int:
        content = self._content
        buffers = [content.empty() for _ in keys]
        done = await connector.submit_load(request_id, keys, buffers).done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if not content.phantom:
                await self.clock.breathe()
            if result.delivered and not content.holds(buffer, key):
                self.wrong_blocks += 1
            content.recycle(buffer)
        return done.leading_hits

    def _offer(
        self,
        request: Request,
        keys: Sequence[bytes],
        have: int,
        record: Served,
        connector: Connector,
        users: Users,
    ) -> Job[None] | None:
        """Offer new blocks, and those refused earlier, beside the answer; heads first."""
        refused = self._refused[record.server]
        first = next((i for i, key in enumerate(keys[:have]) if key in refused), have)
        offered = keys[first:]
        if not offered:
            return None
        users.join()
        over: Signal[None] = Signal(self.clock)
        for key in offered:
            self._storing.setdefault(key, over)
        return self._jobs.spawn(self._store(record, offered, refused, connector, users, over))

    async def _store(
        self,
        record: Served,
        keys: Sequence[bytes],
        refused: set[bytes],
        connector: Connector,
        users: Users,
        over: Signal[None],
    ) -> None:
        content, stores = self._content, self.stores
        try:
            buffers = []
            for key in keys:
                if not content.phantom:
                    await self.clock.breathe()
                buffers.append(content.make(key))
            ticket = connector.submit_store(record.request_id, keys, buffers)
            # Not before: the tier appends a chain to where the open request found its blocks.
            connector.release(record.request_id)
            done = await ticket.done.wait()
            for key, buffer, result in zip(keys, buffers, done.results, strict=True):
                content.recycle(buffer)
                if result in (KeyResult.STORED, KeyResult.EXISTS):
                    stores.stored += result is KeyResult.STORED
                    record.stored += result is KeyResult.STORED
                    if key in refused:
                        stores.recovered += 1
                        refused.discard(key)
                else:
                    refused.add(key)
                    if result is KeyResult.NO_SPACE:
                        stores.skipped += 1
                    else:
                        stores.failed += 1
            connector.poll()
        finally:
            users.leave()
            for key in keys:
                if self._storing.get(key) is over:
                    del self._storing[key]
            over.set(None)

    def _send_early(
        self, request: Request, record: Served, sequence: GpuSequence
    ) -> Job[None] | None:
        """Send the layers of a prompt while it is computed, where that is asked for."""
        if not self.decode:
            return None
        record.decoder = self._next_decoder
        self._next_decoder = (self._next_decoder + 1) % len(self.decode)
        if self.handover is None:
            return None
        nbytes = self.handover.early_bytes(self._kv_bytes(request))
        if not nbytes:
            return None
        return self._jobs.spawn(self._early(record, sequence, self.handover, nbytes))

    async def _early(
        self, record: Served, sequence: GpuSequence, handover: LinkHandover, nbytes: int
    ) -> None:
        await sequence.started.wait()
        await handover.send(record.server, record.decoder, nbytes)

    def _kv_bytes(self, request: Request) -> int:
        return request.input_tokens * self.spec.roofline.shape.kv_bytes_per_token()

    async def _hand_over(
        self,
        request: Request,
        keys: Sequence[bytes],
        record: Served,
        early: Job[None] | None,
        store: Job[None] | None,
    ) -> _HandedOver:
        """Wait for blocks on the decode server, and for the prompt's KV in them."""
        clock = self.clock
        decoder = self.decode[record.decoder]
        begin_s = clock.now()
        blocks = self._blocks(request.input_tokens + record.output_tokens)
        holding = await decoder.pool.admit((), 0, blocks)
        admitted_s = clock.now()
        record.schedule_s += admitted_s - begin_s
        begin_s = admitted_s
        try:
            if self.handover is not None:
                nbytes = self._kv_bytes(request)
                if early is not None:
                    await early
                    nbytes -= self.handover.early_bytes(nbytes)
                await self.handover.send(record.server, record.decoder, nbytes)
                tokens = 1
                record.decode_read_s = clock.now() - begin_s
                record.write_s += record.decode_read_s
            else:
                tokens = await self._through_tier(request, keys, record, store, begin_s)
        except BaseException:
            decoder.pool.free(holding)
            raise
        return _HandedOver(decoder, holding, tokens)

    async def _decode(self, request: Request, record: Served, at: _HandedOver) -> None:
        """Compute what did not come, and answer."""
        begin_s = self.clock.now()
        try:
            sequence = at.server.start(
                prompt_tokens=at.tokens,
                context=request.input_tokens - at.tokens,
                answer_tokens=record.output_tokens,
            )
            await sequence.prefilled.wait()
            record.schedule_s += sequence.started_s - begin_s
            record.compute_s += sequence.first_token_s - sequence.started_s
            record.computed_tokens += at.tokens - 1
            record.first_token_s = sequence.first_token_s
            record.late_s = self.clock.real() - self.clock.now()
            await sequence.ended.wait()
            record.end_s = sequence.last_token_s
        finally:
            at.server.pool.free(at.holding)

    async def _through_tier(
        self,
        request: Request,
        keys: Sequence[bytes],
        record: Served,
        store: Job[None] | None,
        begin_s: float,
    ) -> int:
        """Publish on one side and read on the other; return the tokens still to be computed."""
        clock, spec = self.clock, self.spec
        if store is not None:
            await store
        written_s = clock.now()
        record.write_s += written_s - begin_s
        connector = self.tier.connector(spec.prefill_servers + record.decoder)
        if connector is None:
            raise ValueError(
                f"tier {self.tier.name} gives decode servers no connector: KV cannot be handed "
                "over through it; name a link for the hand-over"
            )
        # The same chain has a request of another number on each side.
        number = -1 - request.request_id
        try:
            found = await self._find_all(number, keys, connector)
            if found:
                record.decode_loaded = await self._read(number, keys[:found], connector)
        finally:
            connector.release(number)
            connector.poll()
        record.decode_read_s = clock.now() - written_s
        record.read_s += record.decode_read_s
        return max(1, request.input_tokens - record.decode_loaded * spec.block_tokens)

    async def _find_all(self, number: int, keys: Sequence[bytes], connector: Connector) -> int:
        """Look a prompt up, again when blocks that another request was just storing are there.

        Such a block is EXISTS for its second writer and not yet findable. Each wait is for one
        store, which the tier bounds, and each further look-up must have found more than the last.
        """
        before = -1
        while True:
            ticket = connector.submit_lookup(number, keys, self._content.nbytes)
            found = (await ticket.done.wait()).leading_hits
            other = self._storing.get(keys[found]) if found < len(keys) else None
            if other is None or found <= before:
                return found
            before = found
            connector.release(number)
            await other.wait()

    async def settle(self) -> None:
        """Wait until all stores have ended."""
        await self._jobs.join()

    async def cancel(self) -> None:
        """Cut off what is going on."""
        await self._jobs.cancel()

    def at_rest(self) -> dict[str, int]:
        """Return the GPU blocks that are still held, by server."""
        servers = [*self.prefill, *self.decode]
        return {f"{s.name} blocks": s.pool.used for s in servers if s.pool.used}
