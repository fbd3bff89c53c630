"""``cxlbench policies``: the table, its JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cxlbench.devices.policies import PolicyError
from cxlbench.harness.cli.policies import policies
from cxlbench.harness.traces.own_format import write_workload
from tests.harness.workbench import BLOCK_BYTES, chat


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "chat.jsonl"
    write_workload(chat(sessions=6, turns=4), path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(policies, [str(one) for one in arguments])


def test_it_prints_every_policy_at_every_capacity(trace):
    ran = run(trace, "--capacity", "512MiB", "--capacity", "2GiB")
    assert ran.exit_code == 0
    lines = [
        line.split() for line in ran.output.splitlines() if "MiB" in line[:8] or "GiB" in line[:8]
    ]
    assert [line[2] for line in lines] == ["lru", "fifo", "clock", "sieve", "s3fifo", "opt"] * 2


def test_json_holds_rates_that_make_sense(trace):
    ran = run(trace, "--capacity", "1GiB", "--policy", "lru, opt", "--json")
    found = json.loads(ran.stdout)
    assert found["block_bytes"] == BLOCK_BYTES
    lru, opt = found["policies"]
    assert (lru["policy"], opt["policy"]) == ("lru", "opt")
    assert 0 <= lru["prefix_hit_rate"] <= lru["hit_rate"] <= opt["hit_rate"] <= 1
    assert lru["capacity_blocks"] == (1 << 30) // BLOCK_BYTES


def test_an_unknown_policy_is_refused_with_the_nearest_name(trace):
    ran = run(trace, "--policy", "lruu")
    assert isinstance(ran.exception, PolicyError)
    assert "did you mean lru" in str(ran.exception)
