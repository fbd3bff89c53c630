"""How fast HyMCache's data path moves real bytes: ``cxlbench bench datapath``.

Everything that models hardware is taken out (infinite bandwidth, no latency, free software) and the
backing store is memory, so what is left is our own code: connector, fabric, device, checksums. Each
figure is the time of one numpy copy of the same size, measured in the same round, over the time of
the operation: 0.8 means that a get takes a quarter longer than the copy that it cannot avoid. The
median over the rounds is reported.

The reference copies from shared memory (as an arena is) into an ordinary array (as a caller's
buffer is), both faulted in, over as many different objects as the operations use, so that neither
finds its bytes in a cache that the other does not.

Units: bytes, s of the host's clock. Left out: files (``calibrate``), many workers at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.profile import (
    CxlHmProfile,
    LinkProfile,
    SoftwareProfile,
    load_as,
)
from cxlbench.emu.memory import Arena, Bytes
from cxlbench.harness.bench_replay import peak_resident_bytes
from cxlbench.harness.held_clock import HeldWallClock
from cxlbench.harness.rig import Rig, RigSpec
from cxlbench.kv.connector import Completion
from cxlbench.kv.footer import Verify
from cxlbench.kv.results import KeyResult

OBJECT_BYTES = 16 << 20
OBJECTS = 8
"""As many as the prefetch window holds of 16 MiB objects: all of them can be staged at once."""

ROUNDS = 11
CAPACITY_ROUNDS = 3
"""Capacity of the device over the data of a round; puts evict what was put before."""

GIB = 1 << 30

WARM, COLD, WARM_FULL, PUT, PUT_FLUSH = (
    "warm get, footer checked",
    "cold get through staging, footer checked",
    "warm get, every byte checked",
    "put",
    "put and flush",
)
BARS = {WARM: 0.8, COLD: 0.4, WARM_FULL: 0.5, PUT: 0.5, PUT_FLUSH: None}

Progress = Callable[[str, int, int], None]


class WrongDataError(AssertionError):
    """A get delivered other bytes than were put."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation: its speed over that of a copy, and the least that it ought to be."""

    name: str
    ratio: float
    bytes_per_s: float
    bar: float | None

    @property
    def passed(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        return None if self.bar is None else self.ratio >= self.bar


@dataclass(frozen=True, slots=True)
class DatapathBench:
    """The figures, and the most memory that the process ever had resident."""

    object_bytes: int
    objects: int
    rounds: int
    copy_bytes_per_s: float
    figures: tuple[Figure, ...]
    data_bytes: int
    peak_resident_bytes: int


def bench_datapath(
    *,
    object_bytes: int = OBJECT_BYTES,
    objects: int = OBJECTS,
    rounds: int = ROUNDS,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> DatapathBench:
    """Measure gets and puts against copies; every get's bytes are compared, outside the timing.

    Raises:
        WrongDataError: a get delivered wrong bytes, or none.
    """
    if rounds < 1 or objects < 1:
        raise ValueError(f"needs at least 1 round and 1 object, not {rounds} and {objects}")
    stage = _Stage(object_bytes, objects, seed)
    plan: list[tuple[str, Verify, bool]] = [
        (WARM, Verify.FOOTER, True),
        (COLD, Verify.FOOTER, False),
        (WARM_FULL, Verify.FULL, True),
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in BARS}
    step = 0
    for name, verify, prefetch in plan:
        with _Bench(stage, verify=verify, prefetch=prefetch) as bench:
            for _ in range(rounds + 1):
                times[name].append((stage.copy(), bench.get(staged=prefetch)))
                step += 1
                progress("measuring the data path, rounds", step, 4 * (rounds + 1))
    with _Bench(stage, verify=Verify.FULL, prefetch=False) as bench:
        for _ in range(CAPACITY_ROUNDS):
            bench.put_again()  # every page of the backing store is faulted in now
        for _ in range(rounds + 1):
            copy_s = stage.copy()
            put_s, flush_s = bench.put_again()
            times[PUT].append((copy_s, put_s))
            times[PUT_FLUSH].append((copy_s, put_s + flush_s))
            step += 1
            progress("measuring the data path, rounds", step, 4 * (rounds + 1))
    # The first round faults pages in; it is not counted.
    counted = {name: rows[1:] for name, rows in times.items()}
    moved = object_bytes * objects
    copies = [copy_s for rows in counted.values() for copy_s, _ in rows]
    return DatapathBench(
        object_bytes=object_bytes,
        objects=objects,
        rounds=rounds,
        copy_bytes_per_s=moved / statistics.median(copies),
        figures=tuple(
            Figure(
                name,
                statistics.median(copy_s / took_s for copy_s, took_s in rows),
                moved / statistics.median(took_s for _, took_s in rows),
                BARS[name],
            )
            for name, rows in counted.items()
        ),
        data_bytes=moved,
        peak_resident_bytes=peak_resident_bytes(),
    )


class _Stage:
    """Payloads, their keys, buffers to read into, and the copy that all is measured against."""

    def __init__(self, object_bytes: int, objects: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.object_bytes = object_bytes
        self.keys = [hashlib.sha256(f"datapath-{i}".encode()).digest() for i in range(objects)]
        self.payloads: list[Bytes] = [
            draw.integers(0, 256, object_bytes, dtype=np.uint8) for _ in range(objects)
        ]
        self.buffers: list[Bytes] = [np.ones(object_bytes, dtype=np.uint8) for _ in range(objects)]
        self._shared = Arena(object_bytes * objects)
        self._sources = [
            self._shared.view(at * object_bytes, object_bytes) for at in range(objects)
        ]
        self._targets: list[Bytes] = [np.ones(object_bytes, dtype=np.uint8) for _ in range(objects)]
        for source, payload in zip(self._sources, self.payloads, strict=True):
            source[:] = payload

    def copy(self) -> float:
        """Copy every object once with numpy; return the time."""
        begin = time.perf_counter()
        for source, target in zip(self._sources, self._targets, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - begin

    def check(self) -> None:
        """Compare the buffers with what was put, and spoil them."""
        for number, (got, put) in enumerate(zip(self.buffers, self.payloads, strict=True)):
            if not np.array_equal(got, put):
                raise WrongDataError(f"object {number} came back with other bytes")
            got[::4096] ^= 0xFF


class _Bench:
    """A running tier without throttles, with all objects put and flushed."""

    def __init__(self, stage: _Stage, *, verify: Verify, prefetch: bool) -> None:
        self.stage = stage
        self.clock = HeldWallClock()
        self._request = 0
        room = stage.object_bytes * len(stage.keys)
        spec = RigSpec(
            device=unthrottled_device(2 * room),
            block_bytes=stage.object_bytes,
            device_capacity_bytes=CAPACITY_ROUNDS * room,
            window_bytes=room,
            prefetch=prefetch,
            node_link=unthrottled_link(),
            worker_link=unthrottled_link(),
            copy_engine=None,
            software=free_software(),
            staging_bytes=2 * room,
            deadline_s=3600.0,
            verify=verify,
        )
        self.rig = Rig(self.clock, spec, phantom=False)
        self.connector = self.rig.connectors[0]
        self.clock.drive(self._put(stage.keys))
        self.clock.drive(self.rig.quiesce())

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clock.drive(self.rig.close())
        self.clock.close()

    def get(self, *, staged: bool) -> float:
        """Look all objects up, load them, compare them; return the time of the load alone."""
        took_s = self.clock.drive(self._get(staged=staged))
        self.stage.check()
        return took_s

    async def _get(self, *, staged: bool) -> float:
        keys = self.stage.keys
        self._request += 1
        request = self._request
        connector = self.connector
        found = await connector.submit_lookup(request, keys, self.stage.object_bytes).done.wait()
        _expect(found, KeyResult.HIT, len(keys))
        if staged:
            await self._all_staged()
        begin = time.perf_counter()
        done = await connector.submit_load(request, keys, self.stage.buffers).done.wait()
        took_s = time.perf_counter() - begin
        _expect(done, KeyResult.HIT, len(keys))
        connector.release(request)
        connector.poll()
        return took_s

    async def _all_staged(self) -> None:
        device = self.rig.nodes[0].devices[0]
        assert isinstance(device, CxlHm)
        while device.staged_bytes < self.stage.object_bytes * len(self.stage.keys) or (
            device.ssds.reads_in_flight
        ):
            await self.clock.sleep_until(self.clock.real())

    def put_again(self) -> tuple[float, float]:
        """Put all objects under new keys; return the time to store, and to flush."""
        self._request += 1
        keys = [
            hashlib.sha256(key + bytes([self._request % 256])).digest() for key in self.stage.keys
        ]
        begin = time.perf_counter()
        self.clock.drive(self._put(keys))
        stored = time.perf_counter()
        self.clock.drive(self.rig.quiesce())
        return stored - begin, time.perf_counter() - stored

    async def _put(self, keys: Sequence[bytes]) -> None:
        done = await self.connector.submit_store(-1, keys, self.stage.payloads).done.wait()
        self.connector.poll()
        _expect(done, KeyResult.STORED, len(keys))


def _expect(completion: Completion, result: KeyResult, count: int) -> None:
    if completion.results != (result,) * count:
        raise WrongDataError(f"{completion.work.value} ended with {completion.results}")


def unthrottled_device(dram_bytes: int) -> CxlHmProfile:
    """Return a CXL-HM that takes no time; half of its DRAM buffers writes."""
    profile = load_as(
        CxlHmProfile,
        "cxl-hm-prototype",
        overrides={"dram_capacity": f"{max(4 * dram_bytes, GIB)} B", "write_buffer_share": "0.5"},
    )
    return unthrottled(profile)


def unthrottled(profile: CxlHmProfile) -> CxlHmProfile:
    """Return the same device, taking no time."""
    ssd = dataclasses.replace(
        profile.ssd,
        read_bandwidth=math.inf,
        write_bandwidth=math.inf,
        read_iops=math.inf,
        write_iops=math.inf,
        read_latency=0.0,
        program_latency=0.0,
        mixed_penalty=0.0,
    )
    return dataclasses.replace(profile, ssd=ssd, port_bandwidth=math.inf, load_latency=0.0)


def unthrottled_link() -> LinkProfile:
    """Return a link that takes no time."""
    link = load_as(LinkProfile, "nic-200g")
    return dataclasses.replace(link, bandwidth=math.inf, latency=0.0, message_overhead=0.0)


def free_software() -> SoftwareProfile:
    """Return software whose steps cost nothing beside what they really take."""
    profile = load_as(SoftwareProfile, "software-default")
    return dataclasses.replace(
        profile,
        lookup_call=0.0,
        lookup_key=0.0,
        reserve=0.0,
        commit=0.0,
        register=0.0,
        prefetch_issue=0.0,
        release=0.0,
        control_round_trip=0.0,
    )
