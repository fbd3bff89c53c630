"""Our hit counts beside those of libCacheSim, the simulator of S3-FIFO's and SIEVE's authors.

``python -m cxlbench.harness.oracles TRACE...`` prints the table of ``docs/oracles.md``. It needs
the package ``libcachesim`` (``tox -e oracles``), which nothing else here does.

libCacheSim gets the same references as an *oracleGeneral* file: packed records of time (4 bytes),
object id (8), size (4) and the number of the next reference to the object (8, -1 for never), as its
Belady needs. All objects have size 1, so that its capacity counts blocks.

Units: blocks. Left out: sizes other than 1, and policies that are not ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cxlbench.harness.cache_policies import (
    AUTHORS_S3FIFO,
    OPT,
    SIEVE,
    HitMasks,
    References,
    next_references,
    short_name,
)
from cxlbench.harness.requests import Mode
from cxlbench.harness.run_folders import run_folder
from cxlbench.harness.tables import table
from cxlbench.harness.trace_statistics import LRU
from cxlbench.harness.traces import read_trace

MODULE = "libcachesim"
VERSION = "0.3.5"
ORACLES = {
    LRU: "LRU",
    "fifo": "FIFO",
    "clock": "Clock",
    SIEVE: "Sieve",
    AUTHORS_S3FIFO: "S3FIFO",
    OPT: "Belady",
}
"""Our policies by the class of libCacheSim that must agree to the reference, by its defaults."""

LEAST_BLOCKS = 20
"""The smallest capacity at which libCacheSim's S3-FIFO caches anything of size 1."""

CAPACITY_SHARES = (0.001, 0.01, 0.05, 0.2, 0.5)
"""Capacities to compare at, as shares of the distinct blocks."""

_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
_HASH_POWER = 18


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hits of one policy at one capacity, by us and by libCacheSim."""

    policy: str
    capacity_blocks: int
    references: int
    ours: int
    theirs: int

    @property
    def equal(self) -> bool:
        """Whether both count the same hits."""
        return self.ours == self.theirs


def missing() -> str:
    """Return why libCacheSim cannot be asked here; empty if it can."""
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        return f"{error}; pip install {MODULE}=={VERSION}, or tox -e oracles"
    return ""


def write_oracle_general(references: References, path: Path) -> None:
    """Write references as libCacheSim's oracleGeneral format."""
    records = np.zeros(len(references), dtype=_RECORD)
    records["time"] = references.request
    records["id"] = references.blocks + 1
    records["size"] = 1
    following = next_references(references.blocks)
    records["next"] = np.where(following == len(references), -1, following)
    records.tofile(path)


def libcachesim_hits(path: Path, policy: str, capacity_blocks: int, references: int) -> int:
    """Return how many of the references in an oracleGeneral file hit in libCacheSim."""
    lib: Any = importlib.import_module(MODULE)
    reader = lib.TraceReader(str(path), lib.TraceType.ORACLE_GENERAL_TRACE)
    cache = getattr(lib, ORACLES[policy])(capacity_blocks, hashpower=_HASH_POWER)
    misses: float = cache.process_trace(reader)[0]
    return round((1 - misses) * references)


def agreements(
    references: References,
    capacities_blocks: Sequence[int],
    *,
    policies: Sequence[str] = tuple(ORACLES),
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[Agreement]:
    """Return both counts for each capacity and policy; needs libCacheSim."""
    masks, count = HitMasks(references), len(references)
    found: list[Agreement] = []
    with run_folder() as folder:
        path = folder / "references.oracleGeneral"
        write_oracle_general(references, path)
        for capacity in capacities_blocks:
            for policy in policies:
                progress(short_name(policy), len(found), len(capacities_blocks) * len(policies))
                ours = int(masks.hits(policy, capacity).sum())
                theirs = libcachesim_hits(path, policy, capacity, count)
                found.append(Agreement(policy, capacity, count, ours, theirs))
    return found


def capacities_of(references: References) -> list[int]:
    """Return the capacities, in blocks, at which a workload is compared."""
    sizes = {max(LEAST_BLOCKS, round(share * references.distinct)) for share in CAPACITY_SHARES}
    return sorted(sizes)


def describe(name: str, found: Sequence[Agreement]) -> str:
    """Return a table: hit rates by policy and capacity, and whether the hits are equal."""
    rows: list[list[str | int]] = [
        [
            name,
            short_name(one.policy),
            f"{one.capacity_blocks:,}",
            f"{one.ours / one.references:.3%}",
            f"{one.ours:,}",
            f"{one.theirs:,}",
            "yes" if one.equal else "NO",
        ]
        for one in found
    ]
    headers = ["trace", "policy", "blocks", "hit rate", "hits", "libCacheSim", "equal"]
    return table(headers, rows)


def main(arguments: Sequence[str]) -> int:
    """Compare on trace files; return 1 if any count differs, 2 if nothing could be compared."""
    reason = missing()
    if reason or not arguments:
        print(reason or "name one trace file or more", file=sys.stderr)
        return 2
    differing = 0
    for argument in arguments:
        path = Path(argument)
        references = References.of(read_trace(path, mode=Mode.AS_RECORDED))
        found = agreements(references, capacities_of(references))
        differing += sum(not one.equal for one in found)
        print(describe(path.name.partition(".")[0], found), end="\n\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
