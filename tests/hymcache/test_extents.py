"""The extent allocator: append-only segments per size class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.hymcache.extents import ExtentAllocator

PAGE = 4096
SEGMENT = 8 * PAGE


def allocator(segments: int = 4) -> ExtentAllocator:
    return ExtentAllocator(segments * SEGMENT, segment_bytes=SEGMENT, page_bytes=PAGE)


def fill(made: ExtentAllocator, extent: int) -> list[int]:
    taken = []
    while (address := made.allocate(extent)) is not None:
        taken.append(address)
    return taken


def test_extents_of_one_size_are_appended() -> None:
    made = allocator()
    assert [made.allocate(2 * PAGE) for _ in range(5)] == [0, 8192, 16384, 24576, 32768]


def test_sizes_have_segments_of_their_own() -> None:
    made = allocator()
    assert made.allocate(PAGE) == 0
    assert made.allocate(2 * PAGE) == SEGMENT
    assert made.allocate(PAGE) == PAGE


def test_a_full_device_says_none_and_stays_as_it_was() -> None:
    made = allocator()
    assert len(fill(made, 2 * PAGE)) == 16
    assert made.allocate(PAGE) is None
    assert made.free_bytes(PAGE) == 0
    assert made.live_extents == 16


def test_dead_space_comes_back_only_with_its_whole_segment() -> None:
    made = allocator()
    first, second, third, fourth, *_ = fill(made, 2 * PAGE)
    for address in (first, second, third):
        made.free(address)
        assert made.allocate(2 * PAGE) is None
    assert made.dead_bytes == 6 * PAGE
    made.free(fourth)
    assert made.dead_bytes == 0
    assert made.free_bytes(2 * PAGE) == SEGMENT
    assert made.allocate(2 * PAGE) == first


def test_the_segment_that_is_free_longest_is_used_next() -> None:
    made = allocator(3)
    taken = fill(made, SEGMENT)
    for address in (taken[1], taken[2], taken[0]):
        made.free(address)
    assert [made.allocate(SEGMENT) for _ in range(3)] == [taken[1], taken[2], taken[0]]


def test_an_open_segment_without_a_live_extent_is_free_for_other_sizes() -> None:
    made = allocator(1)
    address = made.allocate(PAGE)
    assert address is not None
    assert made.allocate(2 * PAGE) is None
    made.free(address)
    assert made.allocate(2 * PAGE) == 0


def test_an_extent_that_was_never_written_is_taken_back_without_loss() -> None:
    made = allocator(1)
    for _ in range(100):
        address = made.allocate(2 * PAGE)
        assert address is not None
        made.take_back(address)
    assert made.free_bytes(2 * PAGE) == SEGMENT
    kept = made.allocate(2 * PAGE)
    refused = made.allocate(2 * PAGE)
    assert kept is not None
    assert refused is not None
    made.take_back(refused)
    assert made.dead_bytes == 0
    assert made.allocate(2 * PAGE) == refused


def test_an_extent_that_others_follow_cannot_be_appended_again() -> None:
    made = allocator(1)
    first, second = made.allocate(2 * PAGE), made.allocate(2 * PAGE)
    assert first is not None
    assert second is not None
    made.take_back(first)
    assert made.dead_bytes == 2 * PAGE
    assert made.allocate(2 * PAGE) == second + 2 * PAGE


def test_an_extent_of_a_closed_segment_is_not_appended_again() -> None:
    made = allocator(2)
    closed = [made.allocate(4 * PAGE) for _ in range(2)]
    opened = made.allocate(4 * PAGE)
    assert closed[1] is not None
    assert opened is not None
    made.take_back(closed[1])
    assert made.free_bytes(4 * PAGE) == 4 * PAGE
    assert made.allocate(4 * PAGE) == opened + 4 * PAGE


def test_an_object_larger_than_a_segment_gets_neighbouring_ones() -> None:
    made = allocator(5)
    large = 2 * SEGMENT + PAGE
    address = made.allocate(large)
    assert address == 0
    assert made.free_bytes(large) == 0
    assert made.allocate(large) is None
    assert made.free_bytes(SEGMENT) == 2 * SEGMENT
    made.free(address)
    assert made.free_bytes(large) == large


def test_scattered_free_segments_do_not_hold_a_large_object() -> None:
    made = allocator(5)
    taken = fill(made, SEGMENT)
    for address in taken[::2]:
        made.free(address)
    assert made.free_bytes(SEGMENT) == 3 * SEGMENT
    assert made.free_bytes(2 * SEGMENT) == 0
    assert made.allocate(2 * SEGMENT) is None
    made.free(taken[1])
    assert made.allocate(2 * SEGMENT) == 0


def test_an_object_larger_than_the_device_is_never_placed() -> None:
    made = allocator(2)
    assert made.free_bytes(3 * SEGMENT) == 0
    assert made.allocate(3 * SEGMENT) is None


def test_space_is_counted_in_whole_extents_of_the_size_asked_for() -> None:
    made = allocator(2)
    assert made.free_bytes(3 * PAGE) == 2 * 6 * PAGE
    made.allocate(3 * PAGE)
    assert made.free_bytes(3 * PAGE) == 3 * PAGE + 6 * PAGE
    assert made.free_bytes(PAGE) == SEGMENT


def test_the_emptiest_segments_come_first_and_the_appended_one_not_at_all() -> None:
    made = allocator(4)
    taken = [made.allocate(2 * PAGE) for _ in range(14)]
    places = [address for address in taken if address is not None]
    for address in (*places[4:7], places[0]):
        made.free(address)
    assert list(made.emptiest(2 * PAGE)) == [[places[7]], places[1:4], places[8:12]]
    assert places[12:] in list(made.emptiest(PAGE))


def test_freeing_twice_is_refused() -> None:
    made = allocator()
    address = made.allocate(PAGE)
    assert address is not None
    made.free(address)
    with pytest.raises(ValueError, match="no extent is allocated at 0"):
        made.free(address)


@pytest.mark.parametrize("segment", [0, PAGE - 1, PAGE + 1])
def test_segments_are_whole_pages(segment: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        ExtentAllocator(1 << 20, segment_bytes=segment, page_bytes=PAGE)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from([1, 2, 3, 8, 11, 16])),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("undo"), st.integers(0, 99)),
    ),
    max_size=60,
)


@given(STEPS)
def test_extents_never_overlap_and_no_byte_is_lost(steps: list[tuple[str, int]]) -> None:
    made = allocator(6)
    live: dict[int, int] = {}
    written: set[int] = set()
    for step, number in steps:
        if step == "take":
            extent = number * PAGE
            promised = made.free_bytes(extent)
            address = made.allocate(extent)
            assert (address is not None) == (promised > 0)
            if address is None:
                continue
            assert made.free_bytes(extent) == promised - extent
            assert address >= 0
            assert address + extent <= 6 * SEGMENT
            for other, length in live.items():
                assert address + extent <= other or other + length <= address
            # Append-only: a page is not written twice before all of its segment was free.
            pages = set(range(address // PAGE, (address + extent) // PAGE))
            assert pages.isdisjoint(written)
            written |= pages
            live[address] = extent
        elif live:
            address = sorted(live)[number % len(live)]
            extent = live.pop(address)
            if step == "undo":
                # Nothing was written to it, so it may be handed out again.
                written -= set(range(address // PAGE, (address + extent) // PAGE))
                made.take_back(address)
            else:
                made.free(address)
            used = {a // SEGMENT + i for a, e in live.items() for i in range(-(-e // SEGMENT))}
            for unit in set(range(6)) - used:
                written -= set(range(unit * 8, unit * 8 + 8))
        assert made.live_extents == len(live)
    for address in list(live):
        made.free(address)
    assert made.dead_bytes == 0
    assert made.free_bytes(SEGMENT) == 6 * SEGMENT
    assert made.free_bytes(6 * SEGMENT) == 6 * SEGMENT


def test_a_large_extent_asks_for_the_neighbours_that_hold_least() -> None:
    """Emptying the cheapest units one by one would empty nearly all before three are neighbours."""
    made = ExtentAllocator(9 * SEGMENT, segment_bytes=SEGMENT, page_bytes=PAGE)
    units = [[made.allocate(PAGE) for _ in range(SEGMENT // PAGE)] for _ in range(9)]
    for unit, kept in enumerate([1, 4, 4, 2, 3, 2, 4, 4, 1]):
        for address in units[unit][kept:]:
            assert address is not None
            made.free(address)
    first = next(made.emptiest(3 * SEGMENT))
    assert len(first) == 7
    for address in first:
        made.free(address)
    assert made.allocate(3 * SEGMENT) == 3 * SEGMENT
