"""KV-block traffic without an engine: requests that read their prefix and append blocks, by turn.

What a tier delivers is measured apart from what an engine asks for. In each turn every request
looks its prefix up, reads what is announced, and then stores the new blocks behind it; requests go
on side by side, ``concurrency`` at a time, so reads and writes mix. No GPU computes anything, and a
block that was not delivered is not stored again: the chain ends there.

Units: blocks, bytes at full size, s.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from cxlbench.emu.clock import Clock, JobSet, VirtualClock
from cxlbench.harness.content import BlockContent
from cxlbench.harness.metrics import busy_s
from cxlbench.harness.tiers.tier import Tier, TierMaker, TierSite
from cxlbench.kv.connector import BlockTimes, Connector
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is read and written."""

    requests: int
    blocks_a_turn: int
    turns: int
    concurrency: int
    block_tokens: int = 128
    append_turns: int | None = None
    """Turns that append; later ones only read. None: all."""
    shuffle_seed: int | None = None
    """Shuffles the order of the requests in every turn; None keeps it."""


@dataclass(slots=True)
class TurnTraffic:
    """One turn. Bandwidths are over the time in which at least one block was on its way."""

    turn: int
    asked_blocks: int = 0
    read_blocks: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    read_asked_s: array[float] = field(default_factory=lambda: array("d"))
    read_done_s: array[float] = field(default_factory=lambda: array("d"))
    write_begin_s: array[float] = field(default_factory=lambda: array("d"))
    write_end_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def read_busy_s(self) -> float:
        """Time in which at least one block was being read."""
        return busy_s(np.asarray(self.read_asked_s), np.asarray(self.read_done_s))

    def read_bytes_per_s(self, block_bytes: int) -> float:
        """Return the bandwidth of the turn's reads."""
        busy = self.read_busy_s
        return self.read_blocks * block_bytes / busy if busy else 0.0

    def write_bytes_per_s(self, block_bytes: int) -> float:
        """Return the bandwidth of the turn's writes."""
        busy = busy_s(np.asarray(self.write_begin_s), np.asarray(self.write_end_s))
        return self.stored_blocks * block_bytes / busy if busy else 0.0


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """A finished run."""

    turns: tuple[TurnTraffic, ...]
    duration_s: float
    counters: dict[str, float]
    wrong_blocks: int
    held: dict[str, int]
    pipe_busy_s: dict[str, float]


def run_traffic(
    traffic: Traffic,
    tier: TierMaker,
    site: Callable[[Callable[[BlockTimes], None]], TierSite],
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> TrafficResult:
    """Run ``traffic`` on a tier in virtual time; ``site`` is called with what logs block reads."""
    with VirtualClock() as clock:
        run = _Run(clock, traffic, tier, site, progress)
        return clock.run(run.all())


class _Run:
    def __init__(
        self,
        clock: Clock,
        traffic: Traffic,
        maker: TierMaker,
        site: Callable[[Callable[[BlockTimes], None]], TierSite],
        progress: Callable[[int, int], None],
    ) -> None:
        self.clock = clock
        self.traffic = traffic
        self.wrong = 0
        self._turn = TurnTraffic(0)
        self._progress = progress
        place = site(self._note)
        self.tier: Tier = maker(clock, place)
        self.servers = place.prefill_servers
        self.content = BlockContent(place.block_bytes // 8 * 8, phantom=True, seed=place.seed)
        space = Namespace(
            model="traffic",
            weights_revision="0",
            dtype="2B",
            kv_layout="block",
            block_tokens=traffic.block_tokens,
        )
        length = traffic.blocks_a_turn * traffic.turns
        self.chains = [
            trace_keys(space, range(number * length, (number + 1) * length))
            for number in range(traffic.requests)
        ]
        self.stored = [0] * traffic.requests
        """Leading blocks of each chain that were stored."""

    def _note(self, times: BlockTimes) -> None:
        self._turn.read_asked_s.append(times.asked_s)
        self._turn.read_done_s.append(times.done_s)

    async def all(self) -> TrafficResult:
        """Run every turn, settle, and close."""
        clock, tier, traffic = self.clock, self.tier, self.traffic
        begin_s = clock.now()
        turns = []
        try:
            await tier.start()
            for turn in range(1, traffic.turns + 1):
                self._turn = TurnTraffic(turn, begin_s=clock.now())
                turns.append(self._turn)
                jobs = JobSet(clock)
                queue = iter(self._order(turn))
                for _ in range(traffic.concurrency):
                    jobs.spawn(self._take(queue, turn))
                await jobs.join()
                self._turn.end_s = clock.now()
                self._progress(turn, traffic.turns)
            end_s = clock.now()
            await tier.quiesce()
            await clock.sleep(0.01)
            held = tier.at_rest()
        finally:
            await tier.close()
        return TrafficResult(
            tuple(turns),
            end_s - begin_s,
            dict(tier.counters()),
            self.wrong,
            held,
            {pipe.name: pipe.busy_s for pipe in tier.pipes},
        )

    def _order(self, turn: int) -> list[int]:
        order = list(range(self.traffic.requests))
        if self.traffic.shuffle_seed is not None:
            Random(f"cxlbench/traffic/{self.traffic.shuffle_seed}/{turn}").shuffle(order)
        return order

    async def _take(self, queue: Iterator[int], turn: int) -> None:
        for number in queue:
            await self._request(number, turn)

    async def _request(self, number: int, turn: int) -> None:
        traffic, content = self.traffic, self.content
        connector = self.tier.connector(number % self.servers)
        if connector is None:
            raise ValueError(f"tier {self.tier.name} has no connector to measure")
        request_id = turn * traffic.requests + number
        chain = self.chains[number]
        stored = self.stored[number]
        prefix = chain[:stored]
        try:
            await self._read(connector, request_id, prefix)
            appending = traffic.append_turns is None or turn <= traffic.append_turns
            if appending and stored == (turn - 1) * traffic.blocks_a_turn:
                new = chain[stored : stored + traffic.blocks_a_turn]
                begin_s = self.clock.now()
                ticket = connector.submit_store(request_id, new, [content.make(key) for key in new])
                results = (await ticket.done.wait()).results
                self._turn.write_begin_s.append(begin_s)
                self._turn.write_end_s.append(self.clock.now())
                done = 0
                for result in results:
                    if result not in (KeyResult.STORED, KeyResult.EXISTS):
                        break
                    done += 1
                self._turn.stored_blocks += done
                self._turn.refused_blocks += len(new) - done
                self.stored[number] += done
        finally:
            connector.release(request_id)
            connector.poll()

    async def _read(self, connector: Connector, request_id: int, prefix: Sequence[bytes]) -> None:
        content = self.content
        ticket = connector.submit_lookup(request_id, prefix, content.nbytes)
        found = (await ticket.done.wait()).leading_hits
        self._turn.asked_blocks += len(prefix)
        if not found:
            return
        buffers = [content.empty() for _ in range(found)]
        keys = prefix[:found]
        done = await connector.submit_load(request_id, keys, buffers).done.wait()
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if result.delivered and not content.holds(buffer, key):
                self.wrong += 1
        self._turn.read_blocks += done.leading_hits
