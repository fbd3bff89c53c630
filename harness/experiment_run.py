"""Runs experiments, one after the other, and leaves a folder for each.

All points are checked before the first experiment begins. The first Ctrl-C (or SIGTERM, SIGHUP)
asks the running experiment to stop: what it has is written, marked partial, and no other begins.
The second one ends at once. An experiment that fails does not take the others with it.

Units: s of the host's clock for durations.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cxlbench.harness.endings import heard_later
from cxlbench.harness.experiment import Context, Experiment, ExperimentError
from cxlbench.harness.experiment_catalog import nearest
from cxlbench.harness.experiment_folder import place_for, write_record
from cxlbench.harness.experiment_record import Record, make_record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Stop:
    """Whether somebody asked to stop, by which signal, and whether the experiment heard of it."""

    number: int | None = None
    heard: bool = False

    def __call__(self) -> bool:
        """Return whether to stop; an experiment that was told so has left something out."""
        self.heard = self.heard or self.number is not None
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """As a shell would have it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.number is None else 128 + self.number


@dataclass(slots=True)
class Outcome:
    """What became of one experiment: its record and folder, or the error that ended it."""

    name: str
    record: Record | None = None
    folder: Path | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class Runs:
    """What became of all that were asked for, in order; those not begun are in ``left``."""

    outcomes: list[Outcome] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    stop: Stop = field(default_factory=Stop)

    @property
    def records(self) -> list[Record]:
        """The runs that have results."""
        return [outcome.record for outcome in self.outcomes if outcome.record is not None]


def make_contexts(
    experiments: Sequence[Experiment],
    *,
    quick: bool = False,
    seed: int = 0,
    overrides: Mapping[str, str] | None = None,
    tiers: Sequence[str] = (),
) -> list[Context]:
    """Return a point for each experiment, checked.

    With several experiments, each takes those overrides whose keys it has, and those that compare
    tiers take ``tiers``.

    Raises:
        ExperimentError: no experiment has such a key, or it cannot have such a value.
        ProfileError: a profile cannot have such a number.
    """
    given = dict(overrides or {})
    if not experiments:
        raise ExperimentError("there is no experiment to run; `cxlbench list` shows all")
    keys = [experiment.keys() for experiment in experiments]
    for key in given if len(experiments) > 1 else ():
        if not any(key in of_it for of_it in keys):
            possible = sorted({key for of_it in keys for key in of_it})
            names = ", ".join(experiment.name for experiment in experiments)
            otherwise = "`cxlbench list NAME` shows the keys of one"
            raise ExperimentError(
                f"none of {names} has a key {key!r}; {nearest(key, possible, otherwise=otherwise)}"
            )
    memo: dict[Hashable, object] = {}
    return [
        Context(
            experiment,
            quick=quick,
            seed=seed,
            memo=memo,
            tiers=tuple(tiers) if len(experiments) == 1 or experiment.compares_tiers else (),
            overrides=given
            if len(experiments) == 1
            else {key: text for key, text in given.items() if key in of_it},
        )
        for experiment, of_it in zip(experiments, keys, strict=True)
    ]


def run_all(
    contexts: Sequence[Context],
    results: Path,
    *,
    specs: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
    done: Callable[[Outcome], None] = lambda _: None,
) -> Runs:
    """Run each context and write its folder in ``results``; ``done`` hears of each as it ends.

    ``specs`` says how an experiment is named on the command line where that is not its name.
    """
    runs = Runs()
    with stopped_by_signals(runs.stop, note):
        for number, context in enumerate(contexts, 1):
            name = context.experiment.name
            if runs.stop.number is not None:
                runs.left.append(name)
                continue
            place = f"{name} ({number} of {len(contexts)})" if len(contexts) > 1 else name
            _listen(context, runs.stop, progress, place)
            outcome = Outcome(name)
            runs.outcomes.append(outcome)
            try:
                spec = (specs or {}).get(name, "")
                outcome.record = _run(context, runs.stop, spec)
                outcome.folder = place_for(outcome.record, results)
                with heard_later():
                    write_record(outcome.record, outcome.folder, command=command)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                # One that fails, or that the user gave up, is told; the others still count.
                outcome.error = error
            done(outcome)
    return runs


def _run(context: Context, stop: Stop, spec: str) -> Record:
    began_s = time.monotonic()
    try:
        findings = context.experiment.run(context)
    except ArithmeticError as error:
        if not context.overrides:
            raise
        given = ", ".join(f"{key}={text}" for key, text in sorted(context.overrides.items()))
        raise ExperimentError(
            f"it cannot be computed with {given} ({type(error).__name__}: {error}); "
            "`cxlbench --debug run` shows where"
        ) from error
    if stop.heard and not findings.partial:
        findings = dataclasses.replace(findings, partial=True)
    return make_record(context, findings, spec=spec, duration_s=time.monotonic() - began_s)


def _listen(
    context: Context, stop: Stop, progress: Callable[[str, int, int], None], place: str
) -> None:
    def show(what: str, done: int, total: int) -> None:
        progress(f"{place}: {what}", done, total)

    context.progress = show
    context.stopping = stop


@contextmanager
def stopped_by_signals(stop: Stop, note: Callable[[str], None]) -> Iterator[None]:
    """Let the first signal set ``stop``, and the second raise ``KeyboardInterrupt``."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.number is not None:
            raise KeyboardInterrupt
        stop.number = number
        note("stopping: what is there will be kept, marked partial; once more ends at once")

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays what it is
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
