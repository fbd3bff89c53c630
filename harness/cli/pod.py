"""``cxlbench pod``: explore the schedules of a shared-memory program, replay one, lint its flushes.

The commands that take long are in ``pod_long.py``.
"""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.group import WRONG_DATA, UserError
from cxlbench.harness.cli.options import (
    COUNT,
    FILE,
    examples,
    json_option,
    refuse_idle,
    seed_option_for,
)
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cxlbench.emu.pod_explorer import Exploration, SavedSchedule
    from cxlbench.emu.pod_failure import Kind
    from cxlbench.emu.pod_report import Report
    from cxlbench.emu.pod_trace import Site

KINDS = (
    "causality",
    "write-race",
    "line-race",
    "regress",
    "exclusion",
    "waiting",
    "hang",
    "exception",
    "invariant",
)
"""What ``--ignore`` takes: the kinds of failure, by the names of ``pod_failure.Kind``."""

SEED_HELP = "Same seed and program, same schedules and same result."

schedules_option = click.option(
    "--schedules", type=COUNT, default=1000, show_default=True, help="How many to try at most."
)


@click.group(
    short_help="Programs on shared memory without coherence: explore, replay, lint.",
    epilog=examples(
        "cxlbench pod explore cxlbench.tract.scenarios:cache_traffic",
        "cxlbench pod replay scenario-1-7.pod.json",
    ),
)
def pod() -> None:
    """Run programs on a CXL pod: nodes that share memory which no hardware keeps coherent.

    TARGET is module:function, where function(pod) builds a scenario; modules are looked for in the
    current folder too. docs/pod.md tells how to write one.
    """


@pod.command(
    short_help="Run a scenario under many schedules, until one fails.",
    epilog=examples(
        "cxlbench pod explore cxlbench.tract.scenarios:cache_traffic --schedules 200",
        "cxlbench pod explore my_queue:scenario --scheduler pct --save failing.json",
    ),
)
@click.argument("target")
@schedules_option
@seed_option_for(SEED_HELP)
@click.option(
    "--first",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of the first schedule.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["random", "pct", "mixed", "dfs"]),
    default="mixed",
    show_default=True,
    help="mixed: random and PCT in turn; dfs: all schedules with few preemptions.",
)
@click.option(
    "--bound",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="With dfs: the most preemptions of a schedule.",
)
@click.option("--disturb", is_flag=True, help="With dfs: evictions and fills are choices too.")
@click.option(
    "--max-steps",
    type=COUNT,
    default=50_000,
    show_default=True,
    help="A schedule of more steps is taken as a hang.",
)
@click.option(
    "--ignore",
    type=click.Choice(KINDS),
    multiple=True,
    help="Pass over failures of this kind. Repeatable.",
)
@click.option(
    "--save",
    type=FILE,
    help="Where a failing schedule goes. [default: FUNCTION-SEED-NUMBER.pod.json, here]",
)
@json_option
def explore(
    target: str,
    schedules: int,
    seed: int,
    first: int,
    scheduler: Any,
    bound: int,
    disturb: bool,
    max_steps: int,
    ignore: tuple[str, ...],
    save: Path | None,
    as_json: bool,
) -> None:
    """Run the scenario TARGET under many schedules, until one fails.

    A failure is explained: both lines of source, what memory held, the cause, what happened in
    which order. Its schedule is shrunk and saved, and the command that replays it is printed.

    Exit codes: 0 no schedule failed; 1 one did; 2 there is no such scenario, or it cannot be built.
    """
    from cxlbench.emu.pod_explorer import explore as explore_target
    from cxlbench.harness.pod_target import load_scenario
    from cxlbench.harness.results import check_writable

    if scheduler != "dfs":
        refuse_idle(("bound", "disturb"), "it is for --scheduler dfs")
    output = Output(as_json=as_json)
    check_writable((save or Path()).parent)
    with _told_to_the_user(), output.progress() as progress:
        found = explore_target(
            load_scenario(target),
            schedules=schedules,
            first=first,
            seed=seed,
            scheduler=scheduler,
            bound=bound,
            disturb=disturb,
            max_steps=max_steps,
            ignore=_kinds(ignore),
            progress=lambda done: progress("schedules", done, schedules),
        )
    document = {
        "target": target,
        "seed": seed,
        "scheduler": scheduler,
        "first": first,
        "schedules": found.schedules,
        "operations": found.steps,
        "exhausted": found.exhausted,
        "failure": None,
        "schedule_file": None,
        "replay": None,
    }
    output.say(_summary(target, found, scheduler=scheduler, seed=seed))
    if found.report is None or found.schedule is None:
        output.document(document)
        return
    saved = _named(found.schedule, target)
    path = save or Path(f"{target.rpartition(':')[2]}-{seed}-{saved.index}.pod.json")
    saved.save(path)
    command = f"cxlbench pod replay {shlex.quote(str(path))}"
    output.say()
    output.say(found.report.text(command))
    output.document(
        document
        | {"failure": _report_document(found.report), "schedule_file": path, "replay": command}
    )
    raise click.exceptions.Exit(WRONG_DATA)


@pod.command(
    short_help="Run a saved schedule again.",
    epilog=examples("cxlbench pod replay scenario-1-7.pod.json"),
)
@click.argument("file", type=FILE)
@json_option
def replay(file: Path, as_json: bool) -> None:
    """Run the saved schedule FILE again, and explain how it fails.

    If it does not fail any more, explore again: a repaired program takes other steps, so one old
    schedule proves little.

    Exit codes: 0 it does not fail any more; 1 it fails; 2 FILE is no schedule, or its scenario is
    not there.
    """
    from cxlbench.emu.pod_explorer import SavedSchedule
    from cxlbench.emu.pod_explorer import replay as replay_schedule
    from cxlbench.emu.pod_failure import NotReproducedError
    from cxlbench.harness.pod_target import load_scenario

    output = Output(as_json=as_json)
    with _told_to_the_user():
        saved = SavedSchedule.load(file)
        scenario = load_scenario(saved.target)
        try:
            report = replay_schedule(saved, target=scenario)
        except NotReproducedError:
            output.say(
                f"{saved.target}: the schedule that failed ({_title(saved.kind, saved.cause)}) "
                "does not fail any more"
            )
            output.document({"target": saved.target, "failure": None, "as_saved": False})
            return
    as_saved = (str(report.kind), str(report.cause or "")) == (saved.kind, saved.cause)
    if not as_saved:
        output.note(f"it fails otherwise than when saved: {_title(saved.kind, saved.cause)} then")
    output.say(report.text())
    output.document(
        {"target": saved.target, "failure": _report_document(report), "as_saved": as_saved}
    )
    raise click.exceptions.Exit(WRONG_DATA)


@pod.command(
    short_help="Find flushes that never have an effect.",
    epilog=examples(
        "cxlbench pod lint cxlbench.tract.scenarios:lock_counter",
        "cxlbench pod lint my_queue:scenario --profile niagara-2.0-cmpi --json",
    ),
)
@click.argument("target")
@click.option("--schedules", type=COUNT, default=200, show_default=True, help="How many to try.")
@seed_option_for(SEED_HELP)
@click.option(
    "--profile",
    default="niagara-2.0",
    show_default=True,
    help="Profile of the shared memory: what a flush costs there.",
)
@json_option
def lint(target: str, schedules: int, seed: int, profile: str, as_json: bool) -> None:
    """Find flushes of the scenario TARGET that never had an effect, and say what each costs.

    A flush has an effect if it writes a dirty line back, waits for a write-back in flight, or drops
    a copy that the device no longer held. Without one in any schedule it is probably needless.

    Exit codes: 0 whatever was found; 1 schedules failed, so it is not known; 2 there is no such
    scenario or profile.
    """
    from cxlbench.emu.pod_explorer import lint_flushes
    from cxlbench.emu.race_checks import lint_text
    from cxlbench.harness.pod_profile import load_shared_memory
    from cxlbench.harness.pod_target import load_scenario

    output = Output(as_json=as_json)
    flush_ns = load_shared_memory(profile).flush_latency * 1e9
    with _told_to_the_user():
        found = lint_flushes(load_scenario(target), schedules=schedules, seed=seed)
    output.say(lint_text(found, schedules=schedules, flush_ns=round(flush_ns, 3)))
    output.document(
        {
            "target": target,
            "profile": profile,
            "schedules": schedules,
            "failed_schedules": found.failed,
            "flush_ns": flush_ns,
            "sites": sorted(found.sites.values(), key=lambda site: site.site),
            "needless": [
                {
                    "site": site.site,
                    "flushes_a_run": site.flushes / schedules,
                    "ns_a_run": site.flushes / schedules * flush_ns,
                }
                for site in found.needless()
            ],
        }
    )
    if found.failed:
        raise click.exceptions.Exit(WRONG_DATA)


@contextmanager
def _told_to_the_user() -> Iterator[None]:
    """Turn what a user can put right into a message and exit code 2."""
    from cxlbench.emu.pod_explorer import ScheduleFileError
    from cxlbench.emu.pod_failure import NotReproducedError, PodUsageError
    from cxlbench.harness.pod_target import ScenarioError

    try:
        yield
    except (ScenarioError, PodUsageError, ScheduleFileError, NotReproducedError) as error:
        raise UserError(str(error)) from error


def _kinds(names: Sequence[str]) -> list[Kind]:
    from cxlbench.emu.pod_failure import Kind

    return [Kind[name.upper().replace("-", "_")] for name in names]


def _named(schedule: SavedSchedule, target: str) -> SavedSchedule:
    """Return the schedule with the scenario's name as the user gave it."""
    from msgspec.structs import replace

    return replace(schedule, target=target)


def _title(kind: str, cause: str) -> str:
    return f"{kind}: {cause}" if cause else kind


def _summary(target: str, found: Exploration, *, scheduler: str, seed: int) -> str:
    how = f"({scheduler}, seed {seed})"
    if found.schedule is not None:
        return f"{target}: FAILED in schedule {found.schedule.index} {how}"
    whole = ", all that there are within the bound" if found.exhausted else ""
    return (
        f"{target}: no failure in {found.schedules:,} schedules {how}{whole}; "
        f"{found.steps:,} memory operations"
    )


def _report_document(report: Report) -> dict[str, Any]:
    return {
        "kind": report.kind,
        "cause": report.cause,
        "message": report.message,
        "step": report.step,
        "task": report.task,
        "offset": report.offset,
        "objects": report.objects,
        "later": _site_document(report.later_site),
        "found": _site_document(report.site),
        "text": report.text(),
    }


def _site_document(site: Site) -> list[dict[str, Any]]:
    return [{"file": p.file, "line": p.line, "function": p.function} for p in site]
