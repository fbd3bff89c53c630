"""The DRAM of servers as one store: segments, a master with leases, eviction by watermark.

As Mooncake Store has it. Objects lie in one segment each, chosen at random among those with room. A
look for an object, and the beginning of a get, grant it a lease; a put grants none. The master
wakes every ``eviction_interval``. When more than the high watermark is used, or an allocation has
failed since, it evicts a share of all objects, those first whose leases ended first.

Units: bytes, s. Left out: replicas, soft pins (off unless a put asks for one), groups of objects,
fragmentation of segments, and the sharding of the master's table: it evicts in the exact order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from cxlbench.devices.profile import ObjectStoreProfile
from cxlbench.harness.tiers.block_store import BlockStore, Entry


class Segments:
    """The objects of all servers, as the master knows them."""

    def __init__(
        self, profile: ObjectStoreProfile, capacity_bytes: int, segments: int, *, seed: int
    ) -> None:
        self.store = BlockStore(capacity_bytes)
        self.failed_allocations = 0
        self.evictions = 0
        """Rounds."""
        self._profile = profile
        self._free = [capacity_bytes // segments] * segments
        self._draw = random.Random(seed)
        self._looked_s = 0.0
        self._short = False

    def look(self, key: bytes, nbytes: int, now: float) -> Entry | None:
        """Return an object of that size, and grant it a lease."""
        entry = self.store.find(key)
        if entry is None or entry.nbytes != nbytes:
            return None
        self.lease(entry, now)
        return entry

    def lease(self, entry: Entry, now: float) -> None:
        """Grant an object a lease from now on."""
        self.store.lease(entry, max(entry.lease_s, now + self._profile.lease))

    def allocate(
        self, key: bytes, nbytes: int, now: float, *, place: int | None = None
    ) -> Entry | None:
        """Take space in a segment, or in ``place``, for a new object; None if there is none."""
        able = range(len(self._free)) if place is None else (place,)
        roomy = [i for i in able if self._free[i] >= nbytes]
        entry = self.store.reserve(key, nbytes, now, evict=False) if roomy else None
        if entry is None:
            self._short = True
            self.failed_allocations += 1
            return None
        entry.place = roomy[self._draw.randrange(len(roomy))]
        self._free[entry.place] -= nbytes
        return entry

    def revoke(self, entry: Entry) -> None:
        """Give the space of an object back that was not put."""
        self.store.remove(entry)
        self._free[entry.place] += entry.nbytes

    def commit(self, entry: Entry, payload: object, now: float) -> None:
        """End a put."""
        self.store.lease(entry, now)
        self.store.commit(entry, payload)

    def wake(self, now: float) -> None:
        """Do what the master's thread has done by now; call before every request to it."""
        every = self._profile.eviction_interval
        tick_s = math.floor(now / every) * every
        if tick_s <= self._looked_s:
            return
        self._looked_s = tick_s
        profile, store = self._profile, self.store
        used = store.used_bytes / store.capacity_bytes
        if used <= profile.eviction_high_watermark and not self._short:
            return
        above = used - profile.eviction_high_watermark + profile.eviction_ratio
        share = max(profile.eviction_ratio, above)
        for victim in store.evict_oldest_leases(math.ceil(share * len(store) - 1e-9), tick_s):
            self._free[victim.place] += victim.nbytes
        self.evictions += 1
        self._short = False


def by_place(entries: Sequence[Entry]) -> dict[int, int]:
    """Return the bytes of objects in each segment."""
    found: dict[int, int] = {}
    for entry in entries:
        found[entry.place] = found.get(entry.place, 0) + entry.nbytes
    return found
