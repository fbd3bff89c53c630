"""Programs that know nothing of the pod: they open a path, map it, and use it as shared memory.

An append-only log with a header, as somebody would write it for ``/dev/dax0.0``. ``flush`` is the
one thing that they are given.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

import numpy as np

MAGIC = b"LOG1"


def open_and_map(path):
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def initialize(path, flush):
    """Format the region; ``flush`` may be forgotten."""
    memory = open_and_map(path)
    memory[0:4] = MAGIC
    memory[8:16] = struct.pack("<q", 0)
    if flush is not None:
        flush(0, 16)


def is_formatted(path, flush):
    memory = open_and_map(path)
    flush(0, 16)
    return memory[0:4] == MAGIC


def append(path, flush, text):
    """Append a record: its bytes, then the tail. Flushes by the *address* in its own mapping."""
    memory = open_and_map(path)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flush(base, 64)
    (tail,) = struct.unpack("<q", memory[8:16])
    at = 64 + tail * 64
    memory[at : at + 64] = text.encode().ljust(64, b"\0")
    flush(base + at, 64)
    memory[8:16] = struct.pack("<q", tail + 1)
    flush(base + 8, 8)


def records(path, flush):
    words = np.memmap(path, dtype=np.uint8, mode="r+")
    flush(0, 64)
    count = int(words[8:16].view(np.int64)[0])
    flush(64, 64 * count)
    return [bytes(words[64 + 64 * i : 128 + 64 * i]).rstrip(b"\0").decode() for i in range(count)]


# The same as functions for node processes


def node_initialize(live, flushing):
    initialize(live.memory.path, live.memory.flush if flushing else None)
    return is_formatted(live.memory.path, live.memory.flush if flushing else lambda *_: None)


def node_is_formatted(live):
    return is_formatted(live.memory.path, live.memory.flush)


def node_append(live, texts):
    for text in texts:
        append(live.memory.path, live.memory.flush, text)


def node_records(live):
    return records(live.memory.path, live.memory.flush)


def count_for_ever(live, offset):
    """Store one number after another into a word of the view and check that none is lost."""
    words = np.memmap(live.memory.path, dtype=np.int64, mode="r+")
    live.send("counting")
    lost = value = 0
    while not live.channel.poll(0):
        for _ in range(1000):
            lost += int(words[offset // 8] != value)
            value += 1
            words[offset // 8] = value
    return lost, value
