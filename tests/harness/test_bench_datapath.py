"""The data-path bench measures what it says, on the right bytes; no time is asserted."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from cxlbench.harness import bench_datapath as bench
from cxlbench.harness.bench_datapath import bench_datapath
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.kv.footer import Verify

SMALL = {"object_bytes": 64 << 10, "objects": 4, "rounds": 2}


@pytest.fixture(scope="module")
def measured():
    return bench_datapath(**SMALL)


def test_every_operation_has_a_figure_and_its_bar(measured):
    assert [(figure.name, figure.bar) for figure in measured.figures] == [
        (bench.WARM, 0.8),
        (bench.COLD, 0.4),
        (bench.WARM_FULL, 0.5),
        (bench.PUT, 0.5),
        (bench.PUT_FLUSH, None),
    ]


def test_a_figure_is_the_time_of_a_copy_over_that_of_the_operation(monkeypatch):
    """Times made up: a copy takes 3 s, in every second round 30 s; so do the operations."""
    took = itertools.cycle((3.0, 30.0, 3.0, 30.0))
    monkeypatch.setattr(bench._Stage, "copy", lambda self: next(took))
    monkeypatch.setattr(bench._Bench, "get", lambda self, staged: 4.0 if staged else 6.0)
    monkeypatch.setattr(bench._Bench, "put_again", lambda self: (5.0, 7.0))
    found = bench_datapath(object_bytes=64 << 10, objects=4, rounds=1)
    # The first round is not counted: 30 s for each copy that is.
    ratios = {figure.name: figure.ratio for figure in found.figures}
    assert ratios == {
        bench.WARM: 30 / 4,
        bench.COLD: 30 / 6,
        bench.WARM_FULL: 30 / 4,
        bench.PUT: 30 / 5,
        bench.PUT_FLUSH: 30 / 12,
    }
    moved = 4 * (64 << 10)
    assert found.copy_bytes_per_s == pytest.approx(moved / 30)
    assert [figure.bytes_per_s for figure in found.figures][:2] == [moved / 4, moved / 6]


def test_memory_is_stated(measured):
    assert measured.data_bytes == 4 * (64 << 10)
    assert measured.peak_resident_bytes > measured.data_bytes


def test_a_figure_without_a_bar_passes_nothing_and_fails_nothing():
    assert bench.Figure("x", 0.1, 1.0, None).passed is None
    assert bench.Figure("x", 0.5, 1.0, 0.5).passed is True
    assert bench.Figure("x", 0.49, 1.0, 0.5).passed is False


def test_progress_reaches_its_end():
    seen = []
    bench_datapath(**SMALL, progress=lambda what, done, total: seen.append((done, total)))
    assert seen[-1] == (12, 12)


def test_warm_gets_are_served_from_staging_and_cold_ones_on_demand():
    stage = bench._Stage(64 << 10, 4, 0)
    for prefetch in (True, False):
        with bench._Bench(stage, verify=Verify.FOOTER, prefetch=prefetch) as running:
            running.get(staged=prefetch)
            counters = running.rig.nodes[0].devices[0].counters
        assert (counters.reads_staged, counters.reads_demand) == ((4, 0) if prefetch else (0, 4))


def test_nothing_is_throttled():
    device = bench.unthrottled_device(1 << 20)
    assert device.port_bandwidth == device.ssd.read_bandwidth == math.inf
    assert device.ssd.read_latency == 0
    assert bench.unthrottled_link().latency == 0
    assert bench.free_software().control_round_trip == 0


def test_wrong_bytes_end_the_bench(monkeypatch):
    deliver = HyMCacheConnector.submit_load

    def spoil(self, request_id, keys, buffers):
        return deliver(self, request_id, keys, [np.zeros_like(buffer) for buffer in buffers])

    monkeypatch.setattr(HyMCacheConnector, "submit_load", spoil)
    with pytest.raises(bench.WrongDataError, match="object 0 came back with other bytes"):
        bench_datapath(**SMALL)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"objects": 0}])
def test_no_rounds_and_no_objects_are_refused(change):
    with pytest.raises(ValueError, match="at least 1 round and 1 object"):
        bench_datapath(**{**SMALL, **change})
