"""How fast the data path is between processes: ``cxlbench bench datapath --processes``.

Master, a node and workers are processes; nothing is throttled. A *warm* get is of an object that is
in the node's DRAM: the worker asks for it, copies it out of shared memory into its own buffer, and
verifies it. Each figure is a ratio to a numpy copy of as many bytes, made by the same worker in the
same round. Several workers read the same objects at once; their figure is of all together over one
alone, beside what plain copies in as many processes reach, which is what memory bandwidth allows.

The lookup's reference is a bare synchronous ZeroMQ ping-pong over the same kind of socket, between
two processes, in the same run. Units: bytes, s of the host's clock.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cxlbench.emu.clock import WallClock
from cxlbench.emu.memory import Arena, Bytes
from cxlbench.emu.unix_paths import Door
from cxlbench.harness.bench_datapath import OBJECT_BYTES, OBJECTS, Figure, WrongDataError
from cxlbench.harness.deployment import DeploymentSpec, load_spec
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.run_folders import run_folder
from cxlbench.harness.supervisor import Deployment
from cxlbench.kv.footer import Verify
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult

WARM, WARM_FULL = "warm get, footer checked", "warm get, every byte checked"
BARS: dict[str, float | None] = {WARM: 0.7, WARM_FULL: None}
TWO_WORKERS_BAR = 1.2
LOOKUP_BAR = 2.5
LOOKUP_KEYS = 32
WORKERS = (1, 2, 4)
PINGS = 3000
WARM_UP = 500

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Several workers at once: what all get together, and what plain copies do."""

    workers: int
    bytes_per_s: float
    over_one: float
    copies_over_one: float
    """The same for plain copies in as many processes."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips, s."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class ProcessBench:
    """All figures of one run."""

    object_bytes: int
    objects: int
    rounds: int
    copy_bytes_per_s: float
    figures: tuple[Figure, ...]
    scaling: tuple[Scaling, ...]
    ping: Latency
    lookup: Latency

    @property
    def lookup_over_ping(self) -> float:
        """A lookup of 32 keys over a bare ping-pong, at the median."""
        return self.lookup.p50_s / self.ping.p50_s


def bench_processes(
    *,
    object_bytes: int = OBJECT_BYTES,
    objects: int = OBJECTS,
    rounds: int = 11,
    workers: Sequence[int] = WORKERS,
    pings: int = PINGS,
    progress: Progress = lambda *_: None,
) -> ProcessBench:
    """Start a deployment, measure, and end it.

    Raises:
        WrongDataError: a get delivered wrong bytes, or none.
    """
    steps = 2 + len(workers) + 1
    with run_folder() as folder:
        room = object_bytes * objects
        spec = DeploymentSpec(
            run_dir=folder / "run",
            scale=1,
            throttled=False,
            capacity=3 * room,
            block_bytes=object_bytes,
            window_bytes=room,
            deadline_s=60.0,
            call_timeout_s=10.0,
            device_set={
                "dram_capacity": f"{max(8 * room, 1 << 30)} B",
                "write_buffer_share": "0.5",
            },
        )
        with Deployment(spec):
            progress("measuring across processes", 0, steps)
            with _Crew(spec, max(workers), object_bytes, objects) as crew:
                crew.one("put")
                measured = {}
                copies: list[float] = []
                for step, (name, verify) in enumerate(
                    ((WARM, Verify.FOOTER), (WARM_FULL, Verify.FULL)), start=1
                ):
                    rows = crew.all("get", 1, verify.value, rounds)[0]
                    measured[name] = rows
                    copies += [copy_s for copy_s, _ in rows]
                    progress("measuring across processes", step, steps)
                scaling = []
                for step, count in enumerate(workers, start=3):
                    scaling.append(crew.together(count, rounds, room))
                    progress("measuring across processes", step, steps)
                lookup = crew.one("lookup", pings)
        ping = _ping_pong(spec, folder, pings)
        progress("measuring across processes", steps, steps)
    one = scaling[0]
    return ProcessBench(
        object_bytes,
        objects,
        rounds,
        room / statistics.median(copies),
        tuple(
            Figure(
                name,
                statistics.median(copy_s / took_s for copy_s, took_s in rows),
                room / statistics.median(took_s for _, took_s in rows),
                BARS[name],
            )
            for name, rows in measured.items()
        ),
        tuple(Scaling(count, got, got / one[1], copied / one[2]) for count, got, copied in scaling),
        ping,
        Latency(*lookup),
    )


class _Crew:
    """Worker processes that do one thing at a time, on command."""

    def __init__(self, spec: DeploymentSpec, workers: int, nbytes: int, objects: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(str(spec.run_dir), number, nbytes, objects, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Crew:
        for pipe in self._pipes:
            _answer(pipe)  # it has joined
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def one(self, *command: Any) -> Any:
        """Let the first worker do something."""
        return self.all(command[0], 1, *command[1:])[0]

    def all(self, name: str, workers: int, *arguments: Any) -> list[Any]:
        """Let the first workers do the same at once; return their answers."""
        for pipe in self._pipes[:workers]:
            pipe.send((name, *arguments))
        return [_answer(pipe) for pipe in self._pipes[:workers]]

    def together(self, workers: int, rounds: int, room: int) -> tuple[int, float, float]:
        """Return bytes/s of all gets together, and of all plain copies."""
        begin = time.monotonic()
        self.all("gets", workers, rounds)
        got = workers * rounds * room / (time.monotonic() - begin)
        begin = time.monotonic()
        self.all("copies", workers, rounds)
        return workers, got, workers * rounds * room / (time.monotonic() - begin)


def _answer(pipe: Connection) -> Any:
    try:
        kind, value = pipe.recv()
    except EOFError:
        raise WrongDataError("a worker has ended early") from None
    if kind == "error":
        raise WrongDataError(value)
    return value


def _work(run_dir: str, number: int, nbytes: int, objects: int, pipe: Connection) -> None:
    """Be a worker: obey commands until the other end of the pipe closes."""
    clock = WallClock(shared=True)
    with clock:
        clock.run(_Hand(clock, load_spec(Path(run_dir)), number, nbytes, objects).obey(pipe))


class _Hand:
    def __init__(
        self, clock: WallClock, spec: DeploymentSpec, number: int, nbytes: int, objects: int
    ) -> None:
        self.clock = clock
        self.nbytes = nbytes
        self.tiers = {
            verify: RemoteTier(clock, spec, worker=number * 2 + place, verify=verify, copies=False)
            for place, verify in enumerate((Verify.FOOTER, Verify.FULL))
        }
        space = Namespace("bench", "0", "bytes", "flat", 1)
        self.keys = trace_keys(space, range(objects))
        draw = np.random.default_rng(0)
        self.payloads: list[Bytes] = [
            draw.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(objects)
        ]
        self.buffers: list[Bytes] = [np.ones(nbytes, dtype=np.uint8) for _ in range(objects)]
        self._shared = Arena(nbytes * objects)
        self._targets: list[Bytes] = [np.ones(nbytes, dtype=np.uint8) for _ in range(objects)]
        for at, payload in enumerate(self.payloads):
            self._shared.view(at * nbytes, nbytes)[:] = payload
        self._request = 0

    async def obey(self, pipe: Connection) -> None:
        loop = self.clock.loop
        commands: Any = self.clock.future()

        def wake() -> None:
            if not commands.done():
                commands.set_result(None)

        for tier in self.tiers.values():
            await tier.join()
        pipe.send(("ok", None))
        while True:
            commands = self.clock.future()
            loop.add_reader(pipe.fileno(), wake)
            await commands
            loop.remove_reader(pipe.fileno())
            try:
                name, *arguments = pipe.recv()
            except EOFError:
                break
            try:
                pipe.send(("ok", await getattr(self, name)(*arguments)))
            except WrongDataError as error:
                pipe.send(("error", str(error)))
        for tier in self.tiers.values():
            await tier.close()

    async def put(self) -> None:
        """Put all objects."""
        connector = self.tiers[Verify.FULL].connector
        done = await connector.submit_store(-1, self.keys, self.payloads).done.wait()
        connector.poll()
        if done.results != (KeyResult.STORED,) * len(self.keys):
            raise WrongDataError(f"the put ended with {done.results}")

    async def get(self, verify: str, rounds: int) -> list[tuple[float, float]]:
        """Return the times of plain copies and of warm gets, a pair a round."""
        rows = []
        for _ in range(rounds + 1):
            copy_s = self._copy()
            rows.append((copy_s, await self._load(Verify(verify))))
        return rows[1:]

    async def gets(self, rounds: int) -> None:
        """Get all objects so many times."""
        for _ in range(rounds):
            await self._load(Verify.FOOTER, check=False)

    async def copies(self, rounds: int) -> None:
        """Copy all objects so many times."""
        for _ in range(rounds):
            self._copy()

    def _copy(self) -> float:
        begin = time.perf_counter()
        for at, target in enumerate(self._targets):
            np.copyto(target, self._shared.view(at * self.nbytes, self.nbytes))
        return time.perf_counter() - begin

    async def _load(self, verify: Verify, *, check: bool = True) -> float:
        tier = self.tiers[verify]
        connector = tier.connector
        self._request += 1
        request = self._request
        found = await connector.submit_lookup(request, self.keys, self.nbytes).done.wait()
        if found.leading_hits != len(self.keys):
            raise WrongDataError(f"the lookup ended with {found.results}")
        if check:
            await self._warm(tier, request)
        begin = time.perf_counter()
        done = await connector.submit_load(request, self.keys, self.buffers).done.wait()
        took_s = time.perf_counter() - begin
        connector.release(request)
        connector.poll()
        if done.leading_hits != len(self.keys):
            raise WrongDataError(f"the load ended with {done.results}")
        if check:
            for got, put in zip(self.buffers, self.payloads, strict=True):
                if not np.array_equal(got, put):
                    raise WrongDataError("an object came back with other bytes")
                got[::4096] ^= 0xFF
        return took_s

    async def _warm(self, tier: RemoteTier, request: int) -> None:
        """Wait until the node has staged all objects."""
        for place in range(len(self.keys)):
            opened = tier.connector.stream_of(request, place)
            node = tier.nodes[opened.node]
            await node.token(opened.name, opened.position_of(place), staged=True)

    async def lookup(self, rounds: int) -> tuple[float, float]:
        """Return p50 and p99 of a lookup of 32 keys at Master."""
        master = self.tiers[Verify.FULL].master
        keys = (list(self.keys) * LOOKUP_KEYS)[:LOOKUP_KEYS]
        took = []
        for number in range(rounds):
            begin = time.perf_counter()
            await master.lookup((master.member, number), keys, used=())
            took.append(time.perf_counter() - begin)
            master.release((master.member, number))
        return _percentiles(took)


def _percentiles(took: Sequence[float]) -> tuple[float, float]:
    rest = sorted(took[min(WARM_UP, len(took) // 2) :])
    return rest[len(rest) // 2], rest[min(len(rest) - 1, int(len(rest) * 0.99))]


def _ping_pong(spec: DeploymentSpec, folder: Path, pings: int) -> Latency:
    """Measure a bare synchronous ping-pong of small messages with another process."""
    endpoint = f"ipc://{folder}/ping.sock"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_pong, args=(endpoint, os.getpid()), daemon=True)
    process.start()
    took = []
    with Door(endpoint) as door, zmq.Context() as sockets, sockets.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(door.endpoint)
        for _ in range(pings):
            begin = time.perf_counter()
            socket.send(b"ping")
            socket.recv()
            took.append(time.perf_counter() - begin)
        socket.send(b"end")
        socket.recv()
    process.join(10)
    return Latency(*_percentiles(took))


def _pong(endpoint: str, parent: int) -> None:
    with Door(endpoint) as door, zmq.Context() as sockets, sockets.socket(zmq.REP) as socket:
        socket.bind(door.endpoint)
        while os.getppid() == parent:
            if socket.poll(1000):
                message = socket.recv()
                socket.send(message)
                if message == b"end":
                    return
