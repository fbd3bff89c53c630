"""One worker's share of a replay on a deployment, in a process of its own.

``serve_share`` is what a worker does: join the tier, serve the requests that are its own, check
every byte, and return what came of it, with times counted from the run's start. The main program
(``python -m cxlbench.harness.replay_share RUN_DIR NUMBER PARENT``) reads its task from the run
directory, says ``ready``, begins at the time that it is given on standard input, says how far it
is, and leaves its result in the run directory. Units: s, blocks.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cxlbench.emu.clock import WallClock
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.content import BlockContent
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec, load_spec
from cxlbench.harness.fidelity import Pacing, pacing
from cxlbench.harness.metrics import BlockLog
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.replay import MESSAGES_S, ReplaySpec
from cxlbench.harness.requests import Workload
from cxlbench.harness.rig import scaled_block_bytes
from cxlbench.harness.service_main import EXIT_TROUBLE, die_with_parent
from cxlbench.harness.serving import Outcome, Progress, Serving

TASK_FILE = "replay.task"
JOIN_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Task:
    """What all workers of a replay are told; each knows its own number beside it."""

    workload: Workload
    spec: ReplaySpec
    salt: str = ""
    """Workloads of different salts share no blocks."""
    alone: bool = False
    """Whether this worker serves all requests, whatever its number."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker came to. Times are s from the run's start."""

    outcome: Outcome
    pacing: Pacing
    held: dict[str, int]
    end_s: float
    """When its last request had been served."""


async def serve_share(
    clock: WallClock,
    deployment: DeploymentSpec,
    task: Task,
    number: int,
    *,
    begin: Callable[[], Awaitable[float]],
    progress: Progress | None = None,
) -> Share:
    """Serve the requests of worker ``number``; ``begin`` returns when the run starts.

    Raises ``HostLimitError`` if the deployment cannot be reached.
    """
    spec = task.spec
    content = BlockContent(scaled_block_bytes(spec.rig), phantom=False, seed=spec.rig.seed)
    serving = Serving(
        clock,
        task.workload,
        engine=spec.workers_engine,
        pace=spec.pace,
        content=content,
        workers=spec.rig.workers,
        salt=task.salt,
        progress=progress,
    )
    tier = RemoteTier(
        clock, deployment, worker=number, verify=spec.rig.verify, on_block=serving.note_block
    )
    try:
        await tier.join(patience_s=JOIN_WITHIN_S)
        serving.add_worker(0 if task.alone else number, tier.connector)
        start_s = await begin()
        begun = len(clock.late_s)
        serving.start(start_s)
        await serving.join()
        end_s = clock.now()
        await serving.settle()
        await clock.sleep(MESSAGES_S)
        held = {name: count for name, count in tier.connector.at_rest().items() if count}
    except BaseException:
        await serving.cancel()
        raise
    finally:
        await tier.close()
    del clock.late_s[:begun]
    outcome = _since(serving.collect([tier.connector.counters]), start_s)
    return Share(outcome, pacing(clock, tier.pipes, origin_s=start_s), held, end_s - start_s)


def _since(outcome: Outcome, start_s: float) -> Outcome:
    """Count the times of an outcome from the run's start."""
    records = [
        replace(
            record,
            arrival_s=record.arrival_s - start_s,
            lookup_s=record.lookup_s - start_s,
            load_s=record.load_s - start_s,
            first_token_s=record.first_token_s - start_s,
            end_s=record.end_s - start_s,
        )
        for record in outcome.records
    ]
    log = outcome.blocks
    blocks = BlockLog(turn=log.turn, nbytes=log.nbytes)
    blocks.asked_s.extend(time_s - start_s for time_s in log.asked_s)
    blocks.due_s.extend(time_s - start_s for time_s in log.due_s)
    blocks.done_s.extend(time_s - start_s for time_s in log.done_s)
    return replace(outcome, records=records, blocks=blocks)


def share_file(run_dir: Path, number: int) -> Path:
    """Return where a worker leaves its share."""
    return run_dir / f"worker{number}.share"


def main(arguments: list[str]) -> int:
    """Run one worker; return its exit code."""
    run_dir, number = Path(arguments[0]), int(arguments[1])
    die_with_parent(int(arguments[2]))
    try:
        deployment = load_spec(run_dir)
        task: Task = pickle.loads((run_dir / TASK_FILE).read_bytes())  # noqa: S301 - our parent's
        with WallClock(shared=True) as clock:

            async def begin() -> float:
                print("ready", flush=True)
                line = clock.future()
                clock.loop.add_reader(sys.stdin.fileno(), line.set_result, None)
                await line
                clock.loop.remove_reader(sys.stdin.fileno())
                start_s = float(sys.stdin.readline())
                gc.collect()
                gc.disable()  # a collection in mid-run would be lateness
                return start_s

            share = clock.run(
                serve_share(
                    clock,
                    deployment,
                    task,
                    number,
                    begin=begin,
                    progress=lambda done, total: print(done, total, flush=True),
                )
            )
    except (DeploymentError, HostLimitError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_TROUBLE
    share_file(run_dir, number).write_bytes(pickle.dumps(share))
    return 0


if __name__ == "__main__":
    # By its name: what is pickled here must be found by the parent.
    from cxlbench.harness import replay_share

    sys.exit(replay_share.main(sys.argv[1:]))
