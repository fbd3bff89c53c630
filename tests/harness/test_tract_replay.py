"""TraCT under a replayed chat: right data, hits across nodes, nothing held, the same each time."""

from __future__ import annotations

import dataclasses

import pytest

from cxlbench.devices.profile import ScaleError, SharedType3Profile, load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.harness.pod_profile import virtual_costs
from cxlbench.harness.tract_replay import TractReplay, replay_on_tract
from cxlbench.harness.tract_rig import TractRig, TractRigSpec
from cxlbench.tract.errors import LayoutError, RegionTooSmallError
from tests.harness.workbench import BLOCK_BYTES, GIB, MIB, chat, engine

SPEC = TractRigSpec(block_bytes=BLOCK_BYTES, capacity_bytes=4 * GIB)


def replay(spec: TractRigSpec = SPEC, *, gpu_blocks: int = 0, **options) -> TractReplay:
    return replay_on_tract(chat(), spec, engine(), gpu_blocks=gpu_blocks, **options)


def test_a_chat_is_replayed_and_its_history_comes_from_the_shared_memory() -> None:
    done = replay()
    assert done.correct, done
    assert done.hit_rate > 0.9
    assert done.tier_blocks == len(done.blocks.nbytes) > 0
    assert done.mismatched_blocks == 0
    # Sessions go from node to node: what one worker stored another one read.
    writers = {record.worker for record in done.records}
    assert writers == {0, 1}


def test_a_replay_is_the_same_each_time() -> None:
    first, second = replay(), replay()
    assert first == second
    assert first.blocks.done_s == second.blocks.done_s


def test_a_small_region_evicts_and_stays_right() -> None:
    done = replay(dataclasses.replace(SPEC, capacity_bytes=320 * MIB))
    assert done.correct
    assert 0 < done.hit_rate < replay().hit_rate


def test_what_the_gpu_has_is_not_read() -> None:
    done = replay(gpu_blocks=1000)
    assert done.correct
    assert done.tier_blocks < replay().tier_blocks


def test_reads_take_what_the_profile_says() -> None:
    done = replay()
    fastest = min(done.blocks.latencies_s())
    memory = load_as(SharedType3Profile, "niagara-2.0")
    assert fastest >= BLOCK_BYTES / memory.bandwidth
    assert fastest < 1.5 * BLOCK_BYTES / memory.bandwidth


def test_the_same_text_runs_with_real_bytes_in_real_time() -> None:
    spec = dataclasses.replace(SPEC, scale=1024)
    workload = chat(sessions=2, turns=3, think_s=0.01)
    done = replay_on_tract(workload, spec, engine(), gpu_blocks=0, wall=True)
    assert done.correct
    assert done.tier_blocks > 0


def test_costs_are_those_of_the_profile() -> None:
    memory = load_as(SharedType3Profile, "niagara-2.0")
    costs = virtual_costs(memory)
    assert (costs.fill_s, costs.flush_s) == (memory.latency, memory.flush_latency)
    assert costs.bytes_per_s == memory.bandwidth


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"scale": 1e6}, ScaleError),
        ({"capacity_bytes": 8 * MIB}, RegionTooSmallError),
        ({"nodes": 65}, LayoutError),
    ],
)
def test_a_rig_that_cannot_be_is_refused(changes, error) -> None:
    with VirtualClock() as clock, pytest.raises(error):
        TractRig(clock, dataclasses.replace(SPEC, **changes))
