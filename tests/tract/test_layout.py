"""Geometry of the region, and regions that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.pod_ops import LINE
from cxlbench.tract.errors import (
    CorruptedHeaderError,
    ForeignRegionError,
    LayoutError,
    NoSuchLockError,
    NoSuchNodeError,
    OtherVersionError,
    RegionInUseError,
    RegionTooSmallError,
)
from cxlbench.tract.layout import (
    HEADER_WORDS,
    INTERNAL_LOCKS,
    VERSION_WORD,
    Layout,
    Sizes,
    names,
    plan,
    sizes_for,
)
from cxlbench.tract.region import (
    check_node,
    check_user_lock,
    format_region,
    header_words,
    open_region,
)
from tests.tract.plain import PlainMemory

SIZES = Sizes(nodes=3, slots=20, chunks=12, chunk_bytes=256, user_locks=2, roots=4)

sizes = st.builds(
    Sizes,
    nodes=st.integers(1, 12),
    slots=st.integers(1, 60),
    chunks=st.integers(1, 200),
    chunk_bytes=st.sampled_from([64, 128, 4096]),
    user_locks=st.integers(0, 4),
    roots=st.integers(1, 9),
    heap_batch=st.integers(1, 9),
    snooped_payload=st.booleans(),
)


def region(words: int | None = None) -> PlainMemory:
    return PlainMemory(np.zeros(words or plan(SIZES).region_bytes // 8, np.int64))


def n_bytes(mem: PlainMemory) -> int:
    return 8 * len(mem.words)


@given(sizes)
def test_structures_are_aligned_to_lines_and_do_not_overlap(chosen: Sizes) -> None:
    layout = plan(chosen)
    ends = 0
    parts = sorted((part.off, part.n_bytes) for part in names(layout))
    for off, length in parts:
        assert off >= ends
        ends = off + length
    assert ends == layout.region_bytes
    starts = [v for k, v in layout._asdict().items() if k.endswith("_at")]
    assert all(start % LINE == 0 for start in starts)


@given(sizes)
def test_no_line_holds_what_two_nodes_write_without_a_lock(chosen: Sizes) -> None:
    owners: dict[int, set[str]] = {}
    for part in names(plan(chosen)):
        if " of node " in part.name or " on node " in part.name:
            for line in range(part.off // LINE, -(-(part.off + part.n_bytes) // LINE)):
                owners.setdefault(line, set()).add(part.name)
    assert all(len(found) == 1 for found in owners.values())


@given(sizes)
def test_a_region_opens_with_the_layout_it_was_formatted_with(chosen: Sizes) -> None:
    needed = plan(chosen).region_bytes
    mem = PlainMemory(np.zeros(needed // 8, np.int64))
    layout = format_region(mem, chosen, needed, zeroed=True)
    assert isinstance(layout, Layout)
    assert open_region(mem, needed) == layout == plan(chosen)


@given(st.integers(0, 1 << 16), st.integers(1, 4), st.sampled_from([64, 256]))
def test_fitted_sizes_fill_the_region(extra: int, nodes: int, chunk_bytes: int) -> None:
    room = 8192 + extra
    fitted = sizes_for(room, nodes=nodes, chunk_bytes=chunk_bytes)
    assert plan(fitted).region_bytes <= room
    larger = Sizes(
        nodes=nodes,
        slots=2 * (fitted.chunks + 1),
        chunks=fitted.chunks + 1,
        chunk_bytes=chunk_bytes,
    )
    assert plan(larger).region_bytes > room


def test_a_region_for_not_even_one_chunk_is_refused() -> None:
    with pytest.raises(RegionTooSmallError, match="at least"):
        sizes_for(1024, nodes=2, chunk_bytes=4096)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 65},
        {"slots": 0},
        {"chunks": 0},
        {"chunk_bytes": 32},
        {"chunk_bytes": 100},
        {"user_locks": -1},
        {"roots": 0},
        {"evict_above": 21},
        {"heap_batch": 33},
        {"slots": True},
        {"slots": 2.0},
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    fine = {"nodes": 3, "slots": 20, "chunks": 12, "chunk_bytes": 256}
    with pytest.raises(LayoutError, match=next(iter(wrong))):
        Sizes(**{**fine, **wrong})


def test_a_region_that_is_too_small_is_refused_and_left_alone() -> None:
    mem = region(40)
    with pytest.raises(RegionTooSmallError, match="sizes need"):
        format_region(mem, SIZES, n_bytes(mem))
    assert not mem.stored


def test_a_pod_is_not_formatted_over_unless_told_to() -> None:
    mem = region()
    format_region(mem, SIZES, n_bytes(mem))
    mem.stored.clear()
    with pytest.raises(RegionInUseError, match="overwrite=True"):
        format_region(mem, SIZES, n_bytes(mem))
    assert not mem.stored
    assert format_region(mem, SIZES, n_bytes(mem), overwrite=True) == plan(SIZES)


def test_formatting_leaves_no_old_metadata() -> None:
    mem = region()
    mem.words[:] = 7
    layout = format_region(mem, SIZES, n_bytes(mem))
    assert not mem.words[HEADER_WORDS : layout.pool_at // 8].any()


def test_a_foreign_region_is_refused_and_left_alone() -> None:
    mem = region()
    mem.words[:] = 7
    with pytest.raises(ForeignRegionError, match="format it first"):
        open_region(mem, n_bytes(mem))
    assert not mem.stored


def test_a_region_of_another_version_is_refused() -> None:
    mem = region()
    format_region(mem, SIZES, n_bytes(mem))
    mem.words[VERSION_WORD] += 1
    with pytest.raises(OtherVersionError, match="layout version 2, this is version 1"):
        open_region(mem, n_bytes(mem))


@pytest.mark.parametrize("word", range(2, HEADER_WORDS))
def test_a_header_with_any_word_changed_is_refused(word: int) -> None:
    mem = region()
    format_region(mem, SIZES, n_bytes(mem))
    mem.words[word] += 1
    with pytest.raises(CorruptedHeaderError):
        open_region(mem, n_bytes(mem))


def test_a_truncated_region_is_refused() -> None:
    mem = region()
    format_region(mem, SIZES, n_bytes(mem))
    with pytest.raises(RegionTooSmallError, match="was formatted for"):
        open_region(mem, n_bytes(mem) - 64)
    with pytest.raises(RegionTooSmallError):
        open_region(mem, 64)


@pytest.mark.parametrize("stores", range(1, HEADER_WORDS))
def test_formatting_cut_short_leaves_no_valid_region(stores: int) -> None:
    mem = region()
    format_region(mem, SIZES, n_bytes(mem))
    order = mem.stored[-HEADER_WORDS:]
    for off in order[stores:]:
        mem.words[off // 8] = 0
    with pytest.raises(ForeignRegionError):
        open_region(mem, n_bytes(mem))


def test_more_nodes_than_slots_are_refused() -> None:
    layout = plan(SIZES)
    check_node(layout, 2)
    for node in (-1, 3):
        with pytest.raises(NoSuchNodeError, match="nodes 0 to 2"):
            check_node(layout, node)


def test_internal_and_absent_locks_are_refused() -> None:
    layout = plan(SIZES)
    check_user_lock(layout, INTERNAL_LOCKS)
    for lock in (0, INTERNAL_LOCKS - 1, INTERNAL_LOCKS + 2):
        with pytest.raises(NoSuchLockError):
            check_user_lock(layout, lock)


def test_the_header_has_room_for_all_sizes() -> None:
    assert len(header_words(SIZES)) == HEADER_WORDS
