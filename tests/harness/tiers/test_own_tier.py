"""A tier that a user wrote, as docs/tiers.md shows it, runs like any other."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.user_objects import UserObjectError
from cxlbench.harness.tiers.catalog import CATALOG, tier
from cxlbench.harness.tiers.options import TierOptionError
from cxlbench.harness.tiers.tier import TierSite
from tests.harness.tiers.desk import GIB, Desk, chain
from tests.harness.tiers.test_in_a_cluster import run

DOCS = Path(__file__).parents[3] / "docs/tiers.md"


def code() -> str:
    found = re.search(r"```python\n(# my_tier\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def my_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_tier.py").write_text(code())
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_tier:PoolTier"
    sys.modules.pop("my_tier", None)


def test_the_page_says_sixty_lines_and_means_it() -> None:
    assert len([line for line in code().splitlines() if line.strip()]) <= 60


def test_the_page_lists_every_tier() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(CATALOG)


def test_it_delivers_what_was_stored_within_its_capacity(my_tier: str) -> None:
    desk = Desk(my_tier, capacity_bytes=GIB)

    async def test() -> None:
        first, second = chain(40, 1), chain(40, 2)
        await desk.stored(first, server=0)
        assert await desk.read(first, server=1) == 40
        await desk.stored(second, server=1)
        assert await desk.read(first) == 24
        assert await desk.read(second) == 40

    desk.run(test)


def test_it_serves_a_cluster_with_balanced_books(my_tier: str) -> None:
    result = run(my_tier)
    assert [law for law in result.laws if not law.ok] == []
    assert result.tier == "pool"
    assert result.hit_rate > 0.9


def test_its_settings_are_checked_like_any_others(my_tier: str) -> None:
    with pytest.raises(TierOptionError, match="did you mean capacity_bytes"):
        Desk(my_tier, capacity_byte=1)
    with pytest.raises(TierOptionError, match="holds no block"):
        Desk(my_tier, capacity_bytes=0)


def test_what_is_no_tier_is_told() -> None:
    site = TierSite(prefill_servers=1, block_bytes=4096, block_tokens=128)
    with pytest.raises(UserObjectError, match="tier 'json:nothing': 'json' has no object"):
        tier("json:nothing")
    with VirtualClock() as clock:
        with pytest.raises(UserObjectError, match="which is no tier: it has no connector"):
            tier("collections:deque").maker((), 3)  # type: ignore[arg-type]
        with pytest.raises(UserObjectError, match="failed with TypeError"):
            tier("json:dumps").maker(clock, site)
