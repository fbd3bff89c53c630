"""``cxlbench list``, ``run``, ``compare`` and ``report``: the figures of the papers, and yours."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cxlbench.harness.cli.group import BAD_INPUT, CHECK_FAILED, INTERRUPTED, user_errors
from cxlbench.harness.cli.options import (
    FILE,
    FOLDER,
    examples,
    json_option,
    seed_option_for,
    set_option_for,
)
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.harness.experiment_catalog import Catalog
    from cxlbench.harness.experiment_run import Outcome, Runs
    from cxlbench.harness.experiment_tables import Shares

F = TypeVar("F", bound=Callable[..., object])

RESULTS = Path("results")
BUG = 1


def results_option(text: str) -> Callable[[F], F]:
    """Add ``--results``."""
    return click.option("--results", type=FOLDER, default=RESULTS, show_default=True, help=text)


# -- list ------------------------------------------------------------------------------------------


@click.command(
    "list",
    short_help="List the experiments: the papers' figures, and yours.",
    epilog=examples(
        "cxlbench list",
        "cxlbench list fig10",
        "cxlbench list my_module:EXPERIMENT --json",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@results_option("Where saved runs are, for how long they took.")
@json_option
def list_experiments(names: tuple[str, ...], results: Path, as_json: bool) -> None:
    """List all experiments, or show some: set-up, claims, and every key that --set may name.

    Experiments are found by the entry-point group cxlbench.experiments of installed projects; one
    of yours can be named as module:object without that. A module that cannot be imported is listed
    with its error, and hides no other.
    """
    from cxlbench.harness.experiment_catalog import find_experiments
    from cxlbench.harness.experiment_record import paragraphs
    from cxlbench.harness.experiment_tables import catalog_text, experiment_text, saved_durations

    output = Output(as_json=as_json)
    catalog = find_experiments()
    chosen = catalog.choose(names) if names else list(catalog.experiments.values())
    if names:
        output.say("\n\n".join(map(experiment_text, chosen)))
    else:
        output.say(catalog_text(catalog, results))
    found = []
    for experiment in chosen:
        quick_s, full_s = saved_durations(experiment.name, results)
        line: dict[str, Any] = {
            "name": experiment.name,
            "title": experiment.title,
            "source": experiment.source,
            "claims": experiment.claims,
            "quick_took_s": quick_s,
            "full_took_s": full_s,
        }
        if names:
            line |= {
                "about": paragraphs(experiment.about),
                "knobs": experiment.knobs,
                "profiles": experiment.profiles,
                "keys": experiment.keys(),
                "assumptions": experiment.assumptions(),
            }
        found.append(line)
    output.document({"experiments": found, "broken": catalog.broken})


# -- run -------------------------------------------------------------------------------------------


@click.command(
    short_help="Run experiments, and judge the claims.",
    epilog=examples(
        "cxlbench run fig05 --quick",
        "cxlbench run all --quick",
        "cxlbench run fig10 fig11 --seed 2 --results second",
        "cxlbench run fig05 --set pm1743-class.read_bandwidth=7GB/s --set turns=4",
        "cxlbench run fig13 --quick --tier my_tiers:MyTier",
        "cxlbench run my_module:EXPERIMENT",
    ),
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...|all")
@click.option("--quick", is_flag=True, help="The same shape in small: seconds in place of minutes.")
@seed_option_for("Same seed, same result.json.")
@set_option_for(
    "Replace a number or choice of the set-up (--set turns=4), or of a profile, with its unit "
    "(--set pm1743-class.read_bandwidth=7GB/s); `cxlbench list NAME` shows the keys. Of several "
    "experiments, each takes the keys it has. Repeatable."
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME|MODULE:OBJECT",
    help="Compare one more tier: of the catalog, or your own (docs/tiers.md). Repeatable.",
)
@results_option("Each experiment gets a folder in here: NAME, or NAME-quick.")
@json_option
def run(
    names: tuple[str, ...],
    quick: bool,
    seed: int,
    overrides: dict[str, str],
    tiers: tuple[str, ...],
    results: Path,
    as_json: bool,
) -> None:
    """Run experiments in virtual time: rows, plots, and a verdict on every claim of the paper.

    Every experiment leaves a folder with result.json (set-up, assumptions, rows, claims, checks:
    the same bytes for the same seed), run.json, rows.csv and its plots, each as PNG and SVG. Ctrl-C
    and SIGTERM stop the running experiment, which leaves what it has, marked partial; it never
    replaces a whole run. A second one ends at once.

    A claim that does not hold is a result, not an error. A check is a law that must hold in every
    run (nothing lost, no link used beyond its bandwidth): one that fails is an error.

    Exit codes: 0 fine, whatever the verdicts; 1 a check failed; 2 an unknown experiment, an
    impossible key or value, or an experiment that could not run; 130 interrupted, 143 terminated.
    """
    from cxlbench.harness.experiment_catalog import ALL, find_experiments
    from cxlbench.harness.experiment_run import make_contexts, run_all
    from cxlbench.harness.experiment_tables import load_shares, record_text, summary_text
    from cxlbench.harness.results import check_writable

    output = Output(as_json=as_json)
    catalog = find_experiments()
    experiments = catalog.choose(names)
    contexts = make_contexts(experiments, quick=quick, seed=seed, overrides=overrides, tiers=tiers)
    check_writable(results)
    broken = list(map(str, catalog.broken)) if ALL in names else []
    for text in broken:
        output.note(text)
    grids: dict[str, Shares] = {}

    def tell(outcome: Outcome) -> None:
        progress.close()
        if outcome.record is not None and outcome.folder is not None:
            grid = load_shares(outcome.record, results, output.note)
            grids[outcome.name] = grid
            output.say(record_text(outcome.record, outcome.folder, grid))
        if outcome.error is not None:
            _tell_error(outcome, output)

    with output.progress() as progress:
        runs = run_all(
            contexts,
            results,
            specs=_specs(catalog, names),
            command=sys.argv,
            progress=progress,
            note=output.note,
            done=tell,
        )
    if len(contexts) > 1:
        output.say(summary_text(runs, results, grids))
    output.document(
        {
            "experiments": [
                {
                    "name": one.name,
                    "folder": one.folder,
                    "error": None if one.error is None else f"{one.error}" or "interrupted",
                    "result": one.record,
                    "grid": grids.get(one.name, {}),
                }
                for one in runs.outcomes
            ],
            "not_begun": runs.left,
            "broken": broken,
        }
    )
    code = _exit_code(runs, every=ALL in names) or (BAD_INPUT if broken else 0)
    if code:
        raise click.exceptions.Exit(code)


def _specs(catalog: Catalog, names: tuple[str, ...]) -> dict[str, str]:
    """Return how experiments without an entry point are named on the command line."""
    return {catalog.get(name).name: name for name in names if ":" in name}


def _tell_error(outcome: Outcome, output: Output) -> None:
    from cxlbench.harness.experiment import InputMissingError

    error = outcome.error
    if isinstance(error, KeyboardInterrupt):
        output.note(f"{outcome.name}: given up; it left nothing")
    elif isinstance(error, InputMissingError):
        output.note(f"skipped: {error}")
    elif isinstance(error, user_errors()):
        if click.get_current_context().find_root().params.get("debug"):
            output.note("".join(traceback.format_exception(error)).rstrip())
        output.note(f"error: {outcome.name}: {error}")
    elif error is not None:
        output.note("".join(traceback.format_exception(error)).rstrip())
        output.note(f"{outcome.name} failed: that is a bug, of the experiment or of cxlbench")


def _exit_code(runs: Runs, *, every: bool) -> int:
    """Return the exit code: what was interrupted first, then bugs and checks, then bad input.

    Who asks for ``every`` experiment did not ask for one whose input is not here.
    """
    from cxlbench.harness.experiment import InputMissingError

    if runs.stop.number is not None:
        return runs.stop.exit_code
    errors = [one.error for one in runs.outcomes if one.error is not None]
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        return INTERRUPTED
    if any(not isinstance(error, user_errors()) for error in errors):
        return BUG
    if not all(record.ok for record in runs.records):
        return CHECK_FAILED
    skipped = InputMissingError if every else ()
    return BAD_INPUT if any(not isinstance(error, skipped) for error in errors) else 0


# -- compare ---------------------------------------------------------------------------------------


@click.command(
    short_help="Compare two runs of an experiment.",
    epilog=examples(
        "cxlbench compare results/fig10 second/fig10",
        "cxlbench compare results second",
        "cxlbench compare results second fig10 fig11-quick",
    ),
)
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def compare(a: Path, b: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Compare two runs: what differs in their set-ups, rows side by side, verdicts that changed.

    A and B are the folders of two runs, or two folders of results: then all runs that both have, or
    those that are named, are compared.

    Exit codes: 0 whatever differs; 2 a folder holds no run, or they are of two experiments.
    """
    from cxlbench.harness.experiment_compare import compare as compare_runs
    from cxlbench.harness.experiment_compare import pairs_of_runs
    from cxlbench.harness.experiment_tables import comparison_text

    output = Output(as_json=as_json)
    found = [compare_runs(*pair) for pair in pairs_of_runs(a, b, names)]
    for one in found:
        output.say(comparison_text(one))
    output.document({"comparisons": found})


# -- report ----------------------------------------------------------------------------------------


@click.command(
    short_help="Make one HTML page of all results.",
    epilog=examples(
        "cxlbench report",
        "cxlbench report --results second -o second.html",
    ),
)
@results_option("A folder that `cxlbench run` filled.")
@click.option(
    "--output",
    "-o",
    "path",
    type=FILE,
    default=Path("report.html"),
    show_default=True,
    help="The page.",
)
@json_option
def report(results: Path, path: Path, as_json: bool) -> None:
    """Make one self-contained HTML page: the claims first, then a section for each experiment.

    Of each experiment the full run is shown, or the quick one where there is no other. The page
    needs nothing but itself: it opens from a folder or an attachment, and prints. To a file that
    ends in .md only the claims are written, as a table.

    Exit codes: 0 fine; 2 there is no run in the folder, or the page cannot be written.
    """
    from cxlbench.harness.experiment import ExperimentError
    from cxlbench.harness.experiment_folder import best_records
    from cxlbench.harness.experiment_tables import load_shares
    from cxlbench.harness.report_markdown import claims_markdown
    from cxlbench.harness.report_page import report_page, write_page
    from cxlbench.harness.tables import plural

    output = Output(as_json=as_json)
    records = best_records(results, output.note)
    if not records:
        raise ExperimentError(f"{results} holds no run of an experiment: `cxlbench run` makes them")
    grids = {record.name: load_shares(record, results, output.note) for record in records}
    if path.suffix == ".md":
        page = claims_markdown(records, grids)
    else:
        with output.progress() as progress:
            page = report_page(records, grids, progress=progress)
    write_page(page, path)
    output.say(f"{path}: {plural(len(records), 'experiment')}, {len(page) / 1e6:.1f} MB")
    output.document(
        {
            "path": path,
            "experiments": [record.name for record in records],
            "claims": {record.name: record.verdicts() for record in records},
        }
    )
