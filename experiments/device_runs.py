"""What the ablations share: conversations on one tier through the real HyMCache, and its balances.

The workload is that of HyMCache fig. 5: conversations that begin together, re-read their whole
prefix in order each turn, and append the same number of blocks. It runs on the real code
(``harness/replay.py``) in virtual time, on tags, at full size: four workers with one 100 Gb/s port
each, one node of 200 Gb/s, one device, as in HyMCache §5. The GPU keeps one block, so that what is
measured is the tier.

Units: bytes, s, blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CmmHProfile,
    CopyEngineProfile,
    CxlHmProfile,
    LinkProfile,
    Profile,
    SoftwareProfile,
)
from cxlbench.devices.profile_schema import rule_problems, schema_of
from cxlbench.emu.clock import Clock
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.experiment import Check, Context, ExperimentError, Knob
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.io_jobs import counters_of
from cxlbench.harness.metrics import Figures
from cxlbench.harness.replay import ReplaySpec, replay
from cxlbench.harness.requests import Workload
from cxlbench.harness.rig import DeviceProfile, DeviceSite, RigSpec, make_device
from cxlbench.harness.tables import size
from cxlbench.kv.device import MemoryDevice
from cxlbench.kv.footer import object_extent_bytes
from cxlbench.kv.geometry import model_shape

P = TypeVar("P", bound=Profile)

MODEL = "Llama-3.1-8B"
BLOCK_TOKENS = 128
BLOCK_BYTES = model_shape(MODEL).block_bytes(BLOCK_TOKENS)
GIB = 1 << 30
MIB = 1 << 20

CXL_HM = "cxl-hm-prototype"
CMM_H = "cmm-h-256g"
COMMON = (
    "pm1743-class",
    "nic-100g",
    "nic-200g",
    "gpu-copy-gen4x16",
    "a100-80g",
    "software-default",
)
"""What a run on any device reads, beside the device's own profile."""

GPU_BLOCKS = 1


def conversation_knobs(
    *,
    sessions: int,
    turns: int,
    turn_blocks: int,
    quick: tuple[int, int, int],
    spread_s: float = 0.0,
) -> tuple[Knob, ...]:
    """Return the knobs of the workload; ``quick`` are the same three in the quick form."""
    return (
        Knob(
            name="workload.sessions",
            value=sessions,
            quick=quick[0],
            source="conversations at once; HyMCache fig. 5 has 64, fewer take less time to run",
            assumption=True,
        ),
        Knob(
            name="workload.turns",
            value=turns,
            quick=quick[1],
            source="so many that the footprint passes the DRAM about half-way",
        ),
        Knob(
            name="workload.turn_blocks",
            value=turn_blocks,
            quick=quick[2],
            source="blocks that each turn appends; HyMCache fig. 5 has 32",
            assumption=True,
        ),
        Knob(
            name="workload.think_s",
            value=1.0,
            unit="s",
            source="no source; a pause between turns, in which devices can flush",
            assumption=True,
        ),
        Knob(
            name="workload.spread_s",
            value=spread_s,
            unit="s",
            source="conversations begin within so long; HyMCache fig. 5 begins all at once (0)",
            assumption=spread_s > 0,
        ),
    )


def conversations(ctx: Context) -> Workload:
    """Return the workload that the knobs of ``conversation_knobs`` describe."""
    blocks = ctx.count("workload.turn_blocks")
    if min(blocks, ctx.count("workload.sessions"), ctx.count("workload.turns")) < 1:
        raise ExperimentError(
            f"workload: {ctx.count('workload.sessions')} sessions, {ctx.count('workload.turns')} "
            f"turns, {blocks} blocks a turn: each must be 1 or more"
        )
    return generate(
        GeneratorKnobs(
            sessions=ctx.count("workload.sessions"),
            turns=ctx.count("workload.turns"),
            shared_system_tokens=0,
            first_input_tokens=blocks * BLOCK_TOKENS + 1,
            turn_input_tokens=blocks * BLOCK_TOKENS - 1,
            output_tokens=1,
            think_s=ctx.number("workload.think_s"),
            session_spread_s=ctx.number("workload.spread_s"),
            block_tokens=BLOCK_TOKENS,
            seed=ctx.seed,
        ),
        name="conversations",
    )


def footprint_bytes(workload: Workload) -> int:
    """Return the KV bytes of all distinct blocks."""
    return len({b for r in workload.requests for b in r.block_ids}) * BLOCK_BYTES


def variant(profile: P, **changes: Any) -> P:
    """Return a full-size profile with other values; raise ExperimentError if it cannot be."""
    values = {key.name: getattr(profile, key.name) for key in schema_of(type(profile))} | changes
    for key, message in rule_problems(type(profile), values):
        raise ExperimentError(f"{profile.name}: {key} {message}")
    return dataclasses.replace(profile, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """A workload served by one device, with what the device counted."""

    device: DeviceProfile
    figures: Figures
    counters: Mapping[str, int]

    @property
    def dram_bytes(self) -> int:
        """Payload that readers found in the device's DRAM when they asked for it."""
        if isinstance(self.device, CmmHProfile):
            return self._payload(self.counters["hit_bytes"])
        found = self.counters["reads_staged"] + self.counters["reads_buffered"]
        return found * BLOCK_BYTES

    @property
    def ssd_bytes(self) -> int:
        """Payload for which a reader had to wait on the SSDs."""
        if isinstance(self.device, CmmHProfile):
            return self._payload(self.counters["missed_bytes"])
        return self.counters["reads_demand"] * BLOCK_BYTES

    @property
    def last_turn_bytes_per_s(self) -> float:
        """Read bandwidth of the last turn: the one with the largest footprint."""
        return self.figures.turns[-1].read_bytes_per_s

    def _payload(self, nbytes: int) -> int:
        return round(nbytes / object_extent_bytes(BLOCK_BYTES) * BLOCK_BYTES)


def serve(
    ctx: Context,
    workload: Workload,
    device: CxlHmProfile | CmmHProfile,
    *,
    prefetch: bool,
    window_bytes: int = 128 * MIB,
) -> DeviceRun:
    """Run a workload on a fresh device behind the real HyMCache, in virtual time."""
    made: list[MemoryDevice] = []

    def make(clock: Clock, site: DeviceSite) -> MemoryDevice:
        made.append(make_device(clock, device, site))
        return made[0]

    capacity = min(device.capacity, 2 * footprint_bytes(workload) + GIB)
    page = device.ssd.page_size
    spec = ReplaySpec(
        rig=RigSpec(
            device=make,
            block_bytes=BLOCK_BYTES,
            device_capacity_bytes=capacity // page * page,
            workers=4,
            prefetch=prefetch,
            window_bytes=window_bytes,
            worker_link=ctx.profile(LinkProfile, "nic-100g"),
            node_link=ctx.profile(LinkProfile, "nic-200g"),
            copy_engine=ctx.profile(CopyEngineProfile, "gpu-copy-gen4x16"),
            software=ctx.profile(SoftwareProfile, "software-default"),
            seed=ctx.seed,
        ),
        engine=EngineModel(model_shape(MODEL), ctx.profile(AcceleratorProfile, "a100-80g")),
        gpu_blocks=GPU_BLOCKS,
        closed_loop=True,
        max_turns=max((r.turn for r in workload.requests), default=1),
    )
    result = replay(workload, spec, wall=False)
    return DeviceRun(device=device, figures=result.figures, counters=counters_of(made[0]))


def balances(name: str, workload: Workload, run: DeviceRun) -> list[Check]:
    """Return what must come out even: requests, blocks, bytes, and nothing wrong or held."""
    f, counters = run.figures, run.counters
    failed = f.timed_out_blocks + f.failed_loads + f.mismatched_blocks
    read, moved = f.block_read.count, run.dram_bytes + run.ssd_bytes
    checks = [
        Check(
            name=f"{name}: every request is served, every byte right, nothing held",
            ok=f.requests == len(workload.requests) and not f.wrong_blocks and not f.held_at_rest,
            detail=f"{f.requests} of {len(workload.requests)}, {f.wrong_blocks} wrong, "
            f"held {dict(f.held_at_rest)}",
        ),
        Check(
            name=f"{name}: blocks announced are read, or counted as failed",
            ok=f.tier_blocks <= read <= f.announced_blocks <= read + failed
            and f.announced_blocks <= f.looked_up_blocks,
            detail=f"{f.announced_blocks} announced, {read} read, {f.tier_blocks} used, "
            f"{failed} failed",
        ),
        Check(
            name=f"{name}: bytes read are those from DRAM and SSD",
            ok=f.read_bytes == read * BLOCK_BYTES
            and (moved >= f.read_bytes if failed else moved == f.read_bytes),
            detail=f"{size(f.read_bytes)} read, {size(run.dram_bytes)} from DRAM, "
            f"{size(run.ssd_bytes)} from SSD, {failed} reads failed",
        ),
    ]
    if isinstance(run.device, CxlHmProfile):
        checks.append(
            Check(
                name=f"{name}: all admitted blocks are stored, and flushed in the end",
                ok=counters["admitted"] == counters["flushed"] + counters["lost"]
                and f.stored_blocks <= counters["admitted"],
                detail=f"{f.stored_blocks} stored, {counters['admitted']} admitted, "
                f"{counters['flushed']} flushed",
            )
        )
    return checks


def together(checks: Iterable[Check]) -> list[Check]:
    """Return one check for each law (what stands behind the first colon), over all its subjects.

    The detail counts the subjects, and names those for which the law does not hold.
    """
    laws: dict[str, list[Check]] = {}
    for check in checks:
        laws.setdefault(check.name.partition(": ")[2], []).append(check)
    return [
        Check(
            name=law,
            ok=all(check.ok for check in found),
            detail="; ".join(
                f"{check.name.partition(': ')[0]}: {check.detail}"
                for check in found
                if not check.ok
            )
            or f"in {len(found)} of {len(found)} runs",
        )
        for law, found in laws.items()
    ]
