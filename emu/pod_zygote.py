"""The process from which a pod's node processes are forked.

Importing numba takes most of a second; a pod with four nodes of two processes would pay it eight
times over, and again after every crash. So the host starts this process once, it imports what the
nodes need, and each node process is a fork of it, a few milliseconds old when it runs.

The host keeps one end of a socket pair. A request names a place in the pod, a ``module:function``
and its arguments, and carries one end of the new process's channel; the answer is its process id.
When the host dies, however it dies, a pipe that it held ends, the kernel ends this process at once,
whatever it is doing (compiling takes a minute), and every node process with it.

Left out: systems without fork, and without ``PR_SET_PDEATHSIG`` (there the node processes are
killed from here, by id).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from cxlbench.emu.numa import bind_threads
from cxlbench.emu.pod_attachment import Attachment
from cxlbench.emu.pod_mapped import MappedNode
from cxlbench.emu.pod_mappings import PodPaths
from cxlbench.emu.user_objects import load_callable

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """One process to fork: its place in the pod and what it runs."""

    paths: PodPaths
    node: int
    process: int
    target: str
    arguments: tuple[Any, ...]
    numa_node: int | None = None
    """Next to which it runs."""


@dataclass(frozen=True, slots=True)
class LiveNode:
    """What a node process's function gets as its first argument."""

    memory: Any
    """Native and emulated pods: the handle. Mapped pods: a ``MappedNode``."""
    node: int
    process: int
    incarnation: int
    channel: Connection

    def send(self, message: object) -> None:
        """Send a message to the host, who gets it by ``NodeProcess.receive``."""
        self.channel.send(("message", message))

    def receive(self) -> Any:
        """Wait for a message from the host."""
        return self.channel.recv()


def send_request(link: socket.socket, request: ForkRequest, channel: int) -> None:
    """Ask for a process whose channel is the descriptor ``channel``."""
    payload = pickle.dumps(request)
    socket.send_fds(link, [struct.pack("<q", len(payload))], [channel])
    link.sendall(payload)


def receive_answer(link: socket.socket) -> tuple[int, str]:
    """Return the process id, or 0 and why there is no process."""
    header = _exactly(link, 16)
    if header is None:
        return 0, "the process that forks node processes has ended"
    process_id, length = struct.unpack("<qq", header)
    text = _exactly(link, length) or b""
    return process_id, text.decode()


def serve(descriptor: int, life: int, prepare: Sequence[str] = ()) -> None:
    """Call what ``prepare`` names, say so, then fork on request until the host is gone.

    The host holds the other end of the pipe ``life`` and writes nothing into it.
    """
    _end_with(life)
    link = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: the dead do not linger
    children: list[int] = []
    problem = ""
    try:
        for name in prepare:
            load_callable(name, what="preparation")()
    except Exception:
        problem = traceback.format_exc()
    _answer(link, 0, problem)
    while True:
        header, descriptors, _, _ = socket.recv_fds(link, 8, 1)
        if not header:
            break
        payload = _exactly(link, struct.unpack("<q", header)[0])
        if payload is None or not descriptors:
            break
        process_id, text = _fork(link, payload, descriptors[0])
        os.close(descriptors[0])
        if process_id:
            children.append(process_id)
        _answer(link, process_id, text)
    if sys.platform != "linux":
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    os._exit(0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(life: int) -> None:
    """Have the kernel end this process when the other end of a pipe is closed."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)  # SIGIO ends who has no handler
    poll = select.poll()
    poll.register(life, 0)
    if poll.poll(0):  # it was closed before
        os._exit(0)


def _answer(link: socket.socket, process_id: int, text: str) -> None:
    raw = text.encode()
    with contextlib.suppress(OSError):  # the host is gone: the next read tells
        link.sendall(struct.pack("<qq", process_id, len(raw)) + raw)


def _fork(link: socket.socket, payload: bytes, channel: int) -> tuple[int, str]:
    try:
        request: ForkRequest = pickle.loads(payload)  # noqa: S301 - from the host that started us
        function = load_callable(request.target, what="node function")
    except Exception:
        return 0, traceback.format_exc()
    parent = os.getpid()
    process_id = os.fork()
    if process_id:
        return process_id, ""
    link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    _run(Connection(channel), request, function)
    raise AssertionError("a node process never returns")


def _run(channel: Connection, request: ForkRequest, function: Any) -> None:
    code = 1
    try:
        if request.numa_node is not None:
            bind_threads(request.numa_node)
        attachment = Attachment(request.paths, request.node, request.process)
        memory: Any = attachment.memory
        if attachment.shape.mode == "mapped":
            memory = MappedNode(attachment, request.paths)
        live = LiveNode(memory, request.node, request.process, attachment.incarnation, channel)
        value = function(live, *request.arguments)
        attachment.close()
        channel.send(("done", value))
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            channel.send(("failed", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        channel.close()
        os._exit(code)


def _exactly(link: socket.socket, nbytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < nbytes:
        part = link.recv(nbytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
