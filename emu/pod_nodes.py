"""Nodes of an explored pod, and how they die and come back.

A node's death kills its tasks, its cache and its local memory; of what it had in flight, some
lands. *Suspicion* declares a node dead, rightly or not, and starts its recovery on the lowest node
that lives and is not suspected; recoveries run one after the other. After ``fence(n)`` nothing of
``n`` lands any more: explored, a node that was suspected alive dies at its fence, as a real one is
killed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_model import Device, NodeCache, Store

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_task import TaskMemory


class LocalLock:
    """A lock in a node's own memory."""

    __slots__ = ("holder", "released", "waiting")

    def __init__(self) -> None:
        self.holder: TaskMemory | None = None
        self.released: Store | None = None
        """Carries what the last holder knew when it released the lock."""
        self.waiting: list[TaskMemory] = []


class Node:
    """A node from its start to its death; a restarted node is a new one with the same number."""

    __slots__ = ("alive", "cache", "fenced", "locks", "number", "suspected", "tasks", "words")

    def __init__(self, number: int, device: Device) -> None:
        self.number = number
        self.cache = NodeCache(number, device)
        self.locks: dict[int, LocalLock] = {}
        self.words: dict[int, Store] = {}
        """Words of its own memory that were stored to."""
        self.tasks: list[TaskMemory] = []
        self.alive = True
        self.suspected = False
        self.fenced = False

    def lock(self, i: int) -> LocalLock:
        """Return local lock ``i``."""
        found = self.locks.get(i)
        if found is None:
            found = self.locks[i] = LocalLock()
        return found


@dataclass(frozen=True, slots=True)
class CrashRule:
    """Which nodes may die or be suspected, how many of them, and what recovers from it."""

    nodes: Sequence[int]
    recover: Callable[..., object]
    args: tuple[Any, ...]
    at_most: int
    suspect_live: bool


class Membership:
    """The nodes of a run; who of them lives, who is thought dead, who recovers from whose death."""

    __slots__ = ("_recovery", "_run", "_unrecovered", "deaths", "nodes", "rule")

    def __init__(self, run: Run) -> None:
        self.nodes: dict[int, Node] = {}
        self.rule: CrashRule | None = None
        self.deaths = 0
        self._run = run
        self._unrecovered: list[int] = []
        self._recovery: tuple[TaskMemory, int] | None = None

    def node(self, number: int) -> Node:
        """Return the node of that number, making it at first use."""
        found = self.nodes.get(number)
        if found is None:
            found = self.nodes[number] = Node(number, self._run.device)
        return found

    def kill(self, node: Node, survivors: int) -> None:
        """Let a node die; ``survivors`` says what it had in flight lands (``NodeCache.die``)."""
        run = self._run
        self.deaths += 1
        node.alive = False
        for handle in [h for h, dma in run.dmas.items() if dma.cache is node.cache]:
            run.dmas.pop(handle).cut()
        if run.trace is not None:
            run.trace.happened("crashed", node.number, -1)
        recovery = self._recovery
        if recovery is not None and recovery[0] in node.tasks:
            self._recovery = None
            self._unrecovered.insert(0, recovery[1])
        for task in list(node.tasks):
            run.bury(task)
        node.cache.die(survivors)
        node.locks.clear()
        node.words.clear()
        if node.suspected:  # else its own suspicion is still to come
            self._recover_next()

    def suspect(self, node: Node) -> bool:
        """Declare a node dead and see to its recovery; return whether that was possible."""
        others = [n for n in self.nodes.values() if n.alive and not n.suspected and n is not node]
        if node.suspected or self.rule is None or not others:
            return False
        node.suspected = True
        if self._run.trace is not None:
            self._run.trace.happened("suspected", node.number, -1)
        self._unrecovered.append(node.number)
        self._recover_next()
        return True

    def unnoticed(self) -> list[int]:
        """Return the nodes that are dead and not suspected."""
        return [n.number for n in self.nodes.values() if not n.alive and not n.suspected]

    def ended(self, task: TaskMemory) -> None:
        """See whether a task that ended was a recovery: the next one starts."""
        if self._recovery is not None and self._recovery[0] is task:
            self._recovery = None
            self._recover_next()

    def fence(self, number: int, by: TaskMemory | None) -> None:
        """See to it that nothing of the node lands any more; it is killed if it lives."""
        run = self._run
        node = self.nodes.get(number)
        if node is None:
            raise PodUsageError(f"fence of node {number}: this pod has nodes {sorted(self.nodes)}")
        if by is not None:
            if by.node is node:
                raise PodUsageError(f"node {number} cannot fence itself")
            by.step_of("fence", number)
        if node.alive:
            survivors = run.schedule.draw(run)
            if run.trace is not None:
                run.trace.draws.append(survivors)
            self.kill(node, survivors)
        node.suspected = True
        node.fenced = True
        ended = [task for task in run.tasks if task.node is node]
        run.checks.races.fence([task.clock.index for task in ended])
        run.checks.sections.forget([task.index for task in ended])
        run.halt_if_failed()

    def restart(self, number: int) -> Node:
        """Give a fenced node a new life, with nothing in its cache and its own memory."""
        old = self.nodes.get(number)
        if old is None or not old.fenced:
            raise PodUsageError(f"restart of node {number}, which is not fenced: fence it first")
        if old.alive:
            raise PodUsageError(f"restart of node {number}, which runs again already")
        node = self.nodes[number] = Node(number, self._run.device)
        return node

    def _recover_next(self) -> None:
        rule = self.rule
        if self._recovery is not None or not self._unrecovered or rule is None:
            return
        hosts = [n for n in self.nodes.values() if n.alive and not n.suspected]
        if not hosts:
            return
        dead = self._unrecovered.pop(0)
        host = min(hosts, key=lambda node: node.number)
        task = self._run.start_task(
            host, rule.recover, (dead, *rule.args), name=f"recovery of node {dead}", daemon=False
        )
        self._recovery = task, dead
