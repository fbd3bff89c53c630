"""``cxlbench pod campaign`` and ``pod stress``: what takes minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.group import WRONG_DATA, UserError
from cxlbench.harness.cli.options import COUNT, POSITIVE, examples, json_option, seed_option_for
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.harness.pod_campaign import Campaign
    from cxlbench.harness.pod_hunt import MutantRow
    from cxlbench.harness.pod_stress import Stress

QUICK_SCHEDULES = 1_000


@click.command(
    short_help="Prove the checker: right code is quiet, wrong code is found.",
    epilog=examples("cxlbench pod campaign --quick", "cxlbench pod campaign --only counter --json"),
)
@click.option(
    "--schedules",
    type=COUNT,
    help="Schedules of right code in which nodes may die. [default: 20,000; with --quick 1,000]",
)
@click.option(
    "--bound", type=COUNT, default=2000, show_default=True, help="Schedules to find a mutant in."
)
@click.option(
    "--quick", is_flag=True, help="Fewer schedules, and no shares of those that find a mutant."
)
@click.option(
    "--only",
    default="",
    metavar="TEXT",
    help="Only scenarios and mutants whose name has TEXT in it.",
)
@click.option("--processes", type=COUNT, help="Processes that search. [default: one a core]")
@seed_option_for("Same seed, same schedules and same result.")
@json_option
def campaign(
    schedules: int | None,
    bound: int,
    quick: bool,
    only: str,
    processes: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Prove the checker on TraCT: right code is quiet, and every mutant is found.

    All scenarios under the random scheduler and PCT: so many schedules in which nodes may die, and
    half as many in which they may not. Then every mutant, which must be found within a bound, with
    its cause and both lines. Up to 20 minutes on two cores.

    Exit codes: 0 so it is; 1 a report on right code, or a mutant that was not found.
    """
    from cxlbench.harness.pod_campaign import (
        SAMPLE,
        SCHEDULES,
        NothingChosenError,
        run_campaign,
    )

    output = Output(as_json=as_json)
    try:
        with output.progress() as progress:
            found = run_campaign(
                schedules=schedules or (QUICK_SCHEDULES if quick else SCHEDULES),
                bound=bound,
                sample=1 if quick else SAMPLE,
                seed=seed,
                only=only,
                processes=processes,
                progress=progress,
            )
    except NothingChosenError as error:
        raise UserError(str(error)) from error
    _tell(output, found, shares=not quick)
    output.document(found)
    if not found.passed:
        raise click.exceptions.Exit(WRONG_DATA)


@click.command(
    short_help="Real processes use TraCT, and some are killed.",
    epilog=examples(
        "cxlbench pod stress --quick",
        "cxlbench pod stress --quick --profile niagara-2.0",
        "cxlbench pod stress --mode native --kills 20",
    ),
)
@click.option(
    "--mode",
    type=click.Choice(["emulated", "native"]),
    default="emulated",
    show_default=True,
    help="Emulated node caches, or this machine's own (which are coherent).",
)
@click.option(
    "--nodes", type=click.IntRange(2, 64), default=4, show_default=True, help="Nodes of the pod."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 32),
    default=2,
    show_default=True,
    help="Worker processes on each node.",
)
@click.option(
    "--acquisitions",
    type=COUNT,
    help="How often one lock is taken, in all. [default: 1,000,000; with --quick 20,000]",
)
@click.option(
    "--lookups",
    type=COUNT,
    help="How many blocks are looked up, in all. [default: 100,000; with --quick 4,000]",
)
@click.option(
    "--kills", type=click.IntRange(min=0), help="Nodes to kill. [default: 0; with --quick 2]"
)
@click.option(
    "--profile",
    help="Profile of the shared memory: caches, arrival of write-backs, costs. "
    "[default: small caches, no costs]",
)
@click.option("--numa-node", type=click.IntRange(min=0), help="Where the region's memory lies.")
@click.option(
    "--quick", is_flag=True, help="Some seconds of it (the first run compiles, for up to a minute)."
)
@click.option(
    "--patience",
    type=POSITIVE,
    default=60,
    show_default=True,
    help="A process that waits longer, in s, is taken to hang.",
)
@seed_option_for("Of what is looked up and who is killed; when is up to the machine.")
@json_option
def stress(
    mode: Any,
    nodes: int,
    workers: int,
    acquisitions: int | None,
    lookups: int | None,
    kills: int | None,
    profile: str | None,
    numa_node: int | None,
    quick: bool,
    patience: float,
    seed: int,
    as_json: bool,
) -> None:
    """Let real processes use TraCT at speed, and kill nodes with SIGKILL meanwhile.

    Every node has a manager and some workers, which count under a lock, look blocks up, insert
    and evict. A node that was killed is fenced, repaired after, and comes back. At the end every
    byte that was read was right, no increment and no entry is lost, and free + used = total.

    Exit codes: 0 so it is; 1 something is wrong, or a process waits for ever; 2 this host cannot.
    """
    from cxlbench.emu.flush_instructions import FlushUnsupportedError
    from cxlbench.emu.pod_layout import PodLayoutError
    from cxlbench.harness.pod_profile import load_shared_memory
    from cxlbench.harness.pod_stress import run_stress

    output = Output(as_json=as_json)
    if profile is not None and mode == "native":
        raise UserError("--profile is for emulated pods: native ones have this machine's memory")
    memory = None if profile is None else load_shared_memory(profile)
    try:
        with output.progress() as progress:
            found = run_stress(
                mode=mode,
                nodes=nodes,
                workers=workers,
                acquisitions=acquisitions or (20_000 if quick else 1_000_000),
                lookups=lookups or (4_000 if quick else 100_000),
                kills=(2 if quick else 0) if kills is None else kills,
                patience_s=patience,
                seed=seed,
                profile=memory,
                numa_node=numa_node,
                progress=progress,
            )
    except (FlushUnsupportedError, PodLayoutError) as error:
        raise UserError(str(error)) from error
    _tell_stress(output, found)
    output.document(found)
    if not found.passed:
        raise click.exceptions.Exit(WRONG_DATA)


def _tell_stress(output: Output, found: Stress) -> None:
    from cxlbench.harness.tables import listing

    p50, p99, longest = (ns / 1e3 for ns in found.waits_ns)
    memory = f"{found.mode} {found.profile}".rstrip()
    rows: list[tuple[str, str | int]] = [
        ("pod", f"{memory}, {found.nodes} nodes of {found.workers} workers and a manager"),
        ("nodes killed", found.kills),
        ("lock acquisitions", f"{found.acquisitions:,}"),
        ("waits for the lock, us", f"p50 {p50:,.0f}, p99 {p99:,.0f}, longest {longest:,.0f}"),
        ("blocks looked up", f"{found.lookups:,}, found {found.hits:,}"),
        ("blocks inserted", f"{found.inserted:,}, refused {found.refused:,}"),
        ("wrong words", found.wrong),
        ("at the end", f"{found.ready:,} blocks, all of them found and right"),
        ("took", f"{found.elapsed_s:.1f} s"),
    ]
    if found.problems:
        rows = [row for row in rows if row[0] != "at the end"]
    output.say(listing(rows))
    for problem in found.problems:
        output.note(f"WRONG: {problem}")


def _tell(output: Output, found: Campaign, *, shares: bool) -> None:
    from cxlbench.harness.tables import left_table, table

    if found.quiet:
        output.say(
            table(
                ("right code", "scheduler", "schedules", "with deaths", "operations", "reports"),
                [
                    (
                        row.scenario,
                        row.scheduler,
                        f"{row.schedules:,}",
                        f"{row.with_deaths:,}",
                        f"{row.operations:,}",
                        len(row.findings),
                    )
                    for row in found.quiet
                ],
            )
        )
        output.say()
    if found.mutants:
        headers = ["mutant", "first random", "first PCT"]
        headers += ["share random", "share PCT"] if shares else []
        rows = [_mutant_cells(row, shares=shares) for row in found.mutants]
        output.say(left_table((*headers, "told as"), rows))
        output.say()
    for finding in found.findings:
        output.say(finding.text)
        output.say(f"find it again: {finding.command}")
        output.say()
    output.say(
        f"{found.schedules:,} schedules of right code, {found.with_deaths:,} with a death: "
        f"{len(found.findings)} reports; {len(found.mutants) - len(found.missed)} of "
        f"{len(found.mutants)} mutants found within {found.bound:,} schedules; "
        f"{found.elapsed_s:.0f} s"
    )
    if found.missed:
        output.note(f"NOT FOUND, or called something else: {'; '.join(found.missed)}")
    if found.findings:
        output.note(f"REPORTS ON RIGHT CODE: {len(found.findings)}")


def _mutant_cells(row: MutantRow, *, shares: bool) -> list[str]:
    firsts = ["-" if one.first is None else f"{one.first:,}" for one in row.searches]
    parts = [f"{one.share:.1%}" for one in row.searches] if shares else []
    told = ", ".join(row.causes)
    if row.wrong:
        told += f"; {sum(one.misnamed for one in row.searches)} times {', '.join(row.wrong)}"
    return [row.mutant, *firsts, *parts, told]
