"""``SmallTier`` at the corners of its calls."""

from __future__ import annotations

import pytest

from cxlbench.harness.rig import BlockTooLargeError
from cxlbench.harness.rig_checks import RigSpecError
from cxlbench.harness.small_tier import SmallTier
from cxlbench.kv.results import KeyResult


def test_a_key_offered_again_with_another_size_is_still_what_it_was():
    with SmallTier() as tier:
        assert tier.store("a", b"x" * 8192) is KeyResult.STORED
        assert tier.store("a", b"y" * 16384) is not KeyResult.STORED
        assert tier.load("a") == b"x" * 8192


def test_a_store_that_raises_leaves_the_block_readable():
    with SmallTier() as tier:
        tier.store("a", b"x" * 8192)
        with pytest.raises(ValueError, match="B"):
            tier.store("a", b"y" * (1 << 27))
        assert tier.load("a") == b"x" * 8192


def test_an_empty_chain_is_no_error():
    with SmallTier() as tier:
        assert tier.load_chain([]) == []
        assert tier.store_chain([], []) == []


def test_keys_and_blocks_must_match():
    with SmallTier() as tier, pytest.raises(ValueError, match="2 keys for 1 blocks"):
        tier.store_chain(["a", "b"], [b"x"])


@pytest.mark.parametrize(
    "call",
    [
        lambda tier: tier.load("a"),
        lambda tier: tier.store("a", b"x"),
        lambda tier: tier.settle(),
        lambda tier: tier.at_rest(),
    ],
)
def test_a_closed_tier_says_so(call):
    tier = SmallTier()
    tier.close()
    tier.close()
    with pytest.raises(ValueError, match="the tier is closed"):
        call(tier)


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_counts_that_no_tier_has_are_refused(count):
    with pytest.raises(RigSpecError, match=f"devices_per_node={count}"):
        SmallTier(devices_per_node=count)
    if count < 1:
        with pytest.raises(RigSpecError, match=f"nodes={count}"):
            SmallTier(nodes=count)


def test_a_capacity_below_one_block_is_refused():
    with pytest.raises(BlockTooLargeError, match="use a larger capacity"):
        SmallTier(capacity_bytes=16 << 20)


def test_a_folder_may_be_a_text(tmp_path):
    with SmallTier(wall=True, folder=str(tmp_path)) as tier:
        assert list(tmp_path.iterdir())
        tier.store("a", b"x" * 8192)
        tier.settle()
        assert tier.load("a") == b"x" * 8192
