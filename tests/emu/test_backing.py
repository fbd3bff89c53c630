"""Backing stores: what was written comes back, and what was not written is never reported so."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.backing import FileBacking, PhantomBacking, RamBacking
from cxlbench.emu.memory import PAGE_BYTES, TORN, Arena, PhantomArena, PhantomBuffer
from cxlbench.emu.status import DeviceError, HostLimitError, Status

PAGES = 64
STRIPE = 2 * PAGE_BYTES


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def files(folder, count=3, **options):
    return FileBacking(
        [folder / f"ssd{i}" for i in range(count)],
        PAGES * PAGE_BYTES,
        stripe_bytes=STRIPE,
        **options,
    )


def scattered(pages, draw):
    """Extents of ``pages`` pages in all, of one or two pages each, in any order."""
    places = list(range(PAGES // 2))
    draw.shuffle(places)
    extents = []
    while pages:
        length = min(pages, draw.choice((1, 2)))
        extents.append((places.pop() * 2 * PAGE_BYTES, length * PAGE_BYTES))
        pages -= length
    return extents


def filled(extents, content):
    arena = Arena(PAGES * PAGE_BYTES)
    arena.store(extents, content)
    return arena


def write(backing, address, content, extents=None, **options):
    extents = extents or [(0, len(content))]
    arena = filled(extents, content)
    try:
        asyncio.run(backing.write(address, arena, extents, **options))
    finally:
        arena.close()


def read(backing, address, nbytes, extents=None):
    arena = Arena(PAGES * PAGE_BYTES)
    extents = extents or [(0, nbytes)]
    asyncio.run(backing.read(address, arena, extents))
    content = arena.buffer(nbytes)
    arena.load(extents, content)
    arena.close()
    return content


WRITES = st.lists(
    st.tuples(st.integers(0, PAGES - 1), st.integers(1, 20)), min_size=1, max_size=5
).map(lambda writes: [(at, min(pages, PAGES - at)) for at, pages in writes])


@pytest.mark.parametrize("kind", ["one file", "three files", "ram"])
@given(WRITES, st.randoms(use_true_random=False))
def test_a_backing_is_a_flat_address_space(tmp_path_factory, kind, writes, draw):
    if kind == "ram":
        backing = RamBacking(PAGES * PAGE_BYTES)
    else:
        backing = files(tmp_path_factory.mktemp("b"), 1 if kind == "one file" else 3)
    model = np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
    with contextlib.closing(backing):
        for seed, (at, pages) in enumerate(writes):
            content = noise(pages * PAGE_BYTES, seed)
            write(backing, at * PAGE_BYTES, content, scattered(pages, draw))
            model[at * PAGE_BYTES :][: len(content)] = content
        for at, pages in writes:
            wanted = model[at * PAGE_BYTES :][: pages * PAGE_BYTES]
            got = read(backing, at * PAGE_BYTES, len(wanted), scattered(pages, draw))
            assert np.array_equal(got, wanted)


def test_stripes_go_round_the_files_in_turn(tmp_path):
    with contextlib.closing(files(tmp_path, keep=True)) as backing:
        write(backing, 0, noise(7 * STRIPE))
    for stripe in range(7):
        content = (tmp_path / f"ssd{stripe % 3}").read_bytes()
        at = stripe // 3 * STRIPE
        assert content[at : at + STRIPE] == noise(7 * STRIPE)[stripe * STRIPE :][:STRIPE].tobytes()


def test_more_pieces_than_one_system_call_takes(tmp_path):
    pages = 3000
    extents = [(page * PAGE_BYTES, PAGE_BYTES) for page in range(pages - 1, -1, -1)]
    content = noise(pages * PAGE_BYTES)
    arena = Arena(pages * PAGE_BYTES)
    arena.store(extents, content)
    path = tmp_path / "ssd"
    backing = FileBacking([path], pages * PAGE_BYTES, stripe_bytes=pages * PAGE_BYTES)
    with contextlib.closing(backing):
        asyncio.run(backing.write(0, arena, extents))
        assert path.read_bytes() == content.tobytes()
        arena.array[:] = 0
        asyncio.run(backing.read(0, arena, extents))
        back = arena.buffer(len(content))
        arena.load(extents, back)
    assert np.array_equal(back, content)
    arena.close()


def test_the_files_are_removed_at_the_end_unless_they_are_kept(tmp_path):
    files(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    files(tmp_path, keep=True).close()
    assert len(list(tmp_path.glob("ssd[0-9]"))) == 3


def test_kept_files_are_found_again(tmp_path):
    with contextlib.closing(files(tmp_path, keep=True)) as backing:
        write(backing, 5 * PAGE_BYTES, noise(9 * PAGE_BYTES))
    with contextlib.closing(files(tmp_path)) as backing:
        assert np.array_equal(read(backing, 5 * PAGE_BYTES, 9 * PAGE_BYTES), noise(9 * PAGE_BYTES))


def test_two_devices_cannot_have_the_same_file(tmp_path):
    """Kind of W10: two owners of one space hand out the same bytes."""
    with contextlib.closing(files(tmp_path)) as first:
        write(first, 0, noise(PAGE_BYTES))
        with pytest.raises(HostLimitError, match=r"ssd0 belongs to another device"):
            files(tmp_path)
        assert np.array_equal(read(first, 0, PAGE_BYTES), noise(PAGE_BYTES))
        assert len(list(tmp_path.iterdir())) == 3


def takes_direct_io(folder) -> bool:
    """Whether the file system under a folder can be read and written past the page cache."""
    path = folder / "probe"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except (AttributeError, OSError):
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def test_io_is_direct_where_the_file_system_takes_it(tmp_path):
    for home in (tmp_path, Path(__file__).parent, Path("/var/tmp"), Path.home()):
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=home) as name:
            folder = Path(name)
            if not takes_direct_io(folder):
                continue
            with contextlib.closing(files(folder)) as backing:
                assert backing.direct
                for descriptor in backing._descriptors:
                    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
                write(backing, PAGE_BYTES, noise(9 * PAGE_BYTES))
                back = read(backing, PAGE_BYTES, 9 * PAGE_BYTES)
            assert np.array_equal(back, noise(9 * PAGE_BYTES))
            return
    pytest.skip("no file system here takes O_DIRECT")


def test_a_file_system_without_direct_io_is_used_without_it(tmp_path, monkeypatch):
    original = os.open

    def no_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "O_DIRECT", 0o40000, raising=False)
    monkeypatch.setattr(os, "open", no_direct)
    with contextlib.closing(files(tmp_path)) as backing:
        assert not backing.direct
        write(backing, PAGE_BYTES, noise(9 * PAGE_BYTES))
        assert np.array_equal(read(backing, PAGE_BYTES, 9 * PAGE_BYTES), noise(9 * PAGE_BYTES))


def test_a_stripe_that_is_not_whole_pages_is_refused(tmp_path):
    with pytest.raises(ValueError, match="whole pages of 4096 B, got 5000"):
        FileBacking([tmp_path / "ssd"], 1 << 20, stripe_bytes=5000)


# -- what a host cannot do ------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(nbytes):
    """Let no file of this process grow beyond ``nbytes``: a disk that is full, for one test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("preallocate", [False, True])
def test_a_disk_too_small_for_the_files_is_refused_and_left_clean(tmp_path, preallocate):
    open_files = len(list(Path("/dev/fd").iterdir()))
    with largest_file(4 * PAGE_BYTES), pytest.raises(HostLimitError) as caught:
        files(tmp_path, preallocate=preallocate)
    assert str(tmp_path / "ssd0") in str(caught.value)
    assert "File too large; choose another folder or a larger scale" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/dev/fd").iterdir())) == open_files


def test_a_disk_that_fills_up_while_writing_is_an_error(tmp_path):
    """R7: the first pages still fit, the write is cut short, and that is not reported as done."""
    with (
        contextlib.closing(files(tmp_path, 1)) as backing,
        largest_file(4 * PAGE_BYTES),
        pytest.raises(DeviceError, match="ssd0 at 8192: File too large") as caught,
    ):
        write(backing, 2 * PAGE_BYTES, noise(8 * PAGE_BYTES))
    assert caught.value.status is Status.IO_ERROR


def test_a_write_that_takes_fewer_bytes_and_then_none_is_an_error(tmp_path, monkeypatch):
    """R7: a short count without an error number."""
    answers = iter([3 * PAGE_BYTES, 0])
    with contextlib.closing(files(tmp_path, 1)) as backing:
        monkeypatch.setattr(os, "pwritev", lambda *_: next(answers))
        with pytest.raises(DeviceError, match="12288 of 32768 B written at 0") as caught:
            write(backing, 0, noise(8 * PAGE_BYTES))
    assert caught.value.status is Status.IO_ERROR


def test_a_write_in_several_steps_goes_on_where_it_stopped(tmp_path, monkeypatch):
    whole = os.pwritev

    def two_pages(descriptor, pieces, offset):
        left, few = 2 * PAGE_BYTES, []
        for piece in pieces:
            few.append(piece[:left])
            left -= len(few[-1])
        return whole(descriptor, [piece for piece in few if len(piece)], offset)

    with contextlib.closing(files(tmp_path)) as backing:
        monkeypatch.setattr(os, "pwritev", two_pages)
        write(backing, PAGE_BYTES, noise(17 * PAGE_BYTES))
        assert np.array_equal(read(backing, PAGE_BYTES, 17 * PAGE_BYTES), noise(17 * PAGE_BYTES))


@pytest.mark.parametrize("kind", ["files", "ram", "phantom"])
def test_an_injected_short_write_leaves_out_a_page_and_is_reported(tmp_path, kind):
    made = {
        "files": lambda: files(tmp_path),
        "ram": lambda: RamBacking(PAGES * PAGE_BYTES),
        "phantom": lambda: PhantomBacking(PAGES * PAGE_BYTES),
    }
    extents = [(0, 3 * PAGE_BYTES), (5 * PAGE_BYTES, PAGE_BYTES)]
    with contextlib.closing(made[kind]()) as backing:
        arena = PhantomArena(1 << 20) if kind == "phantom" else filled(extents, noise(16384))
        with pytest.raises(DeviceError, match="I/O error") as caught:
            asyncio.run(backing.write(0, arena, extents, short=True))
        assert caught.value.status is Status.IO_ERROR
        if kind != "phantom":
            got = read(backing, 0, 4 * PAGE_BYTES)
            assert np.array_equal(got[: 3 * PAGE_BYTES], noise(16384)[: 3 * PAGE_BYTES])
            assert not got[3 * PAGE_BYTES :].any()
        arena.close()


@pytest.mark.parametrize("length", [0, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 100])
def test_a_file_that_was_cut_off_is_an_error_and_not_zeros(tmp_path, length):
    """H8: the backing file is not what it was."""
    with contextlib.closing(files(tmp_path, 1)) as backing:
        write(backing, 0, noise(8 * PAGE_BYTES))
        os.truncate(tmp_path / "ssd0", length)
        with pytest.raises(DeviceError, match="ssd0") as caught:
            read(backing, 0, 8 * PAGE_BYTES)
        assert caught.value.status is Status.IO_ERROR


def test_a_folder_that_vanished_ends_neither_the_run_nor_its_end(tmp_path):
    """H8: somebody removed the files of a running device, and the folder with them."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    backing = files(folder)
    write(backing, 0, noise(8 * PAGE_BYTES))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    write(backing, 8 * PAGE_BYTES, noise(8 * PAGE_BYTES, 1))
    assert np.array_equal(read(backing, 0, 8 * PAGE_BYTES), noise(8 * PAGE_BYTES))
    assert np.array_equal(read(backing, 8 * PAGE_BYTES, 8 * PAGE_BYTES), noise(8 * PAGE_BYTES, 1))
    backing.close()
    folder.mkdir()
    with contextlib.closing(files(folder)) as later:
        assert not read(later, 0, 8 * PAGE_BYTES).any(), "nothing of the old device is left"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(HostLimitError, match=r"nowhere/ssd0.*No such file"):
        files(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        with pytest.raises(HostLimitError, match=r"locked/ssd0.*Permission denied; choose anoth"):
            files(locked)
    finally:
        os.seteuid(user)


def test_a_failed_read_is_an_error_with_its_file(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    with contextlib.closing(files(tmp_path)) as backing:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(DeviceError, match=r"ssd0 at 0: Input/output error"):
            read(backing, 0, PAGE_BYTES)


def test_ram_and_files_keep_discarded_bytes_as_an_ssd_does(tmp_path):
    for backing in (files(tmp_path), RamBacking(PAGES * PAGE_BYTES)):
        with contextlib.closing(backing):
            write(backing, 0, noise(PAGE_BYTES))
            backing.discard(0, PAGE_BYTES)
            assert np.array_equal(read(backing, 0, PAGE_BYTES), noise(PAGE_BYTES))


# -- tags -----------------------------------------------------------------------------------------


def at_once(work):
    """Run a coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


class Tags:
    """A phantom backing, written and read like a dictionary."""

    def __init__(self, **options):
        self.backing = PhantomBacking(1 << 40, **options)
        self.arena = PhantomArena(1 << 40)

    def put(self, address, nbytes, tag):
        self.arena.store([(0, nbytes)], PhantomBuffer(nbytes, tag))
        at_once(self.backing.write(address, self.arena, [(0, nbytes)]))

    def get(self, address, nbytes):
        at_once(self.backing.read(address, self.arena, [(0, nbytes)]))
        buffer = self.arena.buffer(nbytes)
        self.arena.load([(0, nbytes)], buffer)
        return buffer.tag


GIB = 1 << 30


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 5, 16]), st.booleans()), max_size=20
    )
)
def test_a_write_or_a_discard_drops_whatever_it_overlaps(steps):
    """Units of a quarter GiB, so that objects lie in, over and beyond the index's buckets."""
    unit, tags, model = GIB // 4, Tags(), {}
    for number, (at, wanted, discard) in enumerate(steps):
        length = wanted if discard else min(wanted, 4)
        model = {
            begin: (units, tag)
            for begin, (units, tag) in model.items()
            if begin + units <= at or begin >= at + length
        }
        if discard:
            tags.backing.discard(at * unit, length * unit)
        else:
            tags.put(at * unit, length * unit, number)
            model[at] = (length, number)
    for at in range(61):
        for units in (1, 2, 4):
            held = model.get(at)
            wanted = held[1] if held is not None and held[0] == units else TORN
            assert tags.get(at * unit, units * unit) == wanted


def test_tags_are_only_found_with_the_extents_they_were_written_with():
    tags = Tags()
    tags.put(0, 8 * PAGE_BYTES, "object")
    assert tags.get(0, 8 * PAGE_BYTES) == "object"
    assert tags.get(0, 4 * PAGE_BYTES) == TORN
    assert tags.get(PAGE_BYTES, 8 * PAGE_BYTES) == TORN


def test_where_parts_are_read_alone_each_stands_for_itself():
    backing, arena = PhantomBacking(1 << 30, split=True), PhantomArena(1 << 30)
    extents = [(0, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES)]
    arena.store(extents, PhantomBuffer(2 * PAGE_BYTES, "object"))
    asyncio.run(backing.write(0, arena, extents))
    second = [(9 * PAGE_BYTES, PAGE_BYTES)]
    asyncio.run(backing.read(PAGE_BYTES, arena, second))
    assert arena.cells(second) == arena.cells(extents[1:])


def test_a_short_write_of_parts_loses_the_last_one_only():
    backing, arena = PhantomBacking(1 << 30, split=True), PhantomArena(1 << 30)
    extents = [(0, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES)]
    arena.store(extents, PhantomBuffer(2 * PAGE_BYTES, "object"))
    with pytest.raises(DeviceError):
        asyncio.run(backing.write(0, arena, extents, short=True))
    there = [(8 * PAGE_BYTES, PAGE_BYTES), (9 * PAGE_BYTES, PAGE_BYTES)]
    asyncio.run(backing.read(0, arena, there))
    assert arena.cells(there) == (arena.cells(extents)[0], None)


def test_ranges_that_were_never_written_are_known_where_files_have_holes(tmp_path):
    stripe = 16 * PAGE_BYTES
    size = 64 * stripe
    backing = FileBacking([tmp_path / "a", tmp_path / "b"], size, stripe_bytes=stripe)
    arena = Arena(PAGE_BYTES)
    arena.array[:] = 1
    try:
        if not backing.unwritten(0, size):
            pytest.skip("this file system does not tell of holes")
        at = 20 * stripe + PAGE_BYTES
        asyncio.run(backing.write(at, arena, [(0, PAGE_BYTES)]))
        assert not backing.unwritten(at, PAGE_BYTES)
        assert not backing.unwritten(0, size)
        assert backing.unwritten(0, 20 * stripe)
        assert backing.unwritten(40 * stripe, size - 40 * stripe)
    finally:
        backing.close()
        arena.close()
