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

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cxlbench.devices.profile import (
    scale_profile,
    scaled_bytes,
)
from cxlbench.emu.clock import Clock, VirtualClock, WallClock
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import PAGE_BYTES, page_ceil
from cxlbench.harness.fidelity import Fidelity, measure
from cxlbench.harness.io_jobs import IoBench, IoFigures, IoJob, counters_of
from cxlbench.harness.requests import WorkloadError
from cxlbench.harness.rig import DeviceMaker, DeviceProfile, DeviceSite, make_device
from cxlbench.harness.run_folders import run_folder
from cxlbench.harness.tables import gbps, listing, ms, size, table
from cxlbench.kv.device import MemoryDevice

PATTERNS = ("read", "write", "randread", "randwrite", "rw", "randrw")


class IoJobError(WorkloadError):
    """A job that cannot be run as asked; the message says what can."""


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
    """What the device counted while it was measured, in its own words; bytes as they were moved."""
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
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> IoResult:
    """Run jobs on a fresh device and return what they measured.

    Args:
        profile: a built-in kind at full size, or a function that makes a device.
        rw: one of ``PATTERNS``.
        bs: bytes an object, at full size: whole pages.
        size: bytes of each job's range, at full size.
        iodepth: operations in flight, a job.
        numjobs: jobs side by side, each with a range of its own.
        rwmixread: the percentage of reads in the mixed patterns.
        runtime_s: go over the range again and again, and issue nothing after this time. Without it
            the range is gone over once.
        prefetch: objects staged ahead of the reads of each job.
        wall: real bytes in real time, else tags in virtual time.
        scale: divides bytes and bandwidths of what is run, not of what is reported.
        folder: where backing files go (default: main memory); with ``wall`` only.
        seed: of orders and contents.
        faults: what goes wrong; an operation that fails ends the run with its error.
        progress: told what is done, how much of it, and of how much.

    Raises:
        IoJobError: the job makes no sense, or not on this device.
        ScaleError: an object or a part of the device would be below a page.
        HostLimitError: this host has no such folder or memory.
        DeviceError: the device failed, by injected faults, since an object does not fit it, or
            since it lost objects (a full disk).
    """
    _check(rw, bs, size, iodepth, numjobs, rwmixread, runtime_s, prefetch)
    if folder is not None and not wall:
        raise IoJobError("files take real time: a folder needs wall=True")
    nbytes = scaled_bytes(bs, scale, what="an object (bs)") // PAGE_BYTES * PAGE_BYTES
    with ExitStack() as stack:
        clock: Clock = stack.enter_context(WallClock() if wall else VirtualClock())
        home = None if folder is None else stack.enter_context(run_folder(folder))
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
            bench = IoBench(clock, device, nbytes, not wall, seed, progress)
            jobs = [
                IoJob(bench, number, size // bs, rw, rwmixread, prefetch, runtime_s is not None)
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
                    name: count - before.get(name, 0) for name, count in counters_of(device).items()
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
    counts = [
        f"{name} {size(count * result.scale) if name.endswith('_bytes') else f'{count:,}'}"
        for name, count in result.counters.items()
        if count
    ]
    held = [f"{name} {count}" for name, count in sorted(result.held_at_rest.items())]
    notes: list[tuple[str, str | int]] = [
        (
            "job",
            f"{result.rw} of {size(result.bs)}, {result.numjobs} x {result.iodepth} in flight"
            f"{ahead}, {result.duration_s:.3f} s",
        ),
        ("reads verified", f"{result.verified:,}, wrong {result.wrong:,}"),
        ("device counters", ", ".join(counts) or "none"),
        ("held at rest", ", ".join(held) or "nothing"),
    ]
    parts = [table(headers, rows), "", listing(notes)]
    if result.fidelity is not None:
        parts += ["", result.fidelity.line()]
    return "\n".join(parts)


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
    if not isinstance(profile, DeviceProfile):
        return profile(clock, DeviceSite("device", phantom, scale, None, folder, faults))
    if nbytes > scale_profile(profile, scale).capacity:
        raise _too_large(profile.name, int(nbytes * scale), profile.capacity)
    site = DeviceSite(profile.name, phantom, scale, nbytes, folder, faults, trailer_bytes=0)
    return make_device(clock, profile, site)


def _too_large(name: str, needed: int, capacity: float) -> IoJobError:
    return IoJobError(
        f"the jobs need {size(needed)} at full size, {name} has {size(capacity)}; use a smaller "
        "size, fewer jobs, or a larger device"
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
        raise IoJobError(
            f"size={size(nbytes)}: must hold at least one object of bs={size(bs)}; use a size of "
            f"{size(bs)} or more, or a smaller bs"
        )
    if iodepth < 1 or numjobs < 1:
        raise IoJobError(f"iodepth={iodepth}, numjobs={numjobs}: both must be at least 1")
    if not 0 <= rwmixread <= 100:
        raise IoJobError(f"rwmixread={rwmixread}: must be a percentage, 0 to 100")
    if runtime_s is not None and not 0 < runtime_s < math.inf:
        raise IoJobError(f"runtime_s={runtime_s}: must be above zero and finite")
    if prefetch < 0:
        raise IoJobError(f"prefetch={prefetch}: must not be negative")
    if prefetch and rw not in ("read", "randread"):
        raise IoJobError(
            f"prefetch={prefetch} with rw={rw!r}: only pure reads can be staged ahead (an object "
            "rewritten meanwhile would be stale); use rw=read or randread, or prefetch=0"
        )
