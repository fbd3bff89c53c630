"""Release, disconnection and vanishing of a client at any moment: everything comes back.

A first run of a scenario notes every moment of virtual time at which anything happens in it. Then
the same run is cut at one of them, before or after what else happens at that moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlbench.emu.faults import FaultRule
from cxlbench.kv.connector import Ticket
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import MIB, Rig, chain, faults, profile

MakeRig = Callable[..., Rig]
KEYS = chain(44)
OTHER = chain(20, 2)
HIT, MISS, CANCELLED = KeyResult.HIT, KeyResult.MISS, KeyResult.CANCELLED


def moments_of(rig: Rig) -> list[float]:
    """Make ``rig`` note when its timers fire, and return the list that it fills."""
    loop: Any = rig.clock.loop
    fire, seen = loop._fire, []

    def noting(when: float) -> None:
        if not seen or seen[-1] != when:
            seen.append(when)
        fire(when)

    loop._fire = noting
    return seen


async def prepare(rig: Rig) -> float:
    """Store 36 of 44 blocks, and return when that is done and flushed."""
    await rig.stored(KEYS[:36])
    await rig.stored(OTHER)
    return rig.clock.now()


async def a_turn(rig: Rig, tickets: list[Ticket]) -> None:
    """One turn of request 1: look up 44 blocks, load what is there, store the rest."""
    connector = rig.connector
    tickets.append(connector.submit_lookup(1, KEYS, rig.size))
    hits = (await tickets[-1].done.wait()).leading_hits
    if not connector.at_rest()["requests"]:
        return
    buffers = [rig.empty() for _ in range(hits)]
    tickets.append(connector.submit_load(1, KEYS[:hits], buffers))
    done = await tickets[-1].done.wait()
    for key, buffer, result in zip(KEYS, buffers, done.results, strict=False):
        assert result is not HIT or rig.holds(buffer, key)
    if connector._tickets.closed:
        return
    payload = [rig.content(key) for key in KEYS[hits:]]
    tickets.append(connector.submit_store(1, KEYS[hits:], payload))
    await tickets[-1].done.wait()


@functools.cache
def timeline(setting: str) -> tuple[float, list[float]]:
    """Return when the turn begins, and the moments of it."""
    rig = Rig(**options_of(setting))
    seen = moments_of(rig)
    began = 0.0

    async def test() -> None:
        nonlocal began
        began = await prepare(rig)
        await a_turn(rig, [])
        rig.connector.release(1)

    rig.run(test)
    return began, [when for when in seen if when >= began]


DELAYS = (
    FaultRule(point="control", kind="delay", probability=0.3, delay_s=0.0011),
    FaultRule(point="ssd.read", kind="delay", probability=0.2, delay_s=0.007),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two devices, delays": {"devices": 2, "fault_plan": DELAYS},
    "shallow": {"device": profile(prefetch_depth=3), "staging": 48 * MIB},
    "free software": {"free_software": True},
}


def options_of(setting: str) -> dict[str, Any]:
    options = dict(SETTINGS[setting])
    if "fault_plan" in options:
        options["fault_plan"] = faults(*options["fault_plan"], seed=3)
    return options


ERRORS = {KeyResult.ERROR, KeyResult.TIMEOUT, KeyResult.LEASE_EXPIRED}


def cut(setting: str, share: float, late: bool, end: Callable[[Rig], Any]) -> None:
    """Run the turn and a request beside it, and call ``end`` at one moment of the first."""
    began, moments = timeline(setting)
    when = moments[min(int(share * len(moments)), len(moments) - 1)]
    rig = Rig(**options_of(setting), workers=2)
    tickets: list[Ticket] = []

    async def test() -> None:
        assert await prepare(rig) == began
        if not late:
            rig.clock.call_at(when, end, rig)  # before all that happens at this moment
        turn = rig.clock.spawn(a_turn(rig, tickets))
        beside = rig.clock.spawn(rig.read(OTHER, worker=1))
        if late:
            await rig.clock.sleep_until(when)
            end(rig)
        assert await beside == len(OTHER)
        await turn
        rig.connector.release(1)
        assert all(ticket.done.is_set() for ticket in tickets)
        for ticket in tickets:
            assert ERRORS.isdisjoint(ticket.done.peek().results)

    rig.run(test)


@settings(max_examples=120)
@given(
    setting=st.sampled_from(sorted(SETTINGS)),
    share=st.floats(0, 1, exclude_max=True),
    late=st.booleans(),
)
def test_a_release_at_any_moment_gives_everything_back(
    setting: str, share: float, late: bool
) -> None:
    cut(setting, share, late, lambda rig: rig.connector.release(1))


@settings(max_examples=120)
@given(
    setting=st.sampled_from(sorted(SETTINGS)),
    share=st.floats(0, 1, exclude_max=True),
    late=st.booleans(),
)
def test_a_disconnection_at_any_moment_gives_everything_back(
    setting: str, share: float, late: bool
) -> None:
    cut(setting, share, late, lambda rig: rig.clock.spawn(rig.connector.close()))


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True), again=st.booleans())
def test_a_client_that_vanishes_at_any_moment_is_cleared_away_by_deadlines(
    share: float, again: bool
) -> None:
    began, moments = timeline("plain")
    when = moments[min(int(share * len(moments)), len(moments) - 1)]
    rig = Rig(workers=2)

    async def test() -> None:
        assert await prepare(rig) == began
        turn = rig.clock.spawn(a_turn(rig, []))
        await rig.clock.sleep_until(when)
        # Its tasks stop, and nothing that it would have sent any more is sent.
        vanished = rig.connector
        rig.control.post, post = (lambda work, serve_s=0.0: None), rig.control.post  # type: ignore[method-assign]
        for job in [*vanished._jobs._jobs]:
            job.cancel()
        await rig.clock.sleep(0)
        turn.cancel()
        await rig.clock.sleep(0)
        rig.control.post = post  # type: ignore[method-assign]
        await rig.clock.sleep(12)
        held = {name: count for name, count in rig.at_rest().items() if name != "requests"}
        assert not held
        if again:
            done = await rig.store(KEYS, worker=1)
            assert set(done.results) <= {KeyResult.STORED, KeyResult.EXISTS}
            assert await rig.read(KEYS, worker=1) == len(KEYS)
        vanished._requests.clear()

    rig.run(test)


# -- moments that need no search ------------------------------------------------------------------


def test_a_request_that_is_released_as_soon_as_it_is_submitted_ends(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        ticket = rig.connector.submit_lookup(1, KEYS, rig.size)
        rig.connector.release(1)
        assert (await ticket.done.wait()).results == (CANCELLED,) * len(KEYS)
        assert rig.connector.poll()[0].results == (CANCELLED,) * len(KEYS)

    rig.run(test)


def test_a_load_that_is_released_says_what_was_delivered(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.stored(KEYS)
        await rig.lookup(1, KEYS)
        buffers = [rig.empty() for _ in KEYS]
        ticket = rig.connector.submit_load(1, KEYS, buffers)
        while rig.connector.counters.loaded < 5:
            await rig.clock.sleep(1e-4)
        rig.connector.release(1)
        results = (await ticket.done.wait()).results
        assert results[:5] == (HIT,) * 5
        assert set(results[5:]) <= {CANCELLED, HIT}
        assert CANCELLED in results
        assert all(rig.holds(buffers[i], KEYS[i]) for i in range(5))

    rig.run(test)


def test_a_store_outlives_the_release_of_its_request(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.lookup(1, KEYS)
        ticket = rig.connector.submit_store(1, KEYS, [rig.content(key) for key in KEYS])
        rig.connector.release(1)
        assert set((await ticket.done.wait()).results) == {KeyResult.STORED}

    rig.run(test)


def test_a_store_that_is_cut_off_says_what_was_stored(make_rig: MakeRig) -> None:
    rig = make_rig(workers=2)

    async def test() -> None:
        ticket = rig.connector.submit_store(1, KEYS, [rig.content(key) for key in KEYS])
        while not rig.master.counters.registered:
            await rig.clock.sleep(1e-4)
        await rig.clock.sleep(rig.control.half_s)  # the answer arrives
        await rig.connector.close()
        results = (await ticket.done.wait()).results
        assert results == (KeyResult.STORED,) * 32 + (CANCELLED,) * 12
        assert await rig.read(KEYS, worker=1) == 32

    rig.run(test)


def test_a_request_id_can_be_used_again_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.stored(KEYS)
        for _ in range(4):
            rig.connector.submit_lookup(1, KEYS, rig.size)
            await rig.clock.sleep(1e-4)
            rig.connector.release(1)
        assert (await rig.lookup(1, KEYS)).leading_hits == len(KEYS)
        assert (await rig.load(1, KEYS)).leading_hits == len(KEYS)
        rig.connector.release(1)

    rig.run(test)


def test_no_byte_is_written_to_a_buffer_after_its_ticket_has_ended(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def test() -> None:
        await rig.stored(KEYS)
        for number in range(1, 40):
            await rig.lookup(number, KEYS)
            buffers = [rig.empty() for _ in KEYS]
            ticket = rig.connector.submit_load(number, KEYS, buffers)
            await rig.clock.sleep(number * 2.3e-4)
            rig.connector.release(number)
            await ticket.done.wait()
            for buffer in buffers:
                buffer.tag = "the engine's own"  # type: ignore[union-attr]
            await rig.clock.sleep(0.05)
            assert {buffer.tag for buffer in buffers} == {"the engine's own"}  # type: ignore[union-attr]

    rig.run(test)


def test_closing_with_work_of_every_kind_open_ends_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(workers=2)

    async def test() -> None:
        await rig.stored(KEYS)
        connector = rig.connector
        await rig.lookup(1, KEYS)
        tickets = [
            connector.submit_load(1, KEYS, [rig.empty() for _ in KEYS]),
            connector.submit_lookup(2, OTHER, rig.size),
            connector.submit_store(3, OTHER, [rig.content(key) for key in OTHER]),
        ]
        await rig.clock.sleep(5e-4)
        began = rig.clock.now()
        await connector.close()
        assert rig.clock.now() - began < 1e-3
        assert all(ticket.done.is_set() for ticket in tickets)
        assert not any(connector.at_rest().values())

    rig.run(test)


@pytest.mark.parametrize("delay_s", [1e-4, 1e-3, 5e-3])
def test_a_release_while_the_hint_is_on_its_way_leaves_no_stream(
    make_rig: MakeRig, delay_s: float
) -> None:
    rule = FaultRule(point="control", kind="delay", where="node0", skip=20, delay_s=2e-3)
    rig = make_rig(fault_plan=faults(rule))

    async def test() -> None:
        await rig.stored(KEYS)
        ticket = rig.connector.submit_lookup(1, KEYS, rig.size)
        await rig.clock.sleep(delay_s)
        rig.connector.release(1)
        await ticket.done.wait()
        await rig.clock.sleep(0.01)
        assert rig.node.at_rest()["streams"] == 0

    rig.run(test)
