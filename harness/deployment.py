"""A deployment of HyMCache as processes: what it consists of, and where its parts find each other.

The spec describes the whole: Master, nodes with their devices, links and costs. A user's
configuration becomes one in ``deployment_config.py``. Every process of the deployment reads it from
the *run directory*, where the sockets, locks and logs are, too.

Sizes are at full size and ``scale`` divides them, as everywhere. Units: bytes, s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cxlbench.devices.profile import (
    CxlHmProfile,
    LinkProfile,
    SoftwareProfile,
    load_as,
    load_profile,
)
from cxlbench.harness.bench_datapath import free_software, unthrottled, unthrottled_link
from cxlbench.harness.rig import DeviceMaker, DeviceProfile, RigSpec
from cxlbench.harness.user_device import load_user_device

SPEC_FILE = "deployment.json"


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
    capacity: int | None = 64 << 30
    """Of each device, bytes; None: what its profile says."""
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
    record: bool = False
    """Whether nodes log how late they are, for the fidelity line of a replay; takes memory."""

    def endpoint(self, role: str, number: int = 0) -> str:
        """Return where Master (``role`` "master") or a node serves."""
        if self.listen == "unix":
            name = "master" if role == "master" else f"node{number}"
            return f"ipc://{self.run_dir.absolute()}/{name}.sock"
        host, _, port = self.listen.removeprefix("tcp://").rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host
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

    def rig_spec(self, *, workers: int = 1, block_bytes: int | None = None) -> RigSpec:
        """Return the same system as one that is built in one process."""
        return RigSpec(
            device=self.load_device(),
            block_bytes=self.block_bytes if block_bytes is None else block_bytes,
            nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            device_capacity_bytes=self.capacity,
            workers=workers,
            prefetch=self.prefetch,
            window_bytes=self.window_bytes,
            node_link=self.load_link(self.node_link),
            worker_link=self.load_link(self.worker_link),
            software=self.load_software(),
            deadline_s=self.deadline_s,
            scale=self.scale,
        )

    def save(self) -> None:
        """Write the spec into its run directory, whole or not at all."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), default=str, indent=1)
        new = self.run_dir / f"{SPEC_FILE}.new"
        new.write_text(text)
        new.replace(self.run_dir / SPEC_FILE)


def load_spec(run_dir: Path) -> DeploymentSpec:
    """Return the spec of the deployment that was started in ``run_dir``.

    Raises ``DeploymentError`` if there is none.
    """
    path = run_dir / SPEC_FILE
    try:
        values = msgspec.json.decode(path.read_bytes())
        spec = msgspec.convert(values, DeploymentSpec, dec_hook=lambda kind, value: kind(value))
    except FileNotFoundError:
        raise DeploymentError(
            [f"no deployment runs in {run_dir}: run `cxlbench up --run-dir {run_dir}`"]
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise DeploymentError([f"{path} is no deployment of this version: {error}"]) from None
    return dataclasses.replace(spec, run_dir=run_dir)
