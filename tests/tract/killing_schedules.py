"""The first schedule of seed 0, both schedulers in turn, that shows each mutant.

Written by ``python -m tests.tract.killing_schedules``; to be written again when a scenario, a
mutant, a scheduler or the adversary changes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cxlbench.emu.pod_explorer import explore
from cxlbench.tract.mutant_loader import Mutant, load
from cxlbench.tract.mutants import ALL

LIMIT = 2_000

KILLING: dict[str, int] = {
    "header not flushed": 0,
    "magic before the sizes": 0,
    "header read without invalidate": 0,
    "flush left out: counter": 0,
    "flush left out: PENDING": 0,
    "flush left out: READY": 1,
    "flush left out: tombstone": 5,
    "flush left out: metadata, list links": 0,
    "flush left out: metadata, live count": 0,
    "flush left out: bitmap": 0,
    "flush left out: reference count": 0,
    "invalidate left out: counter": 8,
    "invalidate left out: lookup": 0,
    "invalidate left out: bitmap": 3,
    "invalidate left out: payload": 8,
    "invalidate left out: own pins after a restart": 161,
    "invalidate before the lock": 6,
    "invalidate left out: oldest entry": 2,
    "invalidate left out: next entry": 74,
    "invalidate left out: a neighbour's link before a store": 307,
    "clflushopt: counter": 0,
    "clflushopt: READY": 16,
    "clflushopt: bitmap": 6,
    "clflushopt: reference count": 5,
    "READY before DMA completion": 6,
    "release before flush": 5,
    "two nodes' words on one line under two locks": 0,
    "arbiter grants two": 12,
    "IDLE unflushed": 0,
    "local unlock before the IDLE store": 0,
    "polling without flush": 0,
    "WAITING stored again while polling": 0,
    "a wait cancelled by writing IDLE": 0,
    "arbiter scans once": 0,
    "arbiter always begins at node 0": 0,
    "READY alone confirmed": 193,
    "pins of other nodes not looked at": 1,
    "unpin before the read is complete": 16,
    "needed tombstones emptied": 0,
    "place chosen before evictions": 6,
    "object READY before it is written": 25,
    "checksum left out of an entry": 1,
    "probe ends at a tombstone": 316,
    "own pins counted without the node's lock": 26,
    "delete without a look at pins": 59,
    "delete of a reservation": 4,
    "heap's epoch read before the lock": 13,
    "no fence before the obituary": 0,
    "slots of the dead not reset": 6,
    "repair while a live node holds a lock": 207,
    "no new epoch before the repair": 13,
    "heaps live on in a new epoch": 9,
    "reservations of the dead stay": 14,
    "pins of the dead stay": 6,
    "torn list not mended": 151,
    "bitmap not mended": 7,
    "live count not mended": 14,
    "back without admission": 0,
    "repaired is said before the slots are reset": 427,
    "successor grants before it repairs": 47,
    "two successors": 112,
}


def first_killing(mutant: Mutant, folder: Path) -> int | None:
    """Return the number of the first schedule that shows the mutant, below ``LIMIT``."""
    found = explore(
        load(mutant, folder),
        schedules=LIMIT,
        scheduler="mixed",
        ignore=mutant.passed_over,
        shrinking=False,
    )
    return found.schedules - 1 if found.failed else None


def main() -> None:
    """Write this file anew."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for mutant in ALL:
            number = first_killing(mutant, Path(folder))
            print(f"{mutant.name}: {number}", flush=True)
            if number is None:
                sys.exit(f"{mutant.name} survives {LIMIT} schedules")
            lines.append(f'    "{mutant.name}": {number},\n')
    path = Path(__file__)
    text = path.read_text()
    start = text.index("KILLING: dict[str, int] = {")
    end = text.index("}\n", start)
    path.write_text(text[:start] + "KILLING: dict[str, int] = {\n" + "".join(lines) + text[end:])


if __name__ == "__main__":
    main()
