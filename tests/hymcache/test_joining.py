"""Workers that join a deployment that is not whole, and nodes that come back to them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.supervisor import Deployment
from cxlbench.kv.results import KeyResult
from tests.hymcache.process_victim import BLOCK
from tests.hymcache.rig import chain


def spec_in(folder: Path, **changes: object) -> DeploymentSpec:
    (folder / "r").mkdir()
    spec = DeploymentSpec(run_dir=folder / "r", nodes=2, scale=128, capacity=4 << 30)
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def test_a_worker_joins_a_deployment_with_a_dead_node_and_takes_it_in_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def stored_on(tier: RemoteTier, request: int) -> set[int]:
        """Store one block; return the node that it lies on."""
        clock.advance(clock.real())
        keys = chain(1, 100 + request)
        data = [np.full(BLOCK, request, dtype=np.uint8)]
        done = await tier.connector.submit_store(request, keys, data).done.wait()
        assert done.results == (KeyResult.STORED,)
        found = await tier.connector.submit_lookup(request, keys, BLOCK).done.wait()
        assert found.leading_hits == 1
        nodes = {block.node for block in tier.connector._requests[request].found.blocks}
        tier.connector.release(request)
        tier.connector.poll()
        return nodes

    async def work() -> None:
        tier = RemoteTier(clock, deployment.spec, copies=False)
        await tier.join(patience_s=0.2)
        assert list(tier.nodes) == [0]
        assert await stored_on(tier, 1) == {0}
        deployment.restart("node", 1)
        end_s = time.monotonic() + 10
        while 1 not in tier.nodes or tier.nodes[1].queue_pair._table is None:
            assert time.monotonic() < end_s
            await clock.sleep(0.01)
        used = set[int]()
        for request in range(2, 6):
            used |= await stored_on(tier, request)
        assert used == {0, 1}
        await tier.close()

    with Deployment(spec_in(tmp_path)) as deployment:
        deployment.kill("node", 1)
        with WallClock(shared=True) as clock:
            clock.run(work())


def test_where_no_node_is_there_a_worker_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        spec = spec_in(tmp_path, call_timeout_s=0.05)
        tier = RemoteTier(clock, spec, copies=False)
        with pytest.raises(
            HostLimitError, match=r"no node is there after 0\.1 s; is `cxlbench up`"
        ):
            await tier.join(patience_s=0.1)
        await tier.close()

    with WallClock(shared=True) as clock:
        clock.run(work())


def test_two_workers_of_one_process_and_number_have_names_of_their_own(tmp_path: Path) -> None:
    """What they hold is found by their names: one must not end what the other reads."""

    async def work() -> None:
        spec = spec_in(tmp_path)
        tiers = [RemoteTier(clock, spec, copies=False) for _ in range(2)]
        assert tiers[0].master.member != tiers[1].master.member
        for tier in tiers:
            await tier.close()

    with WallClock(shared=True) as clock:
        clock.run(work())
