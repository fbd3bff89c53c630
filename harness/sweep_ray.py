"""Points of a sweep on a Ray cluster: the optional extra ``ray``.

Every node needs the same cxlbench, and the same experiment, installed: each point first compares
the set-up's hash with the sweep's, and a difference ends the sweep with what to do. A user's
module that lies beside the command is found on nodes that share the file system. One point takes
one CPU; a point whose node is lost is tried again by Ray, twice, and then is a row that says so.

Units: none.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from cxlbench.harness.experiment import ExperimentError
from cxlbench.harness.sweep import OtherSetupError, PointTask, lost_row, run_point
from cxlbench.harness.sweep_axes import SweepError
from cxlbench.harness.sweep_rows import PointRow

LOCAL = "local"
"""The address that starts a Ray of one's own on this machine."""
RETRIES = 2
CONNECT_WITHIN_S = 10.0
AHEAD = 2
"""Points that are handed out ahead, for each CPU of the cluster."""


def on_ray(
    tasks: Sequence[PointTask], *, address: str, jobs: int | None = None
) -> Generator[PointRow, None, None]:
    """Run points on the cluster at ``address``; ``local`` starts one with ``jobs`` CPUs.

    Raises:
        SweepError: Ray is not installed, or there is no cluster.
        OtherSetupError: a node has another version of the experiment.
    """
    if not tasks:
        return
    ray = _ray()
    _connect(ray, address, jobs)
    try:
        run = ray.remote(num_cpus=1, max_retries=RETRIES)(_remote_point)
        path = list(sys.path)
        most = max(1, int(ray.cluster_resources().get("CPU", 1))) * AHEAD
        waiting = deque(tasks)
        pending: dict[Any, PointTask] = {}
        while waiting or pending:
            while waiting and len(pending) < most:
                task = waiting.popleft()
                pending[run.remote(task, path)] = task
            (done, *_), _rest = ray.wait(list(pending), num_returns=1)
            task = pending.pop(done)
            try:
                answer = ray.get(done)
            except ray.exceptions.RayError as error:
                said = (str(error).strip().splitlines() or ["?"])[-1]
                answer = lost_row(task, f"Ray lost it, {type(error).__name__}: {said}")
            if isinstance(answer, str):
                raise OtherSetupError(answer)
            yield answer
    finally:
        ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        import ray
    except ImportError as error:
        raise SweepError(
            "--ray needs Ray, which is not installed: pip install 'cxlbench[ray]'; or leave --ray "
            "out to use the cores of this machine"
        ) from error
    return ray


def _connect(ray: Any, address: str, jobs: int | None) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), CONNECT_WITHIN_S).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error
    own = {"num_cpus": jobs, "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> SweepError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SweepError(
        f"there is no Ray cluster at {address!r} ({said}); --ray local starts one here"
    )


def _remote_point(task: PointTask, path: Sequence[str]) -> PointRow | str:
    """Run a point on a node; a set-up that differs comes back as text."""
    sys.path.extend(place for place in path if place not in sys.path)
    try:
        return run_point(task)
    except ExperimentError as error:
        return str(error)
