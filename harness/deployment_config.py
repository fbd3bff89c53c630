"""Reading the configuration of a deployment: file, environment and flags, checked as a whole.

Flags override ``CXLBENCH_*`` environment variables, which override the TOML file. All that is wrong
is said at once, each with where it was said; a configuration that passes is then built once in
miniature, in virtual time, which finds what does not fit together. Units: bytes, s.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cxlbench.devices.profile import LinkProfile, ProfileError, SoftwareProfile, load_as
from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.memory import PAGE_BYTES
from cxlbench.emu.numa import find_node
from cxlbench.emu.status import DeviceError, HostLimitError
from cxlbench.emu.unix_paths import fits, takes_any_length
from cxlbench.emu.user_objects import UserObjectError
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec
from cxlbench.harness.rig import Rig
from cxlbench.harness.rig_checks import check_rig

ENVIRONMENT_PREFIX = "CXLBENCH_"
OTHER_VARIABLES = ("CXLBENCH_KERNEL_CACHE", "CXLBENCH_LARGE", "CXLBENCH_TRACES")
"""What else of this name is read somewhere."""
_FLAGS = {
    "device_set": "--set",
    "throttled": "--unthrottled",
    "deadline_s": "--deadline",
    "call_timeout_s": "--call-timeout",
}
"""Options that have another name than their key."""

MOST_PARTS = 64


def read_config(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> DeploymentSpec:
    """Return the deployment that file, environment and flags (not None) describe together.

    Raises ``DeploymentError`` with everything that is wrong, each with where it was said.
    """
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    if path is not None:
        try:
            values |= tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DeploymentError([f"cannot read {path}: {error.strerror}"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DeploymentError([f"{path}: {error}"]) from None
        said |= dict.fromkeys(values, f"{path}: ")
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        # Of other programs there may be some: only what is nearly a key is taken for a slip.
        if name in _PARSERS or get_close_matches(name, _PARSERS, cutoff=0.75):
            values[name] = text
            said[name] = f"{variable}: "
    given = {name: value for name, value in flags.items() if value is not None}
    values |= given
    said |= {name: f"{_FLAGS.get(name, '--' + name.replace('_', '-'))}: " for name in given}
    spec = make_spec(values, said=said)
    problem = _why_not_buildable(spec)
    if problem is not None:
        raise DeploymentError([problem])
    return spec


def make_spec(
    values: Mapping[str, Any], *, said: Mapping[str, str] | None = None
) -> DeploymentSpec:
    """Make a spec of plain values; raises ``DeploymentError`` with all that is wrong.

    ``said`` is where each value comes from, as the beginning of a message.
    """
    said = said or {}
    problems: list[tuple[str, str]] = []
    made: dict[str, Any] = {}
    for name, value in values.items():
        parse = _PARSERS.get(name)
        if parse is None:
            near = get_close_matches(name, _PARSERS)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_PARSERS)}"
            problems.append((name, f"no such key; {hint}"))
            continue
        try:
            made[name] = parse(value)
        except (ValueError, TypeError) as error:
            problems.append((name, f"{value!r} {error}"))
    problems += _check(DeploymentSpec(**made))
    if problems:
        lines = [f"{said.get(name, '')}{name}: {problem}" for name, problem in problems]
        raise DeploymentError(lines)
    return DeploymentSpec(**made)


def _check(spec: DeploymentSpec) -> list[tuple[str, str]]:
    """Return key and trouble of all that cannot be."""
    problems = []
    for name in ("nodes", "devices_per_node"):
        count = getattr(spec, name)
        if not 1 <= count <= MOST_PARTS:
            problems.append((name, f"{count} must be from 1 to {MOST_PARTS}"))
    if not 1 <= spec.scale < math.inf:
        problems.append(("scale", f"{spec.scale} must be finite, and at least 1"))
    for name in ("deadline_s", "call_timeout_s"):
        limit_s = getattr(spec, name)
        if not 0.01 <= limit_s <= 3600:
            problems.append((name, f"{limit_s} must be from 0.01 to 3600 s"))
    if spec.capacity is not None and spec.capacity < spec.block_bytes:
        problems.append(
            ("capacity", f"{spec.capacity} B must hold at least one block of {spec.block_bytes} B")
        )
    if spec.listen != "unix":
        problems += [("listen", f"{spec.listen!r} {trouble}") for trouble in _check_tcp(spec)]
    elif not takes_any_length() and not fits(spec.endpoint("node", spec.nodes - 1)):
        problems.append(
            ("run_dir", f"{spec.run_dir} is too long for a Unix socket; choose a shorter path")
        )
    kinds = {"software": SoftwareProfile, "node_link": LinkProfile, "worker_link": LinkProfile}
    for name, kind in kinds.items():
        try:
            load_as(kind, getattr(spec, name))
        except (ProfileError, OSError) as error:
            problems.append((name, str(error)))
    try:
        spec.load_device()
    except (ProfileError, UserObjectError, ValueError, OSError) as error:
        problems.append(("device", str(error)))
    return problems + _check_memory(spec)


def _check_memory(spec: DeploymentSpec) -> list[tuple[str, str]]:
    """Return what is wrong with where the nodes' memory is to be."""
    problems = []
    devices = spec.nodes * spec.devices_per_node
    if spec.dax and len(spec.dax) != devices:
        problems.append(("dax", f"{len(spec.dax)} files for {devices} devices; name one for each"))
    if len(set(spec.dax)) < len(spec.dax):
        problems.append(("dax", "two devices cannot share a file"))
    problems += [("dax", f"{path} is not there") for path in spec.dax if not _is_there(path)]
    if spec.dax and spec.hugetlb:
        problems.append(("hugetlb", "memory on dax has pages of its own; leave one of both out"))
    if spec.dax and spec.numa_node is not None:
        problems.append(("numa_node", "a dax device lies where it lies; leave one of both out"))
    if spec.numa_node is not None:
        try:
            find_node(spec.numa_node)
        except HostLimitError as error:
            problems.append(("numa_node", str(error)))
    return problems


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no system has such a path
        return False


def _check_tcp(spec: DeploymentSpec) -> list[str]:
    host, _, port = spec.listen.removeprefix("tcp://").rpartition(":")
    if not spec.listen.startswith("tcp://") or not port.isdecimal() or not host:
        return ["must be unix or tcp://HOST:PORT"]
    if not 1 <= int(port) <= 65535 - spec.nodes:
        return [f"needs {spec.nodes + 1} ports from {port} on, and they end at 65535"]
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return ["must name the host by its IPv4 address, or as localhost"]
    if address.version != 4:
        return ["must name the host by its IPv4 address, or as localhost"]
    if not address.is_loopback and not spec.allow_remote:
        return [
            "is not loopback, and nothing here is encrypted or authenticated; "
            "allow_remote = true asks for it by name"
        ]
    return []


def _why_not_buildable(spec: DeploymentSpec) -> str | None:
    """Build one node of it in miniature, in virtual time: it says best what does not fit."""
    try:
        check_rig(spec.rig_spec())
        if ":" in spec.device:
            return None  # a device of the user's own is made where it runs, and nowhere else
        with VirtualClock() as clock:
            small = dataclasses.replace(spec.rig_spec(), nodes=1, devices_per_node=1)
            clock.run(Rig(clock, small, phantom=True).close())
    except (ValueError, DeviceError) as error:
        return str(error)
    return None


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError("must be a size such as 64 GiB")
    if isinstance(value, str) and not value.strip().isdecimal():
        try:
            number, unit = parse_quantity(value, Dimension.SIZE)
            value = to_base(number, unit, Dimension.SIZE)
        except UnitError as error:
            raise ValueError(str(error)) from None
    if int(value) < PAGE_BYTES:
        raise ValueError(f"must be at least {PAGE_BYTES} B")
    return int(value)


def _whole(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise TypeError("must be a whole number")
    try:
        return int(value)
    except (ValueError, TypeError):
        raise ValueError("must be a whole number") from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("must be a number")
    try:
        return float(value)
    except (ValueError, TypeError):
        raise ValueError("must be a number") from None


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        try:
            number, unit = parse_quantity(value, Dimension.TIME)
            return float(to_base(number, unit, Dimension.TIME))
        except UnitError:
            pass
    try:
        return _number(value)
    except ValueError:
        raise ValueError("must be a time, such as 10s or 500ms; a number is seconds") from None


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("must be a text")
    return value


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(value))


def _table(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("must be KEY=VALUE,KEY=VALUE")
        return {key.strip(): item.strip() for key, _, item in pairs}
    if not isinstance(value, Mapping):
        raise TypeError('must be a table of key = "value unit"')
    return {str(key): str(item) for key, item in value.items()}


def _paths(value: Any) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise TypeError("must be a list of paths")
    return tuple(_path(item) for item in value)


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None or value == "" else parse(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "run_dir": _path,
    "nodes": _whole,
    "devices_per_node": _whole,
    "device": _text,
    "device_set": _table,
    "capacity": _optional(_size),
    "block_bytes": _size,
    "scale": _number,
    "folder": _optional(_path),
    "prefetch": _flag,
    "window_bytes": _size,
    "deadline_s": _seconds,
    "call_timeout_s": _seconds,
    "listen": _text,
    "allow_remote": _flag,
    "node_link": _text,
    "worker_link": _text,
    "software": _text,
    "throttled": _flag,
    "numa_node": _optional(_whole),
    "hugetlb": _flag,
    "dax": _paths,
    "record": _flag,
}


def environment() -> dict[str, str]:
    """Return this process's environment."""
    return dict(os.environ)
