"""Whether a wall-clock run kept the timing that it promised.

For every pipe: bytes that the model said would have arrived in each second against bytes that had
arrived; for every deadline: how late Python woke up. A run is trusted if bandwidth over 1 s windows
is within 2 % everywhere and lateness is at most 50 us at the median and 1 ms at p99. A run without
a whole second of transfers says nothing of bandwidth, and its line does not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe

_Floats = npt.NDArray[np.float64]

WINDOW_S = 1.0
MAX_BANDWIDTH_ERROR = 0.02
MAX_LATE_P50_S = 50e-6
MAX_LATE_P99_S = 1e-3
NOT_KEPT = "TIMING NOT KEPT"
WHAT_THEN = (
    "The timing was not kept: this host was late, so latencies, TTFT and GB/s of the real run are "
    "the host's and not the emulated hardware's, and what depends on order (hits, refused stores) "
    "may differ. The data is right: every block was verified all the same. What helps: a larger "
    "--scale, fewer workers, an idle machine; or virtual time, which is never late "
    "(docs/results.md)."
)
"""What a reader of a run that did not keep its timing must know."""

MIN_TRANSFERS = 20
"""Windows with fewer transfers say nothing of bandwidth."""


@dataclass(frozen=True, slots=True)
class PipeFidelity:
    """Achieved against asked on one pipe: the worst window, as a share, and the busiest."""

    name: str
    worst_error: float
    peak_bytes_per_s: float
    windows: int
    """Whole seconds in which enough was moved to speak of a bandwidth."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The verdict on one run."""

    late_p50_s: float
    late_p99_s: float
    deadlines: int
    pipes: tuple[PipeFidelity, ...]

    @property
    def worst_error(self) -> float:
        """The largest bandwidth error of any pipe's window."""
        return max((pipe.worst_error for pipe in self.pipes), default=0.0)

    @property
    def windows(self) -> int:
        """Whole seconds over which bandwidth was judged, on the pipe that has the most."""
        return max((pipe.windows for pipe in self.pipes), default=0)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What was not kept."""
        found = []
        if self.worst_error > MAX_BANDWIDTH_ERROR:
            worst = max(self.pipes, key=lambda pipe: pipe.worst_error)
            found.append(
                f"{worst.name} off by {worst.worst_error:.1%} in a 1 s window "
                f"(allowed {MAX_BANDWIDTH_ERROR:.0%})"
            )
        if self.late_p50_s > MAX_LATE_P50_S:
            found.append(f"median lateness {_time(self.late_p50_s)} (allowed 50 us)")
        if self.late_p99_s > MAX_LATE_P99_S:
            found.append(f"p99 lateness {_time(self.late_p99_s)} (allowed 1 ms)")
        return tuple(found)

    @property
    def trusted(self) -> bool:
        """Whether the run's times can be taken at face value."""
        return not self.complaints

    def line(self) -> str:
        """Return the fidelity line that ends every wall-clock run."""
        kept = "timing kept" if self.windows else "timing kept, as far as so short a run can tell"
        verdict = kept if self.trusted else f"{NOT_KEPT}: " + "; ".join(self.complaints)
        bandwidth = (
            f"bandwidth within {self.worst_error:.1%} over {self.windows} "
            f"{'window' if self.windows == 1 else 'windows'} of 1 s"
            if self.windows
            else "no whole second of transfers, so no figure of bandwidth"
        )
        return (
            f"fidelity: {bandwidth}; lateness p50 {_time(self.late_p50_s)}, p99 "
            f"{_time(self.late_p99_s)} over {self.deadlines:,} deadlines: {verdict}"
        )


def _time(seconds: float) -> str:
    """Return a lateness in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Pacing:
    """What one process kept of its timing: every lateness, s, and its pipes."""

    late_s: _Floats
    pipes: tuple[PipeFidelity, ...]


def pacing(clock: Clock, pipes: Iterable[Pipe], *, origin_s: float = 0.0) -> Pacing:
    """Return how a finished run went in this process; it began at ``origin_s`` of its clock."""
    judged = (_judge(pipe, origin_s) for pipe in pipes)
    return Pacing(np.array(clock.late_s), tuple(found for found in judged if found is not None))


def save_pacing(folder: Path, name: str, found: Pacing) -> None:
    """Leave a process's pacing where whoever started it looks for it."""
    np.save(folder / f"{name}.pacing.npy", found.late_s)


def load_pacing(folder: Path, name: str) -> Pacing | None:
    """Return the lateness that a process left, and remove the file; None if it left none."""
    path = folder / f"{name}.pacing.npy"
    try:
        late_s = np.load(path)
    except (OSError, ValueError):
        return None
    path.unlink()
    return Pacing(late_s, ())


def judge(parts: Sequence[Pacing]) -> Fidelity:
    """Judge a finished wall-clock run by all of its processes."""
    late = np.concatenate([part.late_s for part in parts])
    p50, p99 = np.percentile(late if len(late) else np.zeros(1), (50, 99))
    return Fidelity(
        float(p50), float(p99), len(late), tuple(pipe for part in parts for pipe in part.pipes)
    )


def measure(clock: Clock, pipes: Iterable[Pipe]) -> Fidelity:
    """Judge a finished wall-clock run of one process."""
    return judge([pacing(clock, pipes)])


def _judge(pipe: Pipe, origin_s: float) -> PipeFidelity | None:
    log = pipe.log
    if log is None or not len(log.nbytes):
        return None
    due, done = np.asarray(log.due_s) - origin_s, np.asarray(log.done_s) - origin_s
    sizes = np.asarray(log.nbytes, dtype=float)
    windows = int(max(due.max(), done.max()) / WINDOW_S) + 1
    edges: _Floats = np.arange(windows + 1, dtype=np.float64) * WINDOW_S
    asked_by = _moved_by(edges, due, sizes)
    asked, got = np.diff(asked_by), np.diff(_moved_by(edges, done, sizes))
    full = np.bincount((due / WINDOW_S).astype(int), minlength=windows) >= MIN_TRANSFERS
    whole = edges[1:] <= due.max()
    # What is no later than lateness may be, at the edge of a window, is no error of bandwidth.
    at_edge = asked_by - _moved_by(edges - MAX_LATE_P99_S, due, sizes)
    slack = np.maximum(at_edge[:-1], at_edge[1:])
    error = np.maximum(np.abs(got - asked) - slack, 0)[full] / asked[full]
    return PipeFidelity(
        pipe.name,
        float(error.max()) if len(error) else 0.0,
        float(asked.max() / WINDOW_S),
        int((full & whole).sum()),
    )


def _moved_by(when_s: _Floats, ends_s: _Floats, sizes: _Floats) -> _Floats:
    """Return the bytes moved by each time; a transfer counts evenly from the end of the last."""
    order = np.argsort(ends_s, kind="stable")
    moved = np.concatenate(([0.0], np.cumsum(sizes[order])))
    return np.interp(when_s, np.concatenate(([0.0], ends_s[order])), moved)
