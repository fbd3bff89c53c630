"""TraCT's two-tier lock against the number of nodes, and of processes on a node.

Set-up. On every node some processes take one lock again and again: acquire, a critical section of
some lines (invalidate, load, store, flush each), release; no pause between. The lock, the managers
and the arbiter are TraCT's own programs on the pod in virtual time, with the costs of a profile
(``harness/pod_profile.py``). Nodes go from 1 to 16; processes on a node are 1, or as the knob says.

By the paper the first tier lets one process of a node contend, so that contenders are at most the
nodes, and the arbiter's scan and the wait grow with nodes, not with processes. Counted from the
order of acquisitions: time from one to the next, how long each waited, how often a waiting node was
overtaken, and how even the shares are (Jain's index: 1 is all equal, 1/n is one takes all).

The pod's local lock, like an ordinary mutex, lets a process that just released it take it again
before those that sleep: with several processes on a node, ``wait_max_s`` shows that and not the
arbiter. The lines of each process are its own; a lost or doubled section would show in the counter
that all share. Left out: crashes, arbiter take-over, bandwidth of single lines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cxlbench.devices.profile import SharedType3Profile
from cxlbench.experiments.device_runs import together
from cxlbench.experiments.lock_rounds import Contention, contend
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    ExperimentError,
    Findings,
    Knob,
    Plot,
)
from cxlbench.tract.layout import MAX_NODES

NIAGARA = "niagara-2.0"
NODE_COUNTS = (1, 2, 4, 8, 16)
QUICK_NODE_COUNTS = (1, 2, 4, 8)
BOUNDED = PaperClaim(
    name="contenders are at most the nodes",
    statement="While a node waits, each other node goes before it at most once, however many "
    "processes its nodes have",
    source="TraCT, locks",
    sense=Sense.TRUE,
)
NOT_BY_PROCESSES = PaperClaim(
    name="processes do not slow the hand-over",
    statement="More processes on each node leave the time from one acquisition to the next as it "
    "is",
    source="TraCT, locks",
    expected=1.0,
    unit="x",
)


def run(ctx: Context) -> Findings:
    """Contend on every number of nodes, with one process each and with several."""
    memory = ctx.profile(SharedType3Profile, NIAGARA)
    many, rounds = ctx.count("workload.processes"), ctx.count("workload.rounds")
    lines = ctx.count("workload.lines")
    if min(many, rounds) < 1 or many * lines > 64:
        raise ExperimentError(
            f"workload: {many} processes, {rounds} rounds, {lines} lines: at least one process and "
            "round, and at most 64 lines a node"
        )
    counts = QUICK_NODE_COUNTS if ctx.quick else NODE_COUNTS
    assert counts[-1] <= MAX_NODES
    points = [(nodes, processes) for processes in sorted({1, many}) for nodes in counts]
    found: dict[tuple[int, int], Contention] = {}
    for nodes, processes in points:
        if ctx.stopping():
            break
        ctx.progress("contending for a lock, points", len(found), len(points))
        found[nodes, processes] = contend(
            memory, nodes=nodes, processes=processes, rounds=rounds, lines=lines, seed=ctx.seed
        )
    partial = len(found) < len(points)
    most = counts[-1]
    return Findings(
        rows=[one.row() for one in found.values()],
        claims=[
            BOUNDED.judge(
                None if partial else float(all(_bounded(one) for one in found.values())),
                at=f"up to {most} nodes with {many} processes each",
                reason=f"overtaken by one node at most "
                f"{max((one.most_overtaken for one in found.values()), default=0)} times",
            ),
            NOT_BY_PROCESSES.judge(
                None if partial else found[most, many].hand_over_s / found[most, 1].hand_over_s,
                at=f"{most} nodes, {many} processes against 1",
            ),
        ],
        plots=[
            _plot("hand_over", "From one acquisition to the next", "us", found, _hand_over_us),
            _plot("wait", "Wait for the lock, 99th percentile", "us", found, _wait_us),
        ],
        checks=together(check for one in found.values() for check in _balance(one)),
        partial=partial,
    )


def _bounded(one: Contention) -> bool:
    return one.most_overtaken <= 1


def _balance(one: Contention) -> list[Check]:
    name = f"{one.nodes} nodes x {one.processes}"
    asked = one.nodes * one.processes * one.rounds
    return [
        Check(
            name=f"{name}: no critical section is lost or doubled",
            ok=one.counted == asked == len(one.order),
            detail=f"{one.counted} counted, {len(one.order)} of {asked} acquisitions",
        ),
        Check(name=f"{name}: nobody holds a lock in the end", ok=one.held_locks == 0),
    ]


def _hand_over_us(one: Contention) -> float:
    return one.hand_over_s * 1e6


def _wait_us(one: Contention) -> float:
    return float(np.percentile(one.waits_s, 99)) * 1e6


def _plot(
    name: str,
    title: str,
    unit: str,
    found: dict[tuple[int, int], Contention],
    of: Callable[[Contention], float],
) -> Plot:
    processes = sorted({one.processes for one in found.values()})
    return Plot(
        name=name,
        title=f"{title}, by nodes",
        x_label="nodes",
        y_label=unit,
        kind="line",
        series={
            f"{count} processes a node": (
                [float(one.nodes) for one in found.values() if one.processes == count],
                [of(one) for one in found.values() if one.processes == count],
            )
            for count in processes
        },
    )


EXPERIMENT = Experiment(
    name="lock_contention",
    title="TraCT's two-tier lock against node count",
    source="ablation; TraCT, locks",
    about=(
        "All processes of 1 to 16 nodes take one lock of TraCT's without a pause; its own lock, "
        "managers and arbiter on the pod in virtual time."
    ),
    knobs=(
        Knob(
            name="workload.processes",
            value=4,
            source="no source; several, against one, to show what the first tier is for",
            assumption=True,
            high=8,
        ),
        Knob(
            name="workload.rounds",
            value=100,
            quick=20,
            source="acquisitions of each process; enough for a 99th percentile",
        ),
        Knob(
            name="workload.lines",
            value=4,
            source="lines of metadata in a critical section: an index entry, its list links, the "
            "list's ends; TraCT gives no number",
            assumption=True,
            high=8,
        ),
    ),
    profiles=(NIAGARA,),
    claims=(BOUNDED, NOT_BY_PROCESSES),
    run=run,
)
