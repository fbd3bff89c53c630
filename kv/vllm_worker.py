"""The worker's half of the vLLM adapter: moves blocks between the engine's KV cache and the tier.

It carries out the scheduler's orders. A load reads into buffers of its own and copies them into the
engine's blocks only when the tier has said HIT for every block up to there, so whatever a failed or
late load leaves in its buffers is never seen. A store copies the blocks first, within the step that
completed them, so the engine may reuse them at once.

The copies of stores under way are bounded by ``store_limit_bytes``; what does not fit is reported
as not stored, like what the tier refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cxlbench.emu.memory import Buffer, Bytes
from cxlbench.kv.embedded import Submission
from cxlbench.kv.results import KeyResult
from cxlbench.kv.vllm_scheduler import BlockOrder, NotStored

STORE_LIMIT_BYTES = 1 << 30


class BlockMemory(Protocol):
    """The engine's KV cache, one block (all layers) at a time."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    def gather(self, block_id: int, buffer: Bytes) -> None:
        """Copy a block out, into ``block_bytes`` bytes."""

    def scatter(self, block_id: int, buffer: Bytes) -> None:
        """Copy a block in."""


class WorkerTier(Protocol):
    """What is needed of ``EmbeddedTier``; all calls return at once."""

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        """Deliver blocks."""

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        """Store blocks."""


@dataclass(slots=True)
class WorkerCounters:
    """Blocks, by what became of them."""

    loaded: int = 0
    load_failed: int = 0
    stored: int = 0
    existed: int = 0
    not_stored: int = 0


@dataclass(frozen=True, slots=True)
class _Transfer:
    order: BlockOrder
    buffers: list[Bytes]
    work: Submission


class WorkerSide:
    """Loads and stores whole blocks as ordered. One thread; nothing blocks but the copies."""

    def __init__(
        self,
        tier: WorkerTier,
        memory: BlockMemory,
        *,
        store_limit_bytes: int = STORE_LIMIT_BYTES,
    ) -> None:
        self.counters = WorkerCounters()
        self._tier = tier
        self._memory = memory
        self._store_limit_bytes = store_limit_bytes
        self._storing_bytes = 0
        self._loads: list[_Transfer] = []
        self._stores: list[_Transfer] = []
        self._failed_block_ids: set[int] = set()
        self._not_stored: list[NotStored] = []

    def start_loads(self, orders: Iterable[BlockOrder]) -> None:
        """Ask the tier for the blocks of ``orders``."""
        for order in orders:
            buffers = [self._buffer() for _ in order.keys]
            work = self._tier.submit_load(order.tier_request, order.keys, buffers)
            self._loads.append(_Transfer(order, buffers, work))

    def start_stores(self, orders: Iterable[BlockOrder]) -> None:
        """Copy the blocks of ``orders``, heads first, and give them to the tier."""
        for order in orders:
            size = self._memory.block_bytes
            room = max(0, self._store_limit_bytes - self._storing_bytes) // size
            buffers = []
            for block_id in order.block_ids[:room]:
                buffers.append(self._buffer())
                self._memory.gather(block_id, buffers[-1])
            self._leave(order, range(len(buffers), len(order.keys)))
            if buffers:
                self._storing_bytes += len(buffers) * size
                keys = order.keys[: len(buffers)]
                work = self._tier.submit_store(order.tier_request, keys, buffers)
                self._stores.append(_Transfer(order, buffers, work))

    def collect(self) -> set[str]:
        """Take in what has ended; return the requests whose load is over, well or not."""
        self._stores = [store for store in self._stores if not self._end_store(store)]
        still, ended = [], set()
        for load in self._loads:
            if self._end_load(load):
                ended.add(load.order.request)
            else:
                still.append(load)
        self._loads = still
        return ended

    def take_failed_block_ids(self) -> set[int]:
        """Return, once, the blocks that ended loads did not fill."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_not_stored(self) -> tuple[NotStored, ...]:
        """Return, once, the blocks that the tier did not take."""
        left, self._not_stored = self._not_stored, []
        return tuple(left)

    def open_transfers(self) -> int:
        """Return how many loads and stores are under way."""
        self.collect_stores()
        return len(self._loads) + len(self._stores)

    def collect_stores(self) -> None:
        """Take in the stores that have ended."""
        self._stores = [store for store in self._stores if not self._end_store(store)]

    def _end_load(self, load: _Transfer) -> bool:
        completion = load.work.completion
        if completion is None:
            return False
        hits = min(completion.leading_hits, len(load.buffers))
        for block_id, buffer in zip(load.order.block_ids, load.buffers[:hits], strict=False):
            self._memory.scatter(block_id, buffer)
        # What lies behind the first block that is missing is recomputed with it.
        self._failed_block_ids.update(load.order.block_ids[hits:])
        self.counters.loaded += hits
        self.counters.load_failed += len(load.buffers) - hits
        return True

    def _end_store(self, store: _Transfer) -> bool:
        completion = store.work.completion
        if completion is None:
            return False
        self._storing_bytes -= len(store.buffers) * self._memory.block_bytes
        self.counters.stored += completion.results.count(KeyResult.STORED)
        self.counters.existed += completion.results.count(KeyResult.EXISTS)
        taken = (KeyResult.STORED, KeyResult.EXISTS)
        self._leave(
            store.order,
            (index for index, result in enumerate(completion.results) if result not in taken),
        )
        return True

    def _leave(self, order: BlockOrder, places: Iterable[int]) -> None:
        for place in places:
            block = NotStored(order.request, order.first_block + place, order.keys[place])
            self._not_stored.append(block)
            self.counters.not_stored += 1

    def _buffer(self) -> Bytes:
        return np.empty(self._memory.block_bytes, dtype=np.uint8)
