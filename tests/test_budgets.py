"""What a replay may cost the host: timers, callbacks and memory per block, whatever the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlbench.harness.bench_replay import MAX_CALLBACKS, MAX_CPU_S, MAX_RESIDENT_BYTES, MAX_TIMERS
from cxlbench.harness.replay import replay
from cxlbench.harness.requests import Mode
from cxlbench.harness.traces import read_trace
from tests.harness.workbench import GIB, MIB, SHAPE, chat, engine, spec

CASES = {
    "a chat": {},
    "without prefetch": {"rig": {"prefetch": False}},
    "one block in flight": {"rig": {"window_bytes": MIB}},
    "no GPU cache": {"gpu_blocks": 0},
    "too small a device": {"capacity_bytes": GIB},
    "a full write buffer": {
        "dram_bytes": GIB,
        "compute": engine(peak_compute="100000 TFLOP/s"),
        "gpu_blocks": 0,
    },
    "several nodes": {"rig": {"nodes": 2, "devices_per_node": 2, "workers": 4}},
    "an impatient reader": {"rig": {"deadline_s": 0.01}},
}


def test_the_bars_are_those_that_were_promised():
    """Of the whole Mooncake trace, which ``.ci/run`` replays with ``bench replay --strict``."""
    assert (MAX_TIMERS, MAX_CALLBACKS) == (15, 45)
    assert (MAX_CPU_S, MAX_RESIDENT_BYTES) == (90, 2e9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["cxl-hm", "cmm-h"])
def test_a_block_costs_few_events(kind, case):
    result = replay(chat(sessions=16), spec(kind, **CASES[case]), wall=False)
    assert result.correct
    figures = result.figures
    assert figures.tier_blocks + figures.timed_out_blocks > 0
    assert figures.stored_blocks > 0
    assert figures.timers_per_block <= MAX_TIMERS
    assert figures.callbacks_per_block <= MAX_CALLBACKS


def resident_bytes() -> int:
    """Return the memory that this process has in use; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) << 10


def reused_at_best(workload) -> int:
    """Return the leading blocks that came earlier in the trace: what an endless cache would hit."""
    seen: set[int] = set()
    hits = 0
    for request in workload.requests:
        for block in request.block_ids[: request.reusable_blocks(workload.block_tokens)]:
            if block not in seen:
                break
            hits += 1
        seen.update(request.block_ids)
    return hits


def test_a_thousand_requests_of_a_real_trace_at_full_scale(trace_path):
    """Mooncake's conversations in their own blocks of 512 tokens (64 MiB), 0.9 TiB written."""
    path = trace_path("mooncake_fast25_conversation_trace.jsonl.gz")
    work = read_trace(path, mode=Mode.WHOLE_BLOCKS, limit=1000)
    assert work.block_tokens == 512
    block_bytes = SHAPE.block_bytes(512)
    before = resident_bytes()
    result = replay(
        work,
        spec(
            "cxl-hm",
            dram_bytes=64 * GIB,
            capacity_bytes=1800 * GIB,
            gpu_blocks=512,
            closed_loop=False,
            rig={"workers": 8, "block_bytes": block_bytes},
        ),
        wall=False,
    )
    grown = resident_bytes() - before
    figures = result.figures
    assert result.correct
    assert figures.requests == 1000
    best = reused_at_best(work)
    # Requests that overlap have not computed their blocks yet when the next one comes.
    assert 0.9 * best <= figures.seen_blocks <= best
    assert 0.9 <= figures.hit_rate <= 1
    assert figures.tier_blocks > figures.gpu_blocks > 0
    assert figures.timers_per_block <= MAX_TIMERS
    assert figures.callbacks_per_block <= MAX_CALLBACKS
    assert figures.stored_blocks * block_bytes > 0.9 * 2**40
    assert grown < 400 * MIB
