"""What tiers that are models are asked for: requests, offers of blocks, and how both are handled.

A payload is what a buffer held when it was stored: its tag, or a copy of its bytes. What is
delivered is what was stored.

Units: bytes, s, blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from cxlbench.emu.memory import Buffer, PhantomBuffer

Payload: TypeAlias = Hashable
"""What a block holds."""


def payload_of(buffer: Buffer) -> Payload:
    """Return what a buffer holds, for keeping."""
    return buffer.tag if isinstance(buffer, PhantomBuffer) else buffer.tobytes()


def put_payload(buffer: Buffer, payload: Payload) -> None:
    """Deliver what was kept into a buffer."""
    if isinstance(buffer, PhantomBuffer):
        buffer.tag = payload
    else:
        assert isinstance(payload, bytes), f"real bytes are asked for, {payload!r} was stored"
        buffer[:] = np.frombuffer(payload, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How a tier's connectors handle blocks.

    Attributes:
        staging_bytes: host DRAM through which a server's blocks go; None is no staging at all.
        whole_loads: whether a load takes staging for all its blocks at once, as far as there is.
        store_wait_s: how long a store waits for staging; then it ends, its rest refused.
        load_timeout_s: after which a load ends.
        loses_all: whether a load that timed out has nothing, or keeps what has come in time.
        timeout_per_group: whether each group has that time, or the whole load.
        group_blocks: blocks that move as one.
        ends_when_full: whether a store ends at the first block for which there is no space.
        puts_in_background: whether a store ends when its blocks are in host memory, so that the
            GPU's blocks are free, while what ``keep`` does goes on (``take_in`` comes before).
        chunk_blocks: blocks that are kept together or not at all.
    """

    staging_bytes: int | None = 5 << 30
    whole_loads: bool = False
    store_wait_s: float = 10.0
    load_timeout_s: float = 10.0
    loses_all: bool = False
    timeout_per_group: bool = False
    group_blocks: int = 8
    ends_when_full: bool = False
    puts_in_background: bool = False
    chunk_blocks: int = 1

    def blocks_at_once(self, size_bytes: int) -> int:
        """Return how many blocks make a group: whole chunks, where staging holds no more."""
        group, chunk = self.group_blocks, self.chunk_blocks
        if self.staging_bytes is not None:
            group = min(group, self.staging_bytes // size_bytes)
        return max(group // chunk, 1) * chunk


@dataclass(eq=False, slots=True)
class Asked:
    """A request that has been looked up and not been released."""

    server: int
    request_id: int
    chain: tuple[bytes, ...]
    matched: int
    """Leading blocks that the engine has."""
    size_bytes: int
    places: dict[bytes, int] = field(default_factory=dict)
    """The index in ``chain`` of every block that was found."""
    looked_up: bool = False
    released: bool = False
    working: int = 0
    """Loads that still fetch or copy."""
    note: Any = None
    """A tier's own."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of one chain that a server stores."""

    server: int
    keys: Sequence[bytes]
    payloads: Sequence[Payload]
    size_bytes: int
    position: int = 0
    """Of the first one in its chain, as far as the request says."""
    chain: Sequence[bytes] = ()
    """The whole chain; empty where the request does not say."""

    def part(self, begin: int, end: int) -> Offer:
        """Return some of the blocks."""
        keys, payloads = self.keys[begin:end], self.payloads[begin:end]
        at = self.position + begin
        return Offer(self.server, keys, payloads, self.size_bytes, at, self.chain)
