"""Starts, watches and ends the processes of a deployment: what ``cxlbench up`` does.

``Deployment`` runs Master and the nodes as children (``service_main.py``), with a log each in the
run directory, and leaves nothing behind when it stops: no process, socket, lock, spec, memory
segment or log. Logs stay only if something failed, and backing files only if the user named a
folder for them. Stale files of a deployment that was killed are no obstacle; one that still runs in
the same run directory is, and is left alone.

All calls block and none needs an event loop. Units: s of the host's clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.deployment import SPEC_FILE, DeploymentError, DeploymentSpec
from cxlbench.harness.deployment_status import directory
from cxlbench.harness.endings import heard_later

Role = Literal["master", "node"]

PATIENCE_S = 60.0
"""How long a deployment may take to start, beside the scan of its files."""
SCAN_BYTES_PER_S = 100e6
"""No disk scans slower than this, for the sake of a limit."""
LARGE_BYTES = 4 << 40
"""No device is larger, likewise."""
STOP_WITHIN_S = 5.0
LOOK_EVERY_S = 0.05
TAIL_LINES = 12


class PartFailedError(HostLimitError):
    """A process of the deployment ended when it should not have; the text has its last words."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended without having been told to."""

    role: Role
    number: int
    returncode: int
    tail: str
    """The end of its log."""

    @property
    def name(self) -> str:
        """Who it was."""
        return "Master" if self.role == "master" else f"node {self.number}"

    def line(self) -> str:
        """Return what happened, and what it said last."""
        code = self.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        said = f":\n{self.tail}" if self.tail else ", and said nothing"
        return f"{self.name} ended ({how}){said}"


@dataclass(slots=True)
class _Child:
    role: Role
    number: int
    process: subprocess.Popen[bytes]
    log_begin: int
    """Where its part of the log begins."""
    told: bool = False
    """Whether it was sent a signal that ends it."""
    stopped: bool = False
    reported: bool = False


class Deployment:
    """The running processes of one spec. ``start`` it, and ``stop`` it in any case; or ``with``."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self.spec = spec
        self.failed = False
        """Whether a process ended unasked or had to be killed: then the logs stay."""
        self._children: dict[tuple[Role, int], _Child] = {}
        self._epochs: dict[int, int] = {}
        """Of each node that Master knew when we looked last."""
        self._ended_epochs: dict[int, int] = {}
        """Of each node's process before its present one."""
        self._made: list[Path] = []
        self._lock: IO[str] | None = None

    # -- starting -------------------------------------------------------------------------------

    def start(self, *, wait: bool = True, patience_s: float | None = None) -> None:
        """Start Master and all nodes, and wait until Master knows every node.

        Raises:
            DeploymentError: another deployment runs in this run directory (it is left alone).
            PartFailedError: a process ended early, or did not get ready; all are stopped then.
            HostLimitError: the run directory cannot be made.
        """
        self._take_run_dir()
        try:
            self._await_orphans()
            self.spec.save()
            self._spawn("master", 0)
            for number in range(self.spec.nodes):
                self._spawn("node", number)
            if wait:
                self.wait_ready(patience_s=patience_s)
        except BaseException as error:
            self.failed = self.failed or isinstance(error, Exception)
            self.stop()
            raise

    def _take_run_dir(self) -> None:
        run_dir = self.spec.run_dir.absolute()
        missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        while self._lock is None:
            try:
                run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._made = missing
                lock = (run_dir / "up.lock").open("a")
            except OSError as error:
                raise HostLimitError(
                    f"cannot use {self.spec.run_dir} as run directory: {error.strerror}; "
                    "choose another (--run-dir)"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise DeploymentError(
                    [
                        f"a deployment runs in {self.spec.run_dir} already: stop it, or choose "
                        "another run directory (--run-dir)"
                    ]
                ) from None
            if _is_at(lock, run_dir / "up.lock"):
                self._lock = lock
            else:
                lock.close()  # its last holder has removed it meanwhile

    def _await_orphans(self) -> None:
        """Wait for processes that an earlier ``up`` left when it was killed; they end by it."""
        end_s = time.monotonic() + STOP_WITHIN_S
        for path in self._files("lock"):
            if path.name == "up.lock":
                continue
            while _is_locked(path):
                if time.monotonic() > end_s:
                    who = path.read_text().strip()
                    raise DeploymentError(
                        [
                            f"{path.stem} of an earlier deployment still runs in "
                            f"{self.spec.run_dir}" + (f": end process {who} first" if who else "")
                        ]
                    )
                time.sleep(LOOK_EVERY_S)

    def _spawn(self, role: Role, number: int) -> None:
        log = self.log(role, number)
        with log.open("ab") as out:
            begin = out.tell()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cxlbench.harness.service_main",
                    role,
                    str(self.spec.run_dir),
                    str(number),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is ours: we end them in order
            )
        self._children[role, number] = _Child(role, number, process, begin)

    def wait_ready(self, *, patience_s: float | None = None) -> None:
        """Wait until Master knows all nodes that run, each under the epoch of its last start."""
        limit_s = self._patience_s() if patience_s is None else patience_s
        end_s = time.monotonic() + limit_s
        while True:
            for ended in self.ended():
                raise PartFailedError(ended.line())
            known = directory(self.spec, timeout_s=0.5)
            wanted = [
                number
                for (role, number), child in self._children.items()
                if role == "node" and not (child.told or child.stopped or child.reported)
            ]
            missing = [
                number
                for number in wanted
                if number not in known or known[number].epoch == self._ended_epochs.get(number)
            ]
            self._epochs.update({number: entry.epoch for number, entry in known.items()})
            if not missing:
                return
            if time.monotonic() > end_s:
                self.failed = True
                raise PartFailedError(
                    f"after {limit_s:.0f} s Master does not know node "
                    f"{', '.join(map(str, missing))}; see the logs in {self.spec.run_dir}"
                )
            time.sleep(LOOK_EVERY_S)

    def _patience_s(self) -> float:
        """Return the limit: a node first looks through what is in its files."""
        spec = self.spec
        capacity = spec.capacity if spec.capacity is not None else LARGE_BYTES
        held = 0.0 if spec.folder is None else capacity * spec.devices_per_node / spec.scale
        return PATIENCE_S + held / SCAN_BYTES_PER_S

    # -- while it runs --------------------------------------------------------------------------

    def pid(self, role: Role, number: int = 0) -> int:
        """Return the process id of a part (of its last process, if it has ended)."""
        return self._children[role, number].process.pid

    @property
    def parts(self) -> list[tuple[Role, int]]:
        """All parts that were started: Master, then the nodes."""
        return list(self._children)

    @property
    def logs(self) -> list[Path]:
        """The logs that are there: once it is stopped, those of what failed."""
        return sorted(self._files("log"))

    def running(self, role: Role, number: int = 0) -> bool:
        """Whether a part's process is there (also if it is stopped)."""
        child = self._children.get((role, number))
        return child is not None and child.process.poll() is None

    def log(self, role: Role, number: int = 0) -> Path:
        """Return where a part's log is."""
        return self.spec.run_dir / f"{_stem(role, number)}.log"

    def kill(
        self, role: Role, number: int = 0, signal_number: signal.Signals = signal.SIGKILL
    ) -> None:
        """Send a part a signal. After SIGKILL its process is gone when this returns."""
        child = self._children[role, number]
        if child.process.poll() is not None:
            return
        if signal_number not in (signal.SIGSTOP, signal.SIGCONT):
            child.told = True
        child.process.send_signal(signal_number)
        if signal_number is signal.SIGKILL:
            child.process.wait()
        elif signal_number is signal.SIGSTOP:
            child.stopped = True
        elif signal_number is signal.SIGCONT:
            child.stopped = False

    def restart(
        self, role: Role, number: int = 0, *, wait: bool = True, patience_s: float | None = None
    ) -> None:
        """Start a part anew; if it still runs it is ended first.

        With ``wait`` this returns when Master knows all nodes that run. Raises ``PartFailedError``.
        """
        child = self._children[role, number]
        _end([child], STOP_WITHIN_S)
        if role == "node" and number in self._epochs:
            self._ended_epochs[number] = self._epochs[number]
        self._spawn(role, number)
        if wait:
            self.wait_ready(patience_s=patience_s)

    def ended(self) -> list[Ended]:
        """Return the parts that ended unasked since this was called last."""
        found = []
        for child in self._children.values():
            code = child.process.poll()
            if code is not None and not child.told and not child.reported:
                child.reported = self.failed = True
                found.append(Ended(child.role, child.number, code, self._tail(child)))
        return found

    def _tail(self, child: _Child) -> str:
        """Return the last lines that this process wrote."""
        try:
            with self.log(child.role, child.number).open("rb") as log:
                log.seek(child.log_begin)
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip() and line != "ready"]
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])

    # -- ending ---------------------------------------------------------------------------------

    def stop(self, *, within_s: float = STOP_WITHIN_S, keep_run_dir: bool = False) -> None:
        """End everything and remove what it left. May be called again.

        A further Ctrl-C or SIGTERM meanwhile is heard when it is done, which is soon.
        """
        if self._lock is not None:
            with heard_later():
                self._stop(within_s, keep_run_dir)

    def _stop(self, within_s: float, keep_run_dir: bool) -> None:
        assert self._lock is not None
        self.ended()
        nodes = [child for child in self._children.values() if child.role == "node"]
        masters = [child for child in self._children.values() if child.role == "master"]
        if _end(nodes, within_s) + _end(masters, within_s):
            self.failed = True
        self._children.clear()
        for kind in ("sock", "lock", "mem", "log"):
            for path in list(self._files(kind)):
                if kind != "log" or not self.failed or not _says_anything(path):
                    path.unlink(missing_ok=True)
        for name in (SPEC_FILE, f"{SPEC_FILE}.new"):
            (self.spec.run_dir / name).unlink(missing_ok=True)
        self._lock.close()
        self._lock = None
        with contextlib.suppress(OSError):  # somebody else has put something there
            for made in [] if keep_run_dir else self._made:
                made.rmdir()

    def _files(self, kind: str) -> Iterator[Path]:
        """Return the files of one kind that a deployment makes in its run directory."""
        for stem in ("master", "node[0-9]*", "up", "cxlbench-node[0-9]*"):
            yield from self.spec.run_dir.glob(f"{stem}.{kind}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _stem(role: Role, number: int) -> str:
    return "master" if role == "master" else f"node{number}"


def _end(children: list[_Child], within_s: float) -> int:
    """End processes; return how many of them had to be killed."""
    left = [child for child in children if child.process.poll() is None]
    for child in left:
        child.told = True
        child.process.send_signal(signal.SIGTERM)
        child.process.send_signal(signal.SIGCONT)
    end_s = time.monotonic() + within_s
    killed = 0
    for child in left:
        try:
            child.process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            killed += 1
    return killed


def _says_anything(log: Path) -> bool:
    lines = log.read_text(errors="replace").splitlines()
    return any(line.strip() not in ("", "ready") for line in lines)


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at ``path``."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock file."""
    try:
        with path.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
