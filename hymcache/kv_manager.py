"""KV Manager: what runs on a CXL-HM node (HyMCache §4.2): space, write admission, the node's index.

A node joins several devices into one address space: device ``i`` begins at ``base[i]``. Objects of
one request stay on one device, chosen by policy only where no earlier block decides. The objects
that Master has registered are found by key in the node's own index.

Write path: ``reserve`` (buffer bytes and an extent, together or not at all) → RDMA WRITE under an
rkey made for this reservation → ``commit``, since a device does not see one-sided completions →
``publish``, when Master registers it. What is not published in time is taken back, its rkey first.
A key alone never names an object to drop: the generation says which of them is meant. Prefetch
windows and read tokens are in ``prefetch_window.py``.

Units: bytes, s. Left out: the node as a process of its own, and its restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import Fabric, MemoryRegion
from cxlbench.emu.memory import page_ceil
from cxlbench.emu.status import DeviceError
from cxlbench.hymcache.extents import ExtentAllocator
from cxlbench.hymcache.prefetch_window import PrefetchScheduler, ReadStream
from cxlbench.hymcache.recovery import FoundObject
from cxlbench.kv.device import MemoryDevice
from cxlbench.kv.results import KeyResult

SEGMENTS_PER_DEVICE = 256
GENERATIONS = 1 << 32


class Placement(Enum):
    """How a chain without a hit gets its device."""

    ROUND_ROBIN = "round-robin"
    LOAD_AWARE = "load-aware"


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to write one object: where, under which rkey, and the token to commit with."""

    token: int
    key: bytes
    rkey: int
    address: int
    generation: int
    device: int


@dataclass(eq=False, slots=True)
class StoredObject:
    """A committed object. ``pins`` are those of open streams."""

    key: bytes
    address: int
    size_bytes: int
    generation: int
    device: int
    token: int
    """The write token, until Master has registered the object; then 0."""
    pins: int = 0
    freed: bool = False


@dataclass(eq=False, slots=True)
class _Reservation:
    grant: Grant
    size_bytes: int
    region: MemoryRegion
    stored: StoredObject | None = None
    """What was committed under it."""


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """Space of one device for objects of one size, as Master is told of it, bytes."""

    capacity_bytes: int
    extent_bytes: int
    """What one such object takes."""
    free_bytes: int
    """Extents of this size that can be appended now."""
    dead_bytes: int
    """What comes back when the rest of its segments is evicted."""


class KvManager:
    """The software of one node."""

    def __init__(
        self,
        clock: Clock,
        fabric: Fabric,
        devices: Sequence[MemoryDevice],
        *,
        node: int = 0,
        window_bytes: int = 128 << 20,
        prefetch: bool = True,
        placement: Placement = Placement.ROUND_ROBIN,
        reserve_deadline_s: float = 10.0,
        segment_bytes: int | None = None,
        first_token: int = 1,
    ) -> None:
        """Join ``devices`` into one node.

        ``first_token`` is another one at each start of a process, so that what was reserved at an
        earlier one means nothing here.
        """
        self.clock = clock
        self.fabric = fabric
        self.node = node
        self.devices = tuple(devices)
        self.placement = placement
        self.reserve_deadline_s = reserve_deadline_s
        self.bases = tuple(
            itertools.accumulate((d.capacity_bytes for d in self.devices), initial=0)
        )
        self.allocators = tuple(
            ExtentAllocator(
                device.capacity_bytes,
                segment_bytes=segment_bytes
                or max(device.page_bytes, page_floor(device.capacity_bytes // SEGMENTS_PER_DEVICE)),
                page_bytes=device.page_bytes,
            )
            for device in self.devices
        )
        self.regions = [
            fabric.register(device, base, device.capacity_bytes, offset=0)
            for device, base in zip(self.devices, self.bases, strict=False)
        ]
        self.index: dict[bytes, StoredObject] = {}
        self._by_address: dict[int, StoredObject] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._tokens = itertools.count(first_token)
        self._generation = 0
        self._turn = 0
        self.expired_reservations = 0
        self.on_gone: Callable[[int, bytes, int], None] = lambda node, key, generation: None
        """Tells Master that an object is not there any more (node, key, generation)."""
        self.prefetcher = PrefetchScheduler(
            clock, self, window_bytes=window_bytes, enabled=prefetch
        )
        for number, device in enumerate(self.devices):
            device.on_lost = self._lost_on(number)

    @property
    def device_count(self) -> int:
        """How many devices this node joins."""
        return len(self.devices)

    # -- placement and writes -------------------------------------------------------------------

    def device_of(self, address: int) -> int:
        """Return the number of the device that ``address`` lies on."""
        for number in range(len(self.devices)):
            if address < self.bases[number + 1]:
                return number
        raise ValueError(f"address {address} is beyond the node's {self.bases[-1]} B")

    def extent_bytes(self, device: int, size_bytes: int) -> int:
        """Return what an object takes on a device: whole pages, and its footer's page."""
        return page_ceil(size_bytes) + page_ceil(self.devices[device].trailer_bytes)

    def place(self, size_bytes: int) -> int:
        """Choose a device for a chain that has no hit here, and has blocks of this size."""
        count = len(self.devices)
        if self.placement is Placement.LOAD_AWARE:
            return max(range(count), key=lambda i: (self.space(i, size_bytes).free_bytes, -i))
        self._turn += 1
        return (self._turn - 1) % count

    def reserve(
        self, keys: Sequence[bytes], size_bytes: int, *, device: int | None = None
    ) -> list[Grant | KeyResult]:
        """Reserve buffer and extent for each key, heads first, or refuse at once.

        NO_SPACE: not now. ERROR: the device can never hold an object of this size. After the first
        refusal the rest is refused too: a tail without its head is worthless.
        """
        answers: list[Grant | KeyResult] = []
        chosen = self.place(size_bytes) if device is None else device
        refusal: KeyResult | None = None
        granted: list[int] = []
        for key in keys:
            if key in self.index:
                answers.append(KeyResult.EXISTS)
                continue
            answer = refusal or self._reserve_one(key, size_bytes, chosen)
            answers.append(answer)
            if isinstance(answer, Grant):
                granted.append(answer.token)
            else:
                refusal = answer
        if granted:
            expiry = self.clock.now() + self.reserve_deadline_s
            self.clock.call_at(expiry, self._expire, granted)
        return answers

    def _reserve_one(self, key: bytes, size_bytes: int, number: int) -> Grant | KeyResult:
        device, allocator = self.devices[number], self.allocators[number]
        extent = self.extent_bytes(number, size_bytes)
        if extent > allocator.capacity_bytes:
            return KeyResult.ERROR
        local = allocator.allocate(extent)
        if local is None:
            return KeyResult.NO_SPACE
        try:
            refusal = None if device.admit(local, size_bytes) else KeyResult.NO_SPACE
        except DeviceError:
            refusal = KeyResult.ERROR
        if refusal is not None:
            allocator.take_back(local)
            return refusal
        self._generation = (self._generation + 1) % GENERATIONS
        region = self.fabric.register(
            device, self.bases[number] + local, extent, offset=local, writable=True
        )
        grant = Grant(next(self._tokens), key, region.rkey, region.base, self._generation, number)
        self._reservations[grant.token] = _Reservation(grant, size_bytes, region)
        return grant

    def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        """Note that all bytes of the objects are in place: they may be flushed now."""
        results = []
        for token in tokens:
            reservation = self._reservations.get(token)
            if reservation is None:
                results.append(KeyResult.LEASE_EXPIRED)
                continue
            if reservation.stored is None:
                grant = reservation.grant
                self.fabric.revoke(reservation.region)
                try:
                    self.devices[grant.device].commit(grant.address - self.bases[grant.device])
                except DeviceError:
                    self.abort([token])
                    results.append(KeyResult.ERROR)
                    continue
                reservation.stored = self._by_address[grant.address] = StoredObject(
                    grant.key,
                    grant.address,
                    reservation.size_bytes,
                    grant.generation,
                    grant.device,
                    token,
                )
            results.append(KeyResult.STORED)
        return results

    def publish(self, key: bytes, address: int, generation: int) -> bool:
        """Let a committed object be found, as Master registers it; False if it is gone."""
        stored = self._by_address.get(address)
        if stored is None or not stored.token or key in self.index:
            return False
        if stored.key != key or stored.generation != generation:
            return False
        del self._reservations[stored.token]
        stored.token = 0
        self.index[key] = stored
        return True

    def abort(self, tokens: Sequence[int]) -> None:
        """Take reservations back, committed or not; unknown and published ones are no error."""
        for token in tokens:
            reservation = self._reservations.pop(token, None)
            if reservation is None:
                continue
            # The rkey goes first: a late RDMA WRITE must not land in reused space.
            self.fabric.revoke(reservation.region)
            if reservation.stored is not None:
                self._drop(reservation.stored)
                continue
            # A writer in another process may be at it still: its frames are nobody else's yet.
            reservation.region.when_quiet(partial(self._cancel, reservation.grant))

    def _cancel(self, grant: Grant) -> None:
        local = grant.address - self.bases[grant.device]
        self.devices[grant.device].cancel(local)
        self.allocators[grant.device].take_back(local)

    def _expire(self, tokens: Sequence[int]) -> None:
        late = [token for token in tokens if token in self._reservations]
        self.expired_reservations += len(late)
        self.abort(late)

    # -- a node that starts again ---------------------------------------------------------------

    def restore(self, found: Mapping[int, Sequence[FoundObject]]) -> int:
        """Take in what was found on each device (by number, oldest first); return how many."""
        for number, objects in found.items():
            size_of = {made.address: made for made in objects}
            kept = self.allocators[number].restore([(o.address, o.extent_bytes) for o in objects])
            for local in kept:
                footer = size_of[local].footer
                address = self.bases[number] + local
                stored = StoredObject(
                    footer.key, address, footer.payload_bytes, footer.generation, number, 0
                )
                older = self.index.get(footer.key)
                if older is not None and older.generation > footer.generation:
                    self.allocators[number].free(local)
                    continue
                self._by_address[address] = self.index[footer.key] = stored
                if older is not None:
                    self._drop(older)
                self._generation = max(self._generation, footer.generation)
        return len(self.index)

    # -- reads ----------------------------------------------------------------------------------

    def open_stream(
        self,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float | None = None,
        onto: ReadStream | None = None,
    ) -> ReadStream:
        """Match ``keys`` against the node's own index, in order, and start prefetching the hits.

        ``until_s`` is when the reader's lease ends, and with it the stream. With ``onto`` the hits
        go behind those of that open stream, which is returned.
        """
        matched = []
        for key in keys:
            stored = self.index.get(key)
            if stored is None:
                break
            stored.pins += 1
            matched.append(stored)
        if onto is None:
            return self.prefetcher.open(request_id, matched, until_s=until_s)
        self.prefetcher.extend(onto, matched, until_s=until_s)
        return onto

    def unpin(self, stored: StoredObject) -> None:
        """Take back a stream's pin."""
        stored.pins -= 1
        if stored.freed and not stored.pins:
            self._release_extent(stored)

    # -- space ----------------------------------------------------------------------------------

    def free(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """Drop objects (key, generation) that Master evicted; their extents go when unpinned."""
        for key, generation in objects:
            stored = self.index.get(key)
            if stored is not None and stored.generation == generation:
                self._drop(stored)

    def _drop(self, stored: StoredObject) -> None:
        """Let an object be found no more, and free its extent as soon as nobody has it pinned."""
        if self.index.get(stored.key) is stored:
            del self.index[stored.key]
        stored.freed = True
        if not stored.pins:
            self._release_extent(stored)

    def _release_extent(self, stored: StoredObject) -> None:
        del self._by_address[stored.address]
        local = stored.address - self.bases[stored.device]
        self.devices[stored.device].discard(local, stored.size_bytes)
        self.allocators[stored.device].free(local)

    def _lost_on(self, number: int) -> Callable[[int], None]:
        def lost(local: int) -> None:
            stored = self._by_address.get(self.bases[number] + local)
            if stored is None or stored.freed:
                return
            if stored.token:
                self.abort([stored.token])  # Master has not registered it, and will not
            else:
                self.on_gone(self.node, stored.key, stored.generation)
                self.free([(stored.key, stored.generation)])

        return lost

    def space(self, device: int, size_bytes: int) -> DeviceSpace:
        """Report a device's space for objects of ``size_bytes``."""
        allocator, extent = self.allocators[device], self.extent_bytes(device, size_bytes)
        return DeviceSpace(
            allocator.capacity_bytes, extent, allocator.free_bytes(extent), allocator.dead_bytes
        )

    def emptiest(self, device: int, size_bytes: int) -> Iterator[list[bytes]]:
        """Yield the keys of each segment that evicting them would free at once, cheapest first."""
        base = self.bases[device]
        for addresses in self.allocators[device].emptiest(self.extent_bytes(device, size_bytes)):
            entries = [self._by_address.get(base + address) for address in addresses]
            held = [e for e in entries if e is None or e.token or e.pins or e.freed]
            if not held:
                yield [entry.key for entry in entries if entry is not None]

    # -- housekeeping ---------------------------------------------------------------------------

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody."""
        held = {
            "reservations": len(self._reservations),
            "pins": sum(stored.pins for stored in self._by_address.values()),
            **self.prefetcher.at_rest(),
        }
        for device in self.devices:
            for name, count in device.at_rest().items():
                held[name] = held.get(name, 0) + count
        return held

    async def quiesce(self) -> None:
        """Wait until all committed objects are flushed."""
        for device in self.devices:
            await device.quiesce()

    async def close(self) -> None:
        """Revoke all rkeys and close the devices."""
        self.abort(list(self._reservations))
        self.prefetcher.close()
        for region in self.regions:
            self.fabric.revoke(region)
        for device in self.devices:
            await device.close()


def page_floor(nbytes: int, page: int = 4096) -> int:
    """Round down to whole pages."""
    return nbytes // page * page
