"""``cxlbench bench pod``: how fast the pod's executors are."""

from __future__ import annotations

import click

from cxlbench.harness.cli.bench import Bar, report, strict_option
from cxlbench.harness.cli.options import COUNT, examples, json_option
from cxlbench.harness.cli.output import Output


@click.command(
    "pod",
    short_help="The pod: explored, emulated, native.",
    epilog=examples("cxlbench bench pod", "cxlbench bench pod --rounds 3 --json"),
)
@click.option("--rounds", type=COUNT, default=5, show_default=True, help="The median counts.")
@click.option(
    "--slots",
    type=click.IntRange(min=128),
    default=1_000_000,
    show_default=True,
    help="Of the index that lookups are measured in; half of them are full.",
)
@click.option(
    "--profile",
    default="niagara-2.0",
    show_default=True,
    help="Profile of the shared memory: node caches, and what rows called 'charged' are charged.",
)
@strict_option
@json_option
def bench_pod(rounds: int, slots: int, profile: str, strict: bool, as_json: bool) -> None:
    """Measure the pod: explored operations, emulated and native accesses, TraCT's lock and lookups.

    The first run compiles programs for up to a minute; they are kept for the next ones.

    Exit codes: 0 whatever was measured; with --strict 1 if a bar was missed.
    """
    from cxlbench.harness import bench_pod as bars_of
    from cxlbench.harness.pod_profile import load_shared_memory

    output = Output(as_json=as_json)
    memory = load_shared_memory(profile)
    with output.progress() as progress:
        found = bars_of.bench_pod(rounds=rounds, slots=slots, profile=memory, progress=progress)
    explored = found.explored
    bars = [
        Bar(
            f"explored, {explored.scenario}: operations/s",
            f"{explored.operations_per_s:,.0f}",
            f"{bars_of.MIN_EXPLORED_PER_S:,}",
            explored.operations_per_s >= bars_of.MIN_EXPLORED_PER_S,
        ),
        Bar("greenlets: switches/s", f"{explored.greenlet_switches_per_s:,.0f}", "", None),
    ]
    for one in found.accesses:
        emulated = one.executor == "emulated"
        bars.append(
            Bar(
                f"{one.executor}: {one.operation} that hits, ns",
                f"{one.ns:.1f}, {one.ratio:.1f} x plain memory",
                f"{bars_of.MAX_EMULATED_HIT_NS:.0f}" if emulated else "",
                one.ns <= bars_of.MAX_EMULATED_HIT_NS if emulated else None,
            )
        )
    for lock in found.locks:
        for what, ns in (
            ("lock and unlock, alone", lock.uncontended_ns),
            ("hand-over, 2 nodes", lock.hand_over_ns),
            ("hand-over, 2 nodes x 2 processes", lock.crowded_hand_over_ns),
        ):
            bars.append(Bar(f"{lock.executor}: {what}, us", f"{ns / 1e3:.2f}", "", None))
    for look in found.lookups:
        native = look.executor == "native"
        bars.append(
            Bar(
                f"{look.executor}: 32 present keys, us",
                f"{look.present_ns / 1e3:.2f}",
                f"{bars_of.MAX_PROBE_NS / 1e3:.0f}" if native else "",
                look.present_ns <= bars_of.MAX_PROBE_NS if native else None,
            )
        )
        for what, ns in (
            ("32 absent keys", look.absent_ns),
            ("32 keys probed, pinned, unpinned", look.pinned_ns),
        ):
            bars.append(Bar(f"{look.executor}: {what}, us", f"{ns / 1e3:.2f}", "", None))
    if found.native_missing:
        output.note(f"no native figures: {found.native_missing}")
    output.say(
        f"median of {found.rounds} rounds; {found.profile}: node caches of "
        f"{found.cache_bytes >> 10} KiB; an index of {slots:,} slots"
    )
    report(output, found, bars, strict=strict)
