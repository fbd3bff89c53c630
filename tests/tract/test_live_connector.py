"""Connectors in processes of a live pod: real bytes from node to node, caches that go stale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxlbench.emu.pod_layout import CacheGeometry, Disturbance, PodShape
from cxlbench.emu.pod_node_process import NodeForker
from cxlbench.emu.pod_processes import LivePod
from cxlbench.tract.fsck import fsck
from cxlbench.tract.layout import Sizes, plan
from cxlbench.tract.region import format_region
from tests.tract.live_connectors import BLOCK_BYTES, KEYS

PROGRAMS = "tests.tract.live_connectors"
MANAGER = "tests.tract.live_programs:manager"
SIZES = Sizes(nodes=2, slots=128, chunks=64, chunk_bytes=BLOCK_BYTES)
LAYOUT = plan(SIZES)


@pytest.fixture(scope="module")
def forker() -> Iterator[NodeForker]:
    with NodeForker(prepare=[f"{PROGRAMS}:warm_up"]) as made:
        yield made


def test_two_processes_read_what_each_other_stored(forker: NodeForker) -> None:
    shape = PodShape(
        region_bytes=LAYOUT.region_bytes,
        nodes=2,
        processes=2,
        mode="emulated",
        local_locks=LAYOUT.local_locks,
        local_words=LAYOUT.local_words,
        cache=CacheGeometry(sets=64, ways=4, posted=64),
        disturbance=Disturbance(evictions_per_million=400, fills_per_million=400),
    )
    with LivePod(shape, forker=forker) as pod:
        format_region(pod.memory(0), SIZES, LAYOUT.region_bytes)
        for node in range(2):
            pod.start(node, MANAGER, LAYOUT.region_bytes, processes=1)
        parts = ((0, 20), (10, len(KEYS)))
        workers = [
            pod.start(node, f"{PROGRAMS}:worker", LAYOUT.region_bytes, *part, processes=1)[0]
            for node, part in enumerate(parts)
        ]
        answers = [worker.receive() for worker in workers]
        shared = list(zip(answers[0][10:], answers[1][:10], strict=True))
        assert {frozenset(pair) for pair in shared} == {frozenset(("STORED", "EXISTS"))}
        assert {*answers[0][:10], *answers[1][10:]} == {"STORED"}
        for worker in workers:
            worker.send("read")
        for worker in workers:
            found, loaded, right, held = worker.result()
            assert (found, loaded, right) == (len(KEYS),) * 3
            assert not any(held.values())
        for node in range(2):
            pod.kill(node)
            pod.settle(node)
        report = fsck(pod.memory(0), LAYOUT)
        assert report.problems == ()
        assert (report.ready, report.pins, report.pending) == (len(KEYS), 0, 0)
