"""Runs an experiment at many points: here in processes, or on a Ray cluster, resumable.

Each point is a ``Context`` with overrides, at the same seed: what differs between two points comes
from their keys, not from chance. A point that raises is a row with the error, and so is one whose
process was lost; neither ends the sweep. Rows are written as points end (``sweep_rows.py``).

Processes are started afresh (spawn), with SIGINT blocked: Ctrl-C reaches the parent alone, which
ends them, so that the file has all points that ended before. They end with the parent also where it
is killed (Linux: at once; elsewhere: after their point).

Units: s of the host's clock.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from cxlbench.harness.experiment import Context, Experiment, ExperimentError
from cxlbench.harness.experiment_catalog import find_experiments
from cxlbench.harness.service_main import die_with_parent
from cxlbench.harness.sweep_axes import Design, Point, SweepError
from cxlbench.harness.sweep_rows import (
    PointResult,
    PointRow,
    PointRun,
    SweepFile,
    make_header,
    point_result,
    read_sweep,
    setup_hash,
)
from cxlbench.harness.sweep_writer import SweepWriter

END_WITHIN_S = 5.0
"""How long a process may take to end before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointTask:
    """One point as it is sent to whoever runs it.

    ``where`` is the experiment's name, or ``module:object``: experiments themselves are not sent.
    """

    where: str
    setup: str
    quick: bool
    seed: int
    point: int
    overrides: Point


Runner = Callable[[Sequence[PointTask]], Generator[PointRow, None, None]]
"""Yields a row for each task, in the order in which they end; closing it ends the work."""


class OtherSetupError(SweepError):
    """Who should run a point has another version of the experiment."""


def load_experiment(where: str) -> Experiment:
    """Return the experiment that a name or ``module:object`` names.

    Raises:
        ExperimentError: there is none, or it cannot be used.
    """
    return find_experiments().get(where)


def run_point(task: PointTask) -> PointRow:
    """Run one point; what it raises is in its row.

    Raises:
        OtherSetupError: the experiment here is not the one that the sweep is of.
        ExperimentError: it is not here at all.
    """
    experiment = load_experiment(task.where)
    if setup_hash(experiment, quick=task.quick) != task.setup:
        raise OtherSetupError(
            f"{experiment.name} is set up otherwise where its points run: install the same "
            "version of cxlbench, and of the experiment, there"
        )
    begin_s = time.perf_counter()
    try:
        context = Context(
            experiment, quick=task.quick, seed=task.seed, overrides=dict(task.overrides)
        )
        result = point_result(experiment.run(context))
    except Exception as error:
        result = PointResult(error=_told(error))
    return _row(task, result, time.perf_counter() - begin_s)


def _told(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, {last.name})"


def _row(task: PointTask, result: PointResult, seconds: float = 0.0) -> PointRow:
    run = PointRun(seconds=round(seconds, 3))
    return PointRow(point=task.point, keys=dict(task.overrides), result=result, run=run)


def lost_row(task: PointTask, why: str) -> PointRow:
    """Return the row of a point whose process or machine was lost."""
    return _row(task, PointResult(error=why, lost=True))


def run_sweep(
    experiment: Experiment,
    where: str,
    design: Design,
    path: Path,
    *,
    runner: Runner,
    quick: bool = False,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> SweepFile:
    """Run the points that ``path`` has no rows of yet; return the whole file.

    ``where`` is its name or ``module:object``, for those who run its points. On Ctrl-C
    what has ended is in the file, which the same call goes on with.

    Raises:
        SweepError: the file is another sweep's; ``where`` is not ``experiment``; or as ``runner``.
    """
    setup = setup_hash(experiment, quick=quick)
    if setup_hash(load_experiment(where), quick=quick) != setup:
        raise SweepError(f"{where!r} is not the experiment {experiment.name}")
    with SweepWriter(path, make_header(experiment, design, quick=quick, seed=seed)) as writer:
        tasks = [
            PointTask(
                where=where,
                setup=setup,
                quick=quick,
                seed=seed,
                point=point,
                overrides=design.points[point],
            )
            for point in writer.todo()
        ]
        total = len(design.points)
        progress("points", total - len(tasks), total)
        running = runner(tasks)
        try:
            for done, row in enumerate(running, total - len(tasks) + 1):
                writer.append(row)
                progress("points", done, total)
        finally:
            running.close()
        if tasks:
            writer.sort()
    return read_sweep(path)


def in_this_process(tasks: Sequence[PointTask]) -> Generator[PointRow, None, None]:
    """Run points one after the other, here."""
    for task in tasks:
        yield run_point(task)


# -- processes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    process: SpawnProcess
    connection: Connection
    task: PointTask | None = None


def in_processes(tasks: Sequence[PointTask], *, jobs: int) -> Generator[PointRow, None, None]:
    """Run points in ``jobs`` processes; one that dies costs its point, and is replaced.

    Raises:
        ValueError: ``jobs`` is below 1.
        OtherSetupError: as ``run_point``.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: at least one process must work")
    waiting = deque(tasks)
    members: list[_Member] = []
    try:
        while waiting or any(member.task is not None for member in members):
            while waiting and len(members) < jobs:
                members.append(_start())
            for member in members:
                if member.task is None and waiting:
                    member.task = waiting.popleft()
                    with suppress(OSError):  # it has ended; so will be seen below
                        member.connection.send(member.task)
            busy: dict[Any, _Member] = {m.connection: m for m in members if m.task is not None}
            for connection in wait(list(busy)):
                member = busy[connection]
                task, member.task = member.task, None
                assert task is not None
                try:
                    answer = member.connection.recv()
                except (EOFError, OSError):
                    members.remove(member)
                    answer = lost_row(task, f"its process ended, {_end(member)}")
                if isinstance(answer, ExperimentError):
                    raise answer
                yield answer
    finally:
        for member in members:
            member.process.terminate()
        for member in members:
            _end(member)


def _start() -> _Member:
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # to start it unblocks SIGINT, so not while it is blocked
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
    with _no_interrupts():
        process.start()
    theirs.close()
    return _Member(process, ours)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block SIGINT meanwhile: a process started here never sees it; ours comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(member: _Member) -> str:
    """Wait for a process to end; return how it did."""
    member.process.join(END_WITHIN_S)
    if member.process.is_alive():
        member.process.kill()
        member.process.join()
    member.connection.close()
    code = member.process.exitcode or 0
    member.process.close()
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _work(connection: Connection, parent: int) -> None:
    die_with_parent(parent)
    with suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                answer: PointRow | ExperimentError = run_point(task)
            except ExperimentError as error:
                answer = error
            connection.send(answer)
