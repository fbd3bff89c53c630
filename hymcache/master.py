"""Master: the global metadata of HyMCache (§4.1): key → node, address, length, generation, state.

Lookups and registrations come in batches and every key gets its own answer. Master chooses the
*node* of a request (never of single blocks); the node's KV Manager chooses the device and reserves.
A read needs a *lease*: until it ends, the extents behind the answer are not reused. How space is
made is in ``eviction.py``.

The methods are plain calls of a server that owns its table; ``control.py`` carries and charges
them. Units: bytes, s. Left out: replication of Master, and its restart.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

from cxlbench.emu.clock import Clock
from cxlbench.hymcache.counters import MasterCounters
from cxlbench.hymcache.eviction import Eviction, NodeSpace
from cxlbench.hymcache.slot_table import InsertResult, SlotState, SlotTable
from cxlbench.hymcache.slot_types import pack_keys
from cxlbench.kv.results import KeyResult

EVICTING = int(SlotState.EVICTING)


Place: TypeAlias = tuple[int, "int | None"]
"""A node, and the device on it; None if the node may choose."""


class NodePolicy(Enum):
    """How a request without a hit gets its node."""

    ROUND_ROBIN = "round-robin"
    MOST_FREE = "most-free"


class NodeService(NodeSpace, Protocol):
    """What Master needs of a node."""

    node: int

    def publish(self, key: bytes, address: int, generation: int) -> bool:
        """Let a committed object be found on the node; False if it is gone."""


class RemoteBlock(NamedTuple):
    """Where a block can be read: the descriptor of §4.1."""

    key: bytes
    node: int
    device: int
    address: int
    size_bytes: int
    generation: int

    @classmethod
    def of(cls, key: bytes, row: tuple[int, ...]) -> RemoteBlock:
        """Return the block at a row of node, device, address, size, generation, and maybe more."""
        return tuple.__new__(cls, (key, *row[:5]))  # a third of the time of the plain call

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Everything but the key."""
        return self[1:]


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
    ticket: Hashable


@dataclass(slots=True)
class _Lease:
    until_s: float
    keys: list[bytes]


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
        self.clock = clock
        self.nodes = dict(nodes)
        self.policy = policy
        self.lease_s = lease_s
        self.write_deadline_s = write_deadline_s
        self.table = SlotTable(max_objects)
        self.counters = MasterCounters()
        self.eviction = Eviction(
            self.table, self.nodes, self.counters, low_water=low_water, high_water=high_water
        )
        self._leases: dict[Hashable, _Lease] = {}
        self._writing: dict[bytes, Hashable] = {}
        self._tickets: dict[Hashable, set[bytes]] = {}
        """Keys that are WRITING, by the ticket that they were asked for under."""
        self._members = count(1)
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
        packed = pack_keys(keys)
        rows = self.table.lookup(packed).rows()
        ready, block_of = int(SlotState.READY), RemoteBlock.of
        blocks = tuple(
            [
                block_of(key, row) if row[5] == ready else None
                for key, row in zip(keys, rows, strict=True)
            ]
        )
        hits: Sequence[bytes] = keys
        if not all(blocks):
            hits = [key for key, block in zip(keys, blocks, strict=True) if block is not None]
        until = self.clock.now() + self.lease_s
        lease = self._leases.get(reader)
        if lease is not None:
            lease.until_s = until
        elif hits:
            lease = self._leases[reader] = _Lease(until, [])
            self.clock.call_at(until, self._expire_lease, reader)
        if lease is not None:
            lease.keys.extend(hits)
            self.eviction.lease(hits)
        if hits is keys and not used:
            self.table.touch(packed)
        elif hits or used:
            self.table.touch([*used, *hits])
        return LookupReply(blocks, until)

    def touch(self, chain: Sequence[bytes]) -> None:
        """Note that a chain is in use, of which the engine has everything itself."""
        self.table.touch(chain)

    def release(self, reader: Hashable) -> None:
        """End the lease of a reader; unknown readers are no error."""
        lease = self._leases.pop(reader, None)
        if lease is not None:
            self.eviction.end_lease(lease.keys)

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
        ticket: Hashable,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None = None,
        after: bytes | None = None,
    ) -> AllocateReply:
        """Choose the node for a request's new blocks and mark their keys WRITING under ``ticket``.

        The ticket is of the caller's choice, and a new one. ``near`` and ``after``: see ``place``.
        """
        place = self.place(keys, size_bytes, near=near, after=after)
        if place is None:
            return AllocateReply(-1, None, (KeyResult.NO_SPACE,) * len(keys), ticket)
        return self.allocate_at(ticket, keys, size_bytes, place)

    def place(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None = None,
        after: bytes | None = None,
        avoid: Collection[int] = (),
    ) -> Place | None:
        """Choose the node for a request's new blocks; None if there is none, or it is to avoid.

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
        for index in range(len(keys)):
            if states[index] != SlotState.READY:
                break
            near = int(found.node[index]), int(found.device[index])
        if near is not None and near[0] in self.nodes:
            return None if near[0] in avoid else near
        node = self._choose_node(size_bytes, avoid)
        return None if node is None else (node, None)

    def allocate_at(
        self, ticket: Hashable, keys: Sequence[bytes], size_bytes: int, place: Place
    ) -> AllocateReply:
        """Mark new keys WRITING, to be written at ``place``, after making room there."""
        node, device = place
        states = self.table.lookup(keys).state.tolist()
        # A key on its way out can be stored when it is gone, and what follows it not before.
        able = states.index(EVICTING) if EVICTING in states else len(keys)
        new = states[:able].count(SlotState.EMPTY)
        if new:
            self.eviction.make_room(node, device, size_bytes, new)
            absent = self.table.find(keys[:able]) < 0
            room = self.eviction.make_slots(int(absent.sum()), keep=keys)
            able = int((absent.cumsum() <= room).sum())
        refusals: list[KeyResult | None] = [KeyResult.NO_SPACE] * len(keys)
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
            self._tickets.setdefault(ticket, set()).update(mine)
            self.clock.call_at(
                self.clock.now() + self.write_deadline_s, self._expire_writes, mine, ticket
            )
        return AllocateReply(node, device, tuple(refusals), ticket)

    def register(
        self, ticket: Hashable, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes] = ()
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
            self._written(ticket, keys)
            self.counters.registered += len(keys)
            self.table.touch(chain or keys)
        return [KeyResult.STORED] * len(good) + [KeyResult.LEASE_EXPIRED] * (
            len(blocks) - len(good)
        )

    def abort(self, ticket: Hashable) -> None:
        """Give up the keys that are still WRITING under a ticket; unknown ones are no error."""
        self._give_up(ticket, list(self._tickets.get(ticket, ())))

    def _give_up(self, ticket: Hashable, keys: Sequence[bytes]) -> None:
        if keys:
            self._written(ticket, keys)
            self.table.remove(keys)

    def _written(self, ticket: Hashable, keys: Sequence[bytes]) -> None:
        """Note that keys are not WRITING under the ticket any more."""
        for key in keys:
            del self._writing[key]
        left = self._tickets[ticket]
        left.difference_update(keys)
        if not left:
            del self._tickets[ticket]

    def _expire_writes(self, keys: Sequence[bytes], ticket: Hashable) -> None:
        late = [key for key in keys if self._writing.get(key) == ticket]
        self.counters.writes_expired += len(late)
        self._give_up(ticket, late)

    # -- space ----------------------------------------------------------------------------------

    def _choose_node(self, size_bytes: int, avoid: Collection[int]) -> int | None:
        names = sorted(self.nodes.keys() - set(avoid))
        if not names:
            return None
        if self.policy is NodePolicy.MOST_FREE:
            return max(names, key=lambda name: (self._free_bytes(name, size_bytes), -name))
        self._turn += 1
        return names[(self._turn - 1) % len(names)]

    def _free_bytes(self, name: int, size_bytes: int) -> int:
        node = self.nodes[name]
        return sum(node.space(number, size_bytes).free_bytes for number in range(node.device_count))

    def evict(self, keys: Sequence[bytes]) -> int:
        """Make READY keys unfindable; their extents come back when no lease is left."""
        return self.eviction.evict(keys)

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

    # -- clients and nodes that end or begin ----------------------------------------------------

    def drop_client(self, member: int) -> None:
        """Give back everything that is held under names ``(member, ...)``."""
        for reader in [r for r in self._leases if isinstance(r, tuple) and r[0] == member]:
            self.release(reader)
        for ticket in [t for t in self._tickets if isinstance(t, tuple) and t[0] == member]:
            self.abort(ticket)

    def add_node(self, node: NodeService) -> None:
        """Let a node take part; what it has comes by ``adopt``."""
        self.nodes[node.node] = node

    def adopt(self, blocks: Sequence[RemoteBlock]) -> list[RemoteBlock]:
        """Take in what a node has, oldest first; return what is not wanted: known or no room."""
        refused = []
        room = self.table.max_objects - len(self.table)
        fresh = self.table.find([block.key for block in blocks]) < 0
        taken: list[RemoteBlock] = []
        for block, new in zip(blocks, fresh.tolist(), strict=True):
            if new and len(taken) < room:
                taken.append(block)
            else:
                refused.append(block)
        if taken:
            keys = [block.key for block in taken]
            self.table.insert(
                keys,
                node=[block.node for block in taken],
                device=[block.device for block in taken],
                address=[block.address for block in taken],
                length=[block.size_bytes for block in taken],
                generation=[block.generation for block in taken],
            )
            self.table.set_state(keys, SlotState.WRITING, SlotState.READY)
            # Blocks of a chain were stored head first, and heads must be the newest.
            self.table.touch(keys)
        return refused

    def forget_node(self, node: int) -> None:
        """Forget everything on a node that is gone, and the leases on it."""
        self.nodes.pop(node, None)
        slots = self.table.slots
        here = slots["node"] == node
        for state in (SlotState.READY, SlotState.EVICTING):
            rows = slots[here & (slots["state"] == int(state))]
            keys = [bytes(key) for key in rows["key"]]
            if keys:
                self.eviction.forget(keys)
                self.table.remove(keys)

    # -- housekeeping ---------------------------------------------------------------------------

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody."""
        return {
            "leases": len(self._leases),
            "leased keys": len(self.eviction.leased),
            "writing slots": len(self._writing),
            "evicting slots": len(self.eviction.retiring),
        }
