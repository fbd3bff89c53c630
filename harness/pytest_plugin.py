"""pytest fixtures for users' own tests: an emulated CXL-HM with HyMCache on it, and fault plans.

``cxl_hm`` makes tiers (``small_tier.SmallTier``) and, when the test is over, fails it if anything
is still held in one of them: slots, tokens, leases, buffer bytes. ``fault_plan`` makes plans whose
seed is drawn from the test's own name, so that a test fails the same way every time.

pytest loads this file in every run of a project that has cxlbench installed: it imports nothing
until a fixture is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cxlbench.emu.faults import FaultPlan, FaultRule
    from cxlbench.harness.small_tier import SmallTier


@pytest.fixture
def cxl_hm() -> Iterator[Callable[..., SmallTier]]:
    """Make emulated CXL-HM tiers; the options are those of ``SmallTier``."""
    from cxlbench.harness.small_tier import SmallTier

    class Watched(SmallTier):
        """A tier that tells what it held when it was closed, also if the test closes it."""

        def close(self) -> None:
            if self.closed:
                return
            try:
                held = self.at_rest()
            finally:
                super().close()
            leaks.extend(f"tier {made.index(self)}: {name} {n}" for name, n in held.items())

    made: list[Watched] = []
    leaks: list[str] = []

    def make(**options: Any) -> SmallTier:
        tier = Watched(**options)
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()
    if leaks:
        pytest.fail("still held at the end of the test: " + ", ".join(leaks), pytrace=False)


@pytest.fixture
def fault_plan(request: pytest.FixtureRequest) -> Callable[..., FaultPlan]:
    """Make fault plans: ``fault_plan({"point": "ssd.read", "kind": "corrupt"}, seed=3)``.

    A rule is a ``FaultRule`` or a mapping with its fields. Without a seed it is drawn from the
    test's name.
    """
    from cxlbench.emu.faults import FaultPlan, FaultRule

    def make(*rules: FaultRule | Mapping[str, Any], seed: int | None = None) -> FaultPlan:
        if seed is None:
            digest = hashlib.sha256(request.node.nodeid.encode()).digest()
            seed = int.from_bytes(digest[:4], "little")
        made = [
            rule
            if isinstance(rule, FaultRule)
            else FaultPlan.parse({"fault": [dict(rule)]}).rules[0]
            for rule in rules
        ]
        return FaultPlan(tuple(made), seed)

    return make
