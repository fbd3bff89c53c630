"""The main programs of a deployment's processes: Master, and one node with its devices.

``python -m cxlbench.harness.service_main master|node RUN_DIR [NUMBER [PARENT]]``, started by
``cxlbench up`` (whose process id is PARENT). Each holds a lock in the run directory, so that a
second one of its kind says so and ends, and a socket file that a dead one left is no obstacle. Each
ends on SIGTERM or Ctrl-C, closes what it opened, and (on Linux) ends with PARENT.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cxlbench.devices.link import Link
from cxlbench.devices.profile import ProfileError, ScaleError, scale_profile, scaled_bytes
from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Fabric
from cxlbench.emu.fabric_shared_owner import GRANTS, SharedCarrier
from cxlbench.emu.faults import FaultPlan
from cxlbench.emu.memory import Arena, page_ceil
from cxlbench.emu.numa import bind_memory, bind_threads
from cxlbench.emu.shared_memory import SharedSegment
from cxlbench.emu.status import DeviceError, HostLimitError
from cxlbench.emu.user_objects import UserObjectError
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec, load_spec
from cxlbench.harness.fidelity import pacing, save_pacing
from cxlbench.harness.io_jobs import counters_of
from cxlbench.harness.rig import BlockTooLargeError, DeviceSite, make_device, segment_bytes
from cxlbench.hymcache.kv_manager import KvManager
from cxlbench.hymcache.master import Master
from cxlbench.hymcache.master_server import MasterServer
from cxlbench.hymcache.node_server import NodeServer, RefusedByMasterError
from cxlbench.hymcache.recovery import FoundObject, find_objects
from cxlbench.hymcache.slot_table import compile_kernels
from cxlbench.kv.device import MemoryDevice
from cxlbench.kv.footer import object_extent_bytes

EXIT_TROUBLE = 2
TROUBLE = (
    BlockTooLargeError,
    DeploymentError,
    DeviceError,
    HostLimitError,
    OSError,
    ProfileError,
    RefusedByMasterError,
    ScaleError,
    UserObjectError,
)
"""What ends a process with a line that says what to do; anything else is a bug."""


@contextmanager
def only_one(run_dir: Path, role: str) -> Iterator[None]:
    """Hold the lock of a role; raises ``DeploymentError`` if another process has it."""
    path = run_dir / f"{role}.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise DeploymentError(
                [f"{role} is running in {run_dir} already, as process {lock.read().strip()}"]
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it ends (Linux).

    Also if it is stopped then, and could not hear anything else for ever.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    with_errno = ctypes.CDLL(None, use_errno=True)
    with_errno.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever started this process has ended meanwhile")


async def _until_told(clock: WallClock) -> None:
    """Wait for SIGTERM or Ctrl-C."""
    told = clock.future()

    def tell() -> None:
        if not told.done():
            told.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        clock.loop.add_signal_handler(number, tell)
    print("ready", flush=True)
    await told


def lease_s(spec: DeploymentSpec) -> float:
    """Return how long a lease lasts, and so whatever is held for a reader: a read and some."""
    return spec.deadline_s + 1


def run_master(spec: DeploymentSpec) -> None:
    """Serve Master until told to end."""
    compile_kernels()
    clock = WallClock(shared=True, record=spec.record)

    def make_master(objects_per_node: int) -> Master:
        return Master(
            clock,
            {},
            max_objects=objects_per_node * spec.nodes + 1024,
            lease_s=lease_s(spec),
            write_deadline_s=lease_s(spec),
        )

    async def serve() -> None:
        server = MasterServer(
            clock,
            spec.endpoint("master"),
            epoch=secrets.randbits(62),
            make_master=make_master,
            node_timeout_s=min(0.3, spec.call_timeout_s),
        )
        try:
            await _until_told(clock)
        finally:
            await server.close()

    with clock:
        clock.run(serve())


def run_node(spec: DeploymentSpec, number: int) -> None:
    """Serve one node until told to end; what an earlier one left in its files is found first."""
    if spec.numa_node is not None:
        bind_threads(spec.numa_node)
    clock = WallClock(shared=True, record=spec.record)
    with clock, ExitStack() as stack:
        clock.run(_Node(clock, spec, number, stack).serve())
    if spec.record:
        save_pacing(spec.run_dir, f"node{number}", pacing(clock, ()))


class _Node:
    def __init__(
        self, clock: WallClock, spec: DeploymentSpec, number: int, stack: ExitStack
    ) -> None:
        self.clock = clock
        self.spec = spec
        self.number = number
        self.stack = stack
        self.segments: list[SharedSegment] = []

    def share(self, nbytes: int) -> Arena:
        """Make the memory of a device where clients can map it."""
        spec, index = self.spec, len(self.segments)
        dax = spec.dax[self.number * spec.devices_per_node + index] if spec.dax else None
        segment = SharedSegment(
            page_ceil(nbytes),
            name=f"cxlbench-node{self.number}-dev{index}",
            folder=spec.run_dir,
            hugetlb=spec.hugetlb,
            device=dax,
        )
        self.segments.append(segment)
        self.stack.callback(segment.close)
        try:
            arena = segment.arena()
        except HostLimitError as error:
            if not spec.hugetlb:
                raise
            raise HostLimitError(
                f"{error}: has this host so many free huge pages (vm.nr_hugepages)?"
            ) from error
        if spec.numa_node is not None:
            bind_memory(arena.array, spec.numa_node)
        return arena

    async def serve(self) -> None:
        spec, clock, number = self.spec, self.clock, self.number
        profile = spec.load_device()
        devices: list[MemoryDevice] = []
        for index in range(spec.devices_per_node):
            site = DeviceSite(
                f"node{number}.dev{index}",
                False,
                spec.scale,
                None
                if spec.capacity is None
                else scaled_bytes(spec.capacity, spec.scale, what="the device"),
                spec.folder,
                FaultPlan.none(),
                make_arena=self.share,
                keep=True,
            )
            devices.append(make_device(clock, profile, site))
        block = scaled_bytes(spec.block_bytes, spec.scale, what="a KV block") // 8 * 8
        fabric = Fabric(clock, seed=random.SystemRandom())
        manager = KvManager(
            clock,
            fabric,
            devices,
            node=number,
            window_bytes=scaled_bytes(spec.window_bytes, spec.scale, what="the prefetch window"),
            prefetch=spec.prefetch,
            reserve_deadline_s=spec.deadline_s,
            segment_bytes=segment_bytes(devices[0].capacity_bytes, block),
            first_token=secrets.randbits(48),
        )
        if spec.folder is not None:
            manager.restore(await self._found(devices))
        nic = Link(
            clock,
            scale_profile(spec.load_link(spec.node_link), spec.scale),
            name=f"node{number}.nic",
        )
        grants = SharedSegment(
            GRANTS * 8, name=f"cxlbench-node{number}-grants", folder=spec.run_dir
        )
        self.stack.callback(grants.close)
        carrier = SharedCarrier(
            clock,
            fabric,
            arenas=self.segments,
            grants=grants,
            arena_of=lambda region: devices.index(region.target),  # type: ignore[arg-type]
            read_path=[nic.tx],
            write_path=[nic.rx],
            latency_s=nic.latency_s,
            first_serial=secrets.randbits(48) + 1,
            hold_s=lease_s(spec),
        )
        server = NodeServer(
            clock,
            manager,
            carrier,
            endpoint=spec.endpoint("node", number),
            master_endpoint=spec.endpoint("master"),
            epoch=secrets.randbits(62),
            max_objects=sum(d.capacity_bytes // object_extent_bytes(block) for d in devices),
            hold_s=lease_s(spec),
            device_figures=lambda: _figures(devices),
        )
        try:
            await _until_told(clock)
        finally:
            await server.close()

    async def _found(self, devices: list[MemoryDevice]) -> dict[int, list[FoundObject]]:
        """Scan what the devices' files hold."""
        found = {}
        for index, device in enumerate(devices):
            ssds = getattr(device, "ssds", None)
            if ssds is not None:
                found[index] = await find_objects(ssds.backing, device.capacity_bytes)
        return found


def _figures(devices: list[MemoryDevice]) -> dict[str, int]:
    """Return what ``status`` shows of the devices: what they could not keep."""
    counts = [counters_of(device) for device in devices]
    failed = ("flush_failed", "write_back_failed")
    return {
        "blocks lost": sum(count.get("lost", 0) for count in counts),
        "failed writes": sum(count.get(name, 0) for count in counts for name in failed),
    }


def main(arguments: list[str]) -> int:
    """Run the process that the arguments name; return its exit code."""
    role, run_dir = arguments[0], Path(arguments[1])
    number = int(arguments[2]) if len(arguments) > 2 else 0
    die_with_parent(int(arguments[3]) if len(arguments) > 3 else os.getppid())
    try:
        spec = load_spec(run_dir)
        with only_one(run_dir, role if role == "master" else f"node{number}"):
            if role == "master":
                run_master(spec)
            else:
                run_node(spec, number)
    except TROUBLE as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_TROUBLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
