"""Situations that people met in public KV-cache tiers, where they touch shared memory.

Each test is named for the kind of situation; the right behaviour is in its body. The worker's end
of them is in ``test_cases_connector``, what identity must tell apart in ``tests/kv``.
"""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_ops import PodMemory, clflushopt, load, ntstore, store
from cxlbench.emu.pod_scenario import Pod
from cxlbench.kv.results import KeyResult
from cxlbench.tract.errors import CorruptedHeaderError, ForeignRegionError, RegionTooSmallError
from cxlbench.tract.fsck import fsck
from cxlbench.tract.index import BLOCK, entry_at, home_of
from cxlbench.tract.layout import Sizes, plan, sizes_for
from cxlbench.tract.places import PLACE_WORDS
from cxlbench.tract.prefix_cache import abandon_chain, publish_chain, write_chain
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.repair import repair
from cxlbench.tract.reserving import reserve_chain
from cxlbench.tract.scenarios import (
    cache_crash,
    cache_traffic,
    cache_upkeep,
    format_and_open,
    lock_counter_crash,
)
from cxlbench.tract.words import key_words
from tests.tract.plain import PlainMemory
from tests.tract.test_prefix_cache import WORDS, Cache, chain, content

FIRST_BYTES = ["a0f37ee013918e94", "32addd06e70c5768", "ba8682bf522ea48d"]
"""Of the keys of ``chain(3)``, on every host and in every run."""


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


def test_w2_nothing_is_findable_before_its_bytes_are_in_place() -> None:
    cache = Cache()
    keys, mem = chain(2), cache.pod.nodes[0]
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((2, PLACE_WORDS), np.int64)
    reserve_chain(mem, cache.layout, numbers, 8 * WORDS, places)
    write_chain(mem, cache.layout, content(keys), places)
    assert cache.hits(keys, node=1) == 0
    publish_chain(mem, cache.layout, places)
    assert cache.hits(keys, node=1) == 2
    assert not explore(cache_traffic, schedules=60, first=700, scheduler="mixed").failed


def test_w5_whole_blocks_only() -> None:
    cache = Cache()
    cache.insert(chain(1))
    with cache.views[1].lookup(chain(1)) as lease:
        assert lease.read([np.zeros(WORDS // 2, np.int64)]) == 0
        assert lease.read([np.zeros(WORDS, np.int64)]) == 1


def test_w12_a_node_sees_its_own_writes_also_while_they_are_on_their_way() -> None:
    def own(mem: PodMemory) -> None:
        for value in range(1, 6):
            store(mem, 0, value)
            clflushopt(mem, 0)
            assert load(mem, 0) == value
            ntstore(mem, 8, value)
            assert load(mem, 8) == value

    def scenario(pod: Pod) -> None:
        pod.run(0, own)

    assert not explore(scenario, schedules=300, scheduler="mixed").failed


def test_h2_the_place_of_a_key_is_the_same_in_every_process_and_run() -> None:
    layout = plan(Sizes(nodes=1, slots=1000, chunks=1, chunk_bytes=64))
    homes = [home_of(layout, key_words(key)[0]) for key in chain(3)]
    assert homes == [home_of(layout, int.from_bytes(k[:8], "little")) for k in chain(3)]
    assert [key.hex()[:16] for key in chain(3)] == FIRST_BYTES


def test_h5_an_entry_whose_payload_is_gone_is_one_miss_and_goes() -> None:
    cache = Cache()
    cache.insert(chain(2))
    with cache.views[0].lookup(chain(2)) as lease:
        at = lease.blocks[1].offset // 8
        cache.pod.words[at : at + WORDS] = 0
        assert lease.read(list(np.zeros((2, WORDS), np.int64))) == 1
    assert cache.views[0].delete(chain(2)[1])
    assert cache.hits(chain(2)) == 1
    assert cache.insert(chain(2)) == (KeyResult.EXISTS, KeyResult.STORED)


def test_h8_a_region_that_is_gone_or_cut_is_refused_and_no_crash() -> None:
    cache = Cache()
    size = 8 * len(cache.pod.words)
    for left in (0, 64, size // 2):
        with pytest.raises(RegionTooSmallError):
            open_region(cache.pod.nodes[1], left)
    erased = PlainMemory(np.zeros(size // 8, np.int64))
    with pytest.raises(ForeignRegionError, match="format it first"):
        open_region(erased, size)


def test_r4_a_reservation_that_is_abandoned_leaves_its_key_and_its_chunk_free() -> None:
    cache = Cache(chunks=3)
    keys = chain(3)
    numbers = np.array([key_words(key) for key in keys], np.int64)
    places = np.zeros((3, PLACE_WORDS), np.int64)
    mem = cache.pod.nodes[1]
    assert reserve_chain(mem, cache.layout, numbers, 8 * WORDS, places) == 3
    assert cache.insert(keys) == (KeyResult.EXISTS,) * 3
    assert abandon_chain(mem, cache.layout, places) == 3
    assert cache.insert(keys, node=1) == (KeyResult.STORED,) * 3
    cache.check()


def test_t1_a_node_that_vanishes_anywhere_costs_the_others_nothing() -> None:
    for scenario in (cache_crash, cache_upkeep):
        found = explore(scenario, schedules=60, first=900, scheduler="mixed")
        assert not found.failed, str(found.report)


def test_t2_too_small_a_region_is_refused_with_the_size_that_is_needed() -> None:
    sizes = Sizes(nodes=2, slots=40, chunks=30, chunk_bytes=128)
    needed = plan(sizes).region_bytes
    mem = PlainMemory(np.zeros(needed // 8, np.int64))
    with pytest.raises(RegionTooSmallError, match=str(needed)):
        format_region(mem, sizes, needed - 64)
    with pytest.raises(RegionTooSmallError, match="bytes are needed at least"):
        sizes_for(1024, nodes=2, chunk_bytes=4096)
    assert not mem.words.any()
