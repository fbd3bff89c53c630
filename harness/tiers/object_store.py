"""A store of objects behind a master, wherever the bytes lie: what Mooncake's variants share.

A *get* takes room in its server's transfer buffer for all its blocks at once (as much as there is),
asks the master for their places, which leases them, and reads them; then they go to the GPU, and
the room is given back when all are there. A get that has not ended by its timeout has nothing, and
the prompt is computed; blocks whose lease ended before their bytes were there are lost, too.

Blocks come and go through LMCache, since HyMCache §6.1.3 has them in CPU-side staging buffers: its
memory (``max_local_cpu_size``) is the transfer buffer. A *store* copies the blocks into it, and
then the GPU's are free: LMCache's ``StorageManager.batched_put`` only submits the *put*, and
``MooncakestoreConnector`` reads the host memory (``batch_put_from``) in a thread. So a store's
ticket ends with the copies; the put goes on and holds its room; its failures show in the counter
``failed_puts`` and in later lookups. (vLLM's own ``MooncakeStoreConnector`` has no such buffer: it
puts from GPU memory and holds the request's blocks until then.) Where there is no room within
``buffer_wait``, the store ends there (``LMCacheEngine.store``, ``force_store_wait`` off).

A put that takes longer than its timeout is reported as failed by LMCache, but the thread is not
stopped: it puts the object all the same, and (since LMCache shields it) the memory is held until it
has. ``late_puts`` chooses: "keep" is that, counted as ``late_put_blocks``; "revoke" loses the
blocks. A gap breaks the chain: blocks behind are stored or not, but the next lookup ends there. The
engine offers such blocks again when a later turn has computed them again.

A lease is granted by every look (``ExistKey``, ``GetReplicaList``), none by the end of a put
(``PutEnd``); the client refuses bytes that came after the lease (``LEASE_EXPIRED``).

Options of all such tiers: ``capacity_bytes`` in all, ``buffer_bytes`` of each server,
``put_timeout_s``, ``late_puts``, ``get_timeout_s``, ``buffer_wait_s``; ``store`` and
``copy_engine`` name profiles.

Units: bytes, s. Left out: the metadata of the transfer engine, registration of memory, its own
timeout of a minute; LMCache's chunks (an object is one block of the engine, as vLLM's connector has
it); storing again what the lookup missed although the GPU has it, which LMCache does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlbench.devices.profile import ObjectStoreProfile
from cxlbench.emu.clock import Clock
from cxlbench.harness.tiers.block_store import Entry
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.plain import (
    Asked,
    Handling,
    Offer,
    Payload,
    PlainTier,
    check_capacity,
)
from cxlbench.harness.tiers.segments import Segments
from cxlbench.harness.tiers.tier import TierSite
from cxlbench.kv.results import KeyResult


class ObjectStoreTier(PlainTier):
    """What such stores have in common, wherever the bytes lie: master, buffers, timeouts.

    A subclass has ``read`` and ``write``, which take the time of the bytes' way.
    """

    name = "object-store"

    def __init__(self, clock: Clock, site: TierSite, options: Options, *, segments: int) -> None:
        """Read the options that all such stores have; the subclass has read its own."""
        name, block = self.name, site.block_bytes
        profile = site.profile(ObjectStoreProfile, options.text("store", "mooncake-store"))
        self.profile = profile
        capacity = options.number("capacity_bytes", self.default_capacity())
        buffer = options.number("buffer_bytes", profile.transfer_buffer)
        self.put_timeout_s = options.number("put_timeout_s", profile.put_timeout)
        self.revokes = options.choice("late_puts", "keep", ("keep", "revoke")) == "revoke"
        handling = Handling(
            staging_bytes=check_capacity(name, "a transfer buffer", buffer, block),
            whole_loads=True,
            store_wait_s=options.number("buffer_wait_s", profile.buffer_wait),
            load_timeout_s=options.number("get_timeout_s", profile.get_timeout),
            loses_all=True,
            puts_in_background=True,
        )
        copy_engine = options.text("copy_engine", "gpu-copy-gen4x16")
        options.refuse_others()
        super().__init__(clock, site, handling=handling, copy_engine=copy_engine)
        check_capacity(name, f"one of {segments} segments", capacity // segments, block)
        self.masters = self.make_masters(int(capacity), segments)

    def make_masters(self, capacity_bytes: int, segments: int) -> list[Segments]:
        """Return the master that each server asks: one for all."""
        master = Segments(self.profile, capacity_bytes, segments, seed=self.site.seed)
        return [master] * len(self.connectors)

    def place(self, server: int) -> int | None:
        """Return the segment that a server's puts go to; None is any."""
        return None

    def default_capacity(self) -> int:
        """Return the capacity where the options say none."""
        return self.profile.capacity

    async def read(self, server: int, entries: Sequence[Entry]) -> None:
        """Take the time that objects need to the host memory of a server."""
        raise NotImplementedError

    async def write(self, server: int, entries: Sequence[Entry]) -> None:
        """Take the time that objects need from the host memory of a server."""
        raise NotImplementedError

    async def _call(self, server: int, keys: int) -> float:
        """Wait for the master's answer about ``keys``; return the time then."""
        await self.clock.sleep(self.profile.master_call + keys * self.profile.master_key)
        now = self.clock.now()
        self.masters[server].wake(now)
        return now

    async def find(self, asked: Asked) -> int:
        """Ask the master for every block, which leases those that are there."""
        wanted = asked.chain[asked.matched :]
        now = await self._call(asked.server, len(wanted))
        master = self.masters[asked.server]
        for key in asked.chain[: asked.matched]:
            master.look(key, asked.size_bytes, now)
        for hits, key in enumerate(wanted):
            if master.look(key, asked.size_bytes, now) is None:
                return hits
        return len(wanted)

    async def prepare(self, asked: Asked, keys: Sequence[bytes]) -> None:
        """Ask for the places of all blocks of a get; their leases run from here."""
        now = await self._call(asked.server, len(keys))
        for key in keys:
            self.masters[asked.server].look(key, asked.size_bytes, now)
        asked.note = {**(asked.note or {}), **dict.fromkeys(keys, now + self.profile.lease)}

    async def fetch(self, asked: Asked, keys: Sequence[bytes]) -> Sequence[Payload | KeyResult]:
        """Read a group, and lose what was evicted or whose lease has ended meanwhile."""
        end_s = min([asked.note[key] for key in keys])
        entries = [self.masters[asked.server].store.find(key) for key in keys]
        there = [entry for entry in entries if entry is not None]
        await self.read(asked.server, there)
        if self.clock.now() > end_s:
            self.counted["lease_expired_blocks"] += len(there)
            return [KeyResult.LEASE_EXPIRED] * len(keys)
        return [KeyResult.MISS if entry is None else entry.payload for entry in entries]

    async def reserve(self, offer: Offer) -> Sequence[KeyResult | None]:
        """Ask which blocks are there."""
        await self._call(offer.server, len(offer.keys))
        store = self.masters[offer.server].store
        return [KeyResult.EXISTS if key in store else None for key in offer.keys]

    async def keep(
        self, offer: Offer, keys: Sequence[bytes], payloads: Sequence[Payload]
    ) -> Sequence[KeyResult]:
        """Put a group: allocate, write, register."""
        begin_s = self.clock.now()
        now = await self._call(offer.server, len(keys))
        master = self.masters[offer.server]
        results = [KeyResult.NO_SPACE] * len(keys)
        entries: dict[int, Entry] = {}
        for i, key in enumerate(keys):
            if key in master.store:
                results[i] = KeyResult.EXISTS
                continue
            entry = master.allocate(key, offer.size_bytes, now, place=self.place(offer.server))
            if entry is not None:
                entries[i] = entry
        try:
            await self.write(offer.server, list(entries.values()))
            now = await self._call(offer.server, len(entries))
        except BaseException:
            for entry in entries.values():
                master.revoke(entry)
            raise
        late = now - begin_s > self.put_timeout_s
        self.counted["late_put_blocks"] += len(entries) * late
        for i, entry in entries.items():
            if late and self.revokes:
                master.revoke(entry)
                results[i] = KeyResult.TIMEOUT
            else:
                master.commit(entry, payloads[i], now)
                results[i] = KeyResult.STORED
        return results

    def counters(self) -> Mapping[str, float]:
        """Return what was counted, and what the masters did."""
        masters = list({id(master): master for master in self.masters}.values())
        return {
            **super().counters(),
            "resident_bytes": sum(master.store.used_bytes for master in masters),
            "evicted_blocks": sum(master.store.evicted for master in masters),
            "eviction_rounds": sum(master.evictions for master in masters),
            "failed_allocations": sum(master.failed_allocations for master in masters),
        }

    def held(self) -> Mapping[str, int]:
        """Return puts under way."""
        masters = {id(master): master for master in self.masters}.values()
        return {"reservations": sum(master.store.pending for master in masters)}
