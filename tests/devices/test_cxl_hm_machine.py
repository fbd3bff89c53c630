"""CXL-HM against a model of dictionaries: any order of calls, with I/O and faults in between.

The model knows who holds which frames, and what a read must find. It is told what time alone
decides: how many flushes have ended. Where nothing is in flight, frames are counted exactly.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.emu.clock import DeadlockError
from cxlbench.emu.faults import Fault
from cxlbench.emu.status import DeviceError, Status
from cxlbench.harness.held_clock import HeldVirtualClock
from tests.devices import test_cxl_hm_mutants as mutants
from tests.devices.cxl_hm_rig import FRAME, SIZE, HmRig, at

STAGING, RESERVE, BUFFER, DEPTH = 12, 4, 6, 5
SLOTS = st.integers(0, 3)
SIZES = st.sampled_from([100, SIZE, 3 * FRAME + 1])
PICKS = st.integers(0, 1000)


def frames_of(size):
    return -(-size // FRAME)


class ArmedFaults:
    """Faults that a test arms, for the next visits of a point."""

    def __init__(self):
        self.armed = Counter()

    def draw(self, point, name=""):
        if not self.armed[point]:
            return None
        self.armed[point] -= 1
        return Fault("error")


@dataclass(eq=False)
class Stored:
    """One object: what its owner did with it, and whether the device still buffers it."""

    slot: int
    version: int
    size: int
    state: str = "reserved"
    buffered: bool = True
    discarded: bool = False
    lost: bool = False


@dataclass(eq=False)
class Staged:
    """What is staged of a slot, and by whom it is held."""

    slot: int
    size: int
    requests: list[object] = field(default_factory=list)
    failed: bool = False


class CxlHmMachine(RuleBasedStateMachine):
    """The device under any order of calls."""

    phantom = True
    device_type = CxlHm

    def __init__(self):
        super().__init__()
        self.clock = HeldVirtualClock()
        self.faults = ArmedFaults()
        self.rig = HmRig(
            phantom=self.phantom,
            clock=self.clock,
            faults=self.faults,
            device_type=self.device_type,
            dram_capacity=(STAGING + BUFFER) * FRAME,
            write_buffer_share=BUFFER / (STAGING + BUFFER),
            prefetch_depth=DEPTH,
        )
        self.device = self.rig.device
        self.device.on_lost = self.lose
        self.versions = 0
        self.now: dict[int, Stored] = {}
        """What each slot holds, for its owner."""
        self.queue: list[Stored] = []
        """Committed and not flushed, in order; the first ones are in flight."""
        self.ended = 0
        self.staged: dict[int, Staged] = {}
        self.held: list[tuple[object, Staged | None]] = []
        self.reading: list[tuple[object, Stored]] = []
        self.events: Counter[str] = Counter()

    def teardown(self):
        for request, _ in self.held:
            self.device.chm_prefetch_release(request)
        for stored in self.now.values():
            if stored.state in ("reserved", "received"):
                self.device.cancel(at(stored.slot))
        for job, _ in self.reading:
            self.drive(job.ended())
        try:
            self.drive(self.rig.settle())
        finally:
            with contextlib.suppress(Exception):
                self.drive(self.device.close())
            self.clock.close()

    def drive(self, work):
        """Run ``work`` and what is due with it, then note which flushes have ended."""

        async def whole():
            result = await work
            await self.clock.sleep(0)
            return result

        result = self.clock.drive(whole())
        counters = self.device.counters
        ended = counters.flushed + counters.lost
        for stored in self.queue[: ended - self.ended]:
            stored.buffered = False
        del self.queue[: ended - self.ended]
        self.ended = ended
        return result

    def lose(self, address):
        counters = self.device.counters
        stored = self.queue[counters.flushed + counters.lost - self.ended - 1]
        assert at(stored.slot) == address
        stored.lost = True
        self.events["lost"] += 1

    @property
    def quiet(self):
        """Whether the model knows all frames: no read or staging is in flight."""
        return not self.reading and not self.device.ssds.reads_in_flight

    # -- what the model expects ----------------------------------------------------------------

    def buffer_frames(self):
        open_ones = [s for s in self.now.values() if s.state in ("reserved", "received")]
        return sum(frames_of(stored.size) for stored in (*open_ones, *self.queue))

    def groups(self):
        return list({id(group): group for _, group in self.held if group is not None}.values())

    def staging_frames(self):
        return sum(frames_of(group.size) for group in self.groups())

    def readable(self, slot):
        stored = self.now.get(slot)
        return stored is not None and stored.state == "committed" and not stored.lost

    def judge(self, found, stored, *, fault=False):
        """A read of a committed object finds it, or fails if a fault was injected."""
        if fault and found is Status.IO_ERROR:
            self.events["read error"] += 1
            return
        if stored.discarded or stored.lost:
            assert found in (None, Status.BOUNDS, (stored.slot, stored.version)) or (
                found[0] == stored.slot and found[1] in self.committed_versions(stored.slot)
            )
        else:
            assert found == (stored.slot, stored.version)
            self.events["read"] += 1

    def committed_versions(self, slot):
        stored = self.now.get(slot)
        return [stored.version] if stored is not None and stored.state == "committed" else []

    # -- writes --------------------------------------------------------------------------------

    @rule(slot=SLOTS, size=SIZES)
    def admit(self, slot, size):
        old = self.now.get(slot)
        if old is not None:
            if old.buffered:
                with pytest.raises(ValueError, match="already being written"):
                    self.device.admit(at(slot), size)
            return
        fits = self.buffer_frames() + frames_of(size) <= BUFFER
        given = self.device.admit(at(slot), size)
        if self.quiet:
            assert given == fits
        else:
            assert fits or not given
        if given:
            self.versions += 1
            self.now[slot] = Stored(slot, self.versions, size)
        else:
            self.events["write refused"] += 1

    @rule(slot=SLOTS)
    def receive(self, slot):
        stored = self.now.get(slot)
        if stored is None or stored.state == "committed":
            status = self.drive(self.rig.send(slot, 10**6, 100))
            assert status is Status.NO_OBJECT
            return
        assert self.drive(self.rig.send(slot, stored.version, stored.size)) is Status.OK
        stored.state = "received"

    @rule(slot=SLOTS)
    def commit(self, slot):
        stored = self.now.get(slot)
        if stored is None or stored.state != "received":
            with pytest.raises(DeviceError, match="nothing received"):
                self.device.commit(at(slot))
            return
        self.device.commit(at(slot))
        stored.state = "committed"
        self.queue.append(stored)
        self.staged.pop(slot, None)
        self.drive(self.clock.gather())

    @rule(slot=SLOTS, size=SIZES, flush=st.booleans())
    def store(self, slot, size, flush):
        """The usual way of an object, in one step."""
        self.discard(slot)
        self.admit(slot, size)
        self.receive(slot)
        self.commit(slot)
        if flush:
            self.let_time_pass(500.0)

    @rule(slot=SLOTS)
    def cancel(self, slot):
        stored = self.now.get(slot)
        if stored is None or stored.state == "committed":
            with pytest.raises(ValueError, match="no open reservation"):
                self.device.cancel(at(slot))
            return
        self.device.cancel(at(slot))
        del self.now[slot]

    @rule(slot=SLOTS)
    def discard(self, slot):
        stored = self.now.get(slot)
        if stored is None or stored.state != "committed":
            return
        in_flight = self.device.write_buffer.flushing
        self.device.discard(at(slot), stored.size)
        stored.discarded = True
        del self.now[slot]
        self.staged.pop(slot, None)
        if stored in self.queue[in_flight:]:
            self.queue.remove(stored)
            self.events["discarded before its flush"] += 1
        elif stored in self.queue:
            self.events["discarded in its flush"] += 1

    @rule(slot=SLOTS)
    def renew(self, slot):
        """An address is used again, for an object of the same size."""
        stored = self.now.get(slot)
        if stored is not None and stored.state == "committed":
            self.store(slot, stored.size, flush=True)

    # -- reads ---------------------------------------------------------------------------------

    @rule()
    def prefetch_everything(self):
        for slot in range(4):
            self.prefetch(slot)

    @rule(slot=SLOTS)
    def prefetch(self, slot):
        stored = self.now.get(slot)
        size = stored.size if stored is not None else SIZE
        buffered = stored is not None and stored.buffered
        group = self.staged.get(slot)
        if group is not None and group.size != size:
            group = None
        free = STAGING - self.staging_frames()
        fits = buffered or group is not None or free - frames_of(size) >= RESERVE
        given = self.device.chm_prefetch_object(at(slot), size)
        if len(self.held) >= DEPTH or self.quiet:
            assert (given is not None) == (fits and len(self.held) < DEPTH)
        elif not fits:
            assert given is None
        if given is None:
            self.events["prefetch refused"] += 1
        elif buffered:
            self.held.append((given, None))
        else:
            if group is None:
                group = self.staged[slot] = Staged(slot, size)
            elif group.requests:
                self.events["shared"] += 1
            group.requests.append(given)
            self.held.append((given, group))
        armed = self.faults.armed["ssd.read"]
        self.drive(self.clock.gather())
        if self.faults.armed["ssd.read"] < armed and group is not None:
            group.failed = True
            self.staged.pop(slot, None)

    @precondition(lambda self: self.held)
    @rule(pick=PICKS)
    def wait(self, pick):
        request, group = self.held[pick % len(self.held)]
        if group is not None and group.failed:
            with pytest.raises(DeviceError, match="injected read error"):
                self.drive(self.device.chm_prefetch_wait(request))
        else:
            self.drive(self.device.chm_prefetch_wait(request))

    @precondition(lambda self: self.held)
    @rule(pick=PICKS)
    def release(self, pick):
        request, group = self.held.pop(pick % len(self.held))
        self.device.chm_prefetch_release(request)
        if group is not None:
            group.requests.remove(request)
            if not group.requests and self.staged.get(group.slot) is group:
                del self.staged[group.slot]

    @rule(slot=SLOTS)
    def read(self, slot):
        stored = self.now.get(slot)
        armed = self.faults.armed["ssd.read"]
        found = self.drive(self.rig.read(slot, stored.size if stored is not None else SIZE))
        fault = self.faults.armed["ssd.read"] < armed
        if self.readable(slot):
            self.judge(found, stored, fault=fault)
        elif stored is not None and stored.state != "committed":
            assert found != (slot, stored.version)

    @precondition(lambda self: len(self.reading) < 3 and not self.faults.armed["ssd.read"])
    @rule(slot=SLOTS)
    def start_reading(self, slot):
        if self.readable(slot):
            stored = self.now[slot]
            self.reading.append((self.clock.spawn(self.rig.read(slot, stored.size)), stored))
            self.drive(self.clock.gather())

    @rule(slot=SLOTS)
    def prefetch_what_is_being_read(self, slot):
        if len(self.reading) < 3 and not self.faults.armed["ssd.read"]:
            self.start_reading(slot)
            self.prefetch(slot)

    @precondition(lambda self: self.reading)
    @rule()
    def end_reading(self):
        job, stored = self.reading.pop(0)

        async def end():
            return await job

        self.judge(self.drive(end()), stored, fault=True)

    # -- time and faults -----------------------------------------------------------------------

    @rule(ms=st.sampled_from([0.01, 1.0, 5.0, 40.0, 500.0]))
    def let_time_pass(self, ms):
        async def sleep():
            await self.clock.sleep(ms / 1000)

        self.drive(sleep())

    @rule()
    def fail_the_next_read(self):
        if not self.reading:
            self.faults.armed["ssd.read"] = 1

    @rule(times=st.sampled_from([1, 3]))
    def fail_flushes(self, times):
        self.faults.armed["ssd.write"] = times

    # -- invariants ----------------------------------------------------------------------------

    @initialize()
    def at_rest_at_first(self):
        assert not any(self.device.at_rest().values())

    @invariant()
    def frames_are_conserved(self):
        rest = self.device.at_rest()
        assert rest["prefetch requests"] == len(self.held) <= DEPTH
        assert rest["staging frames"] >= self.staging_frames()
        assert rest["write-buffer frames"] >= self.buffer_frames()
        if self.quiet:
            assert rest["staging frames"] == self.staging_frames()
            assert rest["write-buffer frames"] == self.buffer_frames()
            assert rest["demand misses"] == 0
        assert self.staging_frames() <= STAGING - RESERVE

    @invariant()
    def dram_is_parted_for_good(self):
        rest = self.device.at_rest()
        assert rest["staging frames"] <= STAGING
        assert rest["write-buffer frames"] <= BUFFER
        staged = [e for s in self.device.staging.staged.values() for e in s.extents[:-1]]
        buffered = [e for b in self.device.write_buffer.entries.values() for e in b.extents[:-1]]
        assert all(offset < STAGING * FRAME for offset, _ in staged)
        assert all(STAGING * FRAME <= offset < (STAGING + BUFFER) * FRAME for offset, _ in buffered)
        starts = [offset for offset, _ in (*staged, *buffered)]
        assert len(starts) == len(set(starts))


class OnBytes(CxlHmMachine):
    """The same, with real bytes in RAM."""

    phantom = False


RUNS = settings(max_examples=80, stateful_step_count=40)
HUNT = settings(RUNS, max_examples=500, phases=[Phase.generate], print_blob=False)
REACHED = {
    "read",
    "read error",
    "shared",
    "prefetch refused",
    "write refused",
    "lost",
    "discarded in its flush",
    "discarded before its flush",
}


@pytest.mark.parametrize("kind", [CxlHmMachine, OnBytes])
def test_any_order_of_calls_agrees_with_the_model(kind):
    reached = Counter()

    class Machine(kind):
        def teardown(self):
            super().teardown()
            reached.update(self.events)

    run_state_machine_as_test(Machine, settings=RUNS)
    assert set(reached) == REACHED  # so the model was put to the test


@pytest.mark.parametrize(
    "mutant",
    [
        mutants.AdmitsBeyondTheBuffer,
        mutants.FreesAtRelease,
        mutants.KeepsNothingBack,
        mutants.KeepsOldStaging,
        mutants.KeepsWhatItLost,
        mutants.ReadsWhatIsNotCommitted,
        mutants.StagesInTheWriteBuffer,
    ],
)
def test_the_model_finds_mutants(mutant):
    class Machine(CxlHmMachine):
        device_type = mutant

    with pytest.raises((AssertionError, DeadlockError, DeviceError, ExceptionGroup)):
        run_state_machine_as_test(Machine, settings=HUNT)
