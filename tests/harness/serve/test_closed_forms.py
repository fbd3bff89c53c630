"""Clusters with one thing going on, against arithmetic to 1 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxlbench.devices.profile import (
    CxlHmProfile,
    LocalCacheProfile,
    SharedType3Profile,
    SoftwareProfile,
    load_as,
)
from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec, Path
from cxlbench.harness.serve.served import Served
from tests.harness.serve.setups import (
    BLOCK,
    BLOCK_BYTES,
    COPY,
    NIC_100,
    NIC_200,
    OPEN,
    cluster,
    decode_s,
    link,
    prefill_s,
    roofline,
    run,
)
from tests.harness.workbench import ask, workload

LATER_S = 100.0
"""When everything before it is over."""


def prompt(number: int, blocks: int, *, at: float = 0.0, out: int = 1) -> Request:
    """Return a prompt that shares nothing with others, one token longer than its blocks."""
    ids = range(number * 10_000, number * 10_000 + blocks)
    return ask(list(ids), session=str(number), at=at, out=out)


def twice(blocks: int) -> Workload:
    return workload(prompt(0, blocks), prompt(0, blocks, at=LATER_S), sessions=False)


# -- one server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1000, 8192])
def test_a_cold_request_takes_its_prefill_and_a_step_for_each_token(tokens: int) -> None:
    (one,) = run(workload(ask([], tokens=tokens, out=51))).served
    assert one.ttft_s == pytest.approx(prefill_s(tokens), rel=0.01)
    decoded = sum(decode_s([tokens + n]) for n in range(1, 51))
    assert one.e2e_s == pytest.approx(prefill_s(tokens) + decoded, rel=0.01)


def test_a_long_prompt_takes_its_chunks() -> None:
    (one,) = run(workload(ask([], tokens=20_000))).served
    chunks = prefill_s(8192) + prefill_s(8192, 8192) + prefill_s(20_000 - 16_384, 16_384)
    assert one.ttft_s == pytest.approx(chunks, rel=0.01)
    assert one.parts_s["compute"] == pytest.approx(chunks, rel=0.01)


def test_a_prompt_that_the_gpu_has_takes_its_last_token() -> None:
    cold, hot = run(twice(200), "gpu-prefix-cache").served
    assert cold.ttft_s == pytest.approx(
        prefill_s(8192) + prefill_s(8192, 8192) + prefill_s(200 * BLOCK + 1 - 16_384, 16_384),
        rel=0.01,
    )
    assert hot.matched == 200
    assert hot.ttft_s == pytest.approx(decode_s([200 * BLOCK + 1]), rel=0.01)


def test_a_second_request_waits_for_the_blocks_of_the_first() -> None:
    work = workload(ask([], tokens=4000, out=20), ask([], tokens=4000), sessions=False)
    first, second = run(work, gpu_blocks=40).served
    assert second.schedule_s == pytest.approx(first.e2e_s)
    assert second.ttft_s == pytest.approx(first.e2e_s + prefill_s(4000), rel=0.01)


# -- a load from a tier ---------------------------------------------------------------------------


def loaded(name: str, blocks: int, **options: object) -> Served:
    """Return a request whose blocks are all in the tier and none in the GPU."""
    cold, hot = run(twice(blocks), name, options=options, prefix_caching=False).served
    assert (hot.matched, hot.loaded, hot.computed_tokens) == (0, blocks, 1)
    assert cold.stored == blocks
    assert hot.compute_s == pytest.approx(decode_s([blocks * BLOCK + 1]), rel=0.01)
    return hot


def test_a_load_from_local_dram_takes_the_copies() -> None:
    hot = loaded("lmcache-local", 128)
    assert hot.read_s == pytest.approx(128 * BLOCK_BYTES / COPY.bandwidth, rel=0.01)
    chunk_s = load_as(LocalCacheProfile, "lmcache-local").lookup_chunk
    assert hot.lookup_s == pytest.approx(64 * chunk_s, rel=0.01)  # two blocks each


@pytest.mark.parametrize("port", [NIC_100, NIC_200], ids=lambda port: port.name)
def test_a_load_over_a_link_takes_the_slower_of_port_and_copy(port: object) -> None:
    """256 blocks of 16 MiB from DRAM behind 200 Gb/s: 4.3 GB at 12.5 GB/s, or at 25."""
    assert hasattr(port, "name")
    assert hasattr(port, "bandwidth")
    hot = loaded("hymcache", 256, device_kind="dram", worker_link=port.name, window_bytes=1 << 30)
    slowest = min(port.bandwidth, NIC_200.bandwidth, COPY.bandwidth)
    last_copy_s = BLOCK_BYTES / COPY.bandwidth + COPY.latency
    expected = 256 * BLOCK_BYTES / slowest + last_copy_s + 2 * (NIC_100.latency + NIC_200.latency)
    assert hot.read_s == pytest.approx(expected, rel=0.01)


def test_a_load_from_ssds_adds_the_first_block() -> None:
    device = load_as(CxlHmProfile, "cxl-hm-prototype")
    hot = loaded("hymcache", 256)
    first_s = device.ssd.read_latency + BLOCK_BYTES / (device.ssd_count * device.ssd.read_bandwidth)
    last_copy_s = BLOCK_BYTES / COPY.bandwidth + COPY.latency
    expected = 256 * BLOCK_BYTES / NIC_100.bandwidth + first_s + last_copy_s
    assert hot.read_s == pytest.approx(expected, rel=0.01)


def test_a_lookup_takes_a_call_of_master_for_every_32_keys() -> None:
    software = load_as(SoftwareProfile, "software-default")
    batch_s = software.control_round_trip + software.lookup_call + 32 * software.lookup_key
    # The node matches the hint meanwhile: only behind the first batch is it waited for.
    hint_s = software.control_round_trip + software.prefetch_issue
    assert loaded("hymcache", 32).lookup_s == pytest.approx(batch_s + hint_s, rel=0.01)
    assert loaded("hymcache", 256).lookup_s == pytest.approx(8 * batch_s, rel=0.01)


# -- hand-over from P to D ------------------------------------------------------------------------

FIVE = 5000  # tokens: 655 MB


def handed_over(work: Workload, spec: LinkHandoverSpec, servers: int = 1) -> tuple[Served, ...]:
    return run(work, handover=spec, prefill_servers=servers, decode_servers=1).served


def kv_bytes(tokens: int) -> int:
    return tokens * BLOCK_BYTES // BLOCK


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        (link(), kv_bytes(FIVE) / 12.5e9),
        (link(prefill_link=NIC_200, decode_link=NIC_100), kv_bytes(FIVE) / 12.5e9),
        (link(prefill_link=NIC_200), kv_bytes(FIVE) / 25e9),
        (link(path=Path.HOST_OVERLAPPED), kv_bytes(FIVE) / 12.5e9),
        (link(path=Path.HOST_SERIAL), kv_bytes(FIVE) * (1 / 12.5e9 + 2 / 25e9)),
    ],
    ids=["slow sender", "slow receiver", "fast ports", "through hosts", "step by step"],
)
def test_a_hand_over_takes_the_slower_port(spec: LinkHandoverSpec, seconds: float) -> None:
    (one,) = handed_over(workload(ask([], tokens=FIVE, out=3)), spec)
    assert one.parts_s["KV write"] == pytest.approx(seconds, rel=0.01)
    first = prefill_s(FIVE) + seconds + decode_s([FIVE])
    assert one.ttft_s == pytest.approx(first, rel=0.01)
    assert one.e2e_s == pytest.approx(first + decode_s([FIVE + 1]) + decode_s([FIVE + 2]), rel=0.01)


def test_four_senders_share_the_port_of_the_decode_server() -> None:
    work = workload(*(ask([], tokens=FIVE) for _ in range(4)), sessions=False)
    served = handed_over(work, link(), servers=4)
    assert {one.server for one in served} == {0, 1, 2, 3}
    took = sorted(one.write_s for one in served)
    # Each sends at 12.5 GB/s at most, all together receive at 25.
    assert took[-1] == pytest.approx(4 * kv_bytes(FIVE) / 25e9, rel=0.01)
    assert took[0] == pytest.approx(kv_bytes(FIVE) / 12.5e9, rel=0.01)


def test_one_sender_shares_its_own_port() -> None:
    work = workload(*(ask([], tokens=FIVE) for _ in range(2)), sessions=False)
    served = handed_over(work, link(prefill_link=replace(NIC_100, bandwidth=1e9)))
    last = max(one.first_token_s for one in served)
    expected = prefill_s(FIVE) + 2 * kv_bytes(FIVE) / 1e9 + decode_s([FIVE])
    assert last == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("bandwidth", [12.5e9, 2e9, 0.5e9])
def test_layer_by_layer_the_network_hides_behind_the_computation(bandwidth: float) -> None:
    """Only the last of 32 layers waits for the end, or what the port has not carried by then."""
    port = replace(NIC_100, bandwidth=bandwidth)
    (one,) = handed_over(
        workload(ask([], tokens=FIVE)), link(prefill_link=port, layerwise=True, layers=32)
    )
    transfer = kv_bytes(FIVE) / bandwidth
    left = max(0.0, transfer * 31 / 32 - prefill_s(FIVE)) + transfer / 32
    assert one.write_s == pytest.approx(left, rel=0.01)


def test_layers_are_not_sent_before_they_are_computed() -> None:
    """The second prompt waits a step; until then its layers are not in the way of the first's."""
    computed = prefill_s(8192)
    port = replace(NIC_100, bandwidth=kv_bytes(8192) / (0.8 * computed))
    work = workload(ask([], tokens=8192), ask([], tokens=8192), sessions=False)
    first, second = handed_over(work, link(prefill_link=port, layerwise=True, layers=32))
    assert first.write_s == pytest.approx(0.8 * computed / 32, rel=0.01)
    assert second.schedule_s == pytest.approx(computed, rel=0.01)
    # Booked when the second began, it is over before that is computed.
    assert second.write_s == pytest.approx(0.8 * computed / 32, rel=0.01)


def test_a_short_wait_for_the_first_chunk_delays_the_layers() -> None:
    """With a port that is never the bottleneck, nothing is there before it was computed."""
    port = replace(NIC_100, bandwidth=1e12)
    spec = link(prefill_link=port, decode_link=port, layerwise=True, layers=32)
    work = workload(ask([], tokens=8192), ask([], tokens=8192), sessions=False)
    result = run(work, handover=spec, decode_servers=1)
    first, second = result.served
    assert second.schedule_s == pytest.approx(prefill_s(8192), rel=0.01)
    assert second.ttft_s == pytest.approx(2 * prefill_s(8192) + decode_s([8192]), rel=0.01)
    assert first.write_s < 0.001


def test_blocks_of_a_prefill_server_are_free_once_the_kv_is_handed_over() -> None:
    """Room for one prompt: the second one is computed while the first one answers."""
    work = workload(ask([], tokens=FIVE, out=500), ask([], tokens=FIVE), sessions=False)
    served = run(work, handover=link(), decode_servers=1, gpu_blocks=100).served
    assert served[0].e2e_s > 3
    assert served[1].ttft_s < 1.5


def test_a_full_decode_server_makes_the_hand_over_wait() -> None:
    work = workload(ask([], tokens=FIVE, out=500), ask([], tokens=FIVE), sessions=False)
    served = run(work, handover=link(), prefill_servers=2, decode_servers=1, gpu_blocks=50).served
    assert served[1].ttft_s > served[0].e2e_s


def test_through_a_tier_both_sides_take_its_memory() -> None:
    memory = load_as(SharedType3Profile, "niagara-2.0")
    tokens = 64 * 512 + 1
    asked = Request(0, "s", 1, 0.0, tokens, 1, tuple(range(64)))
    work = Workload("blocks of 64 MiB", 512, Mode.WHOLE_BLOCKS, (asked,), has_sessions=True)
    options = {"capacity_bytes": 8 << 30}
    (one,) = run(work, "tract", decode_servers=1, options=options, block_tokens=512).served
    assert one.decode_loaded == 64
    assert one.computed_tokens == tokens
    seconds = kv_bytes(64 * 512) / memory.bandwidth
    assert one.parts_s["KV write"] == pytest.approx(seconds, rel=0.01)
    assert one.parts_s["KV read"] == pytest.approx(seconds, rel=0.01)
    assert one.parts_s["KV read"] == one.decode_read_s


def test_a_tier_without_connectors_for_decode_servers_needs_a_link() -> None:
    with pytest.raises(ValueError, match="name a link for the hand-over"):
        run(workload(prompt(0, 2)), "lmcache-local", decode_servers=1)


# -- a request that needs nothing more of the tier gives back what it holds ------------------------


def test_what_a_tier_holds_for_a_request_is_released_before_its_answer() -> None:
    """The blocks of A are all hits; while A answers, B needs the whole cache."""
    blocks = 32
    work = workload(
        prompt(0, blocks),
        prompt(0, blocks, at=LATER_S, out=1000),
        prompt(1, blocks, at=LATER_S + 1.0),
        sessions=False,
    )
    result = run(
        work,
        "lmcache-local",
        options={"capacity_bytes": blocks * BLOCK_BYTES},
        prefix_caching=False,
    )
    assert result.served[1].loaded == blocks
    assert result.served[1].end_s > LATER_S + 5
    assert result.served[2].stored == blocks


# -- a queue --------------------------------------------------------------------------------------


def test_prompts_of_no_token_and_of_one_take_a_step() -> None:
    for tokens in (0, 1):
        (one,) = run(workload(ask([], tokens=tokens))).served
        assert one.ttft_s == pytest.approx(decode_s([1]), rel=0.01)


def test_a_token_a_step_from_each_of_many_answers() -> None:
    work = workload(*(ask([], tokens=64, out=100) for _ in range(64)), sessions=False)
    result = run(work, how=Drive(order=Order.ROUNDS, concurrency=64))
    assert result.token_gap.mean_s == pytest.approx(decode_s([64 + 50] * 64), rel=0.01)
    assert result.token_gap.count == 64 * 99


def test_an_engine_is_named_by_its_budget() -> None:
    assert roofline(budget=17).engine.max_batched_tokens == 17
    assert cluster().roofline.engine.max_batched_tokens == 8192
    assert OPEN.order is Order.OPEN
