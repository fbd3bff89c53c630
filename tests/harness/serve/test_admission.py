"""Requests are looked up in the caches when it is their turn, not when they arrive."""

from __future__ import annotations

import pytest

from cxlbench.devices.profile import AcceleratorProfile, ServingEngineProfile, load_as
from cxlbench.emu.clock import VirtualClock
from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.serve.admission import Admission, Turn
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import simulate
from cxlbench.harness.tiers.catalog import tier
from cxlbench.kv.geometry import LLAMA_3_1_8B

TOKENS, BLOCK = 8192, 128


def alike(count: int, *, prefixes: int = 1) -> Workload:
    """Return prompts that come at once; those of one prefix are equal."""
    blocks = TOKENS // BLOCK
    return Workload(
        "alike",
        BLOCK,
        Mode.WHOLE_BLOCKS,
        tuple(
            Request(
                request_id=n,
                session=f"s{n}",
                turn=1,
                arrival_s=n * 0.01,
                input_tokens=TOKENS,
                output_tokens=1,
                block_ids=tuple(range((n % prefixes) * blocks, (n % prefixes + 1) * blocks)),
            )
            for n in range(count)
        ),
        has_sessions=False,
    )


def cluster() -> ClusterSpec:
    return ClusterSpec(
        roofline=Roofline(
            LLAMA_3_1_8B,
            load_as(AcceleratorProfile, "a100-80g"),
            load_as(ServingEngineProfile, "vllm-default"),
        ),
        block_tokens=BLOCK,
    )


@pytest.mark.parametrize("name", ["gpu-prefix-cache", "lmcache-local", "hymcache"])
def test_who_waits_behind_an_equal_prompt_does_not_compute_it_again(name):
    run = simulate(alike(6), cluster(), tier(name).maker, Drive(order=Order.OPEN))
    computed = [record.computed_tokens for record in run.served]
    assert computed[0] == TOKENS
    assert computed[1:] == [BLOCK] * 5
    assert all(law.ok for law in run.laws)


def test_of_each_prefix_one_is_computed():
    run = simulate(
        alike(9, prefixes=3), cluster(), tier("gpu-prefix-cache").maker, Drive(order=Order.OPEN)
    )
    assert sum(record.computed_tokens == TOKENS for record in run.served) == 3


def test_no_request_holds_blocks_while_it_waits_for_its_turn():
    spec = cluster()
    run = simulate(
        alike(40, prefixes=40), spec, tier("gpu-prefix-cache").maker, Drive(order=Order.OPEN)
    )
    assert run.complete
    first = min(record.first_token_s for record in run.served)
    waited = [record for record in run.served if record.arrival_s + record.schedule_s > first]
    assert len(waited) > 30


def test_turns_come_in_order_and_one_at_a_time():
    with VirtualClock() as clock:
        opened = True
        admission = Admission(clock, lambda: opened)
        log: list[str] = []

        async def work(name: str) -> None:
            turn = Turn(admission)
            await turn.take()
            log.append(f"{name} in")
            await clock.sleep(1)
            log.append(f"{name} out")
            turn.give()
            turn.give()

        async def all_of_them() -> None:
            await clock.gather(*(work(name) for name in "abc"))

        clock.run(all_of_them())
    assert log == ["a in", "a out", "b in", "b out", "c in", "c out"]


def test_a_closed_turnstile_opens_when_it_is_looked_at():
    with VirtualClock() as clock:
        state = {"open": False}
        admission = Admission(clock, lambda: state["open"])
        log: list[float] = []

        async def work() -> None:
            await admission.enter()
            log.append(clock.now())

        async def main() -> None:
            job = clock.spawn(work())
            await clock.sleep(2)
            admission.look()
            await clock.sleep(1)
            state["open"] = True
            admission.look()
            await job

        clock.run(main())
    assert log == [3.0]


def test_who_gives_up_waiting_does_not_keep_the_turn():
    with VirtualClock() as clock:
        admission = Admission(clock, lambda: True)
        log: list[str] = []

        async def work(name: str) -> None:
            await admission.enter()
            log.append(name)
            admission.leave()

        async def main() -> None:
            await admission.enter()
            first, second = clock.spawn(work("first")), clock.spawn(work("second"))
            await clock.sleep(1)
            first.cancel()
            await clock.sleep(1)
            admission.leave()
            await second

        clock.run(main())
    assert log == ["second"]
