"""Messages between processes: calls with answers, and one-way posts, by msgspec over ZeroMQ.

One side serves (a ROUTER socket, ``wire_server.py``), any number of others connect (DEALER, here).
A frame is a header ``[version, kind, id, at_s]`` and a body; bodies are tagged msgspec structs of a
fixed set, and are checked against it. Who connects says *hello* first, with its version and process
id; whoever sends another version, something that is no frame, or a body that is not of the set is
told the reason, forgotten, and not listened to any more. The server notices when a peer's process
ends. What a service cannot do is answered with the reason, and the server goes on.

A client that something else answers than a server of this kind says so at once, and asks again only
after the next connection.

Each new connection begins with a hello, also that of a client that had nothing to say when the
server was started anew: calls that wait are made again then, under the new epoch.

Time: both sides run on a wall clock that is shared between processes. A message carries the logical
time at which it takes effect at the other side, so that the way through the kernel adds nothing to
emulated time as long as it is faster than the profile says. Messages of one peer take effect in
the order in which they were sent.

Units: s, bytes. Left out: encryption and authentication (Unix sockets and loopback only), more than
one connection a peer, and a limit on the parts of one message, which ZeroMQ collects before we see
any of them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from cxlbench.emu.clock import WallClock
from cxlbench.emu.unix_paths import Door

MAX_MESSAGE_BYTES = 8 << 20
MAX_ANSWER_BYTES = 64 << 20
"""Of one message of a server; what is larger ends the connection."""
QUEUED_MESSAGES = 4096
"""How many messages wait for a peer that does not read; what comes after them is dropped."""

HELLO, WELCOME, CALL, POST, ANSWER, FAILED, NOTE, REFUSED, BYE = range(9)
GOODBYE_MS = 100
"""How long a client that closes tries to say so."""
SAY_HELLO = "say hello first"
HEADER = msgspec.msgpack.Decoder(tuple[int, int, int, float])
encode = msgspec.msgpack.Encoder().encode

Body = TypeVar("Body")


class WireError(Exception):
    """A call could not be made: the other side is down, hung, of another version, or refused it."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a peer."""

    name: str
    pid: int


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The server's answer to it. ``epoch`` is another one after each start of the server."""

    name: str
    pid: int
    epoch: int


_WELCOME = msgspec.msgpack.Decoder(Welcome)


@dataclass(frozen=True, slots=True)
class MessageSet(Generic[Body]):
    """The bodies that one side may send: a version, and a union of tagged structs."""

    version: int
    bodies: Any
    """A union type of ``msgspec.Struct`` classes with tags."""

    def decoder(self) -> msgspec.msgpack.Decoder[Body]:
        """Return a decoder that accepts these bodies and nothing else."""
        return msgspec.msgpack.Decoder(self.bodies)


def descriptor_of(peer_socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that tells, once each time, that a socket has something new."""
    return int(peer_socket.getsockopt(zmq.FD))


def has_message(peer_socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits to be received."""
    return bool(int(peer_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class WireClient:
    """One process's connection to a server. Calls end in an answer or a ``WireError``."""

    def __init__(
        self,
        clock: WallClock,
        endpoint: str,
        *,
        sends: MessageSet[Any],
        name: str,
        half_s: float = 0.0,
        timeout_s: float = 1.0,
        on_note: Callable[[bytes], object] = lambda _: None,
        on_epoch: Callable[[Welcome], object] = lambda _: None,
    ) -> None:
        self.clock = clock
        self.endpoint = endpoint
        self.name = name
        self.half_s = half_s
        self.timeout_s = timeout_s
        self.calls = 0
        self.epoch: int | None = None
        """The server's epoch; None before its first welcome, and after it was lost."""
        self.refused: str | None = None
        """Why the server does not listen to us; None while it does."""
        self._version = sends.version
        self._on_note = on_note
        self._on_epoch = on_epoch
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[float, bytes]]] = {}
        self._asked: dict[int, tuple[int, int, float, Any]] = {}
        self._greeting: int | None = None
        self._unsent: list[tuple[int, int, float, Any]] = []
        self._closed = False
        self._door = Door(endpoint)
        self._context = zmq.Context()
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._door.close()
            raise OSError(
                error.errno, f"cannot connect to {endpoint}: {error.strerror}", endpoint
            ) from error
        clock.loop.add_reader(descriptor_of(self._monitor), self._connected)
        clock.loop.add_reader(descriptor_of(self._socket), self._readable)
        self._greet()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        self._connected()  # a monitor tells of events only after it was found without any
        self._socket.connect(self._door.endpoint)

    def _connected(self) -> None:
        """Say hello again after each connection but the first: another process may serve there.

        Also a client that sends nothing notices so that the server was started anew.
        """
        while not self._closed and has_message(self._monitor):
            self._monitor.recv_multipart()
            self._connections += 1
            if self._connections > 1:
                self.refused = None
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Make the calls that wait again, after a welcome."""
        self.epoch = None
        self._unsent = list(self._asked.values())
        self._greet()

    def _greet(self) -> None:
        self._greeting = next(self._numbers)
        self._send(HELLO, self._greeting, self.clock.now(), Hello(self.name, os.getpid()))

    async def call(
        self,
        body: Any,
        decoder: msgspec.msgpack.Decoder[Body],
        *,
        serve_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Body:
        """Send ``body`` and return the answer; ``serve_s`` is what serving it costs.

        Raises ``WireError`` if no answer comes within ``timeout_s``. The server may have done the
        work all the same: what it hands out has a name that the caller chose.
        """
        if self._closed:
            raise WireError(f"the connection to {self.endpoint} is closed")
        if self.refused is not None:
            raise WireError(self.refused)
        self.calls += 1
        number = next(self._numbers)
        future = self._waiting[number] = self.clock.future()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        alarm = self.clock.loop.call_later(limit_s, self._late, number)
        try:
            self._dispatch(CALL, number, self.clock.now() + self.half_s + serve_s, body)
            done_s, answer = await future
        finally:
            alarm.cancel()
            self._waiting.pop(number, None)
            self._asked.pop(number, None)
        if self.half_s:
            await self.clock.sleep_until(done_s + self.half_s)
        else:
            self.clock.advance(done_s)
        try:
            return decoder.decode(answer)
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.endpoint} answers something else: {error}") from error

    def post(self, body: Any, *, serve_s: float = 0.0) -> None:
        """Send a one-way message; it is lost if the server is down."""
        if not self._closed:
            self.calls += 1
            self._dispatch(POST, 0, self.clock.now() + self.half_s + serve_s, body)

    def _dispatch(self, kind: int, number: int, at_s: float, body: Any) -> None:
        """Send now, or after the server's welcome."""
        message = (kind, number, at_s, body)
        if kind == CALL:
            self._asked[number] = message
        if self.epoch is None:
            if len(self._unsent) < QUEUED_MESSAGES:
                self._unsent.append(message)
        else:
            self._send(kind, number, at_s, body)

    def _send(self, kind: int, number: int, at_s: float, body: Any) -> None:
        header, content = encode((self._version, kind, number, at_s)), encode(body)
        if len(content) > MAX_MESSAGE_BYTES:
            self._fail_one(
                number, f"a message of {len(content)} B, at most {MAX_MESSAGE_BYTES} B are taken"
            )
            return
        try:
            self._socket.send_multipart([header, content], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self._fail_one(number, f"{self.endpoint} does not take messages")
        if has_message(self._socket):
            self.clock.loop.call_soon(self._readable)

    def _late(self, number: int) -> None:
        self._fail_one(number, f"{self.endpoint} does not answer")

    def _fail_one(self, number: int, reason: str) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(WireError(reason))

    def _readable(self) -> None:
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._connected()  # before what came by a new connection
            try:
                header, body = parts
                version, kind, number, at_s = HEADER.decode(header)
                if version != self._version and kind != REFUSED:
                    raise ValueError(f"messages of version {version}, not {self._version}")
                self._take(kind, number, at_s, body)
            except (ValueError, msgspec.MsgspecError) as error:
                self._refuse(f"{self.endpoint} is served by something else: {error}")

    def _refuse(self, reason: str) -> None:
        """Make no more calls by this connection."""
        self.refused = reason
        self._fail(reason)

    def _take(self, kind: int, number: int, at_s: float, body: bytes) -> None:
        if not math.isfinite(at_s):
            raise ValueError(f"a message takes effect at {at_s}")
        if kind == ANSWER:
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result((at_s, body))
        elif kind == FAILED:
            self._fail_one(number, f"{self.endpoint} failed: {msgspec.msgpack.decode(body)}")
        elif kind == NOTE:
            self.clock.call_when(at_s + self.half_s, self._on_note, body)
        elif kind == WELCOME and number == self._greeting:
            welcome = _WELCOME.decode(body)
            self._greeting = None
            self.epoch = welcome.epoch
            self._on_epoch(welcome)
            unsent, self._unsent = self._unsent, []
            for message in unsent:
                if message[0] != CALL or message[1] in self._asked:
                    self._send(*message)
        elif kind == REFUSED:
            reason = msgspec.msgpack.decode(body)
            if reason != SAY_HELLO:
                self._refuse(f"{self.endpoint} refused: {reason}")
            elif self._greeting is None:
                # Another process serves there now; of what the earlier one was asked for, nothing
                # is left.
                self._begin_anew()

    def _fail(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WireError(reason))

    async def close(self) -> None:
        """Close the connection; calls that wait end in ``WireError``."""
        if self._closed:
            return
        self._closed = True
        self._fail("the connection is closed")
        self.clock.loop.remove_reader(descriptor_of(self._socket))
        if self.epoch is not None:
            self._send(BYE, 0, self.clock.now(), None)
        self.clock.loop.remove_reader(descriptor_of(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=GOODBYE_MS if self.epoch is not None else 0)
        self._context.term()
        self._door.close()
