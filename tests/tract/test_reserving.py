"""Room for chains: free chunks before evictions, heads before tails, whoever else takes chunks."""

from __future__ import annotations

import pytest

from cxlbench.kv.results import KeyResult
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import held_chunks, refill, trim
from cxlbench.tract.layout import CACHE_LOCK
from tests.tract.plain import PlainMemory
from tests.tract.test_prefix_cache import Cache, chain


def raced(cache: Cache, times: int) -> PlainMemory:
    """Return memory of node 0, whose heap another process empties before each of so many inserts.

    It does so where it hurts: after the refill, before the lock of the cache is held.
    """
    mem = cache.pod.nodes[0]
    left = [times]
    own = mem.local_lock

    def local_lock(i: int) -> None:
        if i == CACHE_LOCK and left[0]:
            left[0] -= 1
            trim(mem, cache.layout, 0)
        own(i)

    mem.local_lock = local_lock  # type: ignore[method-assign]
    return mem


@pytest.mark.parametrize("times", [1, 5])
def test_free_chunks_are_found_though_other_processes_take_them_from_the_heap(times: int) -> None:
    cache = Cache(chunks=6, slots=40)
    raced(cache, times)
    assert cache.insert(chain(3)) == (KeyResult.STORED,) * 3
    cache.check()


@pytest.mark.parametrize("times", [1, 5])
def test_nothing_is_evicted_while_there_are_free_chunks(times: int) -> None:
    cache = Cache(chunks=6, slots=40)
    cache.insert(chain(3))
    raced(cache, times)
    assert cache.insert(chain(3, 1)) == (KeyResult.STORED,) * 3
    assert cache.ready() == 6
    cache.check()


def test_a_chain_longer_than_a_heap_evicts_nothing_while_there_are_free_chunks() -> None:
    cache = Cache(chunks=25, slots=60, batch=1)
    cache.insert(chain(5))
    assert cache.insert(chain(20, 1)) == (KeyResult.STORED,) * 20
    assert cache.ready() == 25
    cache.check()


def test_a_full_heap_does_not_keep_a_full_table_from_evicting() -> None:
    cache = Cache(slots=5, chunks=30, batch=1)
    for prompt in range(8):
        cache.insert(chain(1, prompt))
    cache.views[0].evict(2)
    cache.insert(chain(1, 8))
    while held_chunks(cache.pod.nodes[0], cache.layout) < cache.layout.heap_capacity:
        refill(cache.pod.nodes[0], cache.layout, cache.layout.heap_capacity)
    for prompt in range(9, 20):
        assert cache.insert(chain(1, prompt)) == (KeyResult.STORED,)
    assert cache.ready() <= cache.layout.evict_above
    cache.check()


def test_a_chain_does_not_evict_its_own_head_for_its_tail() -> None:
    """H3: heads are kept, tails go first."""
    cache = Cache(chunks=4, slots=40)
    cache.insert(chain(4))
    results = cache.insert(chain(6), node=1)
    assert results == (KeyResult.EXISTS,) * 4 + (KeyResult.NO_SPACE,) * 2
    assert cache.hits(chain(6)) == 4
    assert fsck(cache.pod.nodes[0], cache.layout).pins == 0
    cache.check()


def test_a_head_that_was_there_counts_as_used_when_its_tail_is_stored() -> None:
    cache = Cache(chunks=6, slots=40)
    cache.insert(chain(3))
    cache.insert(chain(1, 1))
    cache.insert(chain(4))
    assert cache.views[0].evict(2) == 2
    assert cache.hits(chain(1, 1)) == 0
    assert cache.hits(chain(4)) == 3


def test_a_key_that_is_twice_in_a_chain_is_stored_once() -> None:
    cache = Cache()
    keys = chain(3)
    results = cache.insert([*keys, keys[0], keys[2]])
    assert results == (KeyResult.STORED,) * 3 + (KeyResult.EXISTS,) * 2
    cache.check()
    assert cache.insert([keys[1], keys[1]]) == (KeyResult.EXISTS,) * 2
    assert cache.hits(keys) == 3
    cache.check()


def test_more_can_be_evicted_than_a_heap_holds() -> None:
    cache = Cache(chunks=30, slots=60, batch=1)
    for prompt in range(30):
        cache.insert(chain(1, prompt))
    assert cache.views[1].evict(25) == 25
    assert cache.ready() == 5
    cache.check()
    assert cache.views[1].evict(25) == 5
    cache.check()


def test_any_number_of_blocks_can_be_deleted() -> None:
    cache = Cache(chunks=30, slots=60, batch=1)
    for prompt in range(30):
        cache.insert(chain(1, prompt))
    for prompt in range(30):
        assert cache.views[1].delete(chain(1, prompt)[0])
    cache.check()
