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
    "flush left out: READY": 0,
    "flush left out: tombstone": 5,
    "flush left out: metadata, list links": 0,
    "flush left out: metadata, live count": 0,
    "flush left out: bitmap": 0,
    "flush left out: reference count": 5,
    "invalidate left out: counter": 34,
    "invalidate left out: lookup": 0,
    "invalidate left out: bitmap": 10,
    "invalidate left out: payload": 8,
    "invalidate left out: own pins after a restart": 148,
    "invalidate before the lock": 20,
    "clflushopt: counter": 0,
    "clflushopt: READY": 8,
    "clflushopt: bitmap": 12,
    "clflushopt: reference count": 8,
    "READY before DMA completion": 6,
    "release before flush": 5,
    "two nodes' words on one line under two locks": 0,
    "arbiter grants two": 4,
    "IDLE unflushed": 0,
    "local unlock before the IDLE store": 0,
    "polling without flush": 0,
    "WAITING stored again while polling": 0,
    "a wait cancelled by writing IDLE": 0,
    "arbiter scans once": 0,
    "arbiter always begins at node 0": 0,
    "READY alone confirmed": 19,
    "pins of other nodes not looked at": 8,
    "unpin before the read is complete": 8,
    "needed tombstones emptied": 1,
    "place chosen before evictions": 3,
    "object READY before it is written": 73,
    "no fence before the obituary": 18,
    "slots of the dead not reset": 8,
    "repair while a live node holds a lock": 135,
    "no new epoch before the repair": 7,
    "heaps live on in a new epoch": 7,
    "reservations of the dead stay": 17,
    "pins of the dead stay": 12,
    "torn list not mended": 203,
    "bitmap not mended": 7,
    "live count not mended": 17,
    "back without admission": 4,
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
