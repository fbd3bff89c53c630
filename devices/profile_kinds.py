"""The kinds of hardware that a profile can describe, one frozen dataclass each.

SSD, CXL-HM (HyMCache §3.3-3.4, prototype of §5), CMM-H (the strawman of HyMCache §3.3), DRAM near
and far, links, the copy engine of a GPU, shared Type-3 memory (TraCT), accelerators, and the
software steps that both clocks charge. Attributes are in base units: bytes, bytes/s, s, 1/s,
FLOP/s, US dollars.

The law of mixed traffic on an SSD: reads at ``r`` and writes at ``w`` bytes/s share the device's
time, ``r / read_bandwidth + w / write_bandwidth <= 1``; and reads that are served while writes are
pending take ``1 + mixed_penalty`` times as long.

What scale does to rates of operations: IOPS and latencies are not scaled, but an object at scale S
has only 1/S of its pages, so a limit that acts page by page would vanish. The properties
``random_read_bandwidth`` and ``miss_bandwidth`` state such limits as bytes/s, divided by S.

Left out: garbage collection, thermal limits, retries inside the NAND, link-layer flow control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

from cxlbench.devices import profile_rules as rules
from cxlbench.devices import profile_schema as ps
from cxlbench.devices.profile_baselines import (
    LocalCacheProfile,
    ObjectStoreProfile,
    RemoteVolumeProfile,
    ValueServerProfile,
)
from cxlbench.devices.profile_prices import PricesProfile
from cxlbench.devices.profile_schema import Check, Number, Profile, Reference, Scaling
from cxlbench.devices.units import Dimension

_MOST_DRAM_BYTES = 64 << 40
_MOST_SSDS = 1024
_FRAMES = Annotated[
    int,
    Number(Dimension.SIZE, Scaling.CAPACITY, grain="staging_frame", at_most=_MOST_DRAM_BYTES),
]
_RESERVED_FRAMES = Annotated[int, Number(Dimension.SIZE, Scaling.RESERVE, grain="staging_frame")]
_GRANULES = Annotated[
    int,
    Number(Dimension.SIZE, Scaling.CAPACITY, grain="cache_granule", at_most=_MOST_DRAM_BYTES),
]
_SSDS = Annotated[int, Number(Dimension.COUNT, at_most=_MOST_SSDS)]
_WAYS = Annotated[int, Number(Dimension.COUNT, at_most=64)]
_IN_FLIGHT = Annotated[int, Number(Dimension.COUNT, at_most=1 << 16)]
_ARRIVAL = Annotated[float, Number(Dimension.TIME, at_most=60.0)]
_SSD_PAGES = Annotated[int, Number(Dimension.SIZE, Scaling.CAPACITY, grain="page_size")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdProfile(Profile):
    """One SSD. ``read_latency`` is one page from the NAND to the device's own DRAM."""

    kind: ClassVar[str] = "ssd"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("page_size",), rules.power_of_two),
        Check(("page_read_latency_low", "page_read_latency_high"), rules.ordered),
    )

    capacity: _SSD_PAGES
    page_size: ps.FixedSize
    read_bandwidth: ps.Bandwidth
    write_bandwidth: ps.Bandwidth
    read_iops: ps.PerSecond
    write_iops: ps.PerSecond
    read_latency: ps.Seconds
    program_latency: ps.Seconds
    queue_depth: ps.Count
    mixed_penalty: ps.ShareOrZero
    firmware_latency: ps.OptionalSeconds = None
    page_read_latency_low: ps.OptionalSeconds = None
    page_read_latency_high: ps.OptionalSeconds = None
    endurance_bytes: ps.OptionalCapacity = None

    @property
    def random_read_bandwidth(self) -> float:
        """Bytes/s of independent page reads: the lower of bandwidth and IOPS, at this scale."""
        return min(self.read_bandwidth, self.read_iops * self.page_size / self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlHmProfile(Profile):
    """CXL-HM: DRAM split at start into a write buffer and staging frames, in front of SSDs.

    ``demand_reserve`` bytes of staging serve demand misses only, at most ``demand_outstanding`` at
    a time; it must hold the largest object, or prefetches that are held can deadlock a miss.
    """

    kind: ClassVar[str] = "cxl-hm"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("staging_frame",), rules.whole_pages),
        Check(("write_buffer_share", "dram_capacity", "staging_frame"), rules.buffer_fits),
        Check(
            ("flush_batch", "dram_capacity", "write_buffer_share", "staging_frame"),
            rules.batch_fits,
            full_size_only=True,
        ),
        Check(
            (
                "demand_reserve",
                "dram_capacity",
                "write_buffer_share",
                "staging_frame",
                "demand_outstanding",
            ),
            rules.reserve_fits,
        ),
        Check(("cost_low", "cost_high"), rules.ordered),
    )

    ssd: Annotated[SsdProfile, Reference()]
    ssd_count: _SSDS
    dram_capacity: _FRAMES
    staging_frame: ps.Window
    write_buffer_share: Annotated[float, Number(Dimension.RATIO)]
    demand_reserve: _RESERVED_FRAMES
    demand_outstanding: ps.Count
    prefetch_depth: ps.Count
    flush_batch: ps.Window
    load_latency: ps.Seconds
    port_bandwidth: ps.Bandwidth
    cost_low: ps.OptionalDollars = None
    cost_high: ps.OptionalDollars = None

    @property
    def write_buffer_bytes(self) -> int:
        """Bytes of DRAM that buffer writes: the share, in whole frames."""
        return rules.write_buffer(self.dram_capacity, self.write_buffer_share, self.staging_frame)

    @property
    def staging_frames(self) -> int:
        """Number of frames beside the write buffer, the demand reserve included."""
        return (self.dram_capacity - self.write_buffer_bytes) // self.staging_frame

    @property
    def demand_frames(self) -> int:
        """Number of staging frames that only demand misses may take."""
        return self.demand_reserve // self.staging_frame

    @property
    def capacity(self) -> int:
        """Bytes that the device exposes: all of its SSDs."""
        return self.ssd.capacity * self.ssd_count


@dataclass(frozen=True, slots=True, kw_only=True)
class CmmHProfile(Profile):
    """CMM-H: the same parts under a transparent DRAM cache.

    The cache tracks, evicts and refills ``cache_granule`` bytes as one. ``refill_unit`` and
    ``outstanding_misses`` say how fast a granule can come from the SSDs; both are of the full-size
    device and enter as ``miss_bandwidth``. ``associativity`` 0 is fully associative. ``policy`` is
    a built-in replacement policy or a user's ``module:object``.
    """

    kind: ClassVar[str] = "cmm-h"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("cache_granule",), rules.whole_pages),
        Check(("refill_unit", "cache_granule"), rules.refill_divides, full_size_only=True),
        Check(("associativity", "dram_capacity", "cache_granule"), rules.ways_fit),
    )

    ssd: Annotated[SsdProfile, Reference()]
    ssd_count: _SSDS
    policy: ps.Name
    dram_capacity: _GRANULES
    cache_granule: ps.Window
    refill_unit: ps.FixedSize
    outstanding_misses: ps.Count
    eager_write_back: ps.Flag
    hit_latency: ps.Seconds
    port_bandwidth: ps.Bandwidth
    associativity: ps.CountOrZero = 0

    @property
    def miss_bandwidth(self) -> float:
        """Bytes/s at which misses can refill, at this scale, were the SSDs otherwise idle.

        The lowest of what the outstanding refills can carry (Little's law: outstanding x unit /
        latency), of the SSDs' IOPS, and of their bandwidth.
        """
        in_flight = self.outstanding_misses * self.refill_unit / self.ssd.read_latency
        operations = self.ssd.read_iops * self.ssd_count * self.refill_unit
        return min(
            min(in_flight, operations) / self.scale, self.ssd.read_bandwidth * self.ssd_count
        )

    @property
    def capacity(self) -> int:
        """Bytes that the device exposes: all of its SSDs."""
        return self.ssd.capacity * self.ssd_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpanderProfile(Profile):
    """DRAM at some distance: local, remote, or behind CXL; also a remote tier that is all DRAM.

    ``latency_low`` and ``latency_high`` are the ends of what sources report, for sweeps.
    """

    kind: ClassVar[str] = "expander"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("latency_low", "latency_high"), rules.ordered),
        Check(("cost_low", "cost_high"), rules.ordered),
    )

    capacity: ps.Capacity
    latency: ps.Seconds
    bandwidth: ps.Bandwidth
    latency_low: ps.OptionalSeconds = None
    latency_high: ps.OptionalSeconds = None
    cost_low: ps.OptionalDollars = None
    cost_high: ps.OptionalDollars = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile(Profile):
    """A network port or a CXL switch path: one direction of it.

    ``latency`` is of one minimal one-sided operation, ``message_overhead`` is the time that each
    message occupies the link beside its bytes, ``outstanding_reads`` is per queue pair.
    """

    kind: ClassVar[str] = "link"

    bandwidth: ps.Bandwidth
    latency: ps.Seconds
    message_overhead: ps.SecondsOrZero
    outstanding_reads: ps.Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEngineProfile(Profile):
    """Copies between host memory and a GPU, one direction; ``latency`` is per copy."""

    kind: ClassVar[str] = "copy-engine"

    bandwidth: ps.Bandwidth
    latency: ps.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedType3Profile(Profile):
    """Memory that several nodes map, without coherence between them (TraCT), and their caches.

    ``flush_latency`` is one synchronous flush of a dirty line; ``flushed_access_latency`` is an
    access together with the flush that it needs, where a source gives only that. ``node_cache`` is
    what one node keeps of the memory, in sets of ``node_cache_ways`` lines; it is not scaled, as
    lines are not. A write-back that is posted lands between ``arrival_shortest`` and
    ``arrival_longest`` later, log-uniformly, and ``posted_write_backs`` of a node can be on their
    way; ``fence_waits`` says whether its fences wait for them.
    """

    kind: ClassVar[str] = "shared-type3"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("line",), rules.power_of_two),
        Check(("latency", "flushed_access_latency"), rules.ordered),
        Check(("node_cache", "node_cache_ways", "line"), rules.sets_fit),
        Check(("posted_write_backs",), rules.power_of_two_of_them),
        Check(("arrival_shortest", "arrival_longest"), rules.ordered),
    )

    capacity: ps.Capacity
    latency: ps.Seconds
    bandwidth: ps.Bandwidth
    flush_latency: ps.Seconds
    line: ps.FixedSize
    node_cache: ps.FixedSize
    node_cache_ways: _WAYS
    posted_write_backs: _IN_FLIGHT
    arrival_shortest: ps.SecondsOrZero
    arrival_longest: _ARRIVAL
    fence_waits: ps.Flag
    flushed_access_latency: ps.OptionalSeconds = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorProfile(Profile):
    """A GPU as the engine model sees it; prefill reaches ``prefill_share`` of ``peak_compute``."""

    kind: ClassVar[str] = "accelerator"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("prefill_share_low", "prefill_share_high"), rules.ordered),
    )

    peak_compute: ps.FlopPerSecond
    prefill_share: ps.Share
    memory_capacity: ps.Capacity
    memory_bandwidth: ps.Bandwidth
    bandwidth_share: ps.OptionalShare = None
    """Of ``memory_bandwidth``, what decode reaches; None is all of it."""
    prefill_share_low: ps.OptionalShare = None
    prefill_share_high: ps.OptionalShare = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareProfile(Profile):
    """What each software step costs, charged under both clocks.

    A batch lookup of n keys costs ``lookup_call + n * lookup_key``; ``reserve``, ``commit``,
    ``register`` and ``release`` are per object; ``control_round_trip`` is one request and its
    answer between processes.
    """

    kind: ClassVar[str] = "software"

    lookup_call: ps.SecondsOrZero
    lookup_key: ps.SecondsOrZero
    reserve: ps.SecondsOrZero
    commit: ps.SecondsOrZero
    register: ps.SecondsOrZero
    prefetch_issue: ps.SecondsOrZero
    release: ps.SecondsOrZero
    control_round_trip: ps.SecondsOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngineProfile(Profile):
    """A serving engine's scheduler: what bounds a step of its continuous batching.

    KV space is ``memory_share`` of the GPU's memory without weights and ``activation_memory``.
    """

    kind: ClassVar[str] = "serving-engine"

    max_batched_tokens: ps.Count
    max_running: ps.Count
    memory_share: ps.Share
    activation_memory: ps.Window
    step_overhead: ps.SecondsOrZero


KINDS: Mapping[str, type[Profile]] = MappingProxyType(
    {
        kind.kind: kind
        for kind in (
            SsdProfile,
            CxlHmProfile,
            CmmHProfile,
            ExpanderProfile,
            LinkProfile,
            CopyEngineProfile,
            SharedType3Profile,
            AcceleratorProfile,
            SoftwareProfile,
            PricesProfile,
            ServingEngineProfile,
            LocalCacheProfile,
            ObjectStoreProfile,
            ValueServerProfile,
            RemoteVolumeProfile,
        )
    }
)
"""Every kind by the name that a profile's ``kind`` key gives it."""
