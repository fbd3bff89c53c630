"""Experiments on public traces: where the files are, and the systems that they compare.

Trace files are not ours to ship. They are looked for in the folder that the knob ``trace.folder``
names, else in the one that ``CXLBENCH_TRACES`` names.
"""

from __future__ import annotations

import os
from pathlib import Path

from cxlbench.experiments import testbed
from cxlbench.experiments.serving import System
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.experiment import Context, InputMissingError, Knob

FOLDER = Knob(
    name="trace.folder",
    value="",
    source="empty: the folder that CXLBENCH_TRACES names; docs/traces.md says where to get traces",
)
LMCACHE_GIB = Knob(name="lmcache.gib", value=64, unit="GiB", source="HyMCache §5: 64 GB a worker")
MOONCAKE_GIB = Knob(name="mooncake.gib", value=1024, unit="GiB", source="HyMCache §5: 1 TB")
PROFILES = (
    *testbed.SERVING_PROFILES,
    *testbed.HYMCACHE_PROFILES,
    *testbed.LMCACHE_PROFILES,
    *testbed.MOONCAKE_PROFILES,
)


def trace_file(context: Context, name: str) -> Path:
    """Return the path of a public trace; raise ``InputMissingError`` if it is not there."""
    folder = context.choice(FOLDER.name) or os.environ.get("CXLBENCH_TRACES", "")
    path = Path(folder) / name
    if not folder or not path.is_file():
        raise InputMissingError(
            f"{context.experiment.name} needs the public trace {name}: set CXLBENCH_TRACES, or "
            f"--set {FOLDER.name}=FOLDER, to a folder that holds it (docs/traces.md says where it "
            "can be had)"
        )
    return path


def systems(context: Context, *, nodes: int = 1, link: str = "nic-100g") -> tuple[System, ...]:
    """Return the systems that traces compare."""
    return (
        System(label="GPU prefix cache", tier="gpu-prefix-cache"),
        System(
            label="LMCache local",
            tier="lmcache-local",
            options={"capacity_bytes": context.count(LMCACHE_GIB.name) * GIB},
        ),
        System(
            label="Mooncake",
            tier="mooncake",
            options={"capacity_bytes": context.count(MOONCAKE_GIB.name) * GIB},
        ),
        System(label="HyMCache", tier="hymcache", options={"worker_link": link, "nodes": nodes}),
    )
