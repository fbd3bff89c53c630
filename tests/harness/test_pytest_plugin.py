"""The fixtures, as a user's own project sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cxlbench.emu.clock import DeadlockError
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.harness.held_clock import HeldVirtualClock, HeldWallClock
from cxlbench.harness.small_tier import SmallTier
from cxlbench.kv.results import KeyResult

pytest_plugins = ["pytester"]

BLOCK = bytes(range(256)) * 256


def outcomes(pytester, text):
    pytester.makepyfile(text)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_a_users_test_stores_and_loads(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(cxl_hm):
            tier = cxl_hm(scale=64)
            assert tier.store("a", b"x" * 10000).value == "stored"
            assert tier.load("a") == b"x" * 10000
            assert tier.load("b") is None
        """,
    )
    result.assert_outcomes(passed=1)


def test_a_users_test_injects_faults(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(cxl_hm, fault_plan):
            plan = fault_plan({"point": "ssd.read", "kind": "corrupt"})
            tier = cxl_hm(faults=plan)
            tier.store("a", b"x" * 8192)
            tier.settle()
            assert tier.load("a") is None
            assert plan.injected == {"ssd.read corrupt": 1}
            assert tier.connector.counters.mismatched == 1
        """,
    )
    result.assert_outcomes(passed=1)


def test_seeds_follow_the_name_of_the_test(pytester):
    result = outcomes(
        pytester,
        """
        import pytest
        seeds = []

        @pytest.mark.parametrize("n", range(3))
        def test_it(fault_plan, n):
            seeds.append(fault_plan().seed)
            assert fault_plan().seed == seeds[-1]
            assert fault_plan(seed=3).seed == 3

        def test_all():
            assert len(set(seeds)) == 3
        """,
    )
    result.assert_outcomes(passed=4)


@pytest.mark.usefixtures("leaks_on_purpose")
def test_a_leak_fails_the_test_that_made_it(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(cxl_hm):
            tier = cxl_hm()
            tier.store("a", b"x" * 10000)
            tier.settle()
            key = next(iter(tier.node.index))
            tier.node.open_stream(77, [key])
        """,
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*still held at the end of the test: *streams 1*"])


def test_fixtures_are_listed_with_what_they_do(pytester):
    result = pytester.runpytest_inprocess("--fixtures", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*cxl_hm*", "*emulated CXL-HM tiers*", "*fault_plan*"])


def test_the_plugin_imports_nothing_until_it_is_used():
    code = (
        "import sys, cxlbench.harness.pytest_plugin\n"
        "print([m for m in ('numpy', 'numba', 'xxhash', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("wall", [False, True], ids=["virtual", "wall"])
def test_blocks_come_back_as_they_were_before_and_after_the_flush(wall):
    with SmallTier(wall=wall) as tier:
        assert tier.store("a", BLOCK) is KeyResult.STORED
        assert tier.store("a", BLOCK) is KeyResult.EXISTS
        assert tier.load("a") == BLOCK
        tier.settle()
        assert tier.device.counters.flushed == 1
        assert tier.load("a") == BLOCK
        assert tier.at_rest() == {}


def test_chains_are_loaded_up_to_the_first_miss():
    blocks = [bytes([number]) * 8192 for number in range(4)]
    with SmallTier() as tier:
        stored = tier.store_chain(["a", "b", "c"], blocks[:3])
        assert stored == [KeyResult.STORED] * 3
        assert tier.load_chain(["a", "b", "c", "d"]) == blocks[:3]
        assert tier.load_chain(["x", "a"]) == []


def test_a_block_larger_than_the_write_buffer_is_refused_at_once():
    with SmallTier() as tier:
        room = tier.device.write_buffer_bytes
        assert tier.store("a", bytes(room + 1)) is KeyResult.ERROR
        assert tier.load("a") is None
        assert tier.at_rest() == {}


def test_the_same_calls_take_the_same_virtual_time():
    times = []
    for _ in range(2):
        with SmallTier(seed=3) as tier:
            tier.store("a", BLOCK)
            tier.settle()
            tier.load("a")
            times.append(tier.clock.now())
    assert times[0] == times[1] > 0


def test_files_are_used_in_real_time_and_removed(tmp_path):
    with SmallTier(wall=True, folder=tmp_path) as tier:
        tier.store("a", BLOCK)
        tier.settle()
        assert len(list(tmp_path.rglob("*.ssd*"))) == 2
        assert tier.load("a") == BLOCK
    assert list(tmp_path.iterdir()) == []


def test_files_in_virtual_time_are_refused(tmp_path):
    with pytest.raises(ValueError, match="files take real time"):
        SmallTier(folder=tmp_path)


def test_a_dead_control_plane_is_an_error_and_a_miss():
    plan = FaultPlan((FaultRule(point="control", kind="down"),))
    with SmallTier(faults=plan) as tier:
        assert tier.store("a", BLOCK) is KeyResult.ERROR
        assert tier.load("a") is None


@pytest.mark.parametrize("kind", [HeldVirtualClock, HeldWallClock])
def test_background_work_goes_on_in_the_next_call(kind):
    steps = []

    async def background(clock):
        for number in range(3):
            steps.append(number)
            await clock.sleep(0.001)

    async def begin(clock):
        clock.spawn(background(clock))
        await clock.sleep(0.0001)

    with kind() as clock:
        clock.drive(begin(clock))
        assert steps == [0]
        clock.drive(begin_nothing(clock))
        assert steps == [0, 1, 2]


async def begin_nothing(clock):
    await clock.sleep(0.01)


@pytest.mark.parametrize("kind", [HeldVirtualClock, HeldWallClock])
def test_a_crash_in_the_background_ends_the_call_with_its_error(kind):
    from cxlbench.emu.clock import JobSet

    async def crash(clock):
        await clock.sleep(0.001)
        raise LookupError("in the background")

    async def wait_for_ever(clock):
        JobSet(clock).spawn(crash(clock))
        await clock.future()

    with kind() as clock, pytest.raises(LookupError, match="in the background"):
        clock.drive(wait_for_ever(clock))


def test_waiting_for_nothing_in_virtual_time_is_a_deadlock():
    async def wait_for_ever(clock):
        await clock.future()

    with HeldVirtualClock() as clock, pytest.raises(DeadlockError):
        clock.drive(wait_for_ever(clock))


@pytest.mark.usefixtures("leaks_on_purpose")
def test_a_tier_that_the_test_closes_is_looked_at_too(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(cxl_hm):
            with cxl_hm() as tier:
                tier.store("a", b"x" * 8192)
                tier.settle()

                async def open_and_forget():
                    node = tier.node.devices[0]
                    await node.open_read(0, 8192)

                tier.drive(open_and_forget())
        """,
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*still held at the end of the test: tier 0: *"])


def test_a_fault_with_an_unknown_key_is_named(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(fault_plan):
            fault_plan({"point": "ssd.read", "kind": "delay", "delay": 1})
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FaultPlanError: *unknown keys ?'delay'?*"])
