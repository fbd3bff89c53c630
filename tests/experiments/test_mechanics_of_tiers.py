"""What follows from mechanics alone, at quick scale: no number of a paper is asked for here."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest

from cxlbench.experiments import fig05, fig10, fig13, fig14, fig15, testbed
from cxlbench.experiments.serving import Runs, System, run_systems
from cxlbench.harness.experiment import Context, Experiment
from cxlbench.harness.serve.run import Simulated, TurnServed

GIB = 1 << 30


def quick(experiment: Experiment, **overrides: object) -> Context:
    """Return a quick point; ``__`` in a name stands for a dot."""
    texts = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    return Context(experiment, quick=True, overrides=texts)


def lost(run: Simulated) -> int:
    """Return the insertions that a tier did not take."""
    return run.stores.failed + run.stores.skipped


def turn(run: Simulated, number: int) -> TurnServed:
    return next(one for one in run.turns if one.turn == number)


# -- a transparent LRU cache in the device ---------------------------------------------------------

DRAM_GIB, REQUESTS, BLOCKS = 256, 64, 32


@cache
def lru() -> dict[int, dict[int, float]]:
    """Return the read bandwidth of each turn, GB/s, by block size; a 32nd of the blocks."""
    found = fig05.EXPERIMENT.run(quick(fig05.EXPERIMENT, shrink=32))
    assert all(check.ok for check in found.checks)
    by_size: dict[int, dict[int, float]] = {}
    for row in found.rows:
        size, number = row["block_MiB"], row["turn"]
        assert isinstance(size, int)
        assert isinstance(number, int)
        if number > 1:
            by_size.setdefault(size, {})[number] = float(row["read_GB_per_s"] or 0)
    return by_size


@pytest.mark.parametrize("size_mib", fig05.SIZES_MIB)
def test_lru_collapses_in_the_first_turn_whose_prefix_outgrows_it(size_mib: int) -> None:
    """A cyclic scan over more than the cache finds nothing of what it left there."""
    written_gib = size_mib * REQUESTS * BLOCKS / 1024
    for number, gbps in lru()[size_mib].items():
        prefix_gib = (number - 1) * written_gib
        # At the edge, what the turn itself writes drives out what it has still to read.
        if prefix_gib + written_gib <= DRAM_GIB:
            assert gbps > 12
        elif prefix_gib >= DRAM_GIB:
            assert gbps < 8


def test_larger_blocks_collapse_in_earlier_turns() -> None:
    first = {
        size: min((number for number, gbps in turns.items() if gbps < 10), default=9)
        for size, turns in lru().items()
    }
    order = [first[size] for size in sorted(first)]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) >= 3


def test_after_the_collapse_the_block_size_makes_no_difference() -> None:
    last = [lru()[size][5] for size in (64, 168)]
    assert last[0] == pytest.approx(last[1], rel=0.1)


# -- conversations on one server: the GPU's prefix cache and local DRAM ----------------------------


@cache
def conversations() -> dict[str, dict[Any, Any]]:
    """Return the rows of each system by turn, with an eighth of conversations and memory."""
    context = quick(fig13.EXPERIMENT, workload__sessions=64, shrink=8)
    found = fig13.EXPERIMENT.run(context)
    assert all(check.ok for check in found.checks)
    rows: dict[str, dict[Any, Any]] = {}
    for row in found.rows:
        rows.setdefault(str(row["system"]), {})[row["turn"]] = row
    return rows


def hit_rates(system: str) -> list[float]:
    """Return the hit rates of turns 2 to 10."""
    return [conversations()[system][number]["hit_rate"] for number in range(2, 11)]


def losing_turn(system: str) -> float:
    rates = hit_rates(system)
    return next((number for number, rate in enumerate(rates, 2) if rate < 0.5), float("inf"))


def test_gpu_and_local_dram_lose_all_their_reuse_with_the_turns() -> None:
    for system in (fig13.GPU, fig13.LMCACHE):
        rates = hit_rates(system)
        assert rates[0] == 1
        assert rates[-1] < 0.05
        assert all(later <= earlier + 0.01 for earlier, later in pairwise(rates))


def test_more_memory_loses_later_and_a_tier_with_room_never() -> None:
    assert 2 < losing_turn(fig13.GPU) < losing_turn(fig13.LMCACHE) < 10
    assert losing_turn(fig13.HYMCACHE) == float("inf")
    assert min(hit_rates(fig13.HYMCACHE)) > 0.95


def test_chains_break_so_that_more_is_lost_than_does_not_fit() -> None:
    """At turn 10 a third of all blocks would fit LMCache's DRAM; what is there is of no use."""
    context = quick(fig13.EXPERIMENT, workload__sessions=64, shrink=8)
    capacity = context.count("lmcache.gib") * GIB // context.count("shrink")
    work = testbed.lmsys_like(context, sessions=64, turns=10, decoded=1)
    block_bytes = testbed.roofline(context).shape.block_bytes(work.block_tokens)
    prefixes = sum(len(r.block_ids) for r in work.requests if r.turn == 10)
    assert capacity / (prefixes * block_bytes) > 0.3
    assert hit_rates(fig13.LMCACHE)[-1] < 0.05


def test_what_is_lost_is_computed_again() -> None:
    rows = conversations()
    served = [rows[system]["all"]["requests_per_s"] for system in (fig13.RECOMPUTE, fig13.HYMCACHE)]
    assert served[1] > 2 * served[0]
    late = [rows[system][10]["ttft_mean_s"] for system in (fig13.RECOMPUTE, fig13.LMCACHE)]
    assert late[0] == pytest.approx(late[1], rel=0.1)


# -- PD-disaggregated: transfer buffers, skipped insertions, capacity ------------------------------

MOONCAKE = {buffer: f"Mooncake, {buffer} GiB" for buffer in (1, 10)}


@cache
def disaggregated(compute: int) -> Runs:
    """Run 32 conversations (a sixteenth of fig. 10's, and of its memory)."""
    context = quick(fig10.EXPERIMENT, workload__sessions=32, shrink=16, ablation__compute=compute)
    capacity = context.count("mooncake.gib") * GIB // context.count("shrink")
    chosen = [one for one in fig10.systems(context) if one.tier in ("lmcache-local", "hymcache")]
    for buffer, label in MOONCAKE.items():
        options = {"capacity_bytes": capacity, "buffer_bytes": buffer * GIB}
        chosen.append(System(label=label, tier="mooncake", options=options))
    runs = run_systems(
        context,
        chosen,
        partial(testbed.pd_cluster, context, "round-robin"),
        fig10.workload_of(context),
        testbed.closed_loop(context),
    )
    for run in runs.by_label.values():
        assert [law for law in run.laws if not law.ok] == []
    return runs


def test_a_small_transfer_buffer_fails_insertions_and_lowers_the_hit_rate() -> None:
    small, large = (disaggregated(4).by_label[label] for label in MOONCAKE.values())
    assert lost(small) > 0.1 * small.stores.stored
    assert lost(large) == 0
    assert small.hit_rate < large.hit_rate - 0.03
    assert small.requests_per_s < large.requests_per_s


def test_faster_prefill_presses_harder_on_a_small_buffer() -> None:
    slow, fast = (disaggregated(compute).by_label[MOONCAKE[1]] for compute in (1, 4))
    assert lost(fast) > lost(slow)


def test_skipped_insertions_recover_in_later_turns() -> None:
    slow, fast = (disaggregated(compute).by_label[fig10.HYMCACHE] for compute in (1, 4))
    assert slow.stores.skipped == 0
    assert fast.stores.skipped > 0
    assert fast.stores.recovered > 0.1 * fast.stores.skipped
    # What was skipped is computed again; it does not stay lost.
    assert turn(fast, 7).hit_rate > 0.6
    assert fast.hit_rate < slow.hit_rate


def test_capacity_beats_speed_as_the_footprint_grows() -> None:
    """While everything fits DRAM it hits as often and is no slower; then the larger tier wins."""
    runs = disaggregated(1).by_label
    large, dram = runs[fig10.HYMCACHE], runs[MOONCAKE[10]]
    assert turn(dram, 4).hit_rate > 0.95
    assert turn(dram, 4).e2e.mean_s < 1.05 * turn(large, 4).e2e.mean_s
    assert turn(dram, 7).hit_rate < 0.7 < turn(large, 7).hit_rate
    assert turn(dram, 7).e2e.mean_s > 1.5 * turn(large, 7).e2e.mean_s


def test_the_same_on_one_server_with_less_dram_and_earlier() -> None:
    rows = conversations()
    large, dram = rows[fig13.HYMCACHE], rows[fig13.LMCACHE]
    assert dram[3]["hit_rate"] > 0.95
    assert dram[3]["e2e_mean_s"] < 1.05 * large[3]["e2e_mean_s"]
    assert dram[9]["hit_rate"] < 0.1 < large[9]["hit_rate"]
    assert dram[9]["e2e_mean_s"] > 2 * large[9]["e2e_mean_s"]


def test_less_capacity_falls_behind_earlier() -> None:
    runs = disaggregated(1).by_label

    def falls(label: str) -> int:
        return min(one.turn for one in runs[label].turns if one.turn > 1 and one.hit_rate < 0.8)

    assert falls(fig10.LMCACHE) < falls(MOONCAKE[10])


# -- Redis -----------------------------------------------------------------------------------------


@cache
def redis(compute: int) -> dict[str, Simulated]:
    context = quick(fig14.EXPERIMENT, ablation__compute=compute)
    chosen = [one for one in fig14.systems(context) if "redis" in one.tier]
    runs = run_systems(
        context,
        chosen,
        partial(testbed.single_node, context),
        fig14.workload_of(context),
        testbed.closed_loop(context),
    ).by_label
    return {entry.tier: runs[entry.label] for entry in chosen}


def test_redis_alone_fails_stores_where_blocks_come_faster_than_it_takes_them() -> None:
    slow, fast = (redis(compute)["redis"] for compute in (1, 4))
    assert lost(fast) > fast.stores.stored > 0
    assert lost(fast) > 2 * lost(slow)


def test_chains_with_a_failed_store_are_broken() -> None:
    """The pair keeps in local DRAM what Redis did not take."""
    alone, pair = redis(4)["redis"], redis(4)["lmcache-redis"]
    for number in range(3, 7):
        assert turn(alone, number).hit_rate < 0.6 < turn(pair, number).hit_rate
    tried = alone.stores.stored + lost(alone)
    assert alone.hit_rate < pair.hit_rate - 0.3
    assert alone.stores.stored / tried < 0.5


# -- prefetch --------------------------------------------------------------------------------------


def micro(context: Context, *, prefetch: bool) -> float:
    """Return the bandwidth of random reads, GB/s."""
    bytes_per_s, check = fig15._micro(context, prefetch=prefetch)
    assert check.ok
    return bytes_per_s / 1e9


def gain(**overrides: str) -> float:
    texts = {f"cxl-hm-prototype.{name}": text for name, text in overrides.items()}
    context = Context(fig15.EXPERIMENT, quick=True, overrides=texts)
    return micro(context, prefetch=True) / micro(context, prefetch=False)


def test_prefetch_makes_random_reads_faster() -> None:
    assert gain() > 1.05


def test_what_prefetch_gains_hangs_on_the_demand_misses_in_flight() -> None:
    assert gain(demand_outstanding="4") < gain() - 0.03
