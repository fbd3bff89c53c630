"""TraCT's own text under the virtual clock: several nodes and processes, right and repeatable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pod_ops import load
from cxlbench.emu.pod_virtual import PodCosts, VirtualPod
from cxlbench.tract.chains import stop_manager
from cxlbench.tract.fsck import fsck
from cxlbench.tract.layout import INTERNAL_LOCKS, Sizes
from cxlbench.tract.manager import manage
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.scenario_tasks import use_objects
from cxlbench.tract.stress import (
    HITS,
    INSERTED,
    LOOKUPS,
    N_TOTALS,
    REFUSED,
    WRONG,
    count_up,
    work,
)

COSTS = PodCosts(
    fill_s=640e-9, flush_s=1.41e-6, invalidate_s=1.41e-6, bytes_per_s=10.1e9, dma_latency_s=640e-9
)
LOCK = INTERNAL_LOCKS
WORDS = 16


class Stage:
    """A formatted region on a pod with a manager on each node."""

    def __init__(self, *, nodes: int, chunks: int = 40, slots: int = 64) -> None:
        self.clock = VirtualClock()
        self.nodes = nodes
        sizes = Sizes(nodes=nodes, slots=slots, chunks=chunks, chunk_bytes=WORDS * 8, user_locks=1)
        size_bytes = 1 << 20
        self.counter_at = size_bytes - 64
        self.pod = VirtualPod(self.clock, size_bytes, COSTS, nodes=nodes)
        self.lay = self.pod.alone(format_region, sizes, size_bytes)
        self.pod.lock_words(self.lay.epoch_at, self.lay.roots_at - self.lay.epoch_at)

    def run(self, *programs: Any) -> list[Any]:
        """Run (node, function, *args) at once, then end the managers; return the results."""

        async def all_of_them() -> list[Any]:
            for node in range(self.nodes):
                self.pod.start(node, manage, self.lay)
            works = [self.pod.run(*program) for program in programs]
            done = await self.clock.gather(*works)
            for node in range(self.nodes):
                await self.pod.run(node, stop_manager, self.lay)
            await self.pod.joined()
            return done

        with self.clock:
            return self.clock.run(all_of_them())

    def works(self, processes: int, rounds: int) -> list[np.ndarray]:
        """Run the stress program on ``processes`` processes of each node."""
        totals = [np.zeros(N_TOTALS, np.int64) for _ in range(self.nodes * processes)]
        self.run(
            *(
                (seed % self.nodes, work, self.lay, seed, rounds, 60, WORDS, found)
                for seed, found in enumerate(totals)
            )
        )
        return totals


@pytest.mark.parametrize(("nodes", "processes"), [(1, 1), (2, 1), (3, 2)])
def test_a_counter_under_the_lock_loses_nothing(nodes: int, processes: int) -> None:
    stage = Stage(nodes=nodes)
    stage.run(
        *(
            (task % nodes, count_up, stage.lay, LOCK, stage.counter_at, 25)
            for task in range(nodes * processes)
        )
    )
    assert stage.pod.alone(load, stage.counter_at) == 25 * nodes * processes
    assert (
        stage.pod.alone(
            fsck,
            stage.lay,
        ).held_locks
        == 0
    )


def test_a_lock_takes_as_long_as_its_flushes() -> None:
    stage = Stage(nodes=2)
    stage.run((0, count_up, stage.lay, LOCK, stage.counter_at, 100))
    # A count is five flushes, three fills, and the arbiter's scan of all slots in between.
    assert 10e-6 < stage.clock.now() / 100 < 60e-6


@pytest.mark.parametrize(("nodes", "processes"), [(2, 1), (2, 2), (4, 2)])
def test_lookups_inserts_and_evictions_leave_a_sound_region(nodes: int, processes: int) -> None:
    stage = Stage(nodes=nodes)
    total = sum(stage.works(processes, 40))
    assert total[WRONG] == 0
    assert total[HITS] > 0
    assert total[INSERTED] > stage.lay.chunks
    assert total[LOOKUPS] >= total[HITS] + total[INSERTED] + total[REFUSED]
    report = stage.pod.alone(fsck, stage.lay)
    assert report.sound, report.problems
    assert (report.pins, report.pending, report.held_locks) == (0, 0, 0)


def test_a_run_is_the_same_each_time() -> None:
    def journal() -> tuple[Any, ...]:
        stage = Stage(nodes=3)
        totals = stage.works(2, 20)
        return stage.clock.now(), stage.clock.timers, [found.tolist() for found in totals]

    assert journal() == journal()


def test_named_objects_are_put_read_and_deleted_by_two_nodes() -> None:
    stage = Stage(nodes=2)
    stage.run((0, use_objects, stage.lay, 5, 3, 6), (1, use_objects, stage.lay, 5, 7, 6))
    report = stage.pod.alone(fsck, stage.lay)
    assert report.sound
    assert report.roots == 0


def test_every_node_opens_what_one_formatted() -> None:
    stage = Stage(nodes=2)
    assert stage.run((1, open_region, 1 << 20)) == [stage.lay]
