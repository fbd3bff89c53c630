"""``python -m cxlbench.harness.cli`` is ``cxlbench``."""

from cxlbench.harness.cli import main

main(prog_name="cxlbench")
