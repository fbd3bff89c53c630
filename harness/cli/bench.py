"""``cxlbench bench``: how fast the bench's own code is on this host, against the project's bars."""

from __future__ import annotations

import click

from cxlbench.harness.cli.group import WRONG_DATA
from cxlbench.harness.cli.options import COUNT, POSITIVE, SIZE, examples, json_option
from cxlbench.harness.cli.output import Output

MASTER_BAR = 1_000_000
SLOT_BAR_BYTES = 64
LOAD_BAR = 0.8
TIMERS_BAR = 100_000


@click.group(
    short_help="Measure the bench itself: data path, clocks, Master.",
    epilog=examples("cxlbench bench datapath", "cxlbench bench master --json"),
)
def bench() -> None:
    """Measure the bench itself: data path, clocks, Master.

    A missed bar is reported, and is no error: it says something about this host too.
    """


@bench.command(epilog=examples("cxlbench bench datapath", "cxlbench bench datapath --rounds 3"))
@click.option("--size", type=SIZE, default="16MiB", show_default=True, help="Of an object.")
@click.option("--rounds", type=COUNT, default=11, show_default=True, help="The median counts.")
@json_option
def datapath(size: int, rounds: int, as_json: bool) -> None:
    """Compare gets and puts of real bytes with a plain copy of the same bytes.

    Without throttles and in memory: what is left is the cost of our own code. A get of 0.8 takes a
    quarter longer than the copy that it cannot avoid.

    Exit codes: 0 whatever was measured; 1 wrong data.
    """
    from cxlbench.harness.bench_datapath import WrongDataError, bench_datapath
    from cxlbench.harness.tables import gbps, table
    from cxlbench.harness.tables import size as size_text

    output = Output(as_json=as_json)
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
    output.say()
    rows = [
        (
            figure.name,
            gbps(figure.bytes_per_s),
            f"{figure.ratio:.2f}",
            "-" if figure.bar is None else f"{figure.bar:.1f}",
            _verdict(figure.passed),
        )
        for figure in found.figures
    ]
    output.say(table(("operation", "GB/s", "of a copy", "bar", ""), rows))
    output.say(
        f"peak memory: {size_text(found.peak_resident_bytes)} resident, for "
        f"{size_text(found.data_bytes)} of objects"
    )
    output.document(found)


@bench.command(epilog=examples("cxlbench bench master", "cxlbench bench master --objects 100000"))
@click.option(
    "--objects", type=click.IntRange(min=32), default=650_000, show_default=True, help="In Master."
)
@click.option("--batches", type=COUNT, default=4000, show_default=True, help="Of 32 keys.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def master(objects: int, batches: int, seed: int, as_json: bool) -> None:
    """Measure how many keys a second Master's table answers, in batches of 32."""
    from cxlbench.harness.bench_master import bench_master
    from cxlbench.harness.tables import size, table

    output = Output(as_json=as_json)
    found = bench_master(objects=objects, batches=batches, seed=seed)

    def rate(keys_per_s: float) -> str:
        return f"{keys_per_s / 1e6:.2f} M keys/s"

    bars = [
        ("hits", rate(found.hit_keys_per_s), rate(MASTER_BAR), found.hit_keys_per_s >= MASTER_BAR),
        (
            "misses",
            rate(found.miss_keys_per_s),
            rate(MASTER_BAR),
            found.miss_keys_per_s >= MASTER_BAR,
        ),
        ("inserts", rate(found.insert_keys_per_s), "-", None),
        (
            "a slot",
            f"{found.bytes_per_slot} B",
            f"{SLOT_BAR_BYTES} B",
            found.bytes_per_slot <= SLOT_BAR_BYTES,
        ),
        ("load", f"{found.load:.2f}", f"{LOAD_BAR}", found.load <= LOAD_BAR),
    ]
    output.say(
        f"{found.objects:,} objects in {found.slots:,} slots, {size(found.table_bytes)}; probes: "
        f"mean {found.probe_length_mean:.2f}, longest {found.probe_length_max}"
    )
    output.say()
    rows = [(name, value, bar, _verdict(passed)) for name, value, bar, passed in bars]
    output.say(table(("", "measured", "bar", ""), rows))
    output.document(
        {"measured": found, "passed": {name: ok for name, _, _, ok in bars if ok is not None}}
    )


@bench.command(epilog=examples("cxlbench bench clock", "cxlbench bench clock --seconds 2"))
@click.option(
    "--seconds", type=POSITIVE, default=5, show_default=True, help="Of transfers in real time."
)
@click.option("--timers", type=COUNT, default=300_000, show_default=True, help="In virtual time.")
@click.option("--pending", type=COUNT, default=1000, show_default=True, help="At any moment.")
@json_option
def clock(seconds: float, timers: int, pending: int, as_json: bool) -> None:
    """Measure how fast virtual time goes, and how honest real time is on this host."""
    from cxlbench.harness.bench_clock import bench_clock
    from cxlbench.harness.fidelity import MAX_BANDWIDTH_ERROR, MAX_LATE_P50_S, MAX_LATE_P99_S
    from cxlbench.harness.tables import ms, percent, table

    output = Output(as_json=as_json)
    output.note(f"measuring both clocks, about {seconds + timers / 150_000:.0f} s")
    found = bench_clock(timers=timers, pending=pending, seconds=seconds)
    late = found.fidelity
    bars = [
        (
            f"virtual time: timers a second, {pending:,} pending",
            f"{found.virtual_timers_per_s:,.0f}",
            f"{TIMERS_BAR:,}",
            found.virtual_timers_per_s >= TIMERS_BAR,
        ),
        (
            "real time: lateness p50, ms",
            ms(late.late_p50_s, 3),
            ms(MAX_LATE_P50_S, 3),
            late.late_p50_s <= MAX_LATE_P50_S,
        ),
        (
            "real time: lateness p99, ms",
            ms(late.late_p99_s, 3),
            ms(MAX_LATE_P99_S, 3),
            late.late_p99_s <= MAX_LATE_P99_S,
        ),
        (
            "real time: bandwidth error in a 1 s window",
            percent(found.bandwidth_error),
            percent(MAX_BANDWIDTH_ERROR),
            found.bandwidth_error <= MAX_BANDWIDTH_ERROR,
        ),
    ]
    rows = [(name, value, bar, _verdict(passed)) for name, value, bar, passed in bars]
    output.say(table(("", "measured", "bar", ""), rows))
    output.document({"measured": found, "passed": {name: ok for name, _, _, ok in bars}})


def _verdict(passed: bool | None) -> str:
    return "" if passed is None else "pass" if passed else "MISSED"
