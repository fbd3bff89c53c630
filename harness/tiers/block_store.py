"""Keyed blocks with a capacity in bytes: least recently used first out, pins, leases, watermarks.

An entry is *pending* from its reservation until it is committed; pending and pinned entries, and
those whose lease has not ended, stay. Two ways of making room are here: evicting one by one what
is oldest until a new entry fits (``reserve``), and evicting a share of all entries in the order in
which their leases end (``evict_oldest_leases``), as a master does in the background.

Units: bytes, s. Left out: fragmentation.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from cxlbench.harness.tiers.plain_work import Payload


@dataclass(eq=False, slots=True)
class Entry:
    """One block, or one chunk of blocks."""

    key: bytes
    nbytes: int
    payload: Payload = None
    pending: bool = True
    pins: int = 0
    lease_s: float = 0.0
    """Until when it must not be evicted."""
    place: int = 0
    """Where its bytes are: a segment."""
    serial: int = 0


class BlockStore:
    """See the module. Entries are ordered from the least to the most recently used."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a store's capacity is not negative, got {capacity_bytes} B")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted = 0
        self.pinned = 0
        """Pins in all."""
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._serial = 0
        self._leases: list[tuple[float, int, Entry]] = []
        """By the end of the lease; an item whose time is not its entry's any more is stale."""

    def __len__(self) -> int:
        """Entries, pending ones included."""
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry, pending or not."""
        return key in self._entries

    @property
    def pending(self) -> int:
        """Entries that are reserved and not committed."""
        return sum(entry.pending for entry in self._entries.values())

    def find(self, key: bytes) -> Entry | None:
        """Return a committed entry."""
        entry = self._entries.get(key)
        return None if entry is None or entry.pending else entry

    def entry(self, key: bytes) -> Entry:
        """Return an entry, pending or not; raise ``KeyError`` if there is none."""
        return self._entries[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make entries the most recently used ones, the last of ``keys`` the most."""
        entries = self._entries
        for key in keys:
            if key in entries:
                entries.move_to_end(key)

    def pin(self, entry: Entry) -> None:
        """Keep an entry until ``unpin``."""
        entry.pins += 1
        self.pinned += 1

    def unpin(self, entry: Entry) -> None:
        """End one pin."""
        entry.pins -= 1
        self.pinned -= 1

    def lease(self, entry: Entry, until_s: float) -> None:
        """Keep an entry until then, whatever was said before."""
        entry.lease_s = until_s
        leases = self._leases
        heapq.heappush(leases, (until_s, entry.serial, entry))
        if len(leases) > 64 + 4 * len(self._entries):
            leases[:] = [item for item in leases if self._current(item)]
            heapq.heapify(leases)

    def _current(self, item: tuple[float, int, Entry]) -> bool:
        until_s, _, entry = item
        return entry.lease_s == until_s and self._entries.get(entry.key) is entry

    def reserve(self, key: bytes, nbytes: int, now: float, *, evict: bool = True) -> Entry | None:
        """Take space for a new entry, if need be of old ones; None if there is none.

        Raises ``ValueError`` if there is an entry of that key.
        """
        if key in self._entries:
            raise ValueError(f"there is an entry {key.hex()} already, pending or not; look first")
        if nbytes > self.capacity_bytes:
            return None
        short = self.used_bytes + nbytes - self.capacity_bytes
        if short > 0:
            victims = self._oldest(short, now) if evict else None
            if victims is None:
                return None
            for victim in victims:
                self.evict(victim)
        self._serial += 1
        entry = self._entries[key] = Entry(key, nbytes, serial=self._serial)
        self.used_bytes += nbytes
        return entry

    def commit(self, entry: Entry, payload: Payload) -> None:
        """Make a reserved entry findable."""
        entry.payload = payload
        entry.pending = False

    def remove(self, entry: Entry) -> None:
        """Give the space of an entry back."""
        del self._entries[entry.key]
        self.used_bytes -= entry.nbytes

    def evict(self, entry: Entry) -> None:
        """Remove an entry and count it."""
        self.remove(entry)
        self.evicted += 1

    def evict_oldest_leases(self, count: int, now: float) -> list[Entry]:
        """Evict up to ``count`` entries, those first whose leases ended first; return them.

        Only entries that had a ``lease`` are considered.
        """
        leases = self._leases
        victims: list[Entry] = []
        kept = []
        while leases and len(victims) < count and leases[0][0] <= now:
            item = heapq.heappop(leases)
            if not self._current(item):
                continue
            entry = item[2]
            if entry.pins or entry.pending:
                kept.append(item)
                continue
            self.evict(entry)
            victims.append(entry)
        for item in kept:
            heapq.heappush(leases, item)
        return victims

    def _oldest(self, nbytes: int, now: float) -> list[Entry] | None:
        """Return the oldest entries that together free ``nbytes``; None if they do not."""
        victims = []
        for entry in self._entries.values():
            if entry.pins or entry.pending or entry.lease_s > now:
                continue
            victims.append(entry)
            nbytes -= entry.nbytes
            if nbytes <= 0:
                return victims
        return None
