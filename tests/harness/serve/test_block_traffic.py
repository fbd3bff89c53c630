"""KV-block traffic without an engine: who reads what, and what bandwidth is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cxlbench.harness.serve.block_traffic import Traffic, TrafficResult, TurnTraffic, run_traffic
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.harness.tiers.local_dram import LocalDramTier
from cxlbench.harness.tiers.recompute import NoTier
from cxlbench.harness.tiers.tier import TierMaker, TierSite
from cxlbench.kv.connector import BlockTimes
from tests.harness.serve.setups import COPY, NIC_200

MIB, GIB = 1 << 20, 1 << 30
SIZE = 16 * MIB


def traffic(
    tier: TierMaker = HyMCacheTier,
    *,
    options: dict[str, Any] | None = None,
    seen: list[int] | None = None,
    **changes: Any,
) -> TrafficResult:
    """Run eight requests on remote DRAM; ``seen`` gets the request of every block read."""
    asked = {"requests": 8, "blocks_a_turn": 4, "turns": 3, "concurrency": 8, **changes}

    def site(note: Callable[[BlockTimes], None]) -> TierSite:
        def on_block(times: BlockTimes) -> None:
            note(times)
            if seen is not None:
                seen.append(times.request_id)

        return TierSite(
            prefill_servers=1,
            block_bytes=SIZE,
            block_tokens=128,
            options={"device_kind": "dram", "worker_link": "nic-200g"}
            if options is None
            else options,
            on_block=on_block,
        )

    return run_traffic(Traffic(**asked), tier, site)


def test_each_turn_reads_all_that_was_appended_before() -> None:
    result = traffic()
    assert [turn.asked_blocks for turn in result.turns] == [0, 32, 64]
    assert [turn.read_blocks for turn in result.turns] == [0, 32, 64]
    assert [turn.stored_blocks for turn in result.turns] == [32, 32, 32]
    assert not result.wrong_blocks
    assert not result.held


def test_bandwidth_is_that_of_the_narrowest_part() -> None:
    turn = traffic(requests=8, blocks_a_turn=16, turns=2, append_turns=1).turns[1]
    assert turn.read_blocks == 128
    assert turn.read_bytes_per_s(SIZE) == pytest.approx(
        min(NIC_200.bandwidth, COPY.bandwidth), rel=0.05
    )


def test_bandwidth_counts_the_time_in_which_something_moves() -> None:
    turn = TurnTraffic(1)
    turn.read_blocks = turn.stored_blocks = 3
    for begin, end in ((0.0, 1.0), (0.5, 1.5), (10.0, 10.5)):
        turn.read_asked_s.append(begin)
        turn.read_done_s.append(end)
        turn.write_begin_s.append(begin)
        turn.write_end_s.append(end)
    assert turn.read_busy_s == pytest.approx(2.0)
    assert turn.read_bytes_per_s(100) == pytest.approx(150)
    assert turn.write_bytes_per_s(100) == pytest.approx(150)
    assert TurnTraffic(1).read_bytes_per_s(100) == 0


def test_later_turns_may_only_read() -> None:
    result = traffic(turns=4, append_turns=2)
    assert [turn.stored_blocks for turn in result.turns] == [32, 32, 0, 0]
    assert [turn.read_blocks for turn in result.turns] == [0, 32, 64, 64]


def test_a_chain_with_a_refused_block_grows_no_further() -> None:
    small = {"capacity_bytes": 20 * SIZE}
    result = traffic(LocalDramTier, options=small, requests=1, blocks_a_turn=12, turns=4)
    first, second, *rest = result.turns
    assert (first.stored_blocks, first.refused_blocks) == (12, 0)
    # The twelve that are being kept for the request leave room for eight.
    assert (second.stored_blocks, second.refused_blocks) == (8, 4)
    assert [(turn.stored_blocks, turn.refused_blocks) for turn in rest] == [(0, 0), (0, 0)]
    assert not result.held


def test_orders_can_be_shuffled_by_seed() -> None:
    def order(seed: int | None) -> list[int]:
        seen: list[int] = []
        traffic(turns=2, concurrency=1, blocks_a_turn=1, shuffle_seed=seed, seen=seen)
        return seen

    assert order(None) == list(range(16, 24))
    assert sorted(order(1)) == order(None) != order(1)
    assert order(1) == order(1) != order(2)


def test_a_tier_that_keeps_nothing_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="has no connector to measure"):
        traffic(NoTier, options={})
