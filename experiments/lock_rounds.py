"""Processes of several nodes that take one of TraCT's locks again and again, and what it came to.

TraCT's own lock, managers and arbiter on a pod in virtual time, with the costs of a profile;
``lock_contention.py`` says what is compared and why. Units: s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cxlbench.devices.profile import SharedType3Profile
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pod_ops import LINE, clflush, load, store
from cxlbench.emu.pod_virtual import VirtualPod
from cxlbench.emu.pod_virtual_memory import VirtualMemory
from cxlbench.harness.experiment import Row
from cxlbench.harness.pod_profile import virtual_costs
from cxlbench.tract.chains import stop_manager
from cxlbench.tract.fsck import fsck
from cxlbench.tract.layout import INTERNAL_LOCKS, Sizes
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.manager import manage
from cxlbench.tract.region import format_region
from cxlbench.tract.words import load_fresh

LOCK = INTERNAL_LOCKS
"""The first lock that is not TraCT's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What a lock did under contention; times in s."""

    nodes: int
    processes: int
    """On each node."""
    rounds: int
    """Of each process."""
    counted: int
    """The shared counter in the end: one for each critical section."""
    order: tuple[int, ...]
    """The node of each acquisition, in order."""
    waits_s: tuple[float, ...]
    duration_s: float
    most_overtaken: int
    """The most acquisitions by one other node while a node waited."""
    held_locks: int

    @property
    def hand_over_s(self) -> float:
        """Mean time from one acquisition to the next."""
        return self.duration_s / max(1, len(self.order))

    @property
    def fairness(self) -> float:
        """Jain's index of the nodes' acquisitions in the first half of the run."""
        half = self.order[: max(1, len(self.order) // 2)]
        shares = np.array([half.count(node) for node in range(self.nodes)], dtype=float)
        return float(shares.sum() ** 2 / (self.nodes * (shares**2).sum()))

    def row(self) -> Row:
        """Return the row of results."""
        return {
            "nodes": self.nodes,
            "processes": self.processes,
            "acquisitions": len(self.order),
            "hand_over_s": self.hand_over_s,
            "acquisitions_per_s": 1 / self.hand_over_s,
            "wait_mean_s": float(np.mean(self.waits_s)),
            "wait_p99_s": float(np.percentile(self.waits_s, 99)),
            "wait_max_s": max(self.waits_s),
            "most_overtaken": self.most_overtaken,
            "fairness": self.fairness,
        }


class Wanting:
    """A node's memory that notes how many acquisitions there were when its slot said WAITING."""

    def __init__(self, mem: VirtualMemory, order: list[int]) -> None:
        self._mem = mem
        self._order = order
        self.since = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mem, name)

    def critical_want(self, lock: int) -> None:
        """See ``pod_ops.critical_want``: called once the slot is written back."""
        self.since = len(self._order)
        self._mem.critical_want(lock)


def contend(
    memory: SharedType3Profile,
    *,
    nodes: int,
    processes: int,
    rounds: int,
    lines: int,
    seed: int,
) -> Contention:
    """Let ``processes`` on each of ``nodes`` take one lock ``rounds`` times each."""
    clock = VirtualClock()
    sizes = Sizes(nodes=nodes, slots=1, chunks=1, chunk_bytes=LINE, user_locks=1)
    size_bytes = 1 << 20
    counter_at = size_bytes - LINE
    pod = VirtualPod(clock, size_bytes, virtual_costs(memory), nodes=nodes, seed=seed)
    lay = pod.alone(format_region, sizes, size_bytes)
    pod.lock_words(lay.epoch_at, lay.roots_at - lay.epoch_at)
    order: list[int] = []
    waits_s: list[float] = []
    overtaken = [0]

    def take(real: VirtualMemory, node: int, own_at: int) -> None:
        mem = Wanting(real, order)
        for _ in range(rounds):
            begin_s = clock.now() + real.debt_s
            acquire(mem, lay, LOCK)
            since = order[mem.since :]
            overtaken[0] = max([overtaken[0], *(since.count(other) for other in set(since))])
            order.append(node)
            waits_s.append(clock.now() - begin_s)
            store(mem, counter_at, load_fresh(mem, counter_at) + 1)
            clflush(mem, counter_at)
            for line in range(lines):
                clflush(mem, own_at + line * LINE)
                store(mem, own_at + line * LINE, load(mem, own_at + line * LINE) + 1)
                clflush(mem, own_at + line * LINE)
            release(mem, lay, LOCK)

    async def everybody() -> float:
        for node in range(nodes):
            pod.start(node, manage, lay)
        begin_s = clock.now()
        await clock.gather(
            *(
                pod.run(
                    node, take, node, counter_at - (1 + node * processes + number) * lines * LINE
                )
                for number in range(processes)
                for node in range(nodes)
            )
        )
        took_s = clock.now() - begin_s
        for node in range(nodes):
            await pod.run(node, stop_manager, lay)
        await pod.joined()
        return took_s

    with clock:
        duration_s = clock.run(everybody())
    return Contention(
        nodes=nodes,
        processes=processes,
        rounds=rounds,
        counted=pod.alone(load, counter_at),
        order=tuple(order),
        waits_s=tuple(waits_s),
        duration_s=duration_s,
        most_overtaken=overtaken[0],
        held_locks=pod.alone(fsck, lay).held_locks,
    )
