"""Space on one device: append segments per size class (HyMCache §3.4, append-only placement).

An extent holds one object (payload rounded to pages, and its footer page). Extents of one size are
appended to a segment of that size class; nothing is written in place and nothing is moved. A
segment becomes free again when all its extents are dead, and the longest-free segment is used
next, which spreads the writes over the SSDs.

Units: bytes. Left out: compaction. Space comes back by evicting what still lives in a segment.
"""

from __future__ import annotations

from collections import deque
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
    def dead_bytes(self) -> int:
        """Bytes that come back only with the whole segment."""
        return self.cursor - len(self.live) * self.extent_bytes


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

    def free(self, address: int) -> None:
        """Declare the extent at ``address`` dead; freeing what is not allocated is refused."""
        segment = self._of.pop(address, None)
        if segment is None:
            raise ValueError(f"no extent is allocated at {address}")
        segment.live.discard(address)
        if not segment.live and segment.full:
            self._reclaim(segment)

    def _reclaim(self, segment: Segment) -> None:
        if self._open.get(segment.extent_bytes) is segment:
            del self._open[segment.extent_bytes]
        del self._segments[segment.base]
        first = segment.base // self.segment_bytes
        self._free.extend(range(first, first + segment.length // self.segment_bytes))

    def _new_segment(self, extent_bytes: int) -> Segment | None:
        units = -(-extent_bytes // self.segment_bytes)
        first = self._take_run(units)
        if first is None:
            return None
        segment = Segment(first * self.segment_bytes, units * self.segment_bytes, extent_bytes)
        self._segments[segment.base] = segment
        return segment

    def _take_run(self, units: int) -> int | None:
        """Take ``units`` neighbouring free units; the longest-free one where one is enough."""
        if units == 1:
            return self._free.popleft() if self._free else None
        free = sorted(self._free)
        for index in range(len(free) - units + 1):
            if free[index + units - 1] - free[index] == units - 1:
                taken = set(free[index : index + units])
                self._free = deque(unit for unit in self._free if unit not in taken)
                return free[index]
        return None

    @property
    def free_bytes(self) -> int:
        """Bytes that can be appended: free segments, and the rest of the open ones."""
        rest = sum([s.length - s.cursor for s in self._open.values()])
        return len(self._free) * self.segment_bytes + rest

    @property
    def dead_bytes(self) -> int:
        """Bytes of dead extents in segments that still hold live ones."""
        return sum([segment.dead_bytes for segment in self._segments.values()])

    @property
    def live_extents(self) -> int:
        """Extents in use."""
        return len(self._of)

    def fits(self, extent_bytes: int) -> bool:
        """Whether an extent of this size could be allocated on an empty device."""
        return extent_bytes <= self._units * self.segment_bytes

    def emptiest(self, nbytes: int) -> list[int]:
        """Return the live addresses of the closed segments that give back ``nbytes`` cheapest."""
        closed = [s for s in self._segments.values() if s.full and s.live]
        closed.sort(key=lambda s: (len(s.live) * s.extent_bytes / s.length, s.base))
        addresses: list[int] = []
        for segment in closed:
            if nbytes <= 0:
                break
            addresses.extend(sorted(segment.live))
            nbytes -= segment.length
        return addresses
