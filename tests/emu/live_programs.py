"""What node processes of the live pod's tests run: the host's commands one by one, or a loop.

``obey`` lets a test decide the order of operations across real processes by messages: no sleeps.
"""

from __future__ import annotations

import functools

import numpy as np

from cxlbench.emu import pod_perform
from cxlbench.emu.pod_compile import compiled_once, prepare
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_native import NativeMemory
from cxlbench.emu.pod_ops import (
    clflush,
    clflushopt,
    clwb,
    load,
    local_add,
    local_load,
    local_lock,
    local_store,
    local_unlock,
    pause,
    program,
    store,
)


def obey(live):
    """Perform what the host asks for, answer each, and return when it says "end"."""
    arrays = {}
    while True:
        name, *arguments = live.receive()
        if name == "end":
            return "ended"
        if name == "array":
            arrays[arguments[0]] = np.array(arguments[1], dtype=np.int64)
            live.send(None)
        elif name == "words":
            live.send(arrays[arguments[0]].tolist())
        elif name in ("dma_write", "dma_read"):
            live.send(getattr(live.memory, name)(arguments[0], arrays[arguments[1]]))
        else:
            live.send(getattr(live.memory, name)(*arguments))


def say_who(live):
    return live.node, live.process, live.incarnation, live.memory.node_id()


def turn_for_ever(live):
    """Pay no attention to anything."""
    while True:
        pass


def prepare_for_ever():
    """Compile something that never gets ready."""
    turn_for_ever(None)


def fail_to_prepare():
    raise LookupError("nothing to compile")


def fail(live):
    raise ValueError("on purpose")


@program
def count_up(mem, lock, word, times, parties):
    """Two counters in local memory: by loads and stores under a lock, and by atomic addition.

    The processes begin together: each says that it is there, and waits for the others.
    """
    local_lock(mem, lock)
    local_store(mem, word + 2, local_load(mem, word + 2) + 1)
    local_unlock(mem, lock)
    while local_load(mem, word + 2) < parties:
        pause(mem, 0, 8)
    for _ in range(10 * times):
        local_add(mem, word + 1, 1)
    for _ in range(times):
        local_lock(mem, lock)
        local_store(mem, word, local_load(mem, word) + 1)
        local_unlock(mem, lock)


@program
def write_lines_for_ever(mem, off, lines):
    """Whole lines of equal words: a line with unequal words in D is a torn one."""
    value = 0
    while True:
        value += 1
        for line in range(lines):
            at = off + 64 * line
            clflush(mem, at)  # the stores below are to one copy, unless it is evicted among them
            for word in range(8):
                store(mem, at + 8 * word, value)
            if value & 1:
                clflush(mem, at)
            else:
                clwb(mem, at)


@program
def torn_lines(mem, off, lines, times):
    """How many lines were seen with words of different ages."""
    torn = 0
    for _ in range(times):
        for line in range(lines):
            at = off + 64 * line
            clflush(mem, at)
            first = load(mem, at)
            for word in range(1, 8):
                if load(mem, at + 8 * word) != first:
                    torn += 1
                    break
    return torn


@program
def hand_over(mem, mine, theirs, times, flushing):
    """Ping-pong between two nodes through two lines; how often a poll was fruitless."""
    polls = 0
    for turn in range(1, times + 1):
        store(mem, theirs, turn)
        if flushing:
            clflush(mem, theirs)
        while True:
            clflush(mem, mine)
            if load(mem, mine) >= turn:
                break
            polls += 1
            pause(mem, mine, 8)
    return polls


@program
def walk(mem, lines, step, times):
    """Loads and stores all over a region; how many words a node saw that it had not put there."""
    wrong = 0
    for turn in range(times):
        for line in range(lines):
            off = (line * step % lines) * 64 + 8 * (line & 7)
            if load(mem, off) != turn:
                wrong += 1
            store(mem, off, turn + 1)
            if line % 4 == 0:
                clwb(mem, off)
            elif line % 4 == 1:
                clflushopt(mem, off)
            elif line % 4 == 2:
                clflush(mem, off)
    return wrong


@program
def load_many(mem, n, mask):
    total = 0
    for i in range(n):
        total += load(mem, (i * 72) & mask & -8)
    return total


@program
def store_many(mem, n, mask):
    for i in range(n):
        store(mem, (i * 72) & mask & -8, i)


count_up_compiled = compiled_once(count_up)
write_lines_for_ever_compiled = compiled_once(write_lines_for_ever)
torn_lines_compiled = compiled_once(torn_lines)
hand_over_compiled = compiled_once(hand_over)
walk_compiled = compiled_once(walk)
load_many_compiled = compiled_once(load_many)
store_many_compiled = compiled_once(store_many)

PROGRAMS = {
    "count_up": (count_up_compiled, (0, 0, 1, 1)),
    "write_lines_for_ever": (write_lines_for_ever_compiled, (0, 1)),
    "torn_lines": (torn_lines_compiled, (0, 1, 1)),
    "hand_over": (hand_over_compiled, (0, 64, 1, True)),
    "walk": (walk_compiled, (1, 1, 1)),
    "load_many": (load_many_compiled, (1, 7)),
    "store_many": (store_many_compiled, (1, 7)),
}
"""Each with arguments of the types that it is called with."""


def compile_for(memory, *names):
    """Compile in this process, once a type of memory, what node processes will run."""
    for name in names:
        _compile(type(memory), name, memory)


@functools.cache
def _compile(kind, name, memory):
    program, arguments = PROGRAMS[name]
    prepare(program, memory, *arguments)


def warm_up():
    """Load what the node processes use before they are forked."""
    for kind in (EmulatedMemory, NativeMemory):
        memory = kind(*[0] * len(kind._fields))
        pod_perform.prepare_for(memory)
        compile_for(memory, *PROGRAMS)


def run(live, name, *arguments):
    """Run one of the compiled programs above, by name, after "ready" and the host's "go"."""
    live.send("ready")
    live.receive()
    return PROGRAMS[name][0](live.memory, *arguments)


def run_and_tell(live, name, *arguments):
    """Run a program that never ends; the host kills it."""
    live.send("running")
    PROGRAMS[name][0](live.memory, *arguments)
