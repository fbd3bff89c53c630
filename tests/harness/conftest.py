"""What the tests of the harness share: a runner of commands, small workloads, and a promise.

The promise: whatever a test made is at rest at its end. Every rig made in a test must be closed by
then and hold nothing, every ``SmallTier`` must be closed; those of fixtures with a wider scope may
stay open, and must hold nothing between two tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.rig import Rig
from cxlbench.harness.small_tier import SmallTier
from cxlbench.harness.traces import write_workload
from tests.harness.cli_runner import Cli

SMALL = GeneratorKnobs(
    sessions=3,
    turns=3,
    shared_system_tokens=128,
    first_input_tokens=384,
    turn_input_tokens=128,
    output_tokens=16,
    think_s=0.2,
    seed=5,
)


@dataclass
class Made:
    """All rigs and tiers that are not forgotten yet, and which rigs are closed."""

    rigs: list[Rig] = field(default_factory=list)
    tiers: list[SmallTier] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def held(self) -> list[dict[str, int]]:
        """Return what rigs hold; a closed one has given its devices' memory regions back."""
        found = []
        for rig in self.rigs:
            held = rig.at_rest()
            if id(rig) in self.closed:
                held.pop("memory regions", None)
            if held:
                found.append(held)
        return found

    def forget_closed(self) -> None:
        """Drop what is closed."""
        self.rigs = [rig for rig in self.rigs if id(rig) not in self.closed]
        self.tiers = [tier for tier in self.tiers if not tier.closed]
        self.closed.clear()


@pytest.fixture(scope="session", autouse=True)
def made() -> Iterator[Made]:
    """Note every rig and every small tier that is made."""
    made = Made()
    rig_init, tier_init, rig_close = Rig.__init__, SmallTier.__init__, Rig.close

    @functools.wraps(rig_init)
    def init_rig(self, *args, **options):
        rig_init(self, *args, **options)
        made.rigs.append(self)

    @functools.wraps(tier_init)
    def init_tier(self, *args, **options):
        tier_init(self, *args, **options)
        made.tiers.append(self)

    @functools.wraps(rig_close)
    async def close(self):
        try:
            await rig_close(self)
        finally:
            made.closed.add(id(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rig, "__init__", init_rig)
        patch.setattr(Rig, "close", close)
        patch.setattr(SmallTier, "__init__", init_tier)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_held_at_the_end(made: Made, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something held, or a rig or a tier open."""
    rigs, tiers = list(made.rigs), list(made.tiers)
    yield
    held = made.held()
    open_rigs = [rig for rig in made.rigs if rig not in rigs and id(rig) not in made.closed]
    open_tiers = [tier for tier in made.tiers if tier not in tiers and not tier.closed]
    if "leaks_on_purpose" in request.fixturenames:
        made.rigs, made.tiers = rigs, tiers
        return
    made.forget_closed()
    if open_rigs or open_tiers:
        made.rigs, made.tiers = rigs, tiers  # one test's fault, not the next one's
    assert held == []
    assert not open_rigs, "a rig was made and not closed"
    assert not open_tiers, "a small tier was made and not closed"


@pytest.fixture
def leaks_on_purpose() -> None:
    """For a test of what notices leaks."""


@pytest.fixture
def cli(capfd, tmp_path, monkeypatch):
    """Run commands in an empty folder, with no calibration known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Cli(capfd)


@pytest.fixture
def small_trace(tmp_path):
    """Write a small workload of three sessions with three turns."""
    path = tmp_path / "small.jsonl"
    write_workload(generate(SMALL, name="small"), path)
    return path
