"""Where a command's output goes: text or JSON on standard output, the rest on standard error."""

from __future__ import annotations

import sys
from typing import Any

import click

from cxlbench.harness.progress import Progress


class Output:
    """The output of one command. With ``--json`` only ``document`` writes to standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

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
