"""What the checker looks at beside causality: races, regress, critical sections, idle flushes.

* *write-write race*: two stores to one word that nothing orders.
* *line race*: stores by two nodes to one line that nothing orders, at least one of them through a
  cache. Caches write whole lines back, so one can undo the other even if the words differ.
* *regress*: what lands in the device replaces a word by one that happens before it.
* *mutual exclusion* and *bounded waiting* of the sections that a program announces.
* The lint of flushes: which flushes never had an effect, and what that costs.

Stores of a node that crashed count in races only as far as they landed, and no longer once the
node is fenced: nothing of it can land after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cxlbench.emu.causality import before
from cxlbench.emu.pod_model import CACHED, LOST, WORDS_PER_LINE, Line, NodeCache, Store


class WriteRaces:
    """Looks at each new store: are those before it, to the word and the line, ordered to it."""

    __slots__ = ("_fenced", "_last_in_line", "_node_of")

    def __init__(self) -> None:
        self._last_in_line: dict[int, Store] = {}
        self._node_of = [-1]
        """By incarnation; the first stands for what was there in the beginning."""
        self._fenced: set[int] = set()

    def incarnation(self, node: int) -> None:
        """Count one more incarnation, on ``node``."""
        self._node_of.append(node)

    def fence(self, incarnations: Sequence[int]) -> None:
        """Forget the stores of incarnations whose node is fenced."""
        self._fenced.update(incarnations)

    def on_word(self, previous: Store) -> bool:
        """Return whether ``previous`` races with a store that does not know it."""
        return previous.how != LOST and previous.writer not in self._fenced

    def on_line(self, line: int, stored: Store) -> Store | None:
        """Return the last store of another node to ``line`` if it races with ``stored``."""
        last = self._last_in_line.get(line)
        self._last_in_line[line] = stored
        if last is None or last.tick <= stored.known[last.writer]:
            return None
        harmless = (
            self._node_of[last.writer] == self._node_of[stored.writer]
            or (last.how != CACHED and stored.how != CACHED)
            or last.how == LOST
            or last.writer in self._fenced
        )
        return None if harmless else last


def regress(old: Line, new: Line) -> int | None:
    """Return the index of a word that ``new`` puts back behind what ``old`` holds, if any."""
    for index in range(WORDS_PER_LINE):
        if new[index] is not old[index] and before(new[index], old[index]):
            return index
    return None


def carrier(stores: Sequence[Store], undone: Store) -> Store | None:
    """Return the store because of which a line went out that undid ``undone``.

    First a store that was made on an old copy although its task knew of ``undone``, then one that
    should have gone out before ``undone`` was made, then any.
    """
    for stored in stores:
        if before(undone, stored):
            return stored
    for stored in stores:
        if before(stored, undone):
            return stored
    return stores[0] if stores else None


@dataclass(slots=True)
class _Section:
    inside: int = -1
    overtaken: dict[int, int] = field(default_factory=dict)
    """Of each task that waits: how often tasks of other nodes entered since it began to."""


class Sections:
    """The critical sections that programs announce, by lock number; tasks go by their index."""

    __slots__ = ("_sections", "bound")

    def __init__(self) -> None:
        self.bound: int | None = None
        """How often other nodes may enter while a task waits; None is as often as they like."""
        self._sections: dict[int, _Section] = {}

    def want(self, lock: int, task: int) -> None:
        """Begin to wait."""
        self._section(lock).overtaken[task] = 0

    def enter(self, lock: int, task: int, same_node: Sequence[int]) -> tuple[int, bool] | None:
        """Enter; return the other task and True if it is inside, False if it waited too long."""
        section = self._section(lock)
        if section.inside >= 0:
            return section.inside, True
        section.inside = task
        section.overtaken.pop(task, None)
        for waiting in section.overtaken:
            if waiting not in same_node:
                section.overtaken[waiting] += 1
                if self.bound is not None and section.overtaken[waiting] > self.bound:
                    return waiting, False
        return None

    def leave(self, lock: int, task: int) -> bool:
        """Leave; return whether ``task`` was inside."""
        section = self._section(lock)
        if section.inside != task:
            return False
        section.inside = -1
        return True

    def stop_waiting(self, task: int) -> None:
        """Forget that a task waits: it has ended. If it is inside, it is so until its fence."""
        for section in self._sections.values():
            section.overtaken.pop(task, None)

    def forget(self, tasks: Sequence[int]) -> None:
        """Forget that tasks are inside: their node is fenced."""
        for section in self._sections.values():
            if section.inside in tasks:
                section.inside = -1

    def _section(self, lock: int) -> _Section:
        return self._sections.setdefault(lock, _Section())


@dataclass(slots=True)
class FlushSite:
    """What the flushes of one line of source did, over many schedules."""

    site: str
    flushes: int = 0
    wrote_back: int = 0
    """Flushes that wrote a dirty line back, or waited for write-backs in flight."""
    refreshed: int = 0
    """Flushes that dropped a copy which the device no longer held when it was next needed."""

    @property
    def needless(self) -> bool:
        """Whether no flush here had any effect."""
        return self.flushes > 0 and not self.wrote_back and not self.refreshed


class FlushLint:
    """Counts by source line what flushes were good for."""

    def __init__(self) -> None:
        self.sites: dict[str, FlushSite] = {}
        self.failed = 0
        """Schedules that failed, and so did not run to their end."""
        self.first_failure = ""
        self._dropped: dict[tuple[int, int], tuple[FlushSite, Line]] = {}

    def new_run(self) -> None:
        """Forget which copies were dropped; counts go on."""
        self._dropped.clear()

    def run_failed(self, why: str) -> None:
        """Count a run that failed."""
        self.failed += 1
        self.first_failure = self.first_failure or why

    def flush(self, site: str, cache: NodeCache, line: int) -> None:
        """Look at a flush of ``line`` that is about to happen."""
        counts = self.sites.setdefault(site, FlushSite(site))
        counts.flushes += 1
        if line in cache.dirty or line in cache.posted:
            counts.wrote_back += 1
        elif line in cache.lines:
            self._dropped[cache.node, line] = counts, cache.lines[line]

    def filled(self, cache: NodeCache, line: int) -> None:
        """Look at a fill that has just happened."""
        counts, copy = self._dropped.pop((cache.node, line), (None, None))
        if counts is not None and cache.lines[line] is not copy:
            counts.refreshed += 1

    def needless(self) -> list[FlushSite]:
        """Return the sites whose flushes never had an effect, the most frequent first."""
        found = [site for site in self.sites.values() if site.needless]
        return sorted(found, key=lambda site: (-site.flushes, site.site))


def lint_text(lint: FlushLint, *, schedules: int, flush_ns: float) -> str:
    """Say which flushes had no effect in ``schedules`` schedules, at ``flush_ns`` ns a flush."""
    rows = [
        f"{site.site}: {site.flushes} flushes in {schedules} schedules, none had an effect;"
        f" {site.flushes / schedules:.1f} a run x {flush_ns:g} ns ="
        f" {site.flushes / schedules * flush_ns:.0f} ns a run"
        for site in lint.needless()
    ]
    if lint.failed:
        rows.insert(
            0,
            f"{lint.failed} of {schedules} schedules failed (the first: {lint.first_failure}) and "
            "count as far as they ran: explore and repair the scenario first",
        )
    elif not lint.sites:
        rows = [f"no flush in {schedules} schedules"]
    return "\n".join(rows) or f"every flush had an effect in some of {schedules} schedules"
