"""A Redis server with large values: one thread, sampled LRU, a limit of memory.

Two keys stand for each object, as LMCache's connector stores it: ``metadata`` (small) and ``bytes``
(the value). They are evicted apart. Without its metadata an object cannot be found, and its bytes
fill memory until they are evicted, too; without its bytes it is found and cannot be read, until a
reader has noticed and deleted the metadata.

Memory is checked before each command, against what is stored by then: while it is above the limit,
the best candidate of the eviction pool goes; the pool is fed by five keys drawn at random, and idle
times have a grain of a second (Redis ``evict.c``). With ``evicts`` off (the policy
``noeviction``, Redis's own default) a SET is refused instead.

The thread serves all clients in small pieces: small commands overtake the bytes of large values,
and GETs those of SETs, since LMCache's client sends its requests by priority (``Priorities`` of
``RedisConnector``: PEEK, PREFETCH, GET, PUT).

Units: bytes, s. Left out: expiry, persistence, replication, fragmentation; the memory of clients'
buffers (output of normal clients has no limit by default); the few SETs that a client has begun
when a GET comes, which share the thread with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from cxlbench.devices.profile import ValueServerProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.harness.tiers.plain_work import Payload

SMALL_BYTES = 128
"""Of a key with metadata, and of what Redis needs for any key."""
PIECE_BYTES = 64 << 10
"""Redis ``NET_MAX_WRITES_PER_EVENT``: what one client gets before the next one is served."""


@dataclass(eq=False, slots=True)
class _Key:
    name: tuple[bytes, bool]
    """The object, and whether this is its metadata."""
    nbytes: int
    payload: Payload
    used_s: float
    at: int


class RedisServer:
    """What is stored, and the thread's time."""

    def __init__(
        self,
        clock: Clock,
        profile: ValueServerProfile,
        capacity_bytes: int,
        *,
        evicts: bool,
        seed: int,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted_metadata = 0
        self.evicted_values = 0
        self.refused = 0
        self.thread = Pipe(clock, "redis.thread", profile.get_bandwidth, chunk_bytes=PIECE_BYTES)
        self._clock = clock
        self._profile = profile
        self._evicts = evicts
        self._draw = random.Random(seed)
        self._keys: dict[tuple[bytes, bool], _Key] = {}
        self._all: list[_Key] = []
        self._pool: list[tuple[int, tuple[bytes, bool]]] = []

    def exists(self, key: bytes) -> bool:
        """EXISTS of an object's metadata; it does not count as use."""
        return (key, True) in self._keys

    def get(self, key: bytes) -> tuple[Payload, int] | None:
        """GET metadata and bytes, and how many; delete the metadata where the bytes are gone."""
        self._make_room()
        metadata = self._use((key, True))
        value = self._use((key, False)) if metadata is not None else None
        if value is not None:
            return value.payload, value.nbytes - SMALL_BYTES
        if metadata is not None:
            self._delete(metadata)
        return None

    def set(self, key: bytes, nbytes: int, payload: Payload) -> bool:
        """SET bytes, then metadata; whether both were taken."""
        return self._set((key, False), nbytes, payload) and self._set((key, True), 0, None)

    def commands(self, count: int) -> Reservation:
        """Book the thread for small commands."""
        return self.thread.reserve(0, priority=0, cost_s=count * self._profile.command)

    def values(self, nbytes: int, count: int, *, out: bool) -> Reservation:
        """Book the thread for the values of ``count`` objects, two commands each."""
        profile = self._profile
        bandwidth = profile.get_bandwidth if out else profile.set_bandwidth
        cost_s = nbytes / bandwidth + 2 * count * profile.command
        return self.thread.reserve(nbytes, priority=1 if out else 2, cost_s=cost_s)

    def _use(self, name: tuple[bytes, bool]) -> _Key | None:
        key = self._keys.get(name)
        if key is not None:
            key.used_s = self._clock.now()
        return key

    def _set(self, name: tuple[bytes, bool], nbytes: int, payload: Payload) -> bool:
        if not self._make_room():
            self.refused += 1
            return False
        old = self._keys.get(name)
        if old is not None:
            self._delete(old)
        key = _Key(name, nbytes + SMALL_BYTES, payload, self._clock.now(), len(self._all))
        self._keys[name] = key
        self._all.append(key)
        self.used_bytes += key.nbytes
        return True

    def _delete(self, key: _Key) -> None:
        del self._keys[key.name]
        last = self._all.pop()
        if last is not key:
            self._all[key.at] = last
            last.at = key.at
        self.used_bytes -= key.nbytes

    def _make_room(self) -> bool:
        """Evict while memory is above the limit; whether it is not any more."""
        while self.used_bytes > self.capacity_bytes:
            if not self._evicts or not self._all:
                return False
            victim = self._candidate()
            if victim.name[1]:
                self.evicted_metadata += 1
            else:
                self.evicted_values += 1
            self._delete(victim)
        return True

    def _candidate(self) -> _Key:
        """Return the longest idle key of the pool, after feeding it."""
        now, pool, pooled = int(self._clock.now()), self._pool, {name for _, name in self._pool}
        while True:
            for _ in range(self._profile.eviction_samples):
                key = self._all[self._draw.randrange(len(self._all))]
                if key.name not in pooled:
                    pooled.add(key.name)
                    pool.append((now - int(key.used_s), key.name))
            pool.sort(key=lambda candidate: candidate[0])
            del pool[: max(0, len(pool) - self._profile.eviction_pool)]
            while pool:
                victim = self._keys.get(pool.pop()[1])
                if victim is not None:
                    return victim
            pooled.clear()
