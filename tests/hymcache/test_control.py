"""Control messages and what software steps cost: every step is charged, once, where it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.hymcache.control import ControlPlane, NoCosts
from cxlbench.hymcache.prefetch_window import ReadStream
from tests.hymcache.rig import Rig, chain

MakeRig = Callable[..., Rig]
TRIP = NoCosts(control_round_trip=2.0)


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with VirtualClock() as clock:
        yield clock


def test_a_message_takes_effect_after_its_way_and_its_serving(clock: VirtualClock) -> None:
    control = ControlPlane(clock, TRIP)
    seen = []

    async def test() -> None:
        control.post(lambda: seen.append(("slow", clock.now())), 3.0)
        control.post(lambda: seen.append(("fast", clock.now())))
        await control.delivered()
        assert clock.now() == 4.0

    clock.run(test())
    assert seen == [("fast", 1.0), ("slow", 4.0)]


def test_a_message_that_costs_nothing_takes_effect_at_once(clock: VirtualClock) -> None:
    control = ControlPlane(clock)
    seen = []

    async def test() -> None:
        control.post(lambda: seen.append("now"))
        assert seen == ["now"]
        control.post(lambda: seen.append("later"), 1.0)
        assert seen == ["now"]
        await control.delivered()

    clock.run(test())
    assert seen == ["now", "later"]


def test_nobody_waits_for_messages_that_have_arrived(clock: VirtualClock) -> None:
    control = ControlPlane(clock, TRIP)

    async def test() -> None:
        control.post(lambda: None)
        await clock.sleep(5)
        await control.delivered()
        assert clock.now() == 5

    clock.run(test())


def test_what_is_due_this_very_moment_has_taken_effect_when_all_is_delivered(
    clock: VirtualClock,
) -> None:
    control = ControlPlane(clock, TRIP)
    seen: list[str] = []

    async def test() -> None:
        waits = clock.sleep(1.0)
        control.post(lambda: seen.append("there"))
        await waits
        await control.delivered()
        assert seen == ["there"]

    clock.run(test())


# -- the steps of a read ---------------------------------------------------------------------------


def issue_times(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """Note when streams are opened, and when tokens come back."""
    opened: list[float] = []
    back: list[float] = []
    consumed, open_stream = ReadStream.consumed, rig.node.open_stream

    def note_back(stream: ReadStream, position: int) -> None:
        if not stream.closed:
            back.append(rig.clock.now())
        consumed(stream, position)

    def note_open(*given: object, **options: object) -> ReadStream:
        opened.append(rig.clock.now())
        return open_stream(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ReadStream, "consumed", note_back)
    monkeypatch.setattr(rig.node, "open_stream", note_open)
    return opened, back


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_prefetch_costs_its_issue_and_a_token_its_release_and_the_next_issue(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, prefetch: bool
) -> None:
    rig = make_rig(software=NoCosts(prefetch_issue=0.25, release=0.5), prefetch=prefetch)

    async def test() -> None:
        keys = chain(1)
        await rig.stored(keys)
        opened, back = issue_times(rig, monkeypatch)
        begin_s = rig.clock.now()
        await rig.lookup(1, keys)
        issue_s = 0.25 if prefetch else 0.0  # what is not staged needs no issue
        assert opened == [begin_s + issue_s]
        await rig.load(1, keys)
        (block,) = rig.blocks
        await rig.clock.sleep(1)
        assert back == [pytest.approx(block.due_s + 0.5 + issue_s)]
        rig.connector.release(1)

    rig.run(test, settle_s=1.0)


def test_the_release_of_a_request_takes_effect_when_it_is_served(make_rig: MakeRig) -> None:
    rig = make_rig(software=NoCosts(release=0.5))

    async def test() -> None:
        keys = chain(4)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        rig.connector.release(1)
        await rig.clock.sleep(0.49)
        assert rig.master.at_rest()["leases"] == rig.node.at_rest()["streams"] == 1
        await rig.clock.sleep(0.02)
        assert rig.master.at_rest()["leases"] == rig.node.at_rest()["streams"] == 0

    rig.run(test)


def test_a_connector_that_is_closed_has_been_served(make_rig: MakeRig) -> None:
    rig = make_rig(software=NoCosts(release=0.5))

    async def test() -> None:
        keys = chain(4)
        await rig.stored(keys)
        await rig.lookup(1, keys)
        await rig.connector.close()
        assert not rig.at_rest()

    rig.run(test)
