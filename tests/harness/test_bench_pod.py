"""``cxlbench bench pod``: figures of all executors, and a verdict on every bar."""

from __future__ import annotations

import pytest

from cxlbench.emu import pod_compile
from cxlbench.emu.flush_instructions import SUPPORT
from cxlbench.harness import bench_pod
from tests.harness.test_cli_bench import verdicts

TINY = {"rounds": 1, "schedules": 2, "accesses": 2_000, "lock_rounds": 20, "slots": 256}


@pytest.fixture(scope="module")
def found():
    return bench_pod.bench_pod(**TINY)


@pytest.fixture
def measured(monkeypatch, found):
    """Hand the command the figures that were measured already."""
    monkeypatch.setenv(pod_compile.CACHE_VARIABLE, str(pod_compile.kernel_folder().parent))
    monkeypatch.setattr(bench_pod, "bench_pod", lambda **_: found)
    monkeypatch.setattr(bench_pod, "MIN_EXPLORED_PER_S", 1)
    monkeypatch.setattr(bench_pod, "MAX_EMULATED_HIT_NS", 1e9)
    monkeypatch.setattr(bench_pod, "MAX_PROBE_NS", 1e12)


def test_every_executor_has_its_figures(found):
    modes = ["emulated", "native"] if SUPPORT.clflush else ["emulated"]
    assert list(dict.fromkeys(one.executor for one in found.accesses)) == modes
    assert [one.executor for one in found.locks] == [*modes, bench_pod.CHARGED]
    assert (found.profile, found.cache_bytes) == ("niagara-2.0", 256 << 10)
    assert [one.executor for one in found.lookups] == modes
    assert found.explored.operations_per_s > 1_000
    assert found.explored.greenlet_switches_per_s > found.explored.operations_per_s
    assert all(one.ns > 0 and one.ratio > 0.01 for one in found.accesses)
    assert all(one.load == 0.5 and one.present_ns > 0 for one in found.lookups)
    assert all(one.hand_over_ns > 0 for one in found.locks)


@pytest.mark.usefixtures("measured")
def test_met_bars_pass_and_strict_is_content(cli):
    ran = cli("bench", "pod", "--strict")
    assert ran.code == 0
    rows = verdicts(ran.out)
    assert rows["explored, cache_traffic: operations/s"] == "pass"
    assert rows["emulated: load that hits, ns"] == "pass"
    assert rows["greenlets: switches/s"] == ""


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        ("MIN_EXPLORED_PER_S", 10**12, "explored, cache_traffic: operations/s"),
        ("MAX_EMULATED_HIT_NS", 0.0, "emulated: store that hits, ns"),
        ("MAX_PROBE_NS", 0.0, "native: 32 present keys, us"),
    ],
)
def test_a_missed_bar_is_an_error_only_if_strict(cli, monkeypatch, name, value, row):
    if row.startswith("native") and not SUPPORT.clflush:
        pytest.skip(SUPPORT.refusal("clflush"))
    monkeypatch.setattr(bench_pod, name, value)
    assert cli("bench", "pod").code == 0
    ran = cli("bench", "pod", "--strict", "--json")
    assert ran.code == 1
    assert ran.document["passed"][row] is False


@pytest.mark.parametrize("words", [{"rounds": 0}, {"slots": 100}, {"accesses": 0}])
def test_a_bench_of_nothing_is_refused(words):
    with pytest.raises(ValueError, match="must be positive"):
        bench_pod.bench_pod(**TINY | words)
