"""Checks that can fail: the whole system with one safeguard taken out must be found out.

The state machines have mutants of their own; these need a reader, a writer and a device.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.fabric import Fabric
from cxlbench.emu.faults import FaultRule
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.status import Status
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.hymcache.eviction import Eviction
from cxlbench.hymcache.kv_manager import Grant, KvManager
from cxlbench.hymcache.master import Master
from cxlbench.hymcache.node_service import NodeService, StreamOpened
from cxlbench.hymcache.prefetch_window import PrefetchScheduler
from cxlbench.hymcache.store import Batch, StorePath
from cxlbench.kv.footer import Footer
from cxlbench.kv.payload import Verifier
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import MIB, Rig, chain, faults
from tests.hymcache.test_kv_manager_machine import pretend_received

EXTENT = 16 * MIB + PAGE_BYTES
KEYS = chain(20)
Spoil = Callable[[pytest.MonkeyPatch], None]
Scenario = tuple[dict[str, Any], Callable[[Rig], Coroutine[Any, Any, None]]]


# -- scenarios: each holds for the system as it is ------------------------------------------------


def read_while_others_evict() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.stored(KEYS)
        await rig.lookup(1, KEYS)
        rig.master.evict(KEYS)
        for number in range(1, 5):
            await rig.stored(chain(8, number))
        assert (await rig.load(1, KEYS)).leading_hits == len(KEYS)
        rig.connector.release(1)

    return {"capacity": 64 * EXTENT, "segment": 4 * EXTENT}, test


def read_what_was_replaced() -> Scenario:
    async def test(rig: Rig) -> None:
        """A descriptor is used after its object was evicted and the same key stored again."""
        key = KEYS[0]
        await rig.stored([key])
        await rig.lookup(1, [key])
        (stored,) = rig.node.index.values()
        rig.master.release(rig.connector._requests[1].reader)
        rig.master.evict([key])
        rig.node.unpin(stored)
        stored.pins += 1  # for the stream, which gives its own back
        await rig.store_at([key], 0, 0)
        fresh = rig.node.index[key]
        assert (fresh.address, fresh.generation) == (stored.address, stored.generation + 1)
        stored.freed = False
        assert (await rig.load(1, [key])).results == (KeyResult.MISS,)
        assert rig.connector.counters.mismatched == 1
        rig.connector.release(1)
        await rig.clock.sleep(0.01)
        assert rig.place(key) is not None  # the word about the old one did not hit the new one

    return {"capacity": EXTENT, "segment": EXTENT}, test


def release_while_loading() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.stored(KEYS)
        await rig.lookup(1, KEYS)
        rig.connector.submit_load(1, KEYS, [rig.empty() for _ in KEYS])
        await rig.clock.sleep(0.003)
        rig.connector.release(1)

    return {}, test


def load_with_an_error() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.stored(KEYS)
        await rig.lookup(1, KEYS)
        await rig.load(1, KEYS)
        await rig.clock.sleep(0.05)
        (stream,) = rig.node.prefetcher._streams
        (lane,) = stream.lanes.values()
        assert lane.reading == 0
        rig.connector.release(1)

    rule = FaultRule(point="ssd.read", kind="error", skip=2, limit=1)
    return {"fault_plan": (rule,)}, test


def stage_a_window() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.stored(KEYS)
        await rig.lookup(1, KEYS)
        await rig.clock.sleep(0.1)
        assert rig.device.at_rest()["prefetch requests"] == 8
        rig.connector.release(1)

    return {}, test


def come_back_to_a_node() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.store_at(KEYS[:5], 0, 0)
        await rig.store_at(KEYS[5:7], 1, 0)
        await rig.store_at(KEYS[7:], 0, 0)
        await rig.quiesce()
        await rig.lookup(1, KEYS)
        await rig.clock.sleep(0.1)
        assert rig.device.at_rest()["prefetch requests"] == 8
        rig.connector.release(1)

    return {"nodes": 2}, test


def write_after_the_deadline() -> Scenario:
    async def test(rig: Rig) -> None:
        (late,) = rig.node.reserve(KEYS[:1], rig.size)
        assert isinstance(late, Grant)
        await rig.clock.sleep(10.1)
        await rig.store_at(KEYS[1:2], 0, 0)
        trailer = np.zeros(PAGE_BYTES, dtype=np.uint8)
        done = await rig.queue_pairs[0][0].write(
            late.rkey, late.address, rig.content(late.key), trailer
        )
        assert done.status in (Status.BAD_RKEY, Status.REVOKED)

    return {"capacity": EXTENT, "segment": EXTENT}, test


def fail_in_the_middle_of_a_store() -> Scenario:
    async def test(rig: Rig) -> None:
        keys = chain(70)
        await rig.store(keys)
        there = [rig.place(key) is not None for key in keys]
        assert there == sorted(there, reverse=True)
        assert sum(there) == 10

    rule = FaultRule(point="fabric.write", kind="down", skip=10, limit=1)
    return {"fault_plan": (rule,)}, test


def read_damaged_bytes() -> Scenario:
    async def test(rig: Rig) -> None:
        await rig.stored(KEYS)
        assert await rig.read(KEYS) == 3
        await rig.clock.sleep(0.01)
        assert rig.place(KEYS[3]) is None

    rule = FaultRule(point="ssd.read", kind="corrupt", skip=3, limit=1)
    return {"fault_plan": (rule,)}, test


def look_up_what_is_being_written() -> Scenario:
    async def test(rig: Rig) -> None:
        writing = rig.clock.spawn(rig.store(KEYS))
        while not writing.done():
            await rig.clock.sleep(0.002)
            assert await rig.read(KEYS) in (0, len(KEYS))
        assert rig.connector.counters.mismatched == 0

    return {}, test


# -- safeguards, and how to take them out ---------------------------------------------------------


def no_lease_and_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    evict, drop = Eviction.evict, KvManager._drop

    def evicts(self: Eviction, keys: Sequence[bytes]) -> int:
        leased, self.leased = self.leased, {}
        moved = evict(self, keys)
        self.leased = leased
        return moved

    def drops(self: KvManager, stored: Any) -> None:
        stored.pins, pins = 0, stored.pins
        drop(self, stored)
        stored.pins, stored.freed = pins, False

    monkeypatch.setattr(Eviction, "evict", evicts)
    monkeypatch.setattr(KvManager, "_drop", drops)


def no_generation_check(monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = Verifier.accepts

    def any_generation(self: Verifier, footer: Footer | None, **what: Any) -> bool:
        what["generation"] = footer.generation if footer is not None else 0
        return accepts(self, footer, **what)

    monkeypatch.setattr(Verifier, "accepts", any_generation)


def no_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "accepts", lambda self, footer, **what: True)


def no_report_of_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Master, "gone", lambda self, node, key, generation: None)


def no_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    release = HyMCacheConnector.release

    def keeps(self: HyMCacheConnector, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.found.asked.clear()
        release(self, request_id)

    monkeypatch.setattr(HyMCacheConnector, "release", keeps)


def no_lease_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Master, "release", lambda self, reader: None)


def no_token_comes_back_from_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PrefetchScheduler.release

    def keeps(self: PrefetchScheduler, stream: Any, position: int) -> None:
        lane = stream.lanes.get(0)
        if stream.closed or position != 2:
            release(self, stream, position)
        else:
            assert lane is not None

    monkeypatch.setattr(PrefetchScheduler, "release", keeps)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cxlbench.hymcache.prefetch_window.prefetch_window", lambda hits, size, window: hits
    )


def no_common_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    open_stream = NodeService.open_stream

    def alone(self: NodeService, *args: Any, onto: object, **options: Any) -> StreamOpened:
        return open_stream(self, *args, **options)

    monkeypatch.setattr(NodeService, "open_stream", alone)


def no_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fabric, "revoke", lambda self, region: None)


def no_stop_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "failure", property(lambda self: None))


def no_wait_for_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer commits before it has written, and the node takes its word."""

    async def lie(self: StorePath, node: Any, grant: Grant, payload: Any) -> bool:
        return True

    monkeypatch.setattr(StorePath, "_write_block", lie)
    commit = KvManager.commit

    def accept(self: KvManager, tokens: Sequence[int]) -> list[KeyResult]:
        pretend_received(self, tokens)
        return commit(self, tokens)

    monkeypatch.setattr(KvManager, "commit", accept)


CASES: list[tuple[Callable[[], Scenario], Spoil]] = [
    (read_while_others_evict, no_lease_and_no_pin),
    (read_what_was_replaced, no_generation_check),
    (release_while_loading, no_stream_is_closed),
    (release_while_loading, no_lease_is_ended),
    (load_with_an_error, no_token_comes_back_from_a_failure),
    (stage_a_window, no_window),
    (come_back_to_a_node, no_common_stream),
    (write_after_the_deadline, no_revocation),
    (fail_in_the_middle_of_a_store, no_stop_after_a_failure),
    (read_damaged_bytes, no_verification),
    (read_damaged_bytes, no_report_of_damage),
    (look_up_what_is_being_written, no_wait_for_the_bytes),
]
SCENARIOS = list(dict.fromkeys(scenario for scenario, _ in CASES))


def play(scenario: Callable[[], Scenario]) -> None:
    options, test = scenario()
    if "fault_plan" in options:
        options["fault_plan"] = faults(*options["fault_plan"])
    rig = Rig(**options)
    rig.run(lambda: test(rig))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda part: part.__name__)
def test_the_scenario_holds(scenario: Callable[[], Scenario]) -> None:
    play(scenario)


@pytest.mark.parametrize(
    ("scenario", "spoil"), CASES, ids=[f"{s.__name__}-{p.__name__}" for s, p in CASES]
)
def test_a_system_with_a_safeguard_less_is_found_out(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[], Scenario], spoil: Spoil
) -> None:
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        play(scenario)
