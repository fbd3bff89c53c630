"""A deployment of HyMCache as processes: what it consists of, and where its parts find each other.

One TOML file, overridden by ``CXLBENCH_*`` environment variables and then by flags, describes the
whole: Master, nodes with their devices, links and costs. It is validated as a whole, and all that
is wrong with it is said at once. Every process of the deployment reads the validated form from the
*run directory*, where the sockets, locks and logs are, too.

Sizes are at full size and ``scale`` divides them, as everywhere. Units: bytes, s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cxlbench.devices.profile import (
    CxlHmProfile,
    LinkProfile,
    ProfileError,
    SoftwareProfile,
    load_as,
    load_profile,
)
from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base
from cxlbench.emu.user_objects import UserObjectError
from cxlbench.harness.bench_datapath import free_software, unthrottled, unthrottled_link
from cxlbench.harness.rig import DeviceMaker, DeviceProfile
from cxlbench.harness.user_device import load_user_device

ENVIRONMENT_PREFIX = "CXLBENCH_"
SPEC_FILE = "deployment.json"
MAX_SOCKET_PATH = 100
"""Unix socket paths end at about 108 bytes; the socket's own name needs some of them."""


class DeploymentError(ValueError):
    """A deployment that cannot be: all problems, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(
            "; ".join(problems) if len(problems) == 1 else "\n  " + "\n  ".join(problems)
        )
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """What runs. Every field is a key of the configuration file."""

    run_dir: Path = Path("run/cxlbench")
    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cxl-hm-prototype"
    device_set: Mapping[str, str] = field(default_factory=dict)
    """Changes to the device's profile, ``key = "value unit"``."""
    capacity: int = 64 << 30
    """Of each device, bytes."""
    block_bytes: int = 16 << 20
    """The usual size of a block: segments are made of whole ones."""
    scale: float = 128
    folder: Path | None = None
    """Where the SSDs' files are; None: in memory, and lost with their process."""
    prefetch: bool = True
    window_bytes: int = 128 << 20
    deadline_s: float = 10.0
    call_timeout_s: float = 1.0
    listen: str = "unix"
    """``unix``: sockets in the run directory. ``tcp://HOST:PORT``: Master there, nodes after it."""
    allow_remote: bool = False
    """Whether ``listen`` may be anything but loopback."""
    node_link: str = "nic-200g"
    worker_link: str = "nic-100g"
    software: str = "software-default"
    throttled: bool = True
    """Whether hardware and software take their emulated time."""
    numa_node: int | None = None
    """Where the nodes' memory and threads are bound to, on hosts that have NUMA nodes."""
    hugetlb: bool = False
    dax: tuple[Path, ...] = ()
    """Device DAX files to put the nodes' memory on, one for each device of the deployment."""

    def endpoint(self, role: str, number: int = 0) -> str:
        """Return where Master (``role`` "master") or a node serves."""
        if self.listen == "unix":
            name = "master" if role == "master" else f"node{number}"
            return f"ipc://{self.run_dir.absolute()}/{name}.sock"
        host, _, port = self.listen.removeprefix("tcp://").rpartition(":")
        return f"tcp://{host}:{int(port) + (0 if role == 'master' else 1 + number)}"

    def load_device(self) -> DeviceProfile | DeviceMaker:
        """Return the device's profile, with changes and without throttles if so asked."""
        if ":" in self.device:
            return load_user_device(self.device)
        profile = load_profile(self.device, overrides=dict(self.device_set))
        if not isinstance(profile, DeviceProfile):
            raise ValueError(f"{self.device} is a {profile.kind}, and no device that keeps blocks")
        if self.throttled:
            return profile
        if not isinstance(profile, CxlHmProfile):
            raise ValueError(f"only a cxl-hm runs without throttles, {self.device} is none")
        return unthrottled(profile)

    def load_software(self) -> SoftwareProfile:
        """Return what software steps cost."""
        return load_as(SoftwareProfile, self.software) if self.throttled else free_software()

    def load_link(self, name: str) -> LinkProfile:
        """Return a link's profile."""
        return load_as(LinkProfile, name) if self.throttled else unthrottled_link()

    def save(self) -> None:
        """Write the spec into its run directory."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        values = dataclasses.asdict(self)
        text = json.dumps(values, default=str, indent=1)
        (self.run_dir / SPEC_FILE).write_text(text)


def load_spec(run_dir: Path) -> DeploymentSpec:
    """Return the spec of a deployment that was started in ``run_dir``."""
    path = run_dir / SPEC_FILE
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise DeploymentError(
            [f"no deployment was started in {run_dir}: run `cxlbench up --run-dir {run_dir}`"]
        ) from None
    values["run_dir"] = run_dir
    return make_spec(values, source=str(path))


def read_config(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> DeploymentSpec:
    """Return the deployment that file, environment and flags (not None) describe together."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    if path is not None:
        try:
            values |= tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DeploymentError([f"cannot read {path}: {error.strerror}"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DeploymentError([f"{path}: {error}"]) from None
    names = {f.name for f in dataclasses.fields(DeploymentSpec)}
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable.startswith(ENVIRONMENT_PREFIX) and name in names:
            values[name] = text
    values |= {name: value for name, value in flags.items() if value is not None}
    return make_spec(values, source=str(path) if path is not None else "flags", known=problems)


def make_spec(
    values: Mapping[str, Any], *, source: str, known: list[str] | None = None
) -> DeploymentSpec:
    """Make a spec of plain values; raises ``DeploymentError`` with all that is wrong."""
    problems = list(known or ())
    made: dict[str, Any] = {}
    for name, value in values.items():
        parse = _PARSERS.get(name)
        if parse is None:
            problems.append(f"{name}: no such key; known are {', '.join(sorted(_PARSERS))}")
            continue
        try:
            made[name] = parse(value)
        except (ValueError, TypeError) as error:
            problems.append(f"{name} = {value!r}: {error}")
    spec = DeploymentSpec(**made)
    problems += _check(spec)
    if problems:
        raise DeploymentError([f"{source}: {problem}" for problem in problems])
    return spec


def _check(spec: DeploymentSpec) -> list[str]:
    problems = []
    problems += [
        f"{name} = {getattr(spec, name)}: must be from 1 to 64"
        for name in ("nodes", "devices_per_node")
        if not 1 <= getattr(spec, name) <= 64
    ]
    if not spec.scale >= 1:
        problems.append(f"scale = {spec.scale}: must be at least 1")
    problems += [
        f"{name} = {getattr(spec, name)}: must be from 0.01 to 3600 s"
        for name in ("deadline_s", "call_timeout_s")
        if not 0.01 <= getattr(spec, name) <= 3600
    ]
    if spec.block_bytes < 8 or spec.capacity < spec.block_bytes:
        problems.append(
            f"capacity = {spec.capacity}: must hold at least one block of {spec.block_bytes} B"
        )
    if spec.listen == "unix":
        if len(str(spec.run_dir.absolute())) > MAX_SOCKET_PATH - len("/node63.sock"):
            problems.append(
                f"run_dir = {spec.run_dir}: too long for a Unix socket; choose a shorter path"
            )
    else:
        problems += _check_tcp(spec)
    try:
        spec.load_device()
    except (ProfileError, UserObjectError, ValueError, OSError) as error:
        problems.append(f"device: {error}")
    kinds = {"software": SoftwareProfile, "node_link": LinkProfile, "worker_link": LinkProfile}
    for name, kind in kinds.items():
        try:
            load_as(kind, getattr(spec, name))
        except (ProfileError, OSError) as error:
            problems.append(f"{name}: {error}")
    if spec.dax and len(spec.dax) != spec.nodes * spec.devices_per_node:
        problems.append(
            f"dax: {len(spec.dax)} files for {spec.nodes * spec.devices_per_node} devices"
        )
    return problems


def _check_tcp(spec: DeploymentSpec) -> list[str]:
    host, _, port = spec.listen.removeprefix("tcp://").rpartition(":")
    if not spec.listen.startswith("tcp://") or not port.isdigit() or not host:
        return [f"listen = {spec.listen!r}: must be unix or tcp://HOST:PORT"]
    if not 1 <= int(port) <= 65535 - spec.nodes:
        return [f"listen = {spec.listen!r}: needs {spec.nodes + 1} ports from {port} on"]
    if host not in ("127.0.0.1", "localhost", "[::1]") and not spec.allow_remote:
        return [
            f"listen = {spec.listen!r}: is not loopback, and nothing here is encrypted or "
            "authenticated; allow_remote = true asks for it by name"
        ]
    return []


def _size(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("must be a size such as 64 GiB")
    if isinstance(value, int):
        return value
    try:
        number, unit = parse_quantity(str(value), Dimension.SIZE)
        return int(to_base(number, unit, Dimension.SIZE))
    except UnitError as error:
        raise ValueError(str(error)) from None


def _whole(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise TypeError("must be a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("must be a number")
    return float(value)


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
    if not isinstance(value, Mapping):
        raise TypeError('must be a table of key = "value unit"')
    return {str(key): str(item) for key, item in value.items()}


_PARSERS = {
    "run_dir": _path,
    "nodes": _whole,
    "devices_per_node": _whole,
    "device": _text,
    "device_set": _table,
    "capacity": _size,
    "block_bytes": _size,
    "scale": _number,
    "folder": lambda value: None if value is None else _path(value),
    "prefetch": _flag,
    "window_bytes": _size,
    "deadline_s": _number,
    "call_timeout_s": _number,
    "listen": _text,
    "allow_remote": _flag,
    "node_link": _text,
    "worker_link": _text,
    "software": _text,
    "throttled": _flag,
    "numa_node": lambda value: None if value is None else _whole(value),
    "hugetlb": _flag,
    "dax": lambda value: tuple(_path(item) for item in value),
}


def environment() -> dict[str, str]:
    """Return this process's environment."""
    return dict(os.environ)
