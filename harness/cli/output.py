"""Where a command's output goes: text or JSON on standard output, the rest on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.progress import Progress

if TYPE_CHECKING:
    from cxlbench.harness.results import RunNotes


class Output:
    """The output of one command. With ``--json`` only ``document`` writes to standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._began_s = time.monotonic()

    def say(self, text: str = "") -> None:
        """Print a part of the report for people."""
        if not self.as_json:
            click.echo(text)

    def document(self, value: Any) -> None:
        """Print the JSON document."""
        if self.as_json:
            from cxlbench.harness.results import to_text

            click.echo(to_text(value), nl=False)

    def note(self, text: str) -> None:
        """Print a message that belongs to no report."""
        click.echo(text, err=True)

    def progress(self) -> Progress:
        """Return what shows progress."""
        return Progress(sys.stderr)

    def run_notes(self, paths: Mapping[str, Path]) -> RunNotes:
        """Return what ``run.json`` says of this command: its words, its paths, its duration."""
        from cxlbench.harness.results import RunNotes

        return RunNotes(sys.argv, paths, time.monotonic() - self._began_s)
