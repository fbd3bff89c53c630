"""Space on one device: append segments per size class (HyMCache §3.4, append-only placement).

An extent holds one object (payload rounded to pages, and its footer page). Extents of one size are
appended to a segment of that size class; nothing is written in place and nothing is moved. A
segment becomes free again when all its extents are dead, and the longest-free segment is used
next, which spreads the writes over the SSDs.

Units: bytes. Left out: compaction. Space comes back by evicting what still lives in a segment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Segment:
    """A run of the device for extents of one size."""

    base: int
    length: int
    extent_bytes: int
    cursor: int = 0
    live: set[int] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether no extent can be appended any more."""
        return self.cursor + self.extent_bytes > self.length

    @property
    def room_bytes(self) -> int:
        """Whole extents that can still be appended, in bytes."""
        return (self.length - self.cursor) // self.extent_bytes * self.extent_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the extents in use."""
        return len(self.live) * self.extent_bytes

    @property
    def dead_bytes(self) -> int:
        """Bytes that come back only with the whole segment."""
        return self.cursor - self.live_bytes


class ExtentAllocator:
    """Hands out extents of any size, by appending."""

    def __init__(self, capacity_bytes: int, *, segment_bytes: int, page_bytes: int) -> None:
        if segment_bytes < page_bytes or segment_bytes % page_bytes:
            raise ValueError(f"segment must be whole pages of {page_bytes} B, got {segment_bytes}")
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._units = capacity_bytes // segment_bytes
        self._free: deque[int] = deque(range(self._units))
        self._open: dict[int, Segment] = {}
        self._segments: dict[int, Segment] = {}
        self._of: dict[int, Segment] = {}

    def allocate(self, extent_bytes: int) -> int | None:
        """Return the address of a new extent, or None if no segment has room."""
        segment = self._open.get(extent_bytes)
        if segment is None or segment.full:
            segment = self._new_segment(extent_bytes)
            if segment is None:
                return None
            self._open[extent_bytes] = segment
        address = segment.base + segment.cursor
        segment.cursor += extent_bytes
        segment.live.add(address)
        self._of[address] = segment
        return address

    def restore(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """Take in extents (address, bytes) that were allocated before, the oldest first.

        Returns the addresses of those that there is room for, each in the segment that an earlier
        process had there; where segments of two times overlap, the newer extent decides. Nothing is
        appended to what was taken in.
        """
        bases: dict[int, Segment] = {}
        for address, extent_bytes in reversed(extents):
            units = self._units_of(extent_bytes)
            base = address if units > 1 else address // self.segment_bytes * self.segment_bytes
            within = address - base
            if within % extent_bytes or within + extent_bytes > units * self.segment_bytes:
                continue  # no segment has it there
            segment = bases.get(base)
            if segment is None:
                first = base // self.segment_bytes
                mine = set(range(first, first + units))
                if base % self.segment_bytes or not mine.issubset(self._free):
                    continue
                self._free = deque(unit for unit in self._free if unit not in mine)
                segment = Segment(base, units * self.segment_bytes, extent_bytes)
                segment.cursor = segment.length
                bases[base] = self._segments[base] = segment
            if segment.extent_bytes == extent_bytes and address not in segment.live:
                segment.live.add(address)
                self._of[address] = segment
        return sorted(self._of)

    def free(self, address: int) -> None:
        """Declare the extent at ``address`` dead; freeing what is not allocated is refused."""
        segment = self._of.pop(address, None)
        if segment is None:
            raise ValueError(f"no extent is allocated at {address}")
        segment.live.discard(address)
        if not segment.live:
            self._reclaim(segment)

    def take_back(self, address: int) -> None:
        """Undo an ``allocate`` whose extent was never written; refused writes cost no space.

        The newest extent of an open segment is appended again; any other is dead.
        """
        segment = self._of.get(address)
        if segment is not None and self._open.get(segment.extent_bytes) is segment:
            newest = segment.base + segment.cursor - segment.extent_bytes
            if address == newest:
                segment.cursor -= segment.extent_bytes
        self.free(address)

    def _reclaim(self, segment: Segment) -> None:
        if self._open.get(segment.extent_bytes) is segment:
            del self._open[segment.extent_bytes]
        del self._segments[segment.base]
        first = segment.base // self.segment_bytes
        self._free.extend(range(first, first + segment.length // self.segment_bytes))

    def _new_segment(self, extent_bytes: int) -> Segment | None:
        units = self._units_of(extent_bytes)
        first = self._take_run(units)
        if first is None:
            return None
        segment = Segment(first * self.segment_bytes, units * self.segment_bytes, extent_bytes)
        self._segments[segment.base] = segment
        return segment

    def _units_of(self, extent_bytes: int) -> int:
        return -(-extent_bytes // self.segment_bytes)

    def _take_run(self, units: int) -> int | None:
        """Take ``units`` neighbouring free units; the longest-free one where one is enough."""
        if units == 1:
            return self._free.popleft() if self._free else None
        for first in self._runs(units):
            taken = set(range(first, first + units))
            self._free = deque(unit for unit in self._free if unit not in taken)
            return first
        return None

    def _runs(self, units: int) -> Iterator[int]:
        """Yield the first unit of each run of ``units`` free neighbours; the runs are disjoint."""
        length = 0
        last = -2
        for unit in sorted(self._free):
            length = length + 1 if unit == last + 1 else 1
            last = unit
            if length == units:
                yield unit - units + 1
                length = 0

    def free_bytes(self, extent_bytes: int) -> int:
        """Bytes of extents of this size that can be appended now."""
        units = self._units_of(extent_bytes)
        runs = len(self._free) if units == 1 else sum(1 for _ in self._runs(units))
        extents = runs * (units * self.segment_bytes // extent_bytes)
        segment = self._open.get(extent_bytes)
        return extents * extent_bytes + (segment.room_bytes if segment is not None else 0)

    @property
    def dead_bytes(self) -> int:
        """Bytes of dead extents in segments that still hold live ones."""
        return sum([segment.dead_bytes for segment in self._segments.values()])

    @property
    def live_extents(self) -> int:
        """Extents in use."""
        return len(self._of)

    def emptiest(self, extent_bytes: int) -> Iterator[list[int]]:
        """Yield the live addresses of each place that could be emptied, the cheapest one first.

        A place is as many neighbouring units as one extent needs, free ones among them. The segment
        that extents of this size are appended to has room itself, unless it is full.
        """
        units = self._units_of(extent_bytes)
        appended = self._open.get(extent_bytes)
        at: list[Segment | None] = [None] * self._units
        barred = bytearray(self._units)
        for segment in self._segments.values():
            first = segment.base // self.segment_bytes
            for unit in range(first, first + segment.length // self.segment_bytes):
                at[unit] = segment
                barred[unit] = segment is appended and not segment.full
        places = []
        for first in range(self._units - units + 1):
            inside = list(dict.fromkeys(s for s in at[first : first + units] if s is not None))
            begin, end = first * self.segment_bytes, (first + units) * self.segment_bytes
            if not inside or any(barred[first : first + units]):
                continue
            if inside[0].base >= begin and inside[-1].base + inside[-1].length <= end:
                cost = sum(segment.live_bytes for segment in inside)
                places.append((cost / (end - begin), first, inside))
        places.sort(key=lambda place: place[:2])
        taken = bytearray(self._units)
        for _, first, inside in places:
            if any(taken[first : first + units]):
                continue
            taken[first : first + units] = b"\1" * units
            live = sorted(address for segment in inside for address in segment.live)
            if live:
                yield live
