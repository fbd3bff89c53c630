"""Master against a model of a dict, leases and an order of age; and mutants that it must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cxlbench.emu.clock import VirtualClock
from cxlbench.hymcache.master import AllocateReply, LookupReply, Master, RemoteBlock
from cxlbench.hymcache.slot_table import SlotState
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import chain
from tests.hymcache.test_master import SIZE, Note

POOL = chain(9)
ROOM = 7
LEASE_S = WRITE_S = 11.0
PLACE = {key: number for number, key in enumerate(POOL)}
some_keys = st.lists(st.sampled_from(POOL), min_size=1, max_size=5, unique=True).map(
    lambda keys: sorted(keys, key=PLACE.__getitem__)
)
readers = st.sampled_from(["a", "b", "c"])
picks = st.integers(0, 99)


class Entry:
    """What the model knows of one key."""

    def __init__(self, node: int, ticket: int, until: float) -> None:
        self.state = SlotState.WRITING
        self.node, self.ticket, self.until = node, ticket, until
        self.generation = 0
        self.block: RemoteBlock | None = None


class MasterMachine(RuleBasedStateMachine):
    """Steps of clients, nodes and time."""

    master_type: type[Master] = Master

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.nodes = {0: Note(0), 1: Note(1)}
        self.names = count(1)
        self.master = self.master_type(
            self.clock, self.nodes, max_objects=ROOM, lease_s=LEASE_S, write_deadline_s=WRITE_S
        )
        self.entries: dict[bytes, Entry] = {}
        self.age: list[bytes] = []
        self.leases: dict[str, tuple[float, Counter[bytes]]] = {}
        self.freed: Counter[tuple[bytes, int]] = Counter()
        self.tickets: list[tuple[AllocateReply, list[bytes]]] = []
        self.generation = 0

    # -- the model ------------------------------------------------------------------------------

    def leased(self, key: bytes) -> bool:
        return any(key in keys for _, keys in self.leases.values())

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.entries:
                self.age.remove(key)
                self.age.append(key)

    def forget(self, key: bytes) -> None:
        del self.entries[key]
        self.age.remove(key)

    def retire(self, keys: Sequence[bytes]) -> None:
        """Evicted keys go for good as soon as nobody has a lease on them."""
        for key in keys:
            entry = self.entries.get(key)
            if entry and entry.state is SlotState.EVICTING and not self.leased(key):
                self.freed[(key, entry.generation)] += 1
                self.forget(key)

    def evict_in_model(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            entry = self.entries.get(key)
            if entry and entry.state is SlotState.READY:
                entry.state = SlotState.EVICTING
        self.retire(keys)

    def release_in_model(self, reader: str) -> None:
        _, keys = self.leases.pop(reader, (0.0, Counter[bytes]()))
        self.retire(list(keys))

    # -- steps ----------------------------------------------------------------------------------

    @rule(reader=readers, keys=some_keys, used=some_keys)
    def look_up(self, reader: str, keys: list[bytes], used: list[bytes]) -> None:
        reply = self.master.lookup(reader, keys, used=used)
        expected = []
        for key in keys:
            entry = self.entries.get(key)
            ready = entry is not None and entry.state is SlotState.READY
            expected.append(entry.block if ready and entry else None)
        assert reply.blocks == tuple(expected)
        hits = [block.key for block in expected if block is not None]
        until = self.clock.now() + LEASE_S
        assert reply.lease_until_s == until
        if hits or reader in self.leases:
            had = self.leases.get(reader, (0.0, Counter[bytes]()))[1]
            self.leases[reader] = (until, had + Counter(hits))
        self.touch([*used, *hits])

    @rule(reader=readers)
    def release(self, reader: str) -> None:
        self.master.release(reader)
        self.release_in_model(reader)

    @rule(keys=some_keys, node=st.sampled_from([0, 1]))
    def allocate(self, keys: list[bytes], node: int) -> None:
        reply = self.master.allocate(next(self.names), keys, SIZE, near=(node, 0))
        expected: list[KeyResult | None] = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or entry.state is not SlotState.READY or entry.block is None:
                break
            node = entry.block.node
        assert reply.node == node
        states = [self.entries[k].state if k in self.entries else None for k in keys]
        able = states.index(SlotState.EVICTING) if SlotState.EVICTING in states else len(keys)
        new = states[:able].count(None)
        room = ROOM - len(self.entries)
        if new and room < new:
            victims = [
                key
                for key in self.age
                if self.entries[key].state is SlotState.READY
                and not self.leased(key)
                and key not in keys
            ]
            self.evict_in_model(victims[: new - room])
            room = ROOM - len(self.entries)
        inserted = []
        for index, key in enumerate(keys):
            if index < able and key in self.entries:
                expected.append(KeyResult.EXISTS)
            elif index < able and room:
                room -= 1
                expected.append(None)
                inserted.append(key)
            else:
                able = min(able, index)
                expected.append(KeyResult.NO_SPACE)
        assert reply.refusals == tuple(expected)
        for key in reversed(inserted):
            self.entries[key] = Entry(node, reply.ticket, self.clock.now() + WRITE_S)
            self.age.append(key)
        self.tickets.append((reply, inserted))

    @rule(keys=some_keys, node=st.sampled_from([0, 1]))
    def put(self, keys: list[bytes], node: int) -> None:
        self.allocate(keys, node)
        self.register_blocks(len(self.tickets) - 1, 0, None, keys)

    @rule(
        pick=picks,
        first=st.sampled_from([0, 0, 0, 1]),
        lost=st.sampled_from([None, 0, 1]),
        used=some_keys,
    )
    def register(self, pick: int, first: int, lost: int | None, used: list[bytes]) -> None:
        if self.tickets:
            self.register_blocks(
                len(self.tickets) - 1 - pick % len(self.tickets[-3:]), first, lost, used
            )

    def register_blocks(self, number: int, first: int, lost: int | None, used: list[bytes]) -> None:
        reply, keys = self.tickets[number]
        keys = keys[first:]
        missing = set() if lost is None else set(keys[lost : lost + 1])
        self.nodes[reply.node].lost = missing
        blocks = []
        for key in keys:
            self.generation += 1
            blocks.append(
                RemoteBlock(key, reply.node, 0, self.generation * SIZE, SIZE, self.generation)
            )
        answers = self.master.register(reply.ticket, blocks, chain=used)
        good: list[RemoteBlock] = []
        for block in blocks:
            entry = self.entries.get(block.key)
            if entry is None or entry.state is not SlotState.WRITING:
                break
            if entry.ticket != reply.ticket or block.key in missing:
                break
            good.append(block)
        short = len(blocks) - len(good)
        assert answers == [KeyResult.STORED] * len(good) + [KeyResult.LEASE_EXPIRED] * short
        for block in good:
            entry = self.entries[block.key]
            entry.state, entry.block = SlotState.READY, block
            entry.generation = block.generation
        if good:
            self.touch(used)

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        if not self.tickets:
            return
        reply, _ = self.tickets[pick % len(self.tickets)]
        self.master.abort(reply.ticket)
        for key in list(self.entries):
            entry = self.entries.get(key)
            if entry and entry.state is SlotState.WRITING and entry.ticket == reply.ticket:
                self.forget(key)

    @rule(keys=some_keys)
    def evict(self, keys: list[bytes]) -> None:
        self.master.evict(keys)
        self.evict_in_model(keys)

    @rule(key=st.sampled_from(POOL), older=st.integers(0, 1), node=st.sampled_from([0, 1]))
    def gone(self, key: bytes, older: int, node: int) -> None:
        entry = self.entries.get(key)
        generation = max(0, (entry.generation if entry else 1) - older)
        self.master.gone(node, key, generation)
        if entry and entry.node == node and not older:
            self.evict_in_model([key])

    @rule(delay_s=st.sampled_from([0.5, 4.0, 7.0, 11.5]))
    def pass_time(self, delay_s: float) -> None:
        async def wait() -> None:
            await self.clock.sleep(delay_s)

        self.clock.run(wait())
        now = self.clock.now()
        for key, entry in list(self.entries.items()):
            if entry.state is SlotState.WRITING and entry.until <= now:
                self.forget(key)
        for reader, (until, _) in list(self.leases.items()):
            if until <= now:
                self.release_in_model(reader)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def table_is_as_the_model_says(self) -> None:
        table = self.master.table
        table.check()
        found = table.lookup(POOL)
        for key, state, generation in zip(
            POOL, found.state.tolist(), found.generation.tolist(), strict=True
        ):
            entry = self.entries.get(key)
            assert state == (SlotState.EMPTY if entry is None else entry.state)
            assert generation == (0 if entry is None else entry.generation)
        assert list(table.oldest_first()) == self.age

    @invariant()
    def space_came_back_once_and_only_without_a_lease(self) -> None:
        assert self.freed == sum([Counter(n.freed) for n in self.nodes.values()], Counter())
        for key, _ in self.freed:
            entry = self.entries.get(key)
            assert (
                entry is None
                or entry.generation == 0
                or (key, entry.generation) not in (self.freed)
            )

    @invariant()
    def counts_of_what_is_held_are_right(self) -> None:
        states = Counter(entry.state for entry in self.entries.values())
        assert self.master.at_rest() == {
            "leases": len(self.leases),
            "leased keys": len({key for _, keys in self.leases.values() for key in keys}),
            "writing slots": states[SlotState.WRITING],
            "evicting slots": states[SlotState.EVICTING],
        }

    def teardown(self) -> None:
        try:
            self.pass_time(11.5)
            assert not any(self.master.at_rest().values())
            self.table_is_as_the_model_says()
        finally:
            self.clock.close()


def run(
    machine: type[RuleBasedStateMachine],
    *,
    examples: int = 60,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    """Run a machine; a mutant's failure needs no shrinking."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_master_does_what_a_simple_model_does() -> None:
    run(MasterMachine)


# -- mutants --------------------------------------------------------------------------------------


class FreesUnderALease(Master):
    """Does not look whether somebody has a lease before the space goes back."""

    def evict(self, keys: Sequence[bytes]) -> int:
        leased, self.eviction.leased = self.eviction.leased, {}
        moved = super().evict(keys)
        self.eviction.leased = leased
        return moved


class EndsALeaseForAll(Master):
    """Forgets that other readers have a lease on the same key."""

    def release(self, reader: Hashable) -> None:
        lease = self._leases.get(reader)
        if lease is not None:
            for key in lease.keys:
                self.eviction.leased[key] = lease.keys.count(key)
        super().release(reader)


class RegistersTailsWithoutHead(Master):
    """Goes on after a block that cannot be registered."""

    def register(
        self, ticket: int, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes] = ()
    ) -> list[KeyResult]:
        return [
            super(RegistersTailsWithoutHead, self).register(ticket, [b], chain=chain)[0]
            for b in blocks
        ]


class RegistersForAnybody(Master):
    """Does not look whose write it is."""

    def register(
        self, ticket: int, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes] = ()
    ) -> list[KeyResult]:
        for block in blocks:
            if block.key in self._writing:
                self._writing[block.key] = ticket
        return super().register(ticket, blocks, chain=chain)


class ForgetsAnyGeneration(Master):
    """Believes every word that an object is gone, however old."""

    def gone(self, node: int, key: bytes, generation: int) -> None:
        found = self.table.lookup([key])
        super().gone(int(found.node[0]), key, int(found.generation[0]))


class TouchesInTheWrongOrder(Master):
    """Makes the tail of a chain the newest."""

    def lookup(
        self, reader: Hashable, keys: Sequence[bytes], *, used: Sequence[bytes] = ()
    ) -> LookupReply:
        reply = super().lookup(reader, keys, used=used)
        self.table.touch([block.key for block in reply.blocks if block is not None][::-1])
        return reply


class NeverEndsAWrite(Master):
    """Has no deadline for writers."""

    def _expire_writes(self, keys: Sequence[bytes], ticket: int) -> None:
        pass


@pytest.mark.parametrize(
    "mutant",
    [
        FreesUnderALease,
        EndsALeaseForAll,
        RegistersTailsWithoutHead,
        RegistersForAnybody,
        ForgetsAnyGeneration,
        TouchesInTheWrongOrder,
        NeverEndsAWrite,
    ],
)
def test_the_machine_notices_a_master_that(mutant: type[Master]) -> None:
    machine = type("Mutant", (MasterMachine,), {"master_type": mutant})
    with pytest.raises((AssertionError, KeyError)):
        run(machine, examples=400, phases=[Phase.generate])
