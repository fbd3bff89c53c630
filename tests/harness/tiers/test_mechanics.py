"""What decides hits in LMCache's local cache; options, and the catalog."""

from __future__ import annotations

import pytest

from cxlbench.harness.tiers.catalog import CATALOG, UnknownTierError, tier
from cxlbench.harness.tiers.options import TierOptionError
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.desk import BLOCK, GIB, Desk, chain

HIT = KeyResult.HIT
STORED, EXISTS, NO_SPACE = KeyResult.STORED, KeyResult.EXISTS, KeyResult.NO_SPACE


def test_only_whole_chunks_are_kept() -> None:
    desk = Desk("lmcache-local", block_tokens=128)

    async def test() -> None:
        keys = chain(5)
        assert (await desk.store(keys)).results == (STORED,) * 4 + (EXISTS,)
        assert await desk.read(keys) == 4

    desk.run(test)


def test_a_chunk_that_begins_in_the_gpu_is_kept_whole() -> None:
    desk = Desk("lmcache-local", block_tokens=128)

    async def test() -> None:
        keys = chain(8)
        await desk.store(keys[:5])
        await desk.lookup(1, keys, matched=5)
        assert (await desk.store(keys[5:], request=1)).results == (STORED,) * 3
        desk.connector().release(1)
        assert await desk.read(keys) == 8

    desk.run(test)


def test_tails_are_evicted_before_heads() -> None:
    desk = Desk("lmcache-local", capacity_bytes=10 * BLOCK)

    async def test() -> None:
        old = chain(6, 1)
        await desk.stored(old)
        await desk.read(old)
        await desk.stored(chain(7, 2))
        assert await desk.read(old) == 3

    desk.run(test)


def test_a_store_ends_where_everything_is_pinned() -> None:
    desk = Desk("lmcache-local", capacity_bytes=10 * BLOCK)

    async def test() -> None:
        held, new = chain(6, 1), chain(6, 2)
        await desk.stored(held)
        await desk.lookup(1, held)
        assert (await desk.store(new)).results == (STORED,) * 4 + (NO_SPACE,) * 2
        assert (await desk.load(1, held)).results == (HIT,) * 6
        desk.connector().release(1)
        assert await desk.read(new) == 4

    desk.run(test)


def test_servers_share_nothing() -> None:
    desk = Desk("lmcache-local")

    async def test() -> None:
        await desk.stored(chain(4), server=0)
        assert await desk.read(chain(4), server=1) == 0

    desk.run(test)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "much", None])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("lmcache-local", "capacity_bytes"),
        ("mooncake", "get_timeout_s"),
        ("redis", "buffer_bytes"),
        ("tract", "deadline_s"),
    ],
)
def test_a_number_that_is_none_is_refused(name: str, option: str, value: object) -> None:
    with pytest.raises(TierOptionError, match=f"{option}=.*expected a finite number"):
        Desk(name, **{option: value})


def test_the_nearest_names_are_told() -> None:
    with pytest.raises(UnknownTierError, match="did you mean mooncake"):
        tier("moonkake")
    with pytest.raises(UnknownTierError, match="there are recompute, gpu-prefix-cache"):
        tier("xyz")


def test_every_tier_says_what_it_is_and_where_from() -> None:
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert entry.description
        assert entry.source
    assert not CATALOG["recompute"].prefix_caching
    assert CATALOG["gpu-prefix-cache"].prefix_caching


def test_capacity_is_per_server_locally_and_in_all_where_it_is_shared() -> None:
    local = Desk("lmcache-local", capacity_bytes=GIB)
    shared = Desk("mooncake", capacity_bytes=GIB)

    async def fill(desk: Desk) -> int:
        for server in range(2):
            for part in range(7):
                await desk.store(chain(56, server)[part * 8 : part * 8 + 8], server=server)
                await desk.tier.quiesce()
        return sum([await desk.read(chain(56, server), server=server) for server in range(2)])

    assert local.run(lambda: fill(local)) == 112
    assert shared.run(lambda: fill(shared)) < 64
