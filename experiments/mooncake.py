"""Mooncake's conversation trace on a cluster, tier by tier.

Set-up: the public trace of real conversations (Mooncake, FAST'25: 59 minutes, 12,031 requests) by
its own arrival times on eight aggregated servers with an A100 each, Llama-3.1-8B, blocks of 512
tokens (64 MiB) as the trace has them. Systems: the GPU's prefix cache, LMCache with 64 GB on each
server, Mooncake with 1 TB, HyMCache with 2 TB of SSD. The trace offers about 41 k input tokens/s,
more than one GPU prefills. Its footprint is 11 TB, so every tier evicts.

Neither paper has this figure. Answers are decoded to their recorded lengths.

Left out: sessions, which the trace does not record: routing is round-robin.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from cxlbench.experiments import testbed, trace_runs
from cxlbench.experiments.serving import all_checks, run_systems, total_row, with_own
from cxlbench.harness.experiment import Context, Experiment, Findings, Knob, Plot, Row, about_of
from cxlbench.harness.requests import Mode, Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.routing import Routing
from cxlbench.harness.traces import read_trace

TRACE = "mooncake_fast25_conversation_trace.jsonl.gz"
KNOBS = (
    testbed.model_knob("Llama-3.1-8B"),
    Knob(name="engine.block_tokens", value=512, unit="tokens", source="of the trace"),
    Knob(
        name="servers",
        value=8,
        assumption=True,
        source="no paper's: about as many as the trace's input tokens/s need",
    ),
    Knob(
        name="trace.seconds",
        value=3600,
        quick=240,
        unit="s",
        source="the whole trace; the quick form has its first minutes",
    ),
    testbed.ROUTING,
    testbed.COMPUTE,
    trace_runs.FOLDER,
    trace_runs.LMCACHE_GIB,
    trace_runs.MOONCAKE_GIB,
)


def workload_of(context: Context) -> Workload:
    """Return the trace, or its beginning."""
    workload = read_trace(
        trace_runs.trace_file(context, TRACE),
        mode=Mode.WHOLE_BLOCKS,
        block_tokens=context.count("engine.block_tokens"),
    )
    end_s = context.number("trace.seconds")
    return dataclasses.replace(
        workload, requests=tuple(r for r in workload.requests if r.arrival_s < end_s)
    )


def cluster_of(context: Context, prefix_caching: bool) -> ClusterSpec:
    """Return the servers."""
    return ClusterSpec(
        roofline=testbed.roofline(context),
        block_tokens=context.count("engine.block_tokens"),
        prefill_servers=context.count("servers"),
        routing=Routing(context.choice("routing")),
        prefix_caching=prefix_caching,
    )


def run(context: Context) -> Findings:
    """Run all systems."""
    runs = run_systems(
        context,
        with_own(context, trace_runs.systems(context)),
        partial(cluster_of, context),
        workload_of(context),
        Drive(order=Order.OPEN),
    )
    rows: list[Row] = []
    for label, one in runs.by_label.items():
        row = total_row(one, system=label)
        del row["turn"]
        rows.append(row)
    names = list(runs.by_label)
    return Findings(
        rows=rows,
        plots=(
            Plot(
                name="ttft",
                title="TTFT on Mooncake's conversations",
                x_label="TTFT, s",
                y_label="share of requests",
                kind="cdf",
                series={
                    label: (sorted(record.ttft_s for record in one.served), [])
                    for label, one in runs.by_label.items()
                },
            ),
            Plot(
                name="hit-rate",
                title="Blocks not computed again",
                x_label="",
                y_label="hit rate",
                kind="bar",
                series={"hit rate": (names, [runs.by_label[name].hit_rate for name in names])},
            ),
        ),
        checks=all_checks(runs),
        partial=runs.partial,
    )


EXPERIMENT = Experiment(
    name="mooncake",
    title="Mooncake's conversations on eight servers",
    source="Mooncake, FAST'25, conversation trace",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=trace_runs.PROFILES,
    claims=(),
    run=run,
    compares_tiers=True,
)
