"""What a replay in virtual time costs this host: ``cxlbench bench replay``.

A whole trace at full size, on tags: 8 workers with an 8B model's KV on one CXL-HM of the paper's
size, in the trace's own blocks. The bars are those of Mooncake's conversation trace (12,031
requests in blocks of 512 tokens): 90 s of one core from file to figures, 2 GB of memory, 15 timers
and 45 callbacks a block. (CPU time: with other work on the machine more time passes.) A part of the
trace must meet them too, which says little.

Memory is the most that the process ever had resident, so run it in a process of its own. Units: s
of the host's clock, bytes, blocks.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cxlbench.devices.profile import AcceleratorProfile, CxlHmProfile, load_as
from cxlbench.harness.engine import EngineModel, kv_blocks
from cxlbench.harness.replay import ReplaySpec, replay
from cxlbench.harness.requests import Mode
from cxlbench.harness.rig import RigSpec
from cxlbench.harness.traces import read_trace
from cxlbench.kv.geometry import model_shape

MAX_CPU_S = 90.0
MAX_RESIDENT_BYTES = 2 * 10**9
MAX_TIMERS, MAX_CALLBACKS = 15, 45
"""Per KV block read or written."""

WORKERS = 8


@dataclass(frozen=True, slots=True)
class ReplayBench:
    """What one replay cost, and what it came to."""

    trace: str
    requests: int
    blocks: int
    """Read from the tier, and stored in it."""
    virtual_s: float
    elapsed_s: float
    cpu_s: float
    peak_resident_bytes: int
    timers_per_block: float
    callbacks_per_block: float
    hit_rate: float
    correct: bool


def bench_replay(
    trace: Path,
    *,
    limit: int | None = None,
    seed: int = 1,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> ReplayBench:
    """Read and replay ``trace``, or its first ``limit`` requests.

    Raises:
        TraceError: the trace cannot be read.
        WorkloadError: it records no block ids, so nothing in it can be found again.
    """
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    workload = read_trace(
        trace,
        mode=Mode.WHOLE_BLOCKS,
        limit=limit,
        progress=lambda done, total: progress("reading the trace, bytes", done, total),
    )
    workload.require_ids("a replay")
    shape = model_shape("Llama-3.1-8B")
    accelerator = load_as(AcceleratorProfile, "a100-80g")
    block_bytes = shape.block_bytes(workload.block_tokens)
    spec = ReplaySpec(
        rig=RigSpec(
            device=load_as(CxlHmProfile, "cxl-hm-prototype"),
            block_bytes=block_bytes,
            workers=WORKERS,
            seed=seed,
        ),
        engine=EngineModel(shape, accelerator),
        gpu_blocks=kv_blocks(shape, accelerator, block_bytes),
    )
    result = replay(
        workload,
        spec,
        wall=False,
        progress=lambda done, total: progress("replaying requests", done, total),
    )
    figures = result.figures
    return ReplayBench(
        trace=workload.name,
        requests=figures.requests,
        blocks=figures.block_read.count + figures.stored_blocks,
        virtual_s=figures.duration_s,
        elapsed_s=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - begin_cpu_s,
        peak_resident_bytes=peak_resident_bytes(),
        timers_per_block=figures.timers_per_block,
        callbacks_per_block=figures.callbacks_per_block,
        hit_rate=figures.hit_rate,
        correct=result.correct,
    )


def peak_resident_bytes() -> int:
    """Return the most memory that this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
