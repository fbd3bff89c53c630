"""Arenas and frame pools: bytes come back as they went in, and tags show what was mixed up."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.memory import (
    PAGE_BYTES,
    TORN,
    Arena,
    FramePool,
    PhantomArena,
    PhantomBuffer,
    page_ceil,
)
from cxlbench.emu.status import HostLimitError

FRAME = 2 * PAGE_BYTES


def pool(count=8, *, base=0):
    return FramePool(base=base, frame_bytes=FRAME, count=count, name="staging")


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def into(arena, extents, nbytes):
    buffer = arena.buffer(nbytes)
    arena.load(extents, buffer)
    return buffer


OBJECTS = st.lists(st.integers(1, 3 * FRAME), min_size=1, max_size=6)


@given(OBJECTS, st.randoms(use_true_random=False))
def test_objects_over_scattered_frames_come_back_byte_for_byte(sizes, draw):
    arena, frames = Arena(18 * FRAME), pool(18)
    scattered = list(range(18))
    draw.shuffle(scattered)
    stored = []
    for number, size in enumerate(sizes):
        mine = [scattered.pop() for _ in range(frames.needed(size))]
        extents = frames.extents(mine, size)
        arena.store(extents, noise(size, number))
        stored.append((extents, size))
    for number, (extents, size) in enumerate(stored):
        assert np.array_equal(into(arena, extents, size), noise(size, number))
    arena.close()


@given(OBJECTS, st.randoms(use_true_random=False))
def test_tags_over_scattered_frames_come_back(sizes, draw):
    arena, frames = PhantomArena(18 * FRAME), pool(18)
    scattered = list(range(18))
    draw.shuffle(scattered)
    stored = []
    for number, size in enumerate(sizes):
        mine = [scattered.pop() for _ in range(frames.needed(size))]
        extents = frames.extents(mine, size)
        arena.store(extents, PhantomBuffer(size, ("object", number)))
        stored.append((extents, size))
    for number, (extents, size) in enumerate(stored):
        assert into(arena, extents, size).tag == ("object", number)


def test_storing_changes_no_byte_outside_the_object():
    arena = Arena(4 * FRAME)
    before = noise(4 * FRAME)
    arena.array[:] = before
    size = FRAME + 5
    arena.store(pool().extents([2, 0], size), np.zeros(size, dtype=np.uint8))
    assert np.array_equal(arena.view(FRAME, FRAME), before[FRAME : 2 * FRAME])
    assert np.array_equal(arena.view(5, FRAME - 5), before[5:FRAME])
    assert np.array_equal(arena.view(3 * FRAME, FRAME), before[3 * FRAME :])
    arena.close()


def test_the_digest_sees_the_bytes_in_order():
    size = 300_000
    arena, frames = Arena(1 << 20), pool(60)
    extents = frames.extents(list(range(40, 3, -1))[: frames.needed(size)], size)
    arena.store(extents, noise(size))
    pieces = []
    arena.load(extents, arena.buffer(size), lambda piece: pieces.append(piece.tobytes()))
    assert b"".join(pieces) == noise(size).tobytes()
    arena.close()


def test_frames_larger_than_a_copy_step_are_loaded_whole():
    frame, size = 1 << 20, (3 << 20) - 12345
    arena = Arena(4 << 20)
    extents = [(place * frame, frame) for place in (3, 0, 2)]
    arena.store(extents, noise(size))
    seen = []
    buffer = arena.buffer(size)
    arena.load(extents, buffer, lambda piece: seen.append(len(piece)))
    assert np.array_equal(buffer, noise(size))
    assert sum(seen) == size
    assert max(seen) < frame
    arena.close()


def test_swapped_frames_are_noticed():
    arena = PhantomArena(8 * FRAME)
    arena.store([(0, FRAME), (FRAME, FRAME)], PhantomBuffer(2 * FRAME, "object"))
    assert into(arena, [(FRAME, FRAME), (0, FRAME)], 2 * FRAME).tag == TORN


def test_an_object_with_a_frame_of_another_is_torn():
    arena = PhantomArena(8 * FRAME)
    arena.store([(0, FRAME), (FRAME, FRAME)], PhantomBuffer(2 * FRAME, "old"))
    arena.store([(FRAME, FRAME)], PhantomBuffer(FRAME, "new"))
    assert into(arena, [(0, FRAME), (FRAME, FRAME)], 2 * FRAME).tag == TORN
    assert into(arena, [(FRAME, FRAME)], FRAME).tag == "new"


@pytest.mark.parametrize("extents", [[(0, FRAME)], [(FRAME, FRAME), (0, FRAME)]])
def test_memory_that_was_never_written_holds_no_object(extents):
    arena = PhantomArena(8 * FRAME)
    assert into(arena, extents, FRAME).tag == TORN
    arena.set_cells(extents, [None] * len(extents))
    assert into(arena, extents, FRAME).tag == TORN


def test_small_real_buffers_keep_their_bytes_in_a_phantom_arena():
    arena = PhantomArena(FRAME)
    arena.store([(0, PAGE_BYTES)], noise(64))
    footer = np.ones(64, dtype=np.uint8)
    arena.load([(0, PAGE_BYTES)], footer)
    assert np.array_equal(footer, noise(64))


def test_a_real_buffer_gets_zeros_where_a_phantom_object_lies():
    arena = PhantomArena(FRAME)
    arena.store([(0, PAGE_BYTES)], PhantomBuffer(64, "object"))
    footer = np.ones(64, dtype=np.uint8)
    arena.load([(0, PAGE_BYTES)], footer)
    assert not footer.any()


def test_cells_can_be_moved_to_other_frames():
    arena = PhantomArena(8 * FRAME)
    here, there = [(0, FRAME), (FRAME, FRAME)], [(5 * FRAME, FRAME), (3 * FRAME, FRAME)]
    arena.store(here, PhantomBuffer(2 * FRAME, "object"))
    arena.set_cells(there, arena.cells(here))
    assert into(arena, there, 2 * FRAME).tag == "object"


# -- frames ----------------------------------------------------------------------------------------


def test_frames_are_taken_all_or_none():
    frames = pool(4)
    assert frames.take(5) is None
    assert (frames.free, frames.used) == (4, 0)
    assert sorted(frames.take(4)) == [0, 1, 2, 3]
    assert frames.take(1) is None
    assert frames.take(0) == []


def test_a_frame_that_is_given_back_twice_is_refused_by_name():
    frames = pool(4)
    taken = frames.take(2)
    frames.give(taken)
    with pytest.raises(ValueError, match=rf"staging: frame {taken[0]} is given back twice"):
        frames.give(taken)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_no_frame_is_ever_out_twice(steps):
    frames, out = pool(12), []
    for wanted in steps:
        taken = frames.take(wanted) if wanted else None
        if taken is not None:
            out.append(taken)
        elif out:
            frames.give(out.pop(0))
        held = [frame for taken in out for frame in taken]
        assert len(set(held)) == len(held) == frames.used
        assert frames.used + frames.free == frames.count


def test_extents_start_at_the_pools_base_and_end_on_a_page():
    assert pool(base=100 * FRAME).extents([3, 1], FRAME + 1) == [
        (103 * FRAME, FRAME),
        (101 * FRAME, PAGE_BYTES),
    ]
    assert pool().extents([], 0) == []


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (4096, 1), (4097, 2)])
def test_sizes_round_up_to_pages(nbytes, pages):
    assert page_ceil(nbytes) == pages * PAGE_BYTES


# -- kinds of arenas -------------------------------------------------------------------------------


def test_a_file_arena_keeps_its_bytes_in_the_file(tmp_path):
    path = tmp_path / "arena"
    arena = Arena(10_000, kind="file", path=path)
    arena.store([(4096, PAGE_BYTES)], noise(4096))
    arena.close()
    assert path.stat().st_size == page_ceil(10_000)
    assert path.read_bytes()[4096:8192] == noise(4096).tobytes()


def test_a_file_arena_in_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(HostLimitError, match="nowhere/arena: No such file"):
        Arena(4096, kind="file", path=tmp_path / "nowhere/arena")


def test_a_file_arena_without_a_path_is_refused():
    with pytest.raises(ValueError, match="needs a path"):
        Arena(4096, kind="file")


def test_huge_pages_hold_bytes_like_any_other_memory():
    try:
        arena = Arena(1 << 20, kind="hugetlb")
    except HostLimitError as error:
        pytest.skip(str(error))
    arena.store([(0, PAGE_BYTES)], noise(4096))
    assert np.array_equal(into(arena, [(0, PAGE_BYTES)], 4096), noise(4096))
    arena.close()


def test_a_host_without_huge_pages_says_what_to_do(monkeypatch):
    def none_left(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none_left)
    with pytest.raises(HostLimitError, match=r"reserve some \(vm.nr_hugepages\) or use an anonym"):
        Arena(1 << 20, kind="hugetlb")


def test_more_memory_than_addresses_is_an_error_and_no_crash():
    with pytest.raises(HostLimitError, match="cannot map"):
        Arena(1 << 62)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_of_nothing_is_refused(nbytes):
    with pytest.raises(ValueError, match=f"got {nbytes}"):
        Arena(nbytes)


def test_closing_unmaps_at_once_or_with_the_last_view():
    unused, used = Arena(PAGE_BYTES), Arena(PAGE_BYTES)
    view = used.view(0, 10)
    for arena in (unused, used):
        arena.close()
    assert unused._map.closed
    assert not used._map.closed
    assert view.sum() == 0


def test_values_that_are_no_bytes_are_refused():
    arena = Arena(PAGE_BYTES)
    with pytest.raises(AssertionError, match="float32"):
        arena.store([(0, PAGE_BYTES)], np.zeros(4, dtype=np.float32))
    with pytest.raises(AssertionError, match="int64"):
        arena.load([(0, PAGE_BYTES)], np.zeros(4, dtype=np.int64))
    arena.close()
