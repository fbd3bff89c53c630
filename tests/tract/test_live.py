"""The same text on real processes: emulated caches and native memory, and a node that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cxlbench.emu.pod_layout import CacheGeometry, Disturbance, PodShape
from cxlbench.emu.pod_node_process import NodeForker
from cxlbench.emu.pod_processes import LivePod
from cxlbench.tract.fsck import FsckReport, fsck
from cxlbench.tract.heap import held_chunks
from cxlbench.tract.layout import INTERNAL_LOCKS, Layout, Sizes, plan
from cxlbench.tract.membership import report_dead
from cxlbench.tract.recovery import await_repair, restart_region
from cxlbench.tract.region import call, format_region, open_region
from cxlbench.tract.stress import HITS, INSERTED, WRONG

WORDS = 64
SIZES = Sizes(
    nodes=2,
    slots=64,
    chunks=40,
    chunk_bytes=8 * WORDS,
    user_locks=1,
    roots=2,
    heap_batch=4,
)
LAYOUT = plan(SIZES)
PROGRAMS = "tests.tract.live_programs"


@pytest.fixture(scope="module")
def forker() -> Iterator[NodeForker]:
    with NodeForker(prepare=[f"{PROGRAMS}:warm_up"]) as made:
        yield made


class Live:
    """A live pod with a manager on every node; process 1 and 2 of each are for work."""

    def __init__(self, forker: NodeForker, mode: Any) -> None:
        emulated: dict[str, Any] = {
            "cache": CacheGeometry(sets=64, ways=4, posted=64),
            "disturbance": Disturbance(evictions_per_million=400, fills_per_million=400),
        }
        shape = PodShape(
            region_bytes=LAYOUT.region_bytes,
            nodes=SIZES.nodes,
            processes=3,
            mode=mode,
            local_locks=LAYOUT.local_locks,
            local_words=LAYOUT.local_words,
            **(emulated if mode == "emulated" else {}),
        )
        self.pod = LivePod(shape, forker=forker)
        format_region(self.pod.memory(0), SIZES, LAYOUT.region_bytes)
        self.managers = [self.start(node, "manager")[0] for node in range(SIZES.nodes)]

    def start(self, node: int, what: str, *args: object, processes: int = 1) -> list[Any]:
        return self.pod.start(
            node, f"{PROGRAMS}:{what}", LAYOUT.region_bytes, *args, processes=processes
        )

    def check(self, nodes: range | None = None) -> FsckReport:
        held = sum(
            int(call(held_chunks, self.pod.memory(node), LAYOUT))
            for node in nodes or range(SIZES.nodes)
        )
        for node in nodes or range(SIZES.nodes):
            self.pod.settle(node)
        report = fsck(self.pod.memory(0), LAYOUT, in_heaps=held)
        assert report.problems == ()
        assert (report.pins, report.pending, report.held_locks) == (0, 0, 0)
        return report

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(SIZES.nodes):
            self.pod.kill(node)
        self.pod.close()


@pytest.mark.parametrize("mode", ["emulated", "native"])
def test_no_increment_is_lost_between_processes(forker: NodeForker, mode: str) -> None:
    with Live(forker, mode) as live:
        at = LAYOUT.pool_at
        counters = [
            p
            for node in range(2)
            for p in live.start(node, "counter", INTERNAL_LOCKS, at, 300, processes=2)
        ]
        for process in counters:
            process.result()
        live.pod.settle(0)
        live.pod.settle(1)
        assert live.pod.device[at // 8] == 1200


@pytest.mark.parametrize("mode", ["emulated", "native"])
def test_every_byte_read_is_the_byte_stored(forker: NodeForker, mode: str) -> None:
    with Live(forker, mode) as live:
        workers = [
            p
            for node in range(2)
            for p in live.start(node, "worker", 7 + node, 400, 90, WORDS, processes=2)
        ]
        totals = [process.result() for process in workers]
        assert [t[WRONG] for t in totals] == [0] * 4
        # How the work falls on the processes is up to the scheduler of the host.
        assert sum(t[HITS] for t in totals) > 100
        assert sum(t[INSERTED] for t in totals) > 100
        report = live.check()
        assert 0 < report.ready <= SIZES.evict_above


@pytest.mark.parametrize("dead", [0, 1], ids=["arbiter", "other node"])
def test_the_pod_goes_on_when_a_node_is_killed(forker: NodeForker, dead: int) -> None:
    with Live(forker, "emulated") as live:
        other = 1 - dead
        doomed = live.start(dead, "worker", 3, 1 << 30, 90, WORDS, processes=2)
        survivor = live.start(other, "worker", 4, 800, 90, WORDS)[0]
        for process in (*doomed, survivor):
            process.receive()
        live.pod.kill(dead)
        live.pod.fence(dead)
        incarnation = call(report_dead, live.pod.memory(other), LAYOUT, dead)
        call(await_repair, live.pod.memory(other), LAYOUT, dead, incarnation)
        assert survivor.result()[WRONG] == 0
        live.check(range(other, other + 1))
        back = live.start(dead, "returning")[0]
        assert back.receive() == incarnation + 1
        live.start(dead, "manager")
        assert live.start(dead, "worker", 5, 200, 90, WORDS)[0].result()[WRONG] == 0
        live.check()


def test_a_region_left_by_all_nodes_is_repaired_and_opens_again(forker: NodeForker) -> None:
    with Live(forker, "emulated") as live:
        workers = [live.start(node, "worker", node, 1 << 30, 90, WORDS)[0] for node in range(2)]
        for process in workers:
            process.receive()
        for node in range(2):
            live.pod.kill(node)
        for node in range(2):
            live.pod.fence(node)
        mem = live.pod.memory(0)
        layout: Layout = open_region(mem, LAYOUT.region_bytes)
        report = restart_region(mem, layout)
        assert report.problems == ()
        assert (report.pins, report.pending, report.held, report.held_locks) == (0, 0, 0, 0)
        live.start(0, "manager")
        assert live.start(0, "worker", 9, 100, 90, WORDS)[0].result()[WRONG] == 0
