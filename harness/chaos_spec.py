"""The deployment that the chaos loop runs: small enough to evict, fast enough for a laptop.

Units: bytes at full size, s.
"""

from __future__ import annotations

from pathlib import Path

from cxlbench.harness.deployment import DeploymentSpec

SCALE = 128
CAPACITY = 4 << 30
"""Of each device; the conversations need more than all devices have."""


def chaos_spec(folder: Path, *, nodes: int, deadline_s: float) -> DeploymentSpec:
    """Return the spec of a deployment whose run directory and backing files are in ``folder``."""
    files = folder / "ssd"
    files.mkdir(parents=True, exist_ok=True)
    return DeploymentSpec(
        run_dir=folder / "run",
        nodes=nodes,
        scale=SCALE,
        capacity=CAPACITY,
        folder=files,
        deadline_s=deadline_s,
        call_timeout_s=deadline_s / 4,
    )
