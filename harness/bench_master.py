"""How fast Master answers lookups: ``cxlbench bench master``.

HyMCache §4.1 puts Master on the path of every lookup; a table of 6.5e5 objects (10 TiB of 16 MiB
blocks) must answer batches of 32 keys at well over a million keys a second. Measured in process,
with a table that is as full as it may be, twice: the bare slot table, from a list of ``bytes`` keys
to arrays of locations, and ``Master.lookup`` with all that it does for a reader (descriptors, a
lease on every hit, the age of the chain, and the release at the end). Keys are uniform, as SHA-256
is, and looked up in random order, so most slots come from memory.

Left out: the control messages, and what the caller does with the answer. Units: keys/s of the
host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxlbench.emu.clock import VirtualClock
from cxlbench.hymcache.master import Master
from cxlbench.hymcache.slot_table import SlotState, SlotTable
from cxlbench.kv.identity import KEY_BYTES

BATCH_KEYS = 32
"""HyMCache §4.2: Lookup asks Master in batches of at most 32."""

LEASE_BATCHES = 8
"""Batches that one request asks for under its lease: 256 blocks, a prompt of 32 K tokens."""

MIN_KEYS_PER_S = 1_000_000
MAX_SLOT_BYTES = 64
MAX_LOAD = 0.8
"""The bars: for the table alone, and for lookups with leases."""

_OBJECT_BYTES = 16 << 20
_ROUNDS = 3
_STEP_BATCHES = 1000
"""Work between two notes of progress, which are not timed."""

Batches = list[list[bytes]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MasterBench:
    """What was measured; keys/s are the median of three rounds over the same batches."""

    objects: int
    slots: int
    bytes_per_slot: int
    table_bytes: int
    load: float
    probe_length_mean: float
    probe_length_max: int
    batch_keys: int
    batches: int
    hit_keys_per_s: float
    """Lookups in the table of keys that are in it."""

    miss_keys_per_s: float
    """Lookups in the table of keys that are not."""

    leased_hit_keys_per_s: float
    """``Master.lookup`` of keys that it has, leases and their release included."""

    leased_miss_keys_per_s: float
    """``Master.lookup`` of keys that it has not."""

    insert_keys_per_s: float
    """Filling the empty table in batches of the same size."""


def bench_master(
    objects: int = 650_000,
    batches: int = 4_000,
    seed: int = 0,
    *,
    progress: Progress = lambda *_: None,
) -> MasterBench:
    """Fill a table with ``objects`` random keys and look up ``batches`` batches of 32, three times.

    Keys and their order follow from ``seed``; the rates are those of this machine.

    Raises:
        ValueError: fewer objects than one batch, or no batches.

    """
    if objects < BATCH_KEYS or batches < 1:
        raise ValueError(
            f"needs at least {BATCH_KEYS} objects and 1 batch, not {objects} and {batches}"
        )
    progress("making keys", 0, objects)
    random = np.random.default_rng(seed)
    present = random.integers(0, 256, (objects, KEY_BYTES), dtype=np.uint8)
    absent = random.integers(0, 256, (batches * BATCH_KEYS, KEY_BYTES), dtype=np.uint8)
    hits = _key_batches(present[random.integers(0, objects, batches * BATCH_KEYS)])
    misses = _key_batches(absent)
    everything = _key_batches(present)
    progress("making keys", objects, objects)

    # The first call of a kernel compiles it or loads it from the cache.
    warm = SlotTable(BATCH_KEYS)
    _fill(warm)(_key_batches(present[:BATCH_KEYS]), 0)
    warm.lookup(hits[0])

    with VirtualClock() as clock:
        master = Master(clock, {}, max_objects=objects)
        table = master.table
        timer = _Timer(progress, len(everything) + _ROUNDS * 4 * batches)
        insert_s = timer(everything, _fill(table))
        # Before the bare table: the first use of its list of ages is a cost of its own.
        _leased(master)(hits[:LEASE_BATCHES], 0)
        plan = [
            (_look_up(table), hits),
            (_look_up(table), misses),
            (_leased(master), hits),
            (_leased(master), misses),
        ]
        rounds = [[timer(keys, work) for work, keys in plan] for _ in range(_ROUNDS)]
    rates = [
        batches * BATCH_KEYS / sorted(column)[_ROUNDS // 2] for column in zip(*rounds, strict=True)
    ]
    probes = table.probe_lengths()
    return MasterBench(
        objects=len(table),
        slots=table.n_slots,
        bytes_per_slot=table.nbytes // table.n_slots,
        table_bytes=table.nbytes,
        load=table.load,
        probe_length_mean=probes.mean,
        probe_length_max=probes.longest,
        batch_keys=BATCH_KEYS,
        batches=batches,
        hit_keys_per_s=rates[0],
        miss_keys_per_s=rates[1],
        leased_hit_keys_per_s=rates[2],
        leased_miss_keys_per_s=rates[3],
        insert_keys_per_s=objects / insert_s,
    )


class _Timer:
    """Times work on batches, some of them at a time, and notes progress in between."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, batches: Batches, work: Callable[[Batches, int], None]) -> float:
        """Return the seconds that ``work(part, number of its first batch)`` took in all."""
        took_s = 0.0
        for at in range(0, len(batches), _STEP_BATCHES):
            part = batches[at : at + _STEP_BATCHES]
            begin = time.perf_counter()
            work(part, at)
            took_s += time.perf_counter() - begin
            self._done += len(part)
            self._progress("measuring Master, batches of keys", self._done, self._total)
        return took_s


def _key_batches(keys: NDArray[np.uint8]) -> Batches:
    """Cut an array of keys of shape (n, 32) into batches of at most 32 ``bytes`` keys."""
    joined = keys.tobytes()
    every = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
    return [every[at : at + BATCH_KEYS] for at in range(0, len(every), BATCH_KEYS)]


def _fill(table: SlotTable) -> Callable[[Batches, int], None]:
    def work(batches: Batches, first: int) -> None:
        for at, batch in enumerate(batches, first):
            table.insert(
                batch,
                node=0,
                device=0,
                address=at * BATCH_KEYS * _OBJECT_BYTES,
                length=_OBJECT_BYTES,
                generation=at,
                state=SlotState.READY,
            )

    return work


def _look_up(table: SlotTable) -> Callable[[Batches, int], None]:
    def work(batches: Batches, _: int) -> None:
        for batch in batches:
            table.lookup(batch)

    return work


def _leased(master: Master) -> Callable[[Batches, int], None]:
    def work(batches: Batches, _: int) -> None:
        for at in range(0, len(batches), LEASE_BATCHES):
            for batch in batches[at : at + LEASE_BATCHES]:
                master.lookup(at, batch)
            master.release(at)

    return work
