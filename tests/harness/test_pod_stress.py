"""TraCT under load on real processes, as ``cxlbench pod stress`` runs it."""

from __future__ import annotations

import dataclasses

import pytest

from cxlbench.emu import pod_compile
from cxlbench.emu.flush_instructions import SUPPORT
from cxlbench.harness import pod_stress
from cxlbench.harness.pod_stress import run_stress
from cxlbench.tract import fsck

SMALL = {"nodes": 2, "workers": 2, "acquisitions": 400, "lookups": 40}


@pytest.fixture(autouse=True)
def compiled_before(monkeypatch):
    monkeypatch.setenv(pod_compile.CACHE_VARIABLE, str(pod_compile.kernel_folder().parent))


@pytest.mark.parametrize("mode", ["emulated", "native"])
def test_nothing_is_lost_and_nothing_wrong(mode):
    if mode == "native" and not SUPPORT.clflush:
        pytest.skip(SUPPORT.refusal("clflush"))
    found = run_stress(mode=mode, **SMALL)
    assert found.problems == ()
    assert found.passed
    assert found.acquisitions == found.counter >= 400
    assert found.lookups >= 40
    assert found.inserted > 0
    assert 0 < found.ready <= pod_stress.CHUNKS
    assert found.waits_ns == tuple(sorted(found.waits_ns))


def test_the_pod_goes_on_when_nodes_are_killed(cli):
    ran = cli(
        *("pod", "stress", "--nodes", "3", "--workers", "1", "--kills", "2"),
        *("--acquisitions", "1000", "--lookups", "100", "--json"),
    )
    assert ran.code == 0
    document = ran.document
    assert document["kills"] == 2
    assert document["problems"] == []
    assert 0 <= document["counter"] - document["acquisitions"] <= 2 * 200


def test_what_is_wrong_at_the_end_is_told_and_exits_1(cli, monkeypatch):
    def damaged(*arguments, **options):
        return dataclasses.replace(fsck.fsck(*arguments, **options), pins=3, ready=10_000)

    monkeypatch.setattr(pod_stress, "fsck", damaged)
    ran = cli("pod", "stress", "--nodes", "2", "--acquisitions", "1", "--lookups", "1")
    assert ran.code == 1
    assert "WRONG: 3 pins are left" in ran.err
    assert "WRONG: 10000 blocks are READY, " in ran.err
    assert "all of them found" not in ran.out


def test_who_waits_for_ever_is_told(monkeypatch):
    monkeypatch.setattr(pod_stress._Host, "_start_manager", lambda self, node: None)
    found = run_stress(**SMALL, patience_s=2)
    assert not found.passed
    assert "waits for ever" in found.problems[0]


@pytest.mark.parametrize("words", [{"nodes": 1}, {"workers": 0}, {"kills": -1}, {"patience_s": 0}])
def test_a_pod_that_cannot_be_is_refused(words):
    with pytest.raises(ValueError, match="at least 2 nodes"):
        run_stress(**SMALL | words)
