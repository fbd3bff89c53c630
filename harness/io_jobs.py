"""The jobs of ``io_bench``: what is read, written and staged ahead in which order, and the logs.

Left to ``io_bench``: the device, scale, and what a job may ask. Units: bytes as moved, s.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import PrefetchRequest
from cxlbench.emu.memory import Buffer, page_ceil
from cxlbench.emu.pipe import finished
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Budget
from cxlbench.harness.content import BlockContent
from cxlbench.harness.tables import size
from cxlbench.kv.device import MemoryDevice

RETRY_S = 100e-6
"""How long a refused write waits before it asks again."""

WINDOW_S = 1.0


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
    windows_bytes: tuple[int, ...]
    """Bytes that arrived in each second of the run; the last one is not a full second."""


@dataclass(slots=True)
class _Log:
    """Operations of one direction: when they ended (from the run's begin), and how long each."""

    ends_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def figures(self, nbytes: float, duration_s: float) -> IoFigures:
        """Summarize operations of ``nbytes`` each, at full size."""
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
            tuple(int(n * nbytes) for n in np.bincount(ends)) if count else (),
        )


@dataclass(eq=False, slots=True)
class _Operation:
    read: bool
    index: int
    request: PrefetchRequest | None = None


class IoBench:
    """What all jobs share: the device, the content, the logs."""

    def __init__(
        self,
        clock: Clock,
        device: MemoryDevice,
        nbytes: int,
        phantom: bool,
        seed: int,
        progress: Callable[[str, int, int], None] = lambda *_: None,
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
        self.runtime_s: float | None = None
        self.progress = progress
        self.filled = 0
        self.objects = 0
        self._gate = Budget(clock, 1, name="refused writes")
        self._lost = 0
        device.on_lost = self._note_lost

    def _note_lost(self, _: int) -> None:
        self._lost += 1

    def _check_kept(self) -> None:
        """Raise ``DeviceError`` if the device could not keep what was written."""
        if self._lost:
            raise DeviceError(
                Status.IO_ERROR,
                f"{self.device.name} could not keep {self._lost} of the objects written: writes to "
                "its SSDs failed; is the disk under its backing files full?",
            )

    async def run(
        self, jobs: list[IoJob], iodepth: int, runtime_s: float | None
    ) -> tuple[dict[str, int], float]:
        """Return the counters before the measured part, and how long that took."""
        self.runtime_s = runtime_s
        self.objects = sum(job.count for job in jobs)
        await self.clock.gather(*[job.fill() for job in jobs])
        await self.device.quiesce()
        self._check_kept()
        before = counters_of(self.device)
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
        self._check_kept()
        return before, last_s

    def note_filled(self) -> None:
        """Count an object written before the measured part."""
        self.filled += 1
        self.progress("writing the range, objects", self.filled, self.objects)

    def note_done(self, end_s: float) -> None:
        """Tell how far the measured part is: in operations, or in time if that ends it."""
        if self.runtime_s is None:
            done = len(self.reads.ends_s) + len(self.writes.ends_s)
            self.progress("measuring, operations", done, self.objects)
        else:
            end_s = min(end_s, self.runtime_s)
            self.progress("measuring, ms", int(end_s * 1e3), int(self.runtime_s * 1e3))

    async def store(self, address: int, key: bytes, *, wait: bool) -> None:
        """Write one object; refused ones wait in order, or raise unless ``wait``."""
        device = self.device
        await self._gate.take(1)
        try:
            while not device.admit(address, self.nbytes):
                if not wait:
                    raise DeviceError(
                        Status.BOUNDS,
                        f"{device.name} takes no object of {size(self.nbytes)} even when it is "
                        "empty",
                    )
                await self.clock.sleep(RETRY_S)
        finally:
            self._gate.give(1)
        payload = self.content.make(key)
        try:
            await device.ready_to_receive(address)
            booking = device.port.reserve(self.nbytes)
            await finished(self.clock, booking, latency_s=self.device.latency_s)
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
                await finished(self.clock, *view.bookings, booking, latency_s=self.device.latency_s)
            finally:
                view.close()
            self._check(into, key)
        finally:
            self.content.recycle(into)

    def _check(self, into: Buffer, key: bytes) -> None:
        if self.content.holds(into, key):
            self.verified += 1
        else:
            self._check_kept()
            self.wrong += 1


class IoJob:
    """One job: its range, the order of its operations, and what is staged ahead of them."""

    def __init__(
        self,
        bench: IoBench,
        number: int,
        count: int,
        rw: str,
        rwmixread: int,
        prefetch: int,
        forever: bool,
    ) -> None:
        self._bench = bench
        self._number = number
        self.count = count
        self._base = number * count * bench.stride
        self._versions = [0] * count
        self._locks: dict[int, Budget] = {}
        self._order = _order(count, rw, rwmixread, f"{bench.seed}-{number}", forever)
        self._ahead: deque[_Operation] = deque()
        self._prefetch = prefetch

    async def fill(self) -> None:
        """Write the whole range."""
        for index in range(self.count):
            wait = bool(index or self._number)
            await self._bench.store(self._address(index), self._key(index), wait=wait)
            self._bench.note_filled()

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
            bench.note_done(end - bench.begin_s)

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


def counters_of(device: MemoryDevice) -> dict[str, int]:
    """Return what a device counts, by name; empty if it counts nothing."""
    counters = getattr(device, "counters", None)
    if not dataclasses.is_dataclass(counters) or isinstance(counters, type):
        return {}
    return dict(dataclasses.asdict(counters))
