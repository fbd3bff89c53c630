"""How deep to prefetch, by object size: bandwidth of one CXL-HM under chains read in order.

Set-up. Some requests read their chains side by side, each block after the other, from a CXL-HM
whose SSDs hold all of them (HyMCache §3.4: issue, wait, release). Nothing but the device is in the
way: no link, no lookup, no writes, so that the depth alone decides. ``depth`` is the number of
objects that a request has staged ahead; 0 is a demand miss each time. Object sizes are those of the
paper's models (16, 32, 168 MB; binary), one smaller, and 64 MB of its fig. 5. One request at a time
has nobody else to hide its latency; four are the prefill servers of §5.

The paper's window is 128 MB a request: 8 objects of 16 MB, 4 of 32 MB, two of anything larger
(§4.2). Its claim is that this suffices; here, that the bandwidth in that window is that of the
deepest prefetch. Real device code in virtual time, by ``harness/io_bench.py``, at full size.

Left out: the network (a window must also cover its round trip), and mixed traffic.
"""

from __future__ import annotations

from collections.abc import Callable

from cxlbench.devices.profile import CxlHmProfile
from cxlbench.experiments.device_runs import CXL_HM, MIB, together
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
)
from cxlbench.harness.io_bench import IoResult, run_io
from cxlbench.hymcache.prefetch_window import prefetch_window

SIZES_MIB = (4, 16, 32, 64, 168)
DEPTHS = (0, 1, 2, 4, 8, 16, 32)
QUICK_SIZES_MIB = (16, 32, 168)
CLAIMED_MIB = (16, 32, 168)

WINDOW_SUFFICES = tuple(
    PaperClaim(
        name=f"128 MB suffice for {mib} MiB objects",
        statement=f"With the paper's window of 128 MB a request, objects of {mib} MiB are read as "
        "fast as with any deeper prefetch",
        source="HyMCache §4.2",
        expected=1.0,
        unit="x",
    )
    for mib in CLAIMED_MIB
)


Point = tuple[int, int, int]
"""Requests at once, object size in MiB, depth."""


def run(ctx: Context) -> Findings:
    """Measure every size at every depth, for one request and for some at once."""
    profile = ctx.profile(CxlHmProfile, CXL_HM)
    sizes = QUICK_SIZES_MIB if ctx.quick else SIZES_MIB
    crowd, objects = ctx.count("workload.requests"), ctx.count("workload.objects")
    points: list[Point] = [
        (requests, mib, depth)
        for requests in sorted({1, crowd})
        for mib in sizes
        for depth in DEPTHS
    ]
    found: dict[Point, IoResult] = {}
    for requests, mib, depth in points:
        if ctx.stopping():
            break
        ctx.progress("reading by size and depth", len(found), len(points))
        found[requests, mib, depth] = run_io(
            profile,
            rw="read",
            bs=mib * MIB,
            size=objects * mib * MIB,
            numjobs=requests,
            prefetch=depth,
            seed=ctx.seed,
        )
    partial = len(found) < len(points)
    window = ctx.count("tier.window_mib") * MIB
    return Findings(
        rows=[_row(point, one) for point, one in found.items()],
        claims=[
            claim.judge(
                None if partial else in_window(found, (crowd, mib), objects, window),
                at=f"{crowd} requests at once",
                reason="" if partial else _gains(found, crowd, mib),
            )
            for claim, mib in zip(WINDOW_SUFFICES, CLAIMED_MIB, strict=True)
        ],
        plots=[
            *(_bandwidth(requests, sizes, found) for requests in sorted({1, crowd})),
            _waiting(sizes, found),
        ],
        checks=together(
            check for point, one in found.items() for check in _balance(profile, point, one)
        ),
        partial=partial,
    )


def in_window(
    found: dict[Point, IoResult], of: tuple[int, int], objects: int, window_bytes: int
) -> float:
    """Return the bandwidth in the paper's window over the best of any depth."""
    rates = {depth: one.read.bytes_per_s for (*who, depth), one in found.items() if (*who,) == of}
    window = prefetch_window(objects, of[1] * MIB, window_bytes)
    return rates[max(depth for depth in rates if depth <= window)] / max(rates.values())


def _gains(found: dict[Point, IoResult], crowd: int, mib: int) -> str:
    """Return what the deepest prefetch gains over none."""
    said = []
    for requests in sorted({1, crowd}):
        none, deep = (found[requests, mib, depth].read.bytes_per_s for depth in (0, DEPTHS[-1]))
        said.append(f"{deep / none - 1:+.0%} with {requests} at once")
    return f"the deepest prefetch against none: {', '.join(said)}"


def _row(point: Point, one: IoResult) -> Row:
    requests, mib, depth = point
    return {
        "requests": requests,
        "object_bytes": mib * MIB,
        "depth": depth,
        "staged_ahead_bytes": depth * mib * MIB,
        "read_bytes_per_s": one.read.bytes_per_s,
        "object_read_mean_s": one.read.mean_s,
        "object_read_p50_s": one.read.p50_s,
        "object_read_p99_s": one.read.p99_s,
        "prefetches_refused": one.counters["prefetch_refused"],
        "reads_staged": one.counters["reads_staged"],
        "reads_demand": one.counters["reads_demand"],
        "duration_s": one.duration_s,
    }


def _balance(profile: CxlHmProfile, point: Point, one: IoResult) -> list[Check]:
    requests, mib, depth = point
    name = f"{requests} x {mib} MiB, depth {depth}"
    reads, counters = one.read.operations, one.counters
    served = sum(counters[key] for key in ("reads_staged", "reads_buffered", "reads_demand"))
    most = min(profile.port_bandwidth, profile.ssd.read_bandwidth * profile.ssd_count)
    return [
        Check(
            name=f"{name}: every object is read once, right, and nothing is held",
            ok=one.correct and one.verified == reads,
            detail=f"{reads} reads, {one.verified} verified, held {dict(one.held_at_rest)}",
        ),
        Check(
            name=f"{name}: bytes read are reads times the object, each served once",
            ok=one.read.bytes == reads * mib * MIB and served == reads,
            detail=f"{one.read.bytes} B, {served} served of {reads}",
        ),
        Check(
            name=f"{name}: no faster than the port and the SSDs together",
            ok=one.read.bytes_per_s <= most * (1 + 1e-9),
            detail=f"{one.read.bytes_per_s / 1e9:.2f} of {most / 1e9:.2f} GB/s",
        ),
    ]


# -- plots --------------------------------------------------------------------------------------


def _bandwidth(requests: int, sizes: tuple[int, ...], found: dict[Point, IoResult]) -> Plot:
    return Plot(
        name=f"bandwidth_{requests}",
        title=f"Read bandwidth by prefetch depth and object size, {requests} at once",
        x_label="objects staged ahead, a request",
        y_label="GB/s",
        kind="line",
        series={
            f"{mib} MiB": _line(found, requests, mib, lambda one: one.read.bytes_per_s / 1e9)
            for mib in sizes
        },
    )


def _waiting(sizes: tuple[int, ...], found: dict[Point, IoResult]) -> Plot:
    return Plot(
        name="waiting",
        title="Time to read an object, one request at a time",
        x_label="objects staged ahead",
        y_label="mean, ms",
        kind="line",
        series={
            f"{mib} MiB": _line(found, 1, mib, lambda one: one.read.mean_s * 1e3) for mib in sizes
        },
    )


def _line(
    found: dict[Point, IoResult], requests: int, mib: int, of: Callable[[IoResult], float]
) -> tuple[list[float], list[float]]:
    mine = {point[2]: one for point, one in found.items() if point[:2] == (requests, mib)}
    return [float(depth) for depth in mine], [of(one) for one in mine.values()]


EXPERIMENT = Experiment(
    name="prefetch_depth",
    title="Prefetch depth by object size",
    source="ablation; HyMCache §3.4, §4.2",
    about=(
        "Requests read chains from a CXL-HM in order, side by side, with 0 to 32 objects staged "
        "ahead; objects of 4 to 168 MiB. No network and no writes: the device alone."
    ),
    knobs=(
        Knob(
            name="workload.requests",
            value=4,
            source="one for each prefill server of HyMCache §5; more hide latency by themselves",
            assumption=True,
        ),
        Knob(
            name="workload.objects",
            value=96,
            quick=36,
            source="of each request: three times the deepest prefetch, so that the ramp is small",
        ),
        Knob(
            name="tier.window_mib",
            value=128,
            unit="MiB",
            source="HyMCache §4.2: about 128 MB of prefetched KV a request",
        ),
    ),
    profiles=(CXL_HM, "pm1743-class"),
    claims=WINDOW_SUFFICES,
    run=run,
)
