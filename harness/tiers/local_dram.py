"""A cache in the DRAM of each server, as LMCache's local CPU backend is.

The engine's blocks are kept in whole chunks of tokens (LMCache: ``chunk_size`` 256, no unfull
chunks; ``chunk_cache.py``). What a lookup finds is pinned until its request is released. A store
takes memory before it copies, and ends at the first chunk for which there is none
(``force_store_wait`` is off). Copies go over PCIe; there is no network and no sharing.

Options: ``capacity_bytes`` of each server, ``cache`` and ``copy_engine`` name profiles.

Units: bytes, tokens, s. Left out: the layout change in the copy, hash computation by token, the
blocking of the engine's step by a synchronous store. A chunk is rounded down to whole blocks.
LMCache counts a lookup's hits from the head of the prompt, also over what the GPU has, and stores
again what is missing there; here a lookup begins behind the GPU's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlbench.devices.profile import LocalCacheProfile
from cxlbench.emu.clock import Clock
from cxlbench.harness.tiers.block_store import Entry
from cxlbench.harness.tiers.chunk_cache import ChunkCache
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.plain import (
    Asked,
    Handling,
    Offer,
    Payload,
    PlainTier,
    check_capacity,
)
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.results import KeyResult

COPY_BLOCKS = 8
"""Blocks that one copy moves, at least."""


class LocalDramTier(PlainTier):
    """LMCache's local cache, one on each prefill server."""

    name = "lmcache-local"

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options(self.name, site.options)
        self.profile = site.profile(LocalCacheProfile, options.text("cache", "lmcache-local"))
        each = max(1, self.profile.chunk_tokens // site.block_tokens)
        capacity = options.number("capacity_bytes", self.profile.capacity)
        check_capacity(self.name, "a local cache", capacity, each * site.block_bytes)
        handling = Handling(
            staging_bytes=None,
            load_timeout_s=self.profile.get_timeout,
            group_blocks=-(-COPY_BLOCKS // each) * each,
            ends_when_full=True,
        )
        copy_engine = options.text("copy_engine", "gpu-copy-gen4x16")
        options.refuse_others()
        super().__init__(clock, site, handling=handling, copy_engine=copy_engine)
        self.caches = [ChunkCache(int(capacity), each) for _ in self.connectors]

    async def find(self, asked: Asked) -> int:
        """Pin the leading chunks that are there."""
        cache, profile = self.caches[asked.server], self.profile
        pinned: list[Entry] = []
        probes = 0
        for key in cache.chunks(asked):
            probes += 1
            entry = cache.hold(key, asked.size_bytes)
            if entry is None:
                break
            pinned.append(entry)
        asked.note = pinned
        each = cache.chunk_blocks
        first = asked.matched // each
        upto = (first + len(pinned)) * each
        cache.use(asked, max(upto, asked.matched // each * each))
        await self.clock.sleep(profile.lookup_call + probes * profile.lookup_chunk)
        return max(0, upto - asked.matched)

    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        """Return what is in the server's own memory."""
        cache = self.caches[asked.server]
        each = cache.chunk_blocks
        first = asked.matched // each
        places = [asked.places[key] for key in keys]
        return [cache.block(asked.note[place // each - first], place) for place in places]

    def let_go(self, asked: Asked) -> None:
        """Unpin."""
        store = self.caches[asked.server].store
        for entry in asked.note or ():
            store.unpin(entry)
        asked.note = None

    async def reserve(self, offer: Offer) -> Sequence[KeyResult | None]:
        """Take memory for whole chunks, evicting what is oldest and unused."""
        return self.caches[offer.server].reserve(offer, self.clock.now())

    async def keep(
        self, offer: Offer, keys: Sequence[bytes], payloads: Sequence[Payload]
    ) -> Sequence[KeyResult]:
        """Insert the chunks that have been copied."""
        chunks = self.caches[offer.server].commit(offer, keys)
        await self.clock.sleep(len(chunks) * self.profile.store_chunk)
        return [KeyResult.STORED] * len(keys)

    def abandon(self, offer: Offer, keys: Sequence[bytes]) -> None:
        """Give memory back."""
        self.caches[offer.server].abandon(keys)

    def counters(self) -> Mapping[str, float]:
        """Return what was counted, and the evicted chunks."""
        evicted = sum(cache.store.evicted for cache in self.caches)
        return {**super().counters(), "evicted_chunks": evicted}

    def held(self) -> Mapping[str, int]:
        """Return pins and reservations."""
        stores = [cache.store for cache in self.caches]
        return {
            "pins": sum(store.pinned for store in stores),
            "reservations": sum(store.pending for store in stores),
        }
