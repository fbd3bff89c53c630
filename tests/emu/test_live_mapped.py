"""Mapped nodes: programs that were not written for the pod see what such memory does to them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlbench.emu.pod_layout import PodLayoutError, PodShape
from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_mapped import FlushFence, MappedNode, PodMmap
from cxlbench.emu.pod_mappings import PodClosedError, PodPaths
from cxlbench.emu.pod_node_process import NodeForker
from cxlbench.emu.pod_processes import LivePod
from tests.emu import foreign_programs

FOREIGN = "tests.emu.foreign_programs"
SHAPE = PodShape(1 << 14, nodes=2, processes=2, mode="mapped")


@pytest.fixture(scope="module")
def forker():
    with NodeForker() as forker:
        yield forker


@pytest.fixture
def pod(forker):
    with LivePod(SHAPE, forker=forker) as pod:
        yield pod


def run(pod, node, name, *arguments):
    (process,) = pod.start(node, f"{FOREIGN}:{name}", *arguments, processes=1)
    return process.result()


# Programs that open the path themselves


def test_a_region_initialized_without_a_flush_works_here_and_fails_on_the_second_node(pod):
    assert run(pod, 0, "node_initialize", False) is True
    assert run(pod, 1, "node_is_formatted") is False
    assert not pod.device.any()


def test_with_the_flush_the_second_node_finds_it(pod):
    assert run(pod, 0, "node_initialize", True) is True
    assert run(pod, 1, "node_is_formatted") is True


def test_a_log_that_flushes_is_read_by_both_nodes(pod):
    run(pod, 0, "node_initialize", True)
    run(pod, 0, "node_append", ["one", "two"])
    run(pod, 1, "node_append", ["three"])
    assert run(pod, 0, "node_records") == run(pod, 1, "node_records") == ["one", "two", "three"]


def test_a_reader_that_does_not_flush_keeps_its_old_view(pod):
    run(pod, 0, "node_initialize", True)
    path, flush = pod.mapped(1).path, pod.mapped(1).flush
    assert foreign_programs.records(path, flush) == []
    run(pod, 0, "node_append", ["one"])
    assert foreign_programs.records(path, lambda *_: None) == []
    assert foreign_programs.records(path, flush) == ["one"]


def test_a_crash_loses_what_was_not_flushed(pod):
    run(pod, 0, "node_initialize", True)
    view = pod.mapped(0).map()
    view[128:133] = b"dirty"
    pod.fence(0)
    assert pod.mapped(0).map()[128:133] == bytes(5)
    assert run(pod, 0, "node_is_formatted") is True


# Views


def test_a_view_is_an_ordinary_buffer(pod):
    view = pod.mapped(0).map()
    assert isinstance(view, mmap.mmap)
    assert len(view) == SHAPE.region_bytes
    words = np.frombuffer(view, dtype=np.int64)
    words[3] = 7
    assert ctypes.c_int64.from_buffer(view, 24).value == 7
    view.seek(24)
    assert view.read(8) == b"\x07" + bytes(7)
    del words


def test_all_mappings_of_a_node_are_one_and_those_of_two_nodes_are_two(pod):
    first, second = pod.mapped(0).map(), foreign_programs.open_and_map(pod.mapped(0).path)
    first[0] = 7
    assert second[0] == 7
    assert pod.mapped(1).map()[0] == 0


def test_a_flush_takes_the_whole_line_and_so_overwrites_a_neighbours_word(pod):
    a, b = pod.mapped(0).map(), pod.mapped(1).map()
    b[8] = 5
    b.flush(8, 1)
    a[0] = 7
    a.flush(0, 1)
    assert (pod.device[0], pod.device[1]) == (7, 0)


def test_a_flush_of_a_clean_line_writes_nothing_and_brings_the_new_value(pod):
    a, b = pod.mapped(0).map(), pod.mapped(1).map()
    b[8] = 5
    b.flush(8, 1)
    assert (pod.mapped(0).flush(0, 64), a[8], pod.device[1]) == (0, 5, 5)


def test_a_flush_touches_the_lines_of_its_range_only(pod):
    a = pod.mapped(0).map()
    a[0:192] = bytes([1]) * 192
    assert pod.mapped(0).flush(127, 2) == 2
    assert [int(pod.device[8 * line]) & 1 for line in range(3)] == [0, 1, 1]


def test_writing_back_leaves_old_copies_and_refreshing_leaves_own_stores(pod):
    a, b = pod.mapped(0).map(), pod.mapped(1).map()
    b[64] = 5
    b.flush()
    a[0] = 7
    pod.mapped(0).write_back()
    assert (pod.device[0], a[64]) == (7, 0)
    a[0] = 8
    pod.mapped(0).refresh()
    assert (pod.device[0], a[0], a[64]) == (7, 8, 5)


def test_a_word_that_both_nodes_stored_stays_this_nodes_own_when_refreshed(pod):
    a, b = pod.mapped(0).map(), pod.mapped(1).map()
    a[0] = 7
    b[0] = b[8] = 9
    b.flush()
    pod.mapped(0).refresh()
    assert (a[0], a[8]) == (7, 9)
    a.flush()
    assert pod.device[0] == 7


def test_bytes_and_words_that_straddle_lines_are_stores_too(pod):
    view = pod.mapped(0).map()
    view[62:66] = b"abcd"
    assert pod.mapped(0).flush(view) == 2
    assert pod.device.view(np.uint8)[62:66].tobytes() == b"abcd"


# Places


def test_a_place_is_an_offset_an_address_in_any_mapping_or_a_buffer(pod):
    node = pod.mapped(0)
    own = node.map()
    address = ctypes.addressof(ctypes.c_char.from_buffer(own, 128))
    foreign = foreign_programs.open_and_map(node.path)
    array = np.frombuffer(foreign, dtype=np.int64)[40:]
    assert [node.offset_of(place) for place in (128, address, array, memoryview(own)[64:])] == [
        128,
        128,
        320,
        64,
    ]
    del array


def test_a_part_of_the_view_that_a_program_mapped_has_its_offset(pod):
    with open(pod.mapped(0).path, "rb+") as file:  # noqa: PTH123 - as a program would
        part = mmap.mmap(file.fileno(), 4096, offset=4096)
    part[0] = 7
    assert pod.mapped(0).flush(part) == 1
    assert pod.device[512] == 7


@pytest.mark.parametrize("place", [-1, 1 << 14, 1 << 40, np.zeros(8), "text", 1.5])
def test_a_place_outside_is_refused(pod, place):
    with pytest.raises(PodAddressError):
        pod.mapped(0).flush(place, 8)


def test_a_range_that_leaves_the_region_is_refused_and_nothing_written(pod):
    pod.mapped(0).map()[0] = 7
    with pytest.raises(PodAddressError, match="are not all in the region"):
        pod.mapped(0).flush(0, (1 << 14) + 1)
    assert not pod.device.any()


def test_a_closed_node_refuses(pod):
    node = pod.mapped(0)
    pod.fence(0)
    with pytest.raises(PodClosedError):
        node.flush()


def test_kinds_of_pods_are_not_mixed_up(pod, forker):
    with pytest.raises(PodLayoutError, match=r"through mapped\(node\)"):
        pod.memory(0)
    with (
        LivePod(PodShape(64), forker=forker) as other,
        pytest.raises(PodLayoutError, match="this pod is emulated, not mapped"),
    ):
        other.mapped(0)


# Drop-in objects


def test_the_fence_flushes_before_a_read_and_after_a_write(pod):
    fences = [FlushFence(pod.mapped(n)) for n in range(2)]
    views = [pod.mapped(n).map() for n in range(2)]
    with fences[0].writing(0, 64):
        views[0][0] = 7
    assert views[1][0] == 0
    with fences[1].reading(0, 64):
        assert views[1][0] == 7


def test_a_block_that_fails_does_not_publish(pod):
    def fail():
        with FlushFence(pod.mapped(0)).writing(0, 64):
            pod.mapped(0).map()[0] = 7
            raise ValueError("half written")

    with pytest.raises(ValueError, match="half written"):
        fail()
    assert not pod.device.any()


def test_flush_of_the_mmap_takes_what_mmaps_flush_takes(pod):
    view = pod.mapped(0).map()
    assert isinstance(view, PodMmap)
    view[0] = view[200] = 7
    view.flush(192, 64)
    assert (pod.device[0], pod.device[25]) == (0, 7)
    view.flush()
    assert pod.device[0] == 7


# The adversary


def test_the_adversary_publishes_and_refreshes_in_the_end(pod):
    a, b = pod.mapped(0).map(), pod.mapped(1).map()
    a[0] = 7
    pod.mapped(0).disturb(5000)
    pod.mapped(1).disturb(5000)
    assert (pod.device[0], b[0]) == (7, 7)


def test_the_adversary_never_loses_a_store_of_the_running_program(forker):
    with LivePod(PodShape(128, processes=2, mode="mapped"), forker=forker) as pod:
        assert stores_lost_to_the_adversary(pod) == 0


def stores_lost_to_the_adversary(pod):
    (adversary,) = pod.start(
        0, "cxlbench.emu.pod_mapped:disturb_for_ever", 20_000, 0.0, processes=1
    )
    (program,) = pod.start(0, f"{FOREIGN}:count_for_ever", 8, processes=1)
    other = pod.mapped(1).map()
    program.receive()
    for turn in range(5000):  # the other node keeps the device changing, in the other line
        other[64] = turn % 251
        pod.mapped(1).flush(64, 64)
    program.send("stop")
    lost, stored = program.result()
    adversary.send("stop")
    adversary.result()
    pod.mapped(0).flush()
    assert pod.device[1] == stored
    assert stored > 1000
    assert pod.counters(0)["disturbed"] > 1000
    return lost


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["store", "flush", "write_back", "refresh"]),
        st.integers(0, 11),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def shared(forker):
    with LivePod(SHAPE, forker=forker) as pod:
        yield pod


@settings(max_examples=80)
@given(steps=STEPS)
def test_any_sequence_does_what_caches_that_hold_every_line_do(shared, steps):
    shared.device[:] = 0
    for node in range(2):
        shared.fence(node)
    device, views, dirty = [0] * 24, [[0] * 24, [0] * 24], [set(), set()]
    words = [np.frombuffer(shared.mapped(n).map(), dtype=np.int64)[:24] for n in range(2)]
    for value, (n, operation, word) in enumerate(steps, start=1):
        line = word // 8
        span = slice(8 * line, 8 * line + 8)
        if operation == "store":
            words[n][word] = views[n][word] = value
            dirty[n].add(word)
            continue
        own = {at for at in dirty[n] if at // 8 == line}
        if operation != "refresh" and own:
            device[span] = views[n][span]
            dirty[n] -= own
            own = set()
        if operation != "write_back":
            views[n][span] = [
                views[n][at] if at in own else device[at] for at in range(8 * line, 8 * line + 8)
            ]
        getattr(shared.mapped(n), operation)(8 * word, 8)
        assert [w.tolist() for w in words] == views
        assert shared.device[:24].tolist() == device


def test_a_mapped_pod_in_a_folder_is_attached_by_its_paths(tmp_path, forker):
    with LivePod(SHAPE, folder=tmp_path, forker=forker) as pod:
        paths = PodPaths.of_folder(tmp_path)
        assert paths == pod.paths
        node = MappedNode.attach(paths, 1, 0)
        node.map()[0] = 7
        node.flush()
        assert pod.device[0] == 7
        node.close()
    assert [path.name for path in tmp_path.iterdir()] == ["region"]


def test_a_region_that_was_there_before_is_what_views_show(tmp_path, forker):
    for turn in range(2):
        with LivePod(SHAPE, region=tmp_path / "memory", forker=forker) as pod:
            assert pod.mapped(1).map()[0] == 7 * turn
            pod.mapped(0).map()[0] = 7  # written back by the orderly end
