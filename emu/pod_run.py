"""One explored run: tasks as greenlets, the memory that they share, and the checks on it.

Exactly one task runs at a time. A schedule grants a task some steps; when they are used, when the
task parks or ends, the schedule is asked again and the chosen task is switched to directly, from
greenlet to greenlet. Everything else that can happen (landings, evictions, deaths) is applied by
the schedule between steps, as a ``Choice``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from greenlet import GreenletExit, getcurrent, greenlet

from cxlbench.emu.causality import Incarnation
from cxlbench.emu.pod_checks import Checks
from cxlbench.emu.pod_failure import Failure, Kind, PodUsageError
from cxlbench.emu.pod_model import Clock, Device, Dma, Line, Store, WriteBack
from cxlbench.emu.pod_nodes import Membership, Node
from cxlbench.emu.pod_task import NS_PER_STEP, TaskMemory
from cxlbench.emu.pod_watch import Watch, Watches, where_it_stands
from cxlbench.emu.race_checks import FlushLint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cxlbench.emu.pod_schedule import Choice, Schedule
    from cxlbench.emu.pod_trace import Trace

FIRST_SLEEP_NS: Final = 1_000
"""How far the clock jumps when all tasks sleep; doubled each time."""
VAIN_POLLS: Final = 4
"""How often all tasks that pause are woken, with nothing changed in between, before they hang: no
word, nothing in flight, and not where the tasks are (see ``pod_watch.where_it_stands``)."""


class Run:
    """The state of one run, from an empty region to the end of its tasks or the first failure."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        max_steps: int,
        ignore: frozenset[Kind] = frozenset(),
        memory_type: type[TaskMemory] = TaskMemory,
        trace: Trace | None = None,
        lint: FlushLint | None = None,
    ) -> None:
        self.schedule = schedule
        self.trace = trace
        self.size_bytes = 1 << 20
        self.fence_lands = False
        self.left = -1
        """Steps that the running task may still make; every operation takes one."""
        self.tasks: list[TaskMemory] = []
        self.runnable: list[TaskMemory] = []
        self.current: TaskMemory | None = None
        self.device = Device(self)
        self.membership = Membership(self)
        self.nodes = self.membership.nodes
        self.checks = Checks(self, ignore)
        self.watches = Watches()
        self.watched = self.watches.by_line
        self.dmas: dict[int, Dma] = {}
        self.names: list[tuple[int, int, str]] = []
        self._max_steps = max_steps
        self._memory_type = memory_type
        self._lint = lint
        self._until = -1
        self._over = False
        self._hub = getcurrent()
        self._unfinished = 0
        self._dma_count = 0
        self._slept_ns = 0
        self._sleep_ns = FIRST_SLEEP_NS
        self._landings = 0
        self._vain_polls = 0
        self._last_state: tuple[object, ...] = ()
        if trace is not None:
            trace.begin(self)

    # Tasks

    def start_task(
        self,
        node: Node,
        function: Callable[..., object],
        args: tuple[Any, ...],
        *,
        name: str,
        daemon: bool,
        known: Clock = (),
    ) -> TaskMemory:
        """Make a task; it runs when the schedule says so."""
        index = len(self.tasks)
        clock = Incarnation(index + 1, known)
        for task in self.tasks:
            task.clock.room_for(clock.index)
        task = self._memory_type(self, node, index, name or f"task {index}", clock, daemon=daemon)
        task.greenlet = greenlet(lambda: self._body(task, function, args), self._hub)
        self.tasks.append(task)
        node.tasks.append(task)
        self.checks.races.incarnation(node.number)
        self._unfinished += not daemon
        self._ready(task)
        return task

    def execute(self) -> None:
        """Run until all tasks that are no daemons have ended, or something fails."""
        self.schedule.start(self)
        try:
            while (chosen := self._choose()) is not None:
                self.current = chosen
                chosen.greenlet.switch()
        finally:
            self._end()

    def bury(self, task: TaskMemory) -> None:
        """Take a task that ended or was killed out of everything."""
        task.dead = True
        if task.parked is None:
            self.runnable.remove(task)
        self.watches.forget(task)
        self.checks.sections.stop_waiting(task.index)
        task.node.tasks.remove(task)
        self._unfinished -= not task.daemon
        self.membership.ended(task)

    def _body(
        self, task: TaskMemory, function: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        try:
            function(task, *args)
        except GreenletExit:
            return
        except Exception as error:  # any exception of a program is a finding
            if not self._over and not task.dead:
                told = f"{task.name} raised {type(error).__name__}: {error}"
                self.checks.fail(Kind.EXCEPTION, task, told, traceback=traceback.format_exc())
        if not task.dead and not self._over:
            self.bury(task)
            self.left -= 1

    def _end(self) -> None:
        self._over = True
        self._until -= self.left + 1  # the step stays what it is; every operation asks from now on
        self.left = -1
        for task in self.tasks:
            if task.greenlet:
                task.greenlet.throw(GreenletExit)
            task.greenlet = None

    # Steps and switches

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self._until - self.left

    @property
    def failure(self) -> Failure | None:
        """The first failure, if there was one."""
        return self.checks.failure

    def now_ns(self) -> int:
        """Return the time that ``now()`` tells."""
        return self.step * NS_PER_STEP + self._slept_ns

    def turn(self, task: TaskMemory) -> None:
        """Let the schedule choose who goes on; return when ``task`` does."""
        chosen = self._choose()
        if chosen is task:
            return
        self.current = chosen
        if chosen is None:
            self._hub.switch()
        else:
            chosen.greenlet.switch()
        if self._over:
            raise GreenletExit

    def halt_if_failed(self) -> None:
        """Stop here for good if the run has failed."""
        if self.checks.failure is not None:
            self._hub.switch()
            raise GreenletExit

    def grant(self, steps: int) -> None:
        """Let the chosen task make that many steps before the schedule is asked again."""
        self._until += steps - 1 - self.left
        self.left = steps - 1

    def ask_within(self, steps: int) -> None:
        """Ask the schedule again after ``steps`` more steps at most."""
        if self.left >= steps:
            self._until -= self.left - steps + 1
            self.left = steps - 1

    def park(self, task: TaskMemory) -> None:
        """Suspend ``task``, which is running, until it is woken."""
        self.runnable.remove(task)
        self.left -= 1
        self.turn(task)

    def wake(self, tasks: Iterable[TaskMemory]) -> None:
        """Let parked tasks go on."""
        for task in tasks:
            if task.parked is not None and not task.dead:
                task.parked = None
                self._ready(task)

    def stir(self, tasks: Iterable[TaskMemory]) -> None:
        """Let tasks look again at whatever they watch."""
        self.wake(task for task in tasks if self.watches.anything(task))

    def _ready(self, task: TaskMemory) -> None:
        self.runnable.append(task)
        if self.schedule.eager:
            self.ask_within(1)

    def _choose(self) -> TaskMemory | None:
        if self._over:
            raise GreenletExit
        step = self._until - self.left
        if self.trace is not None:
            self.trace.stretch(self.current, step)
        if self.checks.invariants:
            self.checks.check_invariants()
        if self.checks.failure is not None or not (self._unfinished or self._suspect_the_dead()):
            return None
        if step >= self._max_steps:
            self.checks.hang(f"no end after {step} steps; a loop may be spinning without pause()")
            return None
        chosen = self.schedule.turn(self, step)
        return None if self.checks.failure is not None else chosen

    # What may happen between steps

    def apply(self, choice: Choice) -> bool:
        """Let ``choice`` happen; return whether it could."""
        what, a, b = choice
        if self.trace is not None:
            self.trace.choices.append(choice)
        if what == "dma":
            return self._copy_dma(a, b)
        if what == "time":
            return self._wake_sleepers()
        node = self.nodes.get(a)
        if node is None:
            return False
        if what == "suspect":
            return self.membership.suspect(node)
        if not node.alive:
            return False
        if what == "land":
            return node.cache.land(b)
        if what == "evict":
            return self._evict(node, b)
        if what == "fill":
            absent = b not in node.cache.lines
            node.cache.fill(b)
            return absent
        if what == "crash":
            self.membership.kill(node, b)
            return True
        raise PodUsageError(f"a schedule has no choice {what!r}")

    def landings(self) -> Iterator[Choice]:
        """Give all write-backs and DMA pieces in flight that may land now, in a fixed order."""
        for number, node in self.nodes.items():
            for line in node.cache.posted:
                yield "land", number, line
        for handle, dma in self.dmas.items():
            for piece in sorted(dma.left):
                yield "dma", handle, piece

    def last_resort(self) -> bool:
        """See to it that someone can go on, with nobody runnable and nothing in flight.

        A pause may end without a change, so all tasks that pause get to poll again. If that comes
        to nothing time after time, and nobody waits for a time or counts its polls, they hang.
        Evictions are no way out: nothing promises that hardware ever evicts a line.
        """
        if self._suspect_the_dead():
            return True
        pausing = [task for task in self.tasks if isinstance(task.parked, Watch)]
        ticks = sum(task.clock.tick for task in self.tasks)
        counts = (ticks, self._landings, self._dma_count, len(self.tasks), self._unfinished)
        state = (counts, *[where_it_stands(task) for task in pausing if not task.daemon])
        self._vain_polls = self._vain_polls + 1 if state == self._last_state else 0
        self._last_state = state
        in_hope = self._vain_polls < VAIN_POLLS or any(task.reads_clock for task in pausing)
        if in_hope and self.apply(("time", 0, 0)):
            return True
        self.checks.hang("all tasks wait and nothing is in flight that could wake them")
        return False

    def start_dma(
        self,
        task: TaskMemory,
        first_word: int,
        words: NDArray[np.int64],
        known: Clock,
        stores: Sequence[Store] | None,
    ) -> int:
        """Put a DMA in flight; return its handle."""
        self._dma_count += 1
        dma = Dma(self._dma_count, task.cache, first_word, words, known, stores)
        self.dmas[dma.handle] = dma
        for piece in range(len(dma.pieces)):
            self.schedule.in_flight(self, ("dma", dma.handle, piece))
        return dma.handle

    def _copy_dma(self, handle: int, piece: int) -> bool:
        dma = self.dmas.get(handle)
        if dma is None or piece not in dma.left:
            return False
        node = self.nodes[dma.cache.node]
        if dma.copy(piece):
            self.wake(self.watches.copy_changed(dma.pieces[piece][0], node.number))
        if not dma.left:
            self.wake([task for task in node.tasks if task.parked is dma])
            self.stir(node.tasks)
        return True

    def _evict(self, node: Node, line: int) -> bool:
        if self.trace is not None and line in node.cache.lines:
            self.trace.happened("evicts", node.number, line)
        dropped = node.cache.evict(line)
        if dropped and line in self.watched:
            self.wake(self.watches.copy_changed(line, node.number))
        return dropped

    def _suspect_the_dead(self) -> bool:
        """Suspect a node that died unnoticed; return whether its recovery starts."""
        return any(self.apply(("suspect", number, 0)) for number in self.membership.unnoticed())

    def _wake_sleepers(self) -> bool:
        self._slept_ns += self._sleep_ns
        self._sleep_ns *= 2
        pausing = [task for task in self.tasks if isinstance(task.parked, Watch)]
        self.wake(pausing)
        return bool(pausing)

    # What the memory tells (``pod_model.Observer``)

    def landed(
        self,
        node: int,
        line: int,
        old: Line,
        new: Line,
        origin: Line | None,
        stores: Sequence[Store],
    ) -> None:
        """Wake who waits for the line; see whether something newer was replaced."""
        self._landings += 1
        if self.trace is not None:
            self.trace.landed(node, line, old, new, stores)
        if line in self.watched:
            self.wake(self.watches.landed(line))
        if old is not origin:
            self.checks.landed(node, line, old, new, stores)

    def posted(self, node: int, back: WriteBack) -> None:
        """Let the schedule know of a write-back in flight."""
        if self.trace is not None:
            self.trace.posted(node, back)
        self.schedule.in_flight(self, ("land", node, back.line))

    def filled(self, node: int, line: int) -> None:
        """Let trace and lint know that a copy was taken."""
        if self.trace is not None:
            self.trace.filled(node, line)
        if self._lint is not None:
            self._lint.filled(self.nodes[node].cache, line)

    def flushes(self, task: TaskMemory, line: int, site: str) -> None:
        """Let the lint know of a flush that is about to happen."""
        if self._lint is not None:
            self._lint.flush(site, task.cache, line)
