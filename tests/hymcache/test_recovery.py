"""A node's scan of its backing store: whole objects are found, anything else is not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.emu.backing import Backing, FileBacking, RamBacking
from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Fabric, QueuePair
from cxlbench.emu.memory import PAGE_BYTES, Arena, page_ceil
from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache import recovery
from cxlbench.hymcache.extents import ExtentAllocator
from cxlbench.hymcache.kv_manager import Grant, KvManager
from cxlbench.hymcache.recovery import FoundObject, find_objects
from cxlbench.kv.footer import Footer, object_extent_bytes, pack_footer, payload_checksum
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import chain, small_profile

CAPACITY = 1 << 20
KEYS = chain(8)


def payload(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@dataclass
class Store:
    """A backing store that tests write objects to, as a device's flush does."""

    backing: Backing
    clock: WallClock

    def write(self, address: int, data: np.ndarray) -> None:
        arena = Arena(page_ceil(len(data)))
        arena.store([(0, len(data))], data)
        self.clock.run(self.backing.write(address, arena, [(0, arena.nbytes)]))
        arena.close()

    def read(self, address: int, size: int) -> np.ndarray:
        arena = Arena(size)
        self.clock.run(self.backing.read(address, arena, [(0, page_ceil(size))]))
        data = arena.view(0, size).copy()
        arena.close()
        return data

    def put(
        self, address: int, key: bytes, size: int, *, generation: int = 1, seed: int = 0
    ) -> FoundObject:
        data = payload(size, seed)
        footer = Footer(key, generation, size, payload_checksum(data))
        self.write(address, data)
        self.write(address + page_ceil(size), np.frombuffer(pack_footer(footer), dtype=np.uint8))
        return FoundObject(address, footer)

    def find(self) -> list[FoundObject]:
        return self.clock.run(find_objects(self.backing, CAPACITY))


@pytest.fixture(params=["ram", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    made: Backing
    if request.param == "ram":
        made = RamBacking(CAPACITY)
    else:
        made = FileBacking([tmp_path / "a", tmp_path / "b"], CAPACITY, stripe_bytes=2 * PAGE_BYTES)
    with WallClock() as clock:
        yield Store(made, clock)
        made.close()


@pytest.mark.parametrize("size", [1, 4095, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES])
def test_an_object_of_any_size_is_found_where_it_lies(store: Store, size: int) -> None:
    made = [store.put(3 * PAGE_BYTES, KEYS[0], size), store.put(1 << 19, KEYS[1], size)]
    assert sorted(store.find(), key=lambda found: found.address) == made


def test_an_empty_store_has_nothing(store: Store) -> None:
    assert store.find() == []


def test_an_object_at_the_very_end_is_found(store: Store) -> None:
    made = store.put(CAPACITY - object_extent_bytes(100), KEYS[0], 100)
    assert store.find() == [made]


def test_objects_come_oldest_first(store: Store) -> None:
    for place, generation in enumerate([5, 3, 9, 1]):
        store.put(place * 4 * PAGE_BYTES, KEYS[place], 100, generation=generation)
    assert [found.footer.generation for found in store.find()] == [1, 3, 5, 9]


def test_what_has_no_footer_yet_is_not_found(store: Store) -> None:
    store.write(0, payload(3 * PAGE_BYTES))
    assert store.find() == []


def test_a_footer_whose_payload_was_not_flushed_is_not_found(store: Store) -> None:
    footer = Footer(KEYS[0], 1, 5000, payload_checksum(payload(5000)))
    store.write(2 * PAGE_BYTES, np.frombuffer(pack_footer(footer), dtype=np.uint8))
    assert store.find() == []


def test_a_footer_that_claims_to_begin_before_the_store_is_not_found(store: Store) -> None:
    footer = Footer(KEYS[0], 1, 1 << 40, bytes(16))
    store.write(2 * PAGE_BYTES, np.frombuffer(pack_footer(footer), dtype=np.uint8))
    assert store.find() == []


@pytest.mark.parametrize("page", range(4))
def test_a_torn_object_is_not_found(store: Store, page: int) -> None:
    """Any page of it (the last is the footer's) is still what was there before."""
    store.put(0, KEYS[0], 3 * PAGE_BYTES, generation=1, seed=1)
    before = store.read(page * PAGE_BYTES, PAGE_BYTES)
    store.put(0, KEYS[1], 3 * PAGE_BYTES, generation=2, seed=2)
    store.write(page * PAGE_BYTES, before)
    assert store.find() == []


@pytest.mark.parametrize("byte", [0, 1, 4999])
def test_a_damaged_payload_is_not_found(store: Store, byte: int) -> None:
    store.put(0, KEYS[0], 5000)
    page = store.read(byte // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    page[byte % PAGE_BYTES] ^= 1
    store.write(byte // PAGE_BYTES * PAGE_BYTES, page)
    assert store.find() == []


def test_of_two_generations_of_one_key_the_newer_is_found(store: Store) -> None:
    newer = store.put(0, KEYS[0], 100, generation=2, seed=1)
    store.put(1 << 18, KEYS[0], 100, generation=1, seed=1)
    assert store.find() == [newer]


def test_if_the_newer_of_two_generations_is_damaged_the_older_is_found(store: Store) -> None:
    older = store.put(0, KEYS[0], 100, generation=1)
    store.put(1 << 18, KEYS[0], 100, generation=2)
    store.write(1 << 18, payload(100, seed=9))
    assert store.find() == [older]


def test_a_place_that_was_reused_with_another_size_has_the_new_objects_only(store: Store) -> None:
    store.put(0, KEYS[0], 6 * PAGE_BYTES, generation=1)
    small = [
        store.put(place * object_extent_bytes(100), KEYS[1 + place], 100, generation=2 + place)
        for place in range(3)
    ]
    assert store.find() == small


def test_a_large_object_over_small_ones_hides_what_it_covers(store: Store) -> None:
    store.put(0, KEYS[0], 100, generation=1)
    outside = store.put(8 * PAGE_BYTES, KEYS[1], 100, generation=2)
    large = store.put(0, KEYS[2], 6 * PAGE_BYTES, generation=3)
    assert store.find() == [outside, large]


def test_a_payload_that_looks_like_an_object_is_found_once_as_what_it_is(store: Store) -> None:
    """KV bytes may be anything: also a copy of an object. Its own footer vouches for it alone."""
    inner = payload(100)
    footer = Footer(KEYS[5], 4, 100, payload_checksum(inner))
    outer = np.zeros(3 * PAGE_BYTES, dtype=np.uint8)
    outer[:100] = inner
    outer[PAGE_BYTES : PAGE_BYTES + 80] = np.frombuffer(pack_footer(footer), dtype=np.uint8)
    store.write(0, outer)
    whole = Footer(KEYS[0], 9, len(outer), payload_checksum(outer))
    store.write(len(outer), np.frombuffer(pack_footer(whole), dtype=np.uint8))
    found = store.find()
    assert FoundObject(0, whole) in found
    # Both have right bytes for their key. Where they overlap, the allocator takes the newer one.
    sizes = [(o.address, o.extent_bytes) for o in found]
    allocator = ExtentAllocator(CAPACITY, segment_bytes=4 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    allocator.restore(sizes)
    assert allocator.live_extents == 1


def test_a_scan_reads_across_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SCAN_BYTES", 2 * PAGE_BYTES)
    with WallClock() as clock:
        store = Store(RamBacking(CAPACITY), clock)
        steps: list[tuple[int, int]] = []
        made = store.put(PAGE_BYTES, KEYS[0], 5 * PAGE_BYTES)
        found = clock.run(
            find_objects(store.backing, CAPACITY, progress=lambda *at: steps.append(at))
        )
        assert found == [made]
        assert steps[-1] == (CAPACITY, CAPACITY)
        assert len(steps) == CAPACITY // (2 * PAGE_BYTES)
        store.backing.close()


def test_a_payload_that_cannot_be_read_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with WallClock() as clock:
        store = Store(RamBacking(CAPACITY), clock)
        store.put(0, KEYS[0], 5 * PAGE_BYTES)
        good = store.put(1 << 18, KEYS[1], 100, generation=2)
        read = store.backing.read

        async def broken(address: int, arena: Arena, extents: Sequence[tuple[int, int]]) -> None:
            if address == 0 and extents[0][1] == 5 * PAGE_BYTES:
                raise DeviceError(Status.IO_ERROR, "unreadable")
            await read(address, arena, extents)

        monkeypatch.setattr(store.backing, "read", broken)
        assert store.find() == [good]
        store.backing.close()


# -- space after a restart -------------------------------------------------------------------------

SEGMENT = 8 * PAGE_BYTES


@given(st.data())
def test_restored_space_overlaps_nowhere_and_nothing_of_it_is_lost(data: st.DataObject) -> None:
    """Whatever footers claim, also of several lives of the device: free + used = all there is."""
    units = data.draw(st.integers(2, 12))
    extents = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, units * 8 - 1).map(lambda page: page * PAGE_BYTES),
                st.integers(2, 20).map(lambda pages: pages * PAGE_BYTES),
            ).filter(lambda e: e[0] + e[1] <= units * SEGMENT),
            max_size=12,
            unique_by=lambda e: e[0],
        )
    )
    allocator = ExtentAllocator(units * SEGMENT, segment_bytes=SEGMENT, page_bytes=PAGE_BYTES)
    kept = allocator.restore(extents)
    size_of = dict(extents)
    taken = [(address, size_of[address]) for address in kept]
    assert set(taken) <= set(extents)
    if extents and all(size <= SEGMENT for _, size in extents):
        newest, size = extents[-1]
        if newest % SEGMENT % size == 0 and newest % SEGMENT + size <= SEGMENT:
            assert newest in kept
    # What is allocated from now on overlaps nothing that was kept.
    size = data.draw(st.integers(2, 20)) * PAGE_BYTES
    while (address := allocator.allocate(size)) is not None:
        taken.append((address, size))
    taken.sort()
    for (begin, length), (after, _) in itertools.pairwise(taken):
        assert begin + length <= after
    assert not taken or sum(taken[-1]) <= units * SEGMENT
    # And when all of it is freed, the whole device is there again.
    for address, _ in taken:
        allocator.free(address)
    assert allocator.live_extents == 0
    assert allocator.dead_bytes == 0
    assert allocator.free_bytes(SEGMENT) == units * SEGMENT


@given(st.lists(st.sampled_from([2, 3, 5, 8, 11, 16]), min_size=1, max_size=20), st.data())
def test_what_an_allocator_gave_out_another_one_restores(
    pages: list[int], data: st.DataObject
) -> None:
    """Nothing is refused of what was alive at one moment, whatever was freed before."""
    first = ExtentAllocator(12 * SEGMENT, segment_bytes=SEGMENT, page_bytes=PAGE_BYTES)
    alive: dict[int, int] = {}
    for count in pages:
        if alive and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(alive)))
            first.free(address)
            del alive[address]
        address = first.allocate(count * PAGE_BYTES)
        if address is not None:
            alive[address] = count * PAGE_BYTES
    second = ExtentAllocator(12 * SEGMENT, segment_bytes=SEGMENT, page_bytes=PAGE_BYTES)
    assert second.restore(list(alive.items())) == sorted(alive)


# -- a node that starts again ----------------------------------------------------------------------

BLOCK = 16 << 10


class Node:
    """A KV Manager on a device that keeps its file."""

    def __init__(self, clock: WallClock, folder: Path) -> None:
        self.clock = clock
        self.device = CxlHm(
            clock, small_profile(BLOCK), folder=folder, capacity_bytes=4 << 20, keep=True
        )
        self.fabric = Fabric(clock, seed=1)
        self.manager = KvManager(clock, self.fabric, [self.device], segment_bytes=64 << 10)
        self.pair = QueuePair(self.fabric, [], latency_s=0.0, name="pair")

    async def restore(self) -> list[bytes]:
        found = await find_objects(self.device.ssds.backing, self.device.capacity_bytes)
        self.manager.restore({0: found})
        return list(self.manager.index)

    async def put(self, keys: Sequence[bytes], size: int = BLOCK) -> list[Grant]:
        grants = [g for g in self.manager.reserve(keys, size) if isinstance(g, Grant)]
        for grant in grants:
            data = payload(size, int.from_bytes(grant.key[:4], "little"))
            footer = Footer(grant.key, grant.generation, size, payload_checksum(data))
            trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
            trailer[:80] = np.frombuffer(pack_footer(footer), dtype=np.uint8)
            done = await self.pair.write(grant.rkey, grant.address, data, trailer)
            assert done.status is Status.OK
        committed = self.manager.commit([grant.token for grant in grants])
        assert committed == [KeyResult.STORED] * len(grants)
        assert all(self.manager.publish(g.key, g.address, g.generation) for g in grants)
        return grants

    async def get(self, key: bytes) -> np.ndarray:
        stored = self.manager.index[key]
        data = np.zeros(stored.size_bytes, dtype=np.uint8)
        done = await self.pair.read(self.manager.regions[0].rkey, stored.address, data)
        assert done.status is Status.OK
        return data


def test_a_node_finds_what_it_had_flushed_and_goes_on_from_there(tmp_path: Path) -> None:
    async def lives() -> None:
        first = Node(clock, tmp_path)
        await first.put(KEYS[:4])
        await first.manager.quiesce()
        first.manager.free([(KEYS[3], first.manager.index[KEYS[3]].generation)])
        last = max(stored.generation for stored in first.manager.index.values())
        await first.manager.close()

        second = Node(clock, tmp_path)
        found = await second.restore()
        assert found[:3] == KEYS[:3]  # what was freed may be there again: its bytes are right
        free = second.manager.space(0, BLOCK).free_bytes
        (grant,) = await second.put(KEYS[4:5])
        assert grant.generation > last
        assert second.manager.space(0, BLOCK).free_bytes < free
        for key in KEYS[:3]:
            wanted = payload(BLOCK, int.from_bytes(key[:4], "little"))
            assert np.array_equal(await second.get(key), wanted)
        assert second.manager.reserve(KEYS[:1], BLOCK) == [KeyResult.EXISTS]
        await second.manager.close()

    with WallClock() as clock:
        clock.run(lives())


def test_what_a_node_had_only_buffered_is_gone(tmp_path: Path) -> None:
    async def lives() -> None:
        first = Node(clock, tmp_path)
        await first.put(KEYS[:2])
        await first.manager.quiesce()
        await first.put(KEYS[2:4])
        await first.manager.close()  # at once: what is not flushed is lost

        second = Node(clock, tmp_path)
        found = await second.restore()
        assert found[:2] == KEYS[:2]
        for key in found[2:]:  # a flush may have been faster
            wanted = payload(BLOCK, int.from_bytes(key[:4], "little"))
            assert np.array_equal(await second.get(key), wanted)
        await second.manager.close()

    with WallClock() as clock:
        clock.run(lives())
