"""What is given back twice, or was never held, is nobody's loss; readers that wait for a node."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.memory import Bytes
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.harness.deployment_status import read_status
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.supervisor import Deployment
from cxlbench.kv.results import KeyResult
from tests.hymcache.process_victim import BLOCK
from tests.hymcache.rig import chain

BLOCKS = 6
DEADLINE_S = 3.0


def content(key: bytes) -> Bytes:
    return np.frombuffer(key * (BLOCK // len(key)), dtype=np.uint8).copy()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    (tmp_path / "ssd").mkdir()
    spec = DeploymentSpec(
        run_dir=tmp_path / "r",
        scale=128,
        capacity=4 << 30,
        folder=tmp_path / "ssd",
        deadline_s=DEADLINE_S,
    )
    with Deployment(spec) as running:
        yield running


Work = Callable[[WallClock, RemoteTier], Coroutine[Any, Any, None]]


def run(deployment: Deployment, work: Work) -> None:
    """Run ``work`` with a worker; at the end nothing is held and nothing has failed."""

    async def inside() -> None:
        tier = RemoteTier(clock, deployment.spec, copies=False)
        await tier.join()
        await work(clock, tier)
        await until_at_rest(clock, deployment)
        await tier.close()
        await tier.close()

    with WallClock(shared=True) as clock:
        clock.run(inside())


async def until_at_rest(clock: WallClock, deployment: Deployment) -> None:
    end_s = clock.real() + 5
    while True:
        status = read_status(deployment.spec)
        held = {**status.held, "grants": status.total("grants")}
        if not any(held.values()):
            break
        assert clock.real() < end_s, held
        await clock.sleep_until(clock.real() + 0.02)
    assert status.total("failed messages") == status.total("refused peers") == 0


async def put(tier: RemoteTier, keys: list[bytes]) -> None:
    done = await tier.connector.submit_store(1, keys, [content(key) for key in keys]).done.wait()
    assert set(done.results) == {KeyResult.STORED}


async def hits(clock: WallClock, tier: RemoteTier, request: int, keys: list[bytes]) -> int:
    clock.advance(clock.real())
    found = await tier.connector.submit_lookup(request, keys, BLOCK).done.wait()
    return found.leading_hits


def test_everything_may_be_given_back_twice_and_what_was_never_held_too(
    deployment: Deployment,
) -> None:
    keys = chain(BLOCKS)

    async def work(clock: WallClock, tier: RemoteTier) -> None:
        await put(tier, keys)
        assert await hits(clock, tier, 2, keys) == BLOCKS
        opened = tier.connector.stream_of(2, 0)
        node, member = tier.nodes[opened.node], tier.master.member
        for position in (0, 0, 10**6):
            node.consumed(opened.name, position, staged=True)
        for _ in range(2):
            node.close_stream(opened.name)
            tier.connector.release(2)
            tier.connector.poll()
        tier.connector.release(999)
        never = (member, 1 << 40)
        tier.master.release(never)
        tier.master.abort(never)
        node.abort(never)
        answers = await node.commit([0, 1, (1 << 62) - 1])
        assert set(answers) == {KeyResult.LEASE_EXPIRED}
        assert await hits(clock, tier, 3, keys) == BLOCKS  # and nothing of it was lost
        tier.connector.release(3)
        tier.connector.poll()

    run(deployment, work)


def test_readers_that_wait_for_a_node_get_a_miss_when_it_comes_back_as_another_and_then_hits(
    deployment: Deployment,
) -> None:
    keys = chain(BLOCKS)

    async def work(clock: WallClock, tier: RemoteTier) -> None:
        await put(tier, keys)
        await until_at_rest(clock, deployment)  # and flushed
        assert await hits(clock, tier, 2, keys) == BLOCKS
        buffers = [np.zeros(BLOCK, dtype=np.uint8) for _ in keys]
        deployment.kill("node", 0, signal.SIGSTOP)
        begin_s = clock.real()
        load = tier.connector.submit_load(2, keys, buffers)
        for _ in range(5):
            await clock.breathe()  # its first calls are on their way
        deployment.kill("node", 0)
        deployment.restart("node", 0)
        done = await load.done.wait()
        assert clock.real() - begin_s < DEADLINE_S + 0.5
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            assert result is not KeyResult.HIT or np.array_equal(buffer, content(key))
        assert done.results[0] is not KeyResult.HIT
        tier.connector.release(2)
        tier.connector.poll()
        request = 3
        while await hits(clock, tier, request, keys) < BLOCKS:
            assert clock.real() - begin_s < 20
            tier.connector.release(request)
            request += 1
        again = await tier.connector.submit_load(request, keys, buffers).done.wait()
        assert set(again.results) == {KeyResult.HIT}
        for key, buffer in zip(keys, buffers, strict=True):
            assert np.array_equal(buffer, content(key))
        tier.connector.release(request)
        tier.connector.poll()

    run(deployment, work)
