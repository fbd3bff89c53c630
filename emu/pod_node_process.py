"""The host's side of node processes: forked, talked to, killed, waited for.

``NodeForker`` keeps the process that node processes are forked from (pod_zygote); several pods may
share one. ``NodeProcess`` is one of them: messages both ways, its function's result, SIGKILL.

Units: timeouts in seconds. Left out: which node may run what when (pod_processes).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from cxlbench.emu.pod_zygote import ForkRequest, receive_answer, send_request

PATIENCE_S = 60.0
"""How long the host waits for a process that should answer or die, unless told otherwise."""

END_S = 5.0
"""How long the forking process has to end by itself before it is killed."""


class NodeStartError(RuntimeError):
    """A node process could not be started: the text says why."""


class NodeFailedError(RuntimeError):
    """The function of a node process raised; the text is its traceback."""


class NodeDiedError(RuntimeError):
    """A node process ended without a result."""


class NodeTimeoutError(TimeoutError):
    """A node process did not answer, or did not end, in time."""


class NodeProcess:
    """The host's side of one process of a node."""

    def __init__(self, node: int, process: int, process_id: int, channel: Connection) -> None:
        self.node, self.process, self.process_id = node, process, process_id
        self._channel = channel
        self._messages: list[Any] = []
        self._outcome: tuple[str, Any] | None = None
        self._watch = -1
        self._gone = False
        try:
            if hasattr(os, "pidfd_open"):
                self._watch = os.pidfd_open(process_id)
        except ProcessLookupError:  # it has ended already
            self._gone = True

    @property
    def alive(self) -> bool:
        """Whether the process exists."""
        return not self._ended(0.0)

    @property
    def finished(self) -> bool:
        """Whether it ended by returning: its death is not a crash."""
        self._take_outcome()
        return self._outcome is not None and self._outcome[0] == "done"

    def send(self, message: object) -> None:
        """Send a message, which the process gets by ``LiveNode.receive``."""
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise NodeDiedError(f"{self} is dead") from None

    def receive(self, *, timeout_s: float = PATIENCE_S) -> Any:
        """Return the next message that the process sent."""
        if not self._messages:
            self._read(timeout_s)
        if not self._messages:
            self._raise_if_failed()
            raise NodeDiedError(f"{self} returned without another message")
        return self._messages.pop(0)

    def result(self, *, timeout_s: float = PATIENCE_S) -> Any:
        """Return what the function returned, once the process has ended."""
        while self._outcome is None:
            self._read(timeout_s)
        self._raise_if_failed()
        self.wait_ended(timeout_s=timeout_s)
        return self._outcome[1]

    def kill(self) -> None:
        """End the process with SIGKILL; return when it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                if self._watch >= 0:
                    signal.pidfd_send_signal(self._watch, signal.SIGKILL)
                else:
                    os.kill(self.process_id, signal.SIGKILL)
        self.wait_ended()

    def wait_ended(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Return when the process is gone."""
        if not self._ended(timeout_s):
            raise NodeTimeoutError(f"{self} has not ended within {timeout_s} s")

    def close(self) -> None:
        """Forget the process."""
        self._channel.close()
        if self._watch >= 0:
            self._gone = self._ended(0.0)
            os.close(self._watch)
            self._watch = -1

    def __str__(self) -> str:
        return f"process {self.process} of node {self.node} (pid {self.process_id})"

    def _ended(self, timeout_s: float) -> bool:
        if self._gone:
            return True
        if self._watch >= 0:
            poll = select.poll()
            poll.register(self._watch, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        try:
            os.kill(self.process_id, 0)
        except ProcessLookupError:
            return True
        return False

    def _read(self, timeout_s: float) -> None:
        try:
            if not self._channel.poll(timeout_s):
                raise NodeTimeoutError(f"{self} said nothing for {timeout_s} s")
            kind, value = self._channel.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "died", None
        if kind == "message":
            self._messages.append(value)
        else:
            self._outcome = (kind, value)

    def _take_outcome(self) -> None:
        with contextlib.suppress(NodeTimeoutError, OSError):
            while self._outcome is None:
                self._read(0.0)

    def _raise_if_failed(self) -> None:
        if self._outcome is not None and self._outcome[0] == "failed":
            raise NodeFailedError(f"{self} failed:\n{self._outcome[1]}")
        if self._outcome is not None and self._outcome[0] == "died":
            raise NodeDiedError(f"{self} died before it returned")


class NodeForker:
    """Forks node processes for one pod or for several; use it in a ``with`` block.

    ``prepare`` names functions (``module:function``, no arguments) to call before the first fork:
    what they load, compiled programs above all, every node process then has. Closing it ends every
    process that it forked and that still runs.
    """

    def __init__(self, *, prepare: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        life, held = os.pipe()
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
            "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]);"
            "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
            "from cxlbench.emu.pod_zygote import serve;"
            "serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4]))"
        )
        arguments = [str(theirs.fileno()), str(life), json.dumps(sys.path)]
        # Inherited: a Ctrl-C while the child's Python starts would end it with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._zygote = subprocess.Popen(
                [sys.executable, "-c", code, *arguments, json.dumps(list(prepare))],
                pass_fds=[theirs.fileno(), life],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a fork must have one thread
            )
        except BaseException:
            ours.close()
            os.close(held)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(life)
        self._link = ours
        self._held = held
        """While this is open, the forking process lives."""
        self._prepared = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepared(self, *, timeout_s: float | None = None) -> bool:
        """Return whether what was to be prepared is, waiting for it if no time is given.

        Raises:
            NodeStartError: it failed.
        """
        if not self._prepared:
            if timeout_s is not None and not select.select([self._link], [], [], timeout_s)[0]:
                return False
            _, problem = receive_answer(self._link)
            if problem:
                raise NodeStartError(f"cannot prepare node processes: {problem}")
            self._prepared = True
        return True

    def fork(self, request: ForkRequest) -> NodeProcess:
        """Fork one process and let it run."""
        self.prepared()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                send_request(self._link, request, theirs.fileno())
                process_id, problem = receive_answer(self._link)
            except OSError as error:
                process_id, problem = 0, f"the forking process is gone: {error}"
        if not process_id:
            ours.close()
            raise NodeStartError(f"cannot run {request.target} on node {request.node}: {problem}")
        return NodeProcess(request.node, request.process, process_id, Connection(ours.detach()))

    def close(self) -> None:
        """End the forking process, and with it what it forked."""
        if self._held < 0:
            return
        self._link.close()
        os.close(self._held)
        self._held = -1
        try:
            self._zygote.wait(END_S)
        except subprocess.TimeoutExpired:  # it is stopped, or its host is
            self._zygote.kill()
            self._zygote.wait(PATIENCE_S)
        except BaseException:
            self._zygote.kill()
            self._zygote.wait(PATIENCE_S)
            raise


def no_channel() -> Connection:
    """Return a channel whose other end is gone: that of a process which somebody else started."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return Connection(ours.detach())
