"""``cxlbench sweep``: an experiment at many points, resumable, here or on a Ray cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.group import BAD_INPUT, INTERRUPTED, WRONG_DATA, Terminated
from cxlbench.harness.cli.options import COUNT, FILE, examples, json_option, seed_option_for
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.harness.sweep import Runner
    from cxlbench.harness.sweep_axes import Design
    from cxlbench.harness.sweep_summary import ClaimShare, SweepSummary

SHOWN_KEYS = 3
SHOWN_ERRORS = 3


@click.command(
    short_help="Run an experiment over a grid of its numbers.",
    epilog=examples(
        "cxlbench sweep fig10 --assumptions 32 --quick",
        'cxlbench sweep fig10 --set "nic-100g.bandwidth=50..200 Gb/s:4" --quick',
        "cxlbench sweep fig10 --set routing=round-robin,prefix-aware -o mine.jsonl",
        "cxlbench sweep my_module:EXPERIMENT --assumptions 16 --ray local",
    ),
)
@click.argument("name")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUES",
    help="A knob or a profile's number, with its values: KEY=V1,V2,... or KEY=LOW..HIGH:N, N "
    "values evenly spaced, with units. Repeatable: all combinations are run.",
)
@click.option(
    "--assumptions",
    "samples",
    type=COUNT,
    metavar="N",
    help="N Latin-hypercube points over all that no source gives: 30 % up and down, choices in "
    "turn. With --set, N points at each combination.",
)
@click.option("--quick", is_flag=True, help="Run the experiment's quick form.")
@click.option("--jobs", type=COUNT, help="Processes at a time. [default: this machine's cores]")
@click.option(
    "--ray",
    "address",
    metavar="ADDRESS",
    help="Run on the Ray cluster at ADDRESS (auto, or ray://HOST:PORT); local starts one here. "
    "Needs the extra: pip install 'cxlbench[ray]'.",
)
@click.option(
    "-o",
    "--out",
    type=FILE,
    help="The rows, JSON lines; a file that is there is gone on with. "
    "[default: results/sweeps/NAME.jsonl]",
)
@seed_option_for("Of every point, and of which points are drawn.")
@json_option
def sweep(
    name: str,
    sets: tuple[str, ...],
    samples: int | None,
    quick: bool,
    jobs: int | None,
    address: str | None,
    out: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run experiment NAME (or module:object) at many points, and say where its claims hold.

    Each row is on the disk when its point ends. A sweep that was interrupted or killed goes on
    where it stopped, by the same command. A point that raises is a row with the error.

    Exit codes: 0 fine; 1 a law that must hold did not, at some point; 2 a bad option or file, or
    every point raised; 130 interrupted.
    """
    from cxlbench.harness.experiment_catalog import find_experiments
    from cxlbench.harness.sweep import run_sweep
    from cxlbench.harness.sweep_axes import make_design
    from cxlbench.harness.sweep_rows import SWEEPS_FOLDER, read_sweep
    from cxlbench.harness.sweep_summary import summarize

    output = Output(as_json=as_json)
    experiment = find_experiments().get(name)
    design = make_design(experiment, sets=sets, samples=samples or 0, quick=quick, seed=seed)
    path = out or SWEEPS_FOLDER / f"{experiment.name}.jsonl"
    ended: BaseException | None = None
    try:
        with output.progress() as progress:
            file = run_sweep(
                experiment,
                name,
                design,
                path,
                runner=_runner(address, jobs),
                quick=quick,
                seed=seed,
                progress=progress,
            )
    except KeyboardInterrupt as error:
        if not path.is_file():
            raise
        ended, file = error, read_sweep(path)
    summary = summarize(file)
    _report(summary, design, path, output)
    output.document({"file": path, "kept": file.header.kept, "summary": summary})
    if ended is not None:
        how = "terminated" if isinstance(ended, Terminated) else "interrupted"
        output.note(
            f"{how}: {summary.done} of {summary.points} points are in {path}; "
            "the same command goes on with the others"
        )
        code = ended.exit_code if isinstance(ended, Terminated) else INTERRUPTED
        click.get_current_context().exit(code)
    if summary.done and len(summary.errors) == summary.done:
        output.note(f"error: every point raised: {summary.errors[0][1]}")
        click.get_current_context().exit(BAD_INPUT)
    if summary.broken_checks:
        click.get_current_context().exit(WRONG_DATA)


def _runner(address: str | None, jobs: int | None) -> Runner:
    import os

    from cxlbench.harness.sweep import in_processes, in_this_process

    if address is not None:
        from cxlbench.harness.sweep_ray import on_ray

        return partial(on_ray, address=address, jobs=jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = jobs or cores or 1
    return in_this_process if wanted == 1 else partial(in_processes, jobs=wanted)


def _report(summary: SweepSummary, design: Design, path: Path, output: Output) -> None:
    from cxlbench.harness.tables import left_table

    mark = "PARTIAL: " if summary.partial else ""
    output.say(
        f"{mark}{summary.experiment}, {summary.done} of {summary.points} points over "
        f"{len(design.keys)} keys"
    )
    for kept in design.kept:
        output.say(f"not varied: {kept.key} ({kept.why})")
    if summary.claims:
        headers = ("claim", "holds", "direction\nonly", "fails", "not\ndecided", "measured", "keys")
        output.say()
        output.say(left_table(headers, [_row(claim) for claim in summary.claims]))
        output.say()
        output.say(_explained(summary))
    for point, error in summary.errors[:SHOWN_ERRORS]:
        output.say(f"point {point} raised: {error}")
    if len(summary.errors) > SHOWN_ERRORS:
        output.say(f"and {len(summary.errors) - SHOWN_ERRORS} more points raised")
    for check, points in summary.broken_checks:
        output.say(f"LAW BROKEN at {points} points: {check}")
    output.say(f"rows: {path}")


def _row(claim: ClaimShare) -> tuple[str, ...]:
    def share(count: int) -> str:
        return f"{count}/{claim.points}"

    measured = "-"
    if claim.least is not None:
        numbers: list[Any] = [claim.least, claim.median, claim.greatest]
        measured = " / ".join(f"{number:.3g}" for number in numbers)
    keys = "\n".join(map(str, claim.keys[:SHOWN_KEYS])) or "-"
    return (
        claim.claim,
        share(claim.holds),
        share(claim.direction),
        share(claim.fails),
        share(claim.undecided),
        measured,
        keys,
    )


def _explained(summary: SweepSummary) -> str:
    if summary.threshold is None:
        return "measured: least / median / greatest. Too few points to say which keys matter."
    return (
        "measured: least / median / greatest. keys: those that matter most, by rank correlation "
        "with\nthe measured value (+1 it always rises with the key, -1 it always falls; choices "
        "from 0 to 1);\nonly what chance seldom reaches at so many points, "
        f"{summary.threshold:.2f}, is listed."
    )
