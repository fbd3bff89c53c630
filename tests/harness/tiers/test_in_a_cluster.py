"""Every tier under the serving engine, small: the books are balanced, and mechanics show."""

from __future__ import annotations

from typing import Any

import pytest

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CopyEngineProfile,
    LinkProfile,
    ServingEngineProfile,
    load_as,
)
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.tiers.catalog import CATALOG, tier
from cxlbench.kv.geometry import model_shape

GIB = 1 << 30
LLAMA = Roofline(
    model_shape("Llama-3.1-8B"),
    load_as(AcceleratorProfile, "a100-80g"),
    load_as(ServingEngineProfile, "vllm-default"),
)


def workload(sessions: int = 8, turns: int = 4) -> Workload:
    return generate(
        GeneratorKnobs(
            sessions=sessions,
            turns=turns,
            shared_system_tokens=256,
            first_input_tokens=1024,
            turn_input_tokens=1024,
            output_tokens=4,
            block_tokens=128,
        )
    )


def run(
    name: str,
    *,
    decode: int = 0,
    work: Workload | None = None,
    concurrency: int = 4,
    **options: Any,
) -> Simulated:
    entry = tier(name)
    handover = None
    if decode and name != "tract":
        handover = LinkHandoverSpec(
            prefill_link=load_as(LinkProfile, "nic-100g"),
            decode_link=load_as(LinkProfile, "nic-200g"),
            copy_engine=load_as(CopyEngineProfile, "gpu-copy-gen4x16"),
        )
    spec = ClusterSpec(
        roofline=LLAMA,
        block_tokens=128,
        prefill_servers=2,
        decode_servers=decode,
        handover=handover,
        prefix_caching=entry.prefix_caching,
        gpu_blocks=200,
    )
    how = Drive(order=Order.ROUNDS, concurrency=concurrency)
    return simulate(work or workload(), spec, entry.maker, how, options=options)


@pytest.mark.parametrize("decode", [0, 1])
@pytest.mark.parametrize("name", list(CATALOG))
def test_the_books_are_balanced(name: str, decode: int) -> None:
    result = run(name, decode=decode)
    assert [law for law in result.laws if not law.ok] == []
    assert result.complete
    if decode and name == "tract":
        # Also what two servers write at the same time is handed over.
        read = sum(record.decode_loaded for record in result.served)
        assert read == sum(record.input_tokens // 128 for record in result.served)


def test_a_small_transfer_buffer_fails_puts_and_lowers_the_hit_rate() -> None:
    work = workload(sessions=24, turns=5)
    large = run("mooncake", work=work, concurrency=24)
    small = run("mooncake", work=work, concurrency=24, buffer_bytes=GIB // 4)
    assert large.stores.skipped == 0
    assert small.stores.skipped > 0
    assert small.hit_rate < large.hit_rate - 0.02


def test_redis_alone_breaks_chains_that_a_local_cache_keeps() -> None:
    work = workload(sessions=24, turns=5)
    options = {"capacity_bytes": 16 * GIB}
    alone = run("redis", work=work, concurrency=24, buffer_bytes=GIB, **options)
    pair = run("lmcache-redis", work=work, concurrency=24, local_bytes=16 * GIB, **options)
    assert alone.stores.skipped > 0
    assert alone.hit_rate < pair.hit_rate - 0.1


def test_capacity_decides_once_the_footprint_is_larger() -> None:
    work = workload(sessions=24, turns=5)
    rates = [
        run("lmcache-local", work=work, capacity_bytes=nbytes).hit_rate
        for nbytes in (2 * GIB, 6 * GIB, 20 * GIB)
    ]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 0.95


def test_a_run_costs_a_few_events_for_each_block() -> None:
    for name in ("lmcache-local", "mooncake", "mooncake-nvmeof"):
        result = run(name, work=workload(sessions=24, turns=5))
        blocks = sum(record.loaded for record in result.served) + result.stores.stored
        assert result.timers / blocks < 2


def test_the_hand_over_waits_for_blocks_that_another_server_is_writing() -> None:
    """Both servers compute one long prompt at once: the second one's store finds PENDING blocks."""
    work = generate(
        GeneratorKnobs(
            sessions=2,
            turns=1,
            shared_system_tokens=8192,
            first_input_tokens=256,
            turn_input_tokens=256,
            output_tokens=2,
            block_tokens=128,
        )
    )
    result = run("tract", decode=1, work=work, concurrency=2)
    assert result.counters["exists_blocks"] > 0
    for record in result.served:
        assert record.decode_loaded == record.input_tokens // 128
        assert record.decode_read_s < 1
