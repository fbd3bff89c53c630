"""The serving end of ``wire.py``: takes messages in, in order, at their time; knows its peers.

Nothing that a peer sends may end the server or make it grow without bound: messages have a largest
size, wait for their time only so long and so many, and a peer that breaks the rules is told why and
not listened to any more. Units: s, bytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import msgspec
import zmq

from cxlbench.emu.clock import JobSet, WallClock
from cxlbench.emu.unix_paths import UNIX, Door
from cxlbench.emu.wire import (
    ANSWER,
    BYE,
    CALL,
    FAILED,
    HEADER,
    HELLO,
    MAX_MESSAGE_BYTES,
    NOTE,
    POST,
    QUEUED_MESSAGES,
    REFUSED,
    SAY_HELLO,
    WELCOME,
    Body,
    Hello,
    MessageSet,
    Welcome,
    descriptor_of,
    encode,
    has_message,
)

MAX_BANNED = 1024
MAX_AHEAD_S = 60.0
"""How far in the future a message may take effect."""
MAX_AHEAD_BYTES = 64 << 20
"""How much of one peer may wait for its time."""
OPEN_CALLS = 4096
"""Calls of one peer that may be under way at once."""
READ_AT_ONCE = 256
"""Messages that are taken in before others get their turn."""
LOGGED_FAILURES = 20
_log = logging.getLogger(__name__)
_HELLO = msgspec.msgpack.Decoder(Hello)


@dataclass(eq=False, slots=True)
class Peer:
    """A connected process, as the server knows it."""

    address: bytes
    name: str
    pid: int
    last_s: float = 0.0
    """When its last message takes effect."""
    early: int = 0
    """Messages that wait for their time."""
    early_bytes: int = 0
    open_calls: int = 0


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
        self.failed = 0
        """Messages that the service could not serve."""
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
        self._door: Door | None = None
        try:
            self._door = Door(endpoint)
            if endpoint.startswith(UNIX):
                _refuse_if_served(self._door.path)
            self._socket.bind(self._door.endpoint)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close()
            self._context.term()
            if self._door is not None:
                self._door.close()
            raise OSError(
                error.errno, f"cannot serve at {endpoint}: {error.strerror}", endpoint
            ) from error
        self.endpoint = endpoint
        if not endpoint.startswith(UNIX):  # the system may have chosen the port
            bound = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT))
            self.endpoint = bound.decode().rstrip("\0")
        clock.loop.add_reader(descriptor_of(self._socket), self._readable)

    # -- receiving ------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(READ_AT_ONCE):
            if self._closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self.clock.loop.call_soon(self._readable)

    def _again(self) -> None:
        """Look once more: the descriptor tells of new messages only once."""
        if not self._closed and has_message(self._socket):
            self.clock.loop.call_soon(self._readable)

    def _take(self, parts: list[bytes]) -> None:
        address = parts[0]
        if address in self._banned:
            return
        try:
            if len(parts) != 3:
                raise ValueError(f"a message has a header and a body, got {len(parts) - 1} parts")
            version, kind, number, at_s = HEADER.decode(parts[1])
            nbytes = len(parts[2])
            if version != self.messages.version:
                raise ValueError(
                    f"{self.name} speaks version {self.messages.version} of its messages, "
                    f"got version {version}"
                )
            peer = self.peers.get(address)
            if kind == HELLO:
                self._greet(address, _HELLO.decode(parts[2]), number)
            elif kind == BYE:
                if peer is not None:
                    self._in_order(peer, at_s, nbytes, self._forget, address)
            elif peer is None:
                # It spoke to an earlier process at this endpoint: it may say hello again.
                self._send(address, REFUSED, 0, 0.0, SAY_HELLO)
            elif kind in (CALL, POST):
                body = self._decoder.decode(parts[2])
                if kind == CALL:
                    self._in_order(peer, at_s, nbytes, self._serve, peer, number, body)
                else:
                    self._in_order(peer, at_s, nbytes, self._serve_post, peer, body)
            else:
                raise ValueError(f"a message of kind {kind} is not for a server")
        except (ValueError, msgspec.MsgspecError, TypeError) as error:
            self._ban(address, str(error))

    def _in_order(
        self, peer: Peer, at_s: float, nbytes: int, serve: Callable[..., object], *args: Any
    ) -> None:
        """Let a message take effect at its time, and after those before it."""
        clock = self.clock
        if not at_s <= clock.real() + MAX_AHEAD_S:  # also if it is no number
            raise ValueError(f"a message may take effect {MAX_AHEAD_S:g} s ahead at most")
        peer.last_s = at_s = max(at_s, peer.last_s)
        if not peer.early and at_s <= clock.real():
            clock.call_when(at_s, serve, *args)
            return
        peer.early += 1
        peer.early_bytes += nbytes
        if peer.early_bytes > MAX_AHEAD_BYTES:
            raise ValueError(f"more than {MAX_AHEAD_BYTES} B of messages that are not due yet")
        clock.call_at(at_s, self._due, peer, nbytes, serve, args)

    @staticmethod
    def _due(peer: Peer, nbytes: int, serve: Callable[..., object], args: tuple[Any, ...]) -> None:
        peer.early -= 1
        peer.early_bytes -= nbytes
        serve(*args)

    def _greet(self, address: bytes, hello: Hello, number: int) -> None:
        known = self.peers.get(address)
        if known is None:
            descriptor = _open_process(hello.pid)
            peer = self.peers[address] = Peer(address, hello.name, hello.pid)
            self._watch(peer, descriptor)
        elif (known.name, known.pid) != (hello.name, hello.pid):
            raise ValueError(f"hello was said already, by {known.name!r}")
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
        if peer.open_calls >= OPEN_CALLS:
            self._send(
                peer.address, FAILED, number, self.clock.now(), f"over {OPEN_CALLS} calls at once"
            )
            return
        try:
            answer = self._on_call(peer, body)
        except Exception as error:
            self._tell_failure(peer, number, body, error)
            return
        if isinstance(answer, Awaitable):
            peer.open_calls += 1
            job = self._jobs.spawn(self._await(peer, number, body, answer))
            if isinstance(answer, Coroutine):  # the server may close before its first step
                job.add_done_callback(lambda _: answer.close())
        else:
            self._send(peer.address, ANSWER, number, self.clock.now(), answer)

    async def _await(self, peer: Peer, number: int, body: Body, work: Awaitable[Any]) -> None:
        try:
            answer = await work
        except Exception as error:
            self._tell_failure(peer, number, body, error)
        else:
            self._send(peer.address, ANSWER, number, self.clock.now(), answer)
        finally:
            peer.open_calls -= 1

    def _serve_post(self, peer: Peer, body: Body) -> None:
        if peer.address not in self.peers:
            return
        try:
            self._on_post(peer, body)
        except Exception as error:
            self._note_failure(peer, body, error)

    def _tell_failure(self, peer: Peer, number: int, body: Body, error: Exception) -> None:
        self._note_failure(peer, body, error)
        reason = f"{type(error).__name__}: {error}"
        self._send(peer.address, FAILED, number, self.clock.now(), reason)

    def _note_failure(self, peer: Peer, body: Body, error: Exception) -> None:
        """Log the first few: a peer that sends nothing else must not fill the disk."""
        self.failed += 1
        if self.failed <= LOGGED_FAILURES:
            what = type(body).__name__
            _log.error("%s cannot serve %s of %s", self.name, what, peer.name, exc_info=error)

    def note(self, peer: Peer, body: Any) -> None:
        """Tell a peer something that it did not ask for."""
        self._send(peer.address, NOTE, 0, self.clock.now(), body)

    def _send(self, address: bytes, kind: int, number: int, at_s: float, body: Any) -> None:
        if self._closed:
            return
        header = encode((self.messages.version, kind, number, at_s))
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([address, header, encode(body)], zmq.NOBLOCK, copy=True)
        self._again()

    # -- peers that end -------------------------------------------------------------------------

    def _watch(self, peer: Peer, descriptor: int | None) -> None:
        """Notice the end of a peer's process, where the system can tell."""
        if descriptor is None:
            self._jobs.spawn(self._poll_for_life(peer))
            return
        self._watched[peer.address] = descriptor
        self.clock.loop.add_reader(descriptor, self._forget, peer.address)

    def lives(self, peer: Peer) -> bool:
        """Whether a peer is known and its process has not ended; if it has, it is forgotten now."""
        descriptor = self._watched.get(peer.address)
        if descriptor is not None and select.select((descriptor,), (), (), 0)[0]:
            self._forget(peer.address)
        return peer.address in self.peers

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
        self.clock.loop.remove_reader(descriptor_of(self._socket))
        for address in list(self._watched):
            descriptor = self._watched.pop(address)
            self.clock.loop.remove_reader(descriptor)
            os.close(descriptor)
        self.peers.clear()
        await self._jobs.cancel()
        self._socket.close()
        self._context.term()
        if self._door is not None:
            if self.endpoint.startswith(UNIX):
                _remove(self._door.path)
            self._door.close()


def _open_process(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has ended; None where there is none."""
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return int(opener(pid))
    except (OSError, OverflowError) as error:
        raise ValueError(f"no process {pid} is here: {error}") from None


def _remove(path: str) -> None:
    """Remove the file of a Unix socket, which ZeroMQ leaves."""
    Path(path).unlink(missing_ok=True)


def _refuse_if_served(path: str) -> None:
    """Raise if somebody serves at a Unix socket: ZeroMQ would take the path over."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return  # nothing there, or what a dead process left
        except OSError as error:
            if error.errno not in (errno.EAGAIN, None):
                return  # bind says better what is wrong
        raise OSError(errno.EADDRINUSE, "another process serves there")
