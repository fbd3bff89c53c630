"""How ``calibrate`` drives a disk: by fio as a subprocess, or by a few threads of our own.

Both work on one preallocated file with direct I/O where the file system has it. The built-in probe
uses ``preadv`` and ``pwritev`` from as many threads as ``emu/backing.py`` has, so that its figures
are those that an emulated device can count on; fio, with its deeper queues, shows what the disk
can do.

Units: bytes, bytes/s, s of the host's clock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxlbench.emu.backing import IO_THREADS
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.run_folders import run_folder


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of traffic: random or sequential, bytes an operation, share of reads."""

    random: bool
    block_bytes: int
    read_share: float


@dataclass(frozen=True, slots=True)
class Rate:
    """What the host did under one pattern, bytes/s in both directions."""

    pattern: Pattern
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Reads and writes together."""
        return self.read_bytes_per_s + self.write_bytes_per_s


Runner = Callable[[Pattern, float], Rate]

HOW_TO_GET_FIO = (
    "fio is not installed; with it the figures say more about the disk: install it with your "
    "system's package manager (its package is called fio)"
)
MIN_SECONDS = 0.05


def find_fio() -> Path | None:
    """Return where fio is, or None."""
    found = shutil.which("fio")
    return Path(found) if found else None


@contextlib.contextmanager
def probe_file(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Make a file of ``size_bytes`` full of data in ``folder``, and remove it afterwards.

    Raises:
        HostLimitError: there is no room, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        if free < 2 * size_bytes:
            raise HostLimitError(
                f"{folder} has {free / 2**20:.0f} MiB free, calibration wants "
                f"{2 * size_bytes / 2**20:.0f} MiB to be sure not to fill it: choose another folder"
            )
        with run_folder(folder) as made:
            path = made / "probe"
            _fill(path, size_bytes)
            yield path
    except OSError as error:
        raise HostLimitError(
            f"cannot calibrate in {folder}: {error.strerror or error}; choose another folder"
        ) from error


def _fill(path: Path, size_bytes: int) -> None:
    """Write real bytes: reads of a sparse or unwritten extent would not touch the disk."""
    piece = random.Random(0).randbytes(1 << 20)
    with path.open("wb") as file:
        left = size_bytes
        while left > 0:
            left -= file.write(piece[: min(left, len(piece))])
        file.flush()
        os.fsync(file.fileno())


def is_direct(file: Path) -> bool:
    """Whether the file system of ``file`` does direct I/O."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        os.close(os.open(file, os.O_RDONLY | flag))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


# -- fio -------------------------------------------------------------------------------------------


def fio_command(
    fio: Path, file: Path, size_bytes: int, pattern: Pattern, seconds: float
) -> list[str]:
    """Return the command line for one pattern."""
    names = {1.0: "read", 0.0: "write"}
    kind = names.get(pattern.read_share, "rw")
    command = [
        str(fio),
        "--name=cxlbench",
        "--output-format=json",
        f"--filename={file}",
        f"--size={size_bytes}",
        f"--rw={'rand' if pattern.random else ''}{kind}",
        f"--bs={pattern.block_bytes}",
        f"--direct={int(is_direct(file))}",
        "--ioengine=psync",
        f"--numjobs={IO_THREADS}",
        "--thread",
        "--group_reporting",
        "--time_based",
        f"--runtime={max(1, round(seconds))}s",
    ]
    if kind == "rw":
        command.append(f"--rwmixread={round(pattern.read_share * 100)}")
    return command


def fio_runner(fio: Path, file: Path, size_bytes: int) -> Runner:
    """Return a function that measures a pattern with fio."""

    def run(pattern: Pattern, seconds: float) -> Rate:
        command = fio_command(fio, file, size_bytes, pattern, seconds)
        code, out, said = _run(command, timeout_s=60 + 5 * seconds)
        if code:
            last = (said or out).strip().splitlines()[-1:] or ["no message"]
            raise HostLimitError(
                f"fio failed ({code}): {last[0]}; --no-fio uses the built-in probe"
            )
        return parse_fio(out, pattern)

    return run


def _run(command: list[str], *, timeout_s: float) -> tuple[int, str, str]:
    """Run fio; return exit code and output. Whatever ends this ends fio's own processes too."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise HostLimitError(f"fio did not end within {timeout_s:.0f} s") from error
            raise
    return process.returncode, out, said


def parse_fio(text: str, pattern: Pattern) -> Rate:
    """Return the rates of fio's JSON report.

    Raises:
        HostLimitError: the text is no such report.
    """
    try:
        # fio prints warnings before the document.
        report: Any = json.loads(text[text.index("{") :])
        job = report["jobs"][0]
        read, write = (float(job[kind]["bw_bytes"]) for kind in ("read", "write"))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HostLimitError(f"fio's report is not as expected: {error!r}") from error
    return Rate(pattern, read, write)


# -- built in --------------------------------------------------------------------------------------


def built_in_runner(file: Path, size_bytes: int, *, threads: int = IO_THREADS) -> Runner:
    """Return a function that measures a pattern with threads of this process."""

    def run(pattern: Pattern, seconds: float) -> Rate:
        flags = os.O_RDWR | (getattr(os, "O_DIRECT", 0) if is_direct(file) else 0)
        descriptor = os.open(file, flags)
        begin = time.monotonic()
        end = begin + max(seconds, MIN_SECONDS)
        try:
            with ThreadPoolExecutor(threads) as pool:
                moved = [
                    pool.submit(_drive, descriptor, size_bytes, pattern, worker, threads, end)
                    for worker in range(threads)
                ]
                counts = [future.result() for future in moved]
        finally:
            os.close(descriptor)
        took = time.monotonic() - begin
        return Rate(
            pattern,
            sum(read for read, _ in counts) / took,
            sum(write for _, write in counts) / took,
        )

    return run


def _drive(
    descriptor: int, size_bytes: int, pattern: Pattern, worker: int, workers: int, end_s: float
) -> tuple[int, int]:
    """Read and write until ``end_s``, at least once; return bytes read and written."""
    draw = random.Random(f"probe-{worker}")
    block = pattern.block_bytes
    blocks = max(1, size_bytes // block)
    at = blocks * worker // workers
    moved = [0, 0]
    with mmap.mmap(-1, block) as page_aligned, memoryview(page_aligned) as buffer:
        while True:
            offset = (draw.randrange(blocks) if pattern.random else at % blocks) * block
            at += 1
            if draw.random() < pattern.read_share:
                moved[0] += os.preadv(descriptor, [buffer], offset)
            else:
                moved[1] += os.pwritev(descriptor, [buffer], offset)
            if time.monotonic() >= end_s:
                return moved[0], moved[1]
