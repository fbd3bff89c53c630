"""The program ``cxlbench``: the command line, imported so that Ctrl-C may come meanwhile.

Importing the commands takes a tenth of a second, and before that nobody is there to hear Ctrl-C.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    try:
        from cxlbench.harness.cli import main as cxlbench
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    cxlbench(prog_name="cxlbench")
