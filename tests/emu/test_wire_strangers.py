"""Clients of a wire whose endpoint something else serves: they say so, and go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from cxlbench.emu import wire
from cxlbench.emu.clock import WallClock
from cxlbench.emu.unix_paths import Door
from cxlbench.emu.wire import MessageSet, Welcome, WireClient, WireError
from cxlbench.emu.wire_server import WireServer

VERSION = 3


class Ask(msgspec.Struct, tag="ask", array_like=True):
    number: int


MESSAGES = MessageSet(VERSION, Ask)
NUMBER = msgspec.msgpack.Decoder(int)
GARBAGE = b"\xc1"


def header(kind: int, *, version: int = VERSION, number: int = 1, at_s: float = 0.0) -> bytes:
    return wire.encode((version, kind, number, at_s))


WELCOME = wire.encode(Welcome("stranger", os.getpid(), 5))
ANSWERS: dict[str, list[bytes]] = {
    "no frame": [b"\xff\x00", b"x"],
    "one part": [b"x"],
    "three parts": [header(wire.WELCOME), WELCOME, b""],
    "no welcome": [header(wire.WELCOME), GARBAGE],
    "no reason": [header(wire.REFUSED), GARBAGE],
    "another version": [header(wire.WELCOME, version=VERSION + 1), WELCOME],
    "no time": [header(wire.WELCOME, at_s=float("nan")), WELCOME],
}


@pytest.fixture
def clock() -> Iterator[WallClock]:
    with WallClock(shared=True) as made:
        yield made


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Stranger:
    """A ROUTER that answers everything with the same."""

    def __init__(self, clock: WallClock, endpoint: str, answer: list[bytes]) -> None:
        self.clock = clock
        self.answer = answer
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.door = Door(endpoint)
        self.socket.bind(self.door.endpoint)
        self.job = clock.spawn(self._serve())

    async def _serve(self) -> None:
        while True:
            while self.socket.poll(0):
                address = self.socket.recv_multipart()[0]
                self.socket.send_multipart([address, *self.answer])
            await self.clock.sleep(1e-3)

    def close(self) -> None:
        self.job.cancel()
        self.socket.close()
        self.context.term()
        self.door.close()


@pytest.mark.parametrize("answer", list(ANSWERS.values()), ids=list(ANSWERS))
def test_a_client_says_at_once_that_something_else_serves_and_finds_the_right_one_later(
    clock: WallClock, endpoint: str, answer: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        stranger = Stranger(clock, endpoint, answer)
        client = WireClient(clock, endpoint, sends=MESSAGES, name="client", timeout_s=20)
        begin_s = clock.real()
        for _ in range(2):
            with pytest.raises(WireError, match="is served by something else"):
                await client.call(Ask(1), NUMBER)
        assert clock.real() - begin_s < 10
        stranger.close()
        server = WireServer(
            clock,
            endpoint,
            MESSAGES,
            name="server",
            epoch=1,
            on_call=lambda peer, body: body.number + 1,
            on_post=lambda peer, body: None,
            on_gone=lambda peer: None,
        )
        while client.refused is not None:
            await clock.sleep(1e-3)
        assert await client.call(Ask(1), NUMBER) == 2
        await client.close()
        await server.close()

    clock.run(work())
    assert caplog.records == []  # nothing was raised where nobody looks


@pytest.mark.parametrize("endpoint_", ["", "x", "tcp://nowhere", "ipc://"])
def test_an_endpoint_that_is_none_is_refused_and_holds_nothing(
    clock: WallClock, endpoint_: str
) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="cannot connect to"):
        WireClient(clock, endpoint_, sends=MESSAGES, name="client")
    assert descriptors() == before


def test_a_client_that_finds_no_descriptor_left_says_so_and_holds_none(
    clock: WallClock, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    before = descriptors()
    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", refuse)
    with pytest.raises(OSError, match=r"cannot connect to .*Too many open files") as refusal:
        WireClient(clock, endpoint, sends=MESSAGES, name="client")
    assert refusal.value.errno == errno.EMFILE
    assert descriptors() == before


def test_a_giant_answer_ends_the_connection_and_not_the_client(
    clock: WallClock, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_ANSWER_BYTES", 1 << 16)
    sent: list[Any] = []

    def answer(peer: Any, body: Any) -> bytes:
        sent.append(body)
        return bytes(1 << 17)

    async def work() -> None:
        server = WireServer(
            clock,
            endpoint,
            MESSAGES,
            name="server",
            epoch=1,
            on_call=answer,
            on_post=lambda peer, body: None,
            on_gone=lambda peer: None,
        )
        client = WireClient(clock, endpoint, sends=MESSAGES, name="client", timeout_s=0.3)
        with pytest.raises(WireError, match="does not answer"):
            await client.call(Ask(1), msgspec.msgpack.Decoder(bytes))
        await client.close()
        await server.close()

    clock.run(work())
    assert sent
