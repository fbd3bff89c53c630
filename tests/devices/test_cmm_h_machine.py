"""CMM-H against a simple model: contents by address, and an LRU list of granules.

Objects have up to five pages and a page of trailer, and lie seven pages apart, so that neighbours
share granules of two pages. Calls do not overlap, but readers and writers hold what they have
pinned over several of them. The model predicts every hit, miss, eviction and write-back exactly.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlbench.devices import cmm_h_cache, cmm_h_refill, cmm_h_write_back
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.pipe import finished
from tests.devices.cmm_h_rig import GRANULE, Host, small_profile

CAPACITY = 8
STRIDE = 7
SLOTS = 6
MOST_PAGES = 5
PER_GRANULE = GRANULE // PAGE_BYTES

slots = st.integers(0, SLOTS - 1)
sizes = st.integers(1, MOST_PAGES)


class Model:
    """What must be cached, valid and dirty; pages are numbered over the address space."""

    def __init__(self) -> None:
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.pages: dict[int, range] = {}
        """By slot: the pages of its object, its trailer included."""
        self.valid: set[int] = set()
        self.dirty: set[int] = set()
        self.pins: dict[int, int] = {}
        self.hits = self.misses = self.missed_pages = 0
        self.evictions = self.dirty_evictions = self.written_back = 0

    def granules(self, slot: int) -> range:
        pages = self.pages[slot]
        return range(pages.start // PER_GRANULE, (pages.stop - 1) // PER_GRANULE + 1)

    def fits(self, slot: int) -> bool:
        held = {g for g, n in self.pins.items() if n}
        return len(held | set(self.granules(slot))) <= CAPACITY

    def pin(self, slot: int) -> None:
        for granule in self.granules(slot):
            if granule in self.lru:
                self.lru.move_to_end(granule)
            else:
                if len(self.lru) == CAPACITY:
                    self._evict()
                self.lru[granule] = None
            self.pins[granule] = self.pins.get(granule, 0) + 1

    def _evict(self) -> None:
        victim = next(g for g in self.lru if not self.pins.get(g))
        # Who is pinned is in use: passed over, and as good as new.
        for passed in [g for g in self.lru if g != victim][: list(self.lru).index(victim)]:
            self.lru.move_to_end(passed)
        del self.lru[victim]
        inside = set(range(victim * PER_GRANULE, (victim + 1) * PER_GRANULE))
        if inside & self.dirty:
            self.dirty_evictions += 1
            for slot, pages in self.pages.items():
                if inside & self.dirty & set(pages):
                    self.clean(slot)
        self.valid -= inside
        self.evictions += 1

    def clean(self, slot: int) -> None:
        self.written_back += 1
        self.dirty -= set(self.pages[slot])

    def clean_all(self) -> None:
        for slot, pages in self.pages.items():
            if self.dirty & set(pages):
                self.clean(slot)

    def unpin(self, slot: int) -> None:
        for granule in self.granules(slot):
            self.pins[granule] -= 1
        self.let_empty_go(slot)

    def let_empty_go(self, slot: int) -> None:
        for granule in self.granules(slot):
            inside = range(granule * PER_GRANULE, (granule + 1) * PER_GRANULE)
            if not self.pins.get(granule) and not self.valid & set(inside):
                self.lru.pop(granule, None)

    def received(self, slot: int) -> None:
        self.valid |= set(self.pages[slot])
        self.dirty |= set(self.pages[slot])
        self.unpin(slot)

    def dropped(self, slot: int) -> None:
        self.valid -= set(self.pages[slot])
        self.dirty -= set(self.pages[slot])

    def read(self, slot: int) -> None:
        for granule in self.granules(slot):
            inside = set(range(granule * PER_GRANULE, (granule + 1) * PER_GRANULE))
            missing = inside & set(self.pages[slot]) - self.valid
            self.hits += not missing
            self.misses += bool(missing)
            self.missed_pages += len(missing)
        self.valid |= set(self.pages[slot])


class CmmHMachine(RuleBasedStateMachine):
    """Rules are a host's calls; ``stage`` says how far each slot's object has come."""

    phantom = False
    eager = "false"

    def __init__(self) -> None:
        super().__init__()
        profile = small_profile(CAPACITY, eager_write_back=self.eager)
        self.host = Host(profile, phantom=self.phantom, trailer_bytes=PAGE_BYTES)
        self.device = self.host.device
        self.model = Model()
        self.stage: dict[int, str] = {}
        self.tags: dict[int, int] = {}
        self.views: list[tuple[int, object]] = []
        self.next_tag = 1

    def address(self, slot: int) -> int:
        return slot * STRIDE * PAGE_BYTES

    def nbytes(self, slot: int) -> int:
        return (len(self.model.pages[slot]) - 1) * PAGE_BYTES

    @rule(slot=slots, pages=sizes)
    def admit(self, slot: int, pages: int) -> None:
        if slot in self.stage:
            return
        self.tags[slot] = self.next_tag
        self.next_tag += 1
        self.model.pages[slot] = range(slot * STRIDE, slot * STRIDE + pages + 1)
        assert self.device.admit(self.address(slot), pages * PAGE_BYTES)
        self.stage[slot] = "admitted"

    @rule(slot=slots)
    def ready_to_receive(self, slot: int) -> None:
        """Make an object ready for its WRITE, or for a second one before its commit."""
        if self.stage.get(slot) not in ("admitted", "received") or not self.model.fits(slot):
            return
        self.model.pin(slot)
        self.model.dropped(slot)
        self.host.drive(self.device.ready_to_receive(self.address(slot)))
        self.stage[slot] = "ready"

    @rule(slot=slots)
    def receive(self, slot: int) -> None:
        if self.stage.get(slot) != "ready":
            return
        tag = self.tags[slot]
        payload = self.host.content(tag, self.nbytes(slot))

        async def take() -> None:
            self.device.receive(self.address(slot), payload, self.host.trailer(tag))

        self.host.drive(take())
        self.model.received(slot)
        self.stage[slot] = "received"
        if self.eager == "true":
            self.write_back()

    @rule(slot=slots)
    def commit(self, slot: int) -> None:
        if self.stage.get(slot) != "received":
            return
        self.device.commit(self.address(slot))
        self.stage[slot] = "committed"

    @rule(slot=slots, pages=sizes)
    def store(self, slot: int, pages: int) -> None:
        """Take one object all the way, so that caches fill in few steps."""
        for step in (self.ready_to_receive, self.receive, self.commit):
            self.admit(slot, pages)
            step(slot)

    @rule(slot=slots)
    def cancel(self, slot: int) -> None:
        if self.stage.get(slot) in (None, "committed"):
            return
        self.device.cancel(self.address(slot))
        self.forget(slot)

    @rule(slot=slots)
    def discard(self, slot: int) -> None:
        if self.stage.get(slot) != "committed" or any(slot == held for held, _ in self.views):
            return
        self.device.discard(self.address(slot), self.nbytes(slot))
        self.forget(slot)

    def forget(self, slot: int) -> None:
        self.model.dropped(slot)
        if self.stage[slot] == "ready":
            self.model.unpin(slot)
        self.model.let_empty_go(slot)
        del self.stage[slot], self.tags[slot], self.model.pages[slot]

    @rule(slot=slots)
    def open_view(self, slot: int) -> None:
        if self.stage.get(slot) != "committed" or not self.model.fits(slot):
            return
        self.model.pin(slot)
        self.model.read(slot)
        tag, nbytes = self.tags[slot], self.nbytes(slot)

        async def opened() -> object:
            view = await self.device.open_read(self.address(slot), nbytes)
            into, trailer = self.device.arena.buffer(nbytes), self.host.trailer(0)
            booking = view.port.reserve(nbytes)
            await view.arrived()
            view.copy_into(into, trailer, None)
            await finished(self.host.clock, *view.bookings, booking)
            assert self.host.holds(into, tag), f"object {tag} is something else"
            assert (trailer == self.host.trailer(tag)).all()
            return view

        self.views.append((slot, self.host.drive(opened())))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def close_view(self, data: st.DataObject) -> None:
        self.close_one(data.draw(st.integers(0, len(self.views) - 1)))

    def close_one(self, index: int) -> None:
        slot, view = self.views.pop(index)
        view.close()
        self.model.unpin(slot)

    @rule(slot=slots)
    def read(self, slot: int) -> None:
        before = len(self.views)
        self.open_view(slot)
        if len(self.views) > before:
            self.close_one(-1)

    @rule()
    def write_back(self) -> None:
        self.host.drive(self.device.quiesce())
        self.model.clean_all()

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        model, counters = self.model, self.device.counters
        assert self.host.cached() == set(model.lru)
        assert self.device.cache.pins >= sum(model.pins.values())
        assert (counters.hits, counters.misses) == (model.hits, model.misses)
        assert counters.evictions == model.evictions
        assert counters.dirty_evictions == model.dirty_evictions
        assert counters.written_back == model.written_back
        assert counters.missed_bytes == counters.refilled_bytes == model.missed_pages * PAGE_BYTES
        assert self.host.lost == []

    @invariant()
    def what_is_held_is_counted(self) -> None:
        held = self.device.at_rest()
        assert held["cache reservations"] == sum(s != "committed" for s in self.stage.values())
        assert held["cache readers"] == len(self.views)
        assert bool(held["cache pins"]) == any(self.model.pins.values())
        assert held["refills"] == 0

    def teardown(self) -> None:
        while self.views:
            self.close_one(0)
        for slot in [slot for slot, stage in self.stage.items() if stage != "committed"]:
            self.cancel(slot)
        for slot in self.stage:
            self.read(slot)
        self.the_cache_is_what_the_model_says()
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


def play(machine_type: type[CmmHMachine] = PhantomMachine, steps: int = 800) -> Model:
    """Play random rules by hand, with the invariants after each; return the model at the end."""
    draw = random.Random(1)
    machine = machine_type()
    rules = [machine.store] * 4 + [machine.read] * 3 + [machine.open_view, machine.discard]
    rules += [machine.ready_to_receive, machine.receive, machine.commit, machine.cancel]
    try:
        for _ in range(steps):
            act = draw.choice(rules)
            slot = draw.randrange(SLOTS)
            if act == machine.store:
                act(slot, draw.randint(1, MOST_PAGES))
            else:
                act(slot)
            if machine.views and draw.random() < 0.5:
                machine.close_one(draw.randrange(len(machine.views)))
            if draw.random() < 0.02:
                machine.write_back()
            machine.the_cache_is_what_the_model_says()
            machine.what_is_held_is_counted()
        return machine.model
    finally:
        machine.host.abandon()


@pytest.mark.parametrize("machine", [CmmHMachine, PhantomMachine])
def test_the_played_rules_reach_evictions_refills_and_write_backs(machine):
    model = play(machine)
    assert min(model.hits, model.misses, model.dirty_evictions, model.written_back) > 20
    assert model.evictions > model.dirty_evictions + 20


def _dirty_victims_are_forgotten(monkeypatch):
    async def skip(self, address, extents):
        return True

    monkeypatch.setattr(cmm_h_write_back.WriteBack, "_try_write", skip)


def _dirty_victims_are_reused_at_once(monkeypatch):
    monkeypatch.setattr(
        cmm_h_cache.Cache, "may_go", lambda self, line: not (line.pins or line.transfers)
    )


def _pinned_lines_are_evicted(monkeypatch):
    monkeypatch.setattr(cmm_h_cache.Cache, "in_use", lambda self, line: False)
    monkeypatch.setattr(cmm_h_cache.Cache, "may_go", lambda self, line: not line.dirty)


def _pages_are_valid_without_their_bytes(monkeypatch):
    fetch = cmm_h_refill.MissEngine._fetch

    def hasty(self, reads, missing, fill, wanted):
        return fetch(self, [], missing, fill, wanted)

    monkeypatch.setattr(cmm_h_refill.MissEngine, "_fetch", hasty)


def _discarded_pages_stay_valid(monkeypatch):
    monkeypatch.setattr(cmm_h_cache.Cache, "drop", lambda self, pieces, address: None)


def _the_newest_is_evicted(monkeypatch):
    monkeypatch.setattr(LruPolicy, "evict", lambda self: self._order.popitem()[0])


@pytest.mark.parametrize(
    "mutate",
    [
        _dirty_victims_are_forgotten,
        _dirty_victims_are_reused_at_once,
        _pinned_lines_are_evicted,
        _pages_are_valid_without_their_bytes,
        _discarded_pages_stay_valid,
        _the_newest_is_evicted,
    ],
)
@pytest.mark.parametrize("machine", [CmmHMachine, PhantomMachine])
@pytest.mark.usefixtures("broken_on_purpose")
def test_the_machine_catches(monkeypatch, machine, mutate):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        play(machine)
