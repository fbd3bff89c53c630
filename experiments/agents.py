"""Coding agents on a node, by how many are at work at once.

Set-up: a seeded sample of real coding-agent sessions (kv-cache-tester's cc traces), 8, 32 or 128 of
them active at once, each to its end with the pauses of its tools; Llama-3.1-8B on one A100 joined
to the tier by 200 Gb/s; blocks of 256 tokens. Systems: the GPU's prefix cache, LMCache with 64 GB
of local DRAM, Mooncake with 1 TB, HyMCache. Sessions are cut where a prompt exceeds the model's
context or the session its share of references, so that all loads together stay under a million.

Neither paper has this figure: it answers whether such a tier would help agents, whose prompts are
long (100 k tokens at the median) and of which 96 % is a prefix seen before.

Left out: sub-agents that run beside their parent (they run in order), pauses beyond a cap.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from cxlbench.experiments import testbed, trace_runs
from cxlbench.experiments.serving import Runs, all_checks, run_systems, total_row, with_own
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
    about_of,
)
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.traces.sample import sample_sessions

TRACE = "cc_traces_v8_692_delta.jsonl.gz"
ACTIVE = (8, 32, 128)
KNOBS = (
    testbed.model_knob("Llama-3.1-8B"),
    Knob(
        name="engine.block_tokens",
        value=256,
        unit="tokens",
        source="four of the trace's blocks of 64 tokens",
    ),
    Knob(
        name="trace.references",
        value=2500,
        quick=600,
        unit="blocks",
        source="of one session, so that all loads together stay under a million",
    ),
    Knob(
        name="trace.most_input_tokens",
        value=131072,
        unit="tokens",
        source="context length of Llama-3.1",
    ),
    Knob(
        name="trace.think_cap_s",
        value=30.0,
        unit="s",
        assumption=True,
        source="pauses of tools and people beyond it only make the run longer",
    ),
    testbed.COMPUTE,
    trace_runs.FOLDER,
    trace_runs.LMCACHE_GIB,
    trace_runs.MOONCAKE_GIB,
)


def workload_of(context: Context, active: int) -> Workload:
    """Return the sessions for one load."""
    workload = sample_sessions(
        trace_runs.trace_file(context, TRACE),
        sessions=active,
        references=context.count("trace.references"),
        block_tokens=context.count("engine.block_tokens"),
        most_input_tokens=context.count("trace.most_input_tokens"),
        seed=context.seed,
    )
    cap = context.number("trace.think_cap_s")
    return dataclasses.replace(
        workload,
        requests=tuple(
            dataclasses.replace(r, think_s=min(r.think_s, cap)) for r in workload.requests
        ),
    )


def run(context: Context) -> Findings:
    """Run all systems at every load."""
    rows: list[Row] = []
    checks: list[Check] = []
    found: dict[int, Runs] = {}
    references = 0
    for active in ACTIVE:
        if context.stopping():
            break
        workload = workload_of(context, active)
        references += sum(len(r.block_ids) for r in workload.requests)
        found[active] = run_systems(
            context,
            with_own(context, trace_runs.systems(context, link="nic-200g")),
            partial(testbed.single_node, context),
            workload,
            Drive(order=Order.SESSIONS, concurrency=active),
            labels=f", {active} active",
        )
        for label, one in found[active].by_label.items():
            total = total_row(one, active=active, system=label)
            del total["turn"]
            rows.append(total)
        checks += all_checks(found[active], f", {active} active")
    checks.append(
        Check(
            name="under a million references in all",
            ok=references <= 1_000_000,
            detail=f"{references:,}",
        )
    )
    series: dict[str, dict[str, tuple[list[float | str], list[float]]]] = {}
    for column in ("ttft_mean_s", "hit_rate"):
        for row in rows:
            x, y = series.setdefault(column, {}).setdefault(str(row["system"]), ([], []))
            x.append(float(row["active"] or 0))
            y.append(float(row[column] or 0))
    return Findings(
        rows=rows,
        plots=(
            Plot(
                name="ttft",
                title="Mean time to first token, coding agents",
                x_label="active sessions",
                y_label="TTFT, s",
                kind="line",
                series=series.get("ttft_mean_s", {}),
            ),
            Plot(
                name="hit-rate",
                title="Blocks not computed again, coding agents",
                x_label="active sessions",
                y_label="hit rate",
                kind="line",
                series=series.get("hit_rate", {}),
            ),
        ),
        checks=checks,
        partial=len(found) < len(ACTIVE) or any(runs.partial for runs in found.values()),
    )


EXPERIMENT = Experiment(
    name="agents",
    title="Coding agents at 8, 32 and 128 active sessions",
    source="kv-cache-tester's cc traces",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=trace_runs.PROFILES,
    claims=(),
    run=run,
    compares_tiers=True,
)
