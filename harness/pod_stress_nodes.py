"""What the processes of a stressed pod run (``pod_stress``): managers, workers, recovery, return.

A worker does its work in turns and tells the host after each what it did, so that little is unknown
of a worker that is killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_compile import prepare
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_native import NativeMemory
from cxlbench.emu.pod_ops import PodMemory, clflush, load, now, program, store
from cxlbench.tract.layout import INTERNAL_LOCKS, Layout, Sizes, plan
from cxlbench.tract.lock import acquire, release
from cxlbench.tract.manager import manage
from cxlbench.tract.membership import report_dead
from cxlbench.tract.recovery import await_repair, rejoin
from cxlbench.tract.region import call, compiled_program
from cxlbench.tract.stress import N_TOTALS, work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.emu.pod_zygote import LiveNode

    Words = NDArray[np.int64]

LOCK = INTERNAL_LOCKS
"""The users' first lock."""
ACQUISITIONS_A_TURN = 200
ROUNDS_A_TURN = 20
BLOCK_WORDS = 16
STOP = "stop"


@program
def count_and_time(mem: PodMemory, lay: Layout, at: int, waits: Words) -> None:
    """Increment the word at ``at`` under the lock, once for each word of ``waits``.

    Those are filled with how long the lock was waited for, ns.
    """
    for i in range(len(waits)):
        begin = now(mem)
        acquire(mem, lay, LOCK)
        waits[i] = now(mem) - begin
        clflush(mem, at)
        store(mem, at, load(mem, at) + 1)
        clflush(mem, at)
        release(mem, lay, LOCK)


def warm_up() -> None:
    """Compile, or load from disk, what the processes run, before they are forked."""
    layout = plan(Sizes(nodes=1, slots=1, chunks=1, chunk_bytes=64))
    words = np.zeros(1, np.int64)
    for kind in (EmulatedMemory, NativeMemory):
        memory = kind(*[0] * len(kind._fields))
        for function, arguments in (
            (manage, ()),
            (rejoin, ()),
            (report_dead, (0,)),
            (await_repair, (0, 0)),
            (count_and_time, (0, words)),
            (work, (0, 0, 0, 0, words)),
        ):
            prepare(compiled_program(function), memory, layout, *arguments)


def run_manager(live: LiveNode, layout: Layout) -> None:
    """Be the manager of a node, until killed."""
    call(manage, live.memory, layout)


def run_worker(live: LiveNode, layout: Layout, counter_at: int, blocks: int, seed: int) -> None:
    """Work in turns until told to stop; send ``(totals, waits)`` after each.

    ``totals`` are those of ``tract.stress.work``; the counter went up once for each wait.
    """
    waits = np.zeros(ACQUISITIONS_A_TURN, np.int64)
    turn = 0
    while not live.channel.poll():
        turn += 1
        totals = np.zeros(N_TOTALS, np.int64)
        call(count_and_time, live.memory, layout, counter_at, waits)
        call(
            work,
            live.memory,
            layout,
            seed * 1_000_003 + turn,
            ROUNDS_A_TURN,
            blocks,
            BLOCK_WORDS,
            totals,
        )
        live.send((totals.tolist(), waits.tolist()))


def run_recovery(live: LiveNode, layout: Layout, dead: int) -> int:
    """On a survivor: say that a fenced node is dead, wait until it is repaired after."""
    incarnation: int = call(report_dead, live.memory, layout, dead)
    call(await_repair, live.memory, layout, dead, incarnation)
    return incarnation


def run_return(live: LiveNode, layout: Layout) -> int:
    """On a node that was restarted, before anything else: take part again."""
    incarnation: int = call(rejoin, live.memory, layout)
    return incarnation
