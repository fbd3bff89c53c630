"""Profiles of shared memory: what they make of a pod, live and under a clock, is what it does."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from cxlbench.devices.profile import ProfileError
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pod_layout import ArrivalLaw, CacheGeometry, DeviceCosts, PodShape
from cxlbench.emu.pod_ops import clflush, clflushopt, dma_wait, dma_write, load, store
from cxlbench.emu.pod_processes import LivePod
from cxlbench.emu.pod_virtual import VirtualPod
from cxlbench.harness.pod_profile import load_shared_memory, on_profile, virtual_costs

NIAGARA = load_shared_memory("niagara-2.0")
SLOW = dataclasses.replace(
    NIAGARA, latency=2e-3, flush_latency=3e-3, bandwidth=64e6 / 100, fence_waits=True
)
"""A line takes 2 ms to come, 3 ms to be flushed, and occupies the pipe for 100 us."""
ROOT = Path(__file__).parents[2]


def test_a_pod_on_niagara_has_its_caches_its_arrival_law_and_its_costs():
    shape = on_profile(PodShape(4096, nodes=3, seed=7), NIAGARA)
    assert shape.cache == CacheGeometry(sets=1024, ways=4, posted=256)
    assert shape.arrival == ArrivalLaw("ns", 0, 100_000)
    assert shape.costs == DeviceCosts(fill_ns=640, flush_ns=1410, line_ps=6337)
    assert not shape.fence_arrives
    assert (shape.nodes, shape.seed, shape.region_bytes) == (3, 7, 4096)


@pytest.mark.parametrize(
    ("name", "fill_ns", "line_ps"),
    [("niagara-2.0-cmpi", 790, 6737), ("niagara-2.0-hymcache", 600, 6337)],
)
def test_other_memories_have_costs_of_their_own(name, fill_ns, line_ps):
    costs = on_profile(PodShape(4096), load_shared_memory(name)).costs
    assert (costs.fill_ns, costs.line_ps) == (fill_ns, line_ps)


def test_a_native_pod_stays_what_the_machine_is():
    shape = PodShape(4096, mode="native")
    assert on_profile(shape, NIAGARA) == shape


def own_profile(folder, **changes):
    """Write niagara-2.0 with other values."""
    text = (ROOT / "devices/profiles/niagara-2.0.toml").read_text()
    text = text.replace('name = "niagara-2.0"', 'name = "own"')
    for key, value in changes.items():
        before, _, after = text.partition(f"[{key}]\nvalue = ")
        text = f"{before}[{key}]\nvalue = {value}\n{after.partition(chr(10))[2]}"
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_cache": 192}, "no power of two of sets; use 128 KiB"),
        ({"node_cache_ways": 65}, "node_cache_ways"),
        ({"posted_write_backs": 100}, "is 100, expected a power of two"),
        ({"arrival_shortest": 1}, "above its upper end"),
        ({"arrival_longest": 100_000_000}, "arrival_longest"),
        ({"line": 128, "node_cache": 512}, "line: is 128 B: the pod has lines of 64 B"),
        ({"fence_waits": '"often"'}, "fence_waits"),
    ],
)
def test_a_memory_that_no_pod_can_have_is_refused(tmp_path, changes, said):
    with pytest.raises(ProfileError, match=said):
        load_shared_memory(own_profile(tmp_path, **changes))


def test_a_memory_without_caches_is_refused_by_what_is_missing(tmp_path):
    path = Path(own_profile(tmp_path))
    text = path.read_text()
    path.write_text(text[: text.index("[node_cache]")])
    with pytest.raises(ProfileError, match="node_cache: is missing"):
        load_shared_memory(str(path))


# What the numbers do, in wall time and in virtual time


def one_line(mem):
    """Two fills, one hit and one flush: 2 + 3 + 2 ms, and the bandwidth where it counts."""
    load(mem, 0)
    store(mem, 0, 1)
    clflush(mem, 0)
    load(mem, 0)


def one_dma(mem):
    """Ten lines: 1 ms of the pipe, and 2 ms of latency."""
    dma_wait(mem, dma_write(mem, 0, np.arange(80)))


@pytest.mark.parametrize(("program", "least_s"), [(one_line, 7e-3), (one_dma, 3e-3)])
def test_a_program_takes_the_devices_time_on_both_clocks(program, least_s):
    with VirtualClock() as clock:
        pod = VirtualPod(clock, 4096, virtual_costs(SLOW), nodes=1)
        clock.run(pod.run(0, program))
        assert clock.now() == pytest.approx(least_s)
    with LivePod(on_profile(PodShape(4096, nodes=1), SLOW)) as live:
        memory = live.memory(0)
        memory.now()
        begin = memory.now()
        program(memory)
        assert memory.now() - begin >= least_s * 1e9
        program(memory)


def test_without_a_profile_nothing_is_charged():
    with LivePod(PodShape(4096, nodes=1)) as live:
        memory = live.memory(0)
        one_line(memory)
        took = []
        for _ in range(20):
            begin = memory.now()
            one_line(memory)
            took.append(memory.now() - begin)
        assert min(took) < 7e6


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_posted_arrives_as_the_profile_says(waits):
    late = dataclasses.replace(
        NIAGARA, arrival_shortest=50.0, arrival_longest=60.0, fence_waits=waits
    )
    with LivePod(on_profile(PodShape(4096, nodes=1), late)) as live:
        memory = live.memory(0)
        memory.store(0, 7)
        memory.clflushopt(0)
        for _ in range(200):
            memory.pause(0, 8)
        assert live.device[0] == 0
        memory.sfence()
        assert live.device[0] == 7 * waits


def test_a_small_cache_of_the_profile_loses_lines():
    tiny = dataclasses.replace(NIAGARA, node_cache=128, node_cache_ways=2)
    with LivePod(on_profile(PodShape(4096, nodes=1), tiny)) as live:
        for line in range(4):
            live.memory(0).store(64 * line, 1)
        assert live.counters(0)["evictions"] == 2


def post(mem, landed):
    for line in range(30):
        store(mem, 64 * line, 1)
        clflushopt(mem, 64 * line)
        landed.append(mem.cache.posted[line][0].due_s)


def test_arrivals_under_a_clock_lie_within_the_bounds_and_follow_the_seed():
    memory = dataclasses.replace(NIAGARA, arrival_shortest=1e-6, arrival_longest=1e-3, latency=0.0)

    def arrivals(seed):
        with VirtualClock() as clock:
            pod = VirtualPod(clock, 4096, virtual_costs(memory), nodes=1, seed=seed)
            due = []
            clock.run(pod.run(0, post, due))
            return due

    first = arrivals(1)
    assert first == arrivals(1) != arrivals(2)
    assert 1e-6 <= min(first) < 1e-5
    assert 1e-4 < max(first) <= 1e-3 + 1e-9


# The commands


@pytest.mark.skipif(
    not os.environ.get("CXLBENCH_LARGE"),
    reason="charged programs are compiled for a minute; CI runs it with CXLBENCH_LARGE=1",
)
def test_stress_runs_on_a_users_own_memory(cli, tmp_path):
    path = own_profile(tmp_path, latency=650)  # another geometry would be compiled for minutes
    ran = cli(
        *("pod", "stress", "--profile", path, "--nodes", "2", "--workers", "1"),
        *("--acquisitions", "1", "--lookups", "1", "--json"),
    )
    assert ran.code == 0
    assert ran.document["profile"] == "own"
    assert ran.document["problems"] == []


@pytest.mark.parametrize("command", [("pod", "stress"), ("bench", "pod")])
@pytest.mark.parametrize("profile", ["niagara-3.0", "pm1743-class"])
def test_a_profile_of_no_shared_memory_exits_2(cli, command, profile):
    ran = cli(*command, "--profile", profile)
    assert (ran.code, ran.out) == (2, "")
    assert profile in ran.err


def test_a_native_pod_takes_no_profile(cli):
    ran = cli("pod", "stress", "--mode", "native", "--profile", "niagara-2.0")
    assert ran.code == 2
    assert "native ones have this machine's memory" in ran.err
