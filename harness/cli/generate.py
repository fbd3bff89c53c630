"""``cxlbench generate``: synthetic multi-turn workloads (HyMCache §5), one option per knob."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cxlbench.harness.cli.options import FILE, examples, json_option
from cxlbench.harness.cli.output import Output
from cxlbench.harness.generator import LEAST, WHOLE_KNOBS, GeneratorKnobs

KNOB_HELP = {
    "sessions": "Number of conversations.",
    "turns": "Turns of each conversation.",
    "shared_system_tokens": "Leading tokens that all sessions have in common.",
    "first_input_tokens": "Mean input of turn 1, without the system prompt.",
    "first_input_stddev": "Its standard deviation.",
    "turn_input_tokens": "Mean new input of turn 2.",
    "turn_input_stddev": "Standard deviation of the new input of every later turn.",
    "turn_input_growth": "Factor by which that mean grows from each turn to the next.",
    "output_tokens": "Mean length of an answer, tokens.",
    "output_stddev": "Its standard deviation.",
    "think_s": "Mean pause between an answer and the next turn, s.",
    "think_stddev_s": "Its standard deviation, s.",
    "session_spread_s": "Sessions start at random within so many seconds.",
    "session_rate_per_s": "Or else: sessions start as a Poisson process of this rate.",
    "service_s": "Time that the arrivals of an open loop allot to each request, s.",
    "block_tokens": "Tokens in a KV block.",
    "seed": "Same knobs and seed, same file.",
}


def _type(name: str) -> Any:
    """Return click's type of a knob."""
    if name == "seed":
        return click.IntRange(min=0)
    return int if name in WHOLE_KNOBS else float


def _knob_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for knob in reversed(dataclasses.fields(GeneratorKnobs)):
        least = LEAST.get(knob.name, 0)
        function = click.option(
            f"--{knob.name.replace('_', '-')}",
            knob.name,
            type=_type(knob.name),
            default=knob.default,
            show_default=knob.default is not None,
            help=f"{KNOB_HELP[knob.name]}{f' At least {least}.' if least else ''}",
        )(function)
    return function


@click.command(
    short_help="Write a synthetic multi-turn workload.",
    epilog=examples(
        "cxlbench generate --sessions 8 --turns 4 --seed 7 chat.jsonl.gz",
    ),
)
@click.argument("out", type=FILE)
@_knob_options
@json_option
def generate(out: Path, as_json: bool, **knobs: Any) -> None:
    """Write a multi-turn workload to OUT, for `cxlbench replay` (gzip if it ends in .gz).

    Sessions share a system prompt; the prompt of each turn is the whole history and some new input.
    """
    from cxlbench.harness.generator import generate as make
    from cxlbench.harness.trace_statistics import count_references
    from cxlbench.harness.traces import write_workload

    output = Output(as_json=as_json)
    if str(out) == "-":
        raise click.BadParameter("'-' is no file; /dev/stdout is standard output", param_hint="OUT")
    with output.progress() as progress:
        workload = make(GeneratorKnobs(**knobs), name=out.name.partition(".")[0], progress=progress)
        write_workload(
            workload,
            out,
            progress=lambda done, total: progress("writing requests", done, total),
        )
    counts = count_references(workload.requests)
    output.say(
        f"{out}: {counts.requests:,} requests of {knobs['sessions']:,} sessions, "
        f"{counts.distinct:,} distinct blocks of {workload.block_tokens} tokens, "
        f"{counts.hit_share:.1%} of {counts.references:,} references were seen before"
    )
    output.document(
        {
            "file": out,
            "block_tokens": workload.block_tokens,
            "requests": counts.requests,
            "references": counts.references,
            "distinct": counts.distinct,
            "hit_share": counts.hit_share,
        }
    )
