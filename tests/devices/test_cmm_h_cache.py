"""The cache of CMM-H by itself: pieces, frames, sets, pins, and who goes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.devices.cmm_h_cache import Cache, CmmHCounters, Line, Transfer, runs
from cxlbench.devices.policies import POLICY_NAMES, load_policy
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.sync import Signal

PAGE = 4096
GRANULE = 4 * PAGE


@pytest.fixture
def clock():
    with VirtualClock() as clock:
        yield clock


def make(granules: int = 4, *, ways: int = 0, policy: str = "lru") -> Cache:
    return Cache(
        granules,
        granule_bytes=GRANULE,
        ways=ways,
        policy=load_policy(policy),
        counters=CmmHCounters(),
    )


def pin(cache: Cache, granule: int) -> Line | None:
    lines: list[Line] = []
    stuck = cache.pin(cache.pieces(granule * GRANULE, PAGE), lines)
    assert stuck == (None if lines else granule)
    return lines[0] if lines else None


def cached(cache: Cache, granules: range) -> set[int]:
    return {granule for granule in granules if cache.line(granule) is not None}


def put(cache: Cache, granule: int, *, dirty: bool = False):
    line = pin(cache, granule)
    if line is not None:
        line.valid = 0b1111
        line.dirty = 0b1111 if dirty else 0
        line.pins -= 1
    return line


@given(first=st.integers(0, 40), pages=st.integers(1, 40))
def test_pieces_cover_a_range_once_and_stay_inside_their_granules(first, pages):
    pieces = make().pieces(first * PAGE, pages * PAGE)
    covered = [
        piece.granule * 4 + bit for piece in pieces for bit in range(4) if piece.pages >> bit & 1
    ]
    assert covered == list(range(first, first + pages))
    at = first * PAGE
    for piece in pieces:
        assert piece.address == at == piece.granule * GRANULE + piece.within
        assert piece.length == piece.pages.bit_count() * PAGE
        at += piece.length


def test_no_bytes_are_no_pieces():
    assert make().pieces(PAGE, 0) == ()


def test_frames_are_never_shared():
    cache = make()
    (piece,) = cache.pieces(PAGE, PAGE)
    for granule in range(20):
        assert put(cache, granule) is not None
        lines = [line for g in range(20) if (line := cache.line(g)) is not None]
        assert len({line.base for line in lines}) == len(lines) == len(cache) <= 4
        for line in lines:
            assert runs([(piece, line)]) == [(PAGE, [(line.base + PAGE, PAGE)])]
    assert cache.counters.evictions == 16


def test_the_least_recently_pinned_goes_first():
    cache = make()
    for granule in (0, 1, 2, 3, 0, 1):
        put(cache, granule)
    put(cache, 4)
    assert cached(cache, range(5)) == {0, 1, 3, 4}


def test_nothing_is_pinned_unless_all_pieces_are_present():
    cache = make()
    put(cache, 0)
    assert cache.pin_present(cache.pieces(0, 2 * GRANULE)) is None
    assert cache.pins == 0
    put(cache, 1)
    lines = cache.pin_present(cache.pieces(0, 2 * GRANULE))
    assert lines is not None
    assert [line.granule for line in lines] == [0, 1]
    assert cache.pins == 2


def test_a_cache_of_pinned_lines_gives_none_away():
    cache = make()
    lines = [pin(cache, granule) for granule in range(4)]
    assert pin(cache, 4) is None
    assert cache.condemned(4) is None, "nothing to write back: somebody must unpin"
    lines[2].pins -= 1
    assert pin(cache, 4) is not None
    assert cached(cache, range(5)) == {0, 1, 3, 4}


def test_a_dirty_victim_is_named_and_goes_when_it_is_clean():
    cache = make()
    for granule in range(4):
        put(cache, granule, dirty=granule == 0)
    assert pin(cache, 4) is None
    victim = cache.condemned(4)
    assert victim is cache.line(0)
    assert pin(cache, 4) is None, "still dirty"
    victim.dirty = 0
    assert pin(cache, 4) is not None
    assert cached(cache, range(5)) == {1, 2, 3, 4}


def test_a_condemned_line_that_is_used_again_stays():
    cache = make()
    for granule in range(4):
        put(cache, granule, dirty=granule == 0)
    assert pin(cache, 4) is None
    put(cache, 0)  # a hit, in the meantime
    assert cache.condemned(4) is None
    assert pin(cache, 4) is not None
    assert cached(cache, range(5)) == {0, 2, 3, 4}


def test_a_condemned_line_in_a_transfer_is_not_evicted(clock):
    cache = make(1)
    put(cache, 0, dirty=True)
    assert pin(cache, 1) is None
    line = cache.condemned(1)
    assert line is not None
    writing = Transfer(Signal(clock))
    line.transfers = ((0b1111, writing),)
    line.dirty = 0
    assert pin(cache, 1) is None
    line.end(writing)
    assert pin(cache, 1) is not None


def test_sets_are_apart():
    cache = make(8, ways=2)
    for granule in (0, 4, 1, 8):
        put(cache, granule)
    assert cached(cache, range(9)) == {1, 4, 8}
    assert [cache.line(granule).base // (2 * GRANULE) for granule in (1, 4, 8)] == [1, 0, 0]


def test_pages_go_with_their_object_and_the_frame_with_the_last_of_them():
    cache = make()
    line = put(cache, 0, dirty=True)
    line.dirty_objects = (5, PAGE)
    cache.drop(cache.pieces(PAGE, 2 * PAGE), PAGE)
    assert (line.valid, line.dirty, line.dirty_objects) == (0b1001, 0b1001, (5,))
    cache.drop(cache.pieces(9 * GRANULE, PAGE), PAGE)  # not cached: nothing to do
    cache.drop(cache.pieces(0, GRANULE), 5)
    assert len(cache) == 0
    assert cache.counters.evictions == 0


def test_an_object_touches_each_granule_once_however_many_pieces_lie_in_it():
    cache = make(20, policy="s3fifo")
    pieces = cache.pieces(0, PAGE) + cache.pieces(PAGE, PAGE)
    lines: list[Line] = []
    assert cache.pin(pieces, lines) is None
    assert lines[0] is lines[1]
    assert lines[0].pins == 2
    lines[0].valid = 0b11
    cache.unpin(lines)
    for granule in range(1, 21):
        put(cache, granule)
    assert cache.line(0) is None, "written once: the first to go"


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=60))
def test_under_any_policy_pinned_and_dirty_lines_stay(name, steps):
    cache = make(policy=name)
    held = {}
    for granule, dirty, hold in steps:
        before = {g: cache.line(g) for g in range(10)}
        line = pin(cache, granule)
        for other, was in before.items():
            if was is not None and (was.dirty or was.pins) and other != granule:
                assert cache.line(other) is was
        if line is None:
            victim = cache.condemned(granule)
            if victim is not None:
                assert not victim.pins
                victim.dirty = 0
            elif held:
                held.pop(next(iter(held))).pins -= 1
            continue
        line.valid, line.dirty = 1, int(dirty)
        if hold and granule not in held:
            held[granule] = line
        else:
            line.pins -= 1
        assert len(cache) <= 4
        assert cache.pins == len(held)


@pytest.mark.parametrize(("granules", "ways"), [(0, 0), (8, 3)])
def test_impossible_shapes_are_refused(granules, ways):
    with pytest.raises(ValueError, match="granule"):
        Cache(granules, granule_bytes=GRANULE, ways=ways, policy=LruPolicy, counters=CmmHCounters())
