"""Every tier of the catalog: its settings are checked, and its virtual time is repeatable."""

from __future__ import annotations

from typing import Any

import pytest

from cxlbench.harness.tiers.options import TierOptionError
from tests.harness.tiers.desk import Desk, chain
from tests.harness.tiers.test_contract import NAMES, SMALL


@pytest.mark.parametrize("name", NAMES)
def test_virtual_time_is_the_same_each_time(name: str) -> None:
    def journal() -> tuple[Any, ...]:
        desk = Desk(name, **SMALL.get(name, {}))

        async def test() -> tuple[Any, ...]:
            chains = [chain(9, number) for number in range(4)]
            await desk.clock.gather(*[desk.store(k, server=n % 2) for n, k in enumerate(chains)])
            await desk.clock.gather(*[desk.read(k, server=n % 2) for n, k in enumerate(chains)])
            return desk.clock.now(), desk.clock.timers, tuple(desk.blocks)

        return tuple(desk.run(test))

    assert journal() == journal()


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_one(name: str) -> None:
    with pytest.raises(TierOptionError, match="did you mean copy_engine"):
        Desk(name, copy_engin="gpu-copy-gen4x16")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("hymcache", "cmm-h")])
def test_a_tier_without_room_for_a_block_is_refused(name: str) -> None:
    option = "local_bytes" if name == "lmcache-redis" else "capacity_bytes"
    nothing = 1 if name == "lmcache-redis" else 0
    with pytest.raises(TierOptionError, match="holds no block of 16777216 B; give it at least"):
        Desk(name, **{option: nothing})
