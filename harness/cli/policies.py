"""``cxlbench policies``: what replacement policies would catch of a trace, up to the optimum."""

from __future__ import annotations

from pathlib import Path

import click

from cxlbench.harness.cli.options import COUNT, FILE, SIZE, examples, json_option
from cxlbench.harness.cli.output import Output


@click.command(
    short_help="Hit rates of replacement policies on a trace.",
    epilog=examples(
        "cxlbench policies trace.jsonl.gz",
        "cxlbench policies trace.jsonl.gz --capacity 64GiB --capacity 1TiB --policy lru,opt",
        "cxlbench policies trace.jsonl.gz --policy my_module:MyPolicy --model Qwen2.5-32B",
    ),
)
@click.argument("trace", type=FILE)
@click.option(
    "--capacity",
    "capacities",
    type=SIZE,
    multiple=True,
    help="A cache size to try. Repeatable. [default: 64 GiB, 256 GiB, 1 TiB]",
)
@click.option(
    "--policy",
    "policies",
    metavar="NAMES",
    help="Names with commas between them: lru, fifo, clock, s3fifo, opt (Belady), or module:object "
    "of yours. [default: all of them and SIEVE]",
)
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="Decides the KV's size.")
@click.option("--block-tokens", type=COUNT, help="Tokens in a block. [default: the trace's]")
@click.option("--limit", type=COUNT, help="Only this many requests, from the start.")
@click.option(
    "--order",
    type=click.Choice(["tail-first", "head-first"]),
    default="tail-first",
    show_default=True,
    help="In which order the blocks of a request are referenced.",
)
@json_option
def policies(
    trace: Path,
    capacities: tuple[int, ...],
    policies: str | None,
    model: str,
    block_tokens: int | None,
    limit: int | None,
    order: str,
    as_json: bool,
) -> None:
    """Print hit rates of replacement policies on the block references of TRACE, without time.

    The prefix-aware rate counts a block only if all blocks before it in its chain hit as well; the
    plain rate counts every hit. OPT knows the future: no policy has a higher plain rate.
    """
    from cxlbench.harness.cache_policies import STUDIED, References, compare_policies, short_name
    from cxlbench.harness.requests import Mode
    from cxlbench.harness.tables import percent, size, table
    from cxlbench.harness.trace_statistics import Order
    from cxlbench.harness.traces import read_trace
    from cxlbench.kv.geometry import model_shape

    out = Output(as_json=as_json)
    chosen = STUDIED if policies is None else tuple(name.strip() for name in policies.split(","))
    shape = model_shape(model)
    with out.progress() as progress:
        workload = read_trace(
            trace,
            mode=Mode.WHOLE_BLOCKS,
            block_tokens=block_tokens,
            limit=limit,
            progress=lambda done, total: progress("reading the trace, bytes", done, total),
        )
        references = References.of(workload, Order(order))
        block_bytes = shape.block_bytes(workload.block_tokens)
        found = compare_policies(
            references,
            capacities or (64 << 30, 256 << 30, 1 << 40),
            block_bytes=block_bytes,
            policies=chosen,
            progress=progress,
        )
    again = len(references) - references.distinct
    out.document(
        {
            "trace": workload.name,
            "model": shape.name,
            "block_bytes": block_bytes,
            "references": len(references),
            "distinct_blocks": references.distinct,
            "order": order,
            "policies": [
                {
                    "policy": short_name(one.policy),
                    "capacity_bytes": one.capacity_bytes,
                    "capacity_blocks": one.capacity_blocks,
                    "hit_rate": one.hit_rate,
                    "prefix_hit_rate": one.prefix_hit_rate,
                }
                for one in found
            ],
        }
    )
    out.say(
        f"{workload.name}: {len(references):,} references to {references.distinct:,} blocks of "
        f"{size(block_bytes)} ({shape.name}), {order}; an endless cache hits "
        f"{percent(again / max(1, len(references)))}.\n"
    )
    rows: list[list[str | int]] = [
        [
            size(one.capacity_bytes),
            short_name(one.policy),
            f"{one.capacity_blocks:,}",
            percent(one.hit_rate),
            percent(one.prefix_hit_rate),
        ]
        for one in found
    ]
    out.say(table(["capacity", "policy", "blocks", "hit rate", "prefix-aware"], rows))
