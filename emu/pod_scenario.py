"""What a scenario is written with: ``def scenario(pod)`` builds nodes and tasks from functions.

The scenario function is called again for every schedule and must build the same every time; what
it shares with its tasks (lists, dictionaries, counters) it makes anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cxlbench.emu.pod_failure import Kind, PodUsageError
from cxlbench.emu.pod_host import HostMemory
from cxlbench.emu.pod_model import ZERO_LINE
from cxlbench.emu.pod_nodes import CrashRule
from cxlbench.emu.pod_ops import LINE

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run


class Pod:
    """One explored pod; the argument of a scenario.

    Nodes exist as soon as a task is run on them. ``Pod`` may be used by running tasks too, for
    ``run``, ``fence`` and ``restart``.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prepared: HostMemory | None = None
        self._at_end: list[Callable[[HostMemory], object]] = []

    def region(self, size_bytes: int) -> None:
        """Set the size of the shared region, 1 MiB if it is not set; costs nothing per byte."""
        if size_bytes <= 0 or size_bytes % LINE:
            raise PodUsageError(f"a region of {size_bytes} bytes: use a multiple of {LINE}")
        if self._prepared is not None or self._run.tasks:
            raise PodUsageError("set the region's size before the first prepare() or run()")
        self._run.size_bytes = size_bytes

    def fences_wait_for_arrival(self) -> None:
        """Let ``sfence`` and ``mfence`` land what the node has posted, as some devices may."""
        self._run.fence_lands = True

    def prepare(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(mem, *args)`` alone, before everything; return what it returns.

        What it stores is in the device and known to all when the tasks start.
        """
        if self._run.tasks:
            raise PodUsageError("prepare() comes before the first run(): tasks have been started")
        if self._prepared is None:
            self._prepared = HostMemory(self._run.size_bytes)
            self._prepared.names = self._run.names
        return function(self._prepared, *args)

    def run(
        self,
        node: int,
        function: Callable[..., object],
        *args: Any,
        name: str = "",
        daemon: bool = False,
    ) -> None:
        """Start a task that calls ``function(mem, *args)`` on ``node``.

        The run ends when all tasks that are no daemons have ended. Started by a running task, it
        knows what that task knows.
        """
        run = self._run
        place = run.membership.node(node)
        if not place.alive:
            raise PodUsageError(f"node {node} is dead: fence it, then restart it")
        starter = run.current
        known = () if starter is None else starter.clock.as_of_now()
        run.start_task(place, function, args, name=name, daemon=daemon, known=known)

    def name_range(self, off: int, n_bytes: int, name: str) -> None:
        """Name bytes of the region in reports."""
        self._run.names.append((off, n_bytes, name))

    def invariant(self, function: Callable[[], object]) -> None:
        """Check ``function()`` whenever tasks may switch: it returns False or asserts if not."""
        self._run.checks.invariants.append(function)

    def at_end(self, function: Callable[[HostMemory], object]) -> None:
        """Check ``function(mem)`` when all tasks ended and everything in flight has landed.

        ``mem`` reads what the device holds then. It returns False or asserts if all is not well.
        """
        self._at_end.append(function)

    def bounded_waiting(self, bound: int) -> None:
        """Fail if other nodes enter a critical section oftener than ``bound`` while one waits."""
        self._run.checks.sections.bound = bound

    # Nodes that die

    def is_alive(self, node: int) -> bool:
        """Return whether ``node`` has started and has not died since."""
        found = self._run.nodes.get(node)
        return found is not None and found.alive

    def on_crash(
        self,
        nodes: int | Sequence[int],
        recover: Callable[..., object],
        *args: Any,
        at_most: int = 1,
        suspect_live: bool = True,
    ) -> None:
        """Let ``nodes`` die at any step, ``at_most`` of them, and ``recover`` from it.

        A dead node is suspected some time later, and a live one may be suspected too. Then a task
        that calls ``recover(mem, dead, *args)`` starts on the lowest node that is alive and not
        suspected. It should call ``fence(dead)`` before it repairs anything. Recoveries run one
        after the other; one whose host dies begins again elsewhere, so it must be idempotent. The
        last live node never dies.
        """
        chosen = [nodes] if isinstance(nodes, int) else list(nodes)
        if not chosen or at_most < 1:
            raise PodUsageError(f"on_crash of nodes {chosen}, at most {at_most}: give at least one")
        self._run.membership.rule = CrashRule(chosen, recover, args, at_most, suspect_live)

    def fence(self, node: int) -> None:
        """See to it that nothing of ``node`` lands any more: a step, made by a task elsewhere."""
        self._run.membership.fence(node, self._run.current)

    def restart(
        self, node: int, function: Callable[..., object], *args: Any, name: str = ""
    ) -> None:
        """Start a fenced node again, with ``function(mem, *args)`` as its first task.

        It has an empty cache, fresh local memory, and knows nothing.
        """
        place = self._run.membership.restart(node)
        name = name or f"node {node} again"
        self._run.start_task(place, function, args, name=name, daemon=False)

    # For the explorer

    def built(self) -> None:
        """Put what was prepared into the device; the scenario has been built."""
        run = self._run
        if not run.tasks:
            raise PodUsageError("the scenario started no task: call pod.run(node, function)")
        for word, value in () if self._prepared is None else self._prepared.words.items():
            line = run.device.lines.get(word >> 3)
            if line is None:
                line = run.device.lines[word >> 3] = ZERO_LINE.copy()
            line[word & 7] = run.checks.history.preset(word, value)

    def ended(self) -> None:
        """Land what is in flight, then check what is to be checked at the end."""
        run = self._run
        while run.failure is None and (landing := next(run.landings(), None)) is not None:
            run.apply(landing)
        for check in self._at_end:
            if run.failure is not None:
                return
            told = f"at the end, {_name_of(check)} does not hold"
            try:
                if check(HostMemory(run.size_bytes, run.device)) is not False:
                    continue
            except Exception as error:  # whatever a check raises says that it does not hold
                told += f": {type(error).__name__}: {error}"
            run.checks.fail(Kind.INVARIANT, None, told)


def _name_of(check: Callable[..., object]) -> str:
    """Return what a check is called; of one without a name, such as a lambda, where it is."""
    name = getattr(check, "__name__", "a check")
    code = getattr(check, "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    return f"the lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
