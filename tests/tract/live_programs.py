"""What processes of a live pod run in TraCT's tests."""

from __future__ import annotations

import numpy as np

from cxlbench.emu import pod_perform
from cxlbench.emu.pod_compile import prepare
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_native import NativeMemory
from cxlbench.tract.layout import HEADER_WORDS, Sizes, plan
from cxlbench.tract.manager import manage
from cxlbench.tract.recovery import rejoin
from cxlbench.tract.region import call, compiled_program, open_region, read_header
from cxlbench.tract.stress import N_TOTALS, count_up, work

PROGRAMS = (
    (manage,),
    (rejoin,),
    (read_header, np.zeros(HEADER_WORDS, np.int64)),
    (count_up, 0, 0, 0),
    (work, 0, 0, 0, 0, np.zeros(N_TOTALS, np.int64)),
)


def warm_up():
    """Compile, or load from disk, what the processes run, before they are forked."""
    layout = plan(Sizes(nodes=1, slots=1, chunks=1, chunk_bytes=64))
    for kind in (EmulatedMemory, NativeMemory):
        memory = kind(*[0] * len(kind._fields))
        pod_perform.prepare_for(memory)
        for program, *arguments in PROGRAMS:
            lay = () if program is read_header else (layout,)
            prepare(compiled_program(program), memory, *lay, *arguments)


def manager(live, region_bytes):
    call(manage, live.memory, open_region(live.memory, region_bytes))


def returning(live, region_bytes):
    """The first process of a restarted node: rejoin, then say so."""
    lay = open_region(live.memory, region_bytes)
    live.send(call(rejoin, live.memory, lay))


def worker(live, region_bytes, seed, rounds, numbers, words):
    lay = open_region(live.memory, region_bytes)
    totals = np.zeros(N_TOTALS, np.int64)
    live.send("ready")
    call(work, live.memory, lay, seed, rounds, numbers, words, totals)
    return totals.tolist()


def counter(live, region_bytes, lock, at, times):
    lay = open_region(live.memory, region_bytes)
    live.send("ready")
    call(count_up, live.memory, lay, lock, at, times)
