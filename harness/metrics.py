"""What a replay measured: per request, per block read, per turn.

Latencies run from when the work was due to when its result was really there, so a host that is too
slow shows; ``read bandwidth`` of a turn is the bytes read in it over the time in which at least one
of its blocks was being read. Bytes and bandwidth are reported at full size (times the scale).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cxlbench.harness.worker import RequestRecord
from cxlbench.kv.connector import BlockTimes

OTHER_TURNS = 0
"""The turn under which requests beyond the reported turns are collected."""


@dataclass(slots=True)
class BlockLog:
    """Every block read of a run, in columns: turn, asked, due and done (s), bytes."""

    turn: array[int] = field(default_factory=lambda: array("i"))
    asked_s: array[float] = field(default_factory=lambda: array("d"))
    due_s: array[float] = field(default_factory=lambda: array("d"))
    done_s: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))

    def add(self, turn: int, times: BlockTimes) -> None:
        """Append one block read."""
        self.turn.append(turn)
        self.asked_s.append(times.asked_s)
        self.due_s.append(times.due_s)
        self.done_s.append(times.done_s)
        self.nbytes.append(times.nbytes)

    def latencies_s(self) -> npt.NDArray[np.float64]:
        """Return how long each read took, from asked to done."""
        return _column(self.done_s) - _column(self.asked_s)

    def due_latencies_s(self) -> npt.NDArray[np.float64]:
        """Return how long each read took on the emulated hardware."""
        return _column(self.due_s) - _column(self.asked_s)


def _column(values: array[float]) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity, s."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Spread:
        """Summarize; all zero where there is nothing."""
        data = np.asarray(values, dtype=float)
        if not data.size:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(data, (50, 90, 99))
        return cls(int(data.size), float(data.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One turn of the conversations."""

    turn: int
    requests: int
    reusable_blocks: int
    seen_blocks: int
    gpu_blocks: int
    tier_blocks: int
    read_bytes: int
    read_bytes_per_s: float
    block_read: Spread
    ttft: Spread

    @property
    def hit_rate(self) -> float:
        """Blocks not computed again, of those that had been computed before."""
        return (self.gpu_blocks + self.tier_blocks) / max(self.seen_blocks, 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's outcome. Blocks are counted, bytes and bandwidth are at full size."""

    requests: int
    duration_s: float
    reusable_blocks: int
    seen_blocks: int
    gpu_blocks: int
    tier_blocks: int
    announced_blocks: int
    looked_up_blocks: int
    stored_blocks: int
    skipped_blocks: int
    recovered_blocks: int
    failed_stores: int
    wrong_blocks: int
    mismatched_blocks: int
    timed_out_blocks: int
    failed_loads: int
    evicted_blocks: int
    read_bytes: int
    block_read: Spread
    block_due: Spread
    """Of the same reads, until the emulated hardware had the bytes."""
    block_late: Spread
    """From there until they were really in place: the host's share; 0 in virtual time."""
    ttft: Spread
    turns: tuple[TurnFigures, ...]
    timers_per_block: float
    callbacks_per_block: float
    injected: Mapping[str, int]
    """By ``point kind``; 0 for what the fault plan holds and never happened."""
    held_at_rest: Mapping[str, int]
    lost_blocks: int = 0
    """Stored, and then not kept by a device whose SSDs refused them: misses."""
    failed_writes: int = 0
    """Writes that the SSDs, or the files under them, refused; tried again a few times."""

    @property
    def hit_rate(self) -> float:
        """Blocks not computed again, of those that had been computed before."""
        return (self.gpu_blocks + self.tier_blocks) / max(self.seen_blocks, 1)

    @property
    def tier_hit_rate(self) -> float:
        """Blocks delivered by the tier, of those computed before that the GPU did not have."""
        return self.tier_blocks / max(self.seen_blocks - self.gpu_blocks, 1)

    @property
    def read_bytes_per_s(self) -> float:
        """Bandwidth of the turn that read the most."""
        return max((turn.read_bytes_per_s for turn in self.turns), default=0.0)


def busy_s(begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> float:
    """Return the length of the union of intervals, s."""
    if not len(begin):
        return 0.0
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(begin[1:] - end[:-1], 0).sum()
    return float(end[-1] - begin[0] - gaps)


def turn_figures(
    records: list[RequestRecord], blocks: BlockLog, *, scale: float, max_turns: int
) -> tuple[TurnFigures, ...]:
    """Summarize per turn, from 1 on; turns beyond ``max_turns`` are joined as turn 0, last."""
    turn_of = np.minimum(np.asarray(blocks.turn, dtype=int), max_turns + 1)
    asked, done = np.asarray(blocks.asked_s), np.asarray(blocks.done_s)
    nbytes = np.asarray(blocks.nbytes)
    rows = []
    by_turn: dict[int, list[RequestRecord]] = {}
    for record in records:
        by_turn.setdefault(min(record.turn, max_turns + 1), []).append(record)
    for turn in sorted(by_turn):
        mine, here = by_turn[turn], turn_of == turn
        read = int(nbytes[here].sum() * scale) if len(nbytes) else 0
        busy = busy_s(asked[here], done[here]) if len(nbytes) else 0.0
        rows.append(
            TurnFigures(
                turn if turn <= max_turns else OTHER_TURNS,
                len(mine),
                sum(r.reusable for r in mine),
                sum(r.seen for r in mine),
                sum(r.matched for r in mine),
                sum(r.loaded for r in mine),
                read,
                read / busy if busy else 0.0,
                Spread.of(done[here] - asked[here] if len(nbytes) else ()),
                Spread.of([r.ttft_s for r in mine]),
            )
        )
    return tuple(rows)
