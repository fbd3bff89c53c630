"""Every tier by name: how it is made, whether the GPU keeps blocks beside it, what it stands for.

A user's own tier is named ``module:object`` (docs/tiers.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from cxlbench.emu.clock import Clock
from cxlbench.emu.user_objects import UserObjectError, load_callable
from cxlbench.harness.tiers.direct import DirectTier
from cxlbench.harness.tiers.distributed_dram import DistributedDramTier
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.harness.tiers.local_dram import LocalDramTier
from cxlbench.harness.tiers.nvmeof import NvmeOfTier
from cxlbench.harness.tiers.recompute import NoTier
from cxlbench.harness.tiers.redis import LocalAndRedisTier, RedisTier
from cxlbench.harness.tiers.tier import Tier, TierMaker, TierSite
from cxlbench.harness.tiers.tract import TractTier


class UnknownTierError(ValueError):
    """There is no tier of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One system to compare."""

    name: str
    maker: TierMaker
    prefix_caching: bool = True
    """For ``ClusterSpec``: whether the GPUs keep computed blocks."""
    description: str
    source: str


def _preset(maker: TierMaker, **options: Any) -> TierMaker:
    """Return a maker whose options have other defaults."""

    def make(clock: Clock, site: TierSite) -> Tier:
        return maker(clock, dataclasses.replace(site, options={**options, **site.options}))

    return make


_ENTRIES = (
    CatalogEntry(
        name="recompute",
        maker=NoTier,
        prefix_caching=False,
        description="nothing is kept: every prompt is computed whole",
        source="HyMCache §5",
    ),
    CatalogEntry(
        name="gpu-prefix-cache",
        maker=NoTier,
        description="what the GPUs keep in their own memory",
        source="HyMCache §5; vLLM's automatic prefix caching",
    ),
    CatalogEntry(
        name="lmcache-local",
        maker=LocalDramTier,
        description="local DRAM on each server, LRU, chunks of 256 tokens",
        source="HyMCache §5 and TraCT; LMCache's local CPU backend",
    ),
    CatalogEntry(
        name="mooncake",
        maker=DistributedDramTier,
        description="the DRAM of all servers as one store: leases, watermark, transfer buffers",
        source="HyMCache §5; Mooncake Store",
    ),
    CatalogEntry(
        name="mooncake-nvmeof",
        maker=NvmeOfTier,
        description="the same store on SSDs over NVMe-oF with XFS",
        source="HyMCache §6.1.2",
    ),
    CatalogEntry(
        name="redis",
        maker=RedisTier,
        description="LMCache over Redis, without a cache in local DRAM",
        source="HyMCache §6.2.2",
    ),
    CatalogEntry(
        name="lmcache-redis",
        maker=LocalAndRedisTier,
        description="LMCache with local DRAM, and Redis behind it",
        source="HyMCache §6.2.2",
    ),
    CatalogEntry(
        name="hymcache",
        maker=HyMCacheTier,
        description="the real system on CXL-HM, with prefetch",
        source="HyMCache §3-4",
    ),
    CatalogEntry(
        name="cmm-h",
        maker=_preset(HyMCacheTier, device_kind="cmm-h", prefetch=False),
        description="the same system on a transparent CMM-H, without prefetch",
        source="HyMCache §3.3",
    ),
    CatalogEntry(
        name="tract",
        maker=TractTier,
        description="the real system on shared CXL memory; KV is handed over through it",
        source="TraCT",
    ),
    CatalogEntry(
        name="nixl",
        maker=DirectTier,
        prefix_caching=False,
        description="no cache, only a direct transfer from prefill to decode",
        source="TraCT; NIXL with UCX",
    ),
)
CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every built-in tier by name."""

_PARTS = ("connector", "counters", "at_rest", "start", "quiesce", "close", "name", "pipes")


def tier(name: str) -> CatalogEntry:
    """Return a tier by name, or a user's own by ``module:object``.

    Raises:
        UnknownTierError: there is none; the message has the nearest names.
        UserObjectError: ``module:object`` cannot be loaded; later, it fails or makes no tier.
    """
    if ":" in name:
        return _of_the_user(name)
    entry = CATALOG.get(name)
    if entry is None:
        near = get_close_matches(name, CATALOG, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOG)}"
        raise UnknownTierError(f"there is no tier {name!r}; {hint}")
    return entry


def _of_the_user(spec: str) -> CatalogEntry:
    make = load_callable(spec, what="tier")
    called = f"{spec.partition(':')[2]}(clock, site)"

    @functools.wraps(make)
    def maker(clock: Clock, site: TierSite) -> Tier:
        try:
            made: Tier = make(clock, site)
        except (AttributeError, LookupError, NameError, TypeError) as error:
            raise UserObjectError(
                f"tier {spec!r}: {called} failed with {type(error).__name__}: {error} "
                "(docs/tiers.md; cxlbench --debug shows where)"
            ) from error
        missing = [part for part in _PARTS if not hasattr(made, part)]
        if missing:
            raise UserObjectError(
                f"tier {spec!r}: {called} returned {made!r}, which is no tier: it has no "
                f"{', '.join(missing)} (harness/tiers/tier.py)"
            )
        return made

    return CatalogEntry(name=spec, maker=maker, description="a tier of your own", source=spec)
