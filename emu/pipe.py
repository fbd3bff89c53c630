"""A pipe: something that moves bytes at a bandwidth, one transfer after another.

Links, ports, SSD channels and copy engines are pipes. A transfer is one *reservation* of the
pipe's time, and costs one timer however large it is. Lower ``priority`` numbers go first; within a
priority the order is first come, first served. A transfer of higher priority that arrives while a
lower one is in service cuts it at the next chunk boundary; the rest of the cut transfer, and all
that waited behind it, move back. Who waits for a reservation re-reads its end when it wakes.

Units: bytes, bytes/s, seconds of the clock. Left out: fair sharing inside a priority (transfers
interleave at whole-object granularity) and errors on the wire.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from cxlbench.emu.clock import Clock


class Reservation:
    """A booked stretch of a pipe's time. ``end_s`` moves back if something overtakes it."""

    __slots__ = ("cost_s", "end_s", "nbytes", "pipe", "priority", "start_s")

    def __init__(self, pipe: Pipe, nbytes: int, cost_s: float, priority: int) -> None:
        self.pipe = pipe
        self.nbytes = nbytes
        self.cost_s = cost_s
        self.priority = priority
        self.start_s = 0.0
        self.end_s = 0.0


@dataclass(slots=True)
class PipeLog:
    """What a pipe promised and what came true, for the fidelity line (where the clock records)."""

    due_s: array[float] = field(default_factory=lambda: array("d"))
    done_s: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))


class Pipe:
    """Bandwidth shared by priority and by order of arrival.

    ``bytes_per_s`` may be ``math.inf``: a pipe that is never the bottleneck. ``chunk_bytes`` is
    the grain at which a transfer of higher priority can cut one of lower priority.
    """

    def __init__(
        self, clock: Clock, name: str, bytes_per_s: float, *, chunk_bytes: int = 1 << 17
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"pipe {name}: bandwidth must be positive, got {bytes_per_s} B/s")
        if chunk_bytes < 1:
            raise ValueError(f"pipe {name}: chunk must be at least 1 B, got {chunk_bytes}")
        self.clock = clock
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.chunk_bytes = chunk_bytes
        self.moved_bytes = 0
        self.busy_s = 0.0
        self.log = PipeLog() if clock.records else None
        self._queue: deque[Reservation] = deque()
        self._free_s = 0.0
        self._served_s = 0.0

    def reserve(
        self, nbytes: int, *, priority: int = 0, cost_s: float | None = None
    ) -> Reservation:
        """Book ``nbytes`` after everything of the same or a higher priority.

        ``cost_s`` replaces ``nbytes / bytes_per_s`` where a device has a law of its own.
        """
        now = self.clock.now()
        cost = nbytes / self.bytes_per_s if cost_s is None else cost_s
        booking = Reservation(self, nbytes, cost, priority)
        self.moved_bytes += nbytes
        self.busy_s += cost
        queue = self._queue
        while queue and queue[0].end_s <= now:
            self._served_s = queue.popleft().end_s
        if not queue:
            booking.start_s = now if now > self._free_s else self._free_s
            booking.end_s = self._free_s = booking.start_s + cost
            queue.append(booking)
        elif queue[-1].priority <= priority:
            booking.start_s = self._free_s
            booking.end_s = self._free_s = booking.start_s + cost
            queue.append(booking)
        else:
            self._overtake(booking, now)
        return booking

    def pending(self, priority: int) -> int:
        """Transfers of exactly ``priority`` that are booked and not finished."""
        now = self.clock.now()
        return sum(r.priority == priority and r.end_s > now for r in self._queue)

    @property
    def idle_at_s(self) -> float:
        """When everything booked so far will have ended."""
        return self._free_s

    def _overtake(self, booking: Reservation, now: float) -> None:
        """Insert ``booking`` before all of lower priority and move those back."""
        queue = self._queue
        place = len(queue)
        while place and queue[place - 1].priority > booking.priority:
            place -= 1
        # A task of the wall clock may be behind one that found earlier transfers finished.
        start = queue[place - 1].end_s if place else max(now, self._served_s)
        head = queue[0]
        if place == 0 and head.start_s < now:
            # The one in service is cut at a chunk boundary; it keeps what it has moved.
            chunk_s = max(head.cost_s * self.chunk_bytes / max(head.nbytes, 1), 1e-9)
            start = head.start_s + math.ceil((now - head.start_s) / chunk_s) * chunk_s
            if start >= head.end_s:
                place, start = 1, head.end_s
            else:
                left_s = head.end_s - start
                head.start_s, head.end_s = start, start + left_s
        booking.start_s, booking.end_s = start, start + booking.cost_s
        queue.insert(place, booking)
        at = booking.end_s
        for later in islice(queue, place + 1, None):
            length = later.end_s - later.start_s
            later.start_s, later.end_s = at, at + length
            at += length
        self._free_s = at

    def note_done(self, booking: Reservation, due_s: float, real_s: float) -> None:
        """Log when the bytes of ``booking`` were due, and when they were really in place."""
        if self.log is not None:
            self.log.due_s.append(due_s)
            self.log.done_s.append(real_s)
            self.log.nbytes.append(booking.nbytes)


async def finished(clock: Clock, *bookings: Reservation, latency_s: float = 0.0) -> None:
    """Wait until all ``bookings`` have ended, and ``latency_s`` more.

    Bookings made together on several pipes model cut-through: the slowest decides.
    """
    while True:
        end = max([booking.end_s for booking in bookings])
        await clock.sleep_until(end + latency_s)
        if max([booking.end_s for booking in bookings]) <= end:
            break
    if clock.kind == "wall":
        real = clock.real() - latency_s
        for booking in bookings:
            booking.pipe.note_done(booking, end, real)
