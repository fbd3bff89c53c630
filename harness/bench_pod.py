"""How fast the pod's executors are on this host, beside plain memory and bare greenlet switches.

* *Explored*: memory operations a second of a TraCT scenario under the random scheduler, with all
  checks; beside it, how often greenlets can switch at all.
* *Emulated and native*: ns a load and a store that hit, the same loop on an array beside it.
* *Charged*: the same lock on an emulated pod whose shared memory costs what its profile says.
* *TraCT in compiled code*: lock and unlock with a live arbiter, hand-over of a lock between node
  processes, and lookups of 32 keys from Python in a table that is half full: present ones, absent
  ones, and probe with pin and unpin. Every probe invalidates the lines it reads.

Every figure is the median of some rounds. Units: ns, operations a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import greenlet

from cxlbench.emu.flush_instructions import SUPPORT
from cxlbench.emu.pod_explorer import explore
from cxlbench.emu.pod_layout import CacheGeometry, PodShape
from cxlbench.emu.pod_node_process import NodeForker
from cxlbench.emu.pod_processes import LivePod
from cxlbench.harness import bench_pod_nodes as nodes
from cxlbench.harness.pod_profile import cache_of, load_shared_memory, on_profile
from cxlbench.harness.pod_stress import await_programs
from cxlbench.tract import scenarios
from cxlbench.tract.layout import Layout, Sizes, plan
from cxlbench.tract.places import PLACE_WORDS
from cxlbench.tract.prefix_cache import lookup_chain, probe_chain, unpin_chain
from cxlbench.tract.region import call, format_region
from cxlbench.tract.words import KEY_WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.devices.profile import SharedType3Profile
    from cxlbench.emu.pod_layout import Mode

    Words = NDArray[np.int64]

MIN_EXPLORED_PER_S = 200_000
MAX_EMULATED_HIT_NS = 60.0
MAX_PROBE_NS = 20_000.0
"""The bars; a probe is of 32 present keys, on native memory."""

SCENARIO = "cache_traffic"
CHARGED = "charged"
BATCH = 32
PROFILE = "niagara-2.0"
"""Whose node caches (256 KiB) and costs are measured, unless another is given."""
TOUCHED_BYTES = 1 << 17
"""Of the accesses that hit; half of a node's cache if that is less."""
NODE_FUNCTIONS = nodes.__name__

Told = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True)
class Explored:
    """The explorer's speed."""

    scenario: str
    operations_per_s: float
    greenlet_switches_per_s: float


@dataclass(frozen=True, slots=True)
class Access:
    """One kind of access that hits, beside the same loop on an array; ns each."""

    executor: str
    operation: str
    ns: float
    plain_ns: float

    @property
    def ratio(self) -> float:
        """How many times as long as on an array."""
        return self.ns / self.plain_ns


@dataclass(frozen=True, slots=True)
class Locks:
    """TraCT's lock on one executor; ns."""

    executor: str
    uncontended_ns: float
    """Lock and unlock, with the arbiter in another process."""
    hand_over_ns: float
    """From one node's process to the other's."""
    crowded_hand_over_ns: float
    """The same with two processes on each node that want it."""


@dataclass(frozen=True, slots=True)
class Lookups:
    """Lookups of 32 keys from Python, on one executor; ns a call."""

    executor: str
    slots: int
    load: float
    present_ns: float
    absent_ns: float
    pinned_ns: float
    """Probe, pin and unpin of 32 present keys; the pin takes the cache lock."""


@dataclass(frozen=True, slots=True)
class PodBench:
    """All figures of one run."""

    rounds: int
    profile: str
    cache_bytes: int
    explored: Explored
    accesses: tuple[Access, ...]
    locks: tuple[Locks, ...]
    lookups: tuple[Lookups, ...]
    native_missing: str
    """Why there is no native figure; empty if there is."""


def bench_pod(
    *,
    rounds: int = 5,
    schedules: int = 100,
    accesses: int = 1_000_000,
    lock_rounds: int = 2_000,
    slots: int = 1_000_000,
    profile: SharedType3Profile | None = None,
    progress: Told | None = None,
) -> PodBench:
    """Measure all executors; takes about a minute, more when programs have to be compiled first.

    Node caches are those of ``profile`` (niagara-2.0 if none is given); its costs are charged where
    an executor is called *charged*.

    Raises ``ValueError`` if a number is not positive, or ``slots`` is less than 128.
    """
    if min(rounds, schedules, accesses, lock_rounds) < 1 or slots < 4 * BATCH:
        raise ValueError(
            "rounds, schedules, accesses and lock_rounds must be positive and slots at least "
            f"{4 * BATCH}; got {rounds}, {schedules}, {accesses}, {lock_rounds}, {slots}"
        )
    modes: tuple[Mode, ...] = ("emulated", "native") if SUPPORT.clflush else ("emulated",)
    tell = progress or (lambda what, done, total: None)
    memory = load_shared_memory(PROFILE) if profile is None else profile
    cache = cache_of(memory)
    steps = 2 + 3 * len(modes)
    done = 0

    def told(what: str) -> None:
        nonlocal done
        done += 1
        tell(what, done, steps)

    explored = bench_explored(rounds=rounds, schedules=schedules)
    told("explored")
    hits: list[Access] = []
    locks: list[Locks] = []
    lookups: list[Lookups] = []
    with NodeForker(prepare=[f"{NODE_FUNCTIONS}:warm_up"]) as forker:
        await_programs(forker, tell)
        for mode in modes:
            hits += bench_accesses(mode, cache, rounds=rounds, times=accesses)
            told(f"{mode}: hits")
            bare = _Pods(mode, forker, cache, None)
            locks.append(bench_locks(mode, bare, rounds=rounds, times=lock_rounds))
            told(f"{mode}: locks")
            lookups.append(bench_lookups(mode, bare, rounds=rounds, slots=slots))
            told(f"{mode}: lookups")
        charging = _Pods("emulated", forker, cache, memory)
        locks.append(bench_locks(CHARGED, charging, rounds=rounds, times=lock_rounds))
        told(f"{CHARGED}: locks")
    return PodBench(
        rounds,
        memory.name,
        cache.capacity_bytes,
        explored,
        tuple(hits),
        tuple(locks),
        tuple(lookups),
        "" if "native" in modes else SUPPORT.refusal("clflush"),
    )


def bench_explored(*, rounds: int, schedules: int) -> Explored:
    """Measure the explorer on a scenario of TraCT's."""
    rates = []
    for number in range(rounds):
        begin = time.perf_counter()
        found = explore(
            scenarios.ALL[SCENARIO], schedules=schedules, first=number * schedules, shrinking=False
        )
        rates.append(found.steps / (time.perf_counter() - begin))
    switches = [_switches_per_s(200_000) for _ in range(rounds)]
    return Explored(SCENARIO, statistics.median(rates), statistics.median(switches))


def _switches_per_s(times: int) -> float:
    """Let two greenlets hand over to each other."""

    def there() -> None:
        switch = here.switch
        while True:
            switch()

    def back() -> None:
        switch = other.switch
        for _ in range(times // 2):
            switch()

    here, other = greenlet(back), greenlet(there)
    begin = time.perf_counter()
    here.switch()
    return times / (time.perf_counter() - begin)


def bench_accesses(mode: Mode, cache: CacheGeometry, *, rounds: int, times: int) -> list[Access]:
    """Measure loads and stores that hit, and the same loops on an array."""
    touched = min(TOUCHED_BYTES, cache.capacity_bytes // 2)
    mask = touched - 1
    plain = np.zeros(touched // 8, np.int64)
    found = []
    with LivePod(PodShape(1 << 18, nodes=1, mode=mode, cache=cache)) as pod:
        memory = pod.memory(0)
        for name, function, beside in (
            ("load", nodes.load_words, nodes.load_plain),
            ("store", nodes.store_words, nodes.store_plain),
        ):
            compiled = nodes.compiled_program(function)
            found.append(
                Access(
                    mode,
                    name,
                    _median_ns(lambda c=compiled: c(memory, times, mask), rounds) / times,  # type: ignore[misc]
                    _median_ns(lambda b=beside: b(plain, times, mask), rounds) / times,  # type: ignore[misc]
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class _Pods:
    """Makes the pods of one executor."""

    mode: Mode
    forker: NodeForker
    cache: CacheGeometry
    charging: SharedType3Profile | None


def bench_locks(executor: str, pods: _Pods, *, rounds: int, times: int) -> Locks:
    """Measure TraCT's lock between two nodes, whose managers are processes of their own."""
    layout = plan(Sizes(nodes=2, slots=1, chunks=1, chunk_bytes=64, user_locks=1))

    def each(processes: int, on_nodes: tuple[int, ...]) -> float:
        figures = []
        for _ in range(rounds):
            with _tract_pod(pods, layout, processes=processes + 1) as pod:
                workers = [
                    one
                    for node in on_nodes
                    for one in pod.start(
                        node,
                        f"{NODE_FUNCTIONS}:run_lock_rounds",
                        layout,
                        times,
                        processes=processes,
                    )
                ]
                for one in workers:
                    one.receive()
                for one in workers:
                    one.send("go")
                spans = [one.result() for one in workers]
            elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
            figures.append(elapsed / (times * len(spans)))
        return float(statistics.median(figures))

    return Locks(executor, each(1, (1,)), each(1, (0, 1)), each(2, (0, 1)))


def bench_lookups(executor: str, pods: _Pods, *, rounds: int, slots: int) -> Lookups:
    """Measure lookups in a table that is half full."""
    held = slots // 2
    layout = plan(Sizes(nodes=2, slots=slots, chunks=held, chunk_bytes=64, evict_above=slots))
    random = np.random.default_rng(7)
    keys = random.integers(0, 1 << 62, size=(held, KEY_WORDS), dtype=np.int64)
    places = np.zeros((BATCH, PLACE_WORDS), np.int64)
    calls = 64
    batches = [keys[random.integers(0, held, BATCH)] for _ in range(calls)]
    missing = random.integers(0, 1 << 62, size=(calls, BATCH, KEY_WORDS), dtype=np.int64)
    with _tract_pod(pods, layout, processes=1, keys=keys) as pod:
        memory = pod.memory(1)

        def present() -> None:
            for batch in batches:
                if call(probe_chain, memory, layout, batch, places) != BATCH:
                    raise AssertionError("a key that is present was not found")

        def not_there() -> None:
            for batch in missing:
                if call(nodes.probe_each, memory, layout, batch):
                    raise AssertionError("a key that is absent was found")

        def pinned() -> None:
            for batch in batches:
                hits = call(lookup_chain, memory, layout, batch, places)
                call(unpin_chain, memory, layout, places, hits)

        figures = [_median_ns(one, rounds) / calls for one in (present, not_there, pinned)]
    return Lookups(executor, slots, held / slots, *figures)


@contextmanager
def _tract_pod(
    pods: _Pods,
    layout: Layout,
    *,
    processes: int,
    keys: Words | None = None,
) -> Iterator[LivePod]:
    """Make a pod of two nodes with a formatted region; a manager runs on each."""
    shape = PodShape(
        -(-layout.region_bytes // 4096) * 4096,
        nodes=2,
        processes=processes,
        mode=pods.mode,
        cache=pods.cache,
        local_locks=layout.local_locks,
        local_words=layout.local_words,
    )
    if pods.charging is not None:
        shape = on_profile(shape, pods.charging)
    with LivePod(shape, forker=pods.forker) as pod:
        memory = pod.memory(0)
        format_region(memory, _sizes(layout), shape.region_bytes, zeroed=True)
        if keys is not None:
            nodes.compiled_program(nodes.fill_index)(memory, layout, keys)
        for node in range(2):
            pod.start(node, f"{NODE_FUNCTIONS}:run_manager", layout, processes=1)
        yield pod


def _sizes(layout: Layout) -> Sizes:
    return Sizes(
        nodes=layout.nodes,
        slots=layout.slots,
        chunks=layout.chunks,
        chunk_bytes=layout.chunk_bytes,
        user_locks=layout.locks - nodes.LOCK,
        roots=layout.roots,
        evict_above=layout.evict_above,
        heap_batch=layout.heap_batch,
        snooped_payload=bool(layout.snooped_payload),
    )


def _median_ns(function: Callable[[], Any], rounds: int) -> float:
    """Return how long a call takes, after one that does not count."""
    function()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        function()
        found.append(time.perf_counter_ns() - begin)
    return float(statistics.median(found))
