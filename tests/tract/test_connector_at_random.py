"""Workers that do anything at any time to a small region: no wrong byte, nothing left behind."""

from __future__ import annotations

import random

import pytest

from cxlbench.kv.results import KeyResult
from tests.tract.rig import KIB, Desk, chain

KEYS = [chain(12, number) for number in range(4)]


def some_desk(rng: random.Random) -> Desk:
    """Return a desk with few chunks, short leases and short deadlines, or long ones."""
    size = rng.choice([4 * KIB, 64 * KIB])
    desk = Desk(
        size=size,
        phantom=rng.random() < 0.3,
        capacity=256 * KIB + rng.choice([3, 6, 12]) * size,
        nodes=rng.choice([1, 2, 3]),
        workers=rng.choice([2, 4, 6]),
        deadline_s=rng.choice([1e-4, 1e-3, 10.0]),
        window_bytes=rng.choice([size, 4 * size, 1 << 27]),
    )
    for connector in desk.rig.connectors:
        connector.lease_s = rng.choice([11.0, 1e-5, 2e-4])
    return desk


async def store(desk: Desk, rng: random.Random, worker: int, keys: list[bytes]) -> None:
    """Store a chain, which may name a key twice; perhaps do not wait for it."""
    odd = rng.choice([keys, keys, keys[::-1], keys + keys[:2]])
    if rng.random() < 0.8:
        await desk.store(odd, worker=worker)
        return
    buffers = [desk.content().make(key) for key in odd]
    desk.rig.connectors[worker].submit_store(0, odd, buffers)
    await desk.clock.sleep(rng.random() * 1e-4)


async def load(desk: Desk, rng: random.Random, worker: int, keys: list[bytes]) -> int:
    """Look up and load, released at any time; return how many blocks arrived."""
    connector, request = desk.rig.connectors[worker], desk.name()
    matched = rng.choice([0, 0, len(keys) // 2])
    lookup = connector.submit_lookup(request, keys, desk.size, matched=matched)
    if rng.random() < 0.15:
        await desk.clock.sleep(rng.random() * 1e-4)
        connector.release(request)
        return 0
    found = await lookup.done.wait()
    if rng.random() < 0.3:
        await desk.clock.sleep(rng.random() * 5e-4)
    part = keys[matched : matched + found.leading_hits]
    buffers = [desk.empty() for _ in part]
    ticket = connector.submit_load(request, part, buffers)
    if rng.random() < 0.2:
        await desk.clock.sleep(rng.random() * 1e-4)
        connector.release(request)
    results = (await ticket.done.wait()).results
    connector.release(request)
    for key, buffer, result in zip(part, buffers, results, strict=True):
        assert result is not KeyResult.MISS, "what was pinned did not verify"
        if result is KeyResult.HIT:
            assert desk.content().holds(buffer, key), "a HIT has other bytes"
    return results.count(KeyResult.HIT)


def work(seed: int) -> int:
    """Let all workers of some desk do anything; return how many blocks arrived."""
    rng = random.Random(seed)
    desk = some_desk(rng)

    async def worker(number: int) -> int:
        arrived = 0
        for _ in range(12):
            keys = rng.choice(KEYS)[: rng.randrange(1, 13)]
            if rng.random() < 0.45:
                await store(desk, rng, number, keys)
            else:
                arrived += await load(desk, rng, number, keys)
        return arrived

    async def test() -> int:
        workers = range(len(desk.rig.connectors))
        arrived = sum(await desk.clock.gather(*[worker(number) for number in workers]))
        await desk.clock.sleep(1.0)
        return arrived

    arrived: int = desk.run(test)
    report = desk.rig.check()
    assert (report.problems, report.pins, report.pending, report.held_locks) == ((), 0, 0, 0)
    return arrived


@pytest.mark.parametrize("seeds", [range(12), range(12, 24)])
def test_no_byte_is_wrong_and_nothing_is_left(seeds: range) -> None:
    assert sum(work(seed) for seed in seeds) > 60
