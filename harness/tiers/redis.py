"""LMCache over a Redis server (HyMCache §6.2.2): Redis alone, or behind LMCache's local DRAM.

Chunks of 256 tokens as in ``local_dram.py``. A lookup asks the local cache, then Redis, chunk by
chunk, one round trip each. A load reads what is not local over TCP through the one thread of the
server; with a local cache it is kept there as well. A store goes to both.

A store copies the GPU's blocks to host memory and ends: ``StorageManager.batched_put`` inserts the
chunks into the local cache and submits the SETs to ``RemoteBackend``, whose futures nobody awaits.
They go on from host memory, and hold it meanwhile (a reference of the memory object). What fails
there is logged and counted (``failed_puts``); the next lookup does not find it.

Why stores fail: Redis takes everything through one thread, far slower than GPUs produce it, so SETs
queue. Without a local cache they wait in LMCache's buffer for remote transfers
(``max_local_cpu_size``, 5 GB by default); when that is full, a store ends (``force_store_wait`` is
off), and what is behind is not stored: the chain is broken. Of what is stored, sampled LRU evicts
keys one by one, metadata and bytes apart (``redis_server.py``), heads as well as tails. With a
local cache the buffer is the cache: chunks on their way to Redis cannot be evicted from it. LMCache
sets no timeout for SET, 10 s for each GET; values above 512 MiB are refused by the protocol. Redis
itself evicts nothing unless told to: with ``noeviction`` a full one refuses every SET.

Options: ``local_bytes`` (0: none), ``capacity_bytes`` of Redis, ``buffer_bytes``, ``policy``
(``allkeys-lru`` or Redis's own default ``noeviction``); ``cache``, ``server``, ``link`` and
``copy_engine`` name profiles.

Units: bytes, s. Left out: the copies of a Python client (in the measured bandwidth), TLS; that
LMCache counts hits from the head also over what the GPU has, and stores again what is missing
there; that newer releases do not ask before a SET.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxlbench.devices.link import Link
from cxlbench.devices.profile import LinkProfile, LocalCacheProfile, ValueServerProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import finished
from cxlbench.harness.tiers.block_store import Entry
from cxlbench.harness.tiers.chunk_cache import ChunkCache, chunk_payload, chunks_of, pieces_of
from cxlbench.harness.tiers.local_dram import COPY_BLOCKS
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.plain import (
    Asked,
    Handling,
    Offer,
    Payload,
    PlainTier,
    check_capacity,
)
from cxlbench.harness.tiers.redis_server import RedisServer
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.results import KeyResult


@dataclass(eq=False, slots=True)
class _Found:
    """What a lookup found, and what a load has brought."""

    pinned: list[Entry] = field(default_factory=list)
    chunks: dict[int, tuple[Payload, ...] | None] = field(default_factory=dict)
    """By number: a chunk's payloads; None is one that Redis had announced and has not."""


class RedisTier(PlainTier):
    """Redis behind nothing."""

    name = "redis"
    default_local_bytes = 0

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options(self.name, site.options)
        self.profile = site.profile(LocalCacheProfile, options.text("cache", "lmcache-local"))
        self.server = site.profile(ValueServerProfile, options.text("server", "redis-64g"))
        link = site.profile(LinkProfile, options.text("link", "nic-100g"))
        self.each = each = max(1, self.profile.chunk_tokens // site.block_tokens)
        chunk = each * site.block_bytes
        local = options.number("local_bytes", self.default_local_bytes)
        if local:
            check_capacity(self.name, "a local cache", local, chunk)
        capacity = options.number("capacity_bytes", self.server.capacity)
        check_capacity(self.name, "Redis", capacity, chunk)
        buffer = options.number("buffer_bytes", self.server.client_buffer)
        check_capacity(self.name, "a buffer for transfers", buffer, chunk)
        handling = Handling(
            staging_bytes=None if local else int(buffer),
            store_wait_s=0.0,
            load_timeout_s=self.profile.get_timeout,
            timeout_per_group=True,
            group_blocks=-(-COPY_BLOCKS // each) * each,
            ends_when_full=True,
            puts_in_background=True,
            chunk_blocks=each,
        )
        policy = options.choice("policy", "allkeys-lru", ("allkeys-lru", "noeviction"))
        copy_engine = options.text("copy_engine", "gpu-copy-gen4x16")
        options.refuse_others()
        super().__init__(clock, site, handling=handling, copy_engine=copy_engine)
        self.caches = [ChunkCache(int(local), each) for _ in self.connectors] if local else []
        evicts = policy == "allkeys-lru"
        self.redis = RedisServer(clock, self.server, int(capacity), evicts=evicts, seed=site.seed)
        self._links = [
            Link(clock, link, name=f"server{n}.nic") for n in range(len(self.connectors))
        ]
        self._remote = Link(clock, link, name="redis.nic")
        for nic in (*self._links, self._remote):
            self.has(nic.tx, nic.rx)
        self.has(self.redis.thread)

    async def find(self, asked: Asked) -> int:
        """Look for leading chunks in the local cache, then in Redis."""
        cache = self.caches[asked.server] if self.caches else None
        found, keys, remote, probes = _Found(), ChunkCache(0, self.each).chunks(asked), 0, 0
        first, hits = asked.matched // self.each, 0
        for number, key in enumerate(keys, first):
            probes += 1
            entry = cache.hold(key, asked.size_bytes) if cache is not None else None
            if entry is not None:
                found.pinned.append(entry)
                assert isinstance(entry.payload, tuple)
                found.chunks[number] = entry.payload
            else:
                remote += 1
                if not self.redis.exists(key):
                    break
            hits += 1
        asked.note = found
        upto = (first + hits) * self.each
        if cache is not None:
            cache.use(asked, upto)
        profile = self.profile
        await self.clock.sleep(profile.lookup_call + probes * profile.lookup_chunk)
        if remote:
            latency_s = remote * self.server.round_trip
            await finished(self.clock, self.redis.commands(remote), latency_s=latency_s)
        return max(0, upto - asked.matched)

    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        """Bring the chunks that have these blocks, each one once."""
        found: _Found = asked.note
        places = [asked.places[key] for key in keys]
        missing = [
            n for n in {place // self.each: None for place in places} if n not in found.chunks
        ]
        if missing:
            await self._get(asked, found, missing)
        results: list[Payload | KeyResult] = []
        for place in places:
            chunk = found.chunks[place // self.each]
            results.append(KeyResult.MISS if chunk is None else chunk[place % self.each])
        return results

    async def _get(self, asked: Asked, found: _Found, numbers: Sequence[int]) -> None:
        size = self.each * asked.size_bytes
        keys = [asked.chain[(n + 1) * self.each - 1] for n in numbers]
        values = [self.redis.get(key) for key in keys]
        there = [value for value in values if value is not None]
        nbytes = size * len(there)
        mine, remote = self._links[asked.server], self._remote
        await finished(
            self.clock,
            self.redis.values(nbytes, len(keys), out=True),
            remote.tx.reserve(nbytes),
            mine.rx.reserve(nbytes),
            latency_s=2 * self.server.round_trip,
        )
        cache = self.caches[asked.server] if self.caches else None
        for number, key, value in zip(numbers, keys, values, strict=True):
            payload: tuple[Payload, ...] | None = None
            if value is not None and value[1] == size and isinstance(value[0], tuple):
                payload = value[0]
            found.chunks[number] = payload
            if cache is None or payload is None or key in cache.store:
                continue
            entry = cache.store.reserve(key, size, self.clock.now())
            if entry is not None:
                cache.store.commit(entry, payload)

    def let_go(self, asked: Asked) -> None:
        """Unpin."""
        if asked.note is not None:
            for entry in asked.note.pinned:
                self.caches[asked.server].store.unpin(entry)
        asked.note = None

    async def reserve(self, offer: Offer) -> Sequence[KeyResult | None]:
        """Answer for chunks that are there or not whole, or for which there is no memory.

        With a local cache that decides: what only Redis has is kept and SET again.
        """
        if self.caches:
            return self.caches[offer.server].reserve(offer, self.clock.now())
        pieces = list(pieces_of(offer, self.each))
        probes = sum(whole for _, _, whole in pieces)
        await finished(
            self.clock,
            self.redis.commands(probes),
            latency_s=probes * self.server.round_trip,
        )
        results: list[KeyResult | None] = []
        for begin, end, whole in pieces:
            there = not whole or self.redis.exists(offer.keys[end - 1])
            results += [KeyResult.EXISTS if there else None] * (end - begin)
        return results

    def take_in(self, offer: Offer, keys: Sequence[bytes]) -> None:
        """Keep chunks in the local cache, pinned until they have been SET."""
        if self.caches:
            cache = self.caches[offer.server]
            for entry in cache.commit(offer, keys):
                cache.store.pin(entry)

    async def keep(
        self, offer: Offer, keys: Sequence[bytes], payloads: Sequence[Payload]
    ) -> Sequence[KeyResult]:
        """SET chunks that are in host memory."""
        try:
            done = await self._set(offer, set(keys))
        finally:
            if self.caches:
                store = self.caches[offer.server].store
                for _, end in chunks_of(offer, keys, self.each):
                    store.unpin(store.entry(offer.keys[end - 1]))
        return [KeyResult.STORED if key in done else KeyResult.ERROR for key in keys]

    async def _set(self, offer: Offer, keys: set[bytes]) -> set[bytes]:
        """SET the chunks of ``keys``; return the blocks of those that Redis took."""
        size, done = self.each * offer.size_bytes, set[bytes]()
        chunks = chunks_of(offer, keys, self.each) if size <= self.server.largest_value else []
        nbytes = size * len(chunks)
        mine, remote = self._links[offer.server], self._remote
        await self.clock.sleep(len(chunks) * self.profile.store_chunk)
        await finished(
            self.clock,
            self.redis.values(nbytes, len(chunks), out=False),
            mine.tx.reserve(nbytes),
            remote.rx.reserve(nbytes),
            latency_s=2 * self.server.round_trip,
        )
        for begin, end in chunks:
            payload = chunk_payload(offer, begin, end, self.each)
            if self.redis.set(offer.keys[end - 1], size, payload):
                done.update(offer.keys[begin:end])
        return done

    def abandon(self, offer: Offer, keys: Sequence[bytes]) -> None:
        """Give memory back."""
        if self.caches:
            self.caches[offer.server].abandon(keys)

    def counters(self) -> Mapping[str, float]:
        """Return what was counted, and what Redis did."""
        redis = self.redis
        return {
            **super().counters(),
            "evicted_chunks": sum(cache.store.evicted for cache in self.caches),
            "evicted_redis_values": redis.evicted_values,
            "evicted_redis_metadata": redis.evicted_metadata,
            "refused_redis_sets": redis.refused,
        }

    def held(self) -> Mapping[str, int]:
        """Return pins and reservations."""
        stores = [cache.store for cache in self.caches]
        return {
            "pins": sum(store.pinned for store in stores),
            "reservations": sum(store.pending for store in stores),
        }


class LocalAndRedisTier(RedisTier):
    """LMCache's local cache of 64 GB before Redis."""

    name = "lmcache-redis"
    default_local_bytes = 64 << 30
