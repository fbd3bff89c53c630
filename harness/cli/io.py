"""``cxlbench io``: a device under plain reads and writes, in fio's words."""

from __future__ import annotations

import click


@click.command()
def io() -> None:
    """Drive a device."""
