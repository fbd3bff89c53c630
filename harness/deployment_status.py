"""Asking the processes of a deployment what they are doing, from outside and without an event loop.

One question to each endpoint at once, and one time limit for all: a process that is stopped, or
busy for too long, costs the others nothing. Whoever asks says hello and goodbye like any client, so
nothing is left of it at the other side. Units: s of the host's clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from cxlbench.emu import wire
from cxlbench.emu.unix_paths import Door
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.hymcache import messages as m

ANSWER_WITHIN_S = 0.8
"""How long ``status`` waits for all answers together."""

_encode = msgspec.msgpack.Encoder().encode
_FIGURES = msgspec.msgpack.Decoder(dict[str, int | float | str])
_DIRECTORY = msgspec.msgpack.Decoder(list[m.NodeEntry])


@dataclass(frozen=True, slots=True)
class Question:
    """A body for the server at ``endpoint``, sent in messages of ``version``."""

    endpoint: str
    version: int
    body: Any


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is none."""

    reason: str


SOMETHING_ELSE = NoAnswer("something else serves there")


def ask(
    questions: Sequence[Question], *, timeout_s: float, name: str = "status"
) -> list[bytes | NoAnswer]:
    """Return the encoded answer to each question, or why there is none, within ``timeout_s``."""
    end_s = time.monotonic() + timeout_s
    answers: list[bytes | NoAnswer] = [NoAnswer("does not answer")] * len(questions)
    open_ones: dict[zmq.Socket[bytes], int] = {}
    sockets: dict[zmq.Socket[bytes], int] = {}
    with ExitStack() as doors, zmq.Context() as context:
        poller = zmq.Poller()
        for number, question in enumerate(questions):
            try:
                door = doors.enter_context(Door(question.endpoint))
            except OSError as error:
                answers[number] = NoAnswer(f"cannot be reached: {error.strerror}")
                continue
            socket = context.socket(zmq.DEALER)
            sockets[socket] = number
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ANSWER_BYTES)
            socket.connect(door.endpoint)
            poller.register(socket, zmq.POLLIN)
            open_ones[socket] = number
            hello = wire.Hello(name, os.getpid())
            _send(socket, question, wire.HELLO, hello)
            _send(socket, question, wire.CALL, question.body)
        while open_ones and (left_s := end_s - time.monotonic()) > 0:
            for ready, _ in poller.poll(max(1, round(left_s * 1e3))):
                number = open_ones[ready]
                answer = _taken(ready.recv_multipart())
                if answer is not None:
                    answers[number] = answer
                    poller.unregister(ready)
                    del open_ones[ready]
        for socket, number in sockets.items():
            answered = isinstance(answers[number], bytes)
            if answered:
                _send(socket, questions[number], wire.BYE, None)
            socket.close(linger=wire.GOODBYE_MS if answered else 0)
    return answers


def _send(socket: zmq.Socket[bytes], question: Question, kind: int, body: Any) -> None:
    socket.send_multipart([_encode((question.version, kind, 1, 0.0)), _encode(body)])


def _taken(parts: list[bytes]) -> bytes | NoAnswer | None:
    """Return the answer if the message is one."""
    try:
        header, body = parts
        kind = wire.HEADER.decode(header)[1]
        if kind == wire.ANSWER:
            return body
        if kind in (wire.REFUSED, wire.FAILED):
            how = "refused" if kind == wire.REFUSED else "failed"
            return NoAnswer(f"{how}: {msgspec.msgpack.decode(body)}")
    except (ValueError, msgspec.MsgspecError):
        return SOMETHING_ELSE
    return None


def directory(spec: DeploymentSpec, *, timeout_s: float) -> dict[int, m.NodeEntry]:
    """Return the nodes that Master knows, by number; none if it does not answer."""
    question = Question(spec.endpoint("master"), m.TO_MASTER.version, m.Directory())
    (answer,) = ask([question], timeout_s=timeout_s, name="up")
    if isinstance(answer, NoAnswer):
        return {}
    try:
        return {entry.node: entry for entry in _DIRECTORY.decode(answer)}
    except msgspec.MsgspecError:
        return {}


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One process: its figures, or what it is instead ("does not answer")."""

    name: str
    endpoint: str
    figures: Mapping[str, int | float | str]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """Master first, then the nodes."""

    parts: tuple[PartStatus, ...]

    @property
    def anything(self) -> bool:
        """Whether any process answered."""
        return any(not part.trouble for part in self.parts)

    @property
    def complete(self) -> bool:
        """Whether every process answered."""
        return not any(part.trouble for part in self.parts)

    def total(self, name: str) -> int:
        """Return the sum of one figure over all processes that have it."""
        return sum(int(part.figures.get(name, 0)) for part in self.parts)

    @property
    def held(self) -> dict[str, int]:
        """What the processes that answered hold for somebody, summed by name."""
        found: dict[str, int] = {}
        for part in self.parts:
            for name, count in part.figures.items():
                if name.startswith(HELD):
                    what = name.removeprefix(HELD)
                    found[what] = found.get(what, 0) + int(count)
        return found


HELD = "held: "


def read_status(spec: DeploymentSpec, *, timeout_s: float = ANSWER_WITHIN_S) -> DeploymentStatus:
    """Ask Master and every node of a deployment."""
    names = [("Master", spec.endpoint("master"), m.TO_MASTER.version)]
    names += [
        (f"node {number}", spec.endpoint("node", number), m.TO_NODE.version)
        for number in range(spec.nodes)
    ]
    answers = ask(
        [Question(endpoint, version, m.AskStatus()) for _, endpoint, version in names],
        timeout_s=timeout_s,
    )
    return DeploymentStatus(
        tuple(
            _part(name, endpoint, answer)
            for (name, endpoint, _), answer in zip(names, answers, strict=True)
        )
    )


def _part(name: str, endpoint: str, answer: bytes | NoAnswer) -> PartStatus:
    if isinstance(answer, bytes):
        try:
            figures = _FIGURES.decode(answer)
            # Whoever asks is a client, too, and not worth telling.
            figures |= {"clients": int(figures["clients"]) - 1}
            return PartStatus(name, endpoint, figures)
        except (msgspec.MsgspecError, KeyError, ValueError):
            answer = SOMETHING_ELSE
    return PartStatus(name, endpoint, {}, answer.reason)
