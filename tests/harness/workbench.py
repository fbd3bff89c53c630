"""What the tests of workers and replays share: small workloads and specs, and a scripted tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CmmHProfile,
    CxlHmProfile,
    ExpanderProfile,
    load_as,
)
from cxlbench.emu.clock import Clock
from cxlbench.emu.memory import Buffer, PhantomBuffer
from cxlbench.emu.sync import Signal
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.replay import ReplaySpec
from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.rig import DeviceProfile, RigSpec
from cxlbench.kv.connector import Completion, Ticket, Work
from cxlbench.kv.geometry import model_shape
from cxlbench.kv.results import KeyResult

MIB, GIB = 1 << 20, 1 << 30
BLOCK_TOKENS = 128
SHAPE = model_shape("Llama-3.1-8B")
BLOCK_BYTES = SHAPE.block_bytes(BLOCK_TOKENS)
DEVICES = ("cxl-hm", "cmm-h", "dram")


def engine(**overrides: str) -> EngineModel:
    """Return an 8B model on an A100, or on what ``overrides`` make of it."""
    return EngineModel(SHAPE, load_as(AcceleratorProfile, "a100-80g", overrides=overrides))


def ask(
    blocks: Sequence[int],
    *,
    tokens: int | None = None,
    out: int = 1,
    session: str = "s",
    turn: int = 1,
    at: float = 0.0,
    think: float = 0.0,
    after: int | None = None,
) -> Request:
    """Return a request (renumbered by ``workload``); one token more than its blocks by default."""
    length = len(blocks) * BLOCK_TOKENS + 1 if tokens is None else tokens
    return Request(0, session, turn, at, length, out, tuple(blocks), think, after)


def workload(*asks: Request, sessions: bool = True) -> Workload:
    """Return a workload of these requests, in this order."""
    numbered = tuple(
        dataclasses.replace(request, request_id=number) for number, request in enumerate(asks)
    )
    return Workload("made up", BLOCK_TOKENS, Mode.WHOLE_BLOCKS, numbered, has_sessions=sessions)


def chat(
    *, sessions: int = 8, turns: int = 4, blocks: int = 4, think_s: float = 0.2, seed: int = 1
) -> Workload:
    """Return conversations that grow by ``blocks`` blocks a turn."""
    return generate(
        GeneratorKnobs(
            sessions=sessions,
            turns=turns,
            shared_system_tokens=BLOCK_TOKENS,
            first_input_tokens=blocks * BLOCK_TOKENS - 7,
            turn_input_tokens=blocks * BLOCK_TOKENS - 1,
            output_tokens=1,
            think_s=think_s,
            think_stddev_s=think_s / 4,
            session_spread_s=0.1,
            seed=seed,
        ),
        name="chat",
    )


def device(kind: str, dram_bytes: int) -> DeviceProfile:
    """Return a device of a kind with so much DRAM."""
    dram = f"{dram_bytes} B"
    if kind == "cxl-hm":
        return load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"dram_capacity": dram})
    if kind == "cmm-h":
        return load_as(CmmHProfile, "cmm-h-256g", overrides={"dram_capacity": dram})
    return load_as(ExpanderProfile, "remote-dram", overrides={"capacity": dram})


def spec(
    kind: str = "cxl-hm",
    *,
    dram_bytes: int = 2 * GIB,
    capacity_bytes: int | None = 16 * GIB,
    gpu_blocks: int = 4,
    compute: EngineModel | None = None,
    rig: dict[str, Any] | None = None,
    **changes: Any,
) -> ReplaySpec:
    """Return a replay on two workers; ``rig`` and ``changes`` replace fields."""
    if kind == "dram":
        capacity_bytes = None
    rig_spec = RigSpec(
        **{
            "device": device(kind, dram_bytes),
            "block_bytes": BLOCK_BYTES,
            "device_capacity_bytes": capacity_bytes,
            "workers": 2,
            **(rig or {}),
        }
    )
    return ReplaySpec(
        **{
            "rig": rig_spec,
            "engine": compute or engine(),
            "gpu_blocks": gpu_blocks,
            "closed_loop": True,
            **changes,
        }
    )


@dataclass(eq=False)
class ScriptedTier:
    """A connector whose store is a dictionary, which takes note of every call.

    ``answer_store`` and ``deliver`` may change what becomes of a key; ``wait_s`` is how long each
    kind of work takes.
    """

    clock: Clock
    wait_s: dict[Work, float] = field(default_factory=dict)
    blocks: dict[bytes, Any] = field(default_factory=dict)
    answer_store: Callable[[bytes], KeyResult | None] = lambda key: None
    deliver: Callable[[bytes, Buffer], KeyResult | None] = lambda key, buffer: None
    calls: list[tuple[str, int, tuple[bytes, ...], float]] = field(default_factory=list)
    matched: dict[int, int] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Ticket:
        assert request_id not in self.opened
        self.opened.add(request_id)
        self.matched[request_id] = matched
        asked = keys[matched:]

        def look() -> list[KeyResult]:
            hits = 0
            while hits < len(asked) and asked[hits] in self.blocks:
                hits += 1
            return [KeyResult.HIT] * hits + [KeyResult.MISS] * (len(asked) - hits)

        return self._start("lookup", Work.LOOKUP, request_id, keys, look)

    def submit_load(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        assert request_id in self.opened

        def load() -> list[KeyResult]:
            return [self._load(k, b) for k, b in zip(keys, buffers, strict=True)]

        return self._start("load", Work.LOAD, request_id, keys, load)

    def submit_store(
        self, request_id: int, keys: Sequence[bytes], buffers: Sequence[Buffer]
    ) -> Ticket:
        def store() -> list[KeyResult]:
            return [self._store(k, b) for k, b in zip(keys, buffers, strict=True)]

        return self._start("store", Work.STORE, request_id, keys, store)

    def release(self, request_id: int) -> None:
        self.opened.discard(request_id)
        self.calls.append(("release", request_id, (), self.clock.now()))

    def poll(self) -> list[Completion]:
        return []

    def at_rest(self) -> dict[str, int]:
        return {"requests": len(self.opened)}

    async def close(self) -> None:
        pass

    def called(self, what: str) -> list[tuple[int, tuple[bytes, ...]]]:
        """Return request and keys of each call of a kind."""
        return [(request, keys) for name, request, keys, _ in self.calls if name == what]

    def _load(self, key: bytes, buffer: Buffer) -> KeyResult:
        told = self.deliver(key, buffer)
        if told is not None:
            return told
        if key not in self.blocks:
            return KeyResult.MISS
        put(buffer, self.blocks[key])
        return KeyResult.HIT

    def _store(self, key: bytes, buffer: Buffer) -> KeyResult:
        told = self.answer_store(key)
        if told is not None:
            return told
        if key in self.blocks:
            return KeyResult.EXISTS
        self.blocks[key] = buffer.tag if isinstance(buffer, PhantomBuffer) else buffer.copy()
        return KeyResult.STORED

    def _start(
        self,
        name: str,
        work: Work,
        request_id: int,
        keys: Sequence[bytes],
        act: Callable[[], list[KeyResult]],
    ) -> Ticket:
        ticket = Ticket(request_id, work, Signal(self.clock))
        self.calls.append((name, request_id, tuple(keys), self.clock.now()))

        async def run() -> None:
            if self.wait_s.get(work):
                await self.clock.sleep(self.wait_s[work])
            ticket.done.set(Completion(request_id, work, tuple(act())))

        self.clock.spawn(run())
        return ticket


def put(buffer: Buffer, content: Any) -> None:
    """Write what a tier keeps of a block into a buffer."""
    if isinstance(buffer, PhantomBuffer):
        buffer.tag = content
    else:
        np.copyto(buffer, content)
