"""Every law of a run can fail: each is broken on purpose, and must be the one that reports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.harness.content import BlockContent
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Request
from cxlbench.harness.serve import drive
from cxlbench.harness.serve.cluster import Cluster
from cxlbench.harness.serve.conservation import Law
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.gpu_pool import GpuPool, Holding
from cxlbench.harness.serve.gpu_server import GpuServer
from cxlbench.harness.serve.gpu_server import Sequence as GpuSequence
from cxlbench.harness.serve.handover import LinkHandover
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.serve.served import Population, Served
from cxlbench.harness.tiers.local_dram import LocalDramTier
from cxlbench.harness.tiers.plain_connector import PlainConnector
from tests.harness.serve.setups import GPU, cluster, link, roofline

ONCE = "every request is served once"
PROMPTS = "prompt tokens are reused or computed"
BLOCKS = "no block is reused that was not computed, or stored that was not offered"
ANSWERS = "every token of the answers is given"
PARTS = "the parts of TTFT add up"
GPUS = "no GPU is busy for longer than the run"
PIPES = "no pipe is busy for longer than the run"
BYTES = "bytes that arrive were sent"
LITTLE = "Little's law"
HELD = "nothing is held at rest"
WRONG = "no wrong block was delivered"

WORK = generate(
    GeneratorKnobs(
        sessions=6,
        turns=3,
        shared_system_tokens=0,
        first_input_tokens=1000,
        turn_input_tokens=500,
        output_tokens=4,
        think_s=0,
    )
)


def served(*, stopping: Callable[[], bool] = lambda: False) -> Simulated:
    """Run six conversations with P and D apart; GPUs too small, so that the tier is read."""
    spec = cluster(prefill_servers=2, decode_servers=1, handover=link(), gpu_blocks=24)
    how = Drive(order=Order.ROUNDS, concurrency=4)
    return simulate(WORK, spec, LocalDramTier, how, stopping=stopping)


def laws(*, stopping: Callable[[], bool] = lambda: False) -> tuple[Law, ...]:
    return served(stopping=stopping).laws


def broken() -> set[str]:
    return {law.name for law in laws() if not law.ok}


def test_an_honest_run_keeps_all_laws() -> None:
    run = served()
    assert sum(one.loaded for one in run.served) > 50
    assert run.stores.stored > 50
    found = run.laws
    assert [law for law in found if not law.ok] == []
    names = [law.name for law in found]
    assert sorted(names) == sorted(
        (ONCE, PROMPTS, BLOCKS, ANSWERS, PARTS, GPUS, PIPES, BYTES, LITTLE, HELD, WRONG)
    )


def every(nth: int) -> Callable[[], bool]:
    """Return a function that is true at every ``nth`` call."""
    count = iter(range(1, 1 << 30))
    return lambda: next(count) % nth == 0


def test_a_request_that_the_driver_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, forget = drive._Driver._serve, every(18)

    async def forgetful(self: Any, request: Request) -> None:
        if not forget():
            await serve(self, request)

    monkeypatch.setattr(drive._Driver, "_serve", forgetful)
    assert ONCE in broken()


def test_a_request_that_is_served_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, again = Cluster.serve, every(7)

    async def twice(self: Cluster, request: Request) -> Served:
        record = await serve(self, request)
        return await serve(self, request) if again() else record

    monkeypatch.setattr(Cluster, "serve", twice)
    assert ONCE in broken()


def test_a_request_that_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, lose = Cluster.serve, every(7)

    async def losing(self: Cluster, request: Request) -> Served:
        record = await serve(self, request)
        if lose():
            self.served.remove(record)
        return record

    monkeypatch.setattr(Cluster, "serve", losing)
    assert {ONCE, LITTLE} <= broken()


def test_a_run_that_was_stopped_may_lack_requests() -> None:
    asked = iter(range(1, 1 << 30))
    assert all(law.ok for law in laws(stopping=lambda: next(asked) > 9))


def changed_start(change: Callable[[dict[str, int]], None]) -> Callable[..., GpuSequence]:
    start = GpuServer.start

    def changed(self: GpuServer, **asked: int) -> GpuSequence:
        change(asked)
        return start(self, **asked)

    return changed


def test_prompt_tokens_that_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(asked: dict[str, int]) -> None:
        asked["prompt_tokens"] += 1

    monkeypatch.setattr(GpuServer, "start", changed_start(more))
    assert broken() == {PROMPTS}


def test_prompt_tokens_that_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(asked: dict[str, int]) -> None:
        asked["prompt_tokens"] = max(1, asked["prompt_tokens"] - 1)

    monkeypatch.setattr(GpuServer, "start", changed_start(less))
    assert broken() == {PROMPTS}


def test_prompts_of_which_less_is_asked_than_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed and recorded alike, and yet too little."""
    read = Cluster._read

    async def reads_more(self: Cluster, request_id: int, keys: Sequence[bytes], at: Any) -> int:
        return await read(self, request_id, keys, at) + 3

    monkeypatch.setattr(Cluster, "_read", reads_more)
    assert broken() == {BLOCKS}


def test_an_answer_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(asked: dict[str, int]) -> None:
        asked["answer_tokens"] = max(1, asked["answer_tokens"] - 1)

    monkeypatch.setattr(GpuServer, "start", changed_start(less))
    assert broken() == {ANSWERS}


def test_time_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Cluster._load

    async def slow(self: Cluster, *args: Any) -> None:
        await load(self, *args)
        for record in (one for one in args if isinstance(one, Served)):
            record.lookup_s += 0.001

    monkeypatch.setattr(Cluster, "_load", slow)
    assert broken() == {PARTS}


def test_a_gpu_that_does_two_things_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start = GpuServer.start

    def double(self: GpuServer, **asked: int) -> GpuSequence:
        """Give every sequence a loop of its own; all are booked on this GPU."""
        other = GpuServer(self.clock, self._jobs, self.roofline, self.pool, name=self.name)
        other.counters = self.counters
        return start(other, **asked)

    monkeypatch.setattr(GpuServer, "start", double)
    spec = cluster(gpu_blocks=500)
    how = Drive(order=Order.ROUNDS, concurrency=6)
    found = simulate(WORK, spec, LocalDramTier, how).laws
    assert {law.name for law in found if not law.ok} == {GPUS}


def test_a_pipe_that_is_booked_twice_for_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Pipe.reserve

    def overlapping(self: Pipe, nbytes: int, **how: Any) -> Reservation:
        self._queue.clear()
        self._free_s = 0.0
        return reserve(self, nbytes, **how)

    monkeypatch.setattr(Pipe, "reserve", overlapping)
    four = cluster(prefill_servers=4, decode_servers=1, handover=link(), roofline=fast())
    how = Drive(order=Order.ROUNDS, concurrency=6)
    found = simulate(WORK, four, LocalDramTier, how).laws
    assert {law.name for law in found if not law.ok} == {PIPES}


def fast() -> Roofline:
    """Return a GPU that computes in no time: everything waits for pipes."""
    gpu = replace(GPU, peak_compute=1e20, memory_bandwidth=1e18)
    return replace(roofline(overhead_s=0.0), accelerator=gpu)


def test_kv_of_which_a_part_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LinkHandover.send

    async def half(self: LinkHandover, source: int, target: int, nbytes: int) -> None:
        await send(self, source, target, nbytes // 2)

    monkeypatch.setattr(LinkHandover, "send", half)
    assert broken() == {BYTES}


def test_blocks_that_come_without_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Pipe.reserve

    def free_of_charge(self: Pipe, nbytes: int, **how: Any) -> Reservation:
        return reserve(self, nbytes if "pd" in self.name else 0, **how)

    monkeypatch.setattr(Pipe, "reserve", free_of_charge)
    assert broken() == {BYTES}


def test_more_stored_than_was_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cluster._store

    async def generous(self: Cluster, record: Served, *rest: Any) -> None:
        await store(self, record, *rest)
        record.stored += 1

    monkeypatch.setattr(Cluster, "_store", generous)
    assert broken() == {BLOCKS}


def test_blocks_that_were_found_where_nobody_had_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Cluster, block_ids: Sequence[int]) -> int:
        return 0

    monkeypatch.setattr(Cluster, "_seen", never)
    assert broken() == {BLOCKS}


def test_a_request_that_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    change, stay = Population.change, every(18)

    def staying(self: Population, now_s: float, by: int) -> None:
        if by > 0 or not stay():
            change(self, now_s, by)

    monkeypatch.setattr(Population, "change", staying)
    assert broken() == {LITTLE}


def test_a_record_with_a_wrong_end(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, late = Cluster.serve, every(9)

    async def wrong(self: Cluster, request: Request) -> Served:
        record = await serve(self, request)
        record.end_s += 0.5 if late() else 0.0
        return record

    monkeypatch.setattr(Cluster, "serve", wrong)
    assert broken() == {LITTLE}


def test_a_block_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    free, leak = GpuPool.free, every(5)

    def leaking(self: GpuPool, holding: Holding) -> None:
        free(self, holding)
        self._free -= leak()

    monkeypatch.setattr(GpuPool, "free", leaking)
    assert broken() == {HELD}


def test_a_request_that_is_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    release, forget = PlainConnector.release, every(6)

    def forgetful(self: PlainConnector, request_id: int) -> None:
        if not forget():
            release(self, request_id)

    monkeypatch.setattr(PlainConnector, "release", forgetful)
    assert broken() == {HELD}


def test_a_block_with_the_content_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    make, swap = BlockContent.make, every(4)

    def swapped(self: BlockContent, key: bytes) -> Any:
        return make(self, key[::-1] if swap() else key)

    monkeypatch.setattr(BlockContent, "make", swapped)
    assert broken() == {WRONG}
