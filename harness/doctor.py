"""What this host is, and which features of the bench it can run: ``cxlbench doctor``.

Looks, and changes nothing but for one small file in the folder that is asked about (direct I/O can
only be told by trying), which is removed. Units: bytes, s of the host's clock.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from cxlbench.emu.clock import WallClock
from cxlbench.emu.flush_instructions import SUPPORT
from cxlbench.emu.memory import PAGE_BYTES, Arena
from cxlbench.emu.numa import bind_memory, numa_nodes
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.disk_probe import find_fio, is_direct
from cxlbench.harness.fidelity import MAX_LATE_P50_S, MAX_LATE_P99_S
from cxlbench.harness.results import memory_bytes

LATENESS_S = 0.3
TIMER_STEP_S = 1e-3
PYTHON_AT_LEAST = (3, 11)
MIN_MEMORY_BYTES = 4 << 30
MIN_FREE_BYTES = 4 << 30


class State(StrEnum):
    """What a finding means for the bench."""

    OK = "ok"
    MISSING = "missing"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what is there, and what follows."""

    name: str
    state: State
    value: str
    means: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that the bench can do on this host, or why it cannot."""

    name: str
    available: bool
    why: str


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and the features that follow from them."""

    findings: tuple[Finding, ...]
    features: tuple[Feature, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing: neither the bench's own needs nor the folder."""
        return all(finding.state is not State.MISSING for finding in self.findings)


def examine(folder: Path, *, lateness_s: float = LATENESS_S) -> Examination:
    """Look at this host, and at ``folder`` as a home of backing files.

    Never raises for what is missing: that is what it reports.
    """
    direct, folder_finding = _folder(folder)
    late = _lateness(lateness_s)
    fio = find_fio()
    dax, (binds, why_unbound) = _dax(), _binding()
    shm, huge, gpus = _shared_memory(), _huge_pages(), _gpus()
    vllm = importlib.util.find_spec("vllm") is not None
    findings = (
        _python(),
        *(_package(name) for name in ("numpy", "numba", "xxhash", "msgspec")),
        _cores(),
        _memory(),
        shm,
        huge,
        _numa_nodes(),
        dax,
        folder_finding,
        Finding(
            "fio",
            State.OK if fio else State.NOTE,
            str(fio) if fio else "not installed",
            "" if fio else "calibrate uses its built-in probe",
        ),
        late,
        gpus,
    )
    usable = folder_finding.state is not State.MISSING
    features = (
        Feature("virtual time (replay, generate, statistics)", _python().state is State.OK, ""),
        Feature("real bytes in memory (replay --wall)", True, ""),
        Feature("real bytes in files (demo, replay --wall --folder)", usable, folder_finding.value),
        Feature("direct I/O (files larger than memory)", direct, "" if direct else "no O_DIRECT"),
        Feature("honest timing", late.state is State.OK, late.value),
        Feature("memory in huge pages (up --hugetlb)", huge.state is State.OK, huge.value),
        Feature("memory on a NUMA node (up, pod stress --numa-node)", binds, why_unbound),
        Feature("memory on CXL devices (up --dax)", dax.state is State.OK, dax.value),
        Feature("a pod's memory pinned for a GPU", gpus.state is State.OK, gpus.value),
        Feature("native pods (pod stress --mode native)", SUPPORT.clflush, SUPPORT.reason),
        Feature("the vLLM connector", vllm, "" if vllm else "vllm is not installed"),
    )
    return Examination(findings, features)


def _python() -> Finding:
    fine = tuple(map(int, platform.python_version_tuple()[:2])) >= PYTHON_AT_LEAST
    text = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding("Python", State.OK if fine else State.MISSING, text, "3.11 or newer")


def _package(name: str) -> Finding:
    try:
        return Finding(name, State.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, State.MISSING, "not installed", "install cxlbench again")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fine = (cores or 1) >= 2
    means = "" if fine else "real-time runs want one core for the clock and one for the bytes"
    return Finding("cores", State.OK if fine else State.NOTE, str(cores or "unknown"), means)


def _memory() -> Finding:
    total = memory_bytes()
    fine = total >= MIN_MEMORY_BYTES
    text = f"{total / 2**30:.1f} GiB" if total else "unknown"
    return Finding("memory", State.OK if fine else State.NOTE, text, "" if fine else "use --scale")


def _shared_memory() -> Finding:
    place = Path("/dev") / "shm"
    try:
        room = shutil.disk_usage(place)
    except OSError:
        return Finding(str(place), State.NOTE, "none", "memory shared by name is not available")
    return Finding(str(place), State.OK, f"{room.free / 2**30:.1f} GiB free")


def _huge_pages() -> Finding:
    free = _number_in(Path("/proc/meminfo"), "HugePages_Free:")
    if free is None:
        return Finding("huge pages", State.NOTE, "none in this system", "optional")
    state = State.OK if free else State.NOTE
    means = "" if free else "optional: reserve some by vm.nr_hugepages"
    return Finding("huge pages", state, f"{free} free", means)


def _number_in(path: Path, label: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(label):
                return int(line.split()[1])
    return None


def _numa_nodes() -> Finding:
    nodes = numa_nodes()
    text = ", ".join(
        f"{node.number}: {node.memory_bytes / 2**30:.1f} GiB"
        + (f" and {len(node.cpus)} cores" if node.cpus else " without cores (CXL memory may be)")
        for node in nodes
    )
    return Finding("NUMA nodes", State.OK, text or "1")


def _binding() -> tuple[bool, str]:
    """Return whether memory can be bound to a NUMA node here, and why not."""
    nodes = [node for node in numa_nodes() if node.memory_bytes]
    if not nodes:
        return False, "this system tells of no NUMA nodes"
    arena = Arena(PAGE_BYTES)
    try:
        bind_memory(arena.array, nodes[-1].number)
    except HostLimitError as error:
        return False, str(error)
    finally:
        arena.close()
    return True, ""


def _dax() -> Finding:
    """Return which DAX devices there are, and whether they may be opened."""
    found = sorted(Path("/dev").glob("dax*"))
    usable = [path for path in found if os.access(path, os.R_OK | os.W_OK)]
    if not found:
        return Finding("/dev/dax*", State.NOTE, "none", "real CXL memory, optional")
    text = ", ".join(map(str, found))
    if len(usable) < len(found):
        return Finding("/dev/dax*", State.NOTE, text, "not all may be opened by this user")
    return Finding("/dev/dax*", State.OK, text, "real CXL memory")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _folder(folder: Path) -> tuple[bool, Finding]:
    """Return whether ``folder`` does direct I/O, and what else it is good for."""
    name = f"folder {folder}"
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        with tempfile.NamedTemporaryFile(dir=there, prefix="cxlbench-") as file:
            direct = is_direct(Path(file.name))
    except OSError as error:
        return False, Finding(
            name, State.MISSING, f"cannot be used: {error.strerror or error}", "choose another"
        )
    text = f"{free / 2**30:.1f} GiB free, {'direct I/O' if direct else 'no direct I/O'}"
    if there != folder.absolute():
        text += f"; not there yet, a run would make it in {there}"
    fine = free >= MIN_FREE_BYTES
    return direct, Finding(
        name, State.OK if fine else State.NOTE, text, "" if fine else "use a larger --scale"
    )


def _lateness(duration_s: float) -> Finding:
    """Wake up each millisecond for a while, and see how late."""
    try:
        p50, p99 = _timers(duration_s)
    except (OSError, HostLimitError) as error:
        return Finding("timers", State.MISSING, f"cannot be measured: {error}")
    fine = p50 <= MAX_LATE_P50_S and p99 <= MAX_LATE_P99_S
    text = f"late by {p50 * 1e6:.0f} us at p50, {p99 * 1e3:.2f} ms at p99"
    means = "" if fine else "allowed are 50 us and 1 ms: this host is busy, or slow to wake"
    return Finding("timers", State.OK if fine else State.NOTE, text, means)


def _timers(duration_s: float) -> tuple[float, float]:
    async def tick(clock: WallClock) -> None:
        for _ in range(max(10, round(duration_s / TIMER_STEP_S))):
            await clock.sleep(TIMER_STEP_S)

    with WallClock() as clock:
        clock.run(tick(clock))
        p50, p99 = np.percentile(np.asarray(clock.late_s), (50, 99))
    return float(p50), float(p99)


def _gpus() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", State.NOTE, "torch is not installed", "optional")
    try:
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    except Exception as error:  # a broken driver must not keep the rest from being told
        return Finding("GPU", State.NOTE, f"torch does not work: {error}", "optional")
    return Finding("GPU", State.OK if count else State.NOTE, names or "none", "optional")
