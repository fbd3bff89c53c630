"""TraCT on mapped nodes: what their processes run, with nothing but a view and its flush."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from cxlbench.tract.client import ObjectStore, PodLock, PrefixCache
from cxlbench.tract.errors import TractError
from cxlbench.tract.layout import INTERNAL_LOCKS
from cxlbench.tract.manager import manage
from cxlbench.tract.mutant_loader import Mutant
from cxlbench.tract.mutant_loader import load as load_mutant
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.stress import N_TOTALS, count_up, fill_key, work
from cxlbench.tract.words import KEY_WORDS


def initialize(live, sizes, region_bytes, mutant, folder):
    """Format the region, with TraCT's text or with a wrong one.

    Nobody may open it here afterwards: whoever invalidates a line flushes his own stores to it.
    """
    mem = live.memory.handle()
    if mutant is None:
        format_region(mem, sizes, region_bytes)
    else:
        load_mutant(Mutant(**mutant), Path(folder))
        alias = "tract_mutant_" + mutant["name"].replace("-", "_")
        wrong = importlib.import_module(f"{alias}.region")
        wrong.format_region(mem, wrong_sizes(alias, sizes), region_bytes)


def wrong_sizes(alias, sizes):
    """The same sizes, as the mutant's own class."""
    kind = importlib.import_module(f"{alias}.layout").Sizes
    return kind(**{name: getattr(sizes, name) for name in sizes.__dataclass_fields__})


def opens(live, region_bytes):
    """Open the region; return nothing, or why not."""
    try:
        open_region(live.memory.handle(), region_bytes)
    except TractError as error:
        return type(error).__name__, str(error)
    return None


def manager(live, region_bytes):
    mem = live.memory.handle()
    manage(mem, open_region(mem, region_bytes))


def counter(live, region_bytes, at, times):
    mem = live.memory.handle()
    count_up(mem, open_region(mem, region_bytes), INTERNAL_LOCKS, at, times)


def worker(live, region_bytes, seed, rounds, blocks, words):
    mem = live.memory.handle()
    totals = np.zeros(N_TOTALS, np.int64)
    work(mem, open_region(mem, region_bytes), seed, rounds, blocks, words, totals)
    return totals.tolist()


def put(live, region_bytes, name, values):
    mem = live.memory.handle()
    store = ObjectStore(mem, open_region(mem, region_bytes))
    return store.put(name, np.array(values, np.int64)).length


def get(live, region_bytes, name):
    mem = live.memory.handle()
    return ObjectStore(mem, open_region(mem, region_bytes)).read(name).tolist()


def delete(live, region_bytes, name):
    mem = live.memory.handle()
    ObjectStore(mem, open_region(mem, region_bytes)).delete(name)


def key_of(number):
    key = np.zeros(KEY_WORDS, np.int64)
    fill_key(number, key)
    return key.tobytes()


def insert(live, region_bytes, first, last, words):
    mem = live.memory.handle()
    cache = PrefixCache(mem, open_region(mem, region_bytes), live.node)
    payload = np.array([[100 * n + i for i in range(words)] for n in range(first, last)], np.int64)
    return [one.name for one in cache.insert([key_of(n) for n in range(first, last)], payload)]


def probe(live, region_bytes, first, last, words):
    """Return, of each leading block that is found, its words."""
    mem = live.memory.handle()
    cache = PrefixCache(mem, open_region(mem, region_bytes), live.node)
    with cache.lookup([key_of(n) for n in range(first, last)]) as lease:
        buffers = [np.zeros(words, np.int64) for _ in lease.blocks]
        assert lease.read(buffers) == len(buffers)
    return [buffer.tolist() for buffer in buffers]


def evict(live, region_bytes, blocks):
    mem = live.memory.handle()
    return PrefixCache(mem, open_region(mem, region_bytes), live.node).evict(blocks)


def hold(live, region_bytes):
    """Take the users' lock and tell; release it when told."""
    mem = live.memory.handle()
    with PodLock(mem, open_region(mem, region_bytes), INTERNAL_LOCKS):
        live.send("held")
        live.receive()
