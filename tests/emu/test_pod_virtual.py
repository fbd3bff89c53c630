"""The pod under a clock: what operations cost, what stays stale, who wakes when."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cxlbench.emu.clock import DeadlockError, VirtualClock, WallClock
from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_ops import (
    LINE,
    clflush,
    clflushopt,
    clwb,
    critical_leave,
    dma_done,
    dma_read,
    dma_wait,
    dma_write,
    load,
    local_add,
    local_cas,
    local_load,
    local_lock,
    local_store,
    local_unlock,
    node_id,
    now,
    ntstore,
    pause,
    sfence,
    store,
)
from cxlbench.emu.pod_virtual import PodCosts, VirtualPod
from cxlbench.emu.pod_virtual_device import PhantomWords

US = 1e-6
COSTS = PodCosts(
    fill_s=1 * US,
    flush_s=4 * US,
    invalidate_s=2 * US,
    bytes_per_s=1e9,
    dma_latency_s=10 * US,
)


class Desk:
    """A pod of two nodes, run by a test."""

    def __init__(self, *, size_bytes=1 << 20, wall=False, costs=COSTS, **options):
        self.clock = WallClock() if wall else VirtualClock()
        self.pod = VirtualPod(self.clock, size_bytes, costs, nodes=2, **options)

    def run(self, *programs):
        """Run (node, function, *args) tuples at once; return their results in order."""

        async def all_of_them():
            works = [self.pod.run(*program) for program in programs]
            return await self.clock.gather(*works)

        with self.clock:
            return self.clock.run(all_of_them())

    def took_us(self, *programs):
        self.run(*programs)
        return pytest.approx(self.clock.now() / US)


def sleep(mem, us):
    """Let time pass on a task, as work that it does would."""
    mem.debt_s += us * US
    critical_leave(mem, 0)  # pays


# -- costs ----------------------------------------------------------------------------------------


def load_twice(mem):
    load(mem, 0)
    load(mem, 8)


def load_flush_load(mem):
    load(mem, 0)
    clflush(mem, 0)
    load(mem, 0)


def store_flush(mem):
    store(mem, 0, 1)
    clflush(mem, 0)


def flush_absent(mem):
    clflush(mem, 0)


@pytest.mark.parametrize(
    ("program", "us"), [(load_twice, 1), (load_flush_load, 4), (store_flush, 5), (flush_absent, 2)]
)
def test_lines_that_move_are_charged(program, us):
    assert Desk().took_us((0, program)) == us


def test_hits_and_local_words_are_charged_if_that_is_asked_for():
    costs = PodCosts(
        fill_s=0.0,
        flush_s=0.0,
        invalidate_s=0.0,
        bytes_per_s=1e9,
        dma_latency_s=0.0,
        hit_s=1 * US,
        local_s=3 * US,
    )

    def program(mem):
        load(mem, 0)
        store(mem, 0, load(mem, 0))
        local_lock(mem, 1)
        local_store(mem, 1, local_load(mem, 1))
        local_unlock(mem, 1)

    assert Desk(costs=costs).took_us((0, program)) == 14


def test_nodes_work_at_the_same_time():
    assert Desk().took_us((0, store_flush), (1, store_flush), (1, load_flush_load)) == 5


# -- what is stale --------------------------------------------------------------------------------


def test_a_copy_stays_old_until_it_is_dropped():
    seen = []

    def reader(mem):
        load(mem, 0)
        sleep(mem, 20)
        seen.append(load(mem, 0))
        clflush(mem, 0)
        seen.append(load(mem, 0))

    def writer(mem):
        sleep(mem, 2)
        store(mem, 0, 7)
        clflush(mem, 0)

    Desk().run((0, reader), (1, writer))
    assert seen == [0, 7]


def test_what_is_not_flushed_is_seen_on_its_own_node_only():
    def writer(mem):
        store(mem, 0, 7)

    def reader(mem):
        sleep(mem, 5)
        return load(mem, 0)

    assert Desk().run((0, writer), (0, reader), (1, reader)) == [None, 7, 0]


def test_a_line_is_written_back_whole():
    def slow(mem):
        store(mem, 8, 1)
        sleep(mem, 20)
        clflush(mem, 8)

    def quick(mem):
        sleep(mem, 2)
        store(mem, 0, 2)
        clflush(mem, 0)

    desk = Desk()
    desk.run((0, slow), (1, quick))
    assert desk.pod.alone(lambda mem: [load(mem, 0), load(mem, 8)]) == [0, 1]


@pytest.mark.parametrize("post", [clflushopt, clwb])
@pytest.mark.parametrize(("wait", "seen"), [(False, 0), (True, 5)])
def test_a_posted_line_lands_later_and_a_fence_waits_if_the_device_promises_it(post, wait, seen):
    desk = Desk(fences_wait_for_arrival=wait)

    def program(mem):
        store(mem, 0, 5)
        post(mem, 0)
        sfence(mem)
        early = desk.pod.alone(load, 0)
        own = load(mem, 0)
        sleep(mem, 10)
        return early, own, desk.pod.alone(load, 0)

    assert desk.run((0, program)) == [(seen, 5, 5)]


def test_posted_write_backs_of_a_line_land_in_order():
    def program(mem):
        ntstore(mem, 0, 1)
        ntstore(mem, 8, 2)
        store(mem, 0, 3)
        clflush(mem, 0)
        sleep(mem, 10)

    desk = Desk()
    desk.run((0, program))
    assert desk.pod.alone(lambda mem: [load(mem, 0), load(mem, 8)]) == [3, 2]


def test_the_flush_of_a_lock_word_lands_when_it_is_paid_for():
    desk = Desk()
    desk.pod.lock_words(0, 8)

    def writer(mem):
        for off in (0, LINE):
            store(mem, off, 1)
            clflush(mem, off)

    def reader(mem, us):
        sleep(mem, us)
        return load(mem, 0), load(mem, LINE)

    # An ordinary line may be early, a lock word never is: store 1 us, flush 4 us.
    assert desk.run((0, writer), (1, reader, 4))[1] == (0, 0)
    desk = Desk()
    desk.pod.lock_words(0, 8)
    assert desk.run((0, writer), (1, reader, 6))[1] == (1, 1)


# -- waiting --------------------------------------------------------------------------------------


def wait_for(mem, off=0):
    polls = 0
    while load(mem, off) == 0:
        polls += 1
        pause(mem, off, 8)
        clflush(mem, off)
    return polls


def raise_after(mem, us, off=0):
    sleep(mem, us)
    store(mem, off, 1)
    clflush(mem, off)


def test_a_pause_sleeps_until_something_lands_and_charges_one_poll():
    desk = Desk()
    desk.pod.lock_words(0, 8)
    polls, _ = desk.run((0, wait_for), (1, raise_after, 1000))
    assert polls == 2  # the first pause on a range returns at once
    # 1,000 us, store and flush 5 us, then flush and load 3 us.
    assert desk.clock.now() == pytest.approx(1008 * US)


@pytest.mark.parametrize("us", range(12))
def test_no_change_is_slept_through(us):
    Desk().run((0, wait_for), (1, raise_after, us))


def test_a_store_on_the_same_node_wakes():
    def raise_here(mem):
        sleep(mem, 50)
        store(mem, 0, 1)

    Desk().run((0, wait_for), (0, raise_here))


def test_a_word_of_the_nodes_own_memory_wakes_who_read_it():
    def waiter(mem):
        while local_load(mem, 3) == 0:
            pause(mem, 0, 8)

    def setter(mem):
        sleep(mem, 50)
        local_store(mem, 3, 1)

    desk = Desk()
    assert desk.took_us((0, waiter), (0, setter)) == 50


def test_a_wait_for_nothing_is_told():
    with pytest.raises(DeadlockError):
        Desk().run((0, wait_for))


def test_who_looks_at_the_clock_sees_time_pass():
    def until(mem):
        end_ns = now(mem) + 100_000
        while now(mem) < end_ns:
            pause(mem, 0, 8)

    assert 100 <= Desk().took_us((0, until)).expected < 102


def test_local_locks_exclude_and_are_served_in_order():
    order = []

    def holder(mem, name, us):
        sleep(mem, us)
        local_lock(mem, 0)
        order.append(name)
        sleep(mem, 10)
        order.append(name)
        local_unlock(mem, 0)

    desk = Desk()
    assert desk.took_us((0, holder, "a", 0), (0, holder, "b", 2), (0, holder, "c", 1)) == 30
    assert order == ["a", "a", "c", "c", "b", "b"]


def test_local_words_are_the_nodes_own():
    def program(mem):
        return local_add(mem, 0, 2), local_cas(mem, 0, 2, 9), local_load(mem, 0), node_id(mem)

    assert Desk().run((0, program), (1, program)) == [(0, 2, 9, 0), (0, 2, 9, 1)]


# -- DMA ------------------------------------------------------------------------------------------

WORDS = 125_000
"""1 MB: 1 ms on the pipe."""


def send(mem, off, words):
    handle = dma_write(mem, off, words)
    dma_wait(mem, handle)


def fetch(mem, off, n_words):
    words = np.zeros(n_words, np.int64)
    dma_wait(mem, dma_read(mem, off, words))
    return words


def test_dma_of_all_nodes_shares_the_devices_bandwidth():
    desk = Desk(size_bytes=64 * WORDS)
    data = np.arange(WORDS)
    assert desk.took_us((0, send, 0, data), (1, send, 8 * WORDS, data)) == 2010


def test_what_dma_wrote_dma_reads():
    def both(mem):
        send(mem, 128, np.arange(40))
        return fetch(mem, 128, 40).tolist()

    assert Desk().run((0, both)) == [list(range(40))]


def test_dma_drops_the_copies_of_its_own_node_only():
    def writer(mem):
        store(mem, 8, 4)
        send(mem, 0, np.array([1]))
        return load(mem, 0), load(mem, 8)

    def other(mem):
        load(mem, 0)
        sleep(mem, 50)
        return load(mem, 0)

    assert Desk().run((0, writer), (1, other)) == [(1, 4), 0]


def test_a_dma_that_is_polled_wakes_the_poller():
    def program(mem):
        handle = dma_write(mem, 0, np.arange(WORDS))
        while not dma_done(mem, handle):
            pause(mem, 0, 8)

    assert Desk(size_bytes=64 * WORDS).took_us((0, program)) == 1010


def test_phantom_words_are_charged_in_full_and_carry_what_stands_for_them():
    desk = Desk(size_bytes=1 << 36)

    def program(mem):
        send(mem, 1 << 35, PhantomWords(WORDS, (1, -2, 3)))
        found = PhantomWords(WORDS)
        dma_wait(mem, dma_read(mem, 1 << 35, found))
        return found.stand_in

    assert desk.run((0, program)) == [(1, -2, 3, 0, 0, 0, 0, 0)]
    assert desk.clock.now() == pytest.approx(2020 * US)


def test_phantom_words_that_were_partly_overwritten_are_no_words():
    desk = Desk(size_bytes=64 * WORDS)

    def program(mem):
        send(mem, 0, PhantomWords(WORDS, (1,)))
        send(mem, 4 * WORDS + 32, PhantomWords(WORDS, (2,)))
        found = PhantomWords(WORDS)
        dma_wait(mem, dma_read(mem, 0, found))
        send(mem, 0, PhantomWords(WORDS // 2 + 4, (2,)))
        dma_wait(mem, dma_read(mem, 4 * WORDS + 32, found))
        return found.stand_in

    assert desk.run((0, program)) == [(2, 0, 0, 0, 0, 0, 0, 0)]


# -- the pod --------------------------------------------------------------------------------------


def test_runs_are_the_same_each_time():
    def ended():
        desk = Desk()
        desk.pod.lock_words(0, 8)
        desk.run((0, wait_for), (1, raise_after, 17), (1, send, LINE, np.arange(64)))
        return desk.clock.now(), desk.clock.timers, desk.clock.callbacks

    assert ended() == ended()


def test_a_task_that_is_cancelled_ends_its_program_where_it_waits():
    reached = []

    def program(mem):
        try:
            wait_for(mem)
        finally:
            reached.append("end")

    desk = Desk()

    async def test():
        job = desk.pod.start(0, program)
        await desk.clock.sleep(0.1)
        job.cancel()
        await desk.pod.joined()
        assert not desk.pod.watches.by_line
        with pytest.raises(asyncio.CancelledError):
            await job

    with desk.clock:
        desk.clock.run(test())
    assert reached == ["end"]


def test_an_error_of_a_program_is_its_callers():
    def program(mem):
        sleep(mem, 5)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        Desk().run((0, program))


def test_a_program_that_runs_alone_sees_the_device_and_takes_no_time():
    desk = Desk()

    def program(mem):
        dma_write(mem, 64, np.arange(3))
        store(mem, 0, 5)
        found = np.zeros(4, np.int64)
        dma_read(mem, 56, found)
        return load(mem, 0), found.tolist()

    assert desk.pod.alone(program) == (5, [0, 0, 1, 2])
    assert desk.run((1, load, 0)) == [5]


def test_the_same_program_runs_in_real_time():
    desk = Desk(wall=True)
    polls, _, _ = desk.run((0, wait_for), (1, raise_after, 300), (1, send, LINE, np.arange(64)))
    assert polls == 2
    assert desk.pod.alone(load, LINE + 8) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda mem: load(mem, 4),
        lambda mem: load(mem, -8),
        lambda mem: load(mem, 1 << 20),
        lambda mem: store(mem, 4, 1),
        lambda mem: store(mem, 0, 1 << 63),
        lambda mem: clflush(mem, 1 << 20),
        lambda mem: clwb(mem, 1 << 20),
        lambda mem: ntstore(mem, 12, 1),
        lambda mem: pause(mem, 0, 0),
        lambda mem: pause(mem, (1 << 20) - 8, 16),
        lambda mem: dma_write(mem, (1 << 20) - 8, np.arange(2)),
        lambda mem: dma_read(mem, 0, np.zeros(0, np.int64)),
        lambda mem: dma_write(mem, 8, PhantomWords(8)),
        lambda mem: dma_wait(mem, 77),
        lambda mem: local_unlock(mem, 0),
        lambda mem: [local_lock(mem, 0), local_lock(mem, 0)],
    ],
)
def test_what_cannot_be_is_refused(program):
    with pytest.raises(PodUsageError):
        Desk().run((0, program))


def test_a_pod_that_cannot_be_is_refused():
    clock = VirtualClock()
    for size_bytes, nodes in ((100, 1), (0, 1), (64, 0)):
        with pytest.raises(PodUsageError):
            VirtualPod(clock, size_bytes, COSTS, nodes=nodes)
    with pytest.raises(ValueError, match="stand for"):
        PhantomWords(4)
    pod = VirtualPod(clock, 64, COSTS, nodes=1)
    with pytest.raises(PodUsageError, match="nodes 0 to 0"), clock:
        clock.run(pod.run(1, load, 0))
