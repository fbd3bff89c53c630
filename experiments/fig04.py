"""HyMCache fig. 4: the KV traffic of multi-turn serving on a remote tier.

Set-up (§3.1): Llama-3.1-8B on one prefill node whose GPU KV space is deliberately constrained, 512
conversations at once, 256 GB of remote DRAM over 100 Gb/s, 1 and 128 decoded tokens. Conversations
have LMSYS's mean lengths (``testbed.lmsys_like``). The tier is HyMCache's code on an expander
without SSDs: what it counts are the engine's reads and writes, not a device's limits. It reads
chains in their order by construction; counted is how often a block is read in a turn. The history
has the data set's answers, so that what is decoded is not what later turns reuse: with 128 decoded
tokens turns take longer, and their traffic is the same.

The footprint that a turn adds is read in two ways, since the paper's sentence allows both: as all
bytes that turn 7 reads (cumulative reads grow by so much), and as what it reads more than turn 6.

Left out: the bandwidth over time inside a turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from cxlbench.devices.profile import ExpanderProfile, Profile
from cxlbench.experiments import testbed
from cxlbench.experiments.serving import Runs, all_checks
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import Context, Experiment, Findings, Knob, Plot, Row, about_of
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.tiers.hymcache import HyMCacheTier

P = TypeVar("P", bound=Profile)

DECODED = (1, 128)
KNOBS = (
    testbed.model_knob("Llama-3.1-8B"),
    testbed.BLOCK_TOKENS,
    Knob(
        name="workload.sessions",
        value=512,
        quick=64,
        source="HyMCache §3.1: 512 requests at once; an eighth in the quick form",
    ),
    Knob(name="workload.turns", value=7, source="HyMCache §3.1 speaks of turns 6 and 7"),
    testbed.LMSYS_PROMPT,
    testbed.LMSYS_ANSWER,
    testbed.LMSYS_SPREAD,
    testbed.COMPUTE,
    Knob(
        name="gpu.kv_blocks",
        value=512,
        quick=64,
        unit="blocks",
        assumption=True,
        source="the paper constrains the GPU's KV space without saying how far; 8 GiB here",
    ),
    Knob(
        name="shrink",
        value=1,
        quick=8,
        source="the quick form has an eighth of the conversations and of the GPU's blocks; volumes "
        "are reported times this",
    ),
    Knob(
        name="tier.dram_gib",
        value=256,
        unit="GiB",
        source="HyMCache §3.1: 256 GB of remote DRAM",
    ),
)
CLAIMS = (
    PaperClaim(
        name="reads-grow",
        statement="Reads grow with every turn",
        source="HyMCache §3.1, fig. 4",
        sense=Sense.TRUE,
    ),
    PaperClaim(
        name="writes-level",
        statement="Writes stay level: the last turn writes as much as the second",
        source="HyMCache §3.1, fig. 4",
        expected=1.0,
        unit="x",
    ),
    PaperClaim(
        name="read-once-a-turn",
        statement="Blocks are read once a turn",
        source="HyMCache §3.1",
        expected=1.0,
        band=0.05,
        unit="reads per block and turn",
    ),
    PaperClaim(
        name="turn-7-reads",
        statement="Turn 7 adds more than 64 GB to the bytes read so far",
        source="HyMCache §3.1",
        expected=64.0,
        sense=Sense.AT_LEAST,
        unit="GiB",
    ),
    PaperClaim(
        name="turn-7-more-than-turn-6",
        statement="Turn 7 reads 64 GB more than turn 6 (the other reading of that sentence)",
        source="HyMCache §3.1",
        expected=64.0,
        sense=Sense.AT_LEAST,
        neutral=0.0,
        unit="GiB",
    ),
)


def run(context: Context) -> Findings:
    """Run both decode lengths."""
    runs = Runs()
    rows: list[Row] = []
    for decoded in DECODED:
        if context.stopping():
            runs.partial = True
            break
        label = f"{decoded} decoded"
        workload = testbed.lmsys_like(
            context,
            sessions=context.count("workload.sessions"),
            turns=context.count("workload.turns"),
            decoded=decoded,
        )
        found = _one(context, workload, label)
        runs.by_label[label] = found
        runs.partial |= not found.complete
        rows += _rows(context, found, workload, decoded)
    return Findings(
        rows=rows,
        claims=() if runs.partial else _claims(context, rows),
        plots=(_plot(rows, "read_GiB", "read"), _plot(rows, "written_GiB", "written")),
        checks=all_checks(runs),
        partial=runs.partial,
    )


def _one(context: Context, workload: Workload, label: str) -> Simulated:
    def profile(kind: type[P], name: str) -> P:
        found = context.profile(kind, name)
        if isinstance(found, ExpanderProfile):
            return replace(found, capacity=context.count("tier.dram_gib") * GIB)
        return found

    return simulate(
        workload,
        testbed.single_node(context, gpu_blocks=context.count("gpu.kv_blocks")),
        HyMCacheTier,
        Drive(order=Order.ROUNDS, concurrency=context.count("workload.sessions")),
        profile=profile,
        options={"device_kind": "dram", "device": "remote-dram", "deadline_s": 1e4},
        seed=context.seed,
        progress=lambda done, of: context.progress(label, done, of),
        stopping=context.stopping,
    )


def _rows(context: Context, run: Simulated, workload: Workload, decoded: int) -> list[Row]:
    shape = testbed.roofline(context).shape
    block_bytes = shape.block_bytes(context.count("engine.block_tokens"))
    block_gib = block_bytes * context.count("shrink") / GIB
    ids = {request.request_id: request.block_ids for request in workload.requests}
    rows: list[Row] = []
    for turn in run.turns:
        mine = [record for record in run.served if record.turn == turn.turn]
        read = [
            block
            for record in mine
            for block in ids[record.request_id][record.matched : record.matched + record.loaded]
        ]
        rows.append(
            {
                "decoded_tokens": decoded,
                "turn": turn.turn,
                "read_GiB": len(read) * block_gib,
                "written_GiB": sum(record.stored for record in mine) * block_gib,
                "reads_per_block": len(read) / len(set(read)) if read else None,
                "gpu_hit_blocks": turn.gpu_blocks,
                "tier_hit_blocks": turn.tier_blocks,
                "ttft_mean_s": turn.ttft.mean_s,
            }
        )
    return rows


def _claims(context: Context, rows: Sequence[Row]) -> list[JudgedClaim]:
    mine = [row for row in rows if row["decoded_tokens"] == 1]
    read = [float(row["read_GiB"] or 0) for row in mine]
    written = [float(row["written_GiB"] or 0) for row in mine]
    again = [float(row["reads_per_block"] or 1) for row in mine]
    grows = all(later > earlier for earlier, later in itertools.pairwise(read))
    measured = {
        "reads-grow": float(grows),
        "writes-level": written[-1] / written[1] if written[1] else None,
        "read-once-a-turn": max(again),
        "turn-7-reads": read[-1],
        "turn-7-more-than-turn-6": read[-1] - read[-2],
    }
    shape = testbed.roofline(context).shape
    sessions = context.count("workload.sessions") * context.count("shrink")
    tokens = context.number(testbed.LMSYS_PROMPT.name) + context.number(testbed.LMSYS_ANSWER.name)
    volumes = f"turn 6 reads {read[-2]:.1f} GiB, turn 7 {read[-1]:.1f} GiB"
    reasons = {
        "reads-grow": ", ".join(f"{gib:.1f}" for gib in read) + " GiB by turn",
        "writes-level": ", ".join(f"{gib:.1f}" for gib in written) + " GiB by turn",
        "turn-7-reads": volumes,
        "turn-7-more-than-turn-6": f"{volumes}; a turn of {tokens:.0f} tokens adds "
        f"{sessions * tokens * shape.kv_bytes_per_token() / GIB:.1f} GiB to the prefixes",
    }
    at = f"{DECODED[0]} decoded token, volumes of {sessions} conversations at once"
    return [
        claim.judge(measured[claim.name], reason=reasons.get(claim.name, ""), at=at)
        for claim in CLAIMS
    ]


def _plot(rows: Sequence[Row], column: str, word: str) -> Plot:
    series = {}
    for decoded in DECODED:
        mine = [row for row in rows if row["decoded_tokens"] == decoded]
        series[f"{decoded} decoded token{'s' if decoded > 1 else ''}"] = (
            [float(row["turn"] or 0) for row in mine],
            [float(row[column] or 0) for row in mine],
        )
    return Plot(
        name=word,
        title=f"KV {word} by turn, one prefill node",
        x_label="turn",
        y_label=f"{word} in the turn, GiB",
        kind="line",
        series=series,
    )


EXPERIMENT = Experiment(
    name="fig04",
    title="KV traffic of multi-turn serving",
    source="HyMCache fig. 4",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=(*testbed.SERVING_PROFILES, "remote-dram", "software-default"),
    claims=CLAIMS,
    run=run,
)
