"""A replaying worker: the serving engine's side of one request (HyMCache §4.3).

GPU prefix cache → lookup of the unmatched prefix → load → prefill of what is missing → first token
→ decode; new blocks are copied out and stored beside it. Every block that the tier delivers is
checked against what it must be. Blocks that the tier refused or could not store are offered again
in later turns, while the GPU still has them or when they were computed again.

Units: s, blocks. Left out: chunked prefill and batching (see ``engine.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.pipe import Pipe, finished
from cxlbench.emu.sync import Budget
from cxlbench.harness.content import BlockContent
from cxlbench.harness.engine import EngineModel, GpuPrefixCache
from cxlbench.harness.requests import Request
from cxlbench.kv.connector import Connector
from cxlbench.kv.results import KeyResult


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; times in s of the run, sizes in blocks."""

    request_id: int
    worker: int
    turn: int
    arrival_s: float
    lookup_s: float
    load_s: float
    first_token_s: float
    end_s: float
    reusable: int
    seen: int
    matched: int
    found: int
    loaded: int
    computed_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time from arrival to the first token."""
        return self.first_token_s - self.arrival_s


@dataclass(slots=True)
class StoreCounters:
    """What a worker's stores came to, in blocks."""

    stored: int = 0
    skipped: int = 0
    recovered: int = 0
    failed: int = 0


class Worker:
    """One GPU with its connector."""

    def __init__(
        self,
        clock: Clock,
        connector: Connector,
        engine: EngineModel,
        content: BlockContent,
        *,
        number: int,
        gpu_blocks: int,
        max_running: int,
        keys_of: Callable[[Request], Sequence[bytes]],
        block_tokens: int,
        computed: set[int],
    ) -> None:
        self.clock = clock
        self.connector = connector
        self.engine = engine
        self.content = content
        self.number = number
        self.cache = GpuPrefixCache(gpu_blocks)
        self.stores = StoreCounters()
        self.wrong_blocks = 0
        self._running = Budget(clock, max_running, name=f"worker{number} requests")
        self._gpu = Pipe(clock, f"worker{number}.gpu", 1.0)
        self._keys_of = keys_of
        self._block_tokens = block_tokens
        self._computed = computed
        self._missing: set[bytes] = set()
        """Blocks that the tier refused, or could not store."""
        self._storing = JobSet(clock)

    async def serve(self, request: Request) -> RequestRecord:
        """Run one request to its end."""
        clock, connector = self.clock, self.connector
        arrival_s = clock.now()
        await self._running.take(1)
        try:
            keys = self._keys_of(request)
            reusable = keys[: request.reusable_blocks(self._block_tokens)]
            matched = self.cache.match(reusable)
            loaded = 0
            storing = False
            # Also with nothing left to look up: the tier learns which chain the stores belong to.
            ticket = connector.submit_lookup(
                request.request_id, reusable, self.content.nbytes, matched=matched
            )
            try:
                found = (await ticket.done.wait()).leading_hits
                seen = self._seen(request.block_ids[: len(reusable)])
                lookup_s = clock.now()
                if found:
                    loaded = await self._load(request, reusable[matched : matched + found])
                load_s = clock.now()
                have = matched + loaded
                tokens = max(1, request.input_tokens - have * self._block_tokens)
                booking = self._gpu.reserve(tokens, cost_s=self.engine.prefill_s(tokens))
                await finished(clock, booking)
                first_token_s = clock.real()
                self.cache.use(keys)
                self._computed.update(request.block_ids)
                storing = self._store(request, keys, have)
            finally:
                if not storing:
                    connector.release(request.request_id)
            if request.output_tokens > 1:
                await clock.sleep(self.engine.decode_s(request.output_tokens - 1))
        finally:
            self._running.give(1)
        return RequestRecord(
            request.request_id,
            self.number,
            request.turn,
            arrival_s,
            lookup_s,
            load_s,
            first_token_s,
            clock.real(),
            len(reusable),
            seen,
            matched,
            found,
            loaded,
            tokens,
        )

    def _seen(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks any worker has computed so far: what a hit could be."""
        for index, block in enumerate(block_ids):
            if block not in self._computed:
                return index
        return len(block_ids)

    async def _load(self, request: Request, keys: Sequence[bytes]) -> int:
        """Load blocks and check each; return how many leading ones are usable."""
        buffers = [self.content.empty() for _ in keys]
        done = await self.connector.submit_load(request.request_id, keys, buffers).done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            await self.clock.breathe()
            if result.delivered and not self.content.holds(buffer, key):
                self.wrong_blocks += 1
            self.content.recycle(buffer)
        return done.leading_hits

    def _store(self, request: Request, keys: Sequence[bytes], have: int) -> bool:
        """Offer the new blocks, and those not stored earlier, in the background; heads first.

        Returns whether there was something to offer: then the store releases the request.
        """
        missing = self._missing
        first = next((i for i, key in enumerate(keys[:have]) if key in missing), have)
        offered = keys[first:]
        if offered:
            self._storing.spawn(self._run_store(request, offered))
        return bool(offered)

    async def _run_store(self, request: Request, keys: Sequence[bytes]) -> None:
        buffers = []
        try:
            for key in keys:
                await self.clock.breathe()
                buffers.append(self.content.make(key))
            ticket = self.connector.submit_store(request.request_id, keys, buffers)
        finally:
            # Not before: the tier appends a chain to where the open request found its blocks.
            self.connector.release(request.request_id)
        done = await ticket.done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            self.content.recycle(buffer)
            if result in (KeyResult.STORED, KeyResult.EXISTS):
                self.stores.stored += result is KeyResult.STORED
                if key in self._missing:
                    self.stores.recovered += 1
                    self._missing.discard(key)
            else:
                self._missing.add(key)
                if result is KeyResult.NO_SPACE:
                    self.stores.skipped += 1
                else:
                    self.stores.failed += 1

    async def settle(self) -> None:
        """Wait until all stores have ended."""
        await self._storing.join()
        self.connector.poll()
