"""What a live pod's device charges: one pipe for all nodes, and latency on top of it."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.emu.pod_layout import ArrivalLaw, DeviceCosts, PodShape
from cxlbench.emu.pod_processes import LivePod

MS = 1_000_000
LINE_PS = 2 * MS * 1000
"""A line occupies the pipe for 2 ms."""


@pytest.fixture
def pods():
    made = []

    def make(mode="emulated", **costs):
        shape = PodShape(1 << 14, mode=mode, arrival=ArrivalLaw("held"), costs=DeviceCosts(**costs))
        made.append(LivePod(shape))
        if mode == "emulated":
            for node in range(2):
                made[-1].memory(node).now()  # compiled or loaded before anything is timed
        return made[-1]

    yield make
    for pod in made:
        pod.close()


def took(function, *arguments, clock):
    begin = clock.now()
    function(*arguments)
    return clock.now() - begin


@pytest.mark.parametrize("operation", ["load", "store", "clflush"])
def test_what_one_node_moves_keeps_the_others_waiting(pods, operation):
    pod = pods(line_ps=LINE_PS)
    a, b = pod.memory(0), pod.memory(1)
    if operation == "clflush":
        b.store(0, 1)
    handle = a.dma_write(4096, np.ones(80, np.int64))  # ten lines: 20 ms
    arguments = (0, 1) if operation == "store" else (0,)
    assert took(getattr(b, operation), *arguments, clock=b) >= 20 * MS
    a.dma_wait(handle)


def test_a_flush_of_nothing_takes_its_latency_and_no_bandwidth(pods):
    pod = pods(line_ps=100 * LINE_PS, flush_ns=MS)
    a, b = pod.memory(0), pod.memory(1)
    a.dma_write(4096, np.ones(8 * 100, np.int64))  # 20 s
    assert MS <= took(b.clflush, 0, clock=b) < 10_000 * MS


def test_a_hit_does_not_wait_for_the_pipe(pods):
    pod = pods(line_ps=100 * LINE_PS)
    a, b = pod.memory(0), pod.memory(1)
    b.load(0)
    a.dma_write(4096, np.ones(8 * 100, np.int64))  # 20 s
    assert took(b.load, 0, clock=b) < 10_000 * MS


def test_a_posted_flush_is_waited_for_by_nobody_and_takes_the_pipe_when_it_lands(pods):
    pod = pods(line_ps=100 * LINE_PS)
    a, b = pod.memory(0), pod.memory(1)
    b.load(0)  # 200 ms
    a.store(64, 1)
    assert took(a.clflushopt, 64, clock=a) < 100 * MS
    pod.settle(0)
    assert took(b.load, 128, clock=b) >= 300 * MS


def test_a_dma_goes_on_while_its_process_does_something_else(pods):
    pod = pods(line_ps=LINE_PS, fill_ns=10 * MS)
    a = pod.memory(0)
    begin = a.now()
    handle = a.dma_write(0, np.ones(160, np.int64))  # 40 ms and 10
    while a.now() - begin < 50 * MS:
        a.pause(0, 8)
    assert took(a.dma_wait, handle, clock=a) < 40 * MS


def test_a_dma_is_not_done_before_its_time(pods):
    pod = pods(line_ps=LINE_PS, fill_ns=10 * MS)
    a = pod.memory(0)
    words = np.zeros(80, np.int64)
    begin = a.now()
    handle = a.dma_read(0, words)
    while not a.dma_done(handle):
        pass
    assert a.now() - begin >= 30 * MS


@pytest.mark.parametrize(
    ("operation", "least_ms"), [("flush", 12), ("write_back", 7), ("refresh", 7)]
)
def test_a_mapped_nodes_flush_is_charged_for_what_it_does(pods, operation, least_ms):
    pod = pods("mapped", line_ps=LINE_PS, fill_ns=5 * MS, flush_ns=5 * MS)
    node = pod.mapped(0)
    clock = node.handle()
    clock.now()
    node.map()[0] = 7
    assert took(getattr(node, operation), 0, 64, clock=clock) >= least_ms * MS
    clock.close()
