"""The cache of CMM-H: granules in DRAM frames, page bitmaps, pins, and who is to be evicted.

Mechanism only: no I/O and no clock. The replacement policy decides among the granules of a set;
this file keeps pinned ones and those with dirty pages from being pushed out.
Units: bytes; bitmaps have one bit a page of 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from cxlbench.devices.policies import PolicyFactory, ReplacementPolicy
from cxlbench.emu.memory import PAGE_BYTES, Extent


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an object that lies in one granule."""

    granule: int
    address: int
    within: int
    length: int
    mask: int


@dataclass(eq=False, slots=True)
class Line:
    """One granule in a frame."""

    granule: int
    frame: int
    valid: int = 0
    dirty: int = 0
    pins: int = 0
    owners: dict[int, None] = field(default_factory=dict)
    """Addresses of objects whose bytes were written here."""


class Cache:
    """Granules in frames, by sets; fully associative where ``ways`` is 0."""

    def __init__(
        self, granules: int, *, granule_bytes: int, ways: int, policy: PolicyFactory
    ) -> None:
        if granules < 1:
            raise ValueError(f"the cache needs at least one granule, got {granules}")
        if ways and granules % ways:
            raise ValueError(f"{granules} granules cannot be split into sets of {ways} ways")
        self.granules = granules
        self.granule_bytes = granule_bytes
        self.evictions = 0
        size = ways or granules
        self._sets = granules // size
        self._policies: list[ReplacementPolicy] = [policy(size) for _ in range(self._sets)]
        self._free = [
            list(range((number + 1) * size - 1, number * size - 1, -1))
            for number in range(self._sets)
        ]
        self._lines: dict[int, Line] = {}
        self._condemned: dict[int, Line] = {}
        """By set: the line that goes next, as soon as it is clean."""
        self.pieces = lru_cache(maxsize=1024)(self._split)

    def _split(self, address: int, nbytes: int) -> tuple[Piece, ...]:
        """Split a page-aligned range at granule boundaries."""
        pieces = []
        end = address + nbytes
        while address < end:
            granule, within = divmod(address, self.granule_bytes)
            length = min(end - address, self.granule_bytes - within)
            pages = ((1 << (length // PAGE_BYTES)) - 1) << (within // PAGE_BYTES)
            pieces.append(Piece(granule, address, within, length, pages))
            address += length
        return tuple(pieces)

    def extent(self, piece: Piece, line: Line) -> Extent:
        """Return where a piece lies in the arena."""
        return (line.frame * self.granule_bytes + piece.within, piece.length)

    def line(self, granule: int) -> Line | None:
        """Return a granule's line, if it is cached."""
        return self._lines.get(granule)

    def pin_present(self, pieces: tuple[Piece, ...]) -> list[Line] | None:
        """Pin and touch the lines of all pieces, or none of them if one is absent."""
        lines = []
        for piece in pieces:
            line = self._lines.get(piece.granule)
            if line is None:
                return None
            lines.append(line)
        for line in lines:
            self._use(line)
        return lines

    def pin(self, granule: int) -> Line | None:
        """Pin a granule's line, made if absent; None if its set has no clean unpinned line."""
        line = self._lines.get(granule)
        if line is not None:
            self._use(line)
            return line
        frame = self._frame(granule)
        if frame is None:
            return None
        line = self._lines[granule] = Line(granule, frame, pins=1)
        self._policies[granule % self._sets].insert(granule)
        return line

    def _frame(self, granule: int) -> int | None:
        """Return a frame for ``granule``, evicting a clean line; None if none can go now."""
        number = granule % self._sets
        if self._free[number]:
            return self._free[number].pop()
        victim = self._condemned.get(number) or self._choose(number)
        if victim is None:
            return None
        if victim.dirty or victim.pins:
            self._condemned[number] = victim
            return None
        self._condemned.pop(number, None)
        del self._lines[victim.granule]
        self.evictions += 1
        return victim.frame

    def _choose(self, number: int) -> Line | None:
        """Take the policy's victim out of it; pinned lines are in use and go back as newest."""
        policy = self._policies[number]
        passed: list[int] = []
        found = None
        for _ in range(len(policy)):
            line = self._lines[policy.evict()]
            if not line.pins:
                found = line
                break
            passed.append(line.granule)
        for granule in passed:
            policy.insert(granule)
        return found

    def _use(self, line: Line) -> None:
        """Pin a cached line; one that was to be evicted stays after all."""
        line.pins += 1
        number = line.granule % self._sets
        if self._condemned.get(number) is line:
            del self._condemned[number]
            self._policies[number].insert(line.granule)
        else:
            self._policies[number].touch(line.granule)

    def dirty_victim(self, granule: int) -> Line | None:
        """Return the line that must be written back before ``granule`` fits, if that is why."""
        victim = self._condemned.get(granule % self._sets)
        return victim if victim is not None and victim.dirty and not victim.pins else None

    def own(self, line: Line, address: int) -> None:
        """Note that an object's bytes were written into a line."""
        line.owners[address] = None

    def owners(self, line: Line) -> list[int]:
        """Return the addresses of objects with bytes in a line."""
        return list(line.owners)

    def drop_pages(self, piece: Piece, address: int) -> None:
        """Forget an object's pages: neither valid nor dirty any more."""
        line = self._lines.get(piece.granule)
        if line is not None:
            line.valid &= ~piece.mask
            line.dirty &= ~piece.mask
            line.owners.pop(address, None)

    @property
    def pins(self) -> int:
        """Pins on all lines."""
        return sum(line.pins for line in self._lines.values())

    def __len__(self) -> int:
        """Granules cached."""
        return len(self._lines)
