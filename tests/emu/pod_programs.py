"""Small programs and scenarios that the tests of the explored pod share; each can leave out a step.

Names of what is left out are the tests' mutants; "" is the correct program.
"""

from __future__ import annotations

import numpy as np

from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    clflushopt,
    critical_enter,
    critical_leave,
    critical_want,
    dma_read,
    dma_wait,
    dma_write,
    load,
    local_lock,
    local_unlock,
    node_id,
    optimistic,
    pause,
    sfence,
    store,
)

DATA, FLAG = 0, LINE

# One message: data, then a flag


def send(mem, mutant):
    store(mem, DATA, 7)
    if mutant == "data not flushed":
        pass
    elif mutant == "data flush posted":
        clflushopt(mem, DATA)
        sfence(mem)
    else:
        clflush(mem, DATA)
    store(mem, FLAG, 1)
    clflush(mem, FLAG)


def receive(mem, mutant, got):
    load(mem, DATA)
    while True:
        if mutant != "polls without flush":
            clflush(mem, FLAG)
        if load(mem, FLAG):
            break
        pause(mem, FLAG, 8)
    if mutant != "data not invalidated":
        clflush(mem, DATA)
    got.append(load(mem, DATA))


def message(mutant=""):
    def scenario(pod):
        got = []
        pod.name_range(DATA, 8, "the data")
        pod.name_range(FLAG, 8, "the flag")
        pod.run(0, send, mutant, name="writer")
        pod.run(1, receive, mutant, got, name="reader")

    return scenario


def message_scenario(pod):
    """A scenario that can be named as module:function."""
    message("data not flushed")(pod)


def sound_scenario(pod):
    """One without a fault."""
    message()(pod)


# TraCT's two-tier lock around a counter and a payload

IDLE, WAITING, LOCKED = 0, 1, 2
NODES, LOCKS = 3, 2
COUNTER, PAYLOAD = 64 * LINE, 128 * LINE


def slot(lock, node):
    return (lock * NODES + node) * LINE


def acquire(mem, lock, mutant=""):
    own = slot(lock, node_id(mem))
    local_lock(mem, lock)
    store(mem, own, WAITING)
    clflush(mem, own)
    critical_want(mem, lock)
    while True:
        if mutant != "polls without flush":
            clflush(mem, own)
        if load(mem, own) == LOCKED:
            break
        pause(mem, own, 8)
    critical_enter(mem, lock)


def release(mem, lock, mutant=""):
    own = slot(lock, node_id(mem))
    critical_leave(mem, lock)
    store(mem, own, IDLE)
    if mutant != "release not flushed":
        clflush(mem, own)
    local_unlock(mem, lock)


def arbitrate(mem, mutant):
    last = [0] * LOCKS
    while True:
        for lock in range(LOCKS):
            held, chosen = False, -1
            for k in range(1, NODES + 1):
                node = k - 1 if mutant == "unfair" else (last[lock] + k) % NODES
                clflush(mem, slot(lock, node))
                state = load(mem, slot(lock, node))
                if state == LOCKED:
                    held = True
                elif state == WAITING and chosen < 0:
                    chosen = node
            if chosen >= 0 and (not held or mutant == "grants two"):
                store(mem, slot(lock, chosen), LOCKED)
                clflush(mem, slot(lock, chosen))
                last[lock] = chosen
        pause(mem, 0, slot(LOCKS, 0))


def count(mem, rounds, mutant):
    words = np.zeros(8, np.int64)
    for i in range(rounds):
        lock = i % LOCKS
        counter, payload = COUNTER + lock * LINE, PAYLOAD + lock * LINE
        if mutant == "invalidates before the lock":
            clflush(mem, counter)
        acquire(mem, lock, mutant)
        if mutant not in ("counter not invalidated", "invalidates before the lock"):
            clflush(mem, counter)
        value = load(mem, counter)
        if mutant != "payload not invalidated":
            clflush(mem, payload)
        dma_wait(mem, dma_read(mem, payload, words))
        assert words.tolist() == [value] * 8
        store(mem, counter, value + 1)
        if mutant == "counter flush posted":
            clflushopt(mem, counter)
            sfence(mem)
        elif mutant != "counter not flushed":
            clflush(mem, counter)
        handle = dma_write(mem, payload, np.full(8, value + 1, np.int64))
        if mutant != "released before the DMA is complete":
            dma_wait(mem, handle)
        release(mem, lock, mutant)
        if mutant == "released before the DMA is complete":
            dma_wait(mem, handle)


def counting(mutant="", rounds=2):
    def scenario(pod):
        pod.bounded_waiting(NODES - 1)
        for node in range(NODES):
            pod.run(node, count, rounds, mutant, name=f"counter {node}")
            for lock in range(LOCKS):
                pod.name_range(slot(lock, node), LINE, f"lock {lock}, slot of node {node}")
        pod.run(0, arbitrate, mutant, name="arbiter", daemon=True)

        def all_counted(mem):
            total = sum(load(mem, COUNTER + lock * LINE) for lock in range(LOCKS))
            assert total == NODES * rounds, total

        pod.at_end(all_counted)

    return scenario


# A sequence lock: two words that must be seen together, read without any lock

SEQ, LEFT, RIGHT = 0, LINE, 2 * LINE


def write_pairs(mem, times):
    for i in range(1, times + 1):
        store(mem, SEQ, 2 * i - 1)
        clflush(mem, SEQ)
        for half in (LEFT, RIGHT):
            store(mem, half, i)
            clflush(mem, half)
        store(mem, SEQ, 2 * i)
        clflush(mem, SEQ)


def fresh(mem, off):
    clflush(mem, off)
    return load(mem, off)


def read_pair(mem, mutant):
    for _ in range(4):
        with optimistic(mem) as section:
            before = fresh(mem, SEQ)
            left = fresh(mem, LEFT)
            right = load(mem, RIGHT) if mutant == "half not invalidated" else fresh(mem, RIGHT)
            after = load(mem, SEQ) if mutant == "sequence not invalidated" else fresh(mem, SEQ)
            section.valid = before == after and before % 2 == 0
        if section.valid:
            assert left == right, (left, right)


def sequence_lock(mutant=""):
    def scenario(pod):
        pod.run(0, write_pairs, 3, name="writer")
        pod.run(1, read_pair, mutant, name="reader")

    return scenario
