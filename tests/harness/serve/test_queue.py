"""Random arrivals: the queue of M/D/1, Little's law, and how busy anything can be."""

from __future__ import annotations

from random import Random

import pytest

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.drive import Drive, Order
from tests.harness.serve.setups import link, roofline, run
from tests.harness.workbench import ask, workload

TOKENS = 512
"""One prompt is a step: the budget takes no second one."""
ENGINE = roofline(budget=TOKENS)


def poisson(requests: int, load: float, service_s: float, seed: int) -> Workload:
    random = Random(seed)
    at_s, asks = 0.0, []
    for _ in range(requests):
        at_s += random.expovariate(load / service_s)
        asks.append(ask([], tokens=TOKENS, at=at_s))
    return workload(*asks, sessions=False)


def service_s() -> float:
    (one,) = run(workload(ask([], tokens=TOKENS)), roofline=ENGINE).served
    return one.ttft_s


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_mean_wait_is_that_of_a_queue_with_equal_services(load: float) -> None:
    service = service_s()
    result = run(poisson(8000, load, service, seed=7), roofline=ENGINE)
    waited = sum(one.schedule_s for one in result.served) / len(result.served)
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    assert result.gpu_busy["prefill0"] == pytest.approx(load, rel=0.03)


def test_in_a_closed_loop_more_at_once_wait_longer_and_are_served_as_fast() -> None:
    work = workload(*(ask([], tokens=TOKENS) for _ in range(400)), sessions=False)
    few, many = (
        run(work, how=Drive(order=Order.ROUNDS, concurrency=count), roofline=ENGINE)
        for count in (4, 16)
    )
    assert few.requests_per_s == pytest.approx(1 / service_s(), rel=0.01)
    assert many.requests_per_s == pytest.approx(few.requests_per_s, rel=0.01)
    # Little: L = lambda W
    assert few.e2e.mean_s == pytest.approx(4 / few.requests_per_s, rel=0.02)
    assert many.e2e.mean_s == pytest.approx(16 / many.requests_per_s, rel=0.05)


@pytest.mark.parametrize("name", ["hymcache", "mooncake", "lmcache-redis"])
def test_nothing_is_busy_for_longer_than_there_is_time(name: str) -> None:
    work = generate(
        GeneratorKnobs(sessions=24, turns=3, first_input_tokens=2000, output_tokens=2, think_s=0)
    )
    how = Drive(order=Order.ROUNDS, concurrency=24)
    result = run(work, name, how, prefill_servers=2, decode_servers=1, handover=link())
    for share in (*result.gpu_busy.values(), *result.pipe_busy.values()):
        assert 0 <= share <= 1 + 1e-6
    assert max(result.gpu_busy.values()) > 0.3
    assert max(result.pipe_busy.values()) > 0.05
