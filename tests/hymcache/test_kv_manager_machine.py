"""The KV Manager against a simple model, and mutants of it that the machine must find."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.fabric import Fabric, MemoryRegion
from cxlbench.emu.memory import PAGE_BYTES, PhantomBuffer
from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache.kv_manager import Grant, KvManager, StoredObject
from cxlbench.hymcache.prefetch_window import ReadStream
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import chain
from tests.hymcache.test_master_machine import run

POOL = chain(8)
PLACE = {key: number for number, key in enumerate(POOL)}
SIZES = (PAGE_BYTES, 3 * PAGE_BYTES)
some_keys = st.lists(st.sampled_from(POOL), min_size=1, max_size=4, unique=True).map(
    lambda keys: sorted(keys, key=PLACE.__getitem__)
)
picks = st.integers(0, 99)


@dataclass(eq=False)
class Token:
    address: int
    size_bytes: int


@dataclass
class StrictDevice:
    """A device that keeps account of its addresses, and raises when they are misused."""

    capacity_bytes: int = 12 * 4 * PAGE_BYTES
    page_bytes: int = PAGE_BYTES
    trailer_bytes: int = PAGE_BYTES
    latency_s: float = 0.0
    trailer_cost_bytes: int = 4096
    prefetch_depth: int = 3
    slots: int = 6
    buffered: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    held: list[Token] = field(default_factory=list)
    port: Any = None

    def __post_init__(self) -> None:
        self.on_frames_free: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int], None] = lambda address: None

    def admit(self, address: int, size_bytes: int) -> bool:
        assert address not in self.buffered
        assert address not in self.kept, "an extent with an object in it is given to another"
        if len(self.buffered) >= self.slots:
            return False
        self.buffered[address] = "reserved"
        return True

    def receive(self, address: int, payload: Any, trailer: Any) -> None:
        if self.buffered.get(address) not in ("reserved", "received"):
            raise DeviceError(Status.NO_OBJECT, "nothing is reserved")
        self.buffered[address] = "received"

    def commit(self, address: int) -> None:
        if self.buffered.get(address) != "received":
            raise DeviceError(Status.NO_OBJECT, "nothing was received")
        del self.buffered[address]
        self.kept.add(address)

    def cancel(self, address: int) -> None:
        del self.buffered[address]

    def discard(self, address: int, size_bytes: int) -> None:
        self.kept.remove(address)

    def chm_prefetch_object(self, address: int, size_bytes: int) -> Token | None:
        assert address in self.kept, "what is not there is staged"
        if len(self.held) >= self.prefetch_depth:
            return None
        self.held.append(Token(address, size_bytes))
        return self.held[-1]

    def chm_prefetch_release(self, token: Token) -> None:
        self.held.remove(token)

    def at_rest(self) -> dict[str, int]:
        return {"buffered": len(self.buffered), "prefetch requests": len(self.held)}

    async def close(self) -> None:
        pass


@dataclass(eq=False)
class Write:
    """What the model knows of one grant."""

    grant: Grant
    size: int
    until: float
    written: bool = False
    state: str = "granted"  # then committed, published, ended
    streams: int = 0


class NodeMachine(RuleBasedStateMachine):
    """Steps of writers, Master, readers, devices and time."""

    manager_type: type[KvManager] = KvManager

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.fabric = Fabric(self.clock, seed=1)
        self.devices: Any = [StrictDevice(), StrictDevice()]
        self.node = self.manager_type(
            self.clock,
            self.fabric,
            self.devices,
            window_bytes=2 * PAGE_BYTES,
            segment_bytes=4 * PAGE_BYTES,
        )
        self.gone: list[tuple[int, bytes, int]] = []
        self.node.on_gone = lambda *what: self.gone.append(what)
        self.expected_gone: list[tuple[int, bytes, int]] = []
        self.writes: list[Write] = []
        self.streams: list[tuple[ReadStream, list[Write], set[int]]] = []
        self.ends: dict[ReadStream, float | None] = {}

    # -- the model ------------------------------------------------------------------------------

    def alive(self, *states: str) -> list[Write]:
        return [write for write in self.writes if write.state in states]

    def published(self, key: bytes) -> Write | None:
        return next((w for w in self.alive("published") if w.grant.key == key), None)

    def pick(self, pick: int) -> Write:
        return self.writes[-1 - pick % min(len(self.writes), 8)]

    # -- steps ----------------------------------------------------------------------------------

    @rule(keys=some_keys, size=st.sampled_from(SIZES), device=st.sampled_from([None, 0, 1]))
    def reserve(self, keys: list[bytes], size: int, device: int | None) -> None:
        answers = self.node.reserve(keys, size, device=device)
        refused = False
        chosen = set()
        for key, answer in zip(keys, answers, strict=True):
            if self.published(key):
                assert answer is KeyResult.EXISTS
                continue
            if isinstance(answer, Grant):
                assert not refused, "a tail is granted without its head"
                chosen.add(answer.device)
                self.writes.append(Write(answer, size, self.clock.now() + 10.0))
            else:
                assert answer is KeyResult.NO_SPACE
                refused = True
        assert len(chosen) <= 1
        assert device is None or chosen <= {device}

    @precondition(lambda self: self.writes)
    @rule(pick=picks)
    def rdma_write(self, pick: int) -> None:
        write = self.pick(pick)
        self.one_write(write)

    def one_write(self, write: Write) -> None:
        """A one-sided WRITE under the grant's rkey, at any time."""
        grant = write.grant
        length = write.size + PAGE_BYTES
        region = self.fabric.check(grant.rkey, grant.address, length, write=True)
        if write.state == "granted":
            assert isinstance(region, MemoryRegion)
            local = grant.address - region.base + region.offset
            trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
            region.target.receive(local, PhantomBuffer(write.size), trailer)
            write.written = True
        else:
            assert region is Status.BAD_RKEY

    @precondition(lambda self: self.writes)
    @rule(pick=st.lists(picks, min_size=1, max_size=3))
    def commit(self, pick: list[int]) -> None:
        for write in {self.pick(p): None for p in pick}:
            (answer,) = self.node.commit([write.grant.token])
            if write.state == "granted":
                write.state = "committed" if write.written else "ended"
                assert answer is (KeyResult.STORED if write.written else KeyResult.ERROR)
            elif write.state == "committed":
                assert answer is KeyResult.STORED
            else:
                assert answer is KeyResult.LEASE_EXPIRED

    @precondition(lambda self: self.writes)
    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        write = self.pick(pick)
        grant = write.grant
        answer = self.node.publish(grant.key, grant.address, grant.generation)
        assert answer == (write.state == "committed" and not self.published(grant.key))
        if answer:
            write.state = "published"

    @rule(keys=some_keys, size=st.sampled_from(SIZES))
    def put(self, keys: list[bytes], size: int) -> None:
        before = len(self.writes)
        self.reserve(keys, size, None)
        for write in self.writes[before:]:
            self.one_write(write)
            self.node.commit([write.grant.token])
            write.state = "committed"
            grant = write.grant
            assert self.node.publish(grant.key, grant.address, grant.generation)
            write.state = "published"

    @precondition(lambda self: self.writes)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        write = self.pick(pick)
        self.node.abort([write.grant.token])
        if write.state in ("granted", "committed"):
            write.state = "ended"

    @precondition(lambda self: self.writes)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        write = self.pick(pick)
        self.node.free([(write.grant.key, write.grant.generation)])
        if write.state == "published":
            write.state = "ended"

    @precondition(lambda self: self.alive("committed", "published"))
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        there = self.alive("committed", "published")
        write = there[pick % len(there)]
        number = write.grant.device
        if write.state == "published":
            self.expected_gone.append((0, write.grant.key, write.grant.generation))
        write.state = "ended"
        self.devices[number].on_lost(write.grant.address - self.node.bases[number])

    @rule(keys=some_keys, leased=st.booleans())
    def open_stream(self, keys: list[bytes], leased: bool) -> None:
        until = self.clock.now() + 6.0 if leased else None
        stream = self.node.open_stream(len(self.streams), keys, until_s=until)
        matched = []
        for key in keys:
            write = self.published(key)
            if write is None:
                break
            matched.append(write)
        assert [o.address for o in stream.objects] == [w.grant.address for w in matched]
        for write in matched:
            write.streams += 1
        self.ends[stream] = until
        self.streams.append((stream, matched, set(range(len(matched)))))

    @precondition(lambda self: self.streams)
    @rule(pick=picks, keys=some_keys, leased=st.booleans())
    def extend_stream(self, pick: int, keys: list[bytes], leased: bool) -> None:
        stream, matched, pinned = self.streams[pick % len(self.streams)]
        until = self.clock.now() + 6.0 if leased else None
        assert self.node.open_stream(0, keys, until_s=until, onto=stream) is stream
        for key in keys:
            write = self.published(key)
            if write is None:
                break
            write.streams += 1
            pinned.add(len(matched))
            matched.append(write)
        assert [o.address for o in stream.objects] == [w.grant.address for w in matched]
        if until is not None:
            self.ends[stream] = until

    @precondition(lambda self: self.streams)
    @rule(pick=picks, position=st.integers(0, 3))
    def consume(self, pick: int, position: int) -> None:
        stream, matched, pinned = self.streams[pick % len(self.streams)]
        if position < len(stream):
            stream.consumed(position)
            if position in pinned:
                pinned.remove(position)
                matched[position].streams -= 1

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def close_stream(self, pick: int) -> None:
        stream = self.streams[pick % len(self.streams)][0]
        stream.close()
        self.sweep()

    def sweep(self) -> None:
        """Closed streams have no pins."""
        for stream, matched, pinned in self.streams:
            if stream.closed:
                for position in pinned:
                    matched[position].streams -= 1
                pinned.clear()
        self.streams = [entry for entry in self.streams if not entry[0].closed]

    @rule(delay_s=st.sampled_from([0.5, 4.0, 10.5]))
    def pass_time(self, delay_s: float) -> None:
        async def wait() -> None:
            await self.clock.sleep(delay_s)

        self.clock.run(wait())
        for write in self.alive("granted", "committed"):
            if write.until <= self.clock.now():
                write.state = "ended"
        for stream, _, _ in self.streams:
            until = self.ends.get(stream)
            assert stream.closed == (until is not None and until <= self.clock.now())
        self.sweep()

    # -- what always holds ----------------------------------------------------------------------

    def present(self) -> list[Write]:
        """Writes whose extent is taken: by themselves, or by who still reads them."""
        return [w for w in self.writes if w.state != "ended" or w.streams]

    @invariant()
    def index_is_what_was_published(self) -> None:
        expected = {w.grant.key: w.grant.generation for w in self.alive("published")}
        assert {k: o.generation for k, o in self.node.index.items()} == expected
        assert self.gone == self.expected_gone

    @invariant()
    def every_extent_is_somebodys_and_none_overlap(self) -> None:
        present = self.present()
        spans = sorted((w.grant.address, w.grant.address + w.size + PAGE_BYTES) for w in present)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert sum(a.live_extents for a in self.node.allocators) == len(present)
        for number, device in enumerate(self.devices):
            base = self.node.bases[number]
            here = [w for w in present if w.grant.device == number]
            buffered = {w.grant.address - base for w in here if w.state == "granted"}
            assert set(device.buffered) == buffered
            assert device.kept == {w.grant.address - base for w in here} - buffered

    @invariant()
    def rkeys_live_as_long_as_their_reservation(self) -> None:
        assert self.fabric.registered == len(self.devices) + len(self.alive("granted"))

    @invariant()
    def what_is_held_is_counted(self) -> None:
        held = self.node.at_rest()
        assert held["reservations"] == len(self.alive("granted", "committed"))
        assert held["pins"] == sum(w.streams for w in self.writes)
        assert held["streams"] == len(self.streams)
        assert held["read tokens"] == sum(len(device.held) for device in self.devices)
        assert all(len(device.held) <= device.prefetch_depth for device in self.devices)

    @invariant()
    def windows_are_kept(self) -> None:
        per_stream: Counter[int] = Counter()
        for stream, _, _ in self.streams:
            for number, lane in stream.lanes.items():
                assert 0 <= lane.held <= lane.window <= 2
                per_stream[number] += lane.held
        assert per_stream == Counter({n: len(d.held) for n, d in enumerate(self.devices)})

    @invariant()
    def staging_does_not_idle_while_a_stream_wants_it(self) -> None:
        for stream, _, _ in self.streams:
            for number, lane in stream.lanes.items():
                device = self.devices[number]
                assert not lane.wants or len(device.held) == device.prefetch_depth

    def teardown(self) -> None:
        try:
            for stream, _, _ in self.streams:
                stream.close()
            self.sweep()
            self.pass_time(10.5)
            self.node.free([(w.grant.key, w.grant.generation) for w in self.alive("published")])
            for number, device in enumerate(self.devices):
                assert not device.kept
                assert not any(device.at_rest().values())
                allocator = self.node.allocators[number]
                assert allocator.live_extents == allocator.dead_bytes == 0
                assert allocator.free_bytes(4 * PAGE_BYTES) == device.capacity_bytes
            assert not any(self.node.at_rest().values())
            assert self.fabric.registered == len(self.devices)
        finally:
            self.clock.close()


def test_a_node_does_what_a_simple_model_does() -> None:
    run(NodeMachine)


# -- mutants --------------------------------------------------------------------------------------


class KeepsTheRkey(KvManager):
    """Frees the space of an expired or aborted reservation and lets its rkey live."""

    def abort(self, tokens: Sequence[int]) -> None:
        regions = [self._reservations[t].region for t in tokens if t in self._reservations]
        super().abort(tokens)
        for region in regions:
            region.revoked = False
            self.fabric._regions[region.rkey] = region


class IgnoresPins(KvManager):
    """Gives an extent back while streams read it."""

    def _drop(self, stored: StoredObject) -> None:
        pins, stored.pins = stored.pins, 0
        super()._drop(stored)
        stored.pins = pins


class FreesByKeyAlone(KvManager):
    """Does not compare the generation of what it is to free."""

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        super().free([(key, self.index[key].generation) for key, _ in objects if key in self.index])


class IndexesAtCommit(KvManager):
    """Lets objects be found before Master has registered them."""

    def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        answers = super().commit(tokens)
        for token in tokens:
            reservation = self._reservations.get(token)
            if reservation is not None and reservation.stored is not None:
                self.index.setdefault(reservation.grant.key, reservation.stored)
        return answers


def pretend_received(node: KvManager, tokens: Sequence[int]) -> None:
    """Let the devices believe that the bytes of these reservations have arrived."""
    for token in tokens:
        reservation = node._reservations.get(token)
        if reservation is not None and reservation.stored is None:
            grant = reservation.grant
            local = grant.address - node.bases[grant.device]
            node.devices[grant.device].receive(local, PhantomBuffer(reservation.size_bytes), None)


class CommitsWhatWasNotWritten(KvManager):
    """Takes the writer's word that the bytes are in place."""

    def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        pretend_received(self, tokens)
        return super().commit(tokens)


class GoesOnAfterARefusal(KvManager):
    """Grants what fits, whatever was refused before it."""

    def reserve(
        self, keys: Sequence[bytes], size_bytes: int, *, device: int | None = None
    ) -> list[Grant | KeyResult]:
        chosen = self.place(size_bytes) if device is None else device
        answers: list[Grant | KeyResult] = []
        for number, key in enumerate(keys):
            if number == 1 and len(keys) > 2 and key not in self.index:
                answers.append(KeyResult.NO_SPACE)
            else:
                answers += super().reserve([key], size_bytes, device=chosen)
        return answers


class NeverExpires(KvManager):
    """Has no deadline for writers."""

    def _expire(self, tokens: Sequence[int]) -> None:
        pass


class StreamsWithoutEnd(KvManager):
    """Keeps the streams of readers whose lease has ended."""

    def open_stream(
        self,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float | None = None,
        onto: ReadStream | None = None,
    ) -> ReadStream:
        return super().open_stream(request_id, keys, onto=onto)


@pytest.mark.parametrize(
    "mutant",
    [
        KeepsTheRkey,
        IgnoresPins,
        FreesByKeyAlone,
        IndexesAtCommit,
        CommitsWhatWasNotWritten,
        GoesOnAfterARefusal,
        NeverExpires,
        StreamsWithoutEnd,
    ],
)
def test_the_machine_notices_a_node_that(mutant: type[KvManager]) -> None:
    machine = type("Mutant", (NodeMachine,), {"manager_type": mutant})
    with pytest.raises((AssertionError, KeyError, DeviceError)):
        run(machine, examples=100, phases=[Phase.generate])


def windowless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cxlbench.hymcache.prefetch_window.prefetch_window", lambda hits, size, window: hits
    )


def token_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictDevice, "chm_prefetch_release", lambda self, token: None)


def pumpless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cxlbench.hymcache.prefetch_window.PrefetchScheduler.forget",
        lambda self, stream: self._streams.discard(stream),
    )
    monkeypatch.setattr(
        "cxlbench.hymcache.prefetch_window.PrefetchScheduler._enqueue", lambda self, lane: None
    )


@pytest.mark.parametrize("spoil", [windowless, token_keeping, pumpless])
def test_the_machine_notices_a_scheduler_that_is(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        run(NodeMachine, examples=100, phases=[Phase.generate])
