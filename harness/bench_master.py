"""How fast Master's slot table answers: ``cxlbench bench master``.

HyMCache §4.1 puts Master on the path of every lookup; a table of 6.5e5 objects (10 TiB of 16 MiB
blocks) must answer batches of 32 keys at well over a million keys a second. Measured in process,
from a list of ``bytes`` keys to arrays of locations, with a table that is as full as it may be.
Keys are uniform, as SHA-256 is, and looked up in random order, so most slots come from memory.

Left out: leases, the control messages, and what the caller does with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxlbench.hymcache.slot_table import SlotState, SlotTable
from cxlbench.kv.identity import KEY_BYTES

BATCH_KEYS = 32
"""HyMCache §4.2: Lookup asks Master in batches of at most 32."""

_OBJECT_BYTES = 16 << 20
_ROUNDS = 3


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
    """Lookups of keys that are in the table."""

    miss_keys_per_s: float
    """Lookups of keys that are not."""

    insert_keys_per_s: float
    """Filling the empty table in batches of the same size."""


def bench_master(objects: int = 650_000, batches: int = 4_000, seed: int = 0) -> MasterBench:
    """Fill a table with ``objects`` random keys and look up ``batches`` batches of 32, three times.

    Keys and their order follow from ``seed``; the rates are those of this machine.

    Raises:
        ValueError: fewer objects than one batch, or no batches.

    """
    if objects < BATCH_KEYS or batches < 1:
        raise ValueError(
            f"needs at least {BATCH_KEYS} objects and 1 batch, not {objects} and {batches}"
        )
    random = np.random.default_rng(seed)
    present = random.integers(0, 256, (objects, KEY_BYTES), dtype=np.uint8)
    absent = random.integers(0, 256, (batches * BATCH_KEYS, KEY_BYTES), dtype=np.uint8)
    hits = _key_batches(present[random.integers(0, objects, batches * BATCH_KEYS)])
    misses = _key_batches(absent)

    # The first call of a kernel compiles it or loads it from the cache.
    _fill(SlotTable(BATCH_KEYS), _key_batches(present[:BATCH_KEYS])).lookup(hits[0])

    table = SlotTable(objects)
    everything = _key_batches(present)
    insert_s = _seconds(lambda: _fill(table, everything))
    rounds = [
        (_seconds(lambda: _look_up(table, hits)), _seconds(lambda: _look_up(table, misses)))
        for _ in range(_ROUNDS)
    ]
    hit_s, miss_s = (sorted(column)[_ROUNDS // 2] for column in zip(*rounds, strict=True))
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
        hit_keys_per_s=batches * BATCH_KEYS / hit_s,
        miss_keys_per_s=batches * BATCH_KEYS / miss_s,
        insert_keys_per_s=objects / insert_s,
    )


def _key_batches(keys: NDArray[np.uint8]) -> list[list[bytes]]:
    """Cut an array of keys of shape (n, 32) into batches of at most 32 ``bytes`` keys."""
    joined = keys.tobytes()
    every = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
    return [every[at : at + BATCH_KEYS] for at in range(0, len(every), BATCH_KEYS)]


def _fill(table: SlotTable, batches: list[list[bytes]]) -> SlotTable:
    for at, batch in enumerate(batches):
        table.insert(
            batch,
            node=0,
            device=0,
            address=at * BATCH_KEYS * _OBJECT_BYTES,
            length=_OBJECT_BYTES,
            generation=at,
            state=SlotState.READY,
        )
    return table


def _look_up(table: SlotTable, batches: list[list[bytes]]) -> None:
    for batch in batches:
        table.lookup(batch)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
