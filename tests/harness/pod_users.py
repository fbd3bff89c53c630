"""Modules that a user of the pod might have written, as text."""

from __future__ import annotations

MESSAGE = """\
from cxlbench.emu.pod_ops import clflush, load, pause, store

def send(mem):
    store(mem, 0, 7)
    {flush}
    store(mem, 64, 1)
    clflush(mem, 64)

def receive(mem, got):
    load(mem, 0)
    while not load(mem, 64):
        pause(mem, 64, 8)
        clflush(mem, 64)
    clflush(mem, 0)
    got.append(load(mem, 0))

def scenario(pod):
    got = []
    pod.name_range(0, 8, "the data")
    pod.run(0, send, name="writer")
    pod.run(1, receive, got, name="reader")
    pod.at_end(lambda mem: got == [7])
"""

WRONG = MESSAGE.format(flush="pass")
RIGHT = MESSAGE.format(flush="clflush(mem, 0)")
WASTEFUL = MESSAGE.format(flush="clflush(mem, 0)\n    clflush(mem, 0)")
