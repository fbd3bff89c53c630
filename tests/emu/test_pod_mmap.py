"""``PodMmap`` in the place of ``mmap.mmap``: whatever a program does with one, it can do here."""

from __future__ import annotations

import ctypes
import mmap
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_mapped import PodMmap
from cxlbench.emu.pod_mappings import PodClosedError
from cxlbench.emu.pod_processes import LivePod

NBYTES = 4096


@pytest.fixture
def pod():
    with LivePod(PodShape(NBYTES, mode="mapped")) as pod:
        yield pod


@pytest.fixture
def both(pod):
    """A node's map, and a real one of as many bytes."""
    maps = pod.mapped(0).map(), mmap.mmap(-1, NBYTES)
    for one in maps:
        one[:] = bytes(i * 7 % 251 for i in range(NBYTES))
    yield maps
    for one in maps:
        one.close()


def outcome(function, one):
    try:
        return function(one)
    except (ValueError, IndexError, TypeError, BufferError) as error:
        return type(error)


def assign(one, key, value):
    one[key] = value
    return one[:]


USES = {
    "len": len,
    "a byte": lambda m: m[5],
    "the last byte": lambda m: m[-1],
    "a byte outside": lambda m: m[NBYTES],
    "a slice": lambda m: m[3:9],
    "a slice with steps": lambda m: m[100:3:-7],
    "bytes": lambda m: bytes(m),
    "iterate": lambda m: list(m)[:9],
    "a byte is in": lambda m: (b"\x07" in m, b"\xff" in m, b"\x07\x0e" in m, 7 in m),
    "assign a byte": lambda m: assign(m, 4, 9),
    "assign a slice": lambda m: assign(m, slice(4, 8), b"abcd"),
    "assign with steps": lambda m: assign(m, slice(0, 8, 2), b"abcd"),
    "assign too much": lambda m: assign(m, slice(4, 8), b"abcde"),
    "assign what is no byte": lambda m: assign(m, 4, 256),
    "read": lambda m: (m.read(3), m.tell(), m.read(), m.read(2)),
    "read_byte": lambda m: (m.read_byte(), m.read_byte(), m.tell()),
    "read_byte at the end": lambda m: (m.seek(0, 2), m.read_byte()),
    "readline": lambda m: (assign(m, 9, 10), m.readline(), m.tell())[1:],
    "write": lambda m: (m.seek(7), m.write(b"hello"), m.tell(), m[:]),
    "write too much": lambda m: (m.seek(NBYTES - 2), m.write(b"hello")),
    "write_byte": lambda m: (m.write_byte(3), m.tell(), m[0]),
    "seek": lambda m: (m.seek(10), m.seek(5, 1), m.tell(), m.seek(-4, 2), m.tell()),
    "seek outside": lambda m: m.seek(-1),
    "find": lambda m: (m.find(bytes([70, 77])), m.find(b"\x07", 3, 60), m.find(b"not here")),
    "rfind": lambda m: (m.rfind(bytes([70, 77])), m.rfind(b"\x07", 3, 60)),
    "move": lambda m: (m.move(0, 100, 50), m[:]),
    "move outside": lambda m: m.move(0, NBYTES - 10, 50),
    "memoryview": lambda m: memoryview(m)[4:12].tolist(),
    "struct": lambda m: (struct.pack_into("<q", m, 8, -5), struct.unpack_from("<q", m, 8)),
    "numpy": lambda m: np.frombuffer(m, np.int64, 4, 8).tolist(),
    "ctypes": lambda m: ctypes.c_int64.from_buffer(m, 16).value,
    "flush": lambda m: m.flush(),
    "flush a part": lambda m: m.flush(0, 100),
    "flush outside": lambda m: m.flush(0, NBYTES + 1),
    "flush backwards": lambda m: m.flush(-1, 8),
    "flush past the end": lambda m: m.flush(mmap.PAGESIZE, 8),
    "madvise": lambda m: m.madvise(mmap.MADV_WILLNEED),
    "closed": lambda m: m.closed,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_it_does_what_an_mmap_does(both, use):
    ours, real = both
    assert outcome(use, ours) == outcome(use, real)
    assert ours[:] == real[:]


def test_nothing_of_an_mmap_is_missing():
    assert set(dir(mmap.mmap)) <= set(dir(PodMmap))
    assert issubclass(PodMmap, mmap.mmap)


def test_it_has_the_size_of_the_shared_memory(pod):
    with pod.mapped(0).map() as ours:
        assert (len(ours), ours.size()) == (NBYTES, NBYTES)


def test_it_cannot_be_resized_and_stays_as_it_was(pod):
    with pod.mapped(0).map() as ours:
        ours[0] = 7
        for nbytes in (NBYTES // 2, 2 * NBYTES):
            with pytest.raises(TypeError, match="cannot be resized"):
                ours.resize(nbytes)
        assert (len(ours), ours[0]) == (NBYTES, 7)
    assert pod.mapped(0).path.stat().st_size == NBYTES


def test_a_context_manager_closes_it(pod):
    with pod.mapped(0).map() as ours:
        assert not ours.closed
    assert ours.closed
    for use in (lambda: ours[0], ours.flush, lambda: ours.flush(0, 8), ours.read):
        with pytest.raises(ValueError, match="mmap closed or invalid"):
            use()


def test_it_does_not_close_while_a_buffer_of_it_is_used(pod):
    ours = pod.mapped(0).map()
    view = memoryview(ours)
    with pytest.raises(BufferError):
        ours.close()
    view.release()
    ours.close()


def test_its_flush_reaches_the_other_node_whatever_way_it_was_written(pod):
    ours, theirs = pod.mapped(0).map(), pod.mapped(1).map()
    ours.write(b"ab")
    ours.write_byte(99)
    struct.pack_into("<4s", ours, 3, b"defg")
    np.frombuffer(ours, np.uint8)[7] = 104
    ours.move(8, 0, 8)
    assert theirs[:16] == bytes(16)
    ours.flush(0, 16)
    theirs.flush(0, 16)
    assert theirs[:16] == b"abcdefgh" * 2


def test_a_flush_after_the_nodes_end_says_so(pod):
    ours = pod.mapped(0).map()
    pod.fence(0)
    with pytest.raises(PodClosedError):
        ours.flush()
    ours.close()


@given(at=st.integers(0, NBYTES - 1), size=st.integers(0, 300))
def test_a_flush_takes_every_line_that_it_touches_and_no_other(at, size):
    size = min(size, NBYTES - at)
    with LivePod(PodShape(NBYTES, nodes=1, mode="mapped")) as pod, pod.mapped(0).map() as ours:
        ours[:] = b"\x01" * NBYTES
        ours.flush(at, size)
        lines = pod.device.reshape(-1, 8)[:, 0] != 0
        touched = set(range(at // 64, (at + size - 1) // 64 + 1)) if size else set()
        assert set(np.flatnonzero(lines).tolist()) == touched
