"""Eviction: how Master makes space on the nodes and in its own table (HyMCache §4.1).

Space is made under a device's low-water mark, up to the high-water mark: tails of the coldest
chains first (using a chain makes its head the newest entry), then what still lives in the emptiest
segments, since a log gives whole segments back. The table evicts its coldest entries when its slots
are used up.

An evicted object cannot be found any more, at once; it *retires* (its slot is freed, and its node
drops it) when the last lease on it has ended. What is under a lease is in use, gives no space back
before that, and is therefore no victim of choice.

Units: bytes. Left out: other orders than least recently used, and moving objects between devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from cxlbench.hymcache.counters import MasterCounters
from cxlbench.hymcache.slot_table import SlotState, SlotTable, UpdateResult

EVICT_BATCH = 64


class Space(Protocol):
    """A device's space for objects of one size, as the node reports it."""

    @property
    def capacity_bytes(self) -> int:
        """All of it."""

    @property
    def extent_bytes(self) -> int:
        """What one object takes."""

    @property
    def free_bytes(self) -> int:
        """What objects of this size can be appended to now."""

    @property
    def dead_bytes(self) -> int:
        """What comes back when the rest of its segments is evicted."""


class NodeSpace(Protocol):
    """What eviction needs of a node."""

    @property
    def device_count(self) -> int:
        """How many devices the node joins."""

    def space(self, device: int, size_bytes: int) -> Space:
        """Report a device's space for objects of ``size_bytes``."""

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """Drop objects (key, generation) on which no lease is left."""

    def emptiest(self, device: int, size_bytes: int) -> Iterator[list[bytes]]:
        """Yield the keys of each segment that evicting them would free, cheapest first."""


class Eviction:
    """Chooses what goes, and lets it go when nobody reads it."""

    def __init__(
        self,
        table: SlotTable,
        nodes: Mapping[int, NodeSpace],
        counters: MasterCounters,
        *,
        low_water: float,
        high_water: float,
    ) -> None:
        if not 0 <= low_water <= high_water < 1:
            raise ValueError(
                f"need 0 <= low_water <= high_water < 1, got {low_water}, {high_water}"
            )
        self.table = table
        self.nodes = nodes
        self.counters = counters
        self.low_water = low_water
        self.high_water = high_water
        self.leased: dict[bytes, int] = {}
        """How many leases there are on each key that has one."""
        self.retiring: set[bytes] = set()
        """Evicted keys that wait for the end of their leases."""

    # -- leases ---------------------------------------------------------------------------------

    def lease(self, keys: Sequence[bytes]) -> None:
        """Count a lease on each of ``keys``."""
        leased = self.leased
        for key in keys:
            leased[key] = leased.get(key, 0) + 1

    def end_lease(self, keys: Sequence[bytes]) -> None:
        """End one lease on each of ``keys``, and retire what was evicted under the last."""
        freed = []
        leased = self.leased
        for key in keys:
            left = leased[key] - 1
            if left:
                leased[key] = left
            else:
                del leased[key]
                if key in self.retiring:
                    freed.append(key)
        self._retire(freed)

    # -- making room ----------------------------------------------------------------------------

    def make_room(self, name: int, device: int | None, size_bytes: int, objects: int) -> None:
        """Evict from devices of a node that are under their low-water mark."""
        node = self.nodes[name]
        for number in range(node.device_count) if device is None else (device,):
            space = node.space(number, size_bytes)
            if space.extent_bytes > space.capacity_bytes:
                continue
            # A batch may be larger than the device; one object at least is to have room.
            wanted = max(
                min(space.extent_bytes * objects, space.capacity_bytes // 2), space.extent_bytes
            )
            if space.free_bytes >= max(self.low_water * space.capacity_bytes, wanted):
                continue
            target = int(max(self.high_water * space.capacity_bytes, wanted))
            self.evict(self._coldest_on(name, number, target - space.free_bytes - space.dead_bytes))
            for victims in node.emptiest(number, size_bytes):
                if node.space(number, size_bytes).free_bytes >= target:
                    break
                if self.leased.keys().isdisjoint(victims):
                    self.counters.evicted_by_segment += self.evict(victims)

    def make_slots(self, objects: int, *, keep: Sequence[bytes]) -> int:
        """Return how many of so many slots are free, after evicting if they are too few."""
        room = self.table.max_objects - len(self.table)
        if room < objects:
            kept = self.leased.keys() | set(keep)
            cold = self.table.coldest(objects - room + len(kept))
            self.evict([key for key in cold if key not in kept][: objects - room])
            room = self.table.max_objects - len(self.table)
        return min(room, objects)

    def _coldest_on(self, name: int, device: int, nbytes: int) -> list[bytes]:
        """Return the oldest keys on a device that hold ``nbytes`` together: cold chains' tails."""
        wanted = EVICT_BATCH
        while nbytes > 0:
            keys = self.table.coldest(wanted)
            batch = self.table.lookup(keys)
            chosen: list[bytes] = []
            total = 0
            for key, node, dev, length in zip(
                keys,
                batch.node.tolist(),
                batch.device.tolist(),
                batch.length.tolist(),
                strict=True,
            ):
                if total >= nbytes:
                    return chosen
                if node == name and dev == device and key not in self.leased:
                    chosen.append(key)
                    total += length
            if len(keys) < wanted or total >= nbytes:
                return chosen
            wanted *= 4
        return []

    # -- letting go -----------------------------------------------------------------------------

    def evict(self, keys: Sequence[bytes]) -> int:
        """Make READY keys unfindable; their extents come back when no lease is left."""
        if not keys:
            return 0
        moved = self.table.set_state(keys, SlotState.READY, SlotState.EVICTING).tolist()
        gone = [k for k, m in zip(keys, moved, strict=True) if m == UpdateResult.CHANGED]
        self.counters.evicted += len(gone)
        self.retiring.update(gone)
        self._retire([key for key in gone if key not in self.leased])
        return len(gone)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nothing will be told to the node of these keys: it is gone. Their leases run out."""
        self.retiring.difference_update(keys)

    def _retire(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        per_node: dict[int, list[tuple[bytes, int]]] = {}
        found = self.table.lookup(keys)
        for key, node, generation in zip(
            keys, found.node.tolist(), found.generation.tolist(), strict=True
        ):
            per_node.setdefault(node, []).append((key, generation))
            self.retiring.discard(key)
        self.table.remove(keys)
        for node, mine in per_node.items():
            self.nodes[node].free(mine)
