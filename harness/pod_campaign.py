"""The campaign that says what the checker is worth: right code is quiet, wrong code is not.

Right code is in ``pod_quiet.py``, wrong code in ``pod_hunt.py``. The work is handed to as many
processes as there are cores; what comes out does not depend on how many those are. Units:
schedules; s of the host's clock.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from cxlbench.emu.pod_zygote import end_with_parent
from cxlbench.harness.pod_hunt import Hunt, MutantRow, Search, hunt_mutant
from cxlbench.harness.pod_quiet import SCHEDULERS, Finding, QuietRow, joined, pieces, run_piece
from cxlbench.tract import mutants, scenarios

SCHEDULES = 20_000
"""Schedules of right code in which nodes may die; half as many again in which they may not."""
MUTANT_BOUND = 2_000
"""Schedules within which a mutant must be found."""
SAMPLE = 200
"""Schedules, at least, of which the share that fails is told."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Told = Callable[[str, int, int], object]


class NothingChosenError(ValueError):
    """No scenario and no mutant is called like that."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What came of it."""

    seed: int
    bound: int
    quiet: tuple[QuietRow, ...]
    mutants: tuple[MutantRow, ...]
    elapsed_s: float = field(compare=False)

    @property
    def schedules(self) -> int:
        """Schedules of right code."""
        return sum(row.schedules for row in self.quiet)

    @property
    def with_deaths(self) -> int:
        """Schedules of right code in which a node died or was taken for dead."""
        return sum(row.with_deaths for row in self.quiet)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All reports on right code."""
        return tuple(finding for row in self.quiet for finding in row.findings)

    @property
    def missed(self) -> tuple[str, ...]:
        """Mutants that were not found, or mostly called something that they are not."""
        return tuple(row.mutant for row in self.mutants if not row.found)

    @property
    def passed(self) -> bool:
        """Whether right code was quiet and every wrong one was found."""
        return not self.findings and not self.missed


def run_campaign(
    *,
    schedules: int = SCHEDULES,
    bound: int = MUTANT_BOUND,
    sample: int = SAMPLE,
    seed: int = 1,
    only: str = "",
    processes: int | None = None,
    progress: Told | None = None,
) -> Campaign:
    """Run the campaign on scenarios and mutants whose names contain ``only``.

    ``schedules`` are divided among the schedulers and the scenarios in which nodes may die; half as
    many are divided among the others. Mutants are hunted for ``bound`` schedules, no longer than
    ``sample`` once they were found. ``processes`` defaults to the cores; 1 uses no other process.

    Raises:
        ValueError: a number is not positive.
        NothingChosenError: nothing is called like that.
    """
    if min(schedules, bound, sample) < 1 or (processes is not None and processes < 1):
        raise ValueError(
            "schedules, bound, sample and processes must be positive, got "
            f"{schedules}, {bound}, {sample}, {processes}"
        )
    begin_s = time.monotonic()
    chosen = [name for name in scenarios.ALL if only in name]
    hunted = [i for i, mutant in enumerate(mutants.ALL) if only in mutant.name]
    if not chosen and not hunted:
        raise NothingChosenError(f"no scenario and no mutant has {only!r} in its name")
    parts = list(pieces(chosen, schedules, seed))
    hunts = [Hunt(i, s, bound, sample, seed) for i in hunted for s in SCHEDULERS]
    tasks: list[Callable[[], Any]] = [functools.partial(hunt_mutant, one) for one in hunts]
    tasks += [functools.partial(run_piece, one) for one in parts]
    done = _in_parallel(tasks, processes or _cores(), progress)
    searches: list[Search] = done[: len(hunts)]
    rows: list[QuietRow] = done[len(hunts) :]
    return Campaign(
        seed,
        bound,
        tuple(joined(chosen, rows)),
        tuple(
            MutantRow(name, tuple(one for one in searches if one.mutant == name))
            for name in dict.fromkeys(one.mutant for one in searches)
        ),
        time.monotonic() - begin_s,
    )


def _in_parallel(
    tasks: Sequence[Callable[[], Any]], processes: int, progress: Told | None
) -> list[Any]:
    """Call all tasks in so many processes; return what they returned, in order."""
    tell = progress or (lambda what, done, total: None)
    what = "pieces of the campaign"
    if processes == 1:
        results = []
        for number, task in enumerate(tasks):
            results.append(task())
            tell(what, number + 1, len(tasks))
        return results
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, initializer=_begin_worker)
    try:
        with _signals_held():  # a worker that is half started would be known to nobody
            futures: list[Future[Any]] = [pool.submit(task) for task in tasks]
        for number, one in enumerate(as_completed(futures)):
            one.result()
            tell(what, number + 1, len(tasks))
        return [one.result() for one in futures]
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # a piece takes long, and nobody wants it any more
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let a signal that ends a command come after the block; who is started in it hears none."""
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for ending in ENDING:
            before[ending] = signal.signal(ending, lambda number, frame: came.append(number))
    except ValueError:  # not the main thread, which is the one that gets them
        pass
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # for who is started: it inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _begin_worker() -> None:
    """Let a worker leave Ctrl-C to its parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # it was started with them blocked
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before that
        os._exit(1)
