"""Chains of blocks: lookup, pins, insert, eviction, and what comes back; on coherent memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from cxlbench.kv.identity import Namespace, chain_keys
from cxlbench.kv.results import KeyResult
from cxlbench.tract.client import Lease, PrefixCache
from cxlbench.tract.codes import OK
from cxlbench.tract.errors import (
    KeyLengthError,
    NameNotFoundError,
    NoSuchNodeError,
    ObjectTooLargeError,
)
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import held_chunks
from cxlbench.tract.index import READY, entry_at, tag_state
from cxlbench.tract.layout import Sizes
from cxlbench.tract.pins import pin_at
from cxlbench.tract.places import CODE, PLACE_WORDS
from cxlbench.tract.prefix_cache import abandon_chain, publish_chain, write_chain
from cxlbench.tract.reserving import reserve_chain
from cxlbench.tract.words import key_words
from tests.tract.plain import PlainPod

NAMESPACE = Namespace("model", "1", "bf16", "nhd", 4)
WORDS = 16


def chain(blocks: int, prompt: int = 0) -> list[bytes]:
    return chain_keys(NAMESPACE, [prompt] * 4 * blocks)


def content(keys: list[bytes]) -> NDArray[np.int64]:
    rows = [[key_words(key)[0] ^ i for i in range(WORDS)] for key in keys]
    return np.array(rows, np.int64).reshape(len(keys), WORDS)


class Cache:
    """A pod of coherent nodes with a prefix cache on each."""

    def __init__(
        self, *, slots: int = 40, chunks: int = 30, nodes: int = 2, batch: int = 2
    ) -> None:
        sizes = Sizes(
            nodes=nodes, slots=slots, chunks=chunks, chunk_bytes=8 * WORDS, heap_batch=batch
        )
        self.pod = PlainPod(sizes)
        self.layout = self.pod.layout
        self.views = [PrefixCache(mem, self.layout, n) for n, mem in enumerate(self.pod.nodes)]

    def insert(self, keys: list[bytes], node: int = 0) -> tuple[KeyResult, ...]:
        return self.views[node].insert(keys, content(keys))

    def hits(self, keys: list[bytes], node: int = 0) -> int:
        with self.views[node].lookup(keys) as lease:
            buffers = np.zeros((len(keys), WORDS), np.int64)
            good = lease.read(list(buffers))
            assert good == len(lease.blocks)
            assert np.array_equal(buffers[:good], content(keys)[:good])
            return good

    def ready(self) -> int:
        mem = self.pod.nodes[0]
        tags = [mem.load(entry_at(self.layout, s)) for s in range(self.layout.slots)]
        return sum(tag_state(tag) == READY for tag in tags)

    def check(self) -> None:
        held = sum(held_chunks(mem, self.layout) for mem in self.pod.nodes)
        report = fsck(self.pod.nodes[0], self.layout, in_heaps=held)
        assert report.problems == ()
        assert report.free + report.used + report.held == report.chunks
        assert self.pod.lock_free()


def test_what_one_node_inserts_another_reads() -> None:
    cache = Cache()
    assert cache.insert(chain(5)) == (KeyResult.STORED,) * 5
    assert cache.hits(chain(5), node=1) == 5
    cache.check()


def test_a_lookup_ends_at_the_first_block_that_is_missing() -> None:
    cache = Cache()
    cache.insert(chain(6)[:2])
    cache.insert(chain(6)[3:])
    assert cache.hits(chain(6)) == 2


def test_the_empty_chain_has_no_hit() -> None:
    cache = Cache()
    assert cache.hits([]) == 0
    assert cache.insert([]) == ()


def test_a_block_that_is_there_is_not_stored_again() -> None:
    cache = Cache()
    cache.insert(chain(2))
    assert cache.insert(chain(3), node=1) == (KeyResult.EXISTS, KeyResult.EXISTS, KeyResult.STORED)
    cache.check()


def test_the_index_evicts_above_its_mark() -> None:
    cache = Cache(slots=10, chunks=30)
    for prompt in range(20):
        cache.insert(chain(1, prompt))
    assert cache.ready() == cache.layout.evict_above == 7
    assert [cache.hits(chain(1, p)) for p in range(13, 20)] == [1] * 7
    cache.check()


def test_the_oldest_goes_first_and_a_hit_makes_new() -> None:
    cache = Cache(slots=10, chunks=30)
    for prompt in range(7):
        cache.insert(chain(1, prompt))
    assert cache.hits(chain(1, 0), node=1) == 1
    cache.insert(chain(1, 7))
    assert cache.hits(chain(1, 0)) == 1
    assert cache.hits(chain(1, 1)) == 0


def test_tails_are_evicted_before_heads() -> None:
    cache = Cache(slots=40, chunks=30)
    cache.insert(chain(6))
    assert cache.views[0].evict(2) == 2
    assert cache.hits(chain(6)) == 4
    assert cache.views[0].evict(2) == 2
    assert cache.hits(chain(6)) == 2


def test_a_pinned_block_is_not_evicted_by_any_node() -> None:
    cache = Cache(slots=10, chunks=30)
    cache.insert(chain(2))
    with cache.views[1].lookup(chain(2)) as lease:
        assert len(lease.blocks) == 2
        assert cache.views[0].evict(10) == 0
        assert not cache.views[0].delete(chain(2)[0])
        for prompt in range(1, 30):
            cache.insert(chain(1, prompt))
        buffers = np.zeros((2, WORDS), np.int64)
        assert lease.read(list(buffers)) == 2
        assert np.array_equal(buffers, content(chain(2)))
    cache.check()
    assert cache.views[0].evict(100) == 7
    cache.check()


def test_pins_are_symmetric_and_zero_at_rest() -> None:
    cache = Cache()
    cache.insert(chain(3))
    lease = cache.views[1].lookup(chain(3))
    again = cache.views[1].lookup(chain(2))
    slot = int(lease._places[0, 0])
    at = pin_at(cache.layout, 1, slot)
    assert cache.pod.nodes[0].load(at) == 2
    lease.release()
    lease.release()
    assert cache.pod.nodes[0].load(at) == 1
    again.release()
    assert fsck(cache.pod.nodes[0], cache.layout).pins == 0


def test_no_space_is_told_per_block_and_heads_go_first() -> None:
    cache = Cache(slots=40, chunks=3)
    keys = chain(5)
    with_room = (KeyResult.STORED,) * 3 + (KeyResult.NO_SPACE,) * 2
    assert cache.insert(keys) == with_room
    assert cache.hits(keys) == 3
    cache.check()


def test_all_blocks_pinned_leaves_no_space_and_loses_nothing() -> None:
    cache = Cache(slots=40, chunks=3)
    cache.insert(chain(3))
    with cache.views[1].lookup(chain(3)):
        assert cache.insert(chain(1, 9)) == (KeyResult.NO_SPACE,)
    assert cache.insert(chain(1, 9)) == (KeyResult.STORED,)
    cache.check()


def test_a_full_table_evicts_to_make_room() -> None:
    cache = Cache(slots=5, chunks=30)
    for prompt in range(40):
        assert cache.insert(chain(1, prompt)) == (KeyResult.STORED,)
        cache.check()


def test_nothing_is_found_before_its_bytes_are_in_place() -> None:
    """W2: a store publishes only when the producer has finished."""
    cache = Cache()
    keys, mem = chain(2), cache.pod.nodes[0]
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((2, PLACE_WORDS), np.int64)
    assert reserve_chain(mem, cache.layout, numbers, 8 * WORDS, places) == 2
    assert cache.hits(keys, node=1) == 0
    assert cache.insert(keys, node=1) == (KeyResult.EXISTS,) * 2
    write_chain(mem, cache.layout, content(keys), places)
    assert cache.hits(keys, node=1) == 0
    assert publish_chain(mem, cache.layout, places) == 2
    assert cache.hits(keys, node=1) == 2
    cache.check()


def test_a_failed_store_is_never_found_and_its_room_is_free_again() -> None:
    cache = Cache()
    keys, mem = chain(3), cache.pod.nodes[0]
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((3, PLACE_WORDS), np.int64)
    reserve_chain(mem, cache.layout, numbers, 8 * WORDS, places)
    assert abandon_chain(mem, cache.layout, places) == 3
    assert not (places[:, CODE] == OK).any()
    assert cache.hits(keys) == 0
    cache.check()
    assert fsck(mem, cache.layout).used == 0
    assert cache.insert(keys) == (KeyResult.STORED,) * 3


def test_abandoning_with_a_full_heap_returns_chunks_to_the_bitmap() -> None:
    cache = Cache(chunks=30, batch=1)
    keys, mem = chain(8), cache.pod.nodes[0]
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((8, PLACE_WORDS), np.int64)
    halves = [places[:4].copy(), places[4:].copy()]
    for half, part in zip(halves, (numbers[:4], numbers[4:]), strict=True):
        assert reserve_chain(mem, cache.layout, part, 8 * WORDS, half) == 4
    for half in halves:
        assert abandon_chain(mem, cache.layout, half) == 4
    assert held_chunks(mem, cache.layout) == cache.layout.heap_capacity == 4
    cache.check()


def test_a_changed_payload_is_a_miss_not_other_bytes() -> None:
    """W4: what does not verify is not handed out."""
    cache = Cache()
    cache.insert(chain(2))
    with cache.views[0].lookup(chain(2)) as lease:
        cache.pod.words[lease.blocks[1].offset // 8 + 3] ^= 1
        buffers = np.zeros((2, WORDS), np.int64)
        assert lease.read(list(buffers)) == 1


def test_a_buffer_of_another_length_is_a_miss() -> None:
    cache = Cache()
    cache.insert(chain(1))
    with cache.views[0].lookup(chain(1)) as lease:
        assert lease.read([np.zeros(WORDS - 1, np.int64)]) == 0


def test_bad_input_is_refused_before_anything_is_stored() -> None:
    cache = Cache()
    for mem in cache.pod.nodes:
        mem.stored.clear()
    view = cache.views[0]
    with pytest.raises(KeyLengthError):
        view.lookup([b"short"])
    with pytest.raises(KeyLengthError):
        view.insert([b"x" * 33], np.zeros((1, WORDS), np.int64))
    with pytest.raises(ObjectTooLargeError, match="the region's chunk"):
        view.insert(chain(1), np.zeros((1, WORDS + 1), np.int64))
    with pytest.raises(ObjectTooLargeError):
        view.insert(chain(1), np.zeros((1, 0), np.int64))
    with pytest.raises(ValueError, match="a row per key"):
        view.insert(chain(2), np.zeros((1, WORDS), np.int64))
    with pytest.raises(NoSuchNodeError):
        PrefixCache(cache.pod.nodes[0], cache.layout, 2)
    assert not any(mem.stored for mem in cache.pod.nodes)


def test_a_deleted_block_is_gone() -> None:
    cache = Cache()
    cache.insert(chain(2))
    assert cache.views[1].delete(chain(2)[1])
    assert cache.hits(chain(2)) == 1
    with pytest.raises(NameNotFoundError):
        cache.views[0].delete(chain(2)[1])
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Inserts, lookups, leases, deletions and evictions of three nodes on a crowded cache."""

    @initialize(slots=st.integers(1, 16), chunks=st.integers(1, 16), batch=st.integers(1, 4))
    def begin(self, slots: int, chunks: int, batch: int) -> None:
        self.cache = Cache(slots=slots, chunks=chunks, nodes=3, batch=batch)
        self.leases: list[Lease] = []

    @rule(node=st.integers(0, 2), prompt=st.integers(0, 4), blocks=st.integers(1, 5))
    def insert(self, node: int, prompt: int, blocks: int) -> None:
        results = self.cache.insert(chain(blocks, prompt), node)
        refused = [r is KeyResult.NO_SPACE for r in results]
        assert refused == sorted(refused)
        assert KeyResult.ERROR not in results

    @rule(node=st.integers(0, 2), prompt=st.integers(0, 4), blocks=st.integers(1, 5))
    def look_up(self, node: int, prompt: int, blocks: int) -> None:
        self.cache.hits(chain(blocks, prompt), node)

    @rule(node=st.integers(0, 2), prompt=st.integers(0, 4), blocks=st.integers(1, 5))
    def hold(self, node: int, prompt: int, blocks: int) -> None:
        self.leases.append(self.cache.views[node].lookup(chain(blocks, prompt)))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.leases:
            self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).release()

    @rule(node=st.integers(0, 2), blocks=st.integers(1, 4))
    def evict(self, node: int, blocks: int) -> None:
        before = self.cache.ready()
        evicted = self.cache.views[node].evict(blocks)
        assert self.cache.ready() == before - evicted

    @invariant()
    def leases_hold_their_bytes(self) -> None:
        for lease in getattr(self, "leases", []):
            buffers = np.zeros((len(lease.blocks), WORDS), np.int64)
            assert lease.read(list(buffers)) == len(lease.blocks)
            assert np.array_equal(
                buffers, content([b.key for b in lease.blocks]).reshape(-1, WORDS)
            )

    @invariant()
    def the_region_is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestCacheMachine = CacheMachine.TestCase
