"""One device under plain reads and writes, in fio's words, without a tier above it.

Each job owns a range of objects of ``bs`` bytes. All are written first (not measured), then read
or rewritten in the order that ``rw`` says, ``iodepth`` at a time. Every payload read is checked.
On a device with staging, the next ``prefetch`` objects of a job are staged ahead of its reads by
issue, wait, release (HyMCache §3.4); what the device refuses is asked again when something is free.

An object is rewritten as KV objects are: discarded, admitted, received, committed. A write that the
device refuses waits its turn, and is complete when the device has the bytes, not the SSDs.
Random orders visit each object once a pass, as fio's random map does.

Sizes asked and figures given are of the full-size device; ``scale`` divides what is moved. Units:
bytes, bytes/s, s. Left out: links, verbs and lookups; parts of objects.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.expander import Expander
from cxlbench.devices.profile import (
    CmmHProfile,
    CxlHmProfile,
    ExpanderProfile,
    scale_profile,
    scaled_bytes,
)
from cxlbench.emu.clock import Clock, VirtualClock, WallClock
from cxlbench.emu.fabric import PrefetchRequest
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, Buffer, page_ceil
from cxlbench.emu.pipe import finished
from cxlbench.emu.status import DeviceError, HostLimitError, Status
from cxlbench.emu.sync import Budget
from cxlbench.harness.content import BlockContent
from cxlbench.harness.fidelity import Fidelity, measure
from cxlbench.harness.requests import WorkloadError
from cxlbench.harness.rig import DeviceMaker, DeviceProfile, DeviceSite
from cxlbench.harness.tables import gbps, listing, ms, size, table
from cxlbench.kv.device import MemoryDevice

PATTERNS = ("read", "write", "randread", "randwrite", "rw", "randrw")
RETRY_S = 100e-6
"""How long a refused write waits before it asks again."""

WINDOW_S = 1.0


class IoJobError(WorkloadError):
    """A job that cannot be run as asked; the message says what can."""


@dataclass(frozen=True, slots=True)
class IoFigures:
    """Reads, or writes, of one run; latencies run from issue to the last byte in place."""

    operations: int
    bytes: int
    bytes_per_s: float
    iops: float
    mean_s: float
    p50_s: float
    p99_s: float
    p999_s: float
    windows_bytes_per_s: tuple[float, ...]
    """Bandwidth of each full second of the run, and of what is left as if it were one."""


@dataclass(frozen=True, slots=True)
class IoResult:
    """The outcome of one run. Bytes and bandwidths are at full size."""

    device: str
    rw: str
    bs: int
    iodepth: int
    numjobs: int
    prefetch: int
    scale: float
    wall: bool
    seed: int
    duration_s: float
    read: IoFigures
    write: IoFigures
    verified: int
    wrong: int
    counters: Mapping[str, int]
    """What the device counted while it was measured, in its own words."""
    held_at_rest: Mapping[str, int]
    fidelity: Fidelity | None

    @property
    def correct(self) -> bool:
        """Whether every read gave the right bytes and nothing is held by anybody."""
        return not self.wrong and not self.held_at_rest


def run_io(
    profile: DeviceProfile | DeviceMaker,
    *,
    rw: str,
    bs: int,
    size: int,
    iodepth: int = 1,
    numjobs: int = 1,
    rwmixread: int = 50,
    runtime_s: float | None = None,
    prefetch: int = 0,
    wall: bool = False,
    scale: float = 1,
    folder: Path | None = None,
    seed: int = 0,
    faults: FaultPlan | None = None,
) -> IoResult:
    """Run jobs on a fresh device and return what they measured.

    Args:
        profile: a built-in kind at full size, or a function that makes a device.
        rw: one of ``PATTERNS``; ``rwmixread`` is the percentage of reads in the mixed ones.
        bs: bytes an object; size: bytes of each job's range; both at full size.
        runtime_s: go over the range again and again, and issue nothing after this time. Without it
            the range is gone over once.
        prefetch: objects staged ahead of the reads of each job.
        wall: real bytes in real time, in files of ``folder`` if one is given.

    Raises:
        IoJobError: the job makes no sense, or not on this device.
        ScaleError: an object or a part of the device would be below a page.
        HostLimitError: this host has no such folder or memory.
        DeviceError: the device failed, by injected faults or because an object does not fit it.
    """
    _check(rw, bs, size, iodepth, numjobs, rwmixread, runtime_s, prefetch)
    if folder is not None and not wall:
        raise IoJobError("files take real time: a folder needs wall=True")
    nbytes = scaled_bytes(bs, scale, what="an object (bs)") // PAGE_BYTES * PAGE_BYTES
    with ExitStack() as stack:
        clock: Clock = stack.enter_context(WallClock() if wall else VirtualClock())
        home = None if folder is None else _own_folder(folder, stack)
        plan = faults or FaultPlan.none()
        objects = size // bs * numjobs
        device = _make(clock, profile, scale, objects * nbytes, not wall, home, plan, bs)
        try:
            needed = objects * (nbytes + page_ceil(device.trailer_bytes))
            if needed > device.capacity_bytes:
                raise _too_large(device.name, int(needed * scale), device.capacity_bytes * scale)
            if prefetch and not device.prefetch_depth:
                raise IoJobError(
                    f"prefetch={prefetch}: {device.name} has no staging; use prefetch=0, "
                    "or a CXL-HM"
                )
            bench = _Bench(clock, device, nbytes, not wall, seed, _access_latency_s(profile))
            jobs = [
                _Job(bench, number, size // bs, rw, rwmixread, prefetch, runtime_s is not None)
                for number in range(numjobs)
            ]
            before, duration_s = clock.run(bench.run(jobs, iodepth, runtime_s))
            return IoResult(
                device=device.name,
                rw=rw,
                bs=bs,
                iodepth=iodepth,
                numjobs=numjobs,
                prefetch=prefetch,
                scale=scale,
                wall=wall,
                seed=seed,
                duration_s=duration_s,
                read=bench.reads.figures(nbytes * scale, duration_s),
                write=bench.writes.figures(nbytes * scale, duration_s),
                verified=bench.verified,
                wrong=bench.wrong,
                counters={
                    name: count - before.get(name, 0) for name, count in _counters(device).items()
                },
                held_at_rest={name: held for name, held in device.at_rest().items() if held},
                fidelity=measure(clock, [device.port]) if wall else None,
            )
        finally:
            clock.run(device.close())


def describe_io(result: IoResult) -> str:
    """Return a result as text for a terminal."""
    rows: list[list[str | int]] = [
        [
            name,
            f"{f.operations:,}",
            gbps(f.bytes_per_s),
            f"{f.iops:,.0f}",
            ms(f.mean_s, 3),
            ms(f.p50_s, 3),
            ms(f.p99_s, 3),
            ms(f.p999_s, 3),
        ]
        for name, f in (("read", result.read), ("write", result.write))
        if f.operations
    ]
    headers = ["", "operations", "GB/s", "1/s", "mean ms", "p50 ms", "p99 ms", "p99.9 ms"]
    ahead = f", {result.prefetch} staged ahead" if result.prefetch else ""
    counts = [f"{name} {count:,}" for name, count in result.counters.items() if count]
    held = [f"{name} {count}" for name, count in sorted(result.held_at_rest.items())]
    notes: list[tuple[str, str | int]] = [
        (
            "job",
            f"{result.rw} of {size(result.bs)}, {result.numjobs} x {result.iodepth} in flight"
            f"{ahead}, {result.duration_s:.3f} s",
        ),
        ("reads verified", f"{result.verified:,}, wrong {result.wrong:,}"),
        ("device", ", ".join(counts) or "counts nothing"),
        ("held at rest", ", ".join(held) or "nothing"),
    ]
    parts = [table(headers, rows), "", listing(notes)]
    if result.fidelity is not None:
        parts += ["", result.fidelity.line()]
    return "\n".join(parts)


# -- the run ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Log:
    """Operations of one direction: when they ended (from the run's begin), and how long each."""

    ends_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def figures(self, nbytes: float, duration_s: float) -> IoFigures:
        count, took = len(self.took_s), np.asarray(self.took_s or [0.0])
        p50, p99, p999 = (float(p) for p in np.percentile(took, (50, 99, 99.9)))
        ends = (np.asarray(self.ends_s) / WINDOW_S).astype(int)
        return IoFigures(
            count,
            int(count * nbytes),
            count * nbytes / duration_s if duration_s else 0.0,
            count / duration_s if duration_s else 0.0,
            float(took.mean()),
            p50,
            p99,
            p999,
            tuple(float(n * nbytes / WINDOW_S) for n in np.bincount(ends)) if count else (),
        )


@dataclass(eq=False, slots=True)
class _Operation:
    read: bool
    index: int
    request: PrefetchRequest | None = None


class _Bench:
    """What all jobs share: the device, the content, the logs."""

    def __init__(
        self,
        clock: Clock,
        device: MemoryDevice,
        nbytes: int,
        phantom: bool,
        seed: int,
        latency_s: float,
    ) -> None:
        self.clock = clock
        self.device = device
        self.nbytes = nbytes
        self.seed = seed
        self.content = BlockContent(nbytes, phantom=phantom, seed=seed)
        self.stride = nbytes + page_ceil(device.trailer_bytes)
        self.reads = _Log()
        self.writes = _Log()
        self.verified = 0
        self.wrong = 0
        self.begin_s = 0.0
        self._latency_s = latency_s
        self._gate = Budget(clock, 1, name="refused writes")

    async def run(
        self, jobs: list[_Job], iodepth: int, runtime_s: float | None
    ) -> tuple[dict[str, int], float]:
        """Return the counters before the measured part, and how long that took."""
        await self.clock.gather(*[job.fill() for job in jobs])
        await self.device.quiesce()
        before = _counters(self.device)
        self.begin_s = self.clock.now()
        end_s = None if runtime_s is None else self.begin_s + runtime_s

        def top_up() -> None:
            for job in jobs:
                job.top_up()

        self.device.on_frames_free = top_up
        try:
            await self.clock.gather(
                *[job.work(iodepth, end_s) for job in jobs for _ in range(iodepth)]
            )
        finally:
            self.device.on_frames_free = lambda: None
            for job in jobs:
                job.give_up()
        last_s = max((*self.reads.ends_s, *self.writes.ends_s), default=0.0)
        await self.device.quiesce()
        return before, last_s

    async def store(self, address: int, key: bytes, *, wait: bool) -> None:
        """Write one object; refused ones wait in order, or raise unless ``wait``."""
        device = self.device
        await self._gate.take(1)
        try:
            while not device.admit(address, self.nbytes):
                if not wait:
                    raise DeviceError(
                        Status.BOUNDS,
                        f"{device.name} takes no object of {self.nbytes} B even when it is empty",
                    )
                await self.clock.sleep(RETRY_S)
        finally:
            self._gate.give(1)
        payload = self.content.make(key)
        try:
            await device.ready_to_receive(address)
            booking = device.port.reserve(self.nbytes)
            await finished(self.clock, booking, latency_s=self._latency_s)
            device.receive(address, payload, None)
            device.commit(address)
        except BaseException:
            device.cancel(address)
            raise
        finally:
            self.content.recycle(payload)

    async def load(self, address: int, key: bytes, request: PrefetchRequest | None) -> None:
        """Read one object, staged or not, and check it."""
        device, into = self.device, self.content.empty()
        try:
            if request is not None:
                await device.chm_prefetch_wait(request)
            view = await device.open_read(address, self.nbytes)
            try:
                booking = view.port.reserve(self.nbytes)
                await view.arrived()
                view.copy_into(into, None, None)
                await finished(self.clock, *view.bookings, booking, latency_s=self._latency_s)
            finally:
                view.close()
            self._check(into, key)
        finally:
            self.content.recycle(into)

    def _check(self, into: Buffer, key: bytes) -> None:
        if self.content.holds(into, key):
            self.verified += 1
        else:
            self.wrong += 1


class _Job:
    """One job: its range, the order of its operations, and what is staged ahead of them."""

    def __init__(
        self,
        bench: _Bench,
        number: int,
        count: int,
        rw: str,
        rwmixread: int,
        prefetch: int,
        forever: bool,
    ) -> None:
        self._bench = bench
        self._number = number
        self._count = count
        self._base = number * count * bench.stride
        self._versions = [0] * count
        self._locks: dict[int, Budget] = {}
        self._order = _order(count, rw, rwmixread, f"{bench.seed}-{number}", forever)
        self._ahead: deque[_Operation] = deque()
        self._prefetch = prefetch

    async def fill(self) -> None:
        """Write the whole range."""
        for index in range(self._count):
            wait = bool(index or self._number)
            await self._bench.store(self._address(index), self._key(index), wait=wait)

    async def work(self, iodepth: int, end_s: float | None) -> None:
        """Do one operation after another until none is left."""
        bench, clock = self._bench, self._bench.clock
        while end_s is None or clock.now() < end_s:
            operation = self._take()
            if operation is None:
                return
            begin_s = clock.now()
            # A read takes one share of its object, a write all of them.
            lock = self._locks.setdefault(
                operation.index, Budget(clock, iodepth, name=f"object {operation.index}")
            )
            share = 1 if operation.read else iodepth
            await lock.take(share)
            try:
                await self._do(operation)
            finally:
                lock.give(share)
                if not lock.used:
                    self._locks.pop(operation.index, None)
            log = bench.reads if operation.read else bench.writes
            end = clock.real()
            log.ends_s.append(end - bench.begin_s)
            log.took_s.append(end - begin_s)

    async def _do(self, operation: _Operation) -> None:
        bench, index = self._bench, operation.index
        address = self._address(index)
        if operation.read:
            try:
                await bench.load(address, self._key(index), operation.request)
            finally:
                if operation.request is not None:
                    bench.device.chm_prefetch_release(operation.request)
                    self.top_up()
        else:
            bench.device.discard(address, bench.nbytes)
            self._versions[index] += 1
            await bench.store(address, self._key(index), wait=True)

    def _take(self) -> _Operation | None:
        self.top_up()
        operation = self._ahead.popleft() if self._ahead else next(self._order, None)
        self.top_up()
        return operation

    def top_up(self) -> None:
        """Stage the next reads in their order; stop at the first that the device refuses."""
        while len(self._ahead) < self._prefetch:
            operation = next(self._order, None)
            if operation is None:
                break
            self._ahead.append(operation)
        for operation in self._ahead:
            if operation.request is None:
                operation.request = self._bench.device.chm_prefetch_object(
                    self._address(operation.index), self._bench.nbytes
                )
                if operation.request is None:
                    return

    def give_up(self) -> None:
        """Release what is staged and will not be read."""
        while self._ahead:
            request = self._ahead.popleft().request
            if request is not None:
                self._bench.device.chm_prefetch_release(request)

    def _address(self, index: int) -> int:
        return self._base + index * self._bench.stride

    def _key(self, index: int) -> bytes:
        words = (self._number, index, self._versions[index])
        low, mid, high = (word.to_bytes(8, "little") for word in words)
        # The content depends on the second word: it must differ for every object and version.
        mixed = (self._number << 48) ^ (self._versions[index] << 32) ^ index
        return low + mixed.to_bytes(8, "little") + mid + high


def _order(count: int, rw: str, mix: int, seed: str, forever: bool) -> Iterator[_Operation]:
    draw = random.Random(f"io-{seed}")
    shuffled = rw.startswith("rand")
    share = {"read": 100, "write": 0, "rw": mix}[rw.removeprefix("rand")]
    indices = list(range(count))
    while True:
        if shuffled:
            draw.shuffle(indices)
        for index in indices:
            yield _Operation(share == 100 or draw.random() * 100 < share, index)
        if not forever:
            return


# -- what it runs on ----------------------------------------------------------------------------


def _make(
    clock: Clock,
    profile: DeviceProfile | DeviceMaker,
    scale: float,
    nbytes: int,
    phantom: bool,
    folder: Path | None,
    faults: FaultPlan,
    bs: int,
) -> MemoryDevice:
    if isinstance(profile, (CxlHmProfile, CmmHProfile, ExpanderProfile)):
        scaled: Any = scale_profile(profile, scale)
        if nbytes > scaled.capacity:
            raise _too_large(profile.name, int(nbytes * scale), profile.capacity)
        given: dict[str, Any] = {
            "name": profile.name,
            "phantom": phantom,
            "trailer_bytes": 0,
            "capacity_bytes": nbytes,
            "faults": faults,
        }
        if isinstance(profile, ExpanderProfile):
            return Expander(clock, scaled, **given)
        kind: Callable[..., MemoryDevice] = CxlHm if isinstance(profile, CxlHmProfile) else CmmH
        return kind(clock, scaled, folder=folder, **given)
    return profile(clock, DeviceSite("device", phantom, scale, None, folder, faults))


def _access_latency_s(profile: DeviceProfile | DeviceMaker) -> float:
    """Return what one access takes beside its bytes, which devices leave to who accesses them."""
    if isinstance(profile, CxlHmProfile):
        return profile.load_latency
    if isinstance(profile, CmmHProfile):
        return profile.hit_latency
    return profile.latency if isinstance(profile, ExpanderProfile) else 0.0


def _counters(device: MemoryDevice) -> dict[str, int]:
    counters = getattr(device, "counters", None)
    if not dataclasses.is_dataclass(counters) or isinstance(counters, type):
        return {}
    return dict(dataclasses.asdict(counters))


def _own_folder(folder: Path, stack: ExitStack) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="cxlbench-io-", dir=folder)
    except OSError as error:
        raise HostLimitError(
            f"cannot write backing files in {folder}: {error.strerror}; choose another folder"
        ) from error
    return Path(stack.enter_context(made))


def _too_large(name: str, needed: int, capacity: float) -> IoJobError:
    return IoJobError(
        f"the jobs need {needed} B ({size(needed)}), {name} has {int(capacity)} B "
        f"({size(capacity)}); use a smaller size, fewer jobs, or a larger device"
    )


def _check(
    rw: str,
    bs: int,
    nbytes: int,
    iodepth: int,
    numjobs: int,
    rwmixread: int,
    runtime_s: float | None,
    prefetch: int,
) -> None:
    if rw not in PATTERNS:
        raise IoJobError(f"rw={rw!r}: must be one of {', '.join(PATTERNS)}")
    if bs < PAGE_BYTES or bs % PAGE_BYTES:
        raise IoJobError(f"bs={bs}: objects are whole pages of {PAGE_BYTES} B, at least one")
    if nbytes < bs:
        raise IoJobError(f"size={nbytes}: must hold at least one object of bs={bs} B")
    if iodepth < 1 or numjobs < 1:
        raise IoJobError(f"iodepth={iodepth}, numjobs={numjobs}: both must be at least 1")
    if not 0 <= rwmixread <= 100:
        raise IoJobError(f"rwmixread={rwmixread}: must be a percentage, 0 to 100")
    if runtime_s is not None and runtime_s <= 0:
        raise IoJobError(f"runtime_s={runtime_s}: must be above zero")
    if prefetch < 0 or (prefetch and rw not in ("read", "randread")):
        raise IoJobError(
            f"prefetch={prefetch} with rw={rw!r}: must not be negative, and only pure reads can "
            "be staged ahead (an object rewritten meanwhile would be stale)"
        )
