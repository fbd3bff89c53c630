"""One source, two clocks: the asyncio loops that every model and every system runs on.

``WallClock`` runs tasks in real time with sub-millisecond timers; ``VirtualClock`` jumps to the
next timer whenever nothing is ready. The program text is the same. All times are seconds since
the clock was made (or, shared between processes, since the machine was started); nothing else in
the project reads a system clock.

Two rules make the wall clock comparable with the virtual one:

* *Logical time.* ``now()`` is the deadline that woke the current task, not the moment at which
  Python got round to it, so a chain of steps does not add up its wake-up delays. The difference is
  kept as lateness. ``real()`` is the actual time: measured latencies end at ``real()``.
* *Timer order.* Both loops fire one deadline at a time and run everything that it makes ready
  before they take the next, so overdue work is done in the order of its deadlines.

Left out: executors and sockets under the virtual clock (their completion has no virtual time).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import select
import selectors
import signal
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar
from types import FrameType
from typing import Any, Literal, Self, TypeVar

T = TypeVar("T")

SPIN_S = 120e-6
"""How long before a deadline the wall clock stops sleeping in the kernel and spins."""

LATE_KEPT = 1 << 20
"""How many latenesses a wall clock remembers at most; then it forgets the older half."""

POLL_EVERY = 16
"""Busy loop turns between two looks at the file descriptors."""

FD_SETSIZE = 1024
"""Descriptors from here on cannot be waited for by ``select``."""

_logical: ContextVar[float] = ContextVar("cxlbench_logical_time")


class DeadlockError(RuntimeError):
    """Virtual time cannot go on: tasks wait, but no timer is set that could wake them."""


class _TimerLoop(asyncio.BaseEventLoop):
    """An event loop with first-in-first-out timers and counters of what it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = 0
        self.callbacks = 0
        self._heap: list[tuple[float, int, asyncio.Future[None] | asyncio.Handle]] = []
        self._ready: Any  # the deque of BaseEventLoop

    def wake_at(self, when: float) -> asyncio.Future[None]:
        """Return a future that is done at ``when``; cheaper than a handle and a callback."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.timers += 1
        heapq.heappush(self._heap, (when, self.timers, future))
        return future

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.timers += 1
        heapq.heappush(self._heap, (when, self.timers, handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled handle in the heap: it is skipped when its time comes."""

    def _next_deadline(self) -> float | None:
        heap = self._heap
        while heap:
            timer = heap[0][2]
            done = timer.done() if isinstance(timer, asyncio.Future) else timer.cancelled()
            if not done:
                return heap[0][0]
            heapq.heappop(heap)
        return None

    def _fire(self, when: float) -> None:
        """Make ready what waits for exactly ``when``."""
        heap, ready = self._heap, self._ready
        while heap and heap[0][0] == when:
            timer = heapq.heappop(heap)[2]
            if isinstance(timer, asyncio.Future):
                if not timer.done():
                    timer.set_result(None)
            elif not timer.cancelled():
                ready.append(timer)

    def _run_ready(self) -> None:
        ready = self._ready
        count = len(ready)
        self.callbacks += count
        for _ in range(count):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


class _VirtualLoop(_TimerLoop):
    """Time is the deadline of the last timer fired."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            when = self._next_deadline()
            if when is None:
                raise DeadlockError(
                    f"nothing can happen after {self._now:.6f} s: {_describe_waiting(self)}"
                )
            if when > self._now:
                self._now = when
            self._fire(when)
        self._run_ready()

    def _write_to_self(self) -> None:
        """No other thread may talk to a virtual loop, so there is nobody to wake."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("virtual time cannot wait for a thread: its completion has no time")


class _WallLoop(_TimerLoop, asyncio.SelectorEventLoop):
    """Real time, with timers accurate to microseconds.

    The stock loop hands its timeout to epoll, which rounds up to 1 ms. Here the epoll (kqueue)
    descriptor itself is waited for by ``select``, which takes microseconds.
    """

    def __init__(self, origin_s: float | None = None) -> None:
        self._origin = time.monotonic() if origin_s is None else origin_s
        self._turn = 0
        asyncio.SelectorEventLoop.__init__(self, selectors.DefaultSelector())
        self.timers = 0
        self.callbacks = 0
        self._heap = []
        fileno = getattr(self._selector, "fileno", None)  # type: ignore[attr-defined]
        descriptor = fileno() if fileno is not None else FD_SETSIZE
        self._wait_fd: int | None = descriptor if descriptor < FD_SETSIZE else None

    def time(self) -> float:
        return time.monotonic() - self._origin

    def _poll(self, timeout: float) -> None:
        """Wait at most ``timeout`` s for a descriptor, and queue the callbacks of those ready."""
        selector = self._selector  # type: ignore[attr-defined]
        if self._wait_fd is None:
            events = selector.select(timeout)
        elif select.select((self._wait_fd,), (), (), timeout)[0]:
            events = selector.select(0)
        else:
            return
        self._process_events(events)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        self._turn += 1
        if self._ready:
            if self._turn % POLL_EVERY == 0:
                self._poll(0)
        else:
            when = self._next_deadline()
            if when is None:
                self._poll(3600.0 if not self._stopping else 0)  # type: ignore[attr-defined]
            else:
                left = when - self.time()
                if left > SPIN_S:
                    self._poll(left - SPIN_S)
                elif self._turn % POLL_EVERY == 0:
                    self._poll(0)
                if not self._ready and self._spin(when):
                    self._fire(when)
        self._run_ready()

    def _spin(self, when: float) -> bool:
        """Spin to ``when``; False if a descriptor's wait ended early and there is time left."""
        if when - self.time() > SPIN_S:
            return False
        # Yielding gives up the GIL (threads that move bytes must not wait for the spinner);
        # time.sleep(0) would too, but takes the kernel's 50 us of timer slack.
        origin, monotonic = self._origin, time.monotonic
        while monotonic() - origin < when:
            os.sched_yield()
        return True


class Clock:
    """What a run needs of time. Use ``WallClock`` or ``VirtualClock``."""

    kind: Literal["wall", "virtual"]
    records = False
    """Whether every deadline and transfer is logged, for the fidelity line of a run that ends."""

    def __init__(self, loop: _TimerLoop) -> None:
        self._loop = loop
        self.late_s = array("d")
        """Lateness of the last deadlines, s, in the order of waking; empty in virtual time."""
        self._main: asyncio.Task[Any] | None = None
        self._crash: BaseException | None = None

    # -- time -------------------------------------------------------------------------------

    def now(self) -> float:
        """Logical time of the running task, s."""
        raise NotImplementedError

    def real(self) -> float:
        """Actual time, s; equals ``now()`` in virtual time."""
        return self._loop.time()

    def sleep_until(self, when: float) -> Awaitable[None]:
        """Wait until ``when`` (at once if it is past); afterwards ``now() >= when``."""
        raise NotImplementedError

    def sleep(self, delay_s: float) -> Awaitable[None]:
        """Wait ``delay_s`` from the task's logical time."""
        return self.sleep_until(self.now() + delay_s)

    async def breathe(self) -> None:
        """Between two pieces of real work that take no emulated time: let due tasks go first."""

    def advance(self, when: float) -> None:
        """Note that the running task depends on something that happened at ``when``."""

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Run ``callback`` at ``when``; the handle returned can cancel it."""
        return self._loop.call_at(when, callback, *args)

    # -- tasks ------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> Job[T]:
        """Start a task; its logical time begins at the caller's."""
        return Job(self, work, name)

    async def gather(self, *works: Coroutine[Any, Any, T]) -> list[T]:
        """Run ``works`` at once, and return their results in order.

        The first that fails cancels the others, and its error is raised when all have ended.
        """
        jobs = [self.spawn(work) for work in works]
        tasks = [job.task for job in jobs]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            left = [job for job in jobs if not job.done()]
            for job in left:
                job.cancel()
            for job in left:
                await job.ended()
        failed = [task for task in tasks if not task.cancelled() and task.exception()]
        for job in sorted(jobs, key=lambda job: job.task not in failed):
            await job
        return [job.task.result() for job in jobs]

    def future(self) -> asyncio.Future[Any]:
        """Return a bare future of this clock's loop."""
        return asyncio.Future(loop=self._loop)

    # -- running ----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. Tasks that it left are cancelled.

        Ctrl-C ends ``work`` by cancellation, so that it can close what it opened, and then raises
        ``KeyboardInterrupt``; a second one raises it at once.
        """
        loop = self._loop
        self._main = task = loop.create_task(work)
        self._crash = None
        try:
            with self._interruptible():
                result = loop.run_until_complete(task)
        except BaseException as error:
            # What the cancelled work raised while it cleaned up is a consequence of the crash.
            if self._crash is not None and error is not self._crash:
                raise self._crash from error
            raise
        else:
            if self._crash is not None:
                raise self._crash
            return result
        finally:
            self._main = None
            left = asyncio.all_tasks(loop)
            for other in left:
                other.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Turn Ctrl-C into ``fail``, where it would raise in whatever task happens to run."""
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not default or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._crash is not None:
                raise KeyboardInterrupt
            self.fail(KeyboardInterrupt())
            self._loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def fail(self, error: BaseException) -> None:
        """End ``run`` with ``error``: a task that nobody awaits has crashed."""
        if self._main is not None and not self._main.done() and self._crash is None:
            self._crash = error
            self._main.cancel()

    def close(self) -> None:
        """Release the loop and its threads."""
        if not self._loop.is_closed():
            if self.kind == "wall":
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- counters ---------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The asyncio loop, for code that needs descriptors or threads (wall clock only)."""
        return self._loop

    @property
    def timers(self) -> int:
        """Timers set so far."""
        return self._loop.timers

    @property
    def callbacks(self) -> int:
        """Loop callbacks run so far."""
        return self._loop.callbacks


class VirtualClock(Clock):
    """Time that passes only when everything waits. Deterministic."""

    kind = "virtual"

    def __init__(self) -> None:
        super().__init__(_VirtualLoop())
        self.now = self._loop.time  # type: ignore[method-assign]
        self._wake_at = self._loop.wake_at

    def sleep_until(self, when: float) -> Awaitable[None]:
        """Wait until ``when`` (at once if it is past)."""
        return self._wake_at(when)


class WallClock(Clock):
    """Real time, with logical time per task and a record of every lateness.

    ``shared`` counts from the machine's start, so that the clocks of several processes agree and
    times can be sent from one to another. A process that serves without end does not ``record``.
    """

    kind = "wall"

    def __init__(self, *, shared: bool = False, record: bool = True) -> None:
        super().__init__(_WallLoop(0.0 if shared else None))
        self.records = record

    def now(self) -> float:
        """Logical time of the running task, s; actual time for a task that never waited."""
        logical = _logical.get(None)
        return self._loop.time() if logical is None else logical

    async def sleep_until(self, when: float) -> None:
        """Wait until ``when``, and record how late the task was woken."""
        await self._loop.wake_at(when)
        if self.records:
            late_s = self.late_s
            late_s.append(self._loop.time() - when)
            if len(late_s) > LATE_KEPT:
                del late_s[: LATE_KEPT // 2]
        self.advance(when)

    async def breathe(self) -> None:
        """Let everything run that is due by now; logical time stands still."""
        await self._loop.wake_at(self._loop.time())

    def advance(self, when: float) -> None:
        """Move the running task's logical time up to ``when``; it never goes back."""
        logical = _logical.get(None)
        if logical is None or when > logical:
            _logical.set(when)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Run ``callback`` at ``when``, which is also its logical time."""
        context = Context()
        context.run(_logical.set, when)
        return self._loop.call_at(when, callback, *args, context=context)

    def call_when(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Run ``callback`` at logical time ``when``: at once if that is past, else by a timer."""
        if when > self._loop.time():
            self.call_at(when, callback, *args)
        else:
            context = Context()
            context.run(_logical.set, when)
            context.run(callback, *args)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; its logical time begins now."""

        async def started() -> T:
            _logical.set(self._loop.time())
            return await work

        return super().run(started())


class Job(Awaitable[T]):
    """A running task. Awaiting it gives the result and joins its logical time."""

    __slots__ = ("_clock", "_ended_s", "task")

    def __init__(self, clock: Clock, work: Coroutine[Any, Any, T], name: str | None) -> None:
        self._clock = clock
        self._ended_s = 0.0
        self.task: asyncio.Task[T] = asyncio.Task(
            self._run(work) if clock.kind == "wall" else work, loop=clock._loop, name=name
        )
        if clock.kind == "wall":
            # A task that is cancelled before its first step never gets to its work.
            self.task.add_done_callback(lambda _: work.close())

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            self._ended_s = self._clock.now()

    def __await__(self) -> Any:
        result = yield from self.task.__await__()
        self._clock.advance(self._ended_s)
        return result

    def cancel(self) -> None:
        """Ask the task to stop."""
        self.task.cancel()

    async def ended(self) -> None:
        """Wait for the end, however it ends, and join its logical time."""
        await asyncio.wait((self.task,))
        self._clock.advance(self._ended_s)

    def done(self) -> bool:
        """Whether the task has ended."""
        return self.task.done()

    def add_done_callback(self, callback: Callable[[asyncio.Task[T]], object]) -> None:
        """Call back when the task has ended."""
        self.task.add_done_callback(callback)


class JobSet:
    """The background tasks of one owner. A crash in one of them ends the run with its error."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[Job[Any], None] = {}

    def __len__(self) -> int:
        """Tasks that have not ended."""
        return len(self._jobs)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> Job[T]:
        """Start a task and keep it until it ends."""
        job = self._clock.spawn(work, name=name)
        self._jobs[job] = None

        def ended(task: asyncio.Task[T]) -> None:
            del self._jobs[job]
            if not task.cancelled() and (error := task.exception()) is not None:
                self._clock.fail(error)

        job.add_done_callback(ended)
        return job

    async def join(self) -> None:
        """Wait until all tasks, also those started meanwhile, have ended."""
        while self._jobs:
            await next(iter(self._jobs)).ended()

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their end."""
        for job in list(self._jobs):
            job.cancel()
        await self.join()


def _describe_waiting(loop: asyncio.AbstractEventLoop) -> str:
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    if not tasks:
        return "no task is left"
    names = []
    for task in tasks:
        frame = task.get_stack(limit=1)
        where = f"{frame[0].f_code.co_qualname}:{frame[0].f_lineno}" if frame else "?"
        names.append(f"{task.get_name()} at {where}")
    more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
    return f"{len(tasks)} tasks wait for each other: {', '.join(sorted(names)[:5])}{more}"
