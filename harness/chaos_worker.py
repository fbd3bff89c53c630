"""One worker of the chaos loop: a verified multi-turn load, told what to do by lines.

``python -m cxlbench.harness.chaos_worker RUN_DIR NUMBER SEED PARENT``. Conversations are shared by
all workers, so several put one key at once and read what others wrote. Every turn looks its chain
up, loads the hits, compares every byte, stores the rest, and now and then ends a request while its
load is under way. Commands come on standard input, one a line (``go``, ``pause``, ``probe N``,
``quit``); answers and findings go to standard output as JSON, one a line.

Units: s of the machine's shared clock, bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxlbench.devices.profile import scaled_bytes
from cxlbench.emu.clock import WallClock
from cxlbench.emu.sync import Signal
from cxlbench.harness.content import BlockContent
from cxlbench.harness.deployment import DeploymentSpec, load_spec
from cxlbench.harness.remote_tier import RemoteTier
from cxlbench.harness.service_main import die_with_parent
from cxlbench.kv.connector import Completion, Ticket, held
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult

NAMESPACE = Namespace("chaos", "1", "uint8", "blocks", 16)
LANES = 2
"""Turns that a worker has under way at once."""
CONVERSATIONS = 24
LONGEST_CHAIN = 24
CANCEL_SHARE = 0.06
THINK_S = 0.01
PROBE_BLOCKS = 2
JOIN_WITHIN_S = 60.0
WORKERS_AT_MOST = 64


@dataclass
class Tally:
    """What a worker has done since it was started."""

    turns: int = 0
    hits: int = 0
    missed: int = 0
    stored: int = 0
    checked_bytes: int = 0


def operation_limit_s(spec: DeploymentSpec, work: str) -> float:
    """Return how long an operation may take before it counts as hanging.

    A load has the deadline. A lookup asks Master and a node, a store makes six calls, each with
    its own limit. Half a second is the host's.
    """
    slack_s = 0.5
    if work == "lookup":
        return 2 * spec.call_timeout_s + slack_s
    if work == "store":
        return max(spec.deadline_s, 6 * spec.call_timeout_s) + slack_s
    return spec.deadline_s + slack_s


class ChaosWorker:
    """Runs the load until it is told to quit."""

    def __init__(self, clock: WallClock, spec: DeploymentSpec, number: int, seed: int) -> None:
        self.clock = clock
        self.spec = spec
        self.number = number
        self.draw = random.Random(f"chaos-{seed}-{number}-{os.getpid()}")
        self.block_bytes = scaled_bytes(spec.block_bytes, spec.scale, what="a KV block") // 8 * 8
        self.content = self._make_content()
        self.tier = RemoteTier(clock, spec, worker=number, copies=False)
        self.tally = Tally()
        self._requests = 0
        self._turns = 0
        self._paused = False
        self._resume: Signal[None] = Signal(clock)
        self._idle: Signal[None] = Signal(clock)
        self._quit: Signal[None] = Signal(clock)
        self._input = b""

    def _make_content(self) -> BlockContent:
        return BlockContent(self.block_bytes, phantom=False, seed=0)

    async def run(self) -> None:
        """Join, say so, and work."""
        await self.tier.join(patience_s=JOIN_WITHIN_S)
        self.clock.loop.add_reader(sys.stdin.fileno(), self._read)
        self._say({"event": "ready"})
        lanes = [self.clock.spawn(self._lane()) for _ in range(LANES)]
        await self._quit.wait()
        for lane in lanes:
            await lane.ended()
        self.clock.loop.remove_reader(sys.stdin.fileno())
        await self.tier.close()

    # -- commands -------------------------------------------------------------------------------

    def _say(self, what: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self._end()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command, _, argument = line.decode().partition(" ")
            if command == "pause":
                self._paused = True
                self._resume, self._idle = Signal(self.clock), Signal(self.clock)
                self.clock.spawn(self._report())
                if not self._turns:
                    self._idle.set(None)
            elif command == "go":
                self._paused = False
                self._resume.set(None)
            elif command == "probe":
                self.clock.spawn(self._probe(int(argument)))
            else:
                self._end()

    def _end(self) -> None:
        self._quit.set(None)
        self._paused = False
        self._resume.set(None)

    async def _report(self) -> None:
        await self._idle.wait()
        self.content = self._make_content()
        give_memory_back()
        self._say(
            {
                "event": "paused",
                "held": held(self.tier.connector),
                "tally": dataclasses.asdict(self.tally),
            }
        )

    # -- load -----------------------------------------------------------------------------------

    async def _lane(self) -> None:
        while not self._quit.is_set():
            if self._paused:
                await self._resume.wait()
                continue
            self._turns += 1
            try:
                await self._turn()
            finally:
                self._turns -= 1
                if self._paused and not self._turns:
                    self._idle.set(None)
            await self.clock.sleep_until(self.clock.real() + self.draw.uniform(0, THINK_S))

    async def _turn(self) -> None:
        conversation = self.draw.randrange(CONVERSATIONS)
        length = self.draw.randint(1, LONGEST_CHAIN)
        base = conversation * 1_000_000
        cancels = self.draw.random() < CANCEL_SHARE
        await self._serve(trace_keys(NAMESPACE, range(base, base + length)), cancels=cancels)
        self.tally.turns += 1

    async def _serve(self, keys: list[bytes], *, cancels: bool = False) -> bool:
        """Look up, load and compare, store; return whether every block is in the tier now."""
        tier, request = self.tier.connector, self._next_request()
        try:
            ticket = tier.submit_lookup(request, keys, self.block_bytes)
            hits = (await self._ended(ticket)).leading_hits
            good = await self._load(request, keys[:hits], cancels=cancels) if hits else 0
            rest = keys[hits:]
            if not rest:
                return good == len(keys)
            buffers = [self.content.make(key) for key in rest]
            done = await self._ended(tier.submit_store(request, rest, buffers))
            for buffer in buffers:
                self.content.recycle(buffer)
            self.tally.stored += done.results.count(KeyResult.STORED)
            kept = (KeyResult.STORED, KeyResult.EXISTS)
            return good == hits and all(result in kept for result in done.results)
        finally:
            tier.release(request)
            tier.poll()

    async def _load(self, request: int, keys: list[bytes], *, cancels: bool) -> int:
        """Load and compare; return how many blocks were delivered."""
        tier = self.tier.connector
        buffers = [self.content.empty() for _ in keys]
        ticket = tier.submit_load(request, keys, buffers)
        if cancels:
            alarm_s = self.clock.real() + self.draw.uniform(0, 0.005)
            self.clock.call_at(alarm_s, tier.release, request)
        done = await self._ended(ticket)
        for key, buffer, result in zip(keys, buffers, done.results, strict=True):
            if result is not KeyResult.HIT:
                self.tally.missed += 1
                continue
            self.tally.hits += 1
            self.tally.checked_bytes += self.block_bytes
            if not self.content.holds(buffer, key):
                self._say({"event": "wrong", "key": key.hex()})
            # Only this one is known to be ours alone: see the contract on buffers.
            self.content.recycle(buffer)
        return done.leading_hits

    async def _ended(self, ticket: Ticket) -> Completion:
        """Wait for a ticket, and tell of one that took too long."""
        begin_s = self.clock.real()
        done = await ticket.done.wait()
        end_s = self.clock.real()
        work = ticket.work.value
        if end_s - begin_s > operation_limit_s(self.spec, work):
            self._say({"event": "slow", "work": work, "begin_s": begin_s, "end_s": end_s})
        self.clock.advance(end_s)  # an engine goes on from what is, not from what should be
        return done

    def _next_request(self) -> int:
        self._requests += 1
        self.clock.advance(self.clock.real())
        return self._requests

    async def _probe(self, number: int) -> None:
        """Store a fresh chain and read it back: whether the tier works again."""
        base = (1 + self.number + WORKERS_AT_MOST * number) * 1_000_000_000
        keys = trace_keys(NAMESPACE, range(base, base + PROBE_BLOCKS))
        works = await self._serve(keys) and await self._serve(keys)
        self._say({"event": "probe", "number": number, "works": works})


def give_memory_back() -> None:
    """Give the system back what is free: what is left is in use, and growth of it is a leak.

    Left out: allocators that know no such thing (other than glibc's).
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main(arguments: list[str]) -> int:
    """Run a worker until it is told to quit, or its parent ends."""
    run_dir, number, seed, parent = arguments
    die_with_parent(int(parent))
    # It works without end, and its memory is watched: no record of every lateness and transfer.
    with WallClock(shared=True, record=False) as clock:
        clock.run(ChaosWorker(clock, load_spec(Path(run_dir)), int(number), int(seed)).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
