"""The ablations on the pod at quick scale: their balances, and the mechanics they must show."""

from __future__ import annotations

import pytest

from cxlbench.devices.profile import SharedType3Profile, load_as
from cxlbench.experiments import flush_cost, flush_ways, lock_contention, lock_rounds
from cxlbench.harness.experiment import Context, ExperimentError
from tests.experiments.ablation_runs import ON_THE_POD, is_whole, one_row, quick, rows, stops


@pytest.mark.parametrize("name", ON_THE_POD)
def test_everything_comes_out_even_and_every_claim_is_judged(name):
    is_whole(name)


@pytest.mark.parametrize("name", ON_THE_POD)
def test_who_stops_a_run_gets_what_there_is_marked_partial(name):
    stops(name)


def test_a_run_is_the_same_each_time():
    again = flush_cost.EXPERIMENT.run(Context(flush_cost.EXPERIMENT, quick=True, seed=1))
    assert again.rows == quick("flush_cost").rows


# -- flushes -------------------------------------------------------------------------------------


def test_only_a_fence_that_does_not_wait_leaves_old_words():
    for row in rows("flush_cost", table="publication"):
        if row["way"] == flush_ways.POSTED:
            assert row["stale_words"] > 0
        else:
            assert row["stale_words"] == 0


def test_clflush_takes_as_long_as_its_lines():
    """A line is a fill and a flush; the flag is one more."""
    memory = load_as(SharedType3Profile, "niagara-2.0")
    line_s = memory.latency + memory.flush_latency
    for row in rows("flush_cost", table="publication", way=flush_ways.CLFLUSH):
        assert row["publish_s"] == pytest.approx((row["lines"] + 1) * line_s, rel=0.01)


def test_tract_is_sound_by_clflush_and_not_by_posted_flushes():
    assert one_row("flush_cost", table="tract", way=flush_ways.CLFLUSH)["wrong_words"] == 0
    posted = one_row("flush_cost", table="tract", way=flush_ways.POSTED)
    assert posted["wrong_words"] or posted["problems"] or posted["ended"]


def test_a_program_that_flushes_for_ever_is_ended():
    class Memory:
        def clflush(self, off: int) -> None:
            pass

    flushes = flush_ways.Flushes(Memory(), posted=False, most=2)
    flushes.clflush(0)
    flushes.clflush(0)
    with pytest.raises(flush_ways.RunawayError):
        flushes.clflush(0)


def test_slower_flushes_do_not_make_requests_faster():
    times = [row["ttft_mean_s"] for row in rows("flush_cost", table="serving")]
    assert times == sorted(times)


# -- locks ---------------------------------------------------------------------------------------


def test_hand_over_takes_longer_with_more_nodes_and_not_with_more_processes():
    for processes in (1, 4):
        found = rows("lock_contention", processes=processes)
        times = [row["hand_over_s"] for row in sorted(found, key=lambda row: row["nodes"])]
        assert times == sorted(times)
    for nodes in lock_contention.QUICK_NODE_COUNTS:
        one, four = (
            one_row("lock_contention", nodes=nodes, processes=count)["hand_over_s"]
            for count in (1, 4)
        )
        assert four == pytest.approx(one, rel=0.15)


def test_nodes_get_equal_shares_of_a_contended_lock():
    for row in rows("lock_contention"):
        assert row["fairness"] > 0.99
        assert row["most_overtaken"] <= 1


def test_a_free_lock_costs_its_own_flushes_only():
    memory = load_as(SharedType3Profile, "niagara-2.0")
    alone = lock_rounds.contend(memory, nodes=1, processes=1, rounds=10, lines=0, seed=0)
    flush_s = memory.latency + memory.flush_latency
    assert 3 * flush_s < alone.hand_over_s < 20 * flush_s


def test_too_many_lines_are_refused():
    with pytest.raises(ExperimentError, match="at most 64 lines"):
        quick("lock_contention", ("workload.lines", "60"))
