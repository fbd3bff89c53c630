"""From the profile of a shared memory to the pods that behave like it, live and under a clock.

Devices know no pods and pods know no profiles: here the numbers of a ``SharedType3Profile`` become
the shape of a live pod (real processes, wall time) or the costs of a virtual one.

Live: a load or store that misses waits for the line to pass the one pipe of the device and for its
latency; ``clflush`` waits for its line and for the flush latency; a DMA for its lines and the
latency. Virtual: the same latencies, and the bandwidth for DMA.

Units: bytes, s; ns and ps in a shape. Left out: scale (a live pod is as large as it is).
"""

from __future__ import annotations

import dataclasses

from cxlbench.devices.profile import SharedType3Profile, load_as
from cxlbench.devices.profile_schema import Problem, ProfileError
from cxlbench.emu.pod_layout import ArrivalLaw, CacheGeometry, DeviceCosts, PodShape
from cxlbench.emu.pod_ops import LINE
from cxlbench.emu.pod_virtual import PodCosts


def load_shared_memory(name_or_path: str) -> SharedType3Profile:
    """Load the profile of a memory that a pod can have.

    Raises:
        ProfileError: it is no such profile, or its lines are not those of the pod.
    """
    profile = load_as(SharedType3Profile, name_or_path)
    if profile.line != LINE:
        message = f"is {profile.line} B: the pod has lines of {LINE} B"
        raise ProfileError((Problem(f"{profile.name}.toml", "line", message),))
    return profile


def cache_of(profile: SharedType3Profile) -> CacheGeometry:
    """Return a node's cache, and how much it can have posted."""
    sets = profile.node_cache // (profile.node_cache_ways * profile.line)
    return CacheGeometry(sets=sets, ways=profile.node_cache_ways, posted=profile.posted_write_backs)


def arrival_of(profile: SharedType3Profile) -> ArrivalLaw:
    """Return when what is posted lands."""
    return ArrivalLaw("ns", _ns(profile.arrival_shortest), _ns(profile.arrival_longest))


def device_costs(profile: SharedType3Profile) -> DeviceCosts:
    """Return what the shared memory charges in wall time."""
    return DeviceCosts(
        fill_ns=_ns(profile.latency),
        flush_ns=_ns(profile.flush_latency),
        line_ps=round(profile.line / profile.bandwidth * 1e12),
    )


def on_profile(shape: PodShape, profile: SharedType3Profile) -> PodShape:
    """Return ``shape`` with the profile's caches, arrival law and costs.

    A native pod has the machine's own: its shape stays as it is.
    """
    if shape.mode == "native":
        return shape
    return dataclasses.replace(
        shape,
        cache=cache_of(profile),
        arrival=arrival_of(profile),
        costs=device_costs(profile),
        fence_arrives=profile.fence_waits,
    )


def virtual_costs(profile: SharedType3Profile) -> PodCosts:
    """Return what the operations of a pod under a clock cost."""
    return PodCosts(
        fill_s=profile.latency,
        flush_s=profile.flush_latency,
        invalidate_s=profile.flush_latency,
        bytes_per_s=profile.bandwidth,
        dma_latency_s=profile.latency,
        arrival_shortest_s=profile.arrival_shortest,
        arrival_longest_s=profile.arrival_longest,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
