"""The native executor: the same programs on a real mapping, with the processor's own flushes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cxlbench.emu import flush_instructions
from cxlbench.emu.flush_instructions import FlushUnsupportedError, flush_support
from cxlbench.emu.pod_layout import PodLayoutError, PodShape
from cxlbench.emu.pod_local import PodAddressError
from cxlbench.emu.pod_node_process import NodeForker
from cxlbench.emu.pod_processes import LivePod

PROGRAMS = "tests.emu.live_programs"

needs_flushes = pytest.mark.skipif(
    not flush_instructions.SUPPORT.clwb, reason=flush_instructions.SUPPORT.refusal("clwb")
)


@pytest.fixture(scope="module")
def forker():
    with NodeForker(prepare=[f"{PROGRAMS}:warm_up"]) as forker:
        yield forker


@pytest.fixture
def pod(forker, tmp_path):
    shape = PodShape(1 << 14, nodes=2, processes=2, mode="native")
    with LivePod(shape, forker=forker, region=tmp_path / "memory") as pod:
        yield pod


@needs_flushes
def test_every_operation_works_on_the_mapping_itself(pod):
    memory = pod.memory(0)
    memory.store(0, 7)
    memory.ntstore(8, 8)
    for flush in (memory.clflush, memory.clflushopt, memory.clwb):
        flush(0)
    memory.sfence()
    memory.mfence()
    memory.pause(0, 8)
    assert (memory.load(0), memory.load(8), pod.device[:2].tolist()) == (7, 8, [7, 8])
    assert memory.node_id() == 0
    assert pod.memory(1).load(0) == 7


@needs_flushes
def test_a_dma_moves_words_and_not_their_neighbours(pod):
    memory = pod.memory(0)
    pod.device[:] = -1
    memory.dma_wait(memory.dma_write(8, np.arange(20)))
    assert pod.device[:22].tolist() == [-1, *range(20), -1]
    words = np.zeros(3, dtype=np.int64)
    handle = memory.dma_read(16, words)
    assert memory.dma_done(handle)
    assert words.tolist() == [1, 2, 3]


@needs_flushes
def test_what_is_written_is_in_the_file(pod, tmp_path):
    pod.memory(1).store(16, 77)
    assert np.fromfile(tmp_path / "memory", dtype=np.int64)[2] == 77


@needs_flushes
def test_the_same_program_runs_between_native_nodes(pod):
    processes = []
    for node, (mine, theirs) in enumerate([(0, 64), (64, 0)]):
        processes += pod.start(
            node, f"{PROGRAMS}:run", "hand_over", mine, theirs, 300, True, processes=1
        )
    for process in processes:
        process.receive()
        process.send("go")
    for process in processes:
        process.result()
    assert (pod.device[0], pod.device[8]) == (300, 300)


@needs_flushes
def test_processes_of_a_node_count_exactly_and_nodes_are_apart(pod):
    processes = pod.start(0, f"{PROGRAMS}:run", "count_up", 5, 10, 200_000, 2)
    for process in processes:
        process.receive()
    for process in processes:
        process.send("go")
    for process in processes:
        process.result()
    assert [pod.memory(0).local_load(word) for word in (10, 11)] == [400_000, 4_000_000]
    assert pod.memory(1).local_load(10) == 0


@needs_flushes
def test_a_fenced_node_starts_with_empty_local_memory_and_the_region_stays(pod):
    pod.memory(0).local_lock(1)
    pod.memory(0).local_store(0, 5)
    pod.memory(0).store(0, 7)
    pod.fence(0)
    assert pod.incarnation(0) == 1
    pod.memory(0).local_lock(1)
    assert (pod.memory(0).local_load(0), pod.memory(0).load(0)) == (0, 7)


@needs_flushes
def test_words_outside_the_region_are_refused(pod):
    for operation in (pod.memory(0).load, pod.memory(0).clflush):
        with pytest.raises(PodAddressError, match="outside the region"):
            operation(1 << 14)
    with pytest.raises(PodAddressError, match="not aligned"):
        pod.memory(0).store(4, 1)


def test_a_character_device_that_is_no_memory_is_refused(tmp_path):
    with pytest.raises(PodLayoutError, match="not a DAX device"):
        LivePod(PodShape(1 << 14, mode="native"), region=Path("/dev/zero"))


# Which flushes there are

FULL = "+sse2,+clflushopt,+clwb"


def test_a_flush_is_there_if_processor_and_code_generator_have_it():
    both = flush_support(
        machine="x86_64", processor_flags=frozenset({"clflushopt", "clwb"}), target_features=FULL
    )
    assert (both.clflush, both.clflushopt, both.clwb) == (True, True, True)


def test_a_flush_that_the_processor_lacks_is_refused_with_what_there_is():
    support = flush_support(
        machine="x86_64", processor_flags=frozenset({"clflushopt"}), target_features=FULL
    )
    support.require("clflush")
    support.require("clflushopt")
    with pytest.raises(FlushUnsupportedError, match=r"no clwb .*cpuinfo.*here: clflush, clfl"):
        support.require("clwb")


def test_a_flush_that_the_code_generator_lacks_is_refused():
    support = flush_support(
        machine="x86_64", processor_flags=frozenset({"clflushopt", "clwb"}), target_features="+sse2"
    )
    with pytest.raises(FlushUnsupportedError, match="numba's target features leave out clflushopt"):
        support.require("clflushopt")


def test_another_architecture_is_refused_with_what_to_use_instead():
    support = flush_support(machine="aarch64")
    for instruction in ("clflush", "clflushopt", "clwb"):
        with pytest.raises(FlushUnsupportedError, match=r"aarch64, not x86-64.*emulated pod"):
            support.require(instruction)


ELSEWHERE = """
import platform, sys
if sys.argv[1] == "aarch64":
    platform.machine = lambda: "aarch64"
from cxlbench.emu.flush_instructions import FlushUnsupportedError
from cxlbench.emu.pod_layout import PodLayoutError, PodShape
from cxlbench.emu.pod_processes import LivePod
try:
    with LivePod(PodShape(4096, mode="native")) as pod:
        pod.memory(0).clflush(0)
        pod.memory(0).clwb(0)
except FlushUnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("case", "environment", "said"),
    [
        ("aarch64", {}, "no clflush on this host (it is aarch64, not x86-64)"),
        ("generic", {"NUMBA_CPU_NAME": "generic"}, "no clwb on this host (numba's target features"),
    ],
)
def test_compiled_code_refuses_a_missing_flush_and_never_stands_in_for_it(case, environment, said):
    if case == "generic" and not flush_instructions.SUPPORT.clflush:
        pytest.skip("needs an x86-64")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, case],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in done.stdout
