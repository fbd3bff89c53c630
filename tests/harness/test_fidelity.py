"""The verdict on a run's timing, from logs made up to be on time, slow or late."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.fidelity import MIN_TRANSFERS, measure


def pipe(name, due_s, done_s, nbytes=1000):
    """Return what ``measure`` sees of a pipe."""
    due_s, done_s = np.broadcast_arrays(due_s, done_s)
    log = SimpleNamespace(due_s=due_s, done_s=done_s, nbytes=np.full(len(due_s), nbytes))
    return SimpleNamespace(name=name, log=log)


def clock(late_s=(1e-6,) * 100):
    return SimpleNamespace(late_s=array("d", late_s))


def busy(per_second, seconds=5.0):
    """Return when back-to-back transfers are due."""
    return (np.arange(round(per_second * seconds)) + 1) / per_second


def test_a_run_on_time_is_trusted():
    verdict = measure(clock(), [pipe("nic", busy(200), busy(200))])
    assert verdict.trusted
    assert verdict.worst_error == 0
    assert "timing kept" in verdict.line()
    assert "NOT" not in verdict.line()


@pytest.mark.parametrize("per_second", [25, 100, 1500])
def test_a_pipe_that_is_three_percent_slow_is_named(per_second):
    """However many transfers make up the bandwidth."""
    due = busy(per_second)
    verdict = measure(clock(), [pipe("fine", due, due), pipe("worker3.nic", due, due * 1.03)])
    assert not verdict.trusted
    (complaint,) = verdict.complaints
    assert complaint.startswith("worker3.nic off by 2.")
    assert "TIMING NOT KEPT: worker3.nic" in verdict.line()


@pytest.mark.parametrize("per_second", [25, 100, 1500])
def test_a_pipe_that_is_one_percent_slow_is_trusted(per_second):
    due = busy(per_second)
    verdict = measure(clock(), [pipe("nic", due, due * 1.01)])
    assert verdict.trusted
    assert verdict.worst_error == pytest.approx(0.01, abs=0.002)


def test_a_pipe_that_is_fast_is_a_complaint_too():
    due = busy(500)
    assert not measure(clock(), [pipe("nic", due, due / 1.03)]).trusted


def test_a_window_in_which_a_tenth_was_late_is_a_complaint():
    due = busy(100)
    done = np.where((due > 2.9) & (due <= 3.0), 3.2, due)
    assert not measure(clock(), [pipe("nic", due, done)]).trusted


@given(st.floats(0.96, 1.0))
def test_a_short_burst_late_by_less_than_lateness_may_be_is_trusted(start_s):
    """Also where it straddles the edge of a window: that is lateness, and judged as such."""
    due = start_s + (np.arange(40) + 1) * 0.7e-3
    assert measure(clock(), [pipe("nic", due, due + 0.9e-3)]).trusted


def test_windows_with_few_transfers_say_nothing():
    due = np.linspace(0.1, 0.9, MIN_TRANSFERS - 1)
    verdict = measure(clock(), [pipe("nic", due, due + 1)])
    assert verdict.trusted
    assert verdict.pipes[0].windows == 0


@pytest.mark.parametrize("seconds", [0.1, 0.99])
def test_a_run_without_a_whole_second_claims_no_bandwidth(seconds):
    due = busy(500, seconds)
    verdict = measure(clock(), [pipe("nic", due, due)])
    assert verdict.windows == 0
    assert "no whole second of transfers, so no figure of bandwidth" in verdict.line()
    assert "1 s windows" not in verdict.line()
    assert "timing kept, as far as so short a run can tell" in verdict.line()


def test_a_short_run_that_ends_far_too_late_is_a_complaint_all_the_same():
    due = busy(500, 0.5)
    verdict = measure(clock(), [pipe("nic", due, due * 4)])
    assert not verdict.trusted
    assert verdict.windows == 0


def test_only_whole_seconds_count_as_windows():
    due = busy(100, 3.7)
    verdict = measure(clock(), [pipe("nic", due, due)])
    assert verdict.windows == 3
    assert "bandwidth within 0.0% over 3 windows of 1 s" in verdict.line()


def test_transfers_logged_out_of_order_are_no_error():
    due = busy(100)
    shuffled = np.random.default_rng(1).permutation(due)
    assert measure(clock(), [pipe("nic", shuffled, shuffled)]).worst_error == 0


def test_the_peak_is_the_busiest_second():
    due = np.concatenate([busy(100, 1), 1 + busy(300, 1)])
    assert measure(clock(), [pipe("nic", due, due)]).pipes[0].peak_bytes_per_s == pytest.approx(3e5)


def test_a_late_median_is_a_complaint():
    (complaint,) = measure(clock([60e-6] * 100), []).complaints
    assert complaint == "median lateness 60 us (allowed 50 us)"


def test_a_late_p99_is_a_complaint():
    verdict = measure(clock([1e-6] * 95 + [2e-3] * 5), [])
    assert verdict.complaints == ("p99 lateness 2.00 ms (allowed 1 ms)",)
    assert verdict.late_p50_s == pytest.approx(1e-6)


def test_one_late_wake_up_in_a_thousand_is_trusted():
    assert measure(clock([1e-6] * 999 + [0.1]), []).trusted


def test_every_complaint_is_in_the_line():
    due = busy(500)
    verdict = measure(clock([5e-3] * 100), [pipe("nic", due, due * 1.05)])
    assert len(verdict.complaints) == 3
    for complaint in verdict.complaints:
        assert complaint in verdict.line()


def test_a_run_without_deadlines_or_transfers_is_trusted():
    idle = SimpleNamespace(name="idle", log=None)
    empty = pipe("empty", np.zeros(0), np.zeros(0))
    verdict = measure(clock([]), [idle, empty])
    assert verdict.trusted
    assert (verdict.pipes, verdict.deadlines) == ((), 0)


def test_one_window_is_called_a_window():
    due = busy(100, 1.7)
    assert "over 1 window of 1 s" in measure(clock(), [pipe("nic", due, due)]).line()
