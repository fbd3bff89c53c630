"""The folder that a run leaves: ``result.json``, ``run.json``, and whatever plots it drew.

``result.json`` holds what must come out again: name, inputs (seed and scale among them), versions,
figures, and a row per claim (what the paper says, what was measured, verdict). It has no date,
host, path or duration of the host, its keys are sorted, and the same run writes the same bytes.
``run.json`` holds the rest: when, where, for how long, with which command.

Any dataclass can be an input or a figure: fields and properties become keys. Units are in the names
(``_s``, ``_bytes``); numbers that JSON does not know (infinity) are written as text.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import cxlbench
from cxlbench.emu.status import HostLimitError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

RESULT_FILE = "result.json"
RUN_FILE = "run.json"


class Verdict(enum.StrEnum):
    """What a run says about a claim."""

    HOLDS = "holds"
    DIRECTION = "direction only"
    FAILS = "does not hold"
    OPEN = "not decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement of a paper, what was measured, and whether it holds here."""

    statement: str
    source: str
    expected: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Host:
    """Where a run took place."""

    system: str
    machine: str
    processor: str
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RunNotes:
    """What a run's figures do not depend on: command, where its files were, how long it took."""

    command: Sequence[str] = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    duration_s: float | None = None


def write_run(
    folder: Path,
    *,
    name: str,
    inputs: Mapping[str, Any],
    figures: Any,
    claims: Iterable[Claim] = (),
    host: Host | None = None,
    notes: RunNotes | None = None,
) -> Path:
    """Write ``result.json`` and ``run.json`` into ``folder`` (made if needed); return it.

    Each file appears complete or not at all. ``inputs`` must not name what differs between two runs
    of the same work, such as folders; those belong into ``notes``.

    Raises:
        HostLimitError: the folder cannot be written.
    """
    result = {
        "name": name,
        "inputs": inputs,
        "versions": versions(),
        "figures": figures,
        "claims": list(claims),
    }
    run = {
        "name": name,
        "host": host or this_host(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_fields(notes or RunNotes()),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / RESULT_FILE, to_text(result))
        _replace(folder / RUN_FILE, to_text(run))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


def check_writable(folder: Path) -> None:
    """Refuse a folder for results before a long run and not after it; nothing is made.

    Raises:
        HostLimitError: the folder, or the one it would be made in, cannot be written.
    """
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            try:
                tempfile.TemporaryFile(dir=place).close()
            except OSError as error:
                raise _cannot_write(folder, error) from error
            return


def _cannot_write(folder: Path, error: OSError) -> HostLimitError:
    return HostLimitError(
        f"cannot write results in {folder}: {error.strerror or error}; choose another folder"
    )


def to_text(value: Any) -> str:
    """Return ``value`` as JSON text: sorted keys, one newline at the end, always the same bytes."""
    return json.dumps(to_json(value), sort_keys=True, indent=2, allow_nan=False) + "\n"


def to_json(value: Any) -> Json:
    """Return what JSON can say of ``value``: dataclasses by fields and properties, enums by value.

    Raises:
        TypeError: something in it has no form in JSON.
    """
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {_key(key): to_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: to_json(item) for key, item in _fields(value).items()}
    if isinstance(value, Set):
        return [to_json(item) for item in sorted(value)]
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return to_json(value.tolist())
    raise TypeError(f"{type(value).__name__} has no form in JSON: {value!r}")


def _key(key: object) -> str:
    return str(key.value) if isinstance(key, enum.Enum) else str(key)


def _fields(value: Any) -> dict[str, Any]:
    """Return a dataclass's public fields and properties."""
    names = [member.name for member in dataclasses.fields(value)]
    for kind in type(value).__mro__:
        names += [name for name, member in vars(kind).items() if isinstance(member, property)]
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    packages = {name: importlib.metadata.version(name) for name in ("numba", "numpy", "xxhash")}
    return {"cxlbench": cxlbench.__version__, "python": platform.python_version(), **packages}


def this_host() -> Host:
    """Return what this host is."""
    return Host(
        f"{platform.system()} {platform.release()}",
        platform.machine(),
        _processor(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes(),
    )


def memory_bytes() -> int:
    """Return the host's main memory, bytes; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def without(value: Json, name: str) -> Json:
    """Return ``value`` without the keys called ``name``, at any depth."""
    if isinstance(value, dict):
        return {key: without(item, name) for key, item in value.items() if key != name}
    return [without(item, name) for item in value] if isinstance(value, list) else value
