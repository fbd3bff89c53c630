"""Tables for a terminal, with the unit of every column in its header.

Sizes print as KiB, MiB, GiB, TiB, bandwidth as GB/s (10^9), latencies as ms: the units that
DESIGN.md's chapter on results fixes for the whole project.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from cxlbench.devices.units import Dimension, format_base
from cxlbench.harness.metrics import OTHER_TURNS, Figures, Spread, TurnFigures

Cell = str | int


def size(nbytes: float) -> str:
    """Return bytes as text, such as ``16 MiB``."""
    return format_base(nbytes, Dimension.SIZE)


def gbps(bytes_per_s: float, digits: int = 2) -> str:
    """Return a bandwidth as GB/s, without the unit."""
    return f"{bytes_per_s / 1e9:.{digits}f}"


def ms(seconds: float, digits: int = 2) -> str:
    """Return a time as ms, without the unit."""
    return f"{seconds * 1e3:.{digits}f}"


def percent(share: float) -> str:
    """Return a share as percent."""
    return f"{share:.1%}"


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return an aligned table: the first column to the left, the others to the right."""
    align = ["left"] + ["right"] * (len(headers) - 1)
    texts = [[str(cell) for cell in row] for row in rows]
    return str(
        tabulate(
            texts, headers=list(headers), colalign=align if rows else None, disable_numparse=True
        )
    )


def listing(rows: Sequence[tuple[str, Cell]]) -> str:
    """Return name and value, a line each."""
    return str(
        tabulate(
            [[name, str(value)] for name, value in rows], tablefmt="plain", disable_numparse=True
        )
    )


def turn_table(turns: Sequence[TurnFigures]) -> str:
    """Return a replay's figures by turn of the conversations."""
    headers = [
        "turn",
        "reqs",
        "seen\nblks",
        "GPU\nhits",
        "tier\nhits",
        "hit\nrate\n%",
        "read\nGB/s",
        "block\nread\nms\np50",
        "\n\n\np99",
        "TTFT\nms\np50",
        "\n\np99",
    ]
    rows = [
        [
            "later" if turn.turn == OTHER_TURNS else turn.turn,
            turn.requests,
            turn.seen_blocks,
            turn.gpu_blocks,
            turn.tier_blocks,
            f"{turn.hit_rate * 100:.1f}" if turn.seen_blocks else "-",
            gbps(turn.read_bytes_per_s) if turn.block_read.count else "-",
            ms(turn.block_read.p50_s) if turn.block_read.count else "-",
            ms(turn.block_read.p99_s) if turn.block_read.count else "-",
            ms(turn.ttft.p50_s, 1),
            ms(turn.ttft.p99_s, 1),
        ]
        for turn in turns
    ]
    return table(headers, rows)


def totals_listing(figures: Figures) -> str:
    """Return a replay's totals."""
    read, ttft = figures.block_read, figures.ttft
    rows: list[tuple[str, Cell]] = [
        ("requests", f"{figures.requests:,} in {figures.duration_s:.1f} s"),
        ("blocks seen before", f"{figures.seen_blocks:,}"),
        ("not computed again", percent(figures.hit_rate)),
        ("blocks from the GPU", f"{figures.gpu_blocks:,}"),
        (
            "blocks from the tier",
            f"{figures.tier_blocks:,} of {figures.announced_blocks:,} announced; "
            f"{size(figures.read_bytes)} read",
        ),
        ("block read ms", _spread(read, 2)),
        ("TTFT ms", _spread(ttft, 1)),
        (
            "blocks stored",
            f"{figures.stored_blocks:,}, evicted or dropped later {figures.evicted_blocks:,}",
        ),
        (
            "stores refused",
            f"{figures.skipped_blocks:,}, stored in a later turn {figures.recovered_blocks:,}",
        ),
        ("stores failed", figures.failed_stores),
        (
            "reads ended as misses",
            f"mismatched {figures.mismatched_blocks:,}, timed out {figures.timed_out_blocks:,}, "
            f"failed {figures.failed_loads:,}",
        ),
    ]
    if figures.lost_blocks or figures.failed_writes:
        rows.append(
            (
                "lost by the devices",
                f"{figures.lost_blocks:,} blocks, {figures.failed_writes:,} writes to SSDs failed",
            )
        )
    if figures.injected:
        faults = ", ".join(f"{name} {count:,}" for name, count in sorted(figures.injected.items()))
        rows.append(("faults injected", faults))
    held = ", ".join(f"{name} {count}" for name, count in sorted(figures.held_at_rest.items()))
    rows.append(("wrong blocks", figures.wrong_blocks))
    rows.append(("held at rest", held or "nothing"))
    return listing(rows)


def _spread(spread: Spread, digits: int) -> str:
    """Return percentiles in ms; "-" where nothing was measured."""
    if not spread.count:
        return "-"
    named = (("p50", spread.p50_s), ("p90", spread.p90_s), ("p99", spread.p99_s))
    return ", ".join(f"{name} {ms(seconds, digits)}" for name, seconds in named)


def plural(count: int, what: str) -> str:
    """Return a count with its noun: ``1 block``, ``3,650 blocks``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def left_table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return an aligned table of texts."""
    texts = [[str(cell) for cell in row] for row in rows]
    return str(tabulate(texts, headers=list(headers), disable_numparse=True))
