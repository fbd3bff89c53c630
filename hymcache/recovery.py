"""What a node finds on its SSDs when it starts again: objects, by their footers.

Every object ends with a footer in a page of its own (key, generation, payload size, checksum). The
scan reads the backing store once, but for the holes of its files, looks at each page for a footer,
and keeps an object only if the payload in front of it has the footer's checksum. What had not been
flushed, or has been overwritten in part, is not found. Of two objects with one key, or in one
place, the newer generation wins.

Objects that had been evicted may come back: their bytes are right, and a chain's keys name its
content. Units: bytes. Left out: a journal, which would make the scan shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cxlbench.emu.backing import Backing
from cxlbench.emu.memory import PAGE_BYTES, Arena, page_ceil
from cxlbench.emu.status import DeviceError
from cxlbench.kv.footer import FOOTER_BYTES, Footer, parse_footer, payload_checksum

SCAN_BYTES = 8 << 20
"""How much is read at a time."""

Progress = Callable[[int, int], None]
"""Called with bytes scanned and bytes in all."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """A whole object on a device, at ``address`` of its backing store."""

    address: int
    footer: Footer

    @property
    def extent_bytes(self) -> int:
        """Payload in whole pages, and the footer's page."""
        return page_ceil(self.footer.payload_bytes) + PAGE_BYTES


async def find_objects(
    backing: Backing, capacity_bytes: int, *, progress: Progress | None = None
) -> list[FoundObject]:
    """Return the whole objects of a backing store, oldest generation first."""
    found = [
        made
        for made in await _footers(backing, capacity_bytes, progress)
        if await _whole(backing, made)
    ]
    newest: dict[bytes, FoundObject] = {}
    for made in sorted(found, key=lambda o: o.footer.generation):
        newest[made.footer.key] = made
    return sorted(newest.values(), key=lambda o: o.footer.generation)


async def _footers(
    backing: Backing, capacity_bytes: int, progress: Progress | None
) -> list[FoundObject]:
    """Return what claims to be an object."""
    window = Arena(SCAN_BYTES)
    found: list[FoundObject] = []
    unwritten = getattr(backing, "unwritten", lambda address, nbytes: False)
    try:
        for begin in range(0, capacity_bytes, SCAN_BYTES):
            length = min(SCAN_BYTES, capacity_bytes - begin)
            if unwritten(begin, length):
                continue
            await backing.read(begin, window, [(0, length)])
            pages = window.view(0, length).reshape(-1, PAGE_BYTES)
            for number in np.flatnonzero(pages[:, 0] != 0).tolist():
                footer = parse_footer(np.ascontiguousarray(pages[number, :FOOTER_BYTES]))
                if footer is None:
                    continue
                address = begin + number * PAGE_BYTES - page_ceil(footer.payload_bytes)
                if address >= 0:
                    found.append(FoundObject(address, footer))
            if progress is not None:
                progress(begin + length, capacity_bytes)
    finally:
        window.close()
    return found


async def _whole(backing: Backing, made: FoundObject) -> bool:
    """Whether the payload is the one that the footer was made for."""
    size = page_ceil(made.footer.payload_bytes)
    window = Arena(size)
    try:
        await backing.read(made.address, window, [(0, size)])
        return payload_checksum(window.view(0, made.footer.payload_bytes)) == made.footer.checksum
    except DeviceError:
        return False
    finally:
        window.close()
