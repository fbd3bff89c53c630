"""The tiers that ``cxlbench size`` chooses from: what a capacity needs of each, and what it costs.

- *DRAM*: memory nodes full of DRAM (``remote-dram-1tb``), as Mooncake's in HyMCache §5.
- *CXL-HM*: memory nodes with one CXL-HM device each, capacity on SSDs and little DRAM: as
  HyMCache's prototype, with as many SSDs as the capacity needs (two a device), and the least DRAM
  of which both parts suffice: staging holds a prefetch window for two requests of each server,
  one being read and the next one, and the demand reserve; the write buffer holds the new blocks of
  one request of each server (all but the largest 5 %), which are reserved at once. What does not
  fit it is refused, and the heads of chains with it: without it a tier has no hits.

A node has one 200 Gb/s port, as the storage server of HyMCache §5; each server has the link that
is asked for. Costs are estimates of parts, lower and upper end, from a profile of kind
``prices``, in which every price has its source or is marked as an assumption. Servers and
switches are left out.

Units: bytes, bytes/s, US dollars, blocks.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from cxlbench.devices.profile import (
    CxlHmProfile,
    ExpanderProfile,
    LinkProfile,
    PricesProfile,
    ProfileError,
    load_as,
)
from cxlbench.harness.ttft_model import TierSpeed
from cxlbench.hymcache.prefetch_window import prefetch_window

GIB = 1 << 30
WINDOW_BYTES = 128 << 20
"""HyMCache §4.2."""
REQUESTS_A_SERVER = 2
PORT_BYTES_PER_S = 100e9 / 8
DEVICE = "cxl-hm-prototype"
DRAM = "remote-dram-1tb"
NODE_LINK = "nic-200g"
LINKS = ("nic-100g", "nic-200g")
MOST_DRAM_BYTES = 4096 * GIB


class Kind(enum.StrEnum):
    """A kind of tier."""

    DRAM = "DRAM"
    CXL_HM = "CXL-HM"


@dataclass(frozen=True, slots=True)
class Cost:
    """An estimate, US dollars."""

    low: float
    high: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.low + other.low, self.high + other.high)

    def times(self, count: float) -> Cost:
        """Return the cost of so many."""
        return Cost(self.low * count, self.high * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a tier is made of."""

    kind: Kind
    nodes: int
    dram_bytes: int
    """In all."""
    ssds: int
    ssd_bytes: int
    """In all: whole drives."""
    ports: float
    """Of 100 Gb/s, on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The profiles that tiers are built from, and the servers that they serve."""

    servers: int
    block_bytes: int
    burst_bytes: int = 0
    """What a request of a server stores at once."""
    device: CxlHmProfile = field(default_factory=lambda: load_as(CxlHmProfile, DEVICE))
    dram: ExpanderProfile = field(default_factory=lambda: load_as(ExpanderProfile, DRAM))
    node_link: LinkProfile = field(default_factory=lambda: load_as(LinkProfile, NODE_LINK))
    links: tuple[LinkProfile, ...] = field(
        default_factory=lambda: tuple(load_as(LinkProfile, name) for name in LINKS)
    )
    prices: PricesProfile

    def links_by_speed(self) -> list[LinkProfile]:
        """Return the links that servers may have, the slowest first."""
        return sorted(self.links, key=lambda link: link.bandwidth)

    def least_nodes(self, kind: Kind, capacity_bytes: int) -> int:
        """Return how many nodes hold a capacity; 1 at least."""
        room = self.dram.capacity if kind is Kind.DRAM else self.device.capacity
        return max(1, math.ceil(capacity_bytes / room))

    def parts(self, kind: Kind, capacity_bytes: int, nodes: int, link: LinkProfile) -> Parts:
        """Return what a tier of that capacity is made of."""
        ports = (link.bandwidth * self.servers + self.node_link.bandwidth * nodes) / (
            PORT_BYTES_PER_S
        )
        if kind is Kind.DRAM:
            whole = math.ceil(capacity_bytes / GIB) * GIB
            return Parts(kind=kind, nodes=nodes, dram_bytes=whole, ssds=0, ssd_bytes=0, ports=ports)
        device = self.device
        drives = max(nodes, math.ceil(capacity_bytes / device.ssd.capacity))
        return Parts(
            kind=kind,
            nodes=nodes,
            dram_bytes=nodes * self.device_dram_bytes(nodes),
            ssds=drives,
            ssd_bytes=drives * device.ssd.capacity,
            ports=ports,
        )

    def device_dram_bytes(self, nodes: int) -> int:
        """Return the least DRAM of each of ``nodes`` devices, whole GiB.

        Raises:
            ProfileError: no DRAM suits the device's profile.
        """
        device = self.device
        window = prefetch_window(1 << 30, self.block_bytes, WINDOW_BYTES) * self.block_bytes
        share = device.write_buffer_share
        requests = math.ceil(REQUESTS_A_SERVER * self.servers / nodes)
        staging = requests * window + device.demand_reserve
        buffered = math.ceil(self.servers / nodes) * self.burst_bytes
        size = math.ceil(max(staging / (1 - share), buffered / share) / GIB) * GIB
        while True:
            try:
                load_as(CxlHmProfile, device.name, overrides={"dram_capacity": f"{size} B"})
            except ProfileError:
                if 2 * size > MOST_DRAM_BYTES:
                    raise
                size *= 2
            else:
                return size

    def speed(self, parts: Parts, link: LinkProfile) -> TierSpeed:
        """Return how fast a tier hands out blocks."""
        device, port = self.device, self.node_link.bandwidth
        if parts.kind is Kind.DRAM:
            return TierSpeed(
                port_bytes_per_s=parts.nodes * min(port, self.dram.bandwidth),
                link_bytes_per_s=link.bandwidth,
                latency_s=link.latency + self.dram.latency,
            )
        return TierSpeed(
            port_bytes_per_s=parts.nodes * min(port, device.port_bandwidth),
            link_bytes_per_s=link.bandwidth,
            latency_s=link.latency + device.load_latency + device.ssd.read_latency,
            ssd_read_bytes_per_s=parts.ssds * device.ssd.random_read_bandwidth,
            ssd_write_bytes_per_s=parts.ssds * device.ssd.write_bandwidth,
        )

    def cost(self, parts: Parts) -> Cost:
        """Return what the parts cost."""
        prices = self.prices
        port = Cost(prices.port_100g_low, prices.port_100g_high).times(parts.ports)
        dram_gib = parts.dram_bytes / GIB
        if parts.kind is Kind.DRAM:
            return port + Cost(prices.dram_per_gib_low, prices.dram_per_gib_high).times(dram_gib)
        controller = Cost(prices.controller_low, prices.controller_high).times(parts.nodes)
        dram = Cost(prices.device_dram_per_gib_low, prices.device_dram_per_gib_high)
        ssd = Cost(prices.ssd_per_gib_low, prices.ssd_per_gib_high)
        return port + controller + dram.times(dram_gib) + ssd.times(parts.ssd_bytes / GIB)
