"""What ``cxlbench up``, ``worker`` and ``status`` do with their options.

Imports what it needs when it runs, like all commands (see ``cli/__init__.py``).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.group import BAD_INPUT, TIMING_NOT_KEPT, WRONG_DATA, UserError
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.harness.deployment import DeploymentSpec
    from cxlbench.harness.deployment_status import PartStatus
    from cxlbench.harness.replay import ReplayResult, ReplaySpec
    from cxlbench.harness.requests import Workload
    from cxlbench.harness.supervisor import Deployment, Ended

WATCH_EVERY_S = 0.2
MOST_RESTARTS = 5
"""Within ``RESTARTS_WITHIN_S``: what dies more often will not get better by itself."""
RESTARTS_WITHIN_S = 60.0


# -- up --------------------------------------------------------------------------------------------


def run_up(spec: DeploymentSpec, output: Output, *, restart: bool) -> None:
    """Run a deployment until an interrupt; raise click's Exit if it did not stay whole."""
    from cxlbench.harness.supervisor import Deployment

    if spec.folder is not None:
        try:
            spec.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot use {spec.folder} for the SSDs' files: {error.strerror}; choose another "
                "(--folder)"
            ) from error
    deployment = Deployment(spec)
    deployment.start()
    whole = True
    try:
        _say_what_is_there(deployment, output)
        whole = _watch(deployment, output, restart=restart)
    except KeyboardInterrupt:
        whole = all(deployment.running(role, number) for role, number in deployment.parts)
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # once more, for what is being done
            deployment.stop()
    if deployment.failed and deployment.logs:
        output.note(f"logs of what failed: {', '.join(map(str, deployment.logs))}")
    if not whole:
        raise click.exceptions.Exit(BAD_INPUT)
    output.note("stopped")


def _watch(deployment: Deployment, output: Output, *, restart: bool) -> bool:
    """Report processes that die; return False when it makes no sense to go on."""
    restarts: deque[float] = deque(maxlen=MOST_RESTARTS)
    while True:
        for ended in deployment.ended():
            output.note(ended.line())
            if restart:
                now_s = time.monotonic()
                if len(restarts) == MOST_RESTARTS and now_s - restarts[0] < RESTARTS_WITHIN_S:
                    output.note(f"{MOST_RESTARTS} died within a minute: giving up")
                    return False
                restarts.append(now_s)
                output.note(f"{ended.name} is started again")
                deployment.restart(ended.role, ended.number, wait=False)
            else:
                output.note(_what_then(ended))
        if not any(deployment.running(role, number) for role, number in deployment.parts):
            output.note("no process is left")
            return False
        time.sleep(WATCH_EVERY_S)


def _what_then(ended: Ended) -> str:
    lost = "nothing is found" if ended.role == "master" else "its blocks are misses"
    return f"without it {lost}; stop and start again, or use --restart"


def _say_what_is_there(deployment: Deployment, output: Output) -> None:
    from cxlbench.harness.tables import left_table, plural, size

    spec = deployment.spec
    parts: list[dict[str, Any]] = [
        {
            "part": "Master" if role == "master" else f"node {number}",
            "pid": deployment.pid(role, number),
            "endpoint": spec.endpoint(role, number),
        }
        for role, number in deployment.parts
    ]
    devices = f"{spec.devices_per_node} x {spec.device}"
    if spec.capacity is not None:
        devices += f" of {size(spec.capacity)}, {size(spec.capacity / spec.scale)} here"
    devices += f" at scale {spec.scale:g}"
    output.say(
        left_table(
            ("part", "process", "serves at", ""),
            [
                (part["part"], part["pid"], part["endpoint"], "" if not number else devices)
                for number, part in enumerate(parts)
            ],
        )
    )
    place = "in main memory" if spec.folder is None else f"in {spec.folder}"
    output.say()
    output.say(
        f"{plural(spec.nodes, 'node')} up; SSDs are {place}; Ctrl-C ends it. Elsewhere:\n"
        f"  cxlbench worker --run-dir {spec.run_dir}\n"
        f"  cxlbench status --run-dir {spec.run_dir}"
    )
    output.document({"run_dir": spec.run_dir, "parts": parts, "spec": spec})
    sys.stdout.flush()


# -- status ----------------------------------------------------------------------------------------


def run_status(run_dir: Path, output: Output) -> None:
    """Print what the parts are doing; raise click's Exit if not all of them answer."""
    from cxlbench.harness.deployment import load_spec
    from cxlbench.harness.deployment_status import HELD, read_status
    from cxlbench.harness.tables import left_table

    spec = load_spec(run_dir)
    found = read_status(spec)
    rows = [
        (
            part.name,
            part.trouble or "up",
            str(part.figures.get("clients", "-")),
            str(part.figures.get("objects", "-")),
            _held(part, HELD),
            _epoch(part),
        )
        for part in found.parts
    ]
    output.say(left_table(("part", "state", "clients", "objects", "held", "epoch"), rows))
    output.document({"run_dir": run_dir, "parts": found.parts, "all_answer": found.complete})
    if not found.anything:
        output.note(f"nothing answers in {run_dir}: was the deployment killed? `cxlbench up` again")
    if not found.complete:
        raise click.exceptions.Exit(BAD_INPUT)


def _held(part: PartStatus, prefix: str) -> str:
    if part.trouble:
        return "-"
    held = [
        f"{name.removeprefix(prefix)} {count}"
        for name, count in part.figures.items()
        if name.startswith(prefix)
    ]
    return ", ".join(held) or "nothing"


def _epoch(part: PartStatus) -> str:
    return "-" if part.trouble else f"{int(part.figures['epoch']):016x}"


# -- worker ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the user asked for; see the options of the command."""

    trace: Path | None
    run_dir: Path
    number: int
    sessions: int | None
    turns: int
    seed: int
    limit: int | None
    model: str
    accelerator: str
    gpu_blocks: int
    closed_loop: bool | None
    think_cap_s: float
    speed: float
    verify: str


def run_worker(options: WorkerOptions, output: Output) -> None:
    """Serve a workload on a running deployment, and report; raise Exit if it is not fine."""
    from cxlbench.harness.cli.replay_run import say_if_wrong
    from cxlbench.harness.deployment import load_spec
    from cxlbench.harness.fidelity import NOT_KEPT, WHAT_THEN
    from cxlbench.harness.tables import plural, size, totals_listing, turn_table

    deployment = load_spec(options.run_dir)
    workload = _workload(options, output)
    spec = _replay_spec(options, deployment, workload)
    result = _serve(options, deployment, workload, spec, output)
    fidelity = result.fidelity
    assert fidelity is not None
    output.say(
        f"{workload.name} on {plural(deployment.nodes, 'node')} in {options.run_dir}: worker "
        f"{options.number}, blocks of {workload.block_tokens} tokens "
        f"({size(spec.rig.block_bytes)}), GPU cache of {plural(spec.gpu_blocks, 'block')}; "
        f"real time, real bytes at scale {deployment.scale:g}"
    )
    late = deployment.throttled and not fidelity.trusted
    if late:
        output.say(f"{NOT_KEPT}: times and bandwidths below are this host's (see the last lines)")
    elif not deployment.throttled:
        output.say("no timing is emulated: times and bandwidths below are this host's")
    output.say()
    output.say(turn_table(result.figures.turns))
    output.say()
    output.say(totals_listing(result.figures))
    if deployment.throttled:
        output.say()
        output.say(fidelity.line())
    output.document({"figures": result.figures, "fidelity": fidelity, "correct": result.correct})
    if not result.correct:
        say_if_wrong(result, output)
        raise click.exceptions.Exit(WRONG_DATA)
    if late:
        output.note(WHAT_THEN)
        raise click.exceptions.Exit(TIMING_NOT_KEPT)


def _workload(options: WorkerOptions, output: Output) -> Workload:
    from cxlbench.harness.generator import GeneratorKnobs, generate
    from cxlbench.harness.requests import Mode
    from cxlbench.harness.traces import read_trace, require_format_with_ids

    if options.trace is None:
        knobs = GeneratorKnobs(
            sessions=options.sessions or 4,
            turns=options.turns,
            shared_system_tokens=512,
            first_input_tokens=1024,
            turn_input_tokens=1520,
            output_tokens=16,
            think_s=0.3,
            think_stddev_s=0.1,
            session_spread_s=0.5,
            seed=options.seed,
        )
        return generate(knobs, name=f"multi-turn, generated by seed {options.seed}")
    require_format_with_ids(options.trace)
    with output.progress() as progress:
        workload = read_trace(
            options.trace,
            mode=Mode.WHOLE_BLOCKS,
            limit=options.limit,
            sessions=options.sessions,
            progress=lambda done, total: progress("reading the trace, bytes", done, total),
        )
    workload.require_ids("a worker")
    if options.closed_loop:
        workload.require_sessions("a closed loop")
    return workload


def _replay_spec(
    options: WorkerOptions, deployment: DeploymentSpec, workload: Workload
) -> ReplaySpec:
    from cxlbench.devices.profile import AcceleratorProfile, load_as
    from cxlbench.harness.engine import EngineModel
    from cxlbench.harness.replay import ReplaySpec
    from cxlbench.harness.rig_checks import check_rig
    from cxlbench.kv.footer import Verify
    from cxlbench.kv.geometry import model_shape

    shape = model_shape(options.model)
    rig = deployment.rig_spec(block_bytes=shape.block_bytes(workload.block_tokens))
    rig = replace(rig, verify=Verify(options.verify))
    check_rig(rig)
    closed = workload.has_sessions if options.closed_loop is None else options.closed_loop
    return ReplaySpec(
        rig=rig,
        engine=EngineModel(shape, load_as(AcceleratorProfile, options.accelerator)),
        gpu_blocks=options.gpu_blocks,
        closed_loop=closed,
        think_cap_s=options.think_cap_s,
        speed=options.speed,
    )


def _serve(
    options: WorkerOptions,
    deployment: DeploymentSpec,
    workload: Workload,
    spec: ReplaySpec,
    output: Output,
) -> ReplayResult:
    from cxlbench.emu.clock import WallClock
    from cxlbench.harness.replay_processes import result_of
    from cxlbench.harness.replay_share import Task, serve_share

    with output.progress() as progress, WallClock(shared=True) as clock:

        async def begin() -> float:
            return clock.real()

        share = clock.run(
            serve_share(
                clock,
                deployment,
                Task(workload, spec, salt=workload.name, alone=True),
                options.number,
                begin=begin,
                progress=lambda done, total: progress("serving requests", done, total),
            )
        )
    return result_of(share, spec)
