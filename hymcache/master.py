"""Master: the global metadata of HyMCache (§4.1): key → node, address, length, generation, state.

Lookups and registrations come in batches and every key gets its own answer. Master chooses the
*node* of a request (never of single blocks); the node's KV Manager chooses the device and reserves.
A read needs a *lease*: until it ends, the extents behind the answer are not reused. Space is made
under a low-water mark: tails of the coldest chains first (using a chain makes its head the newest
entry), then what still lives in the emptiest segments. What is under a lease is in use, gives no
space back before the lease ends, and is therefore no victim.

The methods are plain calls of a server that owns its table; ``control.py`` carries and charges
them. Units: bytes, s. Left out: replication of Master, and its restart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Protocol

from cxlbench.emu.clock import Clock
from cxlbench.hymcache.slot_table import InsertResult, SlotState, SlotTable, UpdateResult
from cxlbench.kv.results import KeyResult

EVICT_BATCH = 64
EVICTING = int(SlotState.EVICTING)


class NodePolicy(Enum):
    """How a request without a hit gets its node."""

    ROUND_ROBIN = "round-robin"
    MOST_FREE = "most-free"


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


class NodeService(Protocol):
    """What Master needs of a node."""

    node: int

    @property
    def device_count(self) -> int:
        """How many devices the node joins."""

    def space(self, device: int, size_bytes: int) -> Space:
        """Report a device's space for objects of ``size_bytes``."""

    def publish(self, key: bytes, address: int, generation: int) -> bool:
        """Let a committed object be found on the node; False if it is gone."""

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """Drop objects (key, generation) on which no lease is left."""

    def emptiest(self, device: int, size_bytes: int) -> Iterator[list[bytes]]:
        """Yield the keys of each segment that evicting them would free, cheapest first."""


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """Where a block can be read: the descriptor of §4.1."""

    key: bytes
    node: int
    device: int
    address: int
    size_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class LookupReply:
    """One descriptor or None per key, and until when the descriptors are good."""

    blocks: tuple[RemoteBlock | None, ...]
    lease_until_s: float


@dataclass(frozen=True, slots=True)
class AllocateReply:
    """The node to write to, and for each key whether to write it (None) or why not.

    ``device`` is where the chain goes on; None if it begins here and the node may choose.
    """

    node: int
    device: int | None
    refusals: tuple[KeyResult | None, ...]
    ticket: int


@dataclass(slots=True)
class _Lease:
    until_s: float
    keys: list[bytes]


@dataclass(slots=True)
class MasterCounters:
    """What Master did."""

    lookups: int = 0
    looked_up_keys: int = 0
    registered: int = 0
    evicted: int = 0
    evicted_by_segment: int = 0
    leases_expired: int = 0
    writes_expired: int = 0
    dropped: int = 0


class Master:
    """The metadata server."""

    def __init__(
        self,
        clock: Clock,
        nodes: Mapping[int, NodeService],
        *,
        max_objects: int,
        policy: NodePolicy = NodePolicy.ROUND_ROBIN,
        lease_s: float = 11.0,
        write_deadline_s: float = 11.0,
        low_water: float = 0.04,
        high_water: float = 0.08,
    ) -> None:
        if not 0 <= low_water <= high_water < 1:
            raise ValueError(
                f"need 0 <= low_water <= high_water < 1, got {low_water}, {high_water}"
            )
        self.clock = clock
        self.nodes = dict(nodes)
        self.policy = policy
        self.lease_s = lease_s
        self.write_deadline_s = write_deadline_s
        self.low_water = low_water
        self.high_water = high_water
        self.table = SlotTable(max_objects)
        self.counters = MasterCounters()
        self._leases: dict[Hashable, _Lease] = {}
        self._leased: dict[bytes, int] = {}
        self._retiring: set[bytes] = set()
        self._writing: dict[bytes, int] = {}
        self._members = count(1)
        self._tickets = count(1)
        self._turn = 0

    def join(self) -> int:
        """Return a number for a client, with which it makes the names of its leases unique."""
        return next(self._members)

    # -- reads ----------------------------------------------------------------------------------

    def lookup(
        self, reader: Hashable, keys: Sequence[bytes], *, used: Sequence[bytes] = ()
    ) -> LookupReply:
        """Return descriptors of the READY keys, under the lease of ``reader``.

        ``used`` is the part of the chain before ``keys`` that the engine has itself: it is touched
        with the hits, so that the chain's head stays younger than its tail.
        """
        self.counters.lookups += 1
        self.counters.looked_up_keys += len(keys)
        batch = self.table.lookup(keys)
        rows = zip(
            keys,
            batch.state.tolist(),
            batch.node.tolist(),
            batch.device.tolist(),
            batch.address.tolist(),
            batch.length.tolist(),
            batch.generation.tolist(),
            strict=True,
        )
        ready = int(SlotState.READY)
        blocks = tuple(
            [
                RemoteBlock(key, node, device, address, length, generation)
                if state == ready
                else None
                for key, state, node, device, address, length, generation in rows
            ]
        )
        hits = [block.key for block in blocks if block is not None]
        until = self.clock.now() + self.lease_s
        lease = self._leases.get(reader)
        if lease is not None:
            lease.until_s = until
        elif hits:
            lease = self._leases[reader] = _Lease(until, [])
            self.clock.call_at(until, self._expire_lease, reader)
        if lease is not None:
            lease.keys.extend(hits)
            leased = self._leased
            for key in hits:
                leased[key] = leased.get(key, 0) + 1
        if hits or used:
            self.table.touch([*used, *hits])
        return LookupReply(blocks, until)

    def release(self, reader: Hashable) -> None:
        """End the lease of a reader; unknown readers are no error."""
        lease = self._leases.pop(reader, None)
        if lease is None:
            return
        freed = []
        leased = self._leased
        for key in lease.keys:
            left = leased[key] - 1
            if left:
                leased[key] = left
            else:
                del leased[key]
                if key in self._retiring:
                    freed.append(key)
        if freed:
            self._retire(freed)

    def _expire_lease(self, reader: Hashable) -> None:
        lease = self._leases.get(reader)
        if lease is None:
            return
        if lease.until_s > self.clock.now():
            self.clock.call_at(lease.until_s, self._expire_lease, reader)
        else:
            self.counters.leases_expired += 1
            self.release(reader)

    # -- writes ---------------------------------------------------------------------------------

    def allocate(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None = None,
        after: bytes | None = None,
    ) -> AllocateReply:
        """Choose the node for a request's new blocks and mark their keys WRITING.

        ``near`` is (node, device) of the request's last hit block. The chain goes on where the
        last of the leading ``keys`` lies that are here already, else there, else where the block
        ``after`` lies, which the engine may have had itself.
        """
        if near is None and after is not None:
            last = self.table.lookup([after])
            if int(last.state[0]) == SlotState.READY:
                near = int(last.node[0]), int(last.device[0])
        found = self.table.lookup(keys)
        states = found.state.tolist()
        # A key on its way out can be stored when it is gone, and what follows it not before.
        able = states.index(EVICTING) if EVICTING in states else len(keys)
        for index in range(able):
            if states[index] != SlotState.READY:
                break
            near = int(found.node[index]), int(found.device[index])
        node = near[0] if near is not None else self._choose_node(size_bytes)
        device = near[1] if near is not None else None
        new = states[:able].count(SlotState.EMPTY)
        if new:
            self._make_room(node, device, size_bytes, new)
            absent = self.table.find(keys[:able]) < 0
            room = self._make_slots(int(absent.sum()), keep=keys)
            able = int((absent.cumsum() <= room).sum())
        refusals: list[KeyResult | None] = [KeyResult.NO_SPACE] * len(keys)
        ticket = next(self._tickets)
        keys_in = keys[:able]
        mine = []
        if keys_in:
            inserted = self.table.insert(
                keys_in, node=node, device=0, address=0, length=0, generation=0
            )
            for index, result in enumerate(inserted.result.tolist()):
                if result == InsertResult.INSERTED:
                    refusals[index] = None
                    self._writing[keys_in[index]] = ticket
                    mine.append(keys_in[index])
                else:
                    refusals[index] = KeyResult.EXISTS
        if mine:
            self.clock.call_at(
                self.clock.now() + self.write_deadline_s, self._expire_writes, mine, ticket
            )
        return AllocateReply(node, device, tuple(refusals), ticket)

    def register(
        self, ticket: int, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes] = ()
    ) -> list[KeyResult]:
        """Make committed blocks READY. ``chain`` is the request's chain so far, for its age.

        Blocks are in the order of the chain. After one that cannot be registered (its deadline
        passed, or its node lost it) none is: they would be a tail without its head.
        """
        good: list[RemoteBlock] = []
        for block in blocks:
            if self._writing.get(block.key) != ticket or not self.nodes[block.node].publish(
                block.key, block.address, block.generation
            ):
                break
            good.append(block)
        if good:
            keys = [block.key for block in good]
            self.table.update_location(
                keys,
                node=[block.node for block in good],
                device=[block.device for block in good],
                address=[block.address for block in good],
                length=[block.size_bytes for block in good],
                generation=[block.generation for block in good],
            )
            self.table.set_state(keys, SlotState.WRITING, SlotState.READY)
            for key in keys:
                del self._writing[key]
            self.counters.registered += len(keys)
            self.table.touch(chain or keys)
        return [KeyResult.STORED] * len(good) + [KeyResult.LEASE_EXPIRED] * (
            len(blocks) - len(good)
        )

    def abort(self, ticket: int, keys: Iterable[bytes]) -> None:
        """Give up WRITING keys of a ticket; others are no error."""
        mine = [key for key in keys if self._writing.get(key) == ticket]
        for key in mine:
            del self._writing[key]
        if mine:
            self.table.remove(mine)

    def _expire_writes(self, keys: Sequence[bytes], ticket: int) -> None:
        late = [key for key in keys if self._writing.get(key) == ticket]
        self.counters.writes_expired += len(late)
        self.abort(ticket, late)

    # -- space ----------------------------------------------------------------------------------

    def _choose_node(self, size_bytes: int) -> int:
        names = sorted(self.nodes)
        if self.policy is NodePolicy.MOST_FREE:
            return max(names, key=lambda name: (self._free_bytes(name, size_bytes), -name))
        self._turn += 1
        return names[(self._turn - 1) % len(names)]

    def _free_bytes(self, name: int, size_bytes: int) -> int:
        node = self.nodes[name]
        return sum(node.space(number, size_bytes).free_bytes for number in range(node.device_count))

    def _make_room(self, name: int, device: int | None, size_bytes: int, objects: int) -> None:
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
                if self._leased.keys().isdisjoint(victims):
                    self.counters.evicted_by_segment += self.evict(victims)

    def _make_slots(self, objects: int, *, keep: Sequence[bytes]) -> int:
        """Return how many of so many slots are free, after evicting if they are too few."""
        room = self.table.max_objects - len(self.table)
        if room < objects:
            kept = self._leased.keys() | set(keep)
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
                if node == name and dev == device and key not in self._leased:
                    chosen.append(key)
                    total += length
            if len(keys) < wanted or total >= nbytes:
                return chosen
            wanted *= 4
        return []

    def evict(self, keys: Sequence[bytes]) -> int:
        """Make READY keys unfindable; their extents come back when no lease is left."""
        if not keys:
            return 0
        moved = self.table.set_state(keys, SlotState.READY, SlotState.EVICTING).tolist()
        gone = [k for k, m in zip(keys, moved, strict=True) if m == UpdateResult.CHANGED]
        self.counters.evicted += len(gone)
        self._retiring.update(gone)
        self._retire([key for key in gone if key not in self._leased])
        return len(gone)

    def _retire(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        per_node: dict[int, list[tuple[bytes, int]]] = {}
        found = self.table.lookup(keys)
        for key, node, generation in zip(
            keys, found.node.tolist(), found.generation.tolist(), strict=True
        ):
            per_node.setdefault(node, []).append((key, generation))
            self._retiring.discard(key)
        self.table.remove(keys)
        for node, mine in per_node.items():
            self.nodes[node].free(mine)

    def gone(self, node: int, key: bytes, generation: int) -> None:
        """Forget a generation that a node lost, or whose bytes a reader found wrong."""
        found = self.table.lookup([key])
        if (
            int(found.state[0]) == SlotState.READY
            and int(found.node[0]) == node
            and int(found.generation[0]) == generation
        ):
            self.counters.dropped += 1
            self.evict([key])

    # -- housekeeping ---------------------------------------------------------------------------

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody."""
        return {
            "leases": len(self._leases),
            "leased keys": len(self._leased),
            "writing slots": len(self._writing),
            "evicting slots": len(self._retiring),
        }
