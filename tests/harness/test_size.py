"""Sizing: the least that meets the goal, what it costs, and goals that nothing meets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CxlHmProfile,
    ExpanderProfile,
    PricesProfile,
    ServingEngineProfile,
    load_as,
)
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError
from cxlbench.harness.serve.roofline import Roofline, StepWork
from cxlbench.harness.sizing import (
    ENDLESS,
    SizingError,
    burst_bytes,
    reuse_of,
    size_for_hit_rate,
    size_for_ttft,
)
from cxlbench.harness.sizing_parts import GIB, Catalogue, Kind
from cxlbench.harness.sizing_simulation import simulated_size
from cxlbench.harness.ttft_model import Load, TierSpeed, model_ttft
from cxlbench.kv.geometry import model_shape

ROOFLINE = Roofline(
    model_shape("Llama-3.1-8B"),
    load_as(AcceleratorProfile, "a100-80g"),
    load_as(ServingEngineProfile, "vllm-default"),
)
PRICES = load_as(PricesProfile, "prices-hymcache")
CHAT = generate(
    GeneratorKnobs(sessions=16, turns=4, first_input_tokens=4096, turn_input_tokens=2048, think_s=5)
)


def load(workload=CHAT, servers=2, at_once=16):
    return Load(workload=workload, roofline=ROOFLINE, servers=servers, sessions_at_once=at_once)


def catalogue(of, **more):
    return Catalogue(servers=of.servers, block_bytes=of.block_bytes, prices=PRICES, **more)


def shop_for(of, reuse):
    return catalogue(of, burst_bytes=burst_bytes(of, reuse))


def one_prompt(*times, tokens=1281, blocks=10):
    requests = tuple(
        Request(
            request_id=number,
            session="a",
            turn=1,
            arrival_s=arrival_s,
            input_tokens=tokens,
            output_tokens=1,
            block_ids=tuple(range(blocks)),
        )
        for number, arrival_s in enumerate(times)
    )
    return Workload("w", 128, Mode.WHOLE_BLOCKS, requests, has_sessions=False)


# -- the queue model -------------------------------------------------------------------------------


def prefill_s(tokens, context=0):
    work = StepWork()
    work.add_chunk(tokens, context)
    return ROOFLINE.step_s(work)


def test_an_idle_server_takes_the_prefill_alone():
    of = load(one_prompt(0.0, 100.0), servers=1, at_once=None)
    run = model_ttft(of, np.array([0, 0]), ENDLESS)
    assert run.ttft_s.tolist() == pytest.approx([prefill_s(1281)] * 2)


def test_requests_wait_for_those_before_them_on_their_server():
    of = load(one_prompt(0.0, 0.0, 0.0), servers=2, at_once=None)
    run = model_ttft(of, np.array([0, 0, 0]), ENDLESS)
    alone = prefill_s(1281)
    assert run.ttft_s.tolist() == pytest.approx([alone, alone, 2 * alone])
    assert run.queued_s.tolist() == pytest.approx([0, 0, alone])


def test_a_read_takes_its_bytes_over_the_slower_of_tier_and_link():
    of = load(one_prompt(0.0), servers=1, at_once=None)
    nbytes = 10 * of.block_bytes
    for port, link in ((1e9, 5e9), (5e9, 1e9)):
        speed = TierSpeed(port_bytes_per_s=port, link_bytes_per_s=link, latency_s=1e-3)
        run = model_ttft(of, np.array([10]), speed)
        assert run.read_s[0] == pytest.approx(nbytes / 1e9 + 1e-3)
        assert run.ttft_s[0] == pytest.approx(nbytes / 1e9 + 1e-3 + prefill_s(1, 1280))


def test_readers_share_the_tier_and_have_links_of_their_own():
    of = load(one_prompt(0.0, 0.0), servers=2, at_once=None)
    nbytes = 10 * of.block_bytes
    hits = np.array([10, 10])
    tier = model_ttft(of, hits, TierSpeed(port_bytes_per_s=1e9, link_bytes_per_s=1e12))
    link = model_ttft(of, hits, TierSpeed(port_bytes_per_s=1e12, link_bytes_per_s=1e9))
    assert tier.read_s.tolist() == pytest.approx([nbytes / 1e9, 2 * nbytes / 1e9], rel=0.01)
    assert link.read_s.tolist() == pytest.approx([nbytes / 1e9] * 2, rel=0.01)


def test_writes_take_their_share_of_the_ssds():
    speed = TierSpeed(
        port_bytes_per_s=1e12,
        link_bytes_per_s=1e12,
        ssd_read_bytes_per_s=10e9,
        ssd_write_bytes_per_s=5e9,
    )
    assert speed.read_bytes_per_s(0) == 10e9
    assert speed.read_bytes_per_s(2.5e9) == 5e9
    assert speed.read_bytes_per_s(1e12) == pytest.approx(0.5e9)


def test_in_a_closed_loop_a_turn_comes_a_think_time_after_the_answer():
    of = load(at_once=1)
    run = model_ttft(of, np.zeros(len(CHAT.requests), dtype=np.int64), ENDLESS)
    order = [CHAT.requests[number].session for number in run.sequence]
    assert order == [f"s{session}" for session in range(16) for _ in range(4)]
    assert run.queued_s.max() == 0
    assert run.duration_s > 16 * 3 * 5


def test_more_hits_over_a_fast_tier_are_never_slower():
    of = load()
    reuse = reuse_of(of)
    full = reuse.curve.largest_useful
    p95 = [model_ttft(of, reuse.hits(blocks), ENDLESS).p95_s() for blocks in (0, full // 2, full)]
    assert p95[0] >= p95[1] > p95[2]


# -- goals -----------------------------------------------------------------------------------------


def test_the_capacity_for_a_hit_rate_is_the_least_and_the_same_for_all_tiers():
    of = load()
    reuse = reuse_of(of)
    tiers = size_for_hit_rate(of, reuse, catalogue(of), 0.6)
    assert [one.kind for one in tiers] == list(Kind)
    for one in tiers:
        assert one.hit_rate >= 0.6
        assert reuse.curve.hit_rate(one.capacity_blocks - 1) < 0.6
        assert one.capacity_bytes == one.capacity_blocks * of.block_bytes
        assert "capacity" in one.limit


def test_a_time_to_first_token_is_met_and_a_little_less_capacity_misses_it():
    of = load()
    reuse = reuse_of(of)
    slowest = model_ttft(of, reuse.hits(0), ENDLESS).p95_s()
    best = model_ttft(of, reuse.hits(reuse.curve.largest_useful), ENDLESS).p95_s()
    goal_s = (slowest + best) / 2
    shop = catalogue(of)
    for one in size_for_ttft(of, reuse, shop, goal_s):
        assert one.ttft_p95_s <= goal_s
        link = next(link for link in shop.links if link.name == one.link)
        speed = shop.speed(one.parts, link)
        less = model_ttft(of, reuse.hits(one.capacity_blocks - 1), speed)
        assert less.p95_s() > goal_s


def test_a_hit_rate_out_of_reach_says_the_best_possible():
    of = load()
    reuse = reuse_of(of)
    best = f"{reuse.curve.best_hit_rate:.1%}"
    with pytest.raises(SizingError, match=f"best possible is {best}"):
        size_for_hit_rate(of, reuse, catalogue(of), 0.99)


@pytest.mark.parametrize("goal", [0, -1, 1.5, float("nan")])
def test_a_hit_rate_that_is_no_goal_is_refused(goal):
    of = load()
    with pytest.raises(SizingError, match="is no goal"):
        size_for_hit_rate(of, reuse_of(of), catalogue(of), goal)


@pytest.mark.parametrize("goal_s", [0, -1, float("nan")])
def test_a_time_that_is_no_goal_is_refused(goal_s):
    of = load()
    with pytest.raises(SizingError, match="is no goal"):
        size_for_ttft(of, reuse_of(of), catalogue(of), goal_s)


def test_a_time_out_of_reach_says_the_best_possible_and_what_it_takes():
    of = load()
    with pytest.raises(SizingError, match=r"best possible is .* s, .*GPUs"):
        size_for_ttft(of, reuse_of(of), catalogue(of), 0.001)


def test_a_time_that_needs_no_tier_is_refused_with_that_time():
    of = load()
    with pytest.raises(SizingError, match=r"no tier is needed.*zero"):
        size_for_ttft(of, reuse_of(of), catalogue(of), 1000)


def test_a_workload_without_reuse_is_refused():
    of = load(one_prompt(0.0), at_once=None)
    with pytest.raises(SizingError, match="ever reused"):
        reuse_of(of)


def test_a_closed_loop_needs_sessions_and_a_curve_needs_ids():
    with pytest.raises(WorkloadError, match="sessions"):
        reuse_of(load(one_prompt(0.0, 1.0), at_once=2))
    without = dataclasses.replace(one_prompt(0.0, 1.0), has_ids=False)
    with pytest.raises(WorkloadError, match="block ids"):
        reuse_of(load(without, at_once=None))


# -- parts and prices ------------------------------------------------------------------------------


def test_prices_of_parts_add_up_to_the_papers_totals():
    """The prototype of HyMCache's table 1, taken apart and put together again, and 1 TB of DRAM."""
    prototype = load_as(CxlHmProfile, "cxl-hm-prototype")
    dram = load_as(ExpanderProfile, "remote-dram-1tb")
    for end in ("low", "high"):
        price = {
            name: getattr(PRICES, f"{name}_{end}")
            for name in ("controller", "device_dram_per_gib", "ssd_per_gib", "dram_per_gib")
        }
        device = (
            price["controller"]
            + price["device_dram_per_gib"] * prototype.dram_capacity / GIB
            + price["ssd_per_gib"] * prototype.capacity / GIB
        )
        assert device == pytest.approx(getattr(prototype, f"cost_{end}"), rel=0.001)
        tier = price["dram_per_gib"] * dram.capacity / GIB
        assert tier == pytest.approx(getattr(dram, f"cost_{end}"), rel=0.001)


def test_every_price_has_a_source_or_is_marked():
    for name, quantity in PRICES.provenance.items():
        assert quantity.assumption or "HyMCache" in quantity.source, name


def test_a_cxl_hm_tier_has_drives_for_its_capacity_and_dram_for_its_staging():
    of = load()
    shop = catalogue(of)
    link = shop.links_by_speed()[0]
    small = shop.parts(Kind.CXL_HM, GIB, 1, link)
    assert (small.ssds, small.ssd_bytes) == (1, shop.device.ssd.capacity)
    large = shop.parts(Kind.CXL_HM, 7 * 10**12 + 1, 4, link)
    assert large.ssds == 8
    assert large.dram_bytes == 4 * shop.device_dram_bytes(4)
    window = 2 * of.servers * (128 << 20)
    assert window < shop.device_dram_bytes(1) < shop.device.dram_capacity
    many = catalogue(load(servers=200))
    assert many.device_dram_bytes(1) > shop.device.dram_capacity * 0.7


def test_a_write_buffer_holds_the_new_blocks_of_a_request_of_each_server():
    of = load()
    shop = shop_for(of, reuse_of(of))
    first = max(len(r.block_ids) for r in CHAT.requests if r.turn == 1)
    assert 0 < shop.burst_bytes <= first * of.block_bytes
    buffer = shop.device_dram_bytes(1) * shop.device.write_buffer_share
    assert buffer >= of.servers * shop.burst_bytes
    assert shop.device_dram_bytes(2) < shop.device_dram_bytes(1)


def test_a_dram_tier_costs_by_the_gib_and_an_ssd_tier_by_its_controllers():
    of = load()
    shop = catalogue(of)
    link = shop.links_by_speed()[0]

    def cost(kind, nbytes):
        return shop.cost(shop.parts(kind, nbytes, shop.least_nodes(kind, nbytes), link)).low

    assert cost(Kind.DRAM, 64 * GIB) < cost(Kind.CXL_HM, 64 * GIB)
    assert cost(Kind.DRAM, 1800 * GIB) > 2.8 * cost(Kind.CXL_HM, 1800 * GIB)


# -- the real code ---------------------------------------------------------------------------------


def test_the_simulation_finds_a_capacity_that_meets_the_goal():
    small = generate(
        GeneratorKnobs(sessions=4, turns=3, first_input_tokens=2048, turn_input_tokens=512)
    )
    of = load(small, servers=1, at_once=4)
    reuse = reuse_of(of)
    goal = reuse.curve.best_hit_rate * 0.6
    sized = size_for_hit_rate(of, reuse, shop_for(of, reuse), goal)[1]
    found = simulated_size(of, sized, lambda hit_rate, _: hit_rate >= goal, gpu_caches=False)
    assert found.hit_rate >= goal
    assert found.laws_broken == ()
    assert sized.capacity_bytes / 8 < found.capacity_bytes <= 8 * sized.capacity_bytes


def test_a_goal_that_the_simulation_never_meets_is_said_so():
    small = generate(GeneratorKnobs(sessions=2, turns=2))
    of = load(small, servers=1, at_once=2)
    reuse = reuse_of(of)
    sized = size_for_hit_rate(of, reuse, catalogue(of), reuse.curve.best_hit_rate)[1]
    with pytest.raises(SizingError, match="the simulation does not meet the goal"):
        simulated_size(of, sized, lambda hit_rate, ttft_p95_s: False)


# -- the command -----------------------------------------------------------------------------------

CHATTER = "sessions=16,turns=4,first_input_tokens=4096"


def test_the_table_names_goal_capacity_parts_cost_and_limit(cli):
    ran = cli("size", "--generate", CHATTER, "--goal-hit-rate", "60%", "--servers", "2")
    assert ran.code == 0, ran.err
    assert "goal: a hit rate of 60.0%" in ran.out
    for word in ("capacity", "DRAM", "SSDs", "link", "cost, $K", "limited by", "CXL-HM"):
        assert word in ran.out
    assert "assumed, without a source: device_dram_per_gib_low" in ran.out


def test_a_trace_is_sized_as_it_arrives(cli, small_trace):
    ran = cli("size", small_trace, "--goal-hit-rate", "0.3", "--json")
    assert ran.code == 0, ran.err
    document = ran.document
    assert document["goal"] == {"hit_rate": 0.3, "ttft_p95_s": None}
    assert [tier["kind"] for tier in document["tiers"]] == ["DRAM", "CXL-HM"]
    assert all(tier["hit_rate"] >= 0.3 for tier in document["tiers"])
    assert document["simulated"] is None


def test_a_simulation_that_misses_the_goal_is_told_beside_the_models_answer(cli):
    words = ("--generate", "sessions=2,turns=2", "--servers", "1", "--simulate")
    ran = cli("size", *words, "--goal-hit-rate", "0.56")
    assert ran.code == 0, ran.err
    assert "CXL-HM" in ran.out
    assert "NOT MET: the simulation does not meet the goal" in ran.out


def test_a_price_may_be_replaced(cli):
    words = ("size", "--generate", CHATTER, "--goal-hit-rate", "0.6", "--json")
    plain = cli(*words).document["tiers"][0]["cost"]["low"]
    dear = cli(*words, "--set", "dram_per_gib_low=39 USD").document["tiers"][0]["cost"]["low"]
    assert dear > plain


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--goal-hit-rate 0.8", "give a TRACE, or --generate"),
        ("x.jsonl --generate turns=2 --goal-hit-rate 0.8", "give a TRACE, or --generate"),
        ("--generate turns=2", "give one goal"),
        ("--generate turns=2 --goal-hit-rate 0.8 --goal-ttft-p95 2s", "give one goal"),
        ("--generate turns=2 --goal-hit-rate most", "no share"),
        ("--generate turns=2 --goal-ttft-p95 2GB", "expected a time"),
        ("--generate turn=2 --goal-hit-rate 0.1", "did you mean 'turns'"),
        ("--generate turns --goal-hit-rate 0.1", "is not KNOB=VALUE"),
        ("--generate turns=two --goal-hit-rate 0.1", "must be a whole number"),
        ("--generate turns=0 --goal-hit-rate 0.1", "turns=0"),
        ("--generate turns=2 --goal-hit-rate 0", "zero capacity"),
        ("--generate turns=2 --goal-hit-rate 1", "best possible"),
        ("--generate turns=2 --goal-ttft-p95 1ms", "best possible"),
        ("--generate turns=2 --goal-ttft-p95 1000s", "no tier is needed"),
        ("--generate turns=2 --goal-hit-rate 0.1 --limit 3", "would do nothing here"),
        ("--generate turns=2 --goal-hit-rate 0.1 --open-loop --at-once 3", "would do nothing"),
        ("--generate turns=2 --goal-hit-rate 0.1 --model GPT-5", "no model shape"),
        ("--generate turns=2 --goal-hit-rate 0.1 --gpu a6000 --model OPT-30B", "does not fit"),
        ("--generate turns=2 --goal-hit-rate 0.1 --prices pm1743-class", "prices"),
        ("--generate turns=2 --goal-hit-rate 0.1 --set dram=1", "unknown key"),
        ("missing.jsonl --goal-hit-rate 0.1", "missing.jsonl"),
    ],
)
def test_what_cannot_be_sized_is_refused_with_a_reason(cli, words, said):
    ran = cli("size", *words.split())
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err
