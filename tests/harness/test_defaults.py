"""Full verification is the default wherever a reader is made; less must be asked for."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from cxlbench.harness import bench_datapath
from cxlbench.harness.rig import RigSpec
from cxlbench.harness.small_tier import SmallTier
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.kv.footer import Verify
from tests.harness.workbench import spec

READERS = {"connector": HyMCacheConnector, "small tier": SmallTier}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_checks_every_byte_unless_told_otherwise(name):
    assert inspect.signature(READERS[name].__init__).parameters["verify"].default is Verify.FULL


def test_a_rig_checks_every_byte_unless_told_otherwise():
    (verify,) = [field for field in dataclasses.fields(RigSpec) if field.name == "verify"]
    assert verify.default is Verify.FULL
    assert spec().rig.verify is Verify.FULL


def test_the_command_line_checks_every_byte_unless_told_otherwise(cli, small_trace):
    def verify(*options):
        document = cli("replay", small_trace, *options, "--json").document
        return document["inputs"]["spec"]["rig"]["verify"]

    assert verify() == Verify.FULL.value
    assert verify("--verify", "footer") == Verify.FOOTER.value


def test_a_small_tier_notices_a_single_wrong_byte_by_default():
    def loads(**options):
        with SmallTier(**options) as tier:
            tier.store("a", bytes(range(256)) * 256)
            tier.settle()
            wrong = tier.device.arena.array
            wrong[wrong == 7] = 8  # in staging, in the write buffer, wherever it is
            backing = tier.device.ssds.backing._arena.array
            backing[: 1 << 16][backing[: 1 << 16] == 7] = 8
            return tier.load("a")

    assert loads() is None
    assert loads(verify=Verify.FOOTER) is not None


def test_only_the_bench_that_says_so_checks_footers_alone():
    named = [name for name in (bench_datapath.WARM, bench_datapath.COLD) if "footer" in name]
    assert len(named) == 2
    assert "every byte" in bench_datapath.WARM_FULL
