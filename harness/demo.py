"""The demo: one multi-turn workload on four tiers with the same DRAM, twice each.

CMM-H (a transparent LRU cache), CXL-HM without prefetch, CXL-HM with HyMCache's prefetch, and the
same DRAM with nothing behind it. Each tier runs on real bytes in real time, and again on tags in
virtual time; the report shows both and how far they are apart.

The shape follows HyMCache §3.1-3.3 (a turn re-reads its whole prefix and appends a little), at a
size that fits a laptop: see ``DemoPlan`` for the numbers. Units: full-size bytes, s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CmmHProfile,
    CxlHmProfile,
    ExpanderProfile,
    load_as,
)
from cxlbench.harness.demo_report import plot_demo, report_text
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.model_check import ModelCheck, compare
from cxlbench.harness.replay import (
    ReplayResult,
    ReplaySpec,
    TraceHasNoIdsError,
    part_within,
    replay,
)
from cxlbench.harness.replay_processes import deployment_of, replay_on_processes
from cxlbench.harness.requests import Mode, Workload
from cxlbench.harness.results import Claim, check_writable, to_json
from cxlbench.harness.rig import DeviceProfile, RigSpec
from cxlbench.harness.trace_statistics import trace_statistics
from cxlbench.harness.traces import read_trace, require_format_with_ids
from cxlbench.kv.geometry import model_shape

MODEL = "Llama-3.1-8B"
WORKERS = 4
MAX_SPEED = 16.0
"""A trace is played at most this much faster than it was recorded."""

SET_UP_S = 1.0
"""What a real run takes beside its requests: files, settling, flushing."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user asked for. ``folder`` holds the backing files (default: under ``out``)."""

    trace: Path | None = None
    budget_s: float = 60.0
    folder: Path | None = None
    scale: float | None = None
    out: Path = Path("results/demo")
    seed: int = 1
    quick: bool = False
    processes: bool = False
    """Whether Master, node and workers of the real runs are processes of their own."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The run in numbers: full-size bytes of DRAM and of the device, and the workload."""

    workload: Workload
    closed_loop: bool
    think_cap_s: float
    speed: float
    dram_bytes: int
    capacity_bytes: int
    footprint_bytes: int
    gpu_blocks: int
    scale: float
    block_bytes: int


@dataclass(frozen=True, slots=True)
class TierRun:
    """One tier: on real bytes, in virtual time with the same work, and on the whole trace."""

    name: str
    wall: ReplayResult
    virtual: ReplayResult
    whole: ReplayResult | None

    @property
    def runs(self) -> tuple[ReplayResult, ...]:
        """All runs of the tier."""
        return tuple(run for run in (self.wall, self.virtual, self.whole) if run is not None)

    @property
    def against_model(self) -> ModelCheck:
        """How far block reads on real bytes are from those in virtual time."""
        return compare(self.wall, self.virtual)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All tiers, and where the plots are."""

    plan: DemoPlan
    options: DemoOptions
    tiers: tuple[TierRun, ...]
    plot: Path

    @property
    def ok(self) -> bool:
        """Whether no wrong byte was delivered and nothing leaked, in any run."""
        return all(run.correct for tier in self.tiers for run in tier.runs)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Whether each tier's real run is where the model has it."""
        return tuple(tier.against_model.claim(tier.name) for tier in self.tiers)

    def text(self) -> str:
        """Return the report for a terminal."""
        return report_text(self)

    def to_json(self) -> dict[str, Any]:
        """Return the figures; ``emulator_against_model`` says how far real and model are apart."""
        return {
            "workload": self.plan.workload.name,
            "dram_bytes": self.plan.dram_bytes,
            "footprint_bytes": self.plan.footprint_bytes,
            "scale": self.plan.scale,
            "seed": self.options.seed,
            "tiers": [
                {
                    "name": tier.name,
                    "wall": to_json(tier.wall.figures),
                    "virtual": to_json(tier.virtual.figures),
                    "whole_trace": None if tier.whole is None else to_json(tier.whole.figures),
                    "emulator_against_model": to_json(tier.against_model),
                    "timing_kept": tier.against_model.timing_kept,
                    "fidelity": to_json(tier.wall.fidelity),
                }
                for tier in self.tiers
            ],
            "plot": str(self.plot),
            "ok": self.ok,
        }


def make_plan(options: DemoOptions) -> DemoPlan:
    """Choose workload, DRAM and scale.

    A trace gets an eighth of its footprint as DRAM, at most 64 GiB, and is played faster if its
    arrivals span more than the budget.
    """
    shape = model_shape(MODEL)
    if options.trace is not None:
        require_format_with_ids(options.trace)
        workload = read_trace(options.trace, mode=Mode.WHOLE_BLOCKS)
        if not workload.has_ids:
            raise TraceHasNoIdsError(
                f"{options.trace} records no block ids, so nothing in it can be reused; "
                "choose a trace with hash ids (docs/traces.md)"
            )
    else:
        workload = generate(
            GeneratorKnobs(
                sessions=12 if options.quick else 24,
                turns=3 if options.quick else 6,
                shared_system_tokens=512,
                first_input_tokens=1024,
                turn_input_tokens=1520 if options.quick else 1408,
                output_tokens=16 if options.quick else 128,
                think_s=0.3,
                think_stddev_s=0.1,
                session_spread_s=0.5,
                seed=options.seed,
            ),
            name="multi-turn, generated",
        )
    block = shape.block_bytes(workload.block_tokens)
    footprint = trace_statistics(workload, (), block_bytes=block).footprint_bytes
    dram = 2 * GIB if options.quick or options.trace is not None else 8 * GIB
    speed = 1.0
    if options.trace is not None:
        while dram < min(footprint // 8, 64 * GIB):
            dram *= 2
        span_s = workload.requests[-1].arrival_s if workload.requests else 0.0
        speed = min(max(span_s / options.budget_s, 1.0), MAX_SPEED)
    capacity = 16 * GIB
    while capacity < min(2 * footprint, 1862 * GIB // 2):
        capacity *= 2
    return DemoPlan(
        workload,
        closed_loop=workload.has_sessions,
        think_cap_s=1.0,
        speed=speed,
        dram_bytes=dram,
        capacity_bytes=capacity,
        footprint_bytes=footprint,
        gpu_blocks=8 if options.quick else max(16, GIB // 2 // block),
        scale=options.scale or 128,
        block_bytes=block,
    )


def demo_tiers(plan: DemoPlan) -> list[tuple[str, DeviceProfile, bool, int]]:
    """Return name, device profile, prefetch, and capacity of the four tiers of equal DRAM."""
    dram = f"{plan.dram_bytes} B"
    cmm = load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": dram, "ssd_count": "2"})
    hm = load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"dram_capacity": dram})
    plain = load_as(
        ExpanderProfile, "remote-dram", overrides={"capacity": dram, "bandwidth": "27 GB/s"}
    )
    return [
        ("CMM-H (LRU)", cmm, False, plan.capacity_bytes),
        ("CXL-HM, no prefetch", hm, False, plan.capacity_bytes),
        ("CXL-HM + HyMCache", hm, True, plan.capacity_bytes),
        ("all-DRAM", plain, False, plan.dram_bytes),
    ]


def replay_spec(
    plan: DemoPlan, device: DeviceProfile, *, prefetch: bool, capacity_bytes: int, seed: int
) -> ReplaySpec:
    """Return how one tier is run."""
    return ReplaySpec(
        rig=RigSpec(
            device=device,
            block_bytes=plan.block_bytes,
            device_capacity_bytes=capacity_bytes,
            workers=WORKERS,
            prefetch=prefetch,
            scale=plan.scale,
            seed=seed,
        ),
        engine=EngineModel(model_shape(MODEL), load_as(AcceleratorProfile, "a100-80g")),
        gpu_blocks=plan.gpu_blocks,
        closed_loop=plan.closed_loop,
        think_cap_s=plan.think_cap_s,
        speed=plan.speed,
        max_turns=6 if plan.workload.name.startswith("multi-turn") else 8,
    )


def run_demo(
    options: DemoOptions,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> DemoResult:
    """Run the four tiers and return their figures; plots go to ``options.out``.

    Virtual time comes first, so that ``note`` is told how long the real runs will take.

    Raises:
        HostLimitError: a folder cannot be written.
    """
    plan = make_plan(options)
    check_writable(options.out)
    folder = options.folder or options.out / "backing"
    made = not folder.exists()
    specs = {
        name: replay_spec(
            plan, device, prefetch=prefetch, capacity_bytes=capacity, seed=options.seed
        )
        for name, device, prefetch, capacity in demo_tiers(plan)
    }
    wholes = {
        name: replay(
            plan.workload,
            spec,
            wall=False,
            progress=partial(progress, f"{name}, virtual time"),
        )
        for name, spec in specs.items()
    }
    workload = plan.workload
    if options.trace is not None:
        workload = _prefix(plan.workload, wholes.values(), options.budget_s)
    cut = len(workload.requests) < len(plan.workload.requests)
    models = (
        {name: replay(workload, spec, wall=False) for name, spec in specs.items()}
        if cut
        else wholes
    )
    seconds = sum(model.figures.duration_s + SET_UP_S for model in models.values())
    note(
        f"on real bytes this takes about {seconds:.0f} s: {len(workload.requests)} requests on "
        f"each of {len(specs)} tiers"
    )
    runs = []
    for name, spec in specs.items():
        shown = partial(progress, f"{name}, real bytes")
        if options.processes:
            wall = replay_on_processes(
                workload, spec, deployment_of(spec.rig), folder=folder, progress=shown
            )
        else:
            wall = replay(workload, spec, wall=True, folder=folder, progress=shown)
        runs.append(TierRun(name, wall, models[name], wholes[name] if cut else None))
    if made and options.folder is None:
        with contextlib.suppress(OSError):
            folder.rmdir()  # each run has removed its own in it
    options.out.mkdir(parents=True, exist_ok=True)
    plot = options.out / "demo.png"
    plot_demo(runs, plan, plot)
    return DemoResult(plan, options, tuple(runs), plot)


def _prefix(workload: Workload, wholes: Iterable[ReplayResult], budget_s: float) -> Workload:
    """Return the requests that are over within the budget on every tier, by the virtual runs."""
    ends: dict[int, float] = {}
    for whole in wholes:
        for record in whole.records:
            ends[record.request_id] = max(ends.get(record.request_id, 0.0), record.end_s)
    return part_within(workload, ends, budget_s)
