"""No cache, only a direct transfer from prefill to decode servers (TraCT's baseline NIXL/UCX).

The transfer is the cluster's hand-over over a link (``harness/serve/handover.py``). That is what a
NIXL-like library does: it moves KV between two GPUs, one-sided, and keeps nothing. What the GPU
does not hold is computed again.
"""

from __future__ import annotations

from cxlbench.harness.tiers.recompute import NoTier


class DirectTier(NoTier):
    """A tier that no server has; the name says how the KV is handed over."""

    name = "nixl"
