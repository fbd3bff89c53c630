"""HyMCache inside an engine's process: what the configuration builds, and that it works."""

from __future__ import annotations

import numpy as np
import pytest

from cxlbench.devices.profile import ProfileError
from cxlbench.emu.clock import WallClock
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.embedded_tier import build
from cxlbench.kv.connector import held
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult

KEYS = trace_keys(Namespace("model", "revision", "bfloat16", "layout", 16), range(3))
BLOCK_BYTES = 24 * 1024


def on_a_tier(config, work):
    """Build a tier, run ``work(tier)``, and close it; nothing may be left held."""
    with WallClock() as clock:

        async def all_of_it():
            tier = build(config, clock)
            try:
                result = await work(tier)
                await clock.sleep(0.01)
                assert held(tier) == {}
                return result
            finally:
                await tier.close()

        return clock.run(all_of_it())


async def store_and_load(tier):
    source = [np.random.default_rng(n).integers(0, 256, BLOCK_BYTES, np.uint8) for n in range(3)]
    stored = await tier.submit_store(1, KEYS, source).done.wait()
    assert stored.results == (KeyResult.STORED,) * 3
    await tier.rig.quiesce()  # so that the bytes come from the SSDs
    lookup = await tier.submit_lookup(2, KEYS, BLOCK_BYTES).done.wait()
    assert lookup.leading_hits == 3
    into = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in KEYS]
    loaded = await tier.submit_load(2, KEYS, into).done.wait()
    tier.release(2)
    tier.release(1)
    assert [completion.work.value for completion in tier.poll()] == ["store", "lookup", "load"]
    assert all((a == b).all() for a, b in zip(into, source, strict=True))
    return loaded.results


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"block_bytes": BLOCK_BYTES, "scale": 1024, "capacity": "32 GiB", "seed": 3},
        {"block_bytes": str(BLOCK_BYTES), "scale": "256", "seed": "3"},
    ],
)
def test_real_blocks_come_back_as_they_were_stored(config):
    assert on_a_tier(config, store_and_load) == (KeyResult.HIT,) * 3


def test_backing_files_are_in_the_folder_and_gone_after_close(tmp_path):
    async def work(tier):
        (folder,) = tmp_path.iterdir()
        assert [path.name for path in folder.iterdir()] != []
        return await store_and_load(tier)

    config = {"folder": str(tmp_path), "scale": 1024, "block_bytes": BLOCK_BYTES}
    assert on_a_tier(config, work) == (KeyResult.HIT,) * 3
    assert list(tmp_path.iterdir()) == []


def test_the_capacity_is_that_of_the_full_size_device():
    async def capacity(tier):
        return tier.rig.nodes[0].devices[0].capacity_bytes

    assert on_a_tier({"capacity": "32 GiB", "scale": 256}, capacity) == 128 << 20


def test_the_engines_blocks_are_real_whatever_the_scale():
    async def size(tier):
        return tier.rig.block_bytes

    for scale in (64, 333, 1000.5):
        assert on_a_tier({"scale": scale, "block_bytes": BLOCK_BYTES}, size) == BLOCK_BYTES


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"capcity": "1 GiB"}, r"unknown tier keys \['capcity'\]; known: block_bytes, capacity"),
        ({"capacity": "64"}, "tier key capacity is '64', without a unit"),
        ({"scale": "much"}, "tier key scale is 'much', expected such as 64.0"),
        ({"scale": 0.5}, "scale is 0.5, expected a number of at least 1"),
        ({"block_bytes": "16 MiB"}, "tier key block_bytes is '16 MiB'"),
        ({"seed": None}, "tier key seed is None"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(config, message):
    with WallClock() as clock, pytest.raises(ValueError, match=message):
        build(config, clock)


def test_another_kind_of_device_is_refused():
    with WallClock() as clock, pytest.raises(ProfileError, match="expected 'cxl-hm'"):
        build({"device": "cmm-h-256g"}, clock)


def test_a_folder_that_cannot_be_written_is_named():
    with WallClock() as clock, pytest.raises(HostLimitError, match="/proc/nowhere"):
        build({"folder": "/proc/nowhere"}, clock)
