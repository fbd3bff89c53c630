"""The GPU's block pool against a model that is too simple to be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlbench.emu.clock import VirtualClock
from cxlbench.harness.serve.gpu_pool import GpuPool, Holding, PromptTooLongError, Users

CAPACITY = 8


def keys_of(path: str) -> list[bytes]:
    """Return the keys of a chain: equal beginnings of paths are equal blocks."""
    return [path[: end + 1].encode() for end in range(len(path))]


class Asking:
    """An ``admit`` that is stepped by hand, as a task would be."""

    def __init__(self, work: Coroutine[Any, Any, Holding]) -> None:
        self.work = work
        self.holding: Holding | None = None
        self.waits_for: asyncio.Future[Any] | None = None
        self.step()

    def step(self) -> None:
        if self.holding is not None or (self.waits_for and not self.waits_for.done()):
            return
        try:
            self.waits_for = self.work.send(None)
        except StopIteration as end:
            self.holding = end.value

    def cancel(self) -> None:
        assert self.waits_for is not None
        self.waits_for.cancel()  # does nothing where the turn has come already
        with pytest.raises(asyncio.CancelledError):
            self.work.throw(asyncio.CancelledError())


class Wanted:
    """One request of the model."""

    def __init__(self, path: str, reusable: int, blocks: int) -> None:
        self.keys = keys_of(path)
        self.reusable, self.blocks = reusable, blocks
        self.keyed = self.own = self.matched = 0


class Model:
    """Lists, searched from end to end."""

    def __init__(self) -> None:
        self.holders: list[Wanted] = []
        self.unused: list[bytes] = []
        self.waiting: list[Wanted] = []

    def users(self, key: bytes) -> int:
        return sum(key in holder.keys[: holder.keyed] for holder in self.holders)

    @property
    def used(self) -> int:
        shared = {key for holder in self.holders for key in holder.keys[: holder.keyed]}
        return len(shared) + sum(holder.own for holder in self.holders)

    def ask(self, wanted: Wanted) -> None:
        self.waiting.append(wanted)
        self.serve()

    def serve(self) -> None:
        while self.waiting and self.take(self.waiting[0]):
            self.holders.append(self.waiting.pop(0))

    def take(self, wanted: Wanted) -> bool:
        shared = []
        for key in wanted.keys[: wanted.reusable]:
            if not self.users(key) and key not in self.unused:
                break
            shared.append(key)
        others = [key for key in self.unused if key not in shared]
        new = wanted.blocks - len(shared)
        free = CAPACITY - self.used - len(self.unused)
        if new > free + len(others):
            return False
        self.unused = others[max(0, new - free) :]
        wanted.keyed = wanted.matched = len(shared)
        wanted.own = new
        return True

    def publish(self, holder: Wanted, upto: int) -> None:
        for key in holder.keys[holder.keyed : upto]:
            if key in self.unused:
                self.unused.remove(key)
            holder.own -= 1
        holder.keyed = max(holder.keyed, upto)
        self.serve()

    def free(self, holder: Wanted) -> None:
        self.holders.remove(holder)
        for key in reversed(holder.keys[: holder.keyed]):
            if not self.users(key):
                self.unused.append(key)
        self.serve()


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.pool = GpuPool(self.clock, CAPACITY, caching=True, name="gpu")
        self.model = Model()
        self.asked: list[tuple[Wanted, Asking]] = []

    def teardown(self) -> None:
        for wanted, asking in list(self.asked):
            if wanted in self.model.waiting:
                self._cancel(wanted, asking)
        for holder in list(self.model.holders):
            self._free(holder)
        assert self.pool.used == 0
        self.clock.close()

    @rule(
        path=st.text("ab", min_size=0, max_size=6), short=st.integers(0, 1), extra=st.integers(0, 2)
    )
    def ask(self, path: str, short: int, extra: int) -> None:
        blocks = len(path) + extra
        wanted = Wanted(path, max(0, len(path) - short), blocks)
        self.model.ask(wanted)
        asking = Asking(self.pool.admit(wanted.keys, wanted.reusable, blocks))
        self.asked.append((wanted, asking))

    def _of(self, wanted: Wanted) -> Asking:
        return next(asking for other, asking in self.asked if other is wanted)

    def _free(self, holder: Wanted) -> None:
        holding = self._of(holder).holding
        assert holding is not None
        self.model.free(holder)
        self.pool.free(holding)
        self._step()

    def _cancel(self, wanted: Wanted, asking: Asking) -> None:
        self.model.waiting.remove(wanted)
        self.model.serve()
        asking.cancel()
        self.asked.remove((wanted, asking))
        self._step()

    def _step(self) -> None:
        for _, asking in self.asked:
            asking.step()

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        upto = data.draw(st.integers(holder.keyed, len(holder.keys)))
        holding = self._of(holder).holding
        assert holding is not None
        self.model.publish(holder, upto)
        self.pool.publish(holding, upto)
        self._step()

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(data.draw(st.sampled_from(self.model.holders)))

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def cancel_who_waits(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(self.model.waiting))
        self._cancel(wanted, self._of(wanted))

    @precondition(lambda self: self.model.holders and self.model.waiting)
    @rule(data=st.data())
    def cancel_in_the_moment_of_the_grant(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.model.holders))
        before = list(self.model.waiting)
        holding = self._of(holder).holding
        assert holding is not None
        self.model.free(holder)
        self.pool.free(holding)
        granted = [wanted for wanted in before if wanted not in self.model.waiting]
        for wanted in granted:  # has its turn, and does not know it yet
            asking = self._of(wanted)
            self.model.free(wanted)
            asking.cancel()
            self.asked.remove((wanted, asking))
        self._step()

    @invariant()
    def the_same_are_served(self) -> None:
        held = [wanted for wanted, asking in self.asked if asking.holding and asking.holding.blocks]
        assert {id(one) for one in held} == {id(one) for one in self.model.holders if one.blocks}
        for wanted in held:
            holding = self._of(wanted).holding
            assert holding is not None
            assert (holding.matched, holding.keyed) == (wanted.matched, wanted.keyed)

    @invariant()
    def every_block_is_free_cached_or_used(self) -> None:
        pool = self.pool
        assert pool.used == self.model.used
        assert list(pool._unused) == self.model.unused
        assert pool._free == CAPACITY - self.model.used - len(self.model.unused)
        assert 0 <= pool.used <= CAPACITY


TestPool = PoolMachine.TestCase


def pool(*, caching: bool = True, blocks: int = CAPACITY) -> tuple[GpuPool, VirtualClock]:
    clock = VirtualClock()
    return GpuPool(clock, blocks, caching=caching, name="gpu0"), clock


def use(path: str, *, keep: bool = False) -> Any:
    """Return a request of ``path`` that computes and publishes all its blocks."""

    async def work(pool: GpuPool) -> Holding:
        keys = keys_of(path)
        holding = await pool.admit(keys, len(keys), len(keys))
        pool.publish(holding, len(keys))
        if not keep:
            pool.free(holding)
        return holding

    return work


def test_a_chain_loses_its_tail_first() -> None:
    one, clock = pool()

    async def test() -> None:
        await use("aaaaa")(one)
        await use("bbbbb")(one)
        assert one.match(keys_of("aaaaa")) == 3
        assert one.match(keys_of("bbbbb")) == 5
        assert one.evicted == 2

    with clock:
        clock.run(test())


def test_what_is_used_again_is_evicted_last() -> None:
    one, clock = pool()

    async def test() -> None:
        for path in ("aaa", "bbb", "aaa", "cccc"):
            await use(path)(one)
        assert one.match(keys_of("aaa")) == 3
        assert one.match(keys_of("bbb")) == 1

    with clock:
        clock.run(test())


def test_who_comes_first_is_served_first_even_if_a_later_one_would_fit() -> None:
    one, clock = pool()
    order: list[str] = []

    async def wait(path: str) -> None:
        holding = await one.admit(keys_of(path), 0, len(path))
        order.append(path)
        await clock.sleep(1)
        one.free(holding)

    async def test() -> None:
        await clock.gather(wait("aaaaaa"), wait("bbbbbb"), wait("c"))

    with clock:
        clock.run(test())
    assert order == ["aaaaaa", "bbbbbb", "c"]


def test_a_waiting_request_that_is_cancelled_lets_the_next_one_in() -> None:
    one, clock = pool()

    async def test() -> None:
        holding = await use("aaaaaa", keep=True)(one)
        large = clock.spawn(use("bbbbbb")(one))
        small = clock.spawn(use("c")(one))
        await clock.sleep(1)
        assert not small.done()
        large.cancel()
        await clock.sleep(1)
        assert small.done()
        one.free(holding)
        assert one.used == 0

    with clock:
        clock.run(test())


def test_without_caching_nothing_is_found_again() -> None:
    one, clock = pool(caching=False)

    async def test() -> None:
        await use("aaaa")(one)
        assert one.match(keys_of("aaaa")) == 0
        assert (await use("aaaa", keep=True)(one)).matched == 0
        assert one.used == 4

    with clock:
        clock.run(test())


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    one, clock = pool()
    with clock, pytest.raises(PromptTooLongError, match="needs 9 blocks, the GPU has room for 8"):
        clock.run(use("a" * 9)(one))


def test_the_last_user_frees_and_no_other() -> None:
    one, clock = pool()

    async def test() -> None:
        users = Users(one, await use("aaa", keep=True)(one))
        users.join()
        users.leave()
        assert one.used == 3
        users.leave()
        assert one.used == 0

    with clock:
        clock.run(test())
