"""The folder that a run of an experiment leaves, and how it is read back.

``result.json`` holds all that must come out again, ``run.json`` the rest; ``rows.csv`` is the table
for other programs, and each plot is there as PNG and as SVG. A run of the quick form has a folder
of its own, ``NAME-quick``, so that it never replaces a full one; a partial run never replaces a
whole one.

Units: as in the record.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.experiment import ExperimentError
from cxlbench.harness.experiment_record import Record
from cxlbench.harness.results import RESULT_FILE, RUN_FILE, RunNotes, write_run

FORMAT = "cxlbench experiment 1"
"""Tells a folder of an experiment from those of other commands."""

ROWS_FILE = "rows.csv"


def write_record(record: Record, folder: Path, *, command: Sequence[str] = ()) -> None:
    """Write a run into ``folder``: plots and rows first, then the JSON files that name them.

    Raises:
        HostLimitError: the folder cannot be written.
    """
    from cxlbench.harness.experiment_plot import save_plot

    inputs = {
        "seed": record.seed,
        "quick": record.quick,
        "overrides": record.overrides,
        "setup": record.setup,
        "profiles": record.profiles,
    }
    figures = {
        "format": FORMAT,
        "title": record.title,
        "source": record.source,
        "about": record.about,
        "assumptions": record.assumptions,
        "columns": record.columns,
        "rows": record.rows,
        "plots": record.plots,
        "checks": record.checks,
        "notes": record.notes,
        "partial": record.partial,
        "spec": record.spec,
        **({"tiers": record.tiers} if record.tiers else {}),
        "grid": record.grid,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_plots(folder)
        for plot in record.plots:
            save_plot(plot, folder)
        (folder / ROWS_FILE).write_text(_csv(record), encoding="utf-8")
    except OSError as error:
        raise HostLimitError(
            f"cannot write results in {folder}: {error.strerror or error}; choose another folder"
        ) from error
    write_run(
        folder,
        name=record.name,
        inputs=inputs,
        figures=figures,
        claims=record.claims,
        notes=RunNotes(command, {}, record.duration_s),
    )


def read_record(folder: Path) -> Record:
    """Return the run that ``folder`` holds.

    Raises:
        ExperimentError: it holds none, or one that is damaged.
    """
    path = folder / RESULT_FILE
    if not path.is_file():
        raise ExperimentError(f"{folder} has no {RESULT_FILE}: `cxlbench run` makes such folders")
    try:
        result = json.loads(path.read_bytes())
        run = {}
        with contextlib.suppress(OSError, ValueError):
            run = json.loads((folder / RUN_FILE).read_bytes())
        if not isinstance(run, dict):  # it says nothing that the figures depend on
            run = {}
        figures = result.pop("figures")
        if not isinstance(figures, dict) or figures.get("format") != FORMAT:
            raise ExperimentError(f"{path} is not of an experiment that `cxlbench run` ran")
        inputs = result.pop("inputs")
        kept = {key: run.get(key) for key in ("duration_s", "host")}
        values = {**result, **figures, **inputs, **kept, "written": run.get("written", "")}
        return msgspec.convert(values, Record)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, ExperimentError):
            raise
        raise ExperimentError(f"{path} is damaged: {error}; run the experiment again") from error


def records_in(folder: Path) -> dict[str, Path]:
    """Return the runs inside a folder of results: their folders by name, sorted.

    Raises:
        ExperimentError: there is no such folder.
    """
    if not folder.is_dir():
        raise ExperimentError(f"there is no folder {folder}: `cxlbench run` makes it")
    return {
        path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and is_record(path)
    }


def is_record(folder: Path) -> bool:
    """Return whether ``folder`` holds a run of an experiment, damaged or not."""
    try:
        return FORMAT.encode() in (folder / RESULT_FILE).read_bytes()
    except OSError:
        return False


def best_records(folder: Path, note: Callable[[str], None] = lambda _: None) -> list[Record]:
    """Return one run of each experiment: whole ones before partial ones, full before quick.

    A damaged one is told by ``note``, and hides no other.
    """
    records = []
    for path in records_in(folder).values():
        try:
            records.append(read_record(path))
        except ExperimentError as error:
            note(f"left out: {error}")
    for path in _torn(folder):
        note(f"left out: {path} is damaged: it is no whole JSON; run the experiment again")
    records.sort(key=lambda record: (record.name, record.partial, record.quick))
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.name, record)
    return list(found.values())


def _torn(folder: Path) -> Iterator[Path]:
    """Yield results that do not even say what they are of."""
    for path in sorted(folder.glob(f"*/{RESULT_FILE}")):
        if not is_record(path.parent):
            try:
                json.loads(path.read_bytes())
            except (OSError, ValueError):
                yield path


def place_for(record: Record, results: Path) -> Path:
    """Return the folder that a run goes to: a partial one never replaces a whole one."""
    folder = results / record.folder_name
    if record.partial and is_record(folder):
        with contextlib.suppress(ExperimentError):
            if not read_record(folder).partial:
                return results / f"{record.folder_name}-partial"
    return folder


def _csv(record: Record) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, record.columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.rows)
    return text.getvalue()


def _remove_plots(folder: Path) -> None:
    """Remove the plots of the run that was here before: this one may not draw them."""
    with contextlib.suppress(ExperimentError):
        for plot in read_record(folder).plots:
            for ending in (".png", ".svg"):
                (folder / f"{Path(plot.name).name}{ending}").unlink(missing_ok=True)
