"""Lock, slots and arbiter, step by step in one thread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.tract.arbiter import find_waiter, grant, grant_round
from cxlbench.tract.client import PodLock
from cxlbench.tract.codes import BUSY, NOBODY
from cxlbench.tract.errors import NoSuchLockError
from cxlbench.tract.layout import INTERNAL_LOCKS, Sizes
from cxlbench.tract.lock import IDLE, LOCKED, WAITING, acquire, release, slot_of
from cxlbench.tract.membership import DEAD
from tests.tract.plain import PlainPod

LOCK = INTERNAL_LOCKS


def pod(nodes: int = 3) -> PlainPod:
    return PlainPod(Sizes(nodes=nodes, slots=1, chunks=1, chunk_bytes=64, user_locks=2))


def slots(p: PlainPod, lock: int = LOCK) -> list[int]:
    return [p.nodes[0].load(slot_of(p.layout, lock, n)) for n in range(p.layout.nodes)]


def set_slots(p: PlainPod, states: list[int]) -> None:
    for node, state in enumerate(states):
        p.nodes[0].store(slot_of(p.layout, LOCK, node), state)


def test_a_slot_goes_from_waiting_to_locked_to_idle() -> None:
    p = pod()
    seen = []

    def watch() -> None:
        seen.append(slots(p))
        p.arbitrate()

    p.nodes[1].on_pause = watch
    acquire(p.nodes[1], p.layout, LOCK)
    assert seen == [[IDLE, WAITING, IDLE]]
    assert slots(p) == [IDLE, LOCKED, IDLE]
    release(p.nodes[1], p.layout, LOCK)
    assert slots(p) == [IDLE, IDLE, IDLE]
    assert not p.nodes[1].locks


def test_waiting_is_stored_once() -> None:
    p = pod()
    turns = iter((None, None, p.arbitrate))

    def slow() -> None:
        turn = next(turns)
        if turn:
            turn()

    p.nodes[0].on_pause = slow
    p.nodes[0].stored.clear()
    acquire(p.nodes[0], p.layout, LOCK)
    assert p.nodes[0].stored.count(slot_of(p.layout, LOCK, 0)) == 2  # by the node, by the arbiter


@given(st.lists(st.sampled_from([IDLE, WAITING, LOCKED]), min_size=1, max_size=6), st.data())
def test_the_arbiter_grants_iff_nobody_is_locked(states: list[int], data: st.DataObject) -> None:
    p = pod(len(states))
    set_slots(p, states)
    last = data.draw(st.integers(0, len(states) - 1))
    found = find_waiter(p.nodes[0], p.layout, LOCK, last, p.standing)
    if LOCKED in states:
        assert found == BUSY
    elif WAITING not in states:
        assert found == NOBODY
    else:
        after = [(last + 1 + i) % len(states) for i in range(len(states))]
        assert found == next(n for n in after if states[n] == WAITING)


def test_a_grant_makes_exactly_one_holder() -> None:
    p = pod()
    set_slots(p, [WAITING, WAITING, WAITING])
    assert grant_round(p.nodes[0], p.layout, p.last, p.standing, 0) == 1
    assert sorted(slots(p)) == [WAITING, WAITING, LOCKED]
    assert grant_round(p.nodes[0], p.layout, p.last, p.standing, 0) == 0


def test_dead_nodes_are_granted_nothing() -> None:
    p = pod()
    set_slots(p, [WAITING, IDLE, IDLE])
    p.standing[0] = DEAD
    assert grant_round(p.nodes[1], p.layout, p.last, p.standing, 0) == 0


def test_locks_closed_for_repair_are_not_granted() -> None:
    p = pod()
    p.nodes[0].store(slot_of(p.layout, 0, 1), WAITING)
    set_slots(p, [IDLE, IDLE, WAITING])
    assert grant_round(p.nodes[0], p.layout, p.last, p.standing, INTERNAL_LOCKS) == 1
    assert slots(p, 0) == [IDLE, WAITING, IDLE]


@given(st.integers(2, 6), st.lists(st.integers(0, 5), min_size=20, max_size=60))
def test_a_waiting_node_is_overtaken_by_each_other_node_at_most_once(
    nodes: int, eager: list[int]
) -> None:
    """Some nodes want the lock again and again; node 0 waits from the start."""
    p = pod(nodes)
    p.last[LOCK] = 0
    mem = p.nodes[0]
    set_slots(p, [WAITING] + [IDLE] * (nodes - 1))
    overtaken: list[int] = []
    for number in eager:
        mem.store(slot_of(p.layout, LOCK, 1 + number % (nodes - 1)), WAITING)
        node = find_waiter(mem, p.layout, LOCK, int(p.last[LOCK]), p.standing)
        if node == 0:
            break
        grant(mem, p.layout, LOCK, node)
        p.last[LOCK] = node
        overtaken.append(node)
        mem.store(slot_of(p.layout, LOCK, node), WAITING)
    assert len(overtaken) == len(set(overtaken)) <= nodes - 1


def test_locks_are_independent() -> None:
    p = pod()
    with PodLock(p.nodes[0], p.layout, LOCK), PodLock(p.nodes[1], p.layout, LOCK + 1):
        assert slots(p) == [LOCKED, IDLE, IDLE]
        assert slots(p, LOCK + 1) == [IDLE, LOCKED, IDLE]
    assert p.lock_free()


def test_users_do_not_get_internal_locks() -> None:
    p = pod()
    with pytest.raises(NoSuchLockError, match="from 3 on"):
        PodLock(p.nodes[0], p.layout, 0)


def test_last_is_remembered_per_lock() -> None:
    p = pod()
    p.nodes[0].store(slot_of(p.layout, LOCK + 1, 2), WAITING)
    grant_round(p.nodes[0], p.layout, p.last, p.standing, 0)
    assert p.last.tolist() == np.array([0, 0, 0, 0, 2]).tolist()
