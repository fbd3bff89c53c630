"""Messages between processes: peers that break rules, stop, die, come again; order; limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from cxlbench.emu import wire
from cxlbench.emu.clock import WallClock
from cxlbench.emu.wire import Hello, MessageSet, WireClient, WireError
from cxlbench.emu.wire_server import MAX_AHEAD_S, MAX_BANNED, OPEN_CALLS, Peer, WireServer

VERSION = 7
PATIENCE_S = 20.0
"""What never comes is a failure after this; nothing waits for it otherwise."""


class Say(msgspec.Struct, tag="say", array_like=True):
    text: str


class Hang(msgspec.Struct, tag="hang", array_like=True):
    """Is not answered before ``release``."""


class Blob(msgspec.Struct, tag="blob", array_like=True):
    data: bytes


class Fail(msgspec.Struct, tag="fail", array_like=True):
    later: bool


MESSAGES: MessageSet[Say | Hang | Blob | Fail] = MessageSet(VERSION, Say | Hang | Blob | Fail)
TEXT = msgspec.msgpack.Decoder(str)
NUMBER = msgspec.msgpack.Decoder(int)


class Service:
    """Says what it hears, and keeps it."""

    def __init__(self, clock: WallClock, endpoint: str, epoch: int = 1, **options: Any) -> None:
        self.heard: list[str] = []
        self.gone: list[str] = []
        self.released = clock.future()
        self.server: WireServer[Any] = WireServer(
            clock,
            endpoint,
            MESSAGES,
            name="service",
            epoch=epoch,
            on_call=self.call,
            on_post=self.post,
            on_gone=lambda peer: self.gone.append(peer.name),
            **options,
        )

    def call(self, peer: Peer, body: Any) -> Any:
        if isinstance(body, Hang):
            return self.hang()
        if isinstance(body, Fail):
            if body.later:
                return self.fail_later()
            raise KeyError("not now")
        text = body.text if isinstance(body, Say) else str(len(body.data))
        self.heard.append(f"call {text}")
        return f"{self.server.epoch}: {text}"

    def post(self, peer: Peer, body: Any) -> None:
        if isinstance(body, Fail):
            raise KeyError("not now")
        self.heard.append(f"post {body.text}")

    async def hang(self) -> str:
        await asyncio.shield(self.released)
        return "released"

    async def fail_later(self) -> str:
        raise KeyError("not now")


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    path = tmp_path / "s"
    if len(str(path)) > 100:
        path = Path(f"/tmp/cxl-{os.getpid()}-{random.getrandbits(40)}")
    return f"ipc://{path}"


Body = Callable[[WallClock], Coroutine[Any, Any, None]]


def run(work: Body) -> None:
    async def limited(clock: WallClock) -> None:
        await asyncio.wait_for(work(clock), PATIENCE_S)

    with WallClock(shared=True) as clock:
        clock.run(limited(clock))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def exists(path: str) -> bool:
    return Path(path).exists()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something has happened."""
    while not condition():
        await asyncio.sleep(0.001)


def client(clock: WallClock, endpoint: str, **options: Any) -> WireClient:
    given = {"sends": MESSAGES, "name": "client", "timeout_s": PATIENCE_S, **options}
    return WireClient(clock, endpoint, **given)


class RawPeer:
    """A DEALER that sends whatever it likes."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(endpoint)

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(list(parts))

    def frame(self, kind: int, body: Any, *, version: int = VERSION, at_s: float = 0.0) -> None:
        self.send(wire.encode((version, kind, 1, at_s)), wire.encode(body))

    def hello(self, name: str = "raw", pid: int | None = None) -> None:
        self.frame(wire.HELLO, Hello(name, os.getpid() if pid is None else pid))

    async def answer(self) -> tuple[int, Any]:
        """Return kind and body of the next message."""
        while not self.socket.poll(0):
            await asyncio.sleep(0.001)
        header, body = self.socket.recv_multipart()
        return wire.HEADER.decode(header)[1], msgspec.msgpack.decode(body)

    def close(self) -> None:
        self.socket.close()


def with_service(
    endpoint: str, work: Callable[[WallClock, Service, RawPeer], Awaitable[None]], **options: Any
) -> None:
    async def inside(clock: WallClock) -> None:
        service, raw = Service(clock, endpoint, **options), RawPeer(endpoint)
        try:
            await work(clock, service, raw)
        finally:
            raw.close()
            await service.server.close()

    run(inside)


# -- peers that break the rules --------------------------------------------------------------------


def test_another_version_is_told_both_versions_and_not_listened_to_any_more(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.frame(wire.HELLO, Hello("raw", os.getpid()), version=VERSION + 1)
        kind, reason = await raw.answer()
        assert kind == wire.REFUSED
        assert f"version {VERSION} " in reason
        assert f"version {VERSION + 1}" in reason
        raw.hello()  # too late
        raw.frame(wire.POST, Say("late"))
        other = client(clock, endpoint)
        await other.call(Say("marker"), TEXT)
        assert service.heard == ["call marker"]
        assert service.server.refused == 1
        await other.close()

    with_service(endpoint, work)


def test_a_client_of_another_version_learns_why_at_once_and_later_too(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        old = client(clock, endpoint, sends=MessageSet(VERSION - 1, Say))
        for _ in range(2):
            with pytest.raises(WireError, match=f"refused: service speaks version {VERSION}"):
                await old.call(Say("hello"), TEXT)
        await old.close()

    with_service(endpoint, work)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((b"",), "a header and a body"),
        ((b"a", b"b", b"c"), "a header and a body"),
        ((b"\xc1", b""), "MessagePack"),
        ((wire.encode([VERSION, wire.CALL, 1]), b""), "length 4"),
        ((wire.encode((VERSION, 99, 1, 0.0)), b""), "say hello"),
    ],
)
def test_what_is_no_frame_is_refused_with_a_reason(
    endpoint: str, parts: tuple[bytes, ...], reason: str
) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.send(*parts)
        kind, told = await raw.answer()
        assert kind == wire.REFUSED
        assert reason in told

    with_service(endpoint, work)


@pytest.mark.parametrize(
    ("kind", "body", "at_s", "reason"),
    [
        (wire.CALL, ["no such tag"], 0.0, "no such tag"),
        (wire.CALL, ["say", 5], 0.0, "Expected `str`"),
        (wire.POST, 5, 0.0, "array"),
        (wire.ANSWER, None, 0.0, "not for a server"),
        (wire.POST, ["say", "x"], float("nan"), "ahead"),
        (wire.POST, ["say", "x"], float("inf"), "ahead"),
        (wire.CALL, ["say", "x"], 1e300, "ahead"),
        (wire.HELLO, ["another name", os.getpid()], 0.0, "hello was said already"),
    ],
)
def test_a_known_peer_that_breaks_the_rules_is_told_and_forgotten(
    endpoint: str, kind: int, body: Any, at_s: float, reason: str
) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.hello()
        assert (await raw.answer())[0] == wire.WELCOME
        raw.frame(kind, body, at_s=at_s)
        told, text = await raw.answer()
        assert told == wire.REFUSED
        assert reason in text
        assert service.gone == ["raw"]
        assert service.heard == []
        assert not service.server.peers

    with_service(endpoint, work)


@pytest.mark.parametrize("pid", [-1, 0, 2**40, 2**31 - 1])
def test_a_process_id_that_is_none_here_is_refused(endpoint: str, pid: int) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.hello(pid=pid)
        kind, reason = await raw.answer()
        assert kind == wire.REFUSED
        assert f"no process {pid} is here" in reason
        assert not service.server.peers

    with_service(endpoint, work)


def test_the_same_hello_said_twice_is_welcomed_twice_and_is_one_peer(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        for _ in range(2):
            raw.hello()
            assert (await raw.answer())[0] == wire.WELCOME
        assert len(service.server.peers) == 1
        assert service.server.refused == 0

    with_service(endpoint, work)


def test_who_speaks_before_hello_is_asked_for_it_and_may_then_say_it(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.frame(wire.POST, Say("early"))
        assert await raw.answer() == (wire.REFUSED, wire.SAY_HELLO)
        raw.hello()
        assert (await raw.answer())[0] == wire.WELCOME
        assert service.heard == []

    with_service(endpoint, work)


def fuzzed(draw: random.Random) -> list[bytes]:
    """Return a message that is almost right, or anything else."""
    header: Any = [VERSION, draw.randrange(12), draw.randrange(1 << 20), draw.random()]
    body: Any = draw.choice(
        [["say", "x"], ["hang"], ["blob", b"x"], ["fail", False], ["fuzz", os.getpid()], None]
    )
    parts = [wire.encode(header), wire.encode(body)]
    how = draw.randrange(6)
    if how == 0:
        parts = [draw.randbytes(draw.randrange(40)) for _ in range(draw.randrange(1, 5))]
    elif how == 1:
        part = draw.randrange(2)
        data = bytearray(parts[part])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        parts[part] = bytes(data)
    elif how == 2:
        header[draw.randrange(4)] = draw.choice([None, -1, 1 << 63, float("nan"), "x", []])
        parts[0] = wire.encode(header)
    elif how == 3:
        parts[1] = parts[1][: draw.randrange(len(parts[1]))]
    return parts


def test_100_000_fuzzed_messages_crash_nothing_cost_no_memory_and_hold_up_nobody(
    endpoint: str,
) -> None:
    messages, per_peer = 100_000, 100

    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        service.released.set_result(None)
        draw = random.Random(1)
        good = client(clock, endpoint)
        await good.call(Say("before"), TEXT)
        before = 0
        for number in range(messages // per_peer):
            peer = RawPeer(endpoint)
            if number % 2:
                peer.hello("fuzz")
            for _ in range(per_peer):
                peer.send(*fuzzed(draw))
            peer.frame(wire.HELLO, Hello("fuzz", os.getpid()), version=0)
            kind, reason = await peer.answer()
            while kind != wire.REFUSED or reason == wire.SAY_HELLO:
                kind, reason = await peer.answer()  # each is told why, in the end
            peer.close()
            if number == 200:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert await good.call(Say("after"), TEXT) == "1: after"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 16 << 10  # KiB
        assert service.server.refused == messages // per_peer
        assert set(service.server.peers) == {
            address for address, peer in service.server.peers.items() if peer.name == "client"
        }
        assert len(service.server._banned) <= MAX_BANNED
        await good.close()

    with_service(endpoint, work)


def test_each_of_100_000_fuzzed_messages_is_served_or_refused(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        server = service.server
        service.released.set_result(None)
        draw = random.Random(4)
        hello = wire.encode(Hello("fuzz", os.getpid()))
        for number in range(100_000):
            address = number.to_bytes(4, "big")
            if number % 100 == 0:
                greeting = wire.encode((VERSION, wire.HELLO, 1, 0.0))
                server._take([address, greeting, hello])  # of so many, one is known
            server._take([address, *fuzzed(draw)])
            assert address not in server._banned or address not in server.peers
            if number % 1000 == 0:
                await asyncio.sleep(0)
        assert 30_000 < server.refused < 70_000
        assert len(server._banned) == MAX_BANNED
        assert service.gone
        for address in list(server.peers):
            server._forget(address)
        assert not server._watched

    with_service(endpoint, work)


def test_raw_bytes_on_the_socket_hurt_nobody_and_leave_nothing(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        draw = random.Random(2)
        good = client(clock, endpoint)
        await good.call(Say("before"), TEXT)
        before = descriptors()
        for number in range(200):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(endpoint.removeprefix("ipc://"))
                start = b"\xff\0\0\0\0\0\0\0\1\x7f\3" if number % 2 else b""
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    plain.sendall(start + draw.randbytes(20_000))
        assert await good.call(Say("still here"), TEXT) == "1: still here"
        await until(lambda: descriptors() <= before)
        await good.close()

    with_service(endpoint, work)


def test_an_oversize_message_is_refused_by_the_client_and_loses_nothing(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        blob = Blob(bytes(wire.MAX_MESSAGE_BYTES))
        with pytest.raises(WireError, match="at most 8388608 B are taken"):
            await good.call(blob, TEXT)
        assert await good.call(Blob(bytes(wire.MAX_MESSAGE_BYTES - 100)), TEXT) == "1: 8388508"
        await good.close()

    with_service(endpoint, work)


def test_an_oversize_message_that_is_sent_all_the_same_ends_that_connection(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        await good.call(Say("before"), TEXT)
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.hello()
        assert (await raw.answer())[0] == wire.WELCOME
        raw.frame(wire.POST, Blob(bytes(wire.MAX_MESSAGE_BYTES + 1)))
        while not monitor.poll(0):
            await asyncio.sleep(0.001)
        raw.socket.disable_monitor()
        monitor.close(linger=0)
        assert await good.call(Say("after"), TEXT) == "1: after"
        await good.close()

    with_service(endpoint, work)


def test_messages_for_later_are_bounded_in_bytes(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.hello()
        assert (await raw.answer())[0] == wire.WELCOME
        for _ in range(10):
            raw.frame(wire.POST, Blob(bytes(7 << 20)), at_s=clock.real() + MAX_AHEAD_S / 2)
        kind, reason = await raw.answer()
        assert kind == wire.REFUSED
        assert "not due yet" in reason

    with_service(endpoint, work)


def test_calls_under_way_are_bounded_and_the_next_one_is_told_so(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        raw.hello()
        await raw.answer()
        for _ in range(OPEN_CALLS + 1):
            raw.frame(wire.CALL, Hang())
        kind, reason = await raw.answer()
        assert kind == wire.FAILED
        assert "calls at once" in reason

    with_service(endpoint, work)


# -- services that cannot --------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_what_a_service_cannot_do_is_told_to_the_caller_and_the_server_goes_on(
    endpoint: str, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        with pytest.raises(WireError, match="failed: KeyError: 'not now'"):
            await good.call(Fail(later), TEXT)
        good.post(Fail(later))
        assert await good.call(Say("on"), TEXT) == "1: on"
        assert service.server.failed == 2
        await good.close()

    with_service(endpoint, work)
    assert "cannot serve Fail of client" in caplog.text


def test_an_answer_of_another_type_is_an_error_of_the_call(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        with pytest.raises(WireError, match="answers something else"):
            await good.call(Say("no number"), NUMBER)
        await good.close()

    with_service(endpoint, work)


# -- order and time --------------------------------------------------------------------------------


def test_posts_and_calls_of_one_peer_take_effect_in_the_order_of_sending(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        await good.call(Say("first"), TEXT)
        wanted = ["call first"]
        calls = []
        draw = random.Random(3)
        for number in range(300):
            costs_s = draw.choice([0.0, 0.0, 1e-4, 2e-3])
            if draw.random() < 0.5:
                good.post(Say(str(number)), serve_s=costs_s)
                wanted.append(f"post {number}")
            else:
                call = good.call(Say(str(number)), TEXT, serve_s=costs_s)
                calls.append(clock.spawn(call))
                await asyncio.sleep(0)  # it is sent when its task first runs
                wanted.append(f"call {number}")
        for job in calls:
            await job
        assert service.heard == wanted
        await good.close()

    with_service(endpoint, work)


def test_a_message_that_is_due_does_not_overtake_one_whose_timer_has_not_run(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        peer = Peer(b"x", "x", os.getpid())
        service.server.peers[b"x"] = peer
        at_s = clock.real() + 1e-3
        service.server._in_order(peer, at_s, 1, service.server._serve_post, peer, Say("first"))
        while clock.real() < at_s + 1e-3:
            pass  # the loop is busy: the timer is due and has not run
        service.server._in_order(peer, at_s, 1, service.server._serve_post, peer, Say("second"))
        assert service.heard == []
        await until(lambda: len(service.heard) == 2)
        assert service.heard == ["post first", "post second"]
        del service.server.peers[b"x"]

    with_service(endpoint, work)


def test_a_call_costs_two_ways_and_the_service_in_logical_time(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint, half_s=0.02)
        await good.call(Say("warm"), TEXT)
        begin_s = clock.now()
        await good.call(Say("timed"), TEXT, serve_s=0.01)
        assert clock.now() - begin_s == pytest.approx(0.05, abs=1e-6)
        await good.close()

    with_service(endpoint, work)


# -- servers that end, stop, or come again ---------------------------------------------------------


def test_no_answer_within_the_limit_is_an_error(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        with pytest.raises(WireError, match="does not answer"):
            await good.call(Hang(), TEXT, timeout_s=0.02)
        assert not good._waiting
        assert not good._asked
        await good.close()

    with_service(endpoint, work)


def test_a_call_to_nobody_ends_in_its_limit_and_is_not_made_later(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        good = client(clock, endpoint)
        with pytest.raises(WireError, match="does not answer"):
            await good.call(Say("nobody hears"), TEXT, timeout_s=0.02)
        service = Service(clock, endpoint)
        assert await good.call(Say("now"), TEXT) == "1: now"
        assert service.heard == ["call now"]
        await good.close()
        await service.server.close()

    run(work)


def test_calls_that_wait_are_made_again_when_the_server_was_started_anew(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        epochs: list[int] = []
        good = client(clock, endpoint, on_epoch=lambda welcome: epochs.append(welcome.epoch))
        first = Service(clock, endpoint, epoch=1)
        await good.call(Say("one"), TEXT)
        waiting = clock.spawn(good.call(Hang(), TEXT))
        await until(lambda: any(peer.open_calls for peer in first.server.peers.values()))
        await first.server.close()
        second = Service(clock, endpoint, epoch=2)
        second.released.set_result(None)
        assert await waiting == "released"
        assert await good.call(Say("two"), TEXT) == "2: two"
        assert epochs == [1, 2]
        await good.close()
        await second.server.close()

    run(work)


def test_a_client_with_nothing_to_say_notices_a_new_server_all_the_same(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        epochs: list[int] = []
        good = client(clock, endpoint, on_epoch=lambda welcome: epochs.append(welcome.epoch))
        for epoch in (1, 2, 3):
            service = Service(clock, endpoint, epoch=epoch)
            await until(lambda epoch=epoch: epochs[-1:] == [epoch])
            await service.server.close()
        await good.close()

    run(work)


def test_a_hello_that_a_dying_server_took_with_it_is_said_again(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        context = zmq.Context()
        silent = context.socket(zmq.ROUTER)
        silent.setsockopt(zmq.LINGER, 0)
        silent.bind(endpoint)
        good = client(clock, endpoint)
        call = clock.spawn(good.call(Say("made again"), TEXT))
        while not silent.poll(0):
            await asyncio.sleep(0.001)
        silent.recv_multipart()  # the hello, which is never answered
        silent.close()
        context.term()
        service = Service(clock, endpoint)
        assert await call == "1: made again"
        await good.close()
        await service.server.close()

    run(work)


def test_a_refused_client_may_try_again_with_the_next_server(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        service = Service(clock, endpoint)
        bad = client(clock, endpoint, sends=MessageSet(VERSION + 1, Say))
        with pytest.raises(WireError, match="refused"):
            await bad.call(Say("x"), TEXT)
        await service.server.close()
        newer: WireServer[Any] = WireServer(
            clock,
            endpoint,
            MessageSet(VERSION + 1, Say),
            name="newer",
            epoch=2,
            on_call=lambda peer, body: body.text,
            on_post=lambda peer, body: None,
            on_gone=lambda peer: None,
        )
        await until(lambda: bad.epoch == 2)
        assert await bad.call(Say("x"), TEXT) == "x"
        await bad.close()
        await newer.close()

    run(work)


def test_closing_a_client_ends_its_calls_and_says_goodbye(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        waiting = clock.spawn(good.call(Hang(), TEXT))
        await until(lambda: any(peer.open_calls for peer in service.server.peers.values()))
        await good.close()
        with pytest.raises(WireError, match="closed"):
            await waiting
        with pytest.raises(WireError, match="closed"):
            await good.call(Say("x"), TEXT)
        await until(lambda: service.gone == ["client"])
        assert not service.server.peers

    with_service(endpoint, work)


def test_closing_a_server_cancels_what_it_serves_and_removes_its_socket(endpoint: str) -> None:
    async def work(clock: WallClock) -> None:
        service = Service(clock, endpoint)
        good = client(clock, endpoint, timeout_s=0.05)
        waiting = clock.spawn(good.call(Hang(), TEXT))
        await until(lambda: any(peer.open_calls for peer in service.server.peers.values()))
        await service.server.close()
        assert not exists(endpoint.removeprefix("ipc://"))
        with pytest.raises(WireError, match="does not answer"):
            await waiting
        await good.close()

    run(work)


def test_an_endpoint_in_use_is_refused_and_its_server_is_left_alone(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        with pytest.raises(OSError, match="another process serves there"):
            Service(clock, endpoint)
        good = client(clock, endpoint)
        assert await good.call(Say("mine"), TEXT) == "1: mine"
        await good.close()

    with_service(endpoint, work)


def test_a_port_in_use_is_refused() -> None:
    async def work(clock: WallClock) -> None:
        first = Service(clock, "tcp://127.0.0.1:*")
        with pytest.raises(OSError, match=r"cannot serve at tcp.*in use"):
            Service(clock, first.server.endpoint)
        await first.server.close()

    run(work)


def test_a_socket_file_that_a_dead_server_left_is_no_obstacle(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(endpoint.removeprefix("ipc://"))

    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        good = client(clock, endpoint)
        assert await good.call(Say("mine"), TEXT) == "1: mine"
        await good.close()

    with_service(endpoint, work)


# -- peers in processes of their own ---------------------------------------------------------------

PEER = """
    import os, sys, zmq
    from cxlbench.emu import wire
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(sys.argv[1])
    version = int(sys.argv[2])
    def send(kind, body):
        socket.send_multipart([wire.encode((version, kind, 1, 0.0)), wire.encode(body)])
    send(wire.HELLO, ["child", os.getpid()])
    socket.recv_multipart()
    for _ in range(int(sys.argv[3])):
        send(wire.CALL, ["blob", bytes(100)])
    print("ready", flush=True)
    sys.stdin.read()
"""


def start_child(endpoint: str, calls: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PEER), endpoint, str(VERSION), str(calls)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


async def child(endpoint: str, calls: int) -> subprocess.Popen[bytes]:
    """Start a peer that says hello, makes calls, and never reads an answer."""
    process = start_child(endpoint, calls)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while not process.stdout.read():
        await asyncio.sleep(0.001)
        assert process.poll() is None
    return process


def reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_a_killed_peer_is_noticed_and_given_up_once(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        process = await child(endpoint, 0)
        (peer,) = service.server.peers.values()
        assert service.server.lives(peer)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not service.server.lives(peer)  # even before the loop has seen it
        await asyncio.sleep(0.01)
        assert service.gone == ["child"]
        reap(process)

    with_service(endpoint, work)


def test_a_peer_that_stops_reading_holds_up_nobody(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        calls = 30_000
        process = await child(endpoint, calls)
        await until(lambda: len(service.heard) >= calls)
        good = client(clock, endpoint)
        assert await good.call(Say("served"), TEXT) == "1: served"
        process.send_signal(signal.SIGKILL)
        process.wait()
        await until(lambda: "child" in service.gone)
        await good.close()
        reap(process)

    with_service(endpoint, work)


def test_a_note_reaches_the_peer_that_it_is_for(endpoint: str) -> None:
    async def work(clock: WallClock, service: Service, raw: RawPeer) -> None:
        notes: list[bytes] = []
        good = client(clock, endpoint, on_note=notes.append)
        await good.call(Say("here"), TEXT)
        (peer,) = service.server.peers.values()
        service.server.note(peer, "news")
        await until(lambda: bool(notes))
        assert msgspec.msgpack.decode(notes[0]) == "news"
        await good.close()

    with_service(endpoint, work)


def test_the_layout_of_a_frame_is_part_of_the_version() -> None:
    assert wire.encode((VERSION, wire.CALL, 3, 0.5)) == struct.pack(
        ">BBBBBd", 0x94, VERSION, wire.CALL, 3, 0xCB, 0.5
    )
