"""What the chaos loop is made of: faults by seed, worker processes, and samples of their memory.

Units: s of the machine's clock, bytes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cxlbench.harness.deployment import DeploymentSpec

TWO_FAULTS_SHARE = 0.3
LOAD_BEFORE_S = 0.25
DOWN_AT_MOST_S = 0.3
GROWTH_SHARE, GROWTH_BYTES, GROWTH_DESCRIPTORS = 0.05, 2 << 20, 4
"""Growth from the first to the last quarter of the rounds that is no leak."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the system under test."""

    role: Literal["worker", "node", "master"]
    number: int = 0

    def __str__(self) -> str:
        return "Master" if self.role == "master" else f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One part is killed or stopped ``after_s``, and is started or continued ``for_s`` later."""

    how: Literal["kill", "stop"]
    part: Part
    after_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.how} {self.part} after {self.after_s:.2f} s for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Resident:
    """Medians of one part over the first and the last quarter of the rounds."""

    part: str
    first_bytes: int
    last_bytes: int
    first_descriptors: int
    last_descriptors: int

    @property
    def flat(self) -> bool:
        """Whether neither grew."""
        limit = self.first_bytes * (1 + GROWTH_SHARE) + GROWTH_BYTES
        more = self.last_descriptors - self.first_descriptors
        return self.last_bytes <= limit and more <= GROWTH_DESCRIPTORS


def draw_faults(
    seed: int, number: int, *, workers: int, nodes: int, deadline_s: float
) -> list[Fault]:
    """Return the faults of a round."""
    draw = random.Random(f"chaos-{seed}-{number}")
    parts = [Part("worker", n) for n in range(workers)] + [Part("node", n) for n in range(nodes)]
    parts.append(Part("master"))
    faults = []
    for part in draw.sample(parts, 1 + (draw.random() < TWO_FAULTS_SHARE)):
        spared = part == Part("worker", 0) and workers > 1
        how: Literal["kill", "stop"] = "stop" if spared or draw.random() < 0.4 else "kill"
        longest_s = 1.5 * deadline_s if how == "stop" else DOWN_AT_MOST_S
        faults.append(
            Fault(how, part, draw.uniform(0, LOAD_BEFORE_S), draw.uniform(0.02, longest_s))
        )
    return faults


class WorkerProcess:
    """A worker's process, seen from outside."""

    def __init__(self, spec: DeploymentSpec, number: int, seed: int) -> None:
        self.number = number
        self.stopped_s: list[tuple[float, float]] = []
        """When it was stopped: what it measures then is not the tier's time."""
        self.inbox: list[dict[str, Any]] = []
        self._pending = b""
        log = (spec.run_dir / f"worker{number}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cxlbench.harness.chaos_worker",
                    str(spec.run_dir),
                    str(number),
                    str(seed),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)

    def tell(self, command: str) -> None:
        """Give it a command."""
        self.stdin.write(f"{command}\n".encode())
        self.stdin.flush()

    def read(self) -> None:
        """Take in what it has said."""
        data = self.stdout.read()
        *lines, self._pending = (self._pending + (data or b"")).split(b"\n")
        self.inbox.extend(json.loads(line) for line in lines)

    def end(self) -> None:
        """Kill it, if it still runs, and let go of it."""
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


@dataclass
class Samples:
    """Private memory and descriptors of each part, a value a round."""

    resident: dict[str, list[int]] = field(default_factory=dict)
    descriptors: dict[str, list[int]] = field(default_factory=dict)

    def take(self, name: str, pid: int) -> None:
        """Look at a process now."""
        self.resident.setdefault(name, []).append(_private_bytes(pid))
        count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.descriptors.setdefault(name, []).append(count)

    def quarters(self) -> list[Resident]:
        """Return the medians of the first and the last quarter."""
        found = []
        for name, sizes in self.resident.items():
            quarter = max(1, len(sizes) // 4)
            counts = self.descriptors[name]
            found.append(
                Resident(
                    name,
                    int(statistics.median(sizes[:quarter])),
                    int(statistics.median(sizes[-quarter:])),
                    int(statistics.median(counts[:quarter])),
                    int(statistics.median(counts[-quarter:])),
                )
            )
        return found


def _private_bytes(pid: int) -> int:
    """Return resident memory that is a process's own: mapped arenas are their owner's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
