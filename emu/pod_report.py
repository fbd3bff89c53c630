"""The text of a failure: both lines of source, what memory held, why, and how to see it again."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cxlbench.emu.causality import EXPLANATIONS, REGRESS_EXPLANATIONS, Cause
from cxlbench.emu.pod_failure import Failure, Kind
from cxlbench.emu.pod_model import ZERO, Store
from cxlbench.emu.pod_run import Run
from cxlbench.emu.pod_task import TaskMemory
from cxlbench.emu.pod_trace import Place, RecordedMemory, Row, Site, Trace, parked_on
from cxlbench.emu.pod_watch import Watch

ROWS: Final = 16
"""Rows of the interleaving that a report shows: on the line that it is about, and on the line by
which the reader came to know of the store."""
ROWS_TOLD: Final = 8
DEATHS: Final = ("crashed", "suspected", "fence")
"""What nodes' deaths are called in a trace; they are always shown."""


@dataclass(frozen=True, slots=True)
class Report:
    """A failure of one schedule, explained; ``str`` gives the text."""

    kind: Kind
    cause: Cause | None
    message: str
    step: int
    task: str
    """Name of the task in which it was found; empty if in none."""
    offset: int
    """Offset of the word that it is about; -1 if it is about none."""
    objects: tuple[str, ...]
    """Names of the ranges in which that word lies, the smallest first."""
    later_site: Site
    """Where the store was made that was missed, undone or raced with; then its callers."""
    site: Site
    """Where it was found: the load, the second store; then its callers."""
    body: str = field(repr=False)

    @property
    def signature(self) -> tuple[Kind, Cause | None, Site, Site]:
        """What stays the same when a schedule is shrunk or replayed."""
        return self.kind, self.cause, self.later_site[:1], self.site[:1]

    def text(self, replay_command: str = "") -> str:
        """Return the whole report."""
        title = f"{self.kind}: {self.cause}" if self.cause else str(self.kind)
        parts = [title, self.body]
        if replay_command:
            parts.append(f"replay: {replay_command}")
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.text()


def make_report(run: Run, trace: Trace, failure: Failure) -> Report:
    """Write the report of a failure of a recorded run."""
    task = run.tasks[failure.task] if failure.task >= 0 else None
    later = trace.site_of.get(failure.later, ()) if failure.later else ()
    site = _site_found(trace, failure, task)
    return Report(
        kind=failure.kind,
        cause=failure.cause,
        message=failure.message,
        step=failure.step,
        task=task.name if task else "",
        offset=failure.word * 8 if failure.word >= 0 else -1,
        objects=_names(run, failure.word * 8),
        later_site=later,
        site=site,
        body="\n".join(_body(run, trace, failure, task, site)),
    )


def _site_found(trace: Trace, failure: Failure, task: TaskMemory | None) -> Site:
    if isinstance(task, RecordedMemory):
        return task.site
    found = failure.carrier or failure.earlier
    if found is not None:
        return trace.site_of.get(found, ())
    return ()


def _body(
    run: Run, trace: Trace, failure: Failure, task: TaskMemory | None, site: Site
) -> Iterator[str]:
    yield f"  step {failure.step}: {failure.message}"
    if failure.word >= 0:
        names = _names(run, failure.word * 8)
        yield f"  word at offset {_place_in_region(failure.word * 8)}" + (
            f": {', '.join(names)}" if names else ""
        )
    later, earlier = failure.later, failure.earlier
    if failure.kind is Kind.CAUSALITY and later is not None and earlier is not None:
        assert task is not None
        yield from _site_lines("load", site, f"by {_who(task)}, returned {earlier.value}")
        yield from _store_lines(trace, "newer store", later)
        yield from _store_lines(trace, "returned", earlier)
        since = trace.known_since(failure)
        for row in trace.rows:
            if row.task == failure.task and row.step == since and since != failure.step:
                yield from _site_lines("known since", row.site, f"step {since}, {row.what}")
                break
    elif later is not None and earlier is not None:
        words = {
            Kind.REGRESS: ("put back", "over"),
            Kind.WRITE_RACE: ("one store", "other store"),
            Kind.LINE_RACE: ("one store", "other store"),
        }[failure.kind]
        yield from _store_lines(trace, words[0], earlier)
        yield from _store_lines(trace, words[1], later)
        if failure.carrier not in (None, earlier):
            yield from _store_lines(trace, "with", failure.carrier)
    elif site and failure.kind is not Kind.HANG:
        yield from _site_lines("at", site, f"by {_who(task)}" if task else "")
    if failure.kind is Kind.HANG:
        yield from _waiting(run)
    if failure.traceback:
        yield from (f"    {line}" for line in failure.traceback.rstrip().splitlines())
    if failure.cause:
        why = REGRESS_EXPLANATIONS if failure.kind is Kind.REGRESS else EXPLANATIONS
        yield f"  cause: {failure.cause}: {why[failure.cause]}"
    if failure.word >= 0:
        yield from _line_states(run, trace, failure.word)
    yield from _interleaving(run, trace, failure)


def _who(task: TaskMemory) -> str:
    return f"{task.name} (node {task.node.number})"


def _place_in_region(off: int) -> str:
    return f"{off:#x} (line {off >> 6:#x}, word {off >> 3 & 7})"


def _names(run: Run, off: int) -> tuple[str, ...]:
    if off < 0:
        return ()
    found = [(n, i, name) for i, (at, n, name) in enumerate(run.names) if at <= off < at + n]
    return tuple(dict.fromkeys(name for _, _, name in sorted(found)))


def _source(place: Place) -> str:
    return linecache.getline(place.file, place.line).strip()


def _spot(place: Place) -> str:
    return f"{Path(place.file).name}:{place.line} in {place.function}"


def _site_lines(label: str, site: Site, detail: str) -> Iterator[str]:
    if not site:
        yield f"  {label:<12} {detail}"
        return
    yield f"  {label:<12} {_spot(site[0])}: {_source(site[0])}"
    if detail:
        yield f"  {'':<12}   {detail}"
    yield f"  {'':<12}   {site[0].file}:{site[0].line}"
    for place in site[1:4]:
        yield f"  {'':<12}   called from {_spot(place)}: {_source(place)}"


def _store_lines(trace: Trace, label: str, stored: Store) -> Iterator[str]:
    if stored not in trace.site_of:
        value = f"initial value {stored.value}" if stored is not ZERO else "initial value 0"
        yield f"  {label:<12} {value}"
        return
    landed = trace.landed_at.get(stored)
    arrival = "not in the device yet" if landed is None else f"in the device since step {landed}"
    posted = trace.posted_at.get(stored)
    if landed is None and posted is not None:
        arrival += f", posted at step {posted}"
    who = _who(trace.made_by[stored])
    detail = f"by {who}, step {trace.made_at[stored]}, value {stored.value}; {arrival}"
    yield from _site_lines(label, trace.site_of[stored], detail)


def _waiting(run: Run) -> Iterator[str]:
    for task in run.tasks:
        if task.dead:
            continue
        state = f"waits for {parked_on(task)}" if task.parked else "can run"
        kind = ", a daemon" if task.daemon else ""
        site = task.site if isinstance(task, RecordedMemory) else ()
        yield from _site_lines(task.name, site, f"on node {task.node.number}{kind}: {state}")
        if isinstance(task.parked, Watch):
            for line in task.parked.lines:
                yield from _stale_copies(run, task, line)


def _stale_copies(run: Run, task: TaskMemory, line: int) -> Iterator[str]:
    """Say what is odd about a line that a task sleeps on."""
    names = ", ".join(_names(run, line << 6))
    where = f"line {line << 6:#x}" + (f" ({names})" if names else "")
    held = task.cache.lines.get(line)
    if held is not None and line not in task.cache.dirty and held != task.cache.beneath(line):
        yield f"  {'':<12}   its node holds an old copy of {where}: polled without a flush?"
    for node in run.nodes.values():
        if line in node.cache.dirty and node.cache is not task.cache:
            yield f"  {'':<12}   {where} is dirty in node {node.number}: stored, not flushed"


def _line_states(run: Run, trace: Trace, word: int) -> Iterator[str]:
    line, index = divmod(word, 8)
    yield f"  line {line << 6:#x} at this moment (word {index}):"
    yield f"    device: {run.device.line(line)[index].value}"
    for number, node in sorted(run.nodes.items()):
        held = node.cache.lines.get(line)
        if not node.alive:
            state = "dead, fenced" if node.fenced else "dead"
        elif held is None:
            state = "no copy"
        else:
            dirty = "dirty" if line in node.cache.dirty else "clean"
            taken = trace.filled_at.get((number, line), 0)
            state = f"{held[index].value} in a {dirty} copy taken at step {taken}"
        flying = len(node.cache.posted.get(line, ()))
        if flying:
            state += f"; {flying} write-backs in flight"
        yield f"    node {number}: {state}"


def _interleaving(run: Run, trace: Trace, failure: Failure) -> Iterator[str]:
    """Show what touched the line of the word, and the one by which the reader came to know."""
    about = {failure.word >> 3} if failure.word >= 0 else set()
    told: set[int] = set()
    if failure.kind is Kind.CAUSALITY:
        since = trace.known_since(failure)
        told = {r.off >> 6 for r in trace.rows if r.step == since and r.task == failure.task}
    mine = [row for row in trace.rows if row.off >= 0 and row.off >> 6 in about]
    theirs = [row for row in trace.rows if row.off >= 0 and row.off >> 6 in told - about]
    deaths = [row for row in trace.rows if row.what.startswith(DEATHS)]
    if not about:
        mine = trace.rows
    kept = {id(row) for row in (*mine[-ROWS:], *theirs[-ROWS_TOLD:], *deaths)}
    rows = [row for row in trace.rows if id(row) in kept]
    if rows:
        left_out = len(mine) + len(theirs) - len(mine[-ROWS:]) - len(theirs[-ROWS_TOLD:])
        cut = f" ({left_out} earlier rows are left out)" if left_out else ""
        yield f"  what happened to {'these lines' if about else 'the pod'}, in order{cut}:"
    for row in rows:
        yield "    " + _row_text(run, row)


def _row_text(run: Run, row: Row) -> str:
    if row.task < 0:
        where = f" line {row.off:#x}" if row.off >= 0 else ""
        said = f"line {row.off:#x} {row.what}" if row.what[:5] == "lands" else ""
        return f"{row.step:>6}  ({said or f'node {row.node} {row.what}{where}'})"
    names = _names(run, row.off)
    where = f" {row.off:#x}" if row.off >= 0 else ""
    called = f" [{names[0]}]" if names else ""
    arrow = " -> " if row.what == "load" else " := "
    value = "" if row.value is None else f"{arrow}{row.value}"
    spot = f"   {_spot(row.site[0])}" if row.site else ""
    did = f"{row.what}{where}{called}{value}{row.notes}"
    return f"{row.step:>6}  {_who(run.tasks[row.task])} {did}{spot}"
