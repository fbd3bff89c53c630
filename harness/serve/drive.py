"""How requests come to a cluster.

- *Open loop*: at their arrival times, whatever the cluster does.
- *Rounds*: ``concurrency`` requests at a time, all sessions' first turns, then all second turns,
  and so on; a turn never starts before its predecessor has ended, and a conversation that another
  one waits for comes in an earlier round. That is how conversations whose
  working set must grow with the turns are run (HyMCache's figures by turn).
- *Sessions*: ``concurrency`` sessions at a time, each to its end, with its think times.

Units: s.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.sync import Signal
from cxlbench.harness.requests import Request, Workload, WorkloadError
from cxlbench.harness.serve.cluster import Cluster


class Order(enum.StrEnum):
    """In which order requests are offered."""

    OPEN = "open-loop"
    ROUNDS = "rounds"
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """How requests come."""

    order: Order
    concurrency: int = 0
    """Requests (rounds) or sessions under way at once; not used by an open loop."""
    speed: float = 1.0
    """Divides the arrival and think times."""

    def __post_init__(self) -> None:
        if self.order is not Order.OPEN and self.concurrency < 1:
            raise WorkloadError(
                f"concurrency={self.concurrency}: {self.order} needs a concurrency of at least 1"
            )
        if not 0 < self.speed < float("inf"):
            raise WorkloadError(f"speed must be positive and finite, got {self.speed}")


async def drive(
    clock: Clock,
    cluster: Cluster,
    workload: Workload,
    how: Drive,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve ``workload``; return True, or False if ``stopping`` cut it short."""
    jobs = JobSet(clock)
    driver = _Driver(clock, cluster, workload, how, progress, stopping)
    if how.order is Order.OPEN:
        jobs.spawn(driver.open_loop(jobs))
    elif how.order is Order.ROUNDS:
        queue = iter(in_rounds(workload.requests))
        for _ in range(min(how.concurrency, len(workload.requests))):
            jobs.spawn(driver.take_requests(queue))
    else:
        workload.require_sessions("a run of whole sessions")
        sessions = iter(workload.sessions().values())
        for _ in range(min(how.concurrency, len(workload.requests))):
            jobs.spawn(driver.take_sessions(sessions))
    try:
        await jobs.join()
    except BaseException:
        await jobs.cancel()
        raise
    return not driver.stopped


def in_rounds(requests: Sequence[Request]) -> list[Request]:
    """Return requests by their turns; what a request waits for comes in an earlier round."""
    rounds: list[int] = []
    for request in requests:
        before = 0 if request.after is None else rounds[request.after]
        rounds.append(max(request.turn, before + 1))
    return sorted(requests, key=lambda request: (rounds[request.request_id], request.request_id))


class _Driver:
    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        workload: Workload,
        how: Drive,
        progress: Callable[[int, int], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.done = 0
        self.stopped = False
        """Whether a request was left out."""
        self._clock = clock
        self._cluster = cluster
        self._how = how
        self._progress = progress
        self._asked_to_stop = stopping
        self._requests = workload.requests
        self._ended: dict[int, Signal[None]] = {
            request.after: Signal(clock)
            for request in workload.requests
            if request.after is not None
        }

    def _stopping(self) -> bool:
        """Whether the next request is left out, and so all that follow."""
        self.stopped = self.stopped or self._asked_to_stop()
        return self.stopped

    async def _serve(self, request: Request) -> None:
        await self._cluster.serve(request)
        self.done += 1
        ended = self._ended.get(request.request_id)
        if ended is not None:
            ended.set(None)
        self._progress(self.done, len(self._requests))

    async def open_loop(self, jobs: JobSet) -> None:
        """Start each request at its time."""
        begin_s = self._clock.now()
        for request in self._requests:
            if self._stopping():
                return
            await self._clock.sleep_until(begin_s + request.arrival_s / self._how.speed)
            jobs.spawn(self._serve(request))

    async def take_requests(self, queue: Iterator[Request]) -> None:
        """Serve the next request of all, again and again."""
        for request in queue:
            if self._stopping():
                return
            if request.after is not None:
                await self._ended[request.after].wait()
            await self._serve(request)

    async def take_sessions(self, sessions: Iterator[tuple[Request, ...]]) -> None:
        """Serve the next session of all to its end, again and again."""
        for requests in sessions:
            for request in requests:
                if self._stopping():
                    return
                await self._clock.sleep(request.think_s / self._how.speed)
                await self._serve(request)
