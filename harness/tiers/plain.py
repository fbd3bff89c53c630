"""The base of tiers that are models: a tier says how blocks are found, fetched and kept.

A subclass of ``PlainTier`` has three coroutines (``find`` the leading blocks, ``fetch`` a group,
``keep`` a group) and gives back in ``let_go`` what a request held. ``plain_connector.py`` makes the
contract of ``kv/connector.py`` out of them: tickets, order, staging, copies to and from the GPU,
timeouts, release and close. docs/tiers.md shows a whole tier.

Blocks move in groups, so that a request costs a few events and not one for each of its blocks.
A group goes through the *staging buffer* of its server: it takes its bytes before it is fetched and
gives them back when the GPU has them; while one group is copied, the next one is fetched.

Tiers whose puts go on in the background (``Handling.puts_in_background``) end a store when its
blocks are in host memory. What becomes of them then shows only in the counters ``puts`` and
``failed_puts``, in blocks, and in later lookups.

Units: bytes, s. Left out: errors of memory and links; models deliver what they have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.profile import CopyEngineProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.harness.tiers.options import TierOptionError
from cxlbench.harness.tiers.plain_connector import PlainConnector
from cxlbench.harness.tiers.plain_work import Asked, Handling, Offer, Payload
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.connector import Connector
from cxlbench.kv.results import KeyResult

__all__ = ["Asked", "Handling", "Offer", "Payload", "PlainTier", "check_capacity"]


class PlainTier(ABC):
    """A tier as a model. See the module."""

    name = "plain"

    def __init__(
        self,
        clock: Clock,
        site: TierSite,
        *,
        handling: Handling | None = None,
        servers: int | None = None,
        copy_engine: str = "gpu-copy-gen4x16",
    ) -> None:
        """Make a connector and a copy engine for each of the first ``servers`` servers.

        None is the prefill servers: those that only decode have no connector.
        """
        self.clock = clock
        self.site = site
        self.handling = handling or Handling()
        self.counted: Counter[str] = Counter()
        profile = site.profile(CopyEngineProfile, copy_engine)
        count = site.prefill_servers if servers is None else servers
        copies = [CopyEngine(clock, profile, name=f"server{n}.copy") for n in range(count)]
        self.pipes: Sequence[Pipe] = [copy.pipe for copy in copies]
        self.connectors = [PlainConnector(self, n, copy) for n, copy in enumerate(copies)]

    # -- what a tier says -------------------------------------------------------------------------

    @abstractmethod
    async def find(self, asked: Asked) -> int:
        """Return how many blocks from ``asked.matched`` on can be fetched, and hold them."""

    @abstractmethod
    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        """Bring a group of found blocks into host memory; a ``KeyResult`` says why one is not."""

    @abstractmethod
    async def keep(
        self, offer: Offer, keys: Sequence[bytes], payloads: Sequence[Payload]
    ) -> Sequence[KeyResult]:
        """Keep some blocks of a group, which are in host memory; return a result for each."""

    def let_go(self, asked: Asked) -> None:  # noqa: B027
        """Give back what ``find`` held; nothing of the request is going on any more."""

    async def prepare(self, asked: Asked, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Begin a load of ``keys``."""

    async def reserve(self, offer: Offer) -> Sequence[KeyResult | None]:
        """Say what becomes of a group before it is copied; what is None is to be kept."""
        return [None] * len(offer.keys)

    def take_in(self, offer: Offer, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Note that blocks of a group are in host memory; before a put in the background."""

    def abandon(self, offer: Offer, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Give back what ``reserve`` took for blocks that will not be kept."""

    def held(self) -> Mapping[str, int]:
        """Return what the tier itself holds for requests, by name."""
        return {}

    def largest_block_bytes(self) -> int:
        """Return the size of the largest block that there is room for."""
        staging = self.handling.staging_bytes
        return 1 << 62 if staging is None else staging // self.handling.chunk_blocks

    # -- what it can use --------------------------------------------------------------------------

    def has(self, *pipes: Pipe) -> None:
        """Name pipes that move the tier's bytes, for utilization and conservation."""
        self.pipes = [*self.pipes, *pipes]

    async def move(self, *through: tuple[Pipe, int], latency_s: float = 0.0) -> None:
        """Wait until bytes have gone through pipes that all carry them at once."""
        bookings: list[Reservation] = [pipe.reserve(nbytes) for pipe, nbytes in through if nbytes]
        if bookings:
            await finished(self.clock, *bookings, latency_s=latency_s)

    # -- the tier of ``tier.py`` ------------------------------------------------------------------

    def connector(self, server: int) -> Connector | None:
        """Return the connector of a server; None where it has none."""
        return self.connectors[server] if server < len(self.connectors) else None

    def counters(self) -> Mapping[str, float]:
        """Return what the connectors and the tier counted."""
        puts = {"puts": 0, "failed_puts": 0} if self.handling.puts_in_background else {}
        return {**puts, **self.counted}

    def at_rest(self) -> dict[str, int]:
        """Return everything that is still held, by name; empty when all came back."""
        held = Counter(self.held())
        for connector in self.connectors:
            held.update(connector.at_rest())
        return {name: count for name, count in held.items() if count}

    async def start(self) -> None:  # noqa: B027
        """Do nothing: there is nothing in the background."""

    async def quiesce(self) -> None:
        """Wait until puts, and loads that timed out, have ended."""
        for connector in self.connectors:
            await connector.settle()

    async def close(self) -> None:
        """Close the connectors."""
        for connector in self.connectors:
            await connector.close()


def check_capacity(tier: str, what: str, capacity_bytes: float, block_bytes: int) -> int:
    """Return a capacity that holds at least one block; raise ``TierOptionError`` otherwise."""
    if capacity_bytes < block_bytes:
        raise TierOptionError(
            f"{tier}: {what} of {capacity_bytes:.0f} B holds no block of {block_bytes} B; give it "
            f"at least {block_bytes} B, or name the tier 'recompute' to have none"
        )
    return int(capacity_bytes)
