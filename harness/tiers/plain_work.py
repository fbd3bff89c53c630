"""What tiers that are models are asked for: requests, offers of blocks, and how both are handled.

A payload is what a buffer held when it was stored: its tag, or a copy of its bytes. What is
delivered is what was stored.

Units: bytes, s, blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from cxlbench.emu.memory import Buffer, PhantomBuffer
from cxlbench.emu.user_objects import UserObjectError

Payload: TypeAlias = Hashable
"""What a block holds."""

T = TypeVar("T")


class TierFaultError(UserObjectError):
    """A part of a user's tier raised, or answered what cannot be."""


def is_own(tier: object) -> bool:
    """Return whether a tier is a user's: its class is not of this package."""
    return type(tier).__module__.partition(".")[0] != __name__.partition(".")[0]


async def asked_of(tier: object, part: str, answer: Awaitable[T]) -> T:
    """Return what a tier answers; what a user's raises is told with the place where it did.

    Raises:
        TierFaultError: a user's tier raised.
    """
    try:
        return await answer
    except (Exception, SystemExit) as error:
        if not is_own(tier) or isinstance(error, TierFaultError):
            raise
        last = extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"
        raise TierFaultError(
            f"tier {_called(tier)}: {part}() raised {type(error).__name__}: {error} ({where}); "
            "`cxlbench --debug` shows how it came there"
        ) from error


def checked(tier: object, part: str, answers: Sequence[T], count: int, kind: type | None) -> None:
    """Refuse answers of a tier that are not ``count``, or not of ``kind``; None is any.

    Raises:
        TierFaultError: they are not.
    """
    if not isinstance(answers, Sequence):
        refuse(tier, part, f"must return a list, and returned {answers!r}")
    if len(answers) != count:
        refuse(tier, part, f"returned {len(answers)} results for {count} blocks")
    if kind is not None:
        for answer in answers:
            if not isinstance(answer, kind):
                refuse(tier, part, f"returned {answer!r}, which is no {kind.__name__}")


def refuse(tier: object, part: str, why: str) -> NoReturn:
    """Say that an answer of a tier cannot be; raise ``TierFaultError``."""
    raise TierFaultError(f"tier {_called(tier)}: {part}() {why} (docs/tiers.md)")


def _called(tier: object) -> str:
    kind = type(tier)
    return f"{kind.__module__}:{kind.__qualname__}"


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
