"""What ``cxlbench replay`` does with its options: read, check the host, run, report.

Imports what it needs when it runs, like all commands (see ``cli/__init__.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.group import TIMING_NOT_KEPT, WRONG_DATA
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.emu.faults import FaultPlan
    from cxlbench.harness.replay import ReplayResult, ReplaySpec
    from cxlbench.harness.requests import Workload
    from cxlbench.harness.serving import Progress

GIB = 1 << 30
WALL_SCALE = 128
DEFAULT_OUT = Path("results/replay")
CAPACITIES = tuple(size * GIB for size in (16, 64, 256, 1024, 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; see the options of the command."""

    trace: Path
    device: str
    overrides: dict[str, str]
    model: str
    accelerator: str
    workers: int
    nodes: int
    devices: int
    capacity: int | None
    prefetch: bool
    gpu_blocks: int | None
    gpu_kv: int | None
    block_tokens: int | None
    limit: int | None
    sessions: int | None
    closed_loop: bool
    think_cap_s: float
    speed: float
    wall: bool
    processes: bool
    folder: Path | None
    scale: float | None
    verify: str
    faults: Path | None
    unchecked: bool
    statistics: bool
    mode: str
    at: tuple[int, ...]
    policy: str
    order: str
    out: Path | None
    seed: int
    seed_given: bool
    as_json: bool


def _read(options: Options, output: Output, mode: str) -> Workload:
    from cxlbench.harness.requests import Mode
    from cxlbench.harness.traces import read_trace, require_format_with_ids

    require_format_with_ids(options.trace)
    with output.progress() as progress:
        return read_trace(
            options.trace,
            mode=Mode(mode),
            block_tokens=options.block_tokens,
            limit=options.limit,
            sessions=options.sessions,
            progress=lambda done, total: progress("reading the trace, bytes", done, total),
        )


# -- statistics ------------------------------------------------------------------------------------


def count_reuse(options: Options, output: Output) -> None:
    """Print how much reuse a trace holds, and what a cache of a size would catch of it."""
    from cxlbench.harness.results import check_writable, write_run
    from cxlbench.harness.tables import listing, percent, size, table
    from cxlbench.harness.trace_statistics import Order, trace_statistics
    from cxlbench.kv.geometry import model_shape

    if options.out is not None:
        check_writable(options.out)
    mode = options.mode or "as-recorded"
    workload = _read(options, output, mode)
    found = trace_statistics(
        workload,
        options.at or CAPACITIES,
        bytes_per_token=model_shape(options.model).kv_bytes_per_token(),
        policy=options.policy,
        order=Order(options.order),
    )
    output.say(
        listing(
            [
                ("trace", f"{found.name}, {mode}"),
                ("requests", f"{found.counts.requests:,}"),
                ("references", f"{found.counts.references:,} of {found.counts.distinct:,} blocks"),
                ("seen before", percent(found.counts.hit_share)),
                ("a block", f"{workload.block_tokens} tokens, {size(found.block_bytes)}"),
                ("all blocks", size(found.footprint_bytes)),
                (
                    "prompt tokens",
                    f"p50 {found.input_tokens_p50:,}, p90 {found.input_tokens_p90:,}, "
                    f"longest {found.input_tokens_max:,}",
                ),
            ]
        )
    )
    output.say()
    output.say(
        table(
            ("cache", "blocks", f"{found.policy} hits %"),
            [
                (size(at.capacity_bytes), f"{at.capacity_blocks:,}", f"{at.hit_share * 100:.1f}")
                for at in found.capacities
            ],
        )
    )
    if options.out is not None:
        inputs = {**_trace_inputs(options), "mode": mode, "model": options.model}
        write_run(options.out, name="trace statistics", inputs=inputs, figures=found)
    output.document(found)


# -- replay ----------------------------------------------------------------------------------------


def replay_trace(options: Options, output: Output) -> None:
    """Replay, print figures, write the results; raise click's Exit if they are not fine."""
    from cxlbench.harness.results import check_writable

    check_writable(options.out or DEFAULT_OUT)
    faults = _plan(options)
    workload = _read(options, output, "whole-blocks")
    workload.require_ids("a replay")
    if options.closed_loop:
        workload.require_sessions("a closed loop")
    spec = _spec(options, workload.block_tokens)
    if options.wall and options.folder is not None:
        _check_host(options, spec, output)
    inputs = _inputs(options, workload, spec, faults)
    if options.wall:
        _say_how_long(options, workload, spec, output)
    with output.progress() as progress:
        result = _run(options, workload, spec, faults, partial(progress, "replaying requests"))
    _report(options, output, workload, spec, inputs, result)
    for note in _notes(options, spec, result):
        output.note(note)
    if not result.correct:
        say_if_wrong(result, output)
        raise click.exceptions.Exit(WRONG_DATA)
    if result.fidelity is not None and not result.fidelity.trusted:
        raise click.exceptions.Exit(TIMING_NOT_KEPT)


def _run(
    options: Options, workload: Workload, spec: ReplaySpec, faults: FaultPlan, progress: Progress
) -> ReplayResult:
    if options.processes:
        from cxlbench.harness.replay_processes import deployment_of, replay_on_processes

        deployment = deployment_of(spec.rig, device=options.device, device_set=options.overrides)
        return replay_on_processes(
            workload, spec, deployment, folder=options.folder, progress=progress
        )
    from cxlbench.harness.replay import replay

    return replay(
        workload,
        spec,
        wall=options.wall,
        folder=options.folder,
        faults=faults,
        progress=progress,
    )


def say_if_wrong(result: ReplayResult, output: Output) -> None:
    """Say what is wrong with a result that is not correct."""
    figures = result.figures
    held = ", ".join(f"{count} {name}" for name, count in figures.held_at_rest.items())
    output.note(
        f"WRONG: {figures.wrong_blocks} wrong blocks were delivered; "
        f"still held at the end: {held or 'nothing'}"
    )


def _plan(options: Options) -> FaultPlan:
    """Return a fresh fault plan; a seed that the user gave takes the place of the file's."""
    from cxlbench.emu.faults import FaultPlan

    if options.faults is None:
        return FaultPlan.none()
    plan = FaultPlan.load(options.faults)
    return FaultPlan(plan.rules, options.seed) if options.seed_given else plan


def _notes(options: Options, spec: ReplaySpec, result: ReplayResult) -> list[str]:
    """Return what a reader of the figures could miss."""
    from cxlbench.harness.fidelity import WHAT_THEN
    from cxlbench.harness.rig_checks import scale_drift
    from cxlbench.harness.tables import plural

    figures, notes = result.figures, []
    if not figures.block_read.count:
        notes.append(
            f"note: no block was read from the tier ({plural(figures.announced_blocks, 'block')} "
            "announced), so nothing here depends on its reads"
        )
        if figures.seen_blocks and figures.gpu_blocks == figures.seen_blocks:
            notes[-1] += (
                f"; the GPUs held all that was asked for again ({plural(spec.gpu_blocks, 'block')} "
                "each): a smaller --gpu-blocks makes room for the tier"
            )
    if figures.injected and not any(figures.injected.values()):
        notes.append(
            "note: the fault plan injected nothing: what its rules name took place too rarely, or "
            f"never, on {options.device}"
        )
    if figures.failed_writes and not figures.injected.get("ssd.write error"):
        notes.append(
            f"note: {plural(figures.failed_writes, 'write')} of backing files failed and "
            f"{plural(figures.lost_blocks, 'block')} were lost, each a miss: is the disk full?"
        )
    drift = scale_drift(spec.rig)
    if figures.block_read.count and drift is not None:
        notes.append(
            f"note: at scale {spec.rig.scale:g} figures are not those of the full size: {drift}; "
            "take a smaller --scale (docs/results.md)"
        )
    if result.fidelity is not None and not result.fidelity.trusted:
        notes.append(WHAT_THEN)
    return notes


def _say_how_long(options: Options, workload: Workload, spec: ReplaySpec, output: Output) -> None:
    """Run the same work in virtual time, which says how long it takes in real time."""
    from cxlbench.harness.replay import replay as run

    with output.progress() as progress:
        model = run(
            workload,
            spec,
            wall=False,
            faults=_plan(options),
            progress=lambda done, total: progress("estimating the time, requests", done, total),
        )
    output.note(
        f"in real time this takes about {model.figures.duration_s:.1f} s, and a little for its "
        "files; --limit and --sessions take a part of the trace, --speed plays it faster"
    )


def _spec(options: Options, block_tokens: int) -> ReplaySpec:
    from cxlbench.devices.profile import AcceleratorProfile, load_as
    from cxlbench.harness.engine import EngineModel, kv_blocks
    from cxlbench.harness.replay import ReplaySpec
    from cxlbench.harness.rig import RigSpec
    from cxlbench.kv.footer import Verify
    from cxlbench.kv.geometry import model_shape

    shape = model_shape(options.model)
    accelerator = load_as(AcceleratorProfile, options.accelerator)
    block_bytes = shape.block_bytes(block_tokens)
    gpu_blocks = options.gpu_blocks
    if gpu_blocks is None and options.gpu_kv is not None:
        gpu_blocks = options.gpu_kv // block_bytes
    elif gpu_blocks is None:
        gpu_blocks = kv_blocks(shape, accelerator, block_bytes)
    return ReplaySpec(
        rig=RigSpec(
            device=load_device(options.device, options.overrides),
            block_bytes=block_bytes,
            nodes=options.nodes,
            devices_per_node=options.devices,
            device_capacity_bytes=options.capacity,
            workers=options.workers,
            prefetch=options.prefetch,
            verify=Verify(options.verify),
            scale=options.scale or (WALL_SCALE if options.wall else 1),
            seed=options.seed,
        ),
        engine=EngineModel(shape, accelerator),
        gpu_blocks=gpu_blocks,
        closed_loop=options.closed_loop,
        think_cap_s=options.think_cap_s,
        speed=options.speed,
    )


def load_device(name: str, overrides: dict[str, str]) -> Any:
    """Return the profile of a device that a tier can be made of; refuse other kinds.

    ``module:function`` names a device of the user's own (docs/devices.md).
    """
    if ":" in name:
        from cxlbench.harness.user_device import load_user_device

        if overrides:
            raise click.BadParameter(
                f"{name!r} is not a profile: there is nothing to set", param_hint="--set"
            )
        module, _, function = name.partition(":")
        if module.endswith(".py"):
            raise click.BadParameter(
                f"{name!r}: name the module, not its file: {Path(module).stem}:{function}, run "
                "in its folder or with the folder on PYTHONPATH",
                param_hint="--device",
            )
        return load_user_device(name)
    from cxlbench.devices.profile import (
        CmmHProfile,
        CxlHmProfile,
        ExpanderProfile,
        list_profiles,
        load_profile,
    )

    kinds = (CxlHmProfile, CmmHProfile, ExpanderProfile)
    profile = load_profile(name, overrides=overrides)
    if not isinstance(profile, kinds):
        names = [kind.kind for kind in kinds]
        usable = ", ".join(one.name for one in list_profiles() if one.kind in names)
        raise click.BadParameter(
            f"{name!r} is of kind {profile.kind}; a tier is made of {', '.join(names)}: {usable}",
            param_hint="--device",
        )
    return profile


def _check_host(options: Options, spec: ReplaySpec, output: Output) -> None:
    from cxlbench.devices.profile import CmmHProfile, CxlHmProfile
    from cxlbench.harness.calibrate import check_host_feeds, check_room

    device, folder, scale = spec.rig.device, options.folder, spec.rig.scale
    if folder is None or not isinstance(device, CxlHmProfile | CmmHProfile):
        return
    count = spec.rig.nodes * spec.rig.devices_per_node
    capacity = spec.rig.device_capacity_bytes or device.capacity
    check_room([capacity] * count, folder, scale=scale)
    if options.unchecked:
        return
    if check_host_feeds(device, scale, folder, devices=count) is None:
        output.note(f"{folder} is not calibrated: cxlbench calibrate --folder {folder}")


def _trace_inputs(options: Options) -> dict[str, Any]:
    import hashlib

    with options.trace.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "trace": options.trace.name,
        "trace_sha256": digest,
        "block_tokens": options.block_tokens,
        "limit": options.limit,
        "sessions": options.sessions,
    }


def _inputs(
    options: Options, workload: Workload, spec: ReplaySpec, faults: FaultPlan
) -> dict[str, Any]:
    from cxlbench.harness.results import to_json, without

    return {
        **_trace_inputs(options),
        "block_tokens": workload.block_tokens,
        "requests": len(workload.requests),
        "clock": "wall" if options.wall else "virtual",
        "processes": options.processes,
        "seed": options.seed,
        "scale": spec.rig.scale,
        "overrides": options.overrides,
        "backing": "files" if options.wall and options.folder else "memory",
        "spec": without(to_json(spec), "provenance"),
        "faults": {"rules": faults.rules, "seed": faults.seed} if options.faults else None,
    }


def _report(
    options: Options,
    output: Output,
    workload: Workload,
    spec: ReplaySpec,
    inputs: dict[str, Any],
    result: ReplayResult,
) -> None:
    from cxlbench.harness.fidelity import NOT_KEPT
    from cxlbench.harness.results import write_run
    from cxlbench.harness.tables import plural, size, totals_listing, turn_table

    rig, figures = spec.rig, result.figures
    how = f"real time, real bytes at scale {rig.scale:g}" if options.wall else "virtual time"
    how += ", each part a process" if options.processes else ""
    at_scale = "" if options.wall or rig.scale == 1 else f" at scale {rig.scale:g}"
    parts = [
        f"{workload.name} on {rig.nodes * rig.devices_per_node} x {options.device}: "
        f"{rig.workers} workers, blocks of {workload.block_tokens} tokens "
        f"({size(rig.block_bytes)}), GPU cache of {plural(spec.gpu_blocks, 'block')}; "
        f"{how}{at_scale}"
    ]
    if result.fidelity is not None and not result.fidelity.trusted:
        parts.append(f"{NOT_KEPT}: times and bandwidths below are this host's (see the last lines)")
    parts += ["", turn_table(figures.turns), "", totals_listing(figures)]
    measured = {"figures": figures, "fidelity": result.fidelity, "correct": result.correct}
    paths = {"trace": options.trace}
    if options.folder is not None:
        paths["folder"] = options.folder
    try:
        folder = write_run(
            options.out or DEFAULT_OUT,
            name="replay",
            inputs=inputs,
            figures=measured,
            notes=output.run_notes(paths),
        )
    finally:  # a disk that is full, or a reader who is gone, takes only one of the two
        output.say("\n".join(parts))
    if options.out is not None:
        from cxlbench.harness.replay_plot import plot_replay

        plot = plot_replay(result, spec, options.out / "replay.png", title=workload.name)
        output.say()
        output.say(f"plot: {plot}")
    if result.fidelity is not None:
        output.say()
        output.say(result.fidelity.line())
    output.say(f"results: {folder}")
    output.document({"inputs": inputs, **measured, "folder": folder})
