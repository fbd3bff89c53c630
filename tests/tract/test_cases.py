"""Situations that people met in public KV-cache tiers, where they touch shared memory.

Each test is named for the kind of situation; the right behaviour is in its body. Situations that
other tests of this folder show in passing are not repeated.
"""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.pod_explorer import explore
from cxlbench.kv.results import KeyResult
from cxlbench.tract.errors import CorruptedHeaderError
from cxlbench.tract.fsck import fsck
from cxlbench.tract.index import BLOCK, entry_at
from cxlbench.tract.prefix_cache import PLACE_WORDS, reserve_chain
from cxlbench.tract.region import open_region
from cxlbench.tract.repair import repair
from cxlbench.tract.scenarios import cache_traffic, format_and_open, lock_counter_crash
from cxlbench.tract.words import key_words
from tests.tract.test_prefix_cache import WORDS, Cache, chain, content


def test_w3_an_owner_that_frees_a_block_too_early_cannot() -> None:
    """The owner deletes and evicts all it can; the reader's pin keeps the bytes."""
    cache = Cache()
    cache.insert(chain(1))
    with cache.views[1].lookup(chain(1)) as lease:
        assert not cache.views[0].delete(chain(1)[0])
        assert cache.views[0].evict(9) == 0
        for prompt in range(1, 60):
            cache.insert(chain(1, prompt))
        buffer = np.zeros(WORDS, np.int64)
        assert lease.read([buffer]) == 1
        assert np.array_equal(buffer, content(chain(1))[0])


def test_w4_a_block_that_comes_back_as_anothers_is_a_miss() -> None:
    cache = Cache()
    cache.insert(chain(1))
    cache.insert(chain(1, 1))
    with cache.views[0].lookup(chain(1)) as one, cache.views[0].lookup(chain(1, 1)) as other:
        at, from_ = one.blocks[0].offset // 8, other.blocks[0].offset // 8
        cache.pod.words[at : at + WORDS] = cache.pod.words[from_ : from_ + WORDS]
        assert one.read([np.zeros(WORDS, np.int64)]) == 0


def test_w10_two_servers_on_one_region_never_hand_out_the_same_space() -> None:
    """Under every schedule: payload that overlapped would be read wrong or race."""
    assert not explore(cache_traffic, schedules=60, first=500, scheduler="mixed").failed
    cache = Cache(nodes=4, batch=4)
    for turn in range(6):
        for node in range(4):
            cache.insert(chain(1, 4 * turn + node), node)
    mem, lay = cache.pod.nodes[0], cache.layout
    blocks = [mem.load(entry_at(lay, s) + BLOCK) for s in range(lay.slots)]
    used = [block for block in blocks if block]
    assert len(used) == len(set(used)) == 24
    cache.check()


def test_w11_a_header_written_on_one_host_is_read_right_on_another() -> None:
    found = explore(format_and_open, schedules=200, scheduler="mixed")
    assert not found.failed, str(found.report)


def test_w11_a_half_written_header_is_refused() -> None:
    cache = Cache()
    cache.pod.words[5] ^= 4
    with pytest.raises(CorruptedHeaderError):
        open_region(cache.pod.nodes[1], 8 * len(cache.pod.words))


def test_h3_a_chain_without_room_keeps_its_head() -> None:
    cache = Cache(chunks=10, slots=40)
    results = cache.insert(chain(14))
    assert results[:10] == (KeyResult.STORED,) * 10
    assert cache.hits(chain(14)) == 10


def test_h4_what_is_announced_can_be_fetched() -> None:
    cache = Cache(chunks=6, slots=40)
    for prompt in range(5):
        cache.insert(chain(4, prompt))
        with cache.views[1].lookup(chain(4, prompt)) as lease:
            buffers = list(np.zeros((4, WORDS), np.int64))
            assert lease.read(buffers) == len(lease.blocks)


def test_r2_r3_pins_end_on_every_path_and_the_pool_does_not_stay_full() -> None:
    cache = Cache(chunks=3, slots=40)
    cache.insert(chain(3))
    with pytest.raises(RuntimeError, match="reader fails"), cache.views[1].lookup(chain(3)):
        raise RuntimeError("reader fails")
    assert fsck(cache.pod.nodes[0], cache.layout).pins == 0
    assert cache.insert(chain(3, 1)) == (KeyResult.STORED,) * 3


def test_r4_r5_a_node_that_dies_in_the_middle_of_a_store_leaves_nothing() -> None:
    """Its reservation is found and reclaimed, and the key is free again."""
    cache = Cache()
    keys = chain(2)
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((2, PLACE_WORDS), np.int64)
    assert reserve_chain(cache.pod.nodes[1], cache.layout, numbers, 8 * WORDS, places) == 2
    assert cache.insert(keys) == (KeyResult.EXISTS,) * 2
    repair(cache.pod.nodes[0], cache.layout, np.array([0, 1], np.int64))
    report = fsck(cache.pod.nodes[0], cache.layout, in_heaps=0)
    assert (report.problems, report.pending, report.used) == ((), 0, 0)
    assert cache.insert(keys) == (KeyResult.STORED,) * 2


def test_r8_recovery_takes_no_lock_that_a_user_can_hold() -> None:
    """It waits for live holders to leave and is never waited for by one: no hang, ever."""
    found = explore(lock_counter_crash, schedules=150, first=1000, scheduler="mixed")
    assert not found.failed, str(found.report)
