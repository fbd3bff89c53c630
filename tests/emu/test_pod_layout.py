"""Shapes of pods: refused with a reason when they cannot be, and the same after the header."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.pod_layout import (
    CONTROL_MAGIC,
    MODES,
    ArrivalLaw,
    CacheGeometry,
    DeviceCosts,
    Disturbance,
    PodLayoutError,
    PodShape,
)

POWERS = st.integers(0, 12).map(lambda bits: 1 << bits)
SHAPES = st.builds(
    PodShape,
    region_bytes=st.integers(1, 1 << 40).map(lambda lines: lines * 64),
    nodes=st.integers(1, 256),
    processes=st.integers(1, 64),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, (1 << 62) - 1),
    local_words=st.integers(0, 1000),
    local_locks=st.integers(0, 1000),
    fence_arrives=st.booleans(),
    cache=st.builds(CacheGeometry, sets=POWERS, ways=st.integers(1, 64), posted=POWERS),
    arrival=st.builds(
        ArrivalLaw, unit=st.sampled_from(["operations", "ns", "held"]), shortest=st.just(3)
    ),
    disturbance=st.builds(Disturbance, st.integers(0, 10**6), st.integers(0, 10**6)),
    costs=st.builds(DeviceCosts, *[st.integers(0, 10**9)] * 3),
)


@given(SHAPES)
def test_a_shape_comes_back_from_its_header(shape):
    assert PodShape.from_header(shape.header()) == shape


@given(SHAPES)
def test_parts_of_a_node_mapping_do_not_overlap_and_lines_lie_on_lines(shape):
    ends = [
        (shape.local_locks_at, shape.local_locks * 64),
        (shape.local_words_at, shape.local_words * 8),
        (shape.queue_at, 0),
    ]
    for (at, size), (after, _) in itertools.pairwise(ends):
        assert at % 64 == 0
        assert at + size <= after
    assert shape.cache_at % 64 == 0
    assert shape.cache.set_bytes % 64 == 0
    assert shape.node_bytes % 4096 == 0


@given(SHAPES, st.data())
def test_tokens_are_those_of_one_process_each(shape, data):
    node = data.draw(st.integers(0, shape.nodes - 1))
    tokens = [shape.token(node, process) for process in range(shape.processes)]
    assert tokens == list(range(tokens[0], tokens[0] + shape.processes))
    assert 0 < tokens[0] <= tokens[-1] < shape.token(node, -1) == shape.table_entries


@given(SHAPES, st.integers(24, 200), st.integers(1, 255))
def test_a_header_with_a_changed_byte_is_refused(shape, at, change):
    raw = bytearray(shape.header())
    raw[at] ^= change
    with pytest.raises(PodLayoutError, match="corrupt"):
        PodShape.from_header(bytes(raw))


def test_a_header_of_something_else_or_of_another_version_is_refused():
    header = PodShape(64).header()
    with pytest.raises(PodLayoutError, match="does not begin with a pod's header"):
        PodShape.from_header(bytes(len(header)))
    with pytest.raises(PodLayoutError, match="of version 9; this program knows 1"):
        PodShape.from_header(CONTROL_MAGIC.to_bytes(8, "little") + b"\x09" + header[9:])
    with pytest.raises(PodLayoutError, match="shorter than its header"):
        PodShape.from_header(header[:-1])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: PodShape(0), "positive number of 64 B lines, got 0 B"),
        (lambda: PodShape(100), "positive number of 64 B lines, got 100 B"),
        (lambda: PodShape(64, nodes=0), r"nodes must be in \[1, 256\], got 0"),
        (lambda: PodShape(64, nodes=257), "nodes must be"),
        (lambda: PodShape(64, processes=65), "processes must be"),
        (lambda: PodShape(64, seed=-1), "seed must be"),
        (lambda: PodShape(64, mode="virtual"), "the mode is one of"),
        (lambda: CacheGeometry(sets=3), "sets must be a power of two, got 3"),
        (lambda: CacheGeometry(ways=0), "1 to 64 ways, got 0"),
        (lambda: CacheGeometry(posted=0), "posted must be a power of two"),
        (lambda: ArrivalLaw("operations", 5, 4), "shortest <= longest"),
        (lambda: ArrivalLaw("hours"), "the unit is one of"),
        (lambda: Disturbance(evictions_per_million=1_000_001), "evictions: 0 to 1,000,000"),
        (lambda: DeviceCosts(fill_ns=-1), "fill_ns must be"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_that_was_given(make, why):
    with pytest.raises(PodLayoutError, match=why):
        make()


def test_a_cache_of_1024_sets_of_four_lines_holds_a_quarter_of_a_mebibyte():
    assert CacheGeometry(sets=1024, ways=4).capacity_bytes == 256 << 10


def test_shapes_are_values():
    shape = PodShape(64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.nodes = 3
    assert hash(shape) == hash(PodShape(64))
