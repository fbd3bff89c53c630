"""HyMCache fig. 5: a transparent LRU cache in the device collapses when the prefixes outgrow it.

Set-up (§3.3): a CMM-H with 256 GB of DRAM over NVMe behind 200 Gb/s; 64 requests at once, each
appends 32 blocks a turn and first reads all that it appended before. Blocks of 16, 32, 64 and
168 MB, so 32 to 336 GB are written a turn. The cache is strict LRU; refills, dirty evictions and
the law for mixed traffic are the device's (``devices/cmm_h*.py``): no bandwidth of the collapse is
typed in, it comes out of SSD numbers.

The paper sees the collapse between turns 2 and 3 at 168 MB and between 3 and 4 at 64 MB. Strict LRU
over 256 GiB has no hit left one turn earlier: a turn reads what the turns before wrote, in the same
order, and with LRU a cyclic scan larger than the cache hits nothing. How many turns fit is
arithmetic, and stands in the claims' reasons. A turn collapses when it reads at under half of the
line rate. The paper's figure does not say whether its bandwidth is that of reads or of reads and
writes together; claims are judged by reads, and both are reported.

How fast the collapsed device still is hangs on the misses that it keeps in flight
(``outstanding_misses``, an assumption): the ablation has four times as many.

Left out: compute; what the paper's workers do between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cxlbench.devices.profile import CmmHProfile, LinkProfile, Profile
from cxlbench.experiments.testbed import GIB, MIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
    Scalar,
    about_of,
)
from cxlbench.harness.serve.block_traffic import Traffic, TrafficResult, run_traffic
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.connector import BlockTimes

P = TypeVar("P", bound=Profile)
Cell = Scalar | None

SIZES_MIB = (16, 32, 64, 168)
CMM_H = "cmm-h-256g"
MORE_MISSES = 4
"""How many times the misses in flight the ablation has."""
KNOBS = (
    Knob(name="requests", value=64, source="HyMCache §3.3"),
    Knob(name="blocks_a_turn", value=32, source="HyMCache §3.3"),
    Knob(name="turns", value=5, source="enough to see the collapse at 64 MB in either reading"),
    Knob(
        name="shrink",
        value=1,
        quick=16,
        source="divides the blocks of a turn and the DRAM together: the same turns, fewer blocks",
    ),
    Knob(
        name="staging_gib",
        value=64,
        unit="GiB",
        assumption=True,
        source="large, so that the workers' staging buffer does not throttle the device",
    ),
)
CLAIMS = (
    PaperClaim(
        name="line-rate-while-it-fits",
        statement="While the prefixes fit, reads run near the line rate of 25 GB/s (16 MB, turn 2)",
        source="HyMCache fig. 5",
        expected=25.0,
        neutral=5.0,
        unit="GB/s",
    ),
    PaperClaim(
        name="collapse-bandwidth",
        statement="After the collapse 5 GB/s are read under mixed traffic (168 MB, last turn)",
        source="HyMCache fig. 5",
        expected=5.0,
        unit="GB/s",
    ),
    PaperClaim(
        name="collapse-turn-168",
        statement="At 168 MB the collapse comes between turns 2 and 3",
        source="HyMCache fig. 5",
        expected=3.0,
        band=0.0,
        unit="turn",
    ),
    PaperClaim(
        name="collapse-turn-64",
        statement="At 64 MB the collapse comes between turns 3 and 4",
        source="HyMCache fig. 5",
        expected=4.0,
        band=0.0,
        unit="turn",
    ),
    PaperClaim(
        name="order-by-size",
        statement="The larger the blocks, the earlier the collapse",
        source="HyMCache fig. 5",
        sense=Sense.TRUE,
    ),
    PaperClaim(
        name="written-a-turn",
        statement="168 MB blocks write 336 GB a turn",
        source="HyMCache fig. 5",
        expected=336.0,
        band=0.01,
        unit="GiB",
    ),
)
COLLAPSED = 0.5
"""A turn has collapsed when it reads at under this share of the line rate."""


def run(context: Context) -> Findings:
    """Run all block sizes."""
    rows: list[Row] = []
    checks: list[Check] = []
    wide: list[Row] = []
    runs: dict[int, TrafficResult] = {}
    for number, size in enumerate(SIZES_MIB):
        if context.stopping():
            break
        context.progress(f"{size} MiB blocks", number, len(SIZES_MIB))
        runs[size] = _one(context, size)
        found, laws = _rows_of(context, size, runs[size])
        rows += found
        checks += laws
    done = len(runs) == len(SIZES_MIB) and not context.stopping()
    if done:
        what = _more_misses(context)
        wide, laws = _rows_of(what, SIZES_MIB[-1], _one(what, SIZES_MIB[-1]))
        checks += laws
    return Findings(
        rows=rows,
        claims=_claims(context, rows, wide) if done else (),
        plots=(
            _plot(rows, "read_GB_per_s", "Reads of the prefix", "read"),
            _plot(rows, "both_GB_per_s", "Reads and writes together", "both"),
        ),
        checks=checks,
        notes=(
            "Strict LRU loses every hit of a cyclic scan in the first turn whose prefix does not "
            "fit: the turn numbers follow from DRAM, requests and block size alone.",
        ),
        partial=not done,
    )


def _more_misses(context: Context) -> Context:
    """Return a small form in which the device keeps more misses in flight, for two turns."""
    device = context.profile(CmmHProfile, CMM_H)
    overrides = {
        **context.overrides,
        f"{CMM_H}.outstanding_misses": str(device.outstanding_misses * MORE_MISSES),
        "shrink": "32",
        "turns": "2",
    }
    return replace(context, quick=True, overrides=overrides)


def _one(context: Context, size_mib: int) -> TrafficResult:
    shrink = context.count("shrink")
    traffic = Traffic(
        requests=context.count("requests"),
        blocks_a_turn=max(1, context.count("blocks_a_turn") // shrink),
        turns=context.count("turns"),
        concurrency=context.count("requests"),
    )
    block_bytes = size_mib * MIB

    def profile(kind: type[P], name: str) -> P:
        found = context.profile(kind, name)
        if isinstance(found, CmmHProfile):
            return replace(found, dram_capacity=found.dram_capacity // shrink)
        return found

    def site(note: Callable[[BlockTimes], None]) -> TierSite:
        return TierSite(
            prefill_servers=1,
            block_bytes=block_bytes,
            block_tokens=traffic.block_tokens,
            profile=profile,
            options={
                "device_kind": "cmm-h",
                "device": CMM_H,
                "worker_link": "nic-200g",
                "staging_bytes": context.count("staging_gib") * GIB,
                "deadline_s": 1e4,
            },
            seed=context.seed,
            on_block=note,
        )

    return run_traffic(traffic, HyMCacheTier, site)


def _rows_of(
    context: Context, size_mib: int, result: TrafficResult
) -> tuple[list[Row], list[Check]]:
    block_bytes = size_mib * MIB
    shrink = context.count("shrink")
    rows: list[Row] = [
        {
            "block_MiB": size_mib,
            "turn": turn.turn,
            "prefix_GiB": turn.asked_blocks * block_bytes * shrink / GIB,
            "written_GiB": turn.stored_blocks * block_bytes * shrink / GIB,
            "read_GB_per_s": turn.read_bytes_per_s(block_bytes) / 1e9,
            "write_GB_per_s": turn.write_bytes_per_s(block_bytes) / 1e9,
            "both_GB_per_s": (turn.read_blocks + turn.stored_blocks)
            * block_bytes
            / (turn.end_s - turn.begin_s)
            / 1e9,
            "turn_s": turn.end_s - turn.begin_s,
        }
        for turn in result.turns
    ]
    lost = sum(turn.asked_blocks - turn.read_blocks for turn in result.turns)
    refused = sum(turn.refused_blocks for turn in result.turns)
    checks = [
        Check(
            name=f"{size_mib} MiB: every block asked for is read, every new one stored",
            ok=not lost and not refused,
            detail=f"{lost} not read, {refused} refused",
        ),
        Check(
            name=f"{size_mib} MiB: no wrong block, nothing held",
            ok=not result.wrong_blocks and not result.held,
            detail=f"{result.wrong_blocks} wrong, held {result.held or 'nothing'}",
        ),
    ]
    return rows, checks


def collapse_turn(rows: Sequence[Row], size_mib: int, line_gbps: float) -> int | None:
    """Return the first turn that reads at under ``COLLAPSED`` of the line rate."""
    for row in rows:
        if row["block_MiB"] != size_mib or row["turn"] == 1:
            continue
        if float(row["read_GB_per_s"] or 0) < COLLAPSED * line_gbps:
            return int(row["turn"] or 0)
    return None


def _claims(context: Context, rows: Sequence[Row], wide: Sequence[Row]) -> list[JudgedClaim]:
    line = context.profile(LinkProfile, "nic-200g").bandwidth / 1e9
    found = {(row["block_MiB"], row["turn"]): row for row in rows}
    turns = {size: collapse_turn(rows, size, line) for size in SIZES_MIB}
    order = [turns[size] or context.count("turns") + 1 for size in SIZES_MIB]
    last = context.count("turns")
    at_turn = ", ".join(f"{size} MiB {turns[size] or f'after {last}'}" for size in SIZES_MIB)
    measured = {
        "line-rate-while-it-fits": (
            float(found[16, 2]["read_GB_per_s"] or 0),
            f"the turn writes as much as it reads, and the device's port of {_port(context):.0f} "
            f"GB/s carries both: {float(found[16, 2]['both_GB_per_s'] or 0):.1f} GB/s together",
        ),
        "collapse-bandwidth": (
            float(found[168, last]["read_GB_per_s"] or 0),
            f"{_misses(context)}; with {MORE_MISSES} times as many "
            f"{float(wide[-1]['read_GB_per_s'] or 0):.1f} GB/s (turn 2, quick form)",
        ),
        "collapse-turn-168": (turns[168], _fits(context, found, 168)),
        "collapse-turn-64": (turns[64], _fits(context, found, 64)),
        "order-by-size": (float(sorted(order, reverse=True) == order), f"turns: {at_turn}"),
        "written-a-turn": (float(found[168, 1]["written_GiB"] or 0), ""),
    }
    at = f"{context.count('requests')} requests at once"
    return [
        claim.judge(measured[claim.name][0], reason=measured[claim.name][1], at=at)
        for claim in CLAIMS
    ]


def _port(context: Context) -> float:
    return context.profile(CmmHProfile, CMM_H).port_bandwidth / 1e9


def _misses(context: Context) -> str:
    """Say what the misses in flight can bring, by Little's law."""
    device = context.profile(CmmHProfile, CMM_H)
    nbytes = device.outstanding_misses * device.refill_unit
    return (
        f"{device.outstanding_misses} misses in flight of {device.refill_unit} B, "
        f"{device.ssd.read_latency * 1e6:.1f} us each, are at most "
        f"{nbytes / device.ssd.read_latency / 1e9:.1f} GB/s before any writes"
    )


def _fits(context: Context, found: Mapping[tuple[Cell, Cell], Row], size: int) -> str:
    """Say which turn is the last whose prefix and new blocks fit the DRAM, and what the next do."""
    dram_gib = context.profile(CmmHProfile, CMM_H).dram_capacity / GIB
    parts = []
    for turn in range(2, context.count("turns") + 1):
        row = found[size, turn]
        prefix, new = float(row["prefix_GiB"] or 0), float(row["written_GiB"] or 0)
        parts.append(
            f"turn {turn}: {prefix:.0f} + {new:.0f} GiB "
            f"{'fit' if prefix + new <= dram_gib else 'do not fit'}, "
            f"{float(row['read_GB_per_s'] or 0):.1f} GB/s"
        )
        if prefix > dram_gib:
            break
    return f"prefix and new blocks in {dram_gib:.0f} GiB of strict LRU: " + "; ".join(parts)


def _plot(rows: Sequence[Row], column: str, what: str, name: str) -> Plot:
    series = {}
    for size in SIZES_MIB:
        mine = [row for row in rows if row["block_MiB"] == size and row["turn"] != 1]
        series[f"{size} MiB blocks"] = (
            [float(row["turn"] or 0) for row in mine],
            [float(row[column] or 0) for row in mine],
        )
    return Plot(
        name=f"{name}-bandwidth",
        title=f"{what} under mixed traffic, CMM-H with strict LRU",
        x_label="turn",
        y_label="bandwidth, GB/s",
        kind="line",
        series=series,
    )


EXPERIMENT = Experiment(
    name="fig05",
    title="LRU in the device collapses with the turns",
    source="HyMCache fig. 5",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=(CMM_H, "pm1743-class", "nic-200g", "gpu-copy-gen4x16", "software-default"),
    claims=CLAIMS,
    run=run,
)
