"""Keyed blocks: capacity, least recently used first out, pins, leases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.tiers.block_store import BlockStore, Entry


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def put(store: BlockStore, number: int, nbytes: int = 1, now: float = 0.0) -> Entry | None:
    entry = store.reserve(key(number), nbytes, now)
    if entry is not None:
        store.commit(entry, number)
    return entry


def there(store: BlockStore, count: int) -> list[int]:
    return [number for number in range(count) if store.find(key(number)) is not None]


def test_the_least_recently_used_goes_first() -> None:
    store = BlockStore(3)
    for number in range(3):
        put(store, number)
    store.touch([key(0)])
    put(store, 3)
    assert there(store, 4) == [0, 2, 3]
    put(store, 4, nbytes=2)
    assert there(store, 5) == [3, 4]
    assert store.evicted == 3


def test_what_is_reserved_cannot_be_found_and_is_not_evicted() -> None:
    store = BlockStore(2)
    reserved = store.reserve(key(0), 1, 0.0)
    assert reserved is not None
    assert store.find(key(0)) is None
    assert key(0) in store
    put(store, 1)
    put(store, 2)
    assert there(store, 3) == [2]
    store.commit(reserved, "tag")
    assert there(store, 3) == [0, 2]


def test_what_is_pinned_stays_and_may_leave_no_room() -> None:
    store = BlockStore(2)
    first, second = put(store, 0), put(store, 1)
    assert first is not None
    assert second is not None
    store.pin(first)
    assert put(store, 2) is not None
    assert there(store, 3) == [0, 2]
    assert put(store, 3, nbytes=2) is None
    assert there(store, 4) == [0, 2], "nothing is evicted for what does not fit after all"
    store.unpin(first)
    assert put(store, 3, nbytes=2) is not None


def test_a_key_is_there_once() -> None:
    store = BlockStore(4)
    put(store, 0)
    with pytest.raises(ValueError, match="already"):
        store.reserve(key(0), 1, 0.0)


def test_a_lease_keeps_a_block_until_it_ends() -> None:
    store = BlockStore(1)
    entry = put(store, 0)
    assert entry is not None
    entry.lease_s = 5.0
    assert put(store, 1, now=4.9) is None
    assert put(store, 1, now=5.0) is not None


def test_leases_that_ended_first_go_first() -> None:
    store = BlockStore(10)
    for number, lease_s in enumerate((3.0, 1.0, 9.0, 2.0, 1.0)):
        entry = put(store, number)
        assert entry is not None
        store.lease(entry, lease_s)
    gone = store.evict_oldest_leases(3, now=5.0)
    assert [entry.key for entry in gone] == [key(1), key(4), key(3)]
    assert [e.key for e in store.evict_oldest_leases(9, now=5.0)] == [key(0)]
    assert there(store, 5) == [2]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("lease", "pin", "unpin", "remove", "evict")),
            st.integers(0, 12),
            st.integers(0, 30),
        ),
        max_size=80,
    )
)
def test_the_order_of_leases_is_that_of_a_plain_sort(steps: list[tuple[str, int, int]]) -> None:
    store, pinned = BlockStore(100), dict[bytes, Entry]()
    for number in range(13):
        entry = put(store, number)
        assert entry is not None
        store.lease(entry, 0.0)
    for what, number, at in steps:
        entry = store.find(key(number))
        if what == "evict":
            left = [e for n in range(13) if (e := store.find(key(n))) is not None]
            free = [e for e in left if e.lease_s <= at and not e.pins]
            wanted = sorted(free, key=lambda e: (e.lease_s, e.serial))[: number // 4]
            assert store.evict_oldest_leases(number // 4, now=float(at)) == wanted
        elif entry is None:
            continue
        elif what == "lease":
            store.lease(entry, float(at))
        elif what == "pin":
            store.pin(entry)
            pinned[entry.key] = entry
        elif what == "unpin" and entry.key in pinned and entry.pins:
            store.unpin(entry)
        elif what == "remove" and not entry.pins:
            store.remove(entry)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.booleans()), max_size=60))
def test_space_is_what_is_there_and_never_above_the_capacity(
    steps: list[tuple[int, int, bool]],
) -> None:
    store, pinned = BlockStore(12), set[int]()
    for number, nbytes, pin in steps:
        if key(number) in store:
            store.touch([key(number)])
            continue
        entry = put(store, number, nbytes)
        if entry is not None and pin and len(pinned) < 3:
            store.pin(entry)
            pinned.add(number)
        found = [store.find(key(n)) for n in range(21)]
        assert sum(entry.nbytes for entry in found if entry is not None) == store.used_bytes <= 12
        assert pinned <= set(there(store, 21))
