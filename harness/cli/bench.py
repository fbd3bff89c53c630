"""``cxlbench bench``: how fast the bench's own code is on this host, against the project's bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cxlbench.harness.cli.group import BAR_MISSED, WRONG_DATA
from cxlbench.harness.cli.options import (
    COUNT,
    FILE,
    POSITIVE,
    SIZE,
    examples,
    json_option,
    seed_option,
)
from cxlbench.harness.cli.output import Output


@dataclass(frozen=True, slots=True)
class Bar:
    """What was measured, what is asked, and whether it is met; None if nothing is asked."""

    name: str
    measured: str
    asked: str
    passed: bool | None


def strict_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--strict``."""
    return click.option(
        "--strict", is_flag=True, help="Exit with 1 if a bar is missed, after all is printed."
    )(function)


@click.group(
    short_help="Measure the bench itself: data path, clocks, Master, replays, models.",
    epilog=examples(
        "cxlbench bench datapath",
        "cxlbench bench master --json",
        "cxlbench bench replay trace.jsonl.gz --strict",
    ),
)
def bench() -> None:
    """Measure the bench itself: data path, clocks, Master, replays, models.

    The verdict on every bar is printed. A missed bar is an error with --strict only: it says
    something about this host too.
    """


@bench.command(
    short_help="Gets and puts, against a plain copy.",
    epilog=examples("cxlbench bench datapath", "cxlbench bench datapath --rounds 3"),
)
@click.option("--size", type=SIZE, default="16MiB", show_default=True, help="Size of an object.")
@click.option("--rounds", type=COUNT, default=11, show_default=True, help="The median counts.")
@click.option(
    "--processes", is_flag=True, help="Master, node and 1, 2, 4 workers as processes of their own."
)
@strict_option
@json_option
def datapath(size: int, rounds: int, processes: bool, strict: bool, as_json: bool) -> None:
    """Compare gets and puts of real bytes with a plain copy of the same bytes.

    Without throttles and in memory: what is left is the cost of our own code. A get of 0.8 takes a
    quarter longer than the copy that it cannot avoid. With --processes the bytes come out of
    another process, by shared memory, and a lookup is compared with a bare ZeroMQ ping-pong.

    Exit codes: 0 whatever was measured; 1 wrong data, or with --strict a bar that was missed.
    """
    from cxlbench.harness.bench_datapath import WrongDataError, bench_datapath
    from cxlbench.harness.tables import gbps
    from cxlbench.harness.tables import size as size_text

    output = Output(as_json=as_json)
    if processes:
        _between_processes(output, size, rounds, strict=strict)
        return
    try:
        with output.progress() as progress:
            found = bench_datapath(object_bytes=size, rounds=rounds, progress=progress)
    except WrongDataError as error:
        output.note(f"WRONG: {error}")
        raise click.exceptions.Exit(WRONG_DATA) from error
    output.say(
        f"{found.objects} objects of {size_text(found.object_bytes)}, median of {found.rounds} "
        f"rounds; a numpy copy moves {gbps(found.copy_bytes_per_s)} GB/s"
    )
    output.say(
        f"peak memory: {size_text(found.peak_resident_bytes)} resident, for "
        f"{size_text(found.data_bytes)} of objects"
    )
    bars = [
        Bar(
            figure.name,
            f"{gbps(figure.bytes_per_s)} GB/s, {figure.ratio:.2f} of a copy",
            "" if figure.bar is None else f"{figure.bar:.1f} of a copy",
            figure.passed,
        )
        for figure in found.figures
    ]
    report(output, found, bars, strict=strict)


def _between_processes(output: Output, size: int, rounds: int, *, strict: bool) -> None:
    """Measure and report ``bench datapath --processes``."""
    from cxlbench.harness.bench_datapath import WrongDataError
    from cxlbench.harness.bench_processes import (
        LOOKUP_BAR,
        LOOKUP_KEYS,
        TWO_WORKERS_BAR,
        bench_processes,
    )
    from cxlbench.harness.tables import gbps
    from cxlbench.harness.tables import size as size_text

    try:
        with output.progress() as progress:
            found = bench_processes(object_bytes=size, rounds=rounds, progress=progress)
    except WrongDataError as error:
        output.note(f"WRONG: {error}")
        raise click.exceptions.Exit(WRONG_DATA) from error
    output.say(
        f"{found.objects} objects of {size_text(found.object_bytes)}, median of {found.rounds} "
        f"rounds; a numpy copy moves {gbps(found.copy_bytes_per_s)} GB/s"
    )
    output.say(
        f"lookup of {LOOKUP_KEYS} keys: p50 {found.lookup.p50_s * 1e6:.0f} us, p99 "
        f"{found.lookup.p99_s * 1e6:.0f} us; bare ping-pong: p50 {found.ping.p50_s * 1e6:.0f} us, "
        f"p99 {found.ping.p99_s * 1e6:.0f} us"
    )
    bars = [
        Bar(
            figure.name,
            f"{gbps(figure.bytes_per_s)} GB/s, {figure.ratio:.2f} of a copy",
            "" if figure.bar is None else f"{figure.bar:.1f} of a copy",
            figure.passed,
        )
        for figure in found.figures
    ]
    for row in found.scaling:
        asked = row.workers == 2
        bars.append(
            Bar(
                f"{row.workers} workers together" if row.workers > 1 else "1 worker",
                f"{gbps(row.bytes_per_s)} GB/s, {row.over_one:.2f} of one; plain copies "
                f"{row.copies_over_one:.2f}",
                f"{TWO_WORKERS_BAR} of one" if asked else "",
                row.over_one >= TWO_WORKERS_BAR if asked else None,
            )
        )
    bars.append(
        Bar(
            "lookup over ping-pong, p50",
            f"{found.lookup_over_ping:.2f}",
            f"at most {LOOKUP_BAR}",
            found.lookup_over_ping <= LOOKUP_BAR,
        )
    )
    report(output, found, bars, strict=strict)


@bench.command(
    short_help="Keys a second that Master answers.",
    epilog=examples("cxlbench bench master", "cxlbench bench master --objects 100000"),
)
@click.option(
    "--objects",
    type=click.IntRange(min=32),
    default=650_000,
    show_default=True,
    help="Objects that Master knows.",
)
@click.option(
    "--batches", type=COUNT, default=4000, show_default=True, help="How many batches of 32 keys."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Same seed, same keys.",
)
@strict_option
@json_option
def master(objects: int, batches: int, seed: int, strict: bool, as_json: bool) -> None:
    """Measure how many keys a second Master answers, in batches of 32.

    Twice: its table alone, and all that it does for a reader, with descriptors and leases.

    Exit codes: 0 whatever was measured; with --strict 1 if a bar was missed.
    """
    from cxlbench.harness import bench_master as bars_of
    from cxlbench.harness.tables import size

    output = Output(as_json=as_json)
    with output.progress() as progress:
        found = bars_of.bench_master(objects=objects, batches=batches, seed=seed, progress=progress)

    def rate(name: str, keys_per_s: float) -> Bar:
        least = bars_of.MIN_KEYS_PER_S
        asked = f"{least / 1e6:.2f} M keys/s"
        return Bar(name, f"{keys_per_s / 1e6:.2f} M keys/s", asked, keys_per_s >= least)

    output.say(
        f"{found.objects:,} objects in {found.slots:,} slots, {size(found.table_bytes)}; probes: "
        f"mean {found.probe_length_mean:.2f}, longest {found.probe_length_max}"
    )
    bars = [
        rate("table: hits", found.hit_keys_per_s),
        rate("table: misses", found.miss_keys_per_s),
        rate("lookup with leases: hits", found.leased_hit_keys_per_s),
        rate("lookup with leases: misses", found.leased_miss_keys_per_s),
        Bar("table: inserts", f"{found.insert_keys_per_s / 1e6:.2f} M keys/s", "", None),
        Bar(
            "a slot",
            f"{found.bytes_per_slot} B",
            f"{bars_of.MAX_SLOT_BYTES} B",
            found.bytes_per_slot <= bars_of.MAX_SLOT_BYTES,
        ),
        Bar("load", f"{found.load:.2f}", f"{bars_of.MAX_LOAD}", found.load <= bars_of.MAX_LOAD),
    ]
    report(output, found, bars, strict=strict)


@bench.command(
    short_help="How fast virtual, how honest real time is.",
    epilog=examples("cxlbench bench clock", "cxlbench bench clock --seconds 2"),
)
@click.option(
    "--seconds", type=POSITIVE, default=5, show_default=True, help="Transfers in real time, s."
)
@click.option(
    "--timers", type=COUNT, default=300_000, show_default=True, help="Timers in virtual time."
)
@click.option(
    "--pending",
    type=COUNT,
    default=1000,
    show_default=True,
    help="Timers that are pending at any moment.",
)
@strict_option
@json_option
def clock(seconds: float, timers: int, pending: int, strict: bool, as_json: bool) -> None:
    """Measure how fast virtual time goes, and how honest real time is on this host.

    Exit codes: 0 whatever was measured; with --strict 1 if a bar was missed.
    """
    from cxlbench.harness import bench_clock as bars_of
    from cxlbench.harness.fidelity import MAX_BANDWIDTH_ERROR, MAX_LATE_P50_S, MAX_LATE_P99_S
    from cxlbench.harness.tables import ms, percent

    output = Output(as_json=as_json)
    output.note(f"measuring both clocks, about {seconds + timers / 150_000:.0f} s")
    found = bars_of.bench_clock(timers=timers, pending=pending, seconds=seconds)
    late = found.fidelity
    bars = [
        Bar(
            f"virtual time: timers a second, {pending:,} pending",
            f"{found.virtual_timers_per_s:,.0f}",
            f"{bars_of.MIN_TIMERS_PER_S:,}",
            found.virtual_timers_per_s >= bars_of.MIN_TIMERS_PER_S,
        ),
        Bar(
            "real time: lateness p50, ms",
            ms(late.late_p50_s, 3),
            ms(MAX_LATE_P50_S, 3),
            late.late_p50_s <= MAX_LATE_P50_S,
        ),
        Bar(
            "real time: lateness p99, ms",
            ms(late.late_p99_s, 3),
            ms(MAX_LATE_P99_S, 3),
            late.late_p99_s <= MAX_LATE_P99_S,
        ),
        Bar(
            "real time: bandwidth error in a 1 s window",
            percent(found.bandwidth_error),
            percent(MAX_BANDWIDTH_ERROR),
            found.bandwidth_error <= MAX_BANDWIDTH_ERROR,
        ),
    ]
    report(output, found, bars, strict=strict)


@bench.command(
    short_help="What a replay costs this host.",
    epilog=examples(
        "cxlbench bench replay mooncake_fast25_conversation_trace.jsonl.gz --strict",
        "cxlbench bench replay chat.jsonl.gz --limit 1000",
    ),
)
@click.argument("trace", type=FILE)
@click.option("--limit", type=COUNT, help="Only so many requests. [default: all]")
@seed_option
@strict_option
@json_option
def replay(trace: Path, limit: int | None, seed: int, strict: bool, as_json: bool) -> None:
    """Measure what a replay of TRACE in virtual time costs this host: time, memory, events.

    Full size, tags in place of bytes, 8 workers on one CXL-HM. The bars are those of Mooncake's
    conversation trace, 12,031 requests (docs/traces.md says where it can be had).

    Exit codes: 0 whatever was measured; 1 wrong data, or with --strict a bar that was missed.
    """
    from cxlbench.harness import bench_replay as bars_of
    from cxlbench.harness.tables import percent

    output = Output(as_json=as_json)
    with output.progress() as progress:
        found = bars_of.bench_replay(trace, limit=limit, seed=seed, progress=progress)
    output.say(
        f"{found.trace}: {found.requests:,} requests, {found.virtual_s:,.0f} s of virtual time, "
        f"{found.blocks:,} blocks read or stored, {percent(found.hit_rate)} not computed again"
    )
    bars = [
        Bar(
            "CPU time from file to figures, s",
            f"{found.cpu_s:.1f}",
            f"{bars_of.MAX_CPU_S:.0f}",
            found.cpu_s <= bars_of.MAX_CPU_S,
        ),
        Bar("elapsed, s", f"{found.elapsed_s:.1f}", "", None),
        Bar(
            "peak resident memory, GB",
            f"{found.peak_resident_bytes / 1e9:.2f}",
            f"{bars_of.MAX_RESIDENT_BYTES / 1e9:.0f}",
            found.peak_resident_bytes <= bars_of.MAX_RESIDENT_BYTES,
        ),
        Bar(
            "timers a block",
            f"{found.timers_per_block:.1f}",
            f"{bars_of.MAX_TIMERS}",
            found.timers_per_block <= bars_of.MAX_TIMERS,
        ),
        Bar(
            "callbacks a block",
            f"{found.callbacks_per_block:.1f}",
            f"{bars_of.MAX_CALLBACKS}",
            found.callbacks_per_block <= bars_of.MAX_CALLBACKS,
        ),
    ]
    if not found.correct:
        output.document({"measured": found, "passed": verdicts(bars)})
        output.note("WRONG: the replay delivered wrong blocks, or something was held at its end")
        raise click.exceptions.Exit(WRONG_DATA)
    report(output, found, bars, strict=strict)


def report(output: Output, measured: Any, bars: Sequence[Bar], *, strict: bool) -> None:
    """Print every bar with its verdict; raise Exit if one is missed and ``strict``."""
    from cxlbench.harness.tables import table

    rows = [(bar.name, bar.measured, bar.asked or "-", _verdict(bar.passed)) for bar in bars]
    output.say()
    output.say(table(("", "measured", "bar", ""), rows))
    output.document({"measured": measured, "passed": verdicts(bars)})
    missed = [bar.name for bar in bars if bar.passed is False]
    if missed:
        output.note(f"MISSED {len(missed)} of {len(verdicts(bars))} bars: {'; '.join(missed)}")
        if strict:
            raise click.exceptions.Exit(BAR_MISSED)


def verdicts(bars: Sequence[Bar]) -> dict[str, bool]:
    """Return of every bar that asks something whether it is met."""
    return {bar.name: bar.passed for bar in bars if bar.passed is not None}


def _verdict(passed: bool | None) -> str:
    return "" if passed is None else "pass" if passed else "MISSED"
