"""A worker process that does one thing to a deployment and kills itself in the middle of it.

``python -m tests.hymcache.process_victim RUN_DIR STAGE NUMBER``. Stages: ``store`` (to the end),
``allocated``, ``reserved``, ``granted``, ``landed``, ``committed`` (the put, so far), ``found`` (a
get, with its prefetches issued), ``reading`` (with a grant to copy).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from cxlbench.emu.clock import WallClock
from cxlbench.harness.content import BlockContent
from cxlbench.harness.deployment import load_spec
from cxlbench.harness.remote_tier import RemoteTier
from tests.hymcache.rig import chain

BLOCK = 128 << 10
BLOCKS = 6
HOOKS = {
    "allocated": ("master", "allocate"),
    "reserved": ("node", "reserve"),
    "granted": ("node", "post_write"),
    "landed": ("node", "landed"),
    "committed": ("node", "commit"),
    "reading": ("node", "post_read"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(owner: Any, method: str) -> None:
    """Let a call of ``owner`` be made and answered, and end there."""
    call = getattr(owner, method)

    async def last(*args: Any, **options: Any) -> Any:
        await call(*args, **options)
        die()

    setattr(owner, method, last)


async def act(clock: WallClock, run_dir: Path, stage: str, number: int) -> None:
    tier = RemoteTier(clock, load_spec(run_dir), worker=number, copies=False)
    await tier.join(patience_s=20)
    content = BlockContent(BLOCK, phantom=False, seed=0)
    print("ready", flush=True)
    keys = chain(BLOCKS, int(sys.stdin.readline()))
    clock.advance(clock.real())
    if stage in HOOKS:
        side, method = HOOKS[stage]
        for owner in [tier.master] if side == "master" else list(tier.nodes.values()):
            die_after(owner, method)
    connector = tier.connector
    if stage in ("found", "reading"):
        found = await connector.submit_lookup(1, keys, BLOCK).done.wait()
        assert found.leading_hits == BLOCKS
        if stage == "found":
            die()
        buffers = [content.empty() for _ in keys]
        await connector.submit_load(1, keys, buffers).done.wait()
        raise AssertionError("it should be dead")
    done = await connector.submit_store(1, keys, [content.make(key) for key in keys]).done.wait()
    assert stage == "store", "it should be dead"
    print(*[result.name for result in done.results], flush=True)
    await tier.close()


def main() -> None:
    run_dir, stage, number = sys.argv[1:]
    with WallClock(shared=True) as clock:
        clock.run(act(clock, Path(run_dir), stage, int(number)))


if __name__ == "__main__":
    main()
