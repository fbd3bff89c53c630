"""Messages between processes: calls with answers, and one-way posts, by msgspec over ZeroMQ.

One side serves (a ROUTER socket), any number of others connect (DEALER). A frame is a header
``[version, kind, id, at_s]`` and a body; bodies are tagged msgspec structs of a fixed set, and are
checked against it. Who connects says *hello* first, with its version and process id; whoever sends
another version, something that is no frame, or a body that is not of the set is told the reason,
forgotten, and not listened to any more. The server notices when a peer's process ends.

Time: both sides run on a wall clock that is shared between processes. A message carries the logical
time at which it takes effect at the other side, so that the way through the kernel adds nothing to
emulated time as long as it is faster than the profile says. Messages of one peer take effect in
the order in which they were sent.

Units: s, bytes. Left out: encryption and authentication (Unix sockets and loopback only), and more
than one connection a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from cxlbench.emu.clock import JobSet, WallClock

MAX_MESSAGE_BYTES = 8 << 20
MAX_BANNED = 1024
QUEUED_MESSAGES = 4096
"""How many messages wait for a peer that does not read; what comes after them is dropped."""

HELLO, WELCOME, CALL, POST, ANSWER, FAILED, NOTE, REFUSED = range(8)
SAY_HELLO = "say hello first"
_HEADER = msgspec.msgpack.Decoder(tuple[int, int, int, float])
_encode = msgspec.msgpack.Encoder().encode

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


_HELLO = msgspec.msgpack.Decoder(Hello)
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


@dataclass(eq=False, slots=True)
class Peer:
    """A connected process, as the server knows it."""

    address: bytes
    name: str
    pid: int
    last_s: float = 0.0
    """When its last message takes effect."""
    held: dict[Any, Any] = field(default_factory=dict)
    """Whatever the service keeps for it, to be given back when it is gone."""


class WireServer(Generic[Body]):
    """Serves calls. ``on_call`` answers with a struct, or an awaitable of one; posts get none."""

    def __init__(
        self,
        clock: WallClock,
        endpoint: str,
        messages: MessageSet[Body],
        *,
        name: str,
        epoch: int,
        on_call: Callable[[Peer, Body], Any],
        on_post: Callable[[Peer, Body], object],
        on_gone: Callable[[Peer], object],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.clock = clock
        self.name = name
        self.epoch = epoch
        self.messages = messages
        self.refused = 0
        """Peers that were told a reason and forgotten."""
        self.peers: dict[bytes, Peer] = {}
        self._on_call = on_call
        self._on_post = on_post
        self._on_gone = on_gone
        self._decoder = messages.decoder()
        self._banned: OrderedDict[bytes, None] = OrderedDict()
        self._jobs = JobSet(clock)
        self._watched: dict[bytes, int] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._closed = False
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise OSError(
                error.errno, f"cannot serve at {endpoint}: {error.strerror}", endpoint
            ) from error
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        clock.loop.add_reader(self._socket.getsockopt(zmq.FD), self._readable)

    # -- receiving ------------------------------------------------------------------------------

    def _readable(self) -> None:
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)

    def _again(self) -> None:
        """Look once more: the descriptor tells of new messages only once."""
        if not self._closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.clock.loop.call_soon(self._readable)

    def _take(self, parts: list[bytes]) -> None:
        address = parts[0]
        if address in self._banned:
            return
        try:
            if len(parts) != 3:
                raise ValueError(f"a message has a header and a body, got {len(parts) - 1} parts")
            version, kind, number, at_s = _HEADER.decode(parts[1])
            if version != self.messages.version:
                raise ValueError(
                    f"{self.name} speaks version {self.messages.version} of its messages, "
                    f"got version {version}"
                )
            peer = self.peers.get(address)
            if kind == HELLO:
                self._greet(address, _HELLO.decode(parts[2]), number)
            elif peer is None:
                # It spoke to an earlier process at this endpoint: it may say hello again.
                self._send(address, REFUSED, 0, 0.0, SAY_HELLO)
            elif kind in (CALL, POST):
                body = self._decoder.decode(parts[2])
                peer.last_s = at_s = max(at_s, peer.last_s)
                if kind == CALL:
                    self.clock.call_when(at_s, self._serve, peer, number, body)
                else:
                    self.clock.call_when(at_s, self._serve_post, peer, body)
            else:
                raise ValueError(f"a message of kind {kind} is not for a server")
        except (ValueError, msgspec.MsgspecError, TypeError) as error:
            self._ban(address, str(error))

    def _greet(self, address: bytes, hello: Hello, number: int) -> None:
        if address in self.peers:
            raise ValueError("hello was said already")
        peer = self.peers[address] = Peer(address, hello.name, hello.pid)
        self._watch(peer)
        self._send(
            address, WELCOME, number, self.clock.now(), Welcome(self.name, os.getpid(), self.epoch)
        )

    def _ban(self, address: bytes, reason: str) -> None:
        self.refused += 1
        self._send(address, REFUSED, 0, 0.0, reason)
        self._banned[address] = None
        if len(self._banned) > MAX_BANNED:
            self._banned.popitem(last=False)
        self._forget(address)

    # -- serving --------------------------------------------------------------------------------

    def _serve(self, peer: Peer, number: int, body: Body) -> None:
        if peer.address not in self.peers:
            return
        answer = self._on_call(peer, body)
        if isinstance(answer, Awaitable):
            self._jobs.spawn(self._await(peer, number, answer))
        else:
            self._send(peer.address, ANSWER, number, self.clock.now(), answer)

    async def _await(self, peer: Peer, number: int, work: Awaitable[Any]) -> None:
        answer = await work
        self._send(peer.address, ANSWER, number, self.clock.now(), answer)

    def _serve_post(self, peer: Peer, body: Body) -> None:
        if peer.address in self.peers:
            self._on_post(peer, body)

    def note(self, peer: Peer, body: Any) -> None:
        """Tell a peer something that it did not ask for."""
        self._send(peer.address, NOTE, 0, self.clock.now(), body)

    def _send(self, address: bytes, kind: int, number: int, at_s: float, body: Any) -> None:
        if self._closed:
            return
        header = _encode((self.messages.version, kind, number, at_s))
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([address, header, _encode(body)], zmq.NOBLOCK, copy=True)
        self._again()

    # -- peers that end -------------------------------------------------------------------------

    def _watch(self, peer: Peer) -> None:
        """Notice the end of a peer's process, where the system can tell."""
        opener = getattr(os, "pidfd_open", None)
        if opener is None:
            self._jobs.spawn(self._poll_for_life(peer))
            return
        try:
            descriptor = opener(peer.pid)
        except OSError:
            self.clock.loop.call_soon(self._forget, peer.address)
            return
        self._watched[peer.address] = descriptor
        self.clock.loop.add_reader(descriptor, self._forget, peer.address)

    async def _poll_for_life(self, peer: Peer) -> None:
        while peer.address in self.peers:
            await self.clock.sleep(0.5)
            try:
                os.kill(peer.pid, 0)
            except OSError:
                self._forget(peer.address)

    def _forget(self, address: bytes) -> None:
        descriptor = self._watched.pop(address, None)
        if descriptor is not None:
            self.clock.loop.remove_reader(descriptor)
            os.close(descriptor)
        peer = self.peers.pop(address, None)
        if peer is not None:
            self._on_gone(peer)

    async def close(self) -> None:
        """Stop serving; peers' calls end in their own timeouts."""
        if self._closed:
            return
        self._closed = True
        self.clock.loop.remove_reader(self._socket.getsockopt(zmq.FD))
        for address in list(self._watched):
            descriptor = self._watched.pop(address)
            self.clock.loop.remove_reader(descriptor)
            os.close(descriptor)
        self.peers.clear()
        await self._jobs.cancel()
        self._socket.close()
        self._context.term()


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
        self._version = sends.version
        self._on_note = on_note
        self._on_epoch = on_epoch
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[float, bytes]]] = {}
        self._asked: dict[int, tuple[int, int, float, Any]] = {}
        self._greeting: int | None = None
        self._unsent: list[tuple[int, int, float, Any]] = []
        self._context = zmq.Context()
        self._closed = False
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(self.endpoint)
        self.clock.loop.add_reader(self._socket.getsockopt(zmq.FD), self._readable)
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
        return decoder.decode(answer)

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
        header = _encode((self._version, kind, number, at_s))
        try:
            self._socket.send_multipart([header, _encode(body)], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_exception(WireError(f"{self.endpoint} does not take messages"))
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.clock.loop.call_soon(self._readable)

    def _late(self, number: int) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(WireError(f"{self.endpoint} does not answer"))

    def _readable(self) -> None:
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._take(*_HEADER.decode(parts[0])[1:], parts[1])

    def _take(self, kind: int, number: int, at_s: float, body: bytes) -> None:
        if kind == ANSWER:
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result((at_s, body))
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
                self._fail(f"{self.endpoint} refused: {reason}")
            elif self._greeting is None:
                # Another process serves there now; of what the earlier one was asked for, nothing
                # is left. So the calls that wait are made again, after its welcome.
                self.epoch = None
                self._unsent = list(self._asked.values())
                self._greet()

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
        self.clock.loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()
        self._context.term()
