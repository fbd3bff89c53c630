"""Runs several systems on one workload, and turns the runs into rows, checks and plots.

A ``System`` is a tier of the catalog with its settings. Rows
come in two kinds, told apart by ``turn``: one for each turn, and one for the whole run (``all``).

Units are in the names of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cxlbench.experiments.testbed import checks_of
from cxlbench.harness.experiment import Check, Context, Plot, Row, Scalar
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive
from cxlbench.harness.serve.run import Simulated, TurnServed, simulate
from cxlbench.harness.tiers.catalog import tier

ALL_TURNS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the compared systems."""

    label: str
    tier: str
    """By its name in the catalog of tiers."""
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Runs:
    """Finished runs by label, and what was cut short."""

    by_label: dict[str, Simulated] = field(default_factory=dict)
    partial: bool = False


def run_systems(
    context: Context,
    systems: Sequence[System],
    cluster: Callable[[bool], ClusterSpec],
    workload: Workload,
    how: Drive,
    *,
    labels: str = "",
    log_blocks: bool = False,
) -> Runs:
    """Run every system; ``cluster`` is called with whether the GPU caches prefixes."""
    runs = Runs()
    for number, system in enumerate(systems):
        if context.stopping():
            runs.partial = True
            break
        what = f"{system.label}{labels}"
        context.progress(what, number, len(systems))
        entry = tier(system.tier)
        run = simulate(
            workload,
            cluster(entry.prefix_caching),
            entry.maker,
            how,
            profile=context.profile,
            options=system.options,
            seed=context.seed,
            log_blocks=log_blocks,
            progress=partial(context.progress, what),
            stopping=context.stopping,
        )
        runs.by_label[system.label] = run
        runs.partial |= not run.complete
    return runs


def with_own(context: Context, systems: Sequence[System]) -> tuple[System, ...]:
    """Return the systems, and behind them the tiers that the user named."""
    own = [System(label=spec.rpartition(":")[2], tier=spec) for spec in context.tiers]
    return (*systems, *own)


def lost_stores(run: Simulated) -> int:
    """Return how many offered blocks were refused, failed, or were lost after their store.

    Tiers that put in the background count what was lost behind the end of a store themselves.
    """
    stores = run.stores
    return stores.failed + stores.skipped + int(run.counters.get("failed_puts", 0))


def failed_store_share(run: Simulated) -> float:
    """Return ``lost_stores`` as a share of all blocks that were to be stored."""
    stores = run.stores
    tried = stores.stored + stores.failed + stores.skipped
    return lost_stores(run) / tried if tried else 0.0


def total_row(run: Simulated, **labels: Scalar) -> dict[str, Scalar | None]:
    """Return the row of a whole run."""
    parts = {f"{name.replace(' ', '_')}_mean_s": seconds for name, seconds in run.parts_s.items()}
    return {
        **labels,
        "turn": ALL_TURNS,
        "requests": len(run.served),
        "requests_per_s": run.requests_per_s,
        "ttft_mean_s": run.ttft.mean_s,
        "ttft_p99_s": run.ttft.p99_s,
        "e2e_mean_s": run.e2e.mean_s,
        "itl_mean_s": run.token_gap.mean_s,
        "hit_rate": run.hit_rate,
        "skipped_share": run.skipped_share,
        "gpu_busy": max(run.gpu_busy.values(), default=0.0),
        **parts,
    }


def turn_rows(run: Simulated, **labels: Scalar) -> list[dict[str, Scalar | None]]:
    """Return the rows of a run's turns; no hit rate where nothing had been computed before."""
    return [
        {
            **labels,
            "turn": turn.turn,
            "requests": turn.requests,
            "requests_per_s": turn.requests_per_s,
            "ttft_mean_s": turn.ttft.mean_s,
            "ttft_p99_s": turn.ttft.p99_s,
            "e2e_mean_s": turn.e2e.mean_s,
            "hit_rate": turn.hit_rate if turn.seen_blocks else None,
        }
        for turn in run.turns
    ]


def all_checks(runs: Runs, labels: str = "") -> list[Check]:
    """Return the laws of all runs; equal ones that hold are joined to one line."""
    found: dict[str, list[Check]] = {}
    for label, run in runs.by_label.items():
        for check in checks_of(run, f"{label}{labels}"):
            found.setdefault(check.name.partition(": ")[2], []).append(check)
    joined = []
    for law, checks in found.items():
        if all(check.ok for check in checks):
            joined.append(Check(name=law, ok=True, detail=f"in {len(checks)} runs{labels}"))
        else:
            joined += [check for check in checks if not check.ok]
    return joined


def by_turn_plot(
    runs: Runs, *, name: str, title: str, value: str, y_label: str, note: str = ""
) -> Plot:
    """Plot one column of the turns' rows, a line for each system; turns without it are left out."""
    series = {}
    for label, run in runs.by_label.items():
        rows = [row for row in turn_rows(run) if row[value] is not None]
        series[label] = (
            [float(row["turn"] or 0) for row in rows],
            [float(row[value] or 0) for row in rows],
        )
    return Plot(
        name=name,
        title=title,
        x_label="turn",
        y_label=y_label,
        kind="line",
        series=series,
        note=note,
    )


def speedup(runs: Runs, faster: str, slower: str) -> float | None:
    """Return how many times as many requests/s ``faster`` serves, at the same concurrency."""
    if runs.partial or faster not in runs.by_label or slower not in runs.by_label:
        return None
    base = runs.by_label[slower].requests_per_s
    return runs.by_label[faster].requests_per_s / base if base else None


def turn_of(run: Simulated, turn: int) -> TurnServed:
    """Return one turn of a whole run."""
    return next(found for found in run.turns if found.turn == turn)


def with_options(system: System, **options: object) -> System:
    """Return a system with more settings."""
    return replace(system, options={**system.options, **options})


__all__ = [
    "ALL_TURNS",
    "Row",
    "Runs",
    "System",
    "all_checks",
    "by_turn_plot",
    "failed_store_share",
    "lost_stores",
    "run_systems",
    "speedup",
    "total_row",
    "turn_of",
    "turn_rows",
    "with_options",
    "with_own",
]
