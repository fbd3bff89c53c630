"""A tier that lives inside the process of a serving engine: a wall clock in one background thread.

An engine's scheduler and worker are ordinary blocking code; a tier (``kv.connector.Connector``) is
asyncio on a clock. ``EmbeddedTier`` runs the tier's clock in a thread of its own and carries the
calls of any other thread to it. Nothing here makes an engine wait: ``submit_*`` returns a
``Submission`` at once, whose ``completion`` appears when the work has ended.

What it promises beyond the contract: every submission ends, also if the tier raises, hangs
(``work_deadline_s``), dies or is closed; and ``close`` returns within ``close_deadline_s``,
whatever the tier does. Whatever went wrong, no key is HIT or STORED that the tier did not call so.

Units: s. Left out: tiers in another process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TypeVar

from cxlbench.emu.clock import Clock, WallClock
from cxlbench.emu.memory import Buffer
from cxlbench.kv.connector import Completion, Connector, Ticket, Work, held
from cxlbench.kv.results import KeyResult

T = TypeVar("T")

START_DEADLINE_S = 60.0
WORK_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 10.0

_log = logging.getLogger("cxlbench.kv.embedded")


class EmbeddedTierError(RuntimeError):
    """The tier did not start, is closed, or did not end in time."""


class Submission:
    """A piece of work that a tier was given; any thread may look whether it has ended."""

    __slots__ = ("_completion", "_ended", "keys", "request_id", "work")

    def __init__(self, request_id: int, work: Work, keys: int) -> None:
        self.request_id = request_id
        self.work = work
        self.keys = keys
        self._completion: Completion | None = None
        self._ended = threading.Event()

    @property
    def completion(self) -> Completion | None:
        """How the work ended, or None while it goes on."""
        return self._completion

    def wait(self, timeout_s: float) -> Completion:
        """Wait for the end; raise TimeoutError if it does not come within ``timeout_s``."""
        self._ended.wait(timeout_s)
        if self._completion is None:
            raise TimeoutError(f"the {self.work.value} has not ended after {timeout_s} s")
        return self._completion

    def _end(self, completion: Completion) -> bool:
        if self._completion is not None:
            return False
        self._completion = completion
        self._ended.set()
        return True


class EmbeddedTier:
    """A tier on a wall clock in a background thread. All methods may be called from any thread.

    ``build`` is called in that thread and makes the tier on the clock that it gets.

    Raises:
        EmbeddedTierError: the tier could not be built.
    """

    def __init__(
        self,
        build: Callable[[Clock], Connector],
        *,
        name: str = "tier",
        start_deadline_s: float = START_DEADLINE_S,
        work_deadline_s: float = WORK_DEADLINE_S,
        close_deadline_s: float = CLOSE_DEADLINE_S,
    ) -> None:
        self.name = name
        self.work_deadline_s = work_deadline_s
        self.close_deadline_s = close_deadline_s
        self.refused_calls = 0
        """Calls that the tier answered with an exception: a bug on one of the two sides."""
        self._request_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._accepting = False
        self._abandoned = False
        self._closing = False
        self._open: set[Submission] = set()
        self._failure: BaseException | None = None
        # Of the tier's thread only:
        self._clock: Clock
        self._connector: Connector
        self._stop: asyncio.Future[None]
        self._stores: Counter[int] = Counter()
        self._release_later: set[int] = set()

        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(build,), name=f"cxlbench-{name}", daemon=True
        )
        self._thread.start()
        if not self._started.wait(start_deadline_s):
            self._abandoned = True
            raise EmbeddedTierError(f"{name} was not built within {start_deadline_s} s")
        if not self._accepting:
            error = self._failure
            raise EmbeddedTierError(f"{name} could not be built: {error}") from error

    # -- the contract, for other threads ----------------------------------------------------------

    def new_request_id(self) -> int:
        """Return a request id that no other user of this tier has."""
        return next(self._request_ids)

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Submission:
        """As the contract's; the results are for ``keys[matched:]``."""
        return self._submit(
            Submission(request_id, Work.LOOKUP, len(keys) - matched),
            lambda tier: tier.submit_lookup(request_id, keys, size_bytes, matched=matched),
        )

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        """As the contract's. Never use the buffers again after an end that is not all HIT."""
        return self._submit(
            Submission(request_id, Work.LOAD, len(keys)),
            lambda tier: tier.submit_load(request_id, keys, buffers),
        )

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Submission:
        """As the contract's."""
        return self._submit(
            Submission(request_id, Work.STORE, len(keys)),
            lambda tier: tier.submit_store(request_id, keys, buffers),
        )

    def release(self, request_id: int) -> None:
        """Give back what the request holds, now: what it has open is cancelled."""
        self._post(self._do_release, request_id)

    def release_after_stores(self, request_id: int) -> None:
        """Give back what the request holds as soon as the stores submitted for it have ended."""
        self._post(self._do_release_after_stores, request_id)

    # -- looking after it -------------------------------------------------------------------------

    def ask(self, question: Callable[[Connector], T], *, timeout_s: float = 10.0) -> T:
        """Return ``question(tier)``, asked in the tier's thread."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def put() -> None:
            try:
                answer.set_result(question(self._connector))
            except Exception as error:
                answer.set_exception(error)

        if not self._post(put):
            raise EmbeddedTierError(f"{self.name} is closed")
        return answer.result(timeout_s)

    def at_rest(self) -> dict[str, int]:
        """Count what is held, by name: the tier's own counts, and what this façade keeps."""
        counts = dict(self.ask(lambda tier: tier.at_rest()))
        with self._lock:
            counts["open submissions"] = len(self._open)
        counts["releases to come"] = len(self._release_later)
        return counts

    def settle(self, deadline_s: float) -> dict[str, int]:
        """Wait until nothing is held, at most ``deadline_s``; return what still is."""
        settled = threading.Event()

        async def watch() -> None:
            end = self._clock.real() + deadline_s
            while held(self._connector) or self._open or self._release_later:
                if self._clock.real() > end:
                    return
                await self._clock.sleep_until(self._clock.real() + 0.001)
            settled.set()

        self._post(lambda: self._clock.spawn(watch()))
        settled.wait(deadline_s)
        return {name: count for name, count in self.at_rest().items() if count}

    def close(self) -> None:
        """End all work and the thread. A second call does nothing.

        Raises:
            EmbeddedTierError: the tier's thread did not end in time. It is left behind (it does not
                keep the process alive); everything submitted has ended as CANCELLED.
        """
        self._closing = True
        self._post(self._let_stop, last=True)
        self._thread.join(self.close_deadline_s)
        self._end_all(KeyResult.CANCELLED)
        if self._thread.is_alive():
            raise EmbeddedTierError(
                f"{self.name} did not end within {self.close_deadline_s} s and was left behind"
            )

    # -- from other threads to the tier's ---------------------------------------------------------

    def _post(self, call: Callable[..., object], *args: object, last: bool = False) -> bool:
        """Run ``call`` in the tier's thread; False if it is closed. ``last`` closes it."""
        with self._lock:
            open_until_now = self._accepting
            if open_until_now:
                # A fresh context: the caller may itself live on a clock with a logical time.
                self._clock.loop.call_soon_threadsafe(call, *args, context=Context())
                self._accepting = not last
            return open_until_now

    def _submit(self, submission: Submission, call: Callable[[Connector], Ticket]) -> Submission:
        with self._lock:
            self._open.add(submission)
        if not self._post(self._start, submission, call):
            self._end(submission, KeyResult.CANCELLED)
        return submission

    # -- in the tier's thread ---------------------------------------------------------------------

    def _run(self, build: Callable[[Clock], Connector]) -> None:
        try:
            with WallClock() as clock:
                try:
                    clock.run(self._live(build, clock))
                finally:
                    with self._lock:
                        self._accepting = False  # before the loop is closed
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                _log.exception("%s ended with an error", self.name)
        finally:
            self._end_all(KeyResult.CANCELLED if self._closing else KeyResult.ERROR)
            self._started.set()

    async def _live(self, build: Callable[[Clock], Connector], clock: Clock) -> None:
        self._clock = clock
        self._stop = clock.future()
        self._connector = build(clock)
        if not self._abandoned:
            self._accepting = True
            self._started.set()
            await self._stop
        async with asyncio.timeout(self.close_deadline_s / 2):
            await self._connector.close()

    def _let_stop(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    def _start(self, submission: Submission, call: Callable[[Connector], Ticket]) -> None:
        if submission.work is Work.STORE:
            self._stores[submission.request_id] += 1
        try:
            ticket = call(self._connector)
        except Exception:
            self.refused_calls += 1
            _log.exception("%s refused a %s", self.name, submission.work.value)
            self._finish(submission, KeyResult.ERROR)
            return
        alarm = self._clock.call_at(
            self._clock.now() + self.work_deadline_s, self._too_late, submission
        )
        follow = self._follow(submission, ticket, alarm)
        # A task that is cancelled before its first step leaves its coroutine as it was.
        self._clock.spawn(follow).add_done_callback(lambda _: follow.close())

    async def _follow(self, submission: Submission, ticket: Ticket, alarm: asyncio.Handle) -> None:
        outcome: Completion | KeyResult = KeyResult.CANCELLED
        try:
            outcome = await ticket.done.wait()
            self._connector.poll()  # the tickets say it all; this keeps the list short
        finally:
            alarm.cancel()
            self._finish(submission, outcome)

    def _too_late(self, submission: Submission) -> None:
        _log.error("%s: a %s took too long", self.name, submission.work.value)
        self._finish(submission, KeyResult.TIMEOUT)
        self._do_release(submission.request_id)

    def _finish(self, submission: Submission, outcome: Completion | KeyResult) -> None:
        request_id = submission.request_id
        if self._end(submission, outcome) and submission.work is Work.STORE:
            self._stores[request_id] -= 1
            if not self._stores[request_id]:
                del self._stores[request_id]
                if request_id in self._release_later:
                    self._do_release(request_id)

    def _do_release_after_stores(self, request_id: int) -> None:
        if request_id in self._stores:
            self._release_later.add(request_id)
        else:
            self._do_release(request_id)

    def _do_release(self, request_id: int) -> None:
        self._release_later.discard(request_id)
        self._connector.release(request_id)

    # -- ends, from any thread --------------------------------------------------------------------

    def _end(self, submission: Submission, outcome: Completion | KeyResult) -> bool:
        if isinstance(outcome, KeyResult):
            results = (outcome,) * submission.keys
            outcome = Completion(submission.request_id, submission.work, results)
        with self._lock:
            self._open.discard(submission)
            return submission._end(outcome)

    def _end_all(self, result: KeyResult) -> None:
        with self._lock:
            left = list(self._open)
        for submission in left:
            self._end(submission, result)
