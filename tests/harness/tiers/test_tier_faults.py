"""What a user's tier does wrong is told with its name and the place; nothing waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cxlbench.emu.clock import Clock
from cxlbench.emu.sync import Signal
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.tiers.plain import Asked, Offer, Payload, PlainTier
from cxlbench.harness.tiers.plain_work import TierFaultError
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.results import KeyResult
from tests.harness.tiers.test_in_a_cluster import LLAMA, workload


class Shelf(PlainTier):
    """Keeps everything; copies to the GPU take the time."""

    name = "shelf"

    def __init__(self, clock: Clock, site: TierSite) -> None:
        super().__init__(clock, site)
        self.kept: dict[bytes, Payload] = {}

    async def find(self, asked: Asked) -> int:
        keys = asked.chain[asked.matched :]
        return next((n for n, key in enumerate(keys) if key not in self.kept), len(keys))

    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        return [self.kept[key] for key in keys]

    async def keep(
        self, offer: Offer, keys: Sequence[bytes], payloads: Sequence[Payload]
    ) -> Sequence[KeyResult]:
        self.kept.update(zip(keys, payloads, strict=True))
        return [KeyResult.STORED] * len(keys)


class FindFails(Shelf):
    async def find(self, asked: Asked) -> int:
        raise RuntimeError("the shelf is locked")


class FetchFails(Shelf):
    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        raise KeyError("gone")


class KeepFails(Shelf):
    async def keep(self, offer: Offer, keys: Sequence[bytes], payloads: Any) -> Any:
        raise OSError("no room")


class FindsTooMuch(Shelf):
    async def find(self, asked: Asked) -> int:
        return len(asked.chain) + 1


class FindsLessThanNothing(Shelf):
    async def find(self, asked: Asked) -> int:
        return -1


class FetchesTooMuch(Shelf):
    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        return [*await super().fetch(asked, keys), "one more"]


class KeepsWithoutResults(Shelf):
    async def keep(self, offer: Offer, keys: Sequence[bytes], payloads: Any) -> Any:
        return [True] * len(keys)


class MixesUp(Shelf):
    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        return [next(iter(self.kept.values())) for _ in keys]


class Waits(Shelf):
    async def keep(self, offer: Offer, keys: Sequence[bytes], payloads: Any) -> Any:
        await Signal[None](self.clock).wait()


class Polls(Shelf):
    async def find(self, asked: Asked) -> int:
        while True:
            await self.clock.sleep(60.0)


class NeverStarts(Shelf):
    async def start(self) -> None:
        await Signal[None](self.clock).wait()


class NeverCloses(Shelf):
    async def close(self) -> None:
        await Signal[None](self.clock).wait()


def run(kind: type[Shelf]) -> Simulated:
    """Serve conversations on a GPU with room for one or two of them."""
    spec = ClusterSpec(roofline=LLAMA, block_tokens=128, gpu_blocks=64)
    return simulate(workload(), spec, kind, Drive(order=Order.ROUNDS, concurrency=2))


def test_a_tier_without_a_fault_is_served() -> None:
    assert [law for law in run(Shelf).laws if not law.ok] == []


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (FindFails, r"FindFails: find\(\) raised RuntimeError: the shelf is locked .*in find\)"),
        (FetchFails, r"FetchFails: fetch\(\) raised KeyError: 'gone' \(test_tier_faults.py, line"),
        (KeepFails, r"KeepFails: keep\(\) raised OSError: no room"),
        (FindsTooMuch, r"FindsTooMuch: find\(\) returned \d+: of \d+ blocks"),
        (FindsLessThanNothing, r"find\(\) returned -1"),
        (FetchesTooMuch, r"FetchesTooMuch: fetch\(\) returned \d+ results for \d+ blocks"),
        (KeepsWithoutResults, r"keep\(\) returned True, which is no KeyResult"),
        (Waits, r"'shelf' never answers: \d+ of \d+ requests .* it holds .*tickets"),
        (Polls, r"'shelf' never answers: \d+ of \d+ requests .*nothing was computed for 2[45] h"),
        (NeverCloses, r"'shelf' never answers: 32 of 32"),
        (NeverStarts, r"'shelf' never answers: 0 of"),
    ],
)
def test_a_fault_is_told(kind: type[Shelf], says: str) -> None:
    with pytest.raises(TierFaultError, match=says):
        run(kind)


def test_wrong_data_breaks_a_law() -> None:
    broken = [law.name for law in run(MixesUp).laws if not law.ok]
    assert broken == ["no wrong block was delivered"]
