"""CMM-H against a simple model: contents by address, and an LRU list of granules.

The model predicts every hit, miss, eviction and write-back exactly: the cache is fully
associative, objects are whole granules, and calls do not overlap.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlbench.devices import cmm_h, cmm_h_cache
from cxlbench.devices.policies.lru import LruPolicy
from tests.devices.cmm_h_rig import GRANULE, Host, small_profile

CAPACITY = 8
PER_SLOT = 3
slots = st.integers(0, 5)


class Model:
    """What must be cached, valid and dirty."""

    def __init__(self) -> None:
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.valid: set[int] = set()
        self.dirty: dict[int, range] = {}
        self.pins: dict[int, int] = {}
        self.hits = self.misses = self.evictions = self.written_back = 0

    def fits(self, granules: range) -> bool:
        held = {g for g, n in self.pins.items() if n}
        return len(held | set(granules)) <= CAPACITY

    def pin(self, granules: range) -> None:
        for granule in granules:
            if granule in self.lru:
                self.lru.move_to_end(granule)
            else:
                if len(self.lru) == CAPACITY:
                    self._evict()
                self.lru[granule] = None
            self.pins[granule] = self.pins.get(granule, 0) + 1

    def _evict(self) -> None:
        passed = []
        while self.pins.get(next(iter(self.lru)), 0):
            passed.append(self.lru.popitem(last=False)[0])
        victim = self.lru.popitem(last=False)[0]
        for granule in passed:
            self.lru[granule] = None
        self.valid.discard(victim)
        self.evictions += 1
        # A shorter object may lie where a longer one was: not every granule of a slot is its own.
        if victim in self.dirty.get(victim // PER_SLOT, ()):
            del self.dirty[victim // PER_SLOT]
            self.written_back += 1

    def unpin(self, granules: range) -> None:
        for granule in granules:
            self.pins[granule] -= 1

    def count_read(self, granules: range) -> None:
        hits = len(self.valid & set(granules))
        self.hits += hits
        self.misses += len(granules) - hits
        self.valid |= set(granules)


class CmmHMachine(RuleBasedStateMachine):
    """Rules are a host's calls; ``stage`` says how far each slot's object has come."""

    phantom = False
    eager = "false"

    def __init__(self) -> None:
        super().__init__()
        profile = small_profile(CAPACITY, eager_write_back=self.eager)
        self.host = Host(profile, phantom=self.phantom)
        self.device = self.host.device
        self.model = Model()
        self.stage: dict[int, str] = {}
        self.tags: dict[int, tuple[int, int]] = {}
        self.views: list[tuple[int, object]] = []
        self.next_tag = 1

    def address(self, slot: int) -> int:
        return slot * PER_SLOT * GRANULE

    def granules(self, slot: int) -> range:
        return range(slot * PER_SLOT, slot * PER_SLOT + self.tags[slot][1])

    def nbytes(self, slot: int) -> int:
        return self.tags[slot][1] * GRANULE

    @rule(slot=slots, count=st.integers(1, PER_SLOT))
    def admit(self, slot: int, count: int) -> None:
        if slot in self.stage:
            return
        self.tags[slot] = (self.next_tag, count)
        self.next_tag += 1
        assert self.device.admit(self.address(slot), count * GRANULE)
        self.stage[slot] = "admitted"

    @rule(slot=slots)
    def ready_to_receive(self, slot: int) -> None:
        if self.stage.get(slot) != "admitted" or not self.model.fits(self.granules(slot)):
            return
        self.model.pin(self.granules(slot))
        self.host.drive(self.device.ready_to_receive(self.address(slot)))
        self.stage[slot] = "ready"

    @rule(slot=slots)
    def receive(self, slot: int) -> None:
        if self.stage.get(slot) != "ready":
            return
        payload = self.host.content(self.tags[slot][0], self.nbytes(slot))
        self.device.receive(self.address(slot), payload, None)
        self.stage[slot] = "received"

    @rule(slot=slots)
    def commit(self, slot: int) -> None:
        if self.stage.get(slot) != "received":
            return
        self.device.commit(self.address(slot))
        self.model.unpin(self.granules(slot))
        self.model.valid |= set(self.granules(slot))
        self.model.dirty[slot] = self.granules(slot)
        self.stage[slot] = "committed"
        if self.eager == "true":
            self.write_back()

    @rule(slot=slots, count=st.integers(1, PER_SLOT))
    def store(self, slot: int, count: int) -> None:
        """Take one object all the way, so that caches fill in few steps."""
        for step in (self.ready_to_receive, self.receive, self.commit):
            self.admit(slot, count)
            step(slot)

    @rule(slot=slots)
    def cancel(self, slot: int) -> None:
        if self.stage.get(slot) in (None, "committed"):
            return
        if self.stage[slot] != "admitted":
            self.model.unpin(self.granules(slot))
        self.device.cancel(self.address(slot))
        self.forget(slot)

    @rule(slot=slots)
    def discard(self, slot: int) -> None:
        if self.stage.get(slot) != "committed" or any(slot == held for held, _ in self.views):
            return
        self.device.discard(self.address(slot), self.nbytes(slot))
        self.forget(slot)

    def forget(self, slot: int) -> None:
        self.model.valid -= set(self.granules(slot))
        self.model.dirty.pop(slot, None)
        del self.stage[slot], self.tags[slot]

    @rule(slot=slots)
    def open_view(self, slot: int) -> None:
        if self.stage.get(slot) != "committed" or not self.model.fits(self.granules(slot)):
            return
        self.model.pin(self.granules(slot))
        self.model.count_read(self.granules(slot))

        async def opened() -> object:
            view = await self.device.open_read(self.address(slot), self.nbytes(slot))
            into = await self.host.take(view, self.nbytes(slot))
            assert self.host.holds(into, self.tags[slot][0])
            return view

        self.views.append((slot, self.host.drive(opened())))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def close_view(self, data: st.DataObject) -> None:
        slot, view = self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))
        view.close()
        self.model.unpin(self.granules(slot))

    @rule(slot=slots)
    def read(self, slot: int) -> None:
        before = len(self.views)
        self.open_view(slot)
        if len(self.views) > before:
            slot, view = self.views.pop()
            view.close()
            self.model.unpin(self.granules(slot))

    @rule()
    def write_back(self) -> None:
        self.host.drive(self.device.quiesce())
        self.model.written_back += len(self.model.dirty)
        self.model.dirty.clear()

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        cache, model, counters = self.device.cache, self.model, self.device.counters
        assert len(cache) <= CAPACITY
        assert self.host.cached() == set(model.lru)
        assert cache.pins == sum(model.pins.values())
        assert (counters.hits, counters.misses) == (model.hits, model.misses)
        assert (cache.evictions, counters.written_back) == (model.evictions, model.written_back)
        assert counters.refilled_bytes == model.misses * GRANULE
        assert self.host.lost == []

    @invariant()
    def what_is_held_is_counted(self) -> None:
        held = {name: count for name, count in self.device.at_rest().items() if count}
        wanted = {
            "cache reservations": sum(stage != "committed" for stage in self.stage.values()),
            "cache readers": len(self.views),
            "cache pins": sum(self.model.pins.values()),
        }
        assert held == {name: count for name, count in wanted.items() if count}

    def teardown(self) -> None:
        for _, view in self.views:
            view.close()
        for slot in [slot for slot, stage in self.stage.items() if stage != "committed"]:
            self.device.cancel(self.address(slot))
            del self.stage[slot]
        for slot in self.stage:
            got = self.host.drive(self.host.read(self.address(slot), self.nbytes(slot)))
            assert self.host.holds(got, self.tags[slot][0])
        self.host.close()


class PhantomMachine(CmmHMachine):
    phantom = True


class EagerMachine(CmmHMachine):
    phantom = True
    eager = "true"


FEW = settings(max_examples=60, stateful_step_count=50, derandomize=True, deadline=None)

TestOnRam = CmmHMachine.TestCase
TestOnRam.settings = settings(FEW, max_examples=25)
TestOnTags = PhantomMachine.TestCase
TestOnTags.settings = FEW
TestEager = EagerMachine.TestCase
TestEager.settings = settings(FEW, max_examples=25)


def _forgets_dirty_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    async def skip(self, stored):
        parts = self._dirty_parts(stored)
        for _, line in parts:
            line.dirty = 0
        self.counters.written_back += bool(parts)

    monkeypatch.setattr(cmm_h.CmmH, "_write_back", skip)


def _evicts_pinned_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cmm_h_cache.Cache._frame

    def frame(self, granule):
        pinned = {line: line.pins for line in self._lines.values()}
        for line in pinned:
            line.pins = 0
        try:
            return original(self, granule)
        finally:
            for line, pins in pinned.items():
                line.pins = pins

    monkeypatch.setattr(cmm_h_cache.Cache, "_frame", frame)


def _valid_before_the_io(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(self, missing, runs, fill):
        for piece, line in missing:
            line.valid |= piece.mask
            self._fills.pop(line, None)
        self._unpin([line for _, line in missing])
        fill.done.set(None)

    monkeypatch.setattr(cmm_h.CmmH, "_fetch", fetch)


def _evicts_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LruPolicy, "evict", lambda self: self._order.popitem()[0])


def play(seed: int = 1, steps: int = 800) -> Model:
    """Play random rules by hand, with the invariants after each; return the model at the end."""
    draw = random.Random(seed)
    machine = PhantomMachine()
    on_slot = (machine.read, machine.open_view, machine.discard, machine.cancel)
    try:
        for _ in range(steps):
            slot = draw.randrange(6)
            choice = draw.randrange(10)
            if choice < 3:
                machine.store(slot, draw.randint(1, PER_SLOT))
            elif choice < 6:
                machine.read(slot)
            elif choice == 6 and machine.views:
                _, view = held = machine.views[0]
                machine.views.remove(held)
                view.close()
                machine.model.unpin(machine.granules(held[0]))
            elif choice == 7 and draw.random() < 0.2:
                machine.write_back()
            elif choice > 7:
                draw.choice(on_slot)(slot)
            machine.the_cache_is_what_the_model_says()
            machine.what_is_held_is_counted()
        return machine.model
    finally:
        machine.host.drive(machine.device.close())
        machine.host.clock.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_played_rules_reach_evictions_refills_and_write_backs(seed):
    model = play(seed)
    assert min(model.hits, model.misses, model.evictions, model.written_back) > 20


@pytest.mark.parametrize(
    "mutate",
    [_forgets_dirty_victims, _evicts_pinned_lines, _valid_before_the_io, _evicts_the_newest],
)
def test_the_model_catches(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        play()
