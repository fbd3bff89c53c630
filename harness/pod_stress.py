"""TraCT on real processes at speed, with nodes that are killed: what must hold after all of it.

A pod of some nodes, each with a manager and some workers, all real processes (``LivePod``). Workers
count under one lock and use the prefix cache, in which there is room for a third of the blocks, so
that most inserts evict. Now and then the host kills a node wherever it is (SIGKILL), fences it, has
a survivor see to the repair, and starts the node again.

At the end: every word read was right; the counter lost no increment (those of a killed worker's
last turn may be there or not); the region is sound, no chunk is lost or given out twice; every
READY entry is found and holds what it should; and nobody waited longer than ``patience_s``.

Units: ns for waits, s for the host's time. What happens when is the machine's choice: the seed
decides who does what and which nodes are killed, not when.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cxlbench.emu.pod_layout import CacheGeometry, Disturbance, PodShape
from cxlbench.emu.pod_node_process import (
    NodeDiedError,
    NodeFailedError,
    NodeForker,
    NodeProcess,
    NodeTimeoutError,
)
from cxlbench.emu.pod_ops import LINE, WORD
from cxlbench.emu.pod_processes import LivePod
from cxlbench.harness import pod_stress_nodes as programs
from cxlbench.harness.pod_profile import on_profile
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import held_chunks
from cxlbench.tract.layout import Layout, Sizes, plan
from cxlbench.tract.places import PLACE_WORDS
from cxlbench.tract.prefix_cache import fetch_chain
from cxlbench.tract.region import call, format_region
from cxlbench.tract.stress import (
    HITS,
    INSERTED,
    LOOKUPS,
    N_TOTALS,
    REFUSED,
    WRONG,
    fill_key,
    word_of,
)
from cxlbench.tract.words import KEY_WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.devices.profile import SharedType3Profile
    from cxlbench.emu.pod_layout import Mode

    Words = NDArray[np.int64]

BLOCKS = 384
CHUNKS = 128
COMPILING_S = 90
"""About how long that takes."""
LOOK_AGAIN_S = 0.01
"""How often the host looks for messages."""

Told = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stress:
    """What was done, and what is wrong: ``problems`` is empty if all is well."""

    mode: str
    profile: str
    """Of the shared memory; empty if it costs nothing."""
    nodes: int
    workers: int
    seed: int
    kills: int
    acquisitions: int
    """Of the one lock, as far as workers lived to tell."""
    counter: int
    """What the word under it says at the end."""
    waits_ns: tuple[float, float, float]
    """For the lock: median, 99th percentile, longest."""
    lookups: int
    hits: int
    inserted: int
    refused: int
    wrong: int
    """Words that were read and were not what was stored."""
    ready: int
    """Blocks in the cache at the end."""
    problems: tuple[str, ...]
    elapsed_s: float = field(compare=False)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def run_stress(
    *,
    mode: Mode = "emulated",
    nodes: int = 4,
    workers: int = 2,
    acquisitions: int = 1_000_000,
    lookups: int = 100_000,
    kills: int = 0,
    patience_s: float = 60.0,
    seed: int = 1,
    profile: SharedType3Profile | None = None,
    numa_node: int | None = None,
    progress: Told | None = None,
) -> Stress:
    """Use TraCT until there were so many acquisitions and lookups, and so many nodes were killed.

    ``profile`` is of the shared memory of an emulated pod: its caches, when posted write-backs
    arrive, what it charges. Without one, caches are small and nothing is charged, so that as much
    as possible happens. ``numa_node`` is where the region lies.

    Raises ``ValueError`` if a number cannot be, ``FlushUnsupportedError`` where ``native`` cannot,
    ``HostLimitError`` where the region cannot be bound.
    """
    if nodes < 2 or min(workers, acquisitions, lookups) < 1 or kills < 0 or patience_s <= 0:
        raise ValueError(
            "at least 2 nodes, and positive numbers of workers, acquisitions and lookups: got "
            f"{nodes}, {workers}, {acquisitions}, {lookups}"
        )
    begin_s = time.monotonic()
    sizes = Sizes(
        nodes=nodes,
        slots=2 * CHUNKS,
        chunks=CHUNKS,
        chunk_bytes=programs.BLOCK_WORDS * WORD,
        user_locks=1,
        heap_batch=2,
    )
    layout = plan(sizes)
    shape = PodShape(
        layout.region_bytes + LINE,
        nodes=nodes,
        processes=workers + 2,
        mode=mode,
        seed=seed,
        local_locks=layout.local_locks,
        local_words=layout.local_words,
        cache=CacheGeometry(sets=256, ways=4, posted=64),
        disturbance=Disturbance(evictions_per_million=400, fills_per_million=400),
    )
    if profile is not None:
        shape = on_profile(shape, profile)
    tell = progress or (lambda what, done, total: None)
    with (
        NodeForker(prepare=[f"{programs.__name__}:warm_up"]) as forker,
        LivePod(shape, forker=forker, numa_node=numa_node) as pod,
    ):
        await_programs(forker, tell)
        format_region(pod.memory(0), sizes, layout.region_bytes, zeroed=True)
        host = _Host(pod, layout, workers, patience_s, random.Random(seed))
        quota = _Quota(acquisitions, lookups, kills)
        try:
            host.run(quota, tell)
            host.check()
        except NodeTimeoutError as error:
            host.problems.append(f"{error}: it waits for ever")
        except (NodeDiedError, NodeFailedError) as error:
            host.problems.append(str(error))
        for node in range(nodes):
            pod.kill(node)
    waits = np.concatenate(host.waits) if host.waits else np.zeros(1, np.int64)
    p50, p99, longest = np.quantile(waits, (0.5, 0.99, 1.0)).tolist()
    return Stress(
        mode=mode,
        profile=profile.name if profile is not None and mode != "native" else "",
        nodes=nodes,
        workers=workers,
        seed=seed,
        kills=host.kills,
        acquisitions=host.acquisitions,
        counter=host.counter,
        waits_ns=(p50, p99, longest),
        lookups=host.totals[LOOKUPS],
        hits=host.totals[HITS],
        inserted=host.totals[INSERTED],
        refused=host.totals[REFUSED],
        wrong=host.totals[WRONG],
        ready=host.ready,
        problems=tuple(host.problems),
        elapsed_s=time.monotonic() - begin_s,
    )


def await_programs(forker: NodeForker, tell: Told) -> None:
    """Wait until the programs of node processes are compiled; the first time takes a minute."""
    waited_s = 0
    while not forker.prepared(timeout_s=1.0):
        waited_s += 1
        tell("compiling programs, s", waited_s, max(waited_s, COMPILING_S))


@dataclass(frozen=True, slots=True)
class _Quota:
    acquisitions: int
    lookups: int
    kills: int


class _Host:
    """Starts, hears, kills and checks."""

    def __init__(
        self, pod: LivePod, layout: Layout, workers: int, patience_s: float, draw: random.Random
    ) -> None:
        self.totals = [0] * N_TOTALS
        self.waits: list[Words] = []
        self.acquisitions = self.counter = self.ready = self.kills = 0
        self.problems: list[str] = []
        self._pod = pod
        self._layout = layout
        self._counter_at = layout.region_bytes
        self._workers_each = workers
        self._patience_s = patience_s
        self._draw = draw
        self._workers: dict[int, list[NodeProcess]] = {}
        self._heard_s: dict[NodeProcess, float] = {}
        for node in range(layout.nodes):
            self._start_manager(node)
        for node in range(layout.nodes):
            self._start_workers(node)

    def run(self, quota: _Quota, progress: Told) -> None:
        """Let them work until the quota is met, and kill at even distances."""
        while True:
            done = min(self.acquisitions / quota.acquisitions, self.totals[LOOKUPS] / quota.lookups)
            progress("acquisitions", int(min(done, 1) * quota.acquisitions), quota.acquisitions)
            if self.kills < quota.kills and done * (quota.kills + 1) > self.kills:
                self._kill_one()
            elif done >= 1:
                break
            if not self._hear():
                time.sleep(LOOK_AGAIN_S)
        for workers in self._workers.values():
            for one in workers:
                one.send(programs.STOP)
        for workers in self._workers.values():
            for one in workers:
                self._hear_out(one)

    def check(self) -> None:
        """Look at the region at rest."""
        layout, pod = self._layout, self._pod
        if self.totals[WRONG]:
            self.problems.append(f"{self.totals[WRONG]} words read were not what was stored")
        held = sum(int(call(held_chunks, pod.memory(n), layout)) for n in range(layout.nodes))
        for node in range(layout.nodes):
            pod.settle(node)
        self.counter = int(pod.device[self._counter_at // WORD])
        unknown = self.kills * self._workers_each * programs.ACQUISITIONS_A_TURN
        if not self.acquisitions <= self.counter <= self.acquisitions + unknown:
            self.problems.append(
                f"the counter is {self.counter} after {self.acquisitions} to "
                f"{self.acquisitions + unknown} increments"
            )
        report = fsck(pod.memory(0), layout, in_heaps=held)
        self.problems += report.problems
        for what, left in (
            ("pins", report.pins),
            ("reservations", report.pending),
            ("held locks", report.held_locks),
        ):
            if left:
                self.problems.append(f"{left} {what} are left")
        if report.free + report.used + report.held != layout.chunks:
            self.problems.append(
                f"{report.free} free + {report.used} used + {report.held} held chunks are not "
                f"{layout.chunks}"
            )
        self.ready = report.ready
        found = sum(self._is_right(block) for block in range(BLOCKS + 3))
        if found != report.ready:
            self.problems.append(f"{report.ready} blocks are READY, {found} are found and right")

    def _is_right(self, block: int) -> bool:
        keys = np.zeros((1, KEY_WORDS), np.int64)
        payload = np.zeros((1, programs.BLOCK_WORDS), np.int64)
        places = np.zeros((1, PLACE_WORDS), np.int64)
        fill_key(block, keys[0])
        found = call(fetch_chain, self._pod.memory(0), self._layout, keys, payload, places)
        wanted = [word_of(block, i) for i in range(programs.BLOCK_WORDS)]
        return bool(found == 1 and payload[0].tolist() == wanted)

    def _hear(self) -> bool:
        """Take what workers have said; return whether one said anything."""
        heard = False
        now_s = time.monotonic()
        for workers in self._workers.values():
            for one in workers:
                try:
                    message = one.receive(timeout_s=0)
                except NodeTimeoutError:
                    if now_s - self._heard_s[one] > self._patience_s:
                        raise NodeTimeoutError(
                            f"{one} said nothing for {self._patience_s} s"
                        ) from None
                    continue
                self._take(message)
                self._heard_s[one] = now_s
                heard = True
        return heard

    def _hear_out(self, worker: NodeProcess) -> None:
        """Take all that a worker says until it has ended."""
        while True:
            try:
                self._take(worker.receive(timeout_s=self._patience_s))
            except NodeDiedError:
                worker.result(timeout_s=self._patience_s)
                return

    def _take(self, message: Any) -> None:
        totals, waits = message
        self.totals = [a + b for a, b in zip(self.totals, totals, strict=True)]
        self.waits.append(np.array(waits, np.int64))
        self.acquisitions += len(waits)

    def _kill_one(self) -> None:
        """Kill a node, have it repaired after, and start it again."""
        layout, pod = self._layout, self._pod
        dead = self._draw.randrange(layout.nodes)
        survivor = self._draw.choice([node for node in range(layout.nodes) if node != dead])
        pod.kill(dead)
        for one in self._workers.pop(dead):
            self._take_rest(one)
        pod.fence(dead)
        self.kills += 1
        self._start(survivor, "run_recovery", dead).result(timeout_s=self._patience_s)
        self._start(dead, "run_return").result(timeout_s=self._patience_s)
        self._start_manager(dead)
        self._start_workers(dead)
        now_s = time.monotonic()
        self._heard_s = dict.fromkeys(self._heard_s, now_s)

    def _take_rest(self, worker: NodeProcess) -> None:
        """Take what a worker had said before it was killed."""
        try:
            while True:
                self._take(worker.receive(timeout_s=0))
        except (NodeDiedError, NodeTimeoutError):
            del self._heard_s[worker]

    def _start(self, node: int, what: str, *arguments: object) -> NodeProcess:
        target = f"{programs.__name__}:{what}"
        return self._pod.start(node, target, self._layout, *arguments, processes=1)[0]

    def _start_manager(self, node: int) -> None:
        self._start(node, "run_manager")

    def _start_workers(self, node: int) -> None:
        self._workers[node] = [
            self._start(node, "run_worker", self._counter_at, BLOCKS, self._draw.getrandbits(24))
            for _ in range(self._workers_each)
        ]
        now_s = time.monotonic()
        self._heard_s |= dict.fromkeys(self._workers[node], now_s)
