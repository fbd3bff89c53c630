"""Backing files that stay are opened as they were made, or longer, and else not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from cxlbench.emu.backing import FileBacking
from cxlbench.emu.clock import WallClock
from cxlbench.emu.memory import PAGE_BYTES, Arena
from cxlbench.emu.status import HostLimitError

PAGES = 64
STRIPE = 2 * PAGE_BYTES


def opened(
    folder: Path, *, pages: int = PAGES, stripe: int = STRIPE, count: int = 2
) -> FileBacking:
    files = [folder / f"dev0.ssd{number}" for number in range(count)]
    return FileBacking(files, pages * PAGE_BYTES, stripe_bytes=stripe, keep=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Make files that hold something."""
    arena = Arena(PAGES * PAGE_BYTES)
    arena.array[:] = np.random.default_rng(1).integers(0, 256, arena.nbytes, dtype=np.uint8)

    async def write() -> None:
        with contextlib.closing(opened(tmp_path)) as backing:
            await backing.write(0, arena, [(0, arena.nbytes)])

    with WallClock() as clock:
        clock.run(write())
    arena.close()
    return tmp_path


@pytest.mark.parametrize(
    "change", [{"pages": PAGES // 2}, {"stripe": PAGE_BYTES}, {"count": 1}, {"count": 4}]
)
def test_what_would_lose_what_is_there_is_refused_and_changes_nothing(
    written: Path, change: dict[str, int]
) -> None:
    before = content(written)
    with pytest.raises(HostLimitError, match="would be lost; take the device, capacity and scale"):
        opened(written, **change)
    assert content(written) == before


def test_files_may_grow_and_keep_what_they_have(written: Path) -> None:
    before = content(written)
    opened(written, pages=2 * PAGES).close()
    after = content(written)
    for name in ("dev0.ssd0", "dev0.ssd1"):
        assert after[name] == before[name] + bytes(len(before[name]))
    with pytest.raises(HostLimitError, match="would be lost"):
        opened(written)


def test_files_without_a_record_are_not_made_shorter(written: Path) -> None:
    (written / "dev0.layout").unlink()
    with pytest.raises(HostLimitError, match="would be lost"):
        opened(written, pages=PAGES // 2)
    opened(written).close()
    assert (written / "dev0.layout").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"files": 2}', '{"other": 1}'])
def test_a_record_that_says_nothing_is_refused(written: Path, text: str) -> None:
    (written / "dev0.layout").write_text(text)
    with pytest.raises(HostLimitError, match="does not say how its files are laid out"):
        opened(written)


def test_files_that_do_not_stay_have_no_record(tmp_path: Path) -> None:
    FileBacking([tmp_path / "ssd0"], PAGE_BYTES, stripe_bytes=STRIPE).close()
    assert list(tmp_path.iterdir()) == []
