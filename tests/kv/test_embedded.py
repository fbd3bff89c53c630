"""A tier in a thread of the engine's process: every submission ends, and so does the tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.kv.connector import Completion, Work, held
from cxlbench.kv.embedded import EmbeddedTier, EmbeddedTierError
from cxlbench.kv.results import KeyResult
from cxlbench.kv.shared_tiers import attach, attached, detach
from tests.kv.fake_tier import FakeTier

SIZE = 4096
WAIT_S = 5.0

HIT, MISS, STORED = KeyResult.HIT, KeyResult.MISS, KeyResult.STORED
CANCELLED, ERROR, TIMEOUT = KeyResult.CANCELLED, KeyResult.ERROR, KeyResult.TIMEOUT


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def block(number: int) -> np.ndarray:
    return np.full(SIZE, number, dtype=np.uint8)


def empty(count: int) -> list[np.ndarray]:
    return [np.zeros(SIZE, dtype=np.uint8) for _ in range(count)]


@pytest.fixture
def tier() -> Iterator[EmbeddedTier]:
    tier = EmbeddedTier(FakeTier, name="fake", close_deadline_s=WAIT_S)
    yield tier
    held_after = tier.settle(WAIT_S)
    tier.close()
    assert held_after == {}
    assert tier.refused_calls == 0


def store(tier: EmbeddedTier, *numbers: int) -> Completion:
    request = tier.new_request_id()
    keys, buffers = [key(n) for n in numbers], [block(n) for n in numbers]
    return tier.submit_store(request, keys, buffers).wait(WAIT_S)


def switch(tier: EmbeddedTier, **switches: object) -> None:
    def turn(fake: FakeTier) -> None:
        for name, value in switches.items():
            setattr(fake, name, value)

    tier.ask(turn)


def found(tier: EmbeddedTier, *numbers: int) -> int:
    request = tier.new_request_id()
    try:
        keys = [key(n) for n in numbers]
        return tier.submit_lookup(request, keys, SIZE).wait(WAIT_S).leading_hits
    finally:
        tier.release(request)


def test_a_stored_block_comes_back_in_the_engines_buffer(tier: EmbeddedTier) -> None:
    assert store(tier, 1, 2).results == (STORED, STORED)
    request, buffers = tier.new_request_id(), empty(2)
    lookup = tier.submit_lookup(request, [key(1), key(2), key(3)], SIZE).wait(WAIT_S)
    assert lookup.results == (HIT, HIT, MISS)
    load = tier.submit_load(request, [key(1), key(2)], buffers).wait(WAIT_S)
    tier.release(request)
    assert load.results == (HIT, HIT)
    assert [int(buffer[-1]) for buffer in buffers] == [1, 2]


def test_submitting_waits_for_nothing(tier: EmbeddedTier) -> None:
    switch(tier, hang={Work.LOOKUP})
    request = tier.new_request_id()
    lookup = tier.submit_lookup(request, [key(1)], SIZE)
    assert lookup.completion is None
    with pytest.raises(TimeoutError, match="lookup has not ended"):
        lookup.wait(0.01)
    tier.release(request)
    assert lookup.wait(WAIT_S).results == (CANCELLED,)


def test_stores_of_one_request_each_get_their_own_results(tier: EmbeddedTier) -> None:
    request = tier.new_request_id()
    first = tier.submit_store(request, [key(1), key(2)], [block(1), block(2)])
    second = tier.submit_store(request, [key(2), key(3)], [block(2), block(3)])
    assert first.wait(WAIT_S).results == (STORED, STORED)
    assert second.wait(WAIT_S).results == (KeyResult.EXISTS, STORED)
    tier.release(request)


def test_a_request_that_ends_lets_its_stores_finish(tier: EmbeddedTier) -> None:
    switch(tier, delay_s=0.02)
    request = tier.new_request_id()
    submission = tier.submit_store(request, [key(1)], [block(1)])
    tier.release_after_stores(request)
    assert submission.wait(WAIT_S).results == (STORED,)
    assert tier.settle(WAIT_S) == {}
    assert tier.ask(lambda fake: fake.released) == [request]


def test_release_after_stores_releases_at_once_without_stores(tier: EmbeddedTier) -> None:
    switch(tier, hang={Work.LOOKUP})
    request = tier.new_request_id()
    lookup = tier.submit_lookup(request, [key(1)], SIZE)
    tier.release_after_stores(request)
    assert lookup.wait(WAIT_S).results == (CANCELLED,)


def test_a_call_that_the_tier_refuses_is_an_error_for_every_key() -> None:
    tier = EmbeddedTier(FakeTier)
    switch(tier, refuse={Work.STORE})
    assert store(tier, 1, 2).results == (ERROR, ERROR)
    assert tier.refused_calls == 1
    switch(tier, refuse=set())
    assert store(tier, 1).results == (STORED,)
    tier.close()


def test_a_load_that_reaches_the_tier_after_the_release_of_its_request_delivers_nothing() -> None:
    tier = EmbeddedTier(FakeTier)
    store(tier, 1)
    request, buffers = tier.new_request_id(), empty(1)
    tier.submit_lookup(request, [key(1)], SIZE).wait(WAIT_S)
    tier.release(request)
    load = tier.submit_load(request, [key(1)], buffers).wait(WAIT_S)
    assert load.results == (ERROR,)
    assert tier.settle(WAIT_S) == {}
    tier.close()


@pytest.mark.parametrize("work", [Work.LOOKUP, Work.LOAD, Work.STORE])
def test_work_that_the_tier_never_ends_times_out(work: Work) -> None:
    tier = EmbeddedTier(FakeTier, work_deadline_s=0.05)
    store(tier, 1)
    switch(tier, hang={work})
    request, buffers = tier.new_request_id(), empty(1)
    if work is Work.STORE:
        submission = tier.submit_store(request, [key(2)], [block(2)])
    else:
        submission = tier.submit_lookup(request, [key(1)], SIZE)
    if work is Work.LOAD:
        assert submission.wait(WAIT_S).results == (HIT,)
        submission = tier.submit_load(request, [key(1)], buffers)
    assert submission.wait(WAIT_S).results == (TIMEOUT,)
    assert tier.settle(WAIT_S) == {}
    tier.close()


def test_closing_ends_what_is_open_as_cancelled() -> None:
    tier = EmbeddedTier(FakeTier)
    switch(tier, hang=set(Work))
    request = tier.new_request_id()
    lookup = tier.submit_lookup(request, [key(1), key(2)], SIZE)
    tier.close()
    assert lookup.wait(0).results == (CANCELLED, CANCELLED)


def test_a_closed_tier_answers_at_once_and_stays_closed() -> None:
    tier = EmbeddedTier(FakeTier)
    fake = tier.ask(lambda fake: fake)
    tier.close()
    tier.close()
    assert fake.closed
    assert store(tier, 1).results == (CANCELLED,)
    tier.release(1)
    with pytest.raises(EmbeddedTierError, match="closed"):
        tier.at_rest()


def test_close_ends_within_its_deadline_though_the_tier_hangs() -> None:
    tier = EmbeddedTier(FakeTier, close_deadline_s=0.2)
    switch(tier, hang_close=True, hang=set(Work))
    lookup = tier.submit_lookup(tier.new_request_id(), [key(1)], SIZE)
    tier.close()  # gives the tier half of the deadline, then cancels it
    assert lookup.wait(0).results == (CANCELLED,)
    assert not any(thread.name == "cxlbench-tier" for thread in threading.enumerate())


def test_close_leaves_a_thread_that_cannot_be_stopped_and_says_so() -> None:
    tier = EmbeddedTier(FakeTier, close_deadline_s=0.1)
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(FakeTier):
        def submit_lookup(self, *_args: object, **_options: object) -> object:  # type: ignore[override]
            entered.set()
            go_on.wait(WAIT_S)
            raise ValueError("too late")

    tier.ask(lambda fake: setattr(fake, "__class__", Stuck))
    lookup = tier.submit_lookup(1, [key(1)], SIZE)
    assert entered.wait(WAIT_S)
    with pytest.raises(EmbeddedTierError, match="left behind"):
        tier.close()
    assert lookup.wait(0).results == (CANCELLED,)
    go_on.set()
    tier._thread.join(WAIT_S)


def test_a_tier_that_cannot_be_built_says_why() -> None:
    def build(_clock: object) -> FakeTier:
        raise ValueError("no such device")

    with pytest.raises(EmbeddedTierError, match="no such device"):
        EmbeddedTier(build)


def test_a_tier_that_is_not_built_in_time_is_refused_and_closed_when_it_comes() -> None:
    go_on, made = threading.Event(), []

    def build(clock: object) -> FakeTier:
        go_on.wait(WAIT_S)
        made.append(FakeTier(clock))  # type: ignore[arg-type]
        return made[0]

    with pytest.raises(EmbeddedTierError, match="not built within"):
        EmbeddedTier(build, name="slow", start_deadline_s=0.05)
    thread = next(t for t in threading.enumerate() if t.name == "cxlbench-slow")
    go_on.set()
    thread.join(WAIT_S)
    assert made[0].closed


def test_calls_from_several_threads_all_end(tier: EmbeddedTier) -> None:
    results: list[Completion] = []

    def work(base: int) -> None:
        for number in range(base, base + 20):
            done = store(tier, number)
            results.append(done)

    threads = [threading.Thread(target=work, args=(20 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [r.results for r in results] == [(STORED,)] * 80
    assert found(tier, *range(80)) == 80


def test_a_caller_with_a_clock_of_its_own_does_not_lend_the_tier_its_time(
    tier: EmbeddedTier,
) -> None:
    times: list[float] = []

    async def call() -> None:
        clock.advance(1e6)
        tier.ask(lambda fake: times.append(fake.clock.now() - fake.clock.real()))

    with WallClock() as clock:
        clock.run(call())
    assert times[0] < 1.0


def test_completions_do_not_pile_up_in_the_tier(tier: EmbeddedTier) -> None:
    for number in range(5):
        store(tier, number)
    assert tier.ask(lambda fake: len(fake.poll())) == 0


def test_at_rest_counts_what_is_open(tier: EmbeddedTier) -> None:
    switch(tier, hang={Work.LOOKUP})
    request = tier.new_request_id()
    tier.submit_lookup(request, [key(1)], SIZE)
    counts = tier.at_rest()
    assert (counts["requests"], counts["tickets"], counts["open submissions"]) == (1, 1, 1)
    assert tier.settle(0.01) != {}
    tier.release(request)


def test_settle_returns_nothing_only_when_nothing_is_held(tier: EmbeddedTier) -> None:
    switch(tier, delay_s=0.02)
    tier.submit_store(1, [key(1)], [block(1)])
    assert tier.settle(WAIT_S) == {}
    assert tier.ask(held) == {}


# -- one tier for several connector objects -------------------------------------------------------


def test_attaching_twice_gives_the_same_tier_and_the_last_detach_closes_it() -> None:
    first = attach("one", {"a": 1}, FakeTier)
    second = attach("one", {"a": 1}, FakeTier)
    assert first is second
    assert attached() == {"one": 2}
    fake = first.ask(lambda fake: fake)
    detach("one")
    assert not fake.closed
    detach("one")
    assert fake.closed
    assert attached() == {}


def test_attaching_with_other_settings_is_refused() -> None:
    attach("one", {"a": 1}, FakeTier)
    with pytest.raises(EmbeddedTierError, match=r"\{'a': 1\}.*\{'a': 2\}"):
        attach("one", {"a": 2}, FakeTier)
    detach("one")
    assert attached() == {}


def test_a_tier_that_cannot_be_built_is_not_kept() -> None:
    def build(_clock: object) -> FakeTier:
        raise ValueError("no such device")

    with pytest.raises(EmbeddedTierError, match="no such device"):
        attach("one", {}, build)
    assert attached() == {}


def test_detaching_from_nothing_is_refused() -> None:
    with pytest.raises(EmbeddedTierError, match="nobody is attached"):
        detach("one")
