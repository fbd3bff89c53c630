"""What the vLLM adapter moves: its worker's half, over a KV cache that is a NumPy array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cxlbench.emu.memory import Buffer
from cxlbench.kv.connector import Completion, Work
from cxlbench.kv.embedded import Submission
from cxlbench.kv.results import KeyResult
from cxlbench.kv.vllm_scheduler import BlockOrder
from cxlbench.kv.vllm_worker import WorkerSide

BYTES = 64
HIT, MISS = KeyResult.HIT, KeyResult.MISS


class Memory:
    block_bytes = BYTES

    def __init__(self) -> None:
        self.array = np.zeros((16, BYTES), dtype=np.uint8)

    def gather(self, block_id: int, buffer: np.ndarray) -> None:
        buffer[:] = self.array[block_id]

    def scatter(self, block_id: int, buffer: np.ndarray) -> None:
        self.array[block_id] = buffer


class StubTier:
    def __init__(self) -> None:
        self.given: list[tuple[Submission, tuple[bytes, ...], list[np.ndarray]]] = []

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        return self._take(Work.LOAD, request_id, keys, buffers)

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        return self._take(Work.STORE, request_id, keys, buffers)

    def _take(
        self, work: Work, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        submission = Submission(request_id, work, len(keys))
        self.given.append((submission, tuple(keys), list(buffers)))  # type: ignore[misc]
        return submission

    def end(self, *results: KeyResult, number: int = -1) -> None:
        submission, _, _ = self.given[number]
        submission._end(Completion(submission.request_id, submission.work, results))


def order(*block_ids: int, first: int = 0, request: str = "r") -> BlockOrder:
    keys = tuple(bytes([block_id]) * 32 for block_id in block_ids)
    return BlockOrder(request, 1, first, keys, block_ids)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def tier() -> StubTier:
    return StubTier()


@pytest.fixture
def side(tier: StubTier, memory: Memory) -> WorkerSide:
    return WorkerSide(tier, memory, store_limit_bytes=3 * BYTES)


def test_a_load_that_hits_fills_its_blocks_and_is_reported(
    side: WorkerSide, tier: StubTier, memory: Memory
) -> None:
    side.start_loads([order(3, 5)])
    for number, buffer in enumerate(tier.given[0][2]):
        buffer[:] = number + 1
    assert side.collect() == set()
    assert not memory.array.any()
    tier.end(HIT, HIT)
    assert side.collect() == {"r"}
    assert side.take_failed_block_ids() == set()
    assert (memory.array[3] == 1).all()
    assert (memory.array[5] == 2).all()
    assert side.collect() == set()


@pytest.mark.parametrize(
    "result", [r for r in KeyResult if r is not HIT], ids=lambda result: result.name
)
def test_what_is_not_a_hit_never_reaches_the_engines_blocks(
    side: WorkerSide, tier: StubTier, memory: Memory, result: KeyResult
) -> None:
    side.start_loads([order(3, 5, 7)])
    for buffer in tier.given[0][2]:
        buffer[:] = 9
    tier.end(HIT, result, HIT)
    assert side.collect() == {"r"}
    assert (memory.array[3] == 9).all()
    assert not memory.array[[5, 7]].any()


def test_blocks_that_failed_are_reported_with_the_end_of_the_load_and_once(
    side: WorkerSide, tier: StubTier
) -> None:
    side.start_loads([order(3, 5, 7)])
    assert side.take_failed_block_ids() == set()
    tier.end(HIT, MISS, HIT)
    assert side.collect() == {"r"}
    assert side.take_failed_block_ids() == {5, 7}
    assert side.take_failed_block_ids() == set()
    assert (side.counters.loaded, side.counters.load_failed) == (1, 2)


def test_each_request_is_reported_when_its_own_load_ends(side: WorkerSide, tier: StubTier) -> None:
    side.start_loads([order(3, request="a"), order(5, request="b")])
    tier.end(HIT, number=1)
    assert side.collect() == {"b"}
    tier.end(MISS, number=0)
    assert side.collect() == {"a"}
    assert side.open_transfers() == 0


def test_a_store_takes_the_bytes_of_the_step_though_the_blocks_are_reused(
    side: WorkerSide, tier: StubTier, memory: Memory
) -> None:
    memory.array[[3, 5]] = [[1], [4]]
    side.start_stores([order(3, 5)])
    memory.array[:] = 2
    assert [int(buffer[0]) for buffer in tier.given[0][2]] == [1, 4]


def test_what_the_tier_did_not_take_is_reported_once_by_block_and_key(
    side: WorkerSide, tier: StubTier
) -> None:
    side.start_stores([order(3, 5, 7, first=4)])
    tier.end(KeyResult.STORED, KeyResult.NO_SPACE, KeyResult.EXISTS)
    side.collect()
    (left,) = side.take_not_stored()
    assert (left.request, left.block, left.key) == ("r", 5, bytes([5]) * 32)
    assert side.take_not_stored() == ()
    counters = side.counters
    assert (counters.stored, counters.existed, counters.not_stored) == (1, 1, 1)


def test_copies_under_way_are_bounded_heads_first_and_the_rest_is_left_for_later(
    side: WorkerSide, tier: StubTier
) -> None:
    side.start_stores([order(1, 2, 3, 4), order(5)])
    assert [len(keys) for _, keys, _ in tier.given] == [3]
    assert [block.block for block in side.take_not_stored()] == [3, 0]
    tier.end(*[KeyResult.STORED] * 3)
    side.collect()
    side.start_stores([order(5)])
    assert [len(keys) for _, keys, _ in tier.given] == [3, 1]
