"""HyMCache as a vLLM connector: the whole tier embedded in the engine's process.

Serve with ``--kv-transfer-config``::

    {"kv_connector": "HyMCacheConnector", "kv_connector_module_path": "cxlbench.hymcache.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {...}}

Besides the keys of ``kv.vllm_adapter``, the extra configuration may name in ``tier`` the function
that builds the tier, as ``module:function``; it is called as ``function(settings, clock)`` with the
keys that are neither the adapter's nor ``tier`` itself, and returns a ``kv.connector.Connector``.
By default it is HyMCache over an emulated CXL-HM. The devices are named by a string because this
package knows them through protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from cxlbench.emu.clock import Clock
from cxlbench.emu.user_objects import UserObjectError, load_callable
from cxlbench.kv.connector import Connector
from cxlbench.kv.embedded import EmbeddedTier
from cxlbench.kv.shared_tiers import attach, detach
from cxlbench.kv.vllm_adapter import VllmTierConnector

DEFAULT_TIER = "cxlbench.harness.embedded_tier:build"

TierBuilder = Callable[[Mapping[str, object], Clock], Connector]


class TierNotFoundError(ValueError):
    """The function that should build the tier is not there."""


class HyMCacheConnector(VllmTierConnector):
    """The connector class that vLLM is given by name."""

    def attach_tier(self, tier_id: str, settings: Mapping[str, object]) -> EmbeddedTier:
        """Return this process's tier of that id, built on first use."""
        inner = {"block_bytes": self.block_bytes, **settings}
        builder = find_builder(str(inner.pop("tier", DEFAULT_TIER)))
        return attach(tier_id, settings, lambda clock: builder(inner, clock))

    def detach_tier(self, tier_id: str) -> None:
        """Give the tier back; the last one to do so closes it."""
        detach(tier_id)


def find_builder(name: str) -> TierBuilder:
    """Return the function that ``module:function`` names.

    Raises:
        TierNotFoundError: there is no such module or function.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise TierNotFoundError(f"a tier is named as module:function, not {name!r}")
    try:
        return cast(TierBuilder, load_callable(name, what="tier"))
    except UserObjectError as error:
        raise TierNotFoundError(f"there is no tier {name!r}: {error}") from error
