"""The kinds of the systems that HyMCache and TraCT are compared with: their defaults and costs.

LMCache's cache in local DRAM, a distributed store in DRAM (Mooncake), a server of values over TCP
(Redis), and block volumes over NVMe-oF under a file system. Attributes are in base units: bytes,
bytes/s, s. What they mean is modelled in ``harness/tiers``.

Left out: everything that those systems do beside keeping KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cxlbench.devices import profile_schema as ps
from cxlbench.devices.profile_schema import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCacheProfile(Profile):
    """A cache in the DRAM of each server, in whole chunks of tokens.

    A lookup costs ``lookup_call`` and ``lookup_chunk`` for every chunk that it probes, a store
    ``store_chunk`` for every chunk. ``get_timeout`` is how long one remote read may take, where
    there is a remote store below.
    """

    kind: ClassVar[str] = "local-cache"

    capacity: ps.Capacity
    chunk_tokens: ps.Count
    lookup_call: ps.SecondsOrZero
    lookup_chunk: ps.SecondsOrZero
    store_chunk: ps.SecondsOrZero
    get_timeout: ps.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreProfile(Profile):
    """A store of objects in segments on the servers, with a master that leases and evicts.

    Above ``eviction_high_watermark`` of the space, or after an allocation failed, the master evicts
    ``eviction_ratio`` of its objects, or what is above the watermark and that share more, every
    ``eviction_interval``. A request to it costs ``master_call`` and ``master_key`` for each key.
    ``transfer_buffer`` is the host DRAM of a server through which all its transfers go; a put waits
    ``buffer_wait`` for room in it, and is given up after ``put_timeout``; a get after
    ``get_timeout``.
    """

    kind: ClassVar[str] = "object-store"

    capacity: ps.Capacity
    transfer_buffer: ps.Capacity
    lease: ps.Seconds
    eviction_high_watermark: ps.Share
    eviction_ratio: ps.Share
    eviction_interval: ps.Seconds
    buffer_wait: ps.SecondsOrZero
    put_timeout: ps.Seconds
    get_timeout: ps.Seconds
    master_call: ps.SecondsOrZero
    master_key: ps.SecondsOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueServerProfile(Profile):
    """A single-threaded server of keys and values over TCP (Redis).

    Its thread moves ``get_bandwidth`` out and ``set_bandwidth`` in, and needs ``command`` for each
    command beside that. When ``capacity`` is used up, it evicts the longest idle of
    ``eviction_samples`` keys drawn at random and of a pool of ``eviction_pool`` candidates kept
    from earlier draws. Values above ``largest_value`` are refused. ``client_buffer``
    is the host DRAM of a server through which its remote reads and writes go.
    """

    kind: ClassVar[str] = "value-server"

    capacity: ps.Capacity
    get_bandwidth: ps.Bandwidth
    set_bandwidth: ps.Bandwidth
    command: ps.SecondsOrZero
    round_trip: ps.SecondsOrZero
    eviction_samples: ps.Count
    eviction_pool: ps.Count
    largest_value: ps.Window
    client_buffer: ps.Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteVolumeProfile(Profile):
    """A block volume over NVMe-oF on shared SSDs, one a server, with a file system on it.

    ``raw_bandwidth`` is what a server reaches on the block device, ``file_bandwidth`` through the
    file system; ``file_operation`` is opening, mapping and closing one file.
    """

    kind: ClassVar[str] = "remote-volume"

    raw_bandwidth: ps.Bandwidth
    file_bandwidth: ps.Bandwidth
    file_operation: ps.SecondsOrZero
