"""Nodes of a live pod that do what a test says, one operation after another."""

from __future__ import annotations

from cxlbench.emu.pod_layout import CacheGeometry, PodShape
from cxlbench.emu.pod_processes import LivePod

SMALL = CacheGeometry(sets=16, ways=2, posted=16)


class Commanded:
    """A node process that obeys: every method is an operation of the pod, done over there."""

    def __init__(self, process):
        self.process = process

    def __getattr__(self, name):
        def perform(*arguments):
            self.process.send((name, *arguments))
            return self.process.receive()

        return perform


class Rig:
    """A pod with one obeying process on each node."""

    def __init__(self, forker, **shape):
        shape = {"region_bytes": 1 << 14, "nodes": 2, "cache": SMALL, **shape}
        self.pod = LivePod(PodShape(**shape), forker=forker)
        self.nodes = [self.boot(node) for node in range(shape["nodes"])]

    def boot(self, node):
        (process,) = self.pod.start(node, "tests.emu.live_programs:obey", processes=1)
        return Commanded(process)

    def device(self, off):
        """The word at ``off`` in D itself."""
        return int(self.pod.device[off // 8])

    def posted(self, node):
        return self.pod.counters(node)["posted"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pod.close()
