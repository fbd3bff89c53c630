"""A replay with Master, nodes and workers as processes of their own, in real time.

Starts a deployment and the workers, lets all of them begin at one time, waits, and puts together
what they measured: the figures and the fidelity line are those of ``replay.py``. The deployment is
gone afterwards, whatever happened. Units: s, blocks; sizes at full scale in the specs.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

from cxlbench.devices.profile import Profile
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec
from cxlbench.harness.deployment_config import make_spec
from cxlbench.harness.deployment_status import DeploymentStatus, read_status
from cxlbench.harness.fidelity import Pacing, judge, load_pacing
from cxlbench.harness.replay import ReplayResult, ReplaySpec
from cxlbench.harness.replay_share import TASK_FILE, Share, Task, share_file
from cxlbench.harness.requests import Workload
from cxlbench.harness.rig import DeviceProfile, RigSpec
from cxlbench.harness.rig_checks import check_rig
from cxlbench.harness.run_folders import run_folder
from cxlbench.harness.serving import Outcome, Progress, TierCounts, summarize
from cxlbench.harness.supervisor import Deployment, PartFailedError
from cxlbench.harness.worker import RequestRecord

READY_WITHIN_S = 60.0
BEGIN_IN_S = 0.1
"""How long before the run's start the workers are told of it."""
REST_WITHIN_S = 10.0
"""How long the tier has to give back what it holds: buffers are flushed first."""
LOOK_EVERY_S = 0.2


def replay_on_processes(
    workload: Workload,
    spec: ReplaySpec,
    deployment: DeploymentSpec,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Run ``workload`` on a deployment of its own; backing files in ``folder``, else in memory.

    Of ``deployment`` the devices and links count; where it runs is chosen here.

    Raises:
        PartFailedError: a process ended early; the text has its last words.
        HostLimitError: this host has no such folder or memory.
    """
    check_rig(spec.rig)
    with ExitStack() as stack:
        files = None if folder is None else stack.enter_context(run_folder(folder)).absolute()
        run_dir = stack.enter_context(run_folder())
        deployment = replace(deployment, run_dir=run_dir, folder=files, record=True)
        running = stack.enter_context(Deployment(deployment))
        (run_dir / TASK_FILE).write_bytes(pickle.dumps(Task(workload, spec)))
        workers = stack.enter_context(_Workers(running, spec.rig.workers))
        shares = workers.serve(len(workload.requests), progress)
        status = _at_rest(deployment)
        running.stop(keep_run_dir=True)
        paces = [load_pacing(run_dir, f"node{number}") for number in range(deployment.nodes)]
    return merge(workload, spec, shares, status, [found for found in paces if found is not None])


class _Workers:
    """The worker processes; leaving the context ends those that are left."""

    def __init__(self, deployment: Deployment, count: int) -> None:
        self._deployment = deployment
        self._run_dir = deployment.spec.run_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._rest = [""] * count
        """What each has said of a line that is not whole yet."""
        for number in range(count):
            with self._log(number).open("wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "cxlbench.harness.replay_share",
                        str(self._run_dir),
                        str(number),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)
            self._selector.register(_stdout(process), selectors.EVENT_READ, number)

    def _log(self, number: int) -> Path:
        return self._run_dir / f"worker{number}.log"

    def serve(self, requests: int, progress: Progress | None) -> list[Share]:
        """Let all begin at one time, and return their shares when all are done."""
        ready: set[int] = set()
        end_s = time.monotonic() + READY_WITHIN_S
        while len(ready) < len(self._processes):
            if time.monotonic() > end_s:
                raise PartFailedError(f"a worker is not ready after {READY_WITHIN_S:.0f} s")
            ready.update(number for number, line in self._lines() if line == "ready")
        start_s = time.monotonic() + BEGIN_IN_S
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{start_s!r}\n".encode())
            process.stdin.close()
        done = dict.fromkeys(range(len(self._processes)), 0)
        while any(process.poll() is None for process in self._processes):
            for number, line in self._lines():
                done[number] = int(line.split()[0])
            if progress is not None:
                progress(sum(done.values()), requests)
        self._check()
        return [
            pickle.loads(share_file(self._run_dir, number).read_bytes())  # noqa: S301 - our child's
            for number in range(len(self._processes))
        ]

    def _lines(self) -> list[tuple[int, str]]:
        """Return what the workers said meanwhile; raise if a process has failed."""
        found = []
        for key, _ in self._selector.select(LOOK_EVERY_S):
            text = os.read(key.fd, 1 << 16)
            if not text:
                self._selector.unregister(key.fileobj)
            *lines, self._rest[key.data] = (self._rest[key.data] + text.decode()).split("\n")
            found += [(key.data, line) for line in lines]
        self._check()
        if not self._selector.get_map():
            for process in self._processes:
                process.wait()
        return found

    def _check(self) -> None:
        for ended in self._deployment.ended():
            raise PartFailedError(ended.line())
        for number, process in enumerate(self._processes):
            if process.poll():
                said = self._log(number).read_text(errors="replace").strip()
                raise PartFailedError(
                    f"worker {number} ended (exit code {process.returncode}): {said[-2000:]}"
                )

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _at_rest(deployment: DeploymentSpec) -> DeploymentStatus:
    """Return the deployment's status when nothing is held, or after it had its time."""
    end_s = time.monotonic() + REST_WITHIN_S
    while True:
        status = read_status(deployment)
        if (not status.held and status.complete) or time.monotonic() > end_s:
            return status
        time.sleep(LOOK_EVERY_S)


def merge(
    workload: Workload,
    spec: ReplaySpec,
    shares: Sequence[Share],
    status: DeploymentStatus,
    paces: Sequence[Pacing],
) -> ReplayResult:
    """Put the workers' shares together: one result, as if they had been in one process."""
    outcome = Outcome()
    held = dict(status.held)
    held |= {f"{part.name} {part.trouble}": 1 for part in status.parts if part.trouble}
    for share in shares:
        mine = share.outcome
        outcome.records += mine.records
        for column in ("turn", "asked_s", "due_s", "done_s", "nbytes"):
            getattr(outcome.blocks, column).extend(getattr(mine.blocks, column))
        outcome.counters += mine.counters
        outcome.stores += mine.stores
        outcome.wrong_blocks += mine.wrong_blocks
        outcome.timers += mine.timers
        outcome.callbacks += mine.callbacks
        for name, count in share.held.items():
            held[name] = held.get(name, 0) + count
    outcome.records = with_seen(workload, outcome.records)
    tier = TierCounts(
        evicted=status.total("evicted"),
        lost=status.total("blocks lost"),
        failed_writes=status.total("failed writes"),
        held=held,
    )
    paces = [*(share.pacing for share in shares), *paces]
    return _result(outcome, tier, spec, max(share.end_s for share in shares), paces)


def result_of(share: Share, spec: ReplaySpec) -> ReplayResult:
    """Return what one worker measured by itself, on a tier that others use, too.

    A block that was found had been computed by somebody: it counts as seen.
    """
    outcome = share.outcome
    outcome.records = [
        replace(record, seen=max(record.seen, record.matched + record.found))
        for record in outcome.records
    ]
    return _result(outcome, TierCounts(held=share.held), spec, share.end_s, [share.pacing])


def _result(
    outcome: Outcome,
    tier: TierCounts,
    spec: ReplaySpec,
    duration_s: float,
    paces: Sequence[Pacing],
) -> ReplayResult:
    figures = summarize(
        outcome,
        tier,
        duration_s=duration_s,
        scale=spec.rig.scale,
        max_turns=spec.max_turns,
    )
    return ReplayResult(figures, tuple(outcome.records), judge(paces), outcome.blocks)


def deployment_of(
    rig: RigSpec, *, device: str | None = None, device_set: Mapping[str, str] | None = None
) -> DeploymentSpec:
    """Return a rig as a deployment; the device by name, else that of its profile and its changes.

    Raises ``DeploymentError`` if it cannot be one.
    """
    if device is None:
        if not isinstance(rig.device, DeviceProfile):
            raise DeploymentError(["a device of one's own is named as module:object"])
        device, device_set = rig.device.name, dict(_changes(rig.device))
    made = {
        "nodes": rig.nodes,
        "devices_per_node": rig.devices_per_node,
        "device": device,
        "device_set": device_set or {},
        "capacity": rig.device_capacity_bytes,
        "block_bytes": rig.block_bytes,
        "scale": rig.scale,
        "prefetch": rig.prefetch,
        "window_bytes": rig.window_bytes,
        "deadline_s": rig.deadline_s,
    }
    return make_spec(made)


def _changes(profile: Profile, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield what was changed in a profile, as it is written."""
    for key, quantity in profile.provenance.items():
        if quantity.statistic == "override":
            unit = "" if quantity.unit in ("count", "ratio", "flag") else f" {quantity.unit}"
            yield prefix + key, f"{quantity.value}{unit}"
    for field in dataclasses.fields(profile):
        part = getattr(profile, field.name)
        if isinstance(part, Profile):
            yield from _changes(part, f"{prefix}{field.name}.")


def with_seen(workload: Workload, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Count for each request the leading blocks that *any* worker had computed by its lookup."""
    computed: set[int] = set()
    seen: dict[int, int] = {}
    moments = [(record.first_token_s, 0, record) for record in records]
    moments += [(record.lookup_s, 1, record) for record in records]
    for _, looks, record in sorted(moments, key=lambda moment: moment[:2]):
        blocks = workload.requests[record.request_id].block_ids
        if not looks:
            computed.update(blocks)
            continue
        leading = blocks[: record.reusable]
        seen[record.request_id] = next(
            (place for place, block in enumerate(leading) if block not in computed), len(leading)
        )
    return sorted(
        (replace(record, seen=seen[record.request_id]) for record in records),
        key=lambda record: record.request_id,
    )
