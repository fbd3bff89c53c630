"""The cache of CMM-H: granules in DRAM frames, page bitmaps, pins, and who is to be evicted.

A frame holds one *granule*, the grain at which the cache tracks, chooses and evicts (HyMCache §3.3
speaks of a transparent LRU cache only; the policy is replaceable). Inside a granule one bit a page
says what is valid, and what is dirty. The policy orders the granules of a set and names a victim;
this file keeps it from being pushed out while it is pinned, dirty, or in the middle of a transfer:
a victim that must be written back first stays *condemned*, and nothing else is evicted meanwhile.

Mechanism only: no I/O, and nothing here knows what time is. Units: bytes; bitmaps have one bit a
page of 4 KiB. Left out: sectored tags, victim buffers, prefetching into the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cxlbench.devices.policies import PolicyError, PolicyFactory, ReplacementPolicy
from cxlbench.emu.memory import PAGE_BYTES, Extent
from cxlbench.emu.pipe import Reservation
from cxlbench.emu.status import DeviceError
from cxlbench.emu.sync import Signal


@dataclass(slots=True)
class CmmHCounters:
    """What a CMM-H did since it was made; granules are counted once an access."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    refills: int = 0
    refilled_bytes: int = 0
    """What the SSDs read for misses: whole refill units."""
    evictions: int = 0
    dirty_evictions: int = 0
    """Victims that had to be written back first."""
    written_back: int = 0
    """Objects of which all that was dirty has reached the SSDs."""
    written_back_bytes: int = 0
    write_back_failed: int = 0
    lost: int = 0
    """Objects that could not be written back."""


class Piece(NamedTuple):
    """A part of an object that lies in one granule."""

    granule: int
    address: int
    within: int
    length: int
    pages: int
    """The pages that it covers, as a bitmap."""


@dataclass(eq=False, slots=True)
class Transfer:
    """Pages on their way between lines and the SSDs."""

    ended: Signal[None]
    """Set when the emulated transfer is over, however it ended."""
    booking: Reservation | None = None
    """Of a refill: when it ends."""
    arrived: Signal[DeviceError | None] | None = None
    """Of a refill: set when the real bytes are in the frames, or could not be had."""


class Line:
    """One granule in a frame, which begins at ``base`` in the arena.

    ``valid`` and ``dirty`` are bitmaps of pages, ``pins`` counts readers and writers,
    ``dirty_objects`` are the addresses of objects that dirty pages belong to.
    """

    __slots__ = ("base", "dirty", "dirty_objects", "granule", "pins", "transfers", "valid")

    def __init__(self, granule: int, base: int) -> None:
        self.granule = granule
        self.base = base
        self.valid = 0
        self.dirty = 0
        self.pins = 1
        self.transfers: tuple[tuple[int, Transfer], ...] = ()
        """What is going on, with the pages of this line that it moves."""
        self.dirty_objects: tuple[int, ...] = ()

    def moves(self, pages: int, *, refill: bool = False) -> Transfer | None:
        """Return a transfer of any of ``pages`` that is going on; only a refill, if so asked."""
        for moved, transfer in self.transfers:
            if moved & pages and not (refill and transfer.arrived is None):
                return transfer
        return None

    def end(self, transfer: Transfer) -> None:
        """Take a transfer off the line."""
        self.transfers = tuple([entry for entry in self.transfers if entry[1] is not transfer])


@dataclass(eq=False, slots=True)
class _Set:
    policy: ReplacementPolicy
    free: list[int]
    condemned: Line | None = None
    """Chosen by the policy, and gone from it; its frame is the next to be reused."""


class Cache:
    """Granules in frames, by sets; fully associative where ``ways`` is 0."""

    def __init__(
        self,
        granules: int,
        *,
        granule_bytes: int,
        ways: int,
        policy: PolicyFactory | ReplacementPolicy,
        counters: CmmHCounters,
    ) -> None:
        if granules < 1:
            raise ValueError(f"the cache needs at least one granule, got {granules}")
        if ways and granules % ways:
            raise ValueError(f"{granules} granules cannot be split into sets of {ways} ways")
        self.granules = granules
        self.granule_bytes = granule_bytes
        self.counters = counters
        size = ways or granules
        self._sets = [
            _Set(
                _policy(policy, size, sets=granules // size),
                [frame * granule_bytes for frame in range(first + size - 1, first - 1, -1)],
            )
            for first in range(0, granules, size)
        ]
        self._lines: dict[int, Line] = {}

    def pieces(self, address: int, nbytes: int) -> tuple[Piece, ...]:
        """Split a page-aligned range at granule boundaries."""
        pieces = []
        size, end = self.granule_bytes, address + nbytes
        whole = (1 << (size // PAGE_BYTES)) - 1
        while address < end:
            granule, within = divmod(address, size)
            length = min(end - address, size - within)
            pages = whole
            if length < size:
                pages = ((1 << (length // PAGE_BYTES)) - 1) << (within // PAGE_BYTES)
            pieces.append(Piece(granule, address, within, length, pages))
            address += length
        return tuple(pieces)

    def line(self, granule: int) -> Line | None:
        """Return a granule's line, if it is cached."""
        return self._lines.get(granule)

    # -- pins and victims -----------------------------------------------------------------------

    def pin_present(self, pieces: Sequence[Piece]) -> list[Line] | None:
        """Pin and touch the lines of all ``pieces``, or none of them if one is absent."""
        try:
            lines = [self._lines[piece[0]] for piece in pieces]
        except KeyError:
            return None
        last = None
        for line in lines:
            if line is last:
                line.pins += 1
            else:
                self._use(line)
                last = line
        return lines

    def pin(self, pieces: Sequence[Piece], lines: list[Line]) -> int | None:
        """Pin the lines of ``pieces`` from where ``lines`` ends, and append them.

        Absent ones are made, in frames that are free or whose content may go. Returns the first
        granule whose set has no such frame now, or None when all lines are there.
        """
        cached = self._lines
        for piece in pieces[len(lines) :]:
            granule = piece[0]
            line = cached.get(granule)
            if line is None:
                home = self._sets[granule % len(self._sets)]
                base = home.free.pop() if home.free else self._evict(home)
                if base is None:
                    return granule
                line = cached[granule] = Line(granule, base)
                home.policy.insert(granule)
            elif lines and lines[-1] is line:
                line.pins += 1
            else:
                self._use(line)
            lines.append(line)
        return None

    def condemned(self, granule: int) -> Line | None:
        """Return the victim that ``granule`` waits for; None if all lines of its set are pinned."""
        return self._sets[granule % len(self._sets)].condemned

    def unpin(self, lines: Iterable[Line]) -> bool:
        """Take pins back; return whether a line is free of them now."""
        free = False
        for line in lines:
            line.pins -= 1
            if not line.pins:
                free = True
                if not line.valid:
                    self.release_if_empty(line)
        return free

    def _use(self, line: Line) -> None:
        """Pin a cached line; one that was condemned stays after all."""
        line.pins += 1
        home = self._sets[line.granule % len(self._sets)]
        if home.condemned is line:
            home.condemned = None
            home.policy.insert(line.granule)
        else:
            home.policy.touch(line.granule)

    def _evict(self, home: _Set) -> int | None:
        """Free the frame of the set's victim; None if it cannot go yet, or there is none."""
        victim = home.condemned or self._choose(home)
        if victim is None or not self.may_go(victim):
            home.condemned = victim
            return None
        home.condemned = None
        del self._lines[victim.granule]
        self.counters.evictions += 1
        return victim.base

    def may_go(self, line: Line) -> bool:
        """Whether a frame can be reused: nobody holds it, and the SSDs have all that it has."""
        return not (line.pins or line.dirty or line.transfers)

    def _choose(self, home: _Set) -> Line | None:
        """Take the policy's victim out of it; pinned lines are in use, and go back as new."""
        passed: list[int] = []
        policy = home.policy
        while len(policy):
            granule = policy.evict()
            found = self._lines.get(granule)
            if found is None:
                raise PolicyError(
                    f"{type(policy).__name__}.evict() returned {granule}, which is not resident: "
                    "it must return a block that was inserted and not removed"
                )
            if not self.in_use(found):
                break
            passed.append(granule)
        else:
            found = None
        for granule in passed:
            policy.insert(granule)
        return found

    def in_use(self, line: Line) -> bool:
        """Whether a victim must be passed over: somebody reads or writes it right now."""
        return line.pins > 0

    # -- content --------------------------------------------------------------------------------

    def drop(self, pieces: Iterable[Piece], address: int) -> None:
        """Forget the pages of the object at ``address``: neither valid nor dirty any more."""
        for piece in pieces:
            line = self._lines.get(piece.granule)
            if line is not None:
                line.valid &= ~piece.pages
                line.dirty &= ~piece.pages
                if address in line.dirty_objects:
                    line.dirty_objects = tuple([a for a in line.dirty_objects if a != address])
                if not line.valid:
                    self.release_if_empty(line)

    def release_if_empty(self, line: Line) -> None:
        """Give the frame of a line back that holds nothing and that nobody uses."""
        if line.valid or line.pins or line.transfers or self._lines.get(line.granule) is not line:
            return
        del self._lines[line.granule]
        home = self._sets[line.granule % len(self._sets)]
        if home.condemned is line:
            home.condemned = None
        else:
            home.policy.remove(line.granule)
        home.free.append(line.base)

    @property
    def pins(self) -> int:
        """Pins on all lines."""
        return sum(line.pins for line in self._lines.values())

    def __len__(self) -> int:
        """Granules cached."""
        return len(self._lines)


def runs(parts: Iterable[tuple[Piece, Line]]) -> list[tuple[int, list[Extent]]]:
    """Join parts that follow each other on the SSDs: (address, arena extents) of each run."""
    found: list[tuple[int, list[Extent]]] = []
    end = -1
    for piece, line in parts:
        extent = (line.base + piece.within, piece.length)
        if piece.address == end:
            found[-1][1].append(extent)
        else:
            found.append((piece.address, [extent]))
        end = piece.address + piece.length
    return found


def _policy(
    given: PolicyFactory | ReplacementPolicy, capacity: int, *, sets: int
) -> ReplacementPolicy:
    if isinstance(given, type) or not isinstance(given, ReplacementPolicy):
        return given(capacity)
    if sets != 1:
        raise PolicyError(
            f"one {type(given).__name__} cannot serve {sets} sets: give what makes policies"
        )
    if len(given) or given.capacity_blocks < capacity:
        raise PolicyError(
            f"the policy must be empty and hold {capacity} blocks, it has {len(given)} and holds "
            f"{given.capacity_blocks}"
        )
    return given
