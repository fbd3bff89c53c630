"""HyMCache as processes: parts that are killed, stopped and started again, under real clients."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric_shared import GrantReply, PostRead
from cxlbench.emu.status import DeviceError, Status
from cxlbench.harness.content import BlockContent
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.harness.deployment_status import read_status
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.supervisor import Deployment
from cxlbench.hymcache.lookup import OpenStream
from cxlbench.kv.footer import Verify
from cxlbench.kv.results import KeyResult
from tests.hymcache.process_victim import BLOCK, BLOCKS, HOOKS
from tests.hymcache.rig import chain

DEADLINE_S = 6.0
AT_ONCE_S = 3.0
"""What comes back because its holder died is back long before any deadline."""
FRAME = (2 << 20) // 128
CHAINS = itertools.count(1)


class System:
    """A deployment, and a worker of it in this process."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.spec = deployment.spec
        self.content = BlockContent(BLOCK, phantom=False, seed=0)
        self._workers = itertools.count(1)

    def run(self, work: Callable[[Worker], Coroutine[Any, Any, None]], **changes: Any) -> None:
        """Run ``work`` with a worker; ``changes`` are to its spec, not to the deployment's."""

        async def inside() -> None:
            spec = dataclasses.replace(self.spec, **changes)
            tier = RemoteTier(clock, spec, worker=next(self._workers), copies=False)
            try:
                await tier.join(patience_s=20)
                await work(Worker(self, clock, tier))
                assert not any(tier.connector.at_rest().values())
            finally:
                await tier.close()

        with WallClock(shared=True) as clock:
            clock.run(inside())

    def held(self) -> dict[str, int]:
        """Return what Master and nodes hold, and grants that are out."""
        status = read_status(self.spec)
        found = dict(status.held)
        for part in status.parts:
            assert not part.trouble, part
            assert not part.figures["failed messages"]
            if part.figures.get("grants"):
                found[f"grants of {part.name}"] = int(part.figures["grants"])
        return found

    def await_rest(self, within_s: float = AT_ONCE_S) -> None:
        end_s = time.monotonic() + within_s
        while held := self.held():
            assert time.monotonic() < end_s, held
            time.sleep(0.01)

    def victim(self, stage: str, number: int) -> subprocess.Popen[str]:
        """Start another worker process; it waits for the number of the chain to work on."""
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.hymcache.process_victim",
                str(self.spec.run_dir),
                stage,
                str(number),
            ],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


class Worker:
    """What tests do with a connector."""

    def __init__(self, system: System, clock: WallClock, tier: RemoteTier) -> None:
        self.system = system
        self.clock = clock
        self.tier = tier
        self.connector = tier.connector
        self._requests = itertools.count(1)

    def request(self) -> int:
        self.clock.advance(self.clock.real())
        return next(self._requests)

    async def put(self, keys: Sequence[bytes]) -> tuple[KeyResult, ...]:
        buffers = [self.system.content.make(key) for key in keys]
        done = await self.connector.submit_store(self.request(), keys, buffers).done.wait()
        return done.results

    async def get(self, keys: Sequence[bytes]) -> int:
        """Look up and load; compare what is delivered; return how many leading blocks were."""
        request = self.request()
        content = self.system.content
        try:
            found = await self.connector.submit_lookup(request, keys, BLOCK).done.wait()
            some = keys[: found.leading_hits]
            if not some:
                return 0
            buffers = [content.empty() for _ in some]
            done = await self.connector.submit_load(request, some, buffers).done.wait()
            for key, buffer, result in zip(some, buffers, done.results, strict=True):
                assert result is not KeyResult.HIT or content.holds(buffer, key)
            return done.leading_hits
        finally:
            self.connector.release(request)
            self.connector.poll()

    async def until_got(self, keys: Sequence[bytes], within_s: float = 10.0) -> None:
        """Read until every block is delivered."""
        end_s = self.clock.real() + within_s
        while (got := await self.get(keys)) < len(keys):
            assert self.clock.real() < end_s, f"{got} of {len(keys)}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("p")
    (folder / "ssd").mkdir()
    spec = DeploymentSpec(
        run_dir=folder / "r",
        nodes=2,
        scale=128,
        capacity=4 << 30,
        folder=folder / "ssd",
        deadline_s=DEADLINE_S,
        call_timeout_s=2.0,
    )
    deployment = Deployment(spec)
    deployment.start()
    yield System(deployment)
    deployment.stop()
    assert not spec.run_dir.exists() or deployment.failed
    assert sorted(path.name for path in (folder / "ssd").glob("*.ssd*")) == [
        f"node{node}.dev0.ssd{ssd}" for node in range(2) for ssd in range(2)
    ]


@pytest.fixture
def system(running: System) -> Iterator[System]:
    yield running
    assert not [ended.line() for ended in running.deployment.ended()]
    running.await_rest()


def fresh() -> tuple[int, list[bytes]]:
    number = next(CHAINS)
    return number, chain(BLOCKS, number)


# -- two at once -----------------------------------------------------------------------------------


def test_of_two_processes_that_put_one_chain_one_wins_and_the_other_is_told(
    system: System,
) -> None:
    rivals = [system.victim("store", 50 + n) for n in range(2)]

    async def work(worker: Worker) -> None:
        for _ in range(1):
            number, keys = fresh()
            for rival in rivals:
                assert rival.stdin is not None
                rival.stdin.write(f"{number}\n")
                rival.stdin.flush()
            while await worker.get(keys) < BLOCKS:  # any block is whole and right, or not there
                assert all(rival.poll() in (None, 0) for rival in rivals)

    system.run(work)
    answers = []
    for rival in rivals:
        out, _ = rival.communicate(timeout=20)
        assert rival.returncode == 0
        answers.append(out.split())
    for pair in zip(*answers, strict=True):
        assert sorted(pair) == ["EXISTS", "STORED"]


# -- workers that are killed -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [*(s for s in HOOKS if s != "reading"), "found", "reading"])
def test_a_worker_killed_in_the_middle_leaves_nothing_and_its_keys_are_free(
    system: System, stage: str
) -> None:
    number, keys = fresh()
    reads = stage in ("found", "reading")
    victim = system.victim(stage, 60)

    async def work(worker: Worker) -> None:
        if reads:
            assert set(await worker.put(keys)) == {KeyResult.STORED}
        victim.communicate(f"{number}\n", timeout=20)
        assert victim.returncode == -signal.SIGKILL
        died_s = time.monotonic()
        system.await_rest()
        if not reads:
            assert set(await worker.put(keys)) == {KeyResult.STORED}
        assert time.monotonic() - died_s < DEADLINE_S
        assert await worker.get(keys) == BLOCKS

    system.run(work)


# -- nodes and Master that come again --------------------------------------------------------------


def test_a_node_killed_and_started_again_has_what_it_had_flushed(system: System) -> None:
    async def work(worker: Worker) -> None:
        chains = [fresh()[1] for _ in range(4)]
        for keys in chains:
            assert set(await worker.put(keys)) == {KeyResult.STORED}
        system.await_rest()  # and flushed
        before = {n: node.wire.epoch for n, node in worker.tier.nodes.items()}
        last = fresh()[1]
        await worker.put(last)
        for node in (0, 1):
            system.deployment.kill("node", node)
        for keys in chains:
            assert await worker.get(keys) == 0  # nobody serves: a miss, and no wait
        for node in (0, 1):
            system.deployment.restart("node", node, wait=False)
        system.deployment.wait_ready()
        for keys in chains:
            await worker.until_got(keys)
        for number, node in worker.tier.nodes.items():
            assert node.wire.epoch != before[number]
        await worker.get(last)  # was it flushed in time, then right; else a miss
        assert set(await worker.put(last)) <= {KeyResult.STORED, KeyResult.EXISTS}
        await worker.until_got(last)

    system.run(work)


def test_what_was_handed_out_before_a_restart_is_refused_after_it(system: System) -> None:
    async def work(worker: Worker) -> None:
        _, keys = fresh()
        await worker.put(keys)
        system.await_rest()
        request = worker.request()
        await worker.connector.submit_lookup(request, keys, BLOCK).done.wait()
        opened = worker.connector.stream_of(request, 0)
        found = worker.connector._requests[request].found.blocks[0]
        system.deployment.restart("node", opened.node)
        node = worker.tier.nodes[opened.node]
        await worker.until_got(keys)
        data = np.zeros(BLOCK, dtype=np.uint8)
        done = await node.queue_pair.read(opened.rkeys[0], found.address, data)
        assert done.status is Status.BAD_RKEY
        assert not data.any()
        buffers = [system.content.empty() for _ in keys]
        late = await worker.connector.submit_load(request, keys, buffers).done.wait()
        assert KeyResult.HIT not in late.results
        worker.connector.release(request)

    system.run(work)


def test_a_new_master_learns_everything_from_the_nodes(system: System) -> None:
    async def work(worker: Worker) -> None:
        chains = [fresh()[1] for _ in range(4)]
        for keys in chains:
            await worker.put(keys)
        before = int(read_status(system.spec).parts[0].figures["objects"])
        system.deployment.kill("master")
        assert await worker.get(chains[0]) == 0
        system.deployment.restart("master")
        await worker.until_got(chains[0])
        assert int(read_status(system.spec).parts[0].figures["objects"]) == before
        # What is written now overwrites nothing: no segment was taken for empty.
        for _ in range(12):
            assert set(await worker.put(fresh()[1])) == {KeyResult.STORED}
        for keys in chains:
            assert await worker.get(keys) == BLOCKS
            assert set(await worker.put(keys)) == {KeyResult.EXISTS}

    system.run(work)


def test_a_node_that_dies_while_master_is_stopped_may_come_back(system: System) -> None:
    """Master wakes with the death and the new announcement both waiting for it."""
    _, keys = fresh()

    async def put(worker: Worker) -> None:
        await worker.put(keys)
        system.await_rest()

    async def get(worker: Worker) -> None:
        await worker.until_got(keys)

    system.run(put)
    deployment = system.deployment
    deployment.kill("master", signal_number=signal.SIGSTOP)
    deployment.kill("node", 0)
    deployment.restart("node", 0, wait=False)
    log = deployment.log("node", 0)
    starts = log.read_text().count("ready")
    while log.read_text().count("ready") == starts:
        time.sleep(0.01)
    deployment.kill("master", signal_number=signal.SIGCONT)
    deployment.wait_ready()
    system.run(get)


@pytest.mark.parametrize("part", ["node", "master"])
def test_a_part_that_is_stopped_costs_a_miss_within_the_deadline(system: System, part: Any) -> None:
    deadline_s, call_s = 0.6, 0.15

    async def work(worker: Worker) -> None:
        _, keys = fresh()
        await worker.put(keys)
        assert await worker.get(keys) == BLOCKS
        parts = [(part, 0)] if part == "master" else [("node", 0), ("node", 1)]
        for role, number in parts:
            system.deployment.kill(role, number, signal.SIGSTOP)
        begin_s = worker.clock.real()
        assert await worker.get(keys) == 0
        assert worker.clock.real() - begin_s < deadline_s + 4 * call_s
        assert KeyResult.STORED not in await worker.put(fresh()[1])
        for role, number in parts:
            system.deployment.kill(role, number, signal.SIGCONT)
        await worker.until_got(keys)
        assert set(await worker.put(fresh()[1])) == {KeyResult.STORED}

    system.run(work, deadline_s=deadline_s, call_timeout_s=call_s)


def test_a_load_under_way_when_its_node_stops_ends_by_the_deadline(system: System) -> None:
    deadline_s = 0.6

    async def work(worker: Worker) -> None:
        _, keys = fresh()
        await worker.put(keys)
        request = worker.request()
        await worker.connector.submit_lookup(request, keys, BLOCK).done.wait()
        for node in (0, 1):
            system.deployment.kill("node", node, signal.SIGSTOP)
        buffers = [system.content.empty() for _ in keys]
        begin_s = worker.clock.real()
        done = await worker.connector.submit_load(request, keys, buffers).done.wait()
        assert worker.clock.real() - begin_s < deadline_s + 0.5
        assert KeyResult.HIT not in done.results
        for node in (0, 1):
            system.deployment.kill("node", node, signal.SIGCONT)
        worker.connector.release(request)
        await worker.until_got(keys)

    system.run(work, deadline_s=deadline_s, call_timeout_s=2.0)


# -- leases ----------------------------------------------------------------------------------------


def end_lease(worker: Worker, request: int) -> OpenStream:
    """Let the lease of a request be over, as its reader knows it."""
    found = worker.connector._requests[request].found
    over_s = worker.clock.real()
    found.streams = [dataclasses.replace(s, until_s=over_s) for s in found.streams]
    return found.streams[0]


def test_a_read_past_its_lease_is_refused_by_reader_and_node(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(worker: Worker) -> None:
        _, keys = fresh()
        await worker.put(keys)
        request = worker.request()
        await worker.connector.submit_lookup(request, keys, BLOCK).done.wait()
        opened = end_lease(worker, request)
        buffers = [system.content.empty() for _ in keys]
        block = worker.connector._requests[request].found.blocks[0]
        node = worker.tier.nodes[block.node]
        posted: list[object] = []
        post_read = node.post_read

        def note(post: PostRead) -> Awaitable[GrantReply]:
            posted.append(post)
            return post_read(post)

        monkeypatch.setattr(node, "post_read", note)
        done = await worker.connector.submit_load(request, keys, buffers).done.wait()
        assert done.results[0] is KeyResult.LEASE_EXPIRED
        assert KeyResult.HIT not in done.results
        assert not posted  # the reader knows it by itself
        data = np.zeros(BLOCK, dtype=np.uint8)
        late = await node.queue_pair.read(
            opened.rkeys[0], block.address, data, until_s=opened.until_s
        )
        assert late.status is Status.TIMEOUT
        assert not data.any()
        worker.connector.release(request)

    system.run(work)


def test_a_node_ends_a_stream_with_its_lease(system: System) -> None:
    async def work(worker: Worker) -> None:
        _, keys = fresh()
        await worker.put(keys)
        until_s = worker.clock.real() + 0.05
        for node in worker.tier.nodes.values():
            name = (worker.tier.master.member, 1 << 40)
            opened = await node.open_stream(name, 1, keys, until_s=until_s)
            if not opened.objects:
                continue
            await worker.clock.sleep_until(until_s + 0.02)
            with pytest.raises(DeviceError, match="gives no token"):
                await node.token(name, 0, staged=True)
            node.close_stream(name)

    system.run(work)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, FRAME, FRAME + 1])
@pytest.mark.parametrize("verify", list(Verify))
def test_objects_of_any_size_come_back(system: System, size: int, verify: Verify) -> None:
    async def work(worker: Worker) -> None:
        connector = worker.connector
        (key, *_) = fresh()[1]
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        done = await connector.submit_store(worker.request(), [key], [data]).done.wait()
        assert done.results == (KeyResult.STORED,)
        for flushed in (False, True):
            if flushed:
                system.await_rest()
            request = worker.request()
            await connector.submit_lookup(request, [key], size).done.wait()
            got = np.zeros(size, dtype=np.uint8)
            done = await connector.submit_load(request, [key], [got]).done.wait()
            assert done.results == (KeyResult.HIT,)
            assert np.array_equal(got, data)
            connector.release(request)

    system.run(work)


def test_an_object_of_no_bytes_is_refused(system: System) -> None:
    async def work(worker: Worker) -> None:
        nothing = np.zeros(0, dtype=np.uint8)
        with pytest.raises(ValueError, match="from 1 B to"):
            worker.connector.submit_store(1, [fresh()[1][0]], [nothing])

    system.run(work)


def test_an_object_larger_than_the_device_is_refused_for_good(system: System) -> None:
    async def work(worker: Worker) -> None:
        size = (4 << 30) // 128 + 4096
        (key, *_) = fresh()[1]
        data = np.zeros(size, dtype=np.uint8)
        done = await worker.connector.submit_store(worker.request(), [key], [data]).done.wait()
        assert done.results == (KeyResult.ERROR,)
        assert await worker.get([key]) == 0

    system.run(work)


@pytest.mark.skipif(
    not os.environ.get("CXLBENCH_LARGE"),
    reason="takes 8 GiB of memory and half a minute; CXLBENCH_LARGE=1 runs it",
)
def test_an_object_over_2_gib_comes_back(tmp_path: Path) -> None:
    size = (2 << 30) + 5
    (tmp_path / "ssd").mkdir()
    spec = DeploymentSpec(
        run_dir=tmp_path / "r",
        scale=1,
        capacity=8 << 30,
        folder=tmp_path / "ssd",
        throttled=False,
        device_set={
            "dram_capacity": "9 GiB",
            "write_buffer_share": "0.3",
            "demand_reserve": "5 GiB",
            "demand_outstanding": "1",
        },
        deadline_s=60.0,
        call_timeout_s=20.0,
    )
    with Deployment(spec) as deployment:
        system = System(deployment)

        async def work(worker: Worker) -> None:
            key = chain(1)[0]
            data = np.zeros(size, dtype=np.uint8)
            data[:: 1 << 20] = 7
            data[-3:] = [1, 2, 3]
            stored = await worker.connector.submit_store(
                worker.request(), [key], [data]
            ).done.wait()
            assert stored.results == (KeyResult.STORED,)
            system.await_rest(60)
            request = worker.request()
            await worker.connector.submit_lookup(request, [key], size).done.wait()
            got = np.zeros(size, dtype=np.uint8)
            done = await worker.connector.submit_load(request, [key], [got]).done.wait()
            assert done.results == (KeyResult.HIT,)
            assert got[-3:].tolist() == [1, 2, 3]
            assert int(np.count_nonzero(got)) == 2049 + 3 - 1 * (size % (1 << 20) == 1)
            worker.connector.release(request)

        system.run(work)
