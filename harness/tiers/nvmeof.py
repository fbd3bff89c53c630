"""An object store on SSDs over NVMe-oF with a file system (HyMCache §6.1.2).

The storage server stripes its SSDs, cuts the stripe into one volume for each server, and exports
them by NVMe-oF over RDMA; each server mounts its volume with XFS. Master, transfer buffers and
timeouts are those of ``object_store.py``. An object is a file on the volume of the server that
stored it. A read goes through the SSDs, the storage server's port, the server's own port and its
file system, all at once; the slowest decides. Objects of another server's volume are read there
and sent on over RDMA (``reach`` "owner"), or cannot be reached (``reach`` "own": each server has a
cache of its own); the paper does not say which.

Options beside those of all such tiers: ``file_system`` (False: the raw block device), ``reach``,
``ssds``; ``volume``, ``ssd``, ``link`` (of a server; the 23 GB/s that the paper measures on each
need 200 Gb/s) and ``storage_link`` name profiles.

Units: bytes, s. Left out: the page cache (files are read once a turn), discard, RAID's own costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from cxlbench.devices.link import Link
from cxlbench.devices.profile import LinkProfile, RemoteVolumeProfile, SsdProfile
from cxlbench.devices.ssd import Ssd
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, Reservation, finished
from cxlbench.harness.tiers.block_store import Entry
from cxlbench.harness.tiers.object_store import ObjectStoreTier
from cxlbench.harness.tiers.options import Options
from cxlbench.harness.tiers.segments import Segments
from cxlbench.harness.tiers.tier import TierSite


class NvmeOfTier(ObjectStoreTier):
    """Mooncake Store over NVMe-oF."""

    name = "mooncake-nvmeof"

    def __init__(self, clock: Clock, site: TierSite) -> None:
        options = Options(self.name, site.options)
        volume = site.profile(RemoteVolumeProfile, options.text("volume", "nvmeof-xfs"))
        ssd = site.profile(SsdProfile, options.text("ssd", "pm1743-class"))
        link = site.profile(LinkProfile, options.text("link", "nic-200g"))
        storage = site.profile(LinkProfile, options.text("storage_link", "nic-200g"))
        count = options.count("ssds", 2)
        files = options.flag("file_system", True)
        self._own = options.choice("reach", "owner", ("owner", "own")) == "own"
        self._ssd_bytes = count * ssd.capacity
        servers = site.prefill_servers
        super().__init__(clock, site, options, segments=servers)
        bandwidth = volume.file_bandwidth if files else volume.raw_bandwidth
        self._file_s = volume.file_operation if files else 0.0
        self._latency_s = (ssd.read_latency, ssd.program_latency)
        self._ssds = [Ssd(clock, ssd, f"storage.ssd{n}") for n in range(count)]
        self._storage = Link(clock, storage, name="storage.nic")
        self._links = [Link(clock, link, name=f"server{n}.nic") for n in range(servers)]
        self._volumes = [Pipe(clock, f"server{n}.volume", bandwidth) for n in range(servers)]
        self.has(*[ssd.pipe for ssd in self._ssds], *self._volumes)
        for nic in (self._storage, *self._links):
            self.has(nic.tx, nic.rx)

    def default_capacity(self) -> int:
        """Return what the SSDs hold."""
        return self._ssd_bytes

    def make_masters(self, capacity_bytes: int, segments: int) -> list[Segments]:
        """Return one master for all volumes, or one for each where nobody reaches another's."""
        if not self._own:
            return super().make_masters(capacity_bytes, segments)
        each = capacity_bytes // segments
        return [Segments(self.profile, each, 1, seed=self.site.seed) for _ in self.connectors]

    def place(self, server: int) -> int | None:
        """Return the server's own volume."""
        return 0 if self._own else server

    async def read(self, server: int, entries: Sequence[Entry]) -> None:
        """Read files, each through the server that has its volume."""
        bookings: list[Reservation] = []
        latency_s = self._storage.latency_s + self._links[server].latency_s
        for owner, files in self._by_owner(server, entries).items():
            nbytes = sum([entry.nbytes for entry in files])
            bookings += [ssd.read(nbytes // len(self._ssds)) for ssd in self._ssds]
            bookings += [self._storage.tx.reserve(nbytes), self._links[owner].rx.reserve(nbytes)]
            bookings.append(self._file(owner, nbytes, len(files)))
            if owner != server:
                bookings.append(self._links[owner].tx.reserve(nbytes))
                bookings.append(self._links[server].rx.reserve(nbytes))
        if bookings:
            await finished(self.clock, *bookings, latency_s=latency_s + self._latency_s[0])

    async def write(self, server: int, entries: Sequence[Entry]) -> None:
        """Write files to the server's own volume."""
        if not entries:
            return
        nbytes = sum([entry.nbytes for entry in entries])
        bookings = [ssd.write(nbytes // len(self._ssds), priority=0) for ssd in self._ssds]
        bookings += [self._links[server].tx.reserve(nbytes), self._storage.rx.reserve(nbytes)]
        bookings.append(self._file(server, nbytes, len(entries)))
        latency_s = self._storage.latency_s + self._links[server].latency_s + self._latency_s[1]
        await finished(self.clock, *bookings, latency_s=latency_s)

    def _file(self, server: int, nbytes: int, files: int) -> Reservation:
        volume = self._volumes[server]
        cost_s = nbytes / volume.bytes_per_s + files * self._file_s
        return volume.reserve(nbytes, cost_s=cost_s)

    def _by_owner(self, server: int, entries: Sequence[Entry]) -> dict[int, list[Entry]]:
        found: dict[int, list[Entry]] = {}
        for entry in entries:
            found.setdefault(server if self._own else entry.place, []).append(entry)
        return found
