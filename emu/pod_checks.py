"""All checks of a run in one place: what they know, and the first failure that they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cxlbench.emu.causality import History, StaleLoad
from cxlbench.emu.pod_failure import Failure, Kind
from cxlbench.emu.pod_model import Line, Store
from cxlbench.emu.race_checks import Sections, WriteRaces, carrier, regress

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_task import TaskMemory


class Checks:
    """The checker of one run. A task that finds a failure stops there for good."""

    def __init__(self, run: Run, ignore: frozenset[Kind]) -> None:
        self.history = History()
        self.races = WriteRaces()
        self.sections = Sections()
        self.invariants: list[Callable[[], object]] = []
        self.failure: Failure | None = None
        self._run = run
        self._ignore = ignore

    def fail(self, kind: Kind, task: TaskMemory | None, message: str, **about: Any) -> None:
        """Note the first failure, unless its kind is ignored."""
        if self.failure is None and kind not in self._ignore:
            index = -1 if task is None else task.index
            failure = Failure(kind, self._run.step, index, message, **about)
            trace = self._run.trace
            self.failure = failure if trace is None else trace.judged(failure)

    def stale_load(self, task: TaskMemory, stale: StaleLoad) -> None:
        """Fail with a violation of causality, unless the task is in an optimistic section."""
        if task.provisional is not None:
            task.provisional.append(stale)
            return
        told = f"{task.name} loaded an older value than one that it knows of"
        word, got, missed = stale.word, stale.got, stale.missed
        self.fail(Kind.CAUSALITY, task, told, word=word, earlier=got, later=missed)
        self._run.halt_if_failed()

    def stored(self, task: TaskMemory, word: int, stored: Store) -> None:
        """Put a store that is about to happen into the history, and look for races."""
        previous = self.history.add(word, stored)
        races = self.races
        if (
            previous is not None
            and previous.tick > stored.known[previous.writer]
            and races.on_word(previous)
        ):
            told = "two stores to one word, and nothing orders them"
            self.fail(Kind.WRITE_RACE, task, told, word=word, earlier=previous, later=stored)
            self._run.halt_if_failed()
        other = races.on_line(word >> 3, stored)
        if other is not None:
            told = (
                "two nodes store to one line, and nothing orders them; caches write whole lines"
                " back, so one store can undo the other"
            )
            self.fail(Kind.LINE_RACE, task, told, word=word, earlier=other, later=stored)
            self._run.halt_if_failed()

    def landed(self, node: int, line: int, old: Line, new: Line, stores: Sequence[Store]) -> None:
        """Look whether what landed put something back; the origin of ``new`` was not ``old``."""
        index = regress(old, new)
        if index is not None:
            told = f"what node {node} wrote back replaced a newer word in the device"
            later = old[index]
            self.fail(
                Kind.REGRESS,
                None,
                told,
                word=line * 8 + index,
                earlier=new[index],
                later=later,
                carrier=carrier(stores, later),
            )

    def entered(self, task: TaskMemory, lock: int) -> None:
        """Enter critical section ``lock``; fail if somebody is inside or waits too long."""
        same_node = [other.index for other in task.node.tasks]
        conflict = self.sections.enter(lock, task.index, same_node)
        if conflict is None:
            return
        other = self._run.tasks[conflict[0]]
        told = f"{task.name} entered critical section {lock}"
        if conflict[1]:
            told += f"; {other.name} is inside" + (", dead and not fenced" if other.dead else "")
            self.fail(Kind.EXCLUSION, task, told)
        else:
            often = f"more than {self.sections.bound} times"
            told += f": other nodes did so {often} while {other.name} waits"
            self.fail(Kind.WAITING, other, told)
        self._run.halt_if_failed()

    def check_invariants(self) -> None:
        """Look whether all invariants hold at this moment."""
        for invariant in self.invariants:
            told = f"invariant {getattr(invariant, '__name__', invariant)} does not hold"
            try:
                if invariant() is not False:
                    continue
            except AssertionError as error:
                told += f": {error}"
            self.fail(Kind.INVARIANT, self._run.current, told)

    def hang(self, why: str) -> None:
        """Fail because nobody can go on, or somebody goes on for ever."""
        waiting = [task for task in self._run.tasks if not task.dead and not task.daemon]
        self.fail(Kind.HANG, None, f"{why}: {', '.join(task.name for task in waiting)}")
