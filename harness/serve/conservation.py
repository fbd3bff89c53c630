"""What must be true of every run of a cluster, whatever the tier: the books are balanced.

Each law is computed from two independent counts, so that a request that was lost, a token that was
computed twice, a block that came from nowhere or a pipe that was booked before its time shows.

Units: requests, tokens, blocks, bytes, s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxlbench.emu.pipe import Pipe
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import Cluster

SLACK = 1e-6
"""Relative error of sums of floating-point times."""


@dataclass(frozen=True, slots=True)
class Law:
    """One law, and whether it held."""

    name: str
    ok: bool
    detail: str


def laws_of(
    cluster: Cluster,
    workload: Workload,
    pipes: Sequence[Pipe],
    settled_s: float,
    held: Mapping[str, int],
    complete: bool,
) -> tuple[Law, ...]:
    """Return every law with its verdict for a run that has come to rest."""
    served = cluster.served
    servers = [*cluster.prefill, *cluster.decode]
    laws = []

    asked, got = len(workload.requests), len({record.request_id for record in served})
    laws.append(
        Law(
            "every request is served once",
            (got == asked or not complete) and got == len(served),
            f"{asked} requests, {got} served",
        )
    )

    block = cluster.spec.block_tokens
    decode = len(cluster.decode) > 0
    reused = sum((r.matched + r.loaded) * block for r in served)
    computed = sum(s.counters.prompt_tokens for s in servers)
    prompts = sum(r.input_tokens for r in served)
    # A prompt that is wholly cached still computes one token, and a decode server its first step.
    again = len(served) if decode else 0
    decode_again = sum(r.computed_tokens for r in served) - sum(
        max(1, r.input_tokens - (r.matched + r.loaded) * block) for r in served
    )
    laws.append(
        Law(
            "prompt tokens are reused or computed",
            computed == sum(r.computed_tokens for r in served) + again
            and computed + reused >= prompts
            and computed + reused <= prompts + len(served) * (1 + decode) + decode_again,
            f"{prompts} asked, {reused} reused, {computed} computed",
        )
    )
    laws.append(_blocks(cluster))

    answers = sum(r.output_tokens for r in served) + again
    given = sum(s.counters.answer_tokens for s in servers)
    laws.append(
        Law("every token of the answers is given", answers == given, f"{answers}, {given} given")
    )

    parts = sum(sum(r.parts_s.values()) for r in served)
    ttft = sum(r.ttft_s for r in served)
    laws.append(
        Law(
            "the parts of TTFT add up",
            abs(parts - ttft) <= SLACK * max(ttft, 1.0) + 1e-9 * len(served),
            f"{parts:.6f} s of {ttft:.6f} s",
        )
    )

    busiest = max((s.counters.busy_s for s in servers), default=0.0)
    laws.append(
        Law(
            "no GPU is busy for longer than the run",
            busiest <= settled_s * (1 + SLACK),
            f"{busiest:.3f} s of {settled_s:.3f} s",
        )
    )
    over = [pipe.name for pipe in pipes if pipe.busy_s > settled_s * (1 + SLACK)]
    laws.append(
        Law("no pipe is busy for longer than the run", not over, ", ".join(over) or "none is")
    )

    laws.append(_bytes(cluster, pipes))
    laws.append(_little(cluster))
    laws.append(
        Law(
            "nothing is held at rest",
            not held,
            ", ".join(f"{name} {count}" for name, count in sorted(held.items())) or "nothing",
        )
    )
    laws.append(
        Law(
            "no wrong block was delivered",
            not cluster.wrong_blocks,
            f"{cluster.wrong_blocks} wrong",
        )
    )
    return tuple(laws)


def _blocks(cluster: Cluster) -> Law:
    """Blocks come from somewhere: what is reused was announced, and computed, before."""
    wrong = [
        record.request_id
        for record in cluster.served
        if not 0 <= record.loaded <= record.found <= record.reusable - record.matched
        or not record.matched + record.loaded <= record.seen <= record.reusable
    ]
    stored = sum(record.stored for record in cluster.served)
    ok = not wrong and stored == cluster.stores.stored
    which = f", requests {wrong[:5]}" if wrong else ""
    return Law(
        "no block is reused that was not computed, or stored that was not offered",
        ok,
        f"{stored} stored for requests, {cluster.stores.stored} by the cluster{which}",
    )


def _bytes(cluster: Cluster, pipes: Sequence[Pipe]) -> Law:
    """Bytes go through pipes: those handed over all ports, those of a tier one pipe at least."""
    shape, block_bytes = cluster.spec.roofline.shape, cluster.content_bytes
    delivered = sum(r.loaded + r.decode_loaded for r in cluster.served) * block_bytes
    handover = cluster.handover
    mine = handover.pipes if handover is not None else []
    through = sum(pipe.moved_bytes for pipe in pipes if pipe not in mine)
    ok, detail = delivered <= through, f"{delivered} delivered, {through} through the tier's pipes"
    if handover is not None:
        asked = sum(r.input_tokens for r in cluster.served) * shape.kv_bytes_per_token()
        out = sum(pipe.moved_bytes for pipe in handover.ports_out)
        inward = sum(pipe.moved_bytes for pipe in handover.ports_in)
        ok = ok and asked == out == inward
        detail += f"; {asked} to hand over, {out} sent, {inward} received"
    return Law("bytes that arrive were sent", ok, detail)


def _little(cluster: Cluster) -> Law:
    """Little's law: the mean number in the system is the rate times the mean time in it.

    The number in the system is integrated as requests come and go; rate and mean time come from
    their records.
    """
    served, population = cluster.served, cluster.population
    span_s = population.last_s - population.first_s
    if not span_s:
        return Law("Little's law", not population.inside, f"{population.inside} inside")
    rate_times_w = len(served) / span_s * sum(r.e2e_s for r in served) / max(len(served), 1)
    mean_inside = population.area_s / span_s
    ok = not population.inside and population.entered == len(served)
    ok = ok and abs(mean_inside - rate_times_w) <= SLACK * max(rate_times_w, 1.0)
    return Law("Little's law", ok, f"L = {mean_inside:.4f}, lambda W = {rate_times_w:.4f}")
