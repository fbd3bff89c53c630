"""Bad input on a region in a file: each a typed error that says what to do, and no byte changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_host import HostMemory
from cxlbench.kv.results import KeyResult
from cxlbench.tract.client import ObjectStore, PodLock, PrefixCache
from cxlbench.tract.errors import (
    CorruptedHeaderError,
    ForeignRegionError,
    KeyLengthError,
    NameExistsError,
    NameNotFoundError,
    NoSuchLockError,
    NoSuchNodeError,
    ObjectTooLargeError,
    OtherVersionError,
    OutOfSpaceError,
    RegionInUseError,
    RegionTooSmallError,
    RootNameError,
)
from cxlbench.tract.layout import HEADER_BYTES, VERSION_WORD, Layout, Sizes, plan
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.words import KEY_BYTES
from tests.tract.plain import PlainMemory, PlainPod

WORDS = 8
SIZES = Sizes(nodes=2, slots=8, chunks=4, chunk_bytes=8 * WORDS, user_locks=1, roots=1)
KEY = bytes(KEY_BYTES)


class FileRegion:
    """A region in a file, with an object and a block in it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(plan(SIZES).region_bytes))
        self.path = path
        self.words = np.memmap(path, np.int64, "r+")
        pod = PlainPod.on(self.words, SIZES)
        self.mem: PlainMemory = pod.nodes[0]
        self.lay: Layout = pod.layout
        ObjectStore(self.mem, self.lay).put("there", np.arange(3, dtype=np.int64))
        stored = PrefixCache(self.mem, self.lay, 0).insert([KEY], np.ones((1, WORDS), np.int64))
        assert stored == (KeyResult.STORED,)

    @property
    def size(self) -> int:
        return self.words.nbytes

    def bytes(self) -> bytes:
        self.words.flush()
        return self.path.read_bytes()


@pytest.fixture
def region(tmp_path: Path) -> FileRegion:
    return FileRegion(tmp_path / "region")


Call = Callable[[FileRegion], Any]


def cache(region: FileRegion) -> PrefixCache:
    return PrefixCache(region.mem, region.lay, 0)


def objects(region: FileRegion) -> ObjectStore:
    return ObjectStore(region.mem, region.lay)


def words(n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.zeros(n, np.int64)


REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "region too small to be formatted": (
        lambda r: format_region(r.mem, SIZES, r.size - 64, overwrite=True),
        RegionTooSmallError,
        "these sizes need",
    ),
    "region too small to be opened": (
        lambda r: open_region(r.mem, r.size - 64),
        RegionTooSmallError,
        "was formatted for",
    ),
    "region too small for a header": (
        lambda r: open_region(r.mem, HEADER_BYTES - 8),
        RegionTooSmallError,
        "cannot hold a header",
    ),
    "a second pod on one file": (
        lambda r: format_region(r.mem, SIZES, r.size),
        RegionInUseError,
        "overwrite=True",
    ),
    "more nodes than slots": (
        lambda r: PrefixCache(r.mem, r.lay, 2),
        NoSuchNodeError,
        "nodes 0 to 1",
    ),
    "a lock of TraCT's own": (lambda r: PodLock(r.mem, r.lay, 0), NoSuchLockError, "from 3 on"),
    "a lock that is not there": (lambda r: PodLock(r.mem, r.lay, 4), NoSuchLockError, "1 of them"),
    "a key that is too short": (
        lambda r: cache(r).lookup([KEY[:-1]]),
        KeyLengthError,
        "this one has 31",
    ),
    "a key that is too long": (
        lambda r: cache(r).insert([KEY, KEY + b"x"], np.zeros((2, WORDS), np.int64)),
        KeyLengthError,
        "this one has 33",
    ),
    "an empty key": (lambda r: cache(r).delete(b""), KeyLengthError, "this one has 0"),
    "a block larger than a chunk": (
        lambda r: cache(r).insert([KEY], np.zeros((1, WORDS + 1), np.int64)),
        ObjectTooLargeError,
        "64, the region's chunk",
    ),
    "an object larger than the pool": (
        lambda r: objects(r).put("big", words(4 * WORDS + 1)),
        ObjectTooLargeError,
        "the size of the pool",
    ),
    "an empty object": (lambda r: objects(r).put("none", words(0)), ObjectTooLargeError, "8 to"),
    "a name that is there": (
        lambda r: objects(r).put("there", words(1)),
        NameExistsError,
        "delete it first",
    ),
    "more names than roots": (
        lambda r: objects(r).put("other", words(1)),
        OutOfSpaceError,
        "all 1 roots",
    ),
    "a name that is too long": (
        lambda r: objects(r).put("n" * 33, words(1)),
        RootNameError,
        "33 bytes",
    ),
    "a name too long in UTF-8": (
        lambda r: objects(r).put("\u00e9" * 17, words(1)),
        RootNameError,
        "34 bytes",
    ),
    "an empty name": (lambda r: objects(r).get(""), RootNameError, "1 to 32"),
    "a name with a NUL": (lambda r: objects(r).get("a\0b"), RootNameError, "without NUL"),
    "a name that is not there": (
        lambda r: objects(r).delete("absent"),
        NameNotFoundError,
        "absent",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_and_nothing_is_overwritten(region: FileRegion, what: str) -> None:
    call, error, text = REFUSED[what]
    before = region.bytes()
    with pytest.raises(error, match=text):
        call(region)
    after = region.bytes()
    held = slice(region.lay.slots_at, region.lay.roots_at)  # a lock was taken and given back
    bitmap = slice(region.lay.bitmap_at, region.lay.lru_at)
    assert after == before, (after[held] != before[held], after[bitmap] != before[bitmap])


def header_word(index: int, change: int) -> Call:
    def damage(region: FileRegion) -> None:
        region.words[index] += change

    return damage


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (header_word(0, 1), ForeignRegionError),
        (header_word(VERSION_WORD, 1), OtherVersionError),
        (header_word(VERSION_WORD + 1, 1), CorruptedHeaderError),
        (header_word(5, 1), CorruptedHeaderError),
    ],
)
def test_a_header_that_is_not_ours_is_refused_and_left_alone(
    region: FileRegion, damage: Call, error: type[Exception]
) -> None:
    damage(region)
    before = region.bytes()
    with pytest.raises(error):
        open_region(region.mem, region.size)
    assert region.bytes() == before


@pytest.mark.parametrize("off", [1, 7, 63, -8, 1 << 40])
def test_an_unaligned_or_outside_address_is_refused(off: int) -> None:
    mem = HostMemory(4096)
    for access in (lambda: mem.load(off), lambda: mem.store(off, 1)):
        with pytest.raises(PodUsageError):
            access()
    assert not mem.words


def test_offset_0_is_an_address_like_any_other() -> None:
    mem = HostMemory(4096)
    mem.store(0, 5)
    assert mem.load(0) == 5
